"""The only place that decides whether a save has room on this node, and what goes for it.

Two rules stand above all limits: what may become durable is never evicted, and neither is the
newest checkpoint of the node nor its newest durable one. A run that has resumed from a checkpoint
finds it here until a newer one is durable: it was the newest durable one, or is not durable at all
and was published by an earlier launch.

With `supersede` a save that lacks room gives up the flush of older checkpoints, which may be
evicted from then on: never of the newest that is published and sound, never of a kept one. What a
save wrote through lets nothing superseded go before it is durable: until then it loads nowhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the local tier holds of one checkpoint."""

    checkpoint_id: str
    attempt: str
    """Empty for shard files whose manifest lies on another node."""
    sequence: int
    """Order of checkpoints; where the manifest lies on another node, the time of the last seal."""
    bytes_held: int
    """What an eviction would free."""
    durable: bool
    """Its commit was read back from the durable tier."""
    pending: bool = False
    """The flusher is at it or will be: it may become durable."""
    keep: bool = False
    """Somebody wants the local copy, whatever else is so."""
    launch: str = ""
    """The start of the job that published it."""
    coordinated: bool = False
    """This node published it, and decides about its flush."""
    given_up: bool = False
    """Its flush is given up; while it is pending, other nodes may not know of that."""
    whole: bool = True
    """Nothing of it was written through, as far as this node can know; what was loads once it is
    durable only."""

    @property
    def superseded(self) -> bool:
        """Tell whether it will not become durable because its flush was given up."""
        return self.given_up and not self.pending and not self.durable


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is and how much of it may be taken."""

    pending_max: int
    """Checkpoints that may wait for the flusher, the one to be saved included."""
    bytes_max: int | None
    """Bytes that the run may take on this node, None for no bound."""
    bytes_held: int
    """Bytes that it takes, with all that cannot be evicted."""
    bytes_free: int
    """Of the file system."""
    bytes_reserve: int
    """Of these, how many are to stay free."""


class Action(Enum):
    """What a save does."""

    ADMIT = "admit"
    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A local copy that goes, and why."""

    checkpoint_id: str
    attempt: str
    bytes_held: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a save does, what goes before, and why."""

    action: Action
    reason: str
    evict: tuple[Eviction, ...] = ()
    give_up: tuple[Held, ...] = ()
    """Whose flush is given up; the save then asks again."""


def plan_save(held: Sequence[Held], room: Room, bytes_needed: int, on_full: str) -> Decision:
    """Decide whether a save may begin.

    Waiting is chosen only where it can help. A save that would not fit on the disk whatever is
    evicted is let through: its size was estimated, and the disk tells better.

    Args:
        held: Every checkpoint on this node but an older save of the same id.
        room: Bounds and what is taken.
        bytes_needed: What the save will take on this node, as far as that is known.
        on_full: `block`, `fail` or `supersede`, which waits where nothing can be given up.

    Returns:
        The decision; it evicts only where the save is admitted, and gives up only where it waits.
    """
    stuck = Action.FAIL if on_full == "fail" else Action.WAIT
    may_give_up = _may_give_up(held) if on_full == "supersede" else []
    pending = sum(one.pending for one in held)
    if pending >= room.pending_max:
        reason = f"{pending} checkpoints wait for the flusher, of at most {room.pending_max}"
        going = sum(one.pending and one.given_up for one in held)
        count = max(0, pending - going - room.pending_max + 1)
        return Decision(action=stuck, reason=reason, give_up=tuple(may_give_up[:count]))
    missing = _missing(room, bytes_needed)
    candidates = _evictable(held)
    evicted = _oldest(candidates, missing, "the next checkpoint needs the room")
    if _freed(evicted) >= missing:
        return Decision(action=Action.ADMIT, reason="there is room", evict=evicted)
    reason = (
        f"{missing} bytes are missing and {_freed(candidates)} can be evicted:"
        f" {bytes_needed} needed, {_bounds(room)}"
    )
    later = _freed(_evictable_later(held))
    if later >= missing:
        give_up = _enough(held, may_give_up, missing)
        return Decision(action=stuck, reason=reason, give_up=give_up)
    if _over_bytes_max(room, bytes_needed) > later:
        return Decision(action=Action.FAIL, reason=reason)
    return Decision(
        action=Action.ADMIT,
        reason=f"nothing on this node can make the room, the disk will tell: {reason}",
    )


def plan_trim(held: Sequence[Held], room: Room) -> tuple[Eviction, ...]:
    """Return what to evict so that another checkpoint like the newest one has room at once."""
    newest = max(held, key=lambda one: one.sequence, default=None)
    if newest is None:
        return ()
    missing = _missing(room, newest.bytes_held)
    # What is superseded has no other copy: it goes when a save is there that needs the room.
    return _oldest(_durable(held), missing, "the next one like the newest needs the room")


def plan_freeing(held: Sequence[Held], bytes_wanted: int) -> tuple[Eviction, ...]:
    """Return what to evict where the disk said that it is full, whatever it says is free."""
    return _oldest(_evictable(held), bytes_wanted, "the disk is full")


def _evictable(held: Sequence[Held]) -> list[Held]:
    """Return what may go at all: what has another copy first, and each oldest first."""
    return [*_durable(held), *_superseded(held)]


def _durable(held: Sequence[Held]) -> list[Held]:
    newest = max((one.sequence for one in held), default=0)
    newest_durable = _newest_durable(held)
    return _by_age(
        one
        for one in held
        if one.durable
        and one.bytes_held
        and not one.keep
        and one.sequence < min(newest, newest_durable)
    )


def _superseded(held: Sequence[Held]) -> list[Held]:
    here = [one for one in held if one.durable or one.whole]
    newest, newest_durable = _newest_sound(here), _newest_durable(held)
    return _by_age(
        one
        for one in held
        if one.superseded
        and one.bytes_held
        and not one.keep
        and newest is not None
        and one.sequence < newest.sequence
        # One of an earlier launch may be what this one has resumed from.
        and (one.sequence < newest_durable or one.launch == newest.launch)
    )


def _may_give_up(held: Sequence[Held]) -> list[Held]:
    newest = _newest_sound(held)
    return _by_age(
        one
        for one in held
        if one.pending
        and one.attempt
        and one.coordinated
        and not one.given_up
        and not one.durable
        and not one.keep
        and newest is not None
        and one.sequence < newest.sequence
    )


def _enough(
    held: Sequence[Held], candidates: Sequence[Held], bytes_wanted: int
) -> tuple[Held, ...]:
    """Return of whom to give up the flush, so that evictions free enough; none if they cannot.

    Those that are given up already and wait for other nodes count first.
    """
    chosen: list[Held] = []
    after = _evictable(_once_given_up(held, chosen))
    for one in candidates:
        if _freed(after) >= bytes_wanted:
            break
        more = _evictable(_once_given_up(held, [*chosen, one]))
        if _freed(more) > _freed(after):
            chosen.append(one)
            after = more
    return tuple(chosen) if _freed(after) >= bytes_wanted else ()


def _once_given_up(held: Sequence[Held], chosen: Sequence[Held]) -> list[Held]:
    """Return what will be here once all that is given up counts as such on all nodes."""
    return [
        replace(one, pending=False, given_up=True) if one.given_up or one in chosen else one
        for one in held
    ]


def _newest_sound(held: Sequence[Held]) -> Held | None:
    """Return the newest published checkpoint that is durable or may become so."""
    sound = [one for one in held if one.attempt and _is_sound(one)]
    return max(sound, key=lambda one: one.sequence, default=None)


def _is_sound(one: Held) -> bool:
    return one.durable or (one.pending and not one.given_up)


def _newest_durable(held: Sequence[Held]) -> int:
    return max((one.sequence for one in held if one.durable), default=0)


def _by_age(some: Iterable[Held]) -> list[Held]:
    return sorted(some, key=lambda one: one.sequence)


def _evictable_later(held: Sequence[Held]) -> list[Held]:
    """Return what may go once the flusher is done with all that waits."""
    done = [replace(one, durable=True) if one.pending else one for one in held]
    return _evictable(done)


def _missing(room: Room, bytes_needed: int) -> int:
    on_disk = bytes_needed + room.bytes_reserve - room.bytes_free
    return max(0, on_disk, _over_bytes_max(room, bytes_needed))


def _over_bytes_max(room: Room, bytes_needed: int) -> int:
    if room.bytes_max is None:
        return 0
    return max(0, room.bytes_held + bytes_needed - room.bytes_max)


def _oldest(candidates: Sequence[Held], bytes_wanted: int, reason: str) -> tuple[Eviction, ...]:
    chosen: list[Eviction] = []
    freed = 0
    for one in candidates:
        if freed >= bytes_wanted:
            break
        chosen.append(_eviction(one, reason))
        freed += one.bytes_held
    return tuple(chosen)


def _eviction(one: Held, reason: str) -> Eviction:
    return Eviction(
        checkpoint_id=one.checkpoint_id,
        attempt=one.attempt,
        bytes_held=one.bytes_held,
        reason=f"{'durable' if one.durable else 'superseded'}, and {reason}",
    )


def _freed(some: Sequence[Held] | Sequence[Eviction]) -> int:
    return sum(one.bytes_held for one in some)


def _bounds(room: Room) -> str:
    text = f"{room.bytes_free} free, {room.bytes_reserve} of them in reserve"
    if room.bytes_max is not None:
        text += f", {room.bytes_held} of at most {room.bytes_max} taken by the run"
    return text
