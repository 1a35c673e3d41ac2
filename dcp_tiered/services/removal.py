"""Remove checkpoints from the durable tier: withdraw their commits, then delete what is theirs.

Once the record is there, no reader takes the id for a checkpoint, whatever is still there of it
(O047). All state is in the store, so whoever is killed in between leaves a job that the same call
finishes, by anybody. Records stay: flushers of nodes that still hold a copy learn from them that it
is not to be brought again.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_tiered.errors import (
    AbsentError,
    CorruptError,
    IncompleteError,
    InvalidError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import MANIFEST_BYTES_MAX, Head, decode_head
from dcp_tiered.format.records import Commit, Expired, Record, state_of
from dcp_tiered.interfaces import DurableTier, ObjectInfo
from dcp_tiered.policy.removal import Going, plan_removal
from dcp_tiered.services import pack_footer
from dcp_tiered.services.catalog import Catalog, parallel

_log = logging.getLogger(__name__)
_PACKS = "packs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What goes of one id, and what does not."""

    checkpoint_id: str
    stages: tuple[tuple[ObjectInfo, ...], ...]
    """Objects; each stage goes before the next one begins."""
    stay: tuple[str, ...]
    """Keys below the id that are no records, and that a save may still want."""

    def objects(self) -> list[ObjectInfo]:
        """Return what goes, in order."""
        return [info for stage in self.stages for info in stage]


class Remover:
    """Removes checkpoints of one run.

    Args:
        durable: Of the run.
    """

    def __init__(self, durable: DurableTier) -> None:
        self._durable = durable
        self._catalog = Catalog(None, durable)

    def choose(self, checkpoint_ids: Iterable[str]) -> dict[str, Commit | Expired]:
        """Return what each id is, once all of them may be removed; nothing is changed.

        Raises:
            AbsentError: Nothing lies below one of them.
            IncompleteError: One was never committed.
            InvalidError: One is the newest complete checkpoint of the run (I7).
        """
        states = self._catalog.states()
        newest = self._newest(states)
        return {name: _removable(name, states, newest) for name in checkpoint_ids}

    def plan(self, checkpoint_id: str, withdrawing: Commit | None = None) -> Removal:
        """Return what goes of an id.

        Args:
            checkpoint_id: The id.
            withdrawing: A commit that is looked at as if it were withdrawn already.
        """
        keys = self._durable.list_keys(checkpoint_id)
        names = sorted(key.partition("/")[2] for key in keys)
        log = self._catalog.records(checkpoint_id)
        highest, state = state_of(log)
        if withdrawing is not None and state == withdrawing:
            log[highest + 1] = Expired(checkpoint_id=checkpoint_id)
        going = self._going(checkpoint_id, names, log)
        known = _known(checkpoint_id, log)

        def info(name: str) -> ObjectInfo:
            key = layout.key(checkpoint_id, name)
            with contextlib.suppress(AbsentError):  # somebody else removes it as well
                return self._durable.head(key) if name not in known else known[name]
            return ObjectInfo(key=key, length=0)

        return Removal(
            checkpoint_id=checkpoint_id,
            stages=tuple(tuple(parallel(info, list(stage))) for stage in going.stages),
            stay=tuple(f"{checkpoint_id}/{name}" for name in going.stay),
        )

    def withdraw(self, chosen: Mapping[str, Commit | Expired]) -> None:
        """Withdraw every commit that is not withdrawn yet, before anything is deleted.

        Raises:
            ConflictError: An id was saved again meanwhile.
        """
        for state in chosen.values():
            if isinstance(state, Commit):
                self._catalog.expire(state)

    def delete(self, removal: Removal) -> None:
        """Delete what was planned after the id was withdrawn, and abort its open uploads.

        Raises:
            InvalidError: This user may not delete.
        """
        for stage in removal.stages:
            parallel(self._durable.delete, [info.key for info in stage])
        self._durable.drop_uploads(layout.key(removal.checkpoint_id, _PACKS))

    def _newest(self, states: Mapping[str, Commit | Expired | None]) -> set[str]:
        """Return the newest commit, and the newest of which all objects are there."""
        commits = [state for state in states.values() if isinstance(state, Commit)]
        kept: set[str] = set()
        for commit in sorted(commits, key=lambda one: one.sequence, reverse=True):
            whole = self._is_whole(commit)
            if whole or not kept:
                kept.add(commit.checkpoint_id)
            if whole:
                break
        return kept

    def _is_whole(self, commit: Commit) -> bool:
        keys = {key.partition("/")[2] for key in self._durable.list_keys(commit.checkpoint_id)}
        packs = {pack.name for pack in commit.packs}
        return keys >= packs | {layout.manifest_name(commit.attempt)}

    def _going(self, checkpoint_id: str, names: Sequence[str], log: Mapping[int, Record]) -> Going:
        """Look into all packs and into the manifests that no commit names, and decide."""
        committed = {record.attempt for record in log.values() if isinstance(record, Commit)}
        attempts = [a for name in names if (a := layout.manifest_attempt(name)) not in committed]
        heads = parallel(
            lambda attempt: self._head(checkpoint_id, attempt),
            [attempt for attempt in attempts if attempt is not None],
        )
        packs = [name for name in names if layout.pack_node(name) is not None]
        inside = parallel(lambda name: self._shards(checkpoint_id, name), packs)
        found = [head for head in heads if head is not None]
        return plan_removal(names, log, found, dict(zip(packs, inside, strict=True)))

    def _head(self, checkpoint_id: str, attempt: str) -> Head | None:
        """Return the head of a manifest, None for one that cannot be read."""
        key = layout.key(checkpoint_id, layout.manifest_name(attempt))
        try:
            head = decode_head(self._durable.get(key, MANIFEST_BYTES_MAX))
        except (AbsentError, CorruptError) as exc:
            _log.warning("leaving a manifest that cannot be read: %s", exc)
            return None
        return head if (head.checkpoint_id, head.attempt) == (checkpoint_id, attempt) else None

    def _shards(self, checkpoint_id: str, name: str) -> tuple[str, ...]:
        """Return the shard files in a pack, none for one that cannot be read."""
        key = layout.key(checkpoint_id, name)
        try:
            pack, _ = pack_footer.read(self._durable, key, name, self._durable.head(key).length)
        except (AbsentError, CorruptError) as exc:
            _log.warning("cannot read what is in a pack: %s", exc)
            return ()
        return tuple(shard.name for shard in pack.shards)


def _removable(
    checkpoint_id: str, states: Mapping[str, Commit | Expired | None], newest: set[str]
) -> Commit | Expired:
    if checkpoint_id not in states:
        raise AbsentError(
            f"no checkpoint {checkpoint_id!r}",
            "durable",
            checkpoint_id,
            "'dcp-tiered ls URL' lists what there is.",
        )
    state = states[checkpoint_id]
    if state is None:
        raise IncompleteError(
            f"{checkpoint_id!r} was never committed, and a flusher may still bring it",
            "durable",
            checkpoint_id,
            "'dcp-tiered status LOCAL' on the nodes that saved it tells; once it is durable it can"
            " be removed.",
        )
    if checkpoint_id in newest:
        raise InvalidError(
            f"{checkpoint_id!r} is the newest complete checkpoint of the run, which is never"
            " removed",
            "durable",
            checkpoint_id,
            "Remove it once a newer one is durable; 'dcp-tiered ls URL' shows which are.",
        )
    return state


def _known(checkpoint_id: str, log: Mapping[int, Record]) -> dict[str, ObjectInfo]:
    """Return objects by name whose length the records tell."""
    lengths: dict[str, int] = {}
    for commit in log.values():
        if isinstance(commit, Commit):
            lengths |= {pack.name: pack.length for pack in commit.packs}
            lengths[layout.manifest_name(commit.attempt)] = commit.manifest_length
    return {
        name: ObjectInfo(key=layout.key(checkpoint_id, name), length=length)
        for name, length in lengths.items()
    }
