"""Room on the local tier: counts what a run holds on this node, waits for room, evicts.

`policy.backpressure` decides. An eviction deletes by exact key what a commit names whose copy lies
here, and that copy was read back from the durable tier (I6), or what a note names whose flush was
given up. First go the published manifests, oldest first, then the shard files: whatever a crash
leaves claims nothing, is still known to be durable or superseded, and goes with the next eviction.
Copies of records and notes stay: they say what the id is.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dcp_tiered import metrics
from dcp_tiered.config import Limits
from dcp_tiered.errors import (
    AbsentError,
    BackpressureError,
    TieredError,
    UnavailableError,
    from_os_error,
)
from dcp_tiered.format import layout
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.metrics import Sample
from dcp_tiered.policy.backpressure import (
    Action,
    Decision,
    Eviction,
    Held,
    Room,
    plan_freeing,
    plan_save,
    plan_trim,
)
from dcp_tiered.services import lock, run_directory, superseded_notes
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_contents import Found, LocalContents
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.services.progress import Report, read_reports, restore_error

_log = logging.getLogger(__name__)
_GIVEN_UP = ("conflict", "damaged", "incomplete")
"""Reports of the flusher about what waits for nothing any more, or for a node that is lost."""
_LOCK_S_MAX = 5.0
_TRIM_S = 1.0
_RESERVE_SHARE = 20
_WANTED_S = 5.0
"""For how long a save that waits is believed to wait on after it said so."""


class LocalSpace:
    """The local tier of one run on this node.

    Args:
        catalog: Of the run.
        local: The run's directory.
        limits: Bounds.
        write_through: Whether a save may write through, here and on other nodes.
    """

    def __init__(
        self, catalog: Catalog, local: LocalTier, limits: Limits, *, write_through: bool = False
    ) -> None:
        self._write_through = write_through
        self._catalog = catalog
        self._local = local
        self._limits = limits
        self._node: str | None = None
        self._contents = LocalContents(catalog, local)
        self._found: dict[str, Found] = {}
        self._looking = threading.Lock()
        self._trim_at = 0.0
        self.waited_s = 0.0
        """Time that saves waited here."""
        self.waits = 0
        self.given_up = 0
        """Checkpoints whose flush was given up here."""
        self.evicted_bytes = 0
        self.held_bytes = 0
        """Bytes of the run on this node at the last look."""

    def expected_bytes(self, bytes_planned: int) -> int:
        """Return what a save takes here, as far as can be told before DCP has planned it.

        Ranks plan replicated items as often as there are ranks, so a plan is an upper bound; that
        a node takes what it took last time is the better guess. The first save takes what it takes.
        """
        self._look()
        newest = max(self._found.values(), key=lambda one: one.sequence, default=None)
        return 0 if newest is None else min(newest.bytes_saved, bytes_planned)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this object."""
        yield metrics.BACKPRESSURE, {}, self.waited_s
        yield metrics.BACKPRESSURE_WAITS, {}, self.waits
        yield metrics.SUPERSEDED, {}, self.given_up
        yield metrics.EVICTED_BYTES, {}, self.evicted_bytes
        yield metrics.LOCAL_BYTES, {}, self.held_bytes

    def admit(
        self,
        checkpoint_id: str,
        bytes_needed: int,
        on_full: str,
        keep_flusher: Callable[[], None],
    ) -> None:
        """Make room for a save, waiting for the flusher if that is wanted.

        Args:
            checkpoint_id: What is to be saved.
            bytes_needed: What that will take on this node.
            on_full: `block`, `fail` or `supersede`.
            keep_flusher: Called while waiting, starts a flusher if none runs.

        Raises:
            BackpressureError: There is no room, after `backpressure_wait_s` where it waits for it.
        """
        begun = time.monotonic()
        self._node = run_directory.node_of(self._local)
        is_told = False
        decision = self._decide(checkpoint_id, bytes_needed, on_full)
        while decision.action is Action.WAIT:
            left_s = begun + self._limits.backpressure_wait_s - time.monotonic()
            if left_s <= 0:
                break
            if not decision.give_up:  # what lies on this node alone has made room at once
                if not is_told:
                    _log.warning("saving %s waits for room: %s", checkpoint_id, decision.reason)
                    self.waits += 1
                    is_told = True
                keep_flusher()
                self._pause(left_s)
            decision = self._decide(checkpoint_id, bytes_needed, on_full)
        if decision.action is not Action.ADMIT:
            raise self._full(checkpoint_id, decision, time.monotonic() - begun)

    def _pause(self, left_s: float) -> None:
        with contextlib.suppress(OSError):  # the flusher looks by itself, only later
            (self._local.root / layout.WANTED_FILE).touch()
        pause_s = min(self._limits.poll_s, left_s)
        time.sleep(pause_s)
        self.waited_s += pause_s

    def is_wanted(self) -> bool:
        """Tell whether a save waits for room on this node."""
        try:
            said = (self._local.root / layout.WANTED_FILE).stat().st_mtime
        except OSError:
            return False
        return abs(time.time() - said) < _WANTED_S

    def keep(self, checkpoint_id: str) -> None:
        """See that this node's copy of a checkpoint is neither evicted nor superseded.

        Raises:
            AbsentError: Nothing of it is here.
            SupersededError: Its flush was given up before.
            UnavailableError: Another process is evicting for too long.
        """
        path = str(self._local.root / checkpoint_id)
        with self._locked() as mine:  # no save gives it up between the look and the note
            if not mine:
                raise UnavailableError(
                    "another process is evicting for too long", "local", path, "Try again."
                )
            self._look()
            found = self._found.get(checkpoint_id)
            if found is None or not (found.waits is not None or found.evictable):
                raise AbsentError(
                    "this node has no copy that could be kept",
                    "local",
                    path,
                    "Call it after the save, on a rank of each node that took part.",
                )
            if found.given_up:
                raise superseded_notes.error_of(checkpoint_id, "before it was to be kept")
            superseded_notes.keep(self._local, checkpoint_id)

    def free(self, bytes_wanted: int) -> bool:
        """Evict for a write that found the disk full; tell whether anything went."""
        with self._locked() as mine:
            return mine and self._evict(plan_freeing(self._held(), bytes_wanted)) > 0

    def trim(self) -> None:
        """Evict what the next checkpoint will need the room of; errors are logged only.

        Cheap to call often: it looks once a second.
        """
        if time.monotonic() < self._trim_at:
            return
        self._trim_at = time.monotonic() + _TRIM_S
        try:
            if plan_trim(self._held(), self._room()):
                with self._locked() as mine:
                    self._evict(plan_trim(self._held(), self._room()) if mine else ())
        except TieredError as exc:
            _log.warning("cannot evict: %s", exc)

    def _decide(self, checkpoint_id: str, bytes_needed: int, on_full: str) -> Decision:
        def decide() -> Decision:
            held, room = self._held(but=checkpoint_id), self._room()
            return plan_save(held, room, bytes_needed, on_full)

        decision = decide()
        if not (decision.evict or decision.give_up):
            return decision
        with self._locked() as mine:
            if not mine:
                stuck = Action.FAIL if on_full == "fail" else Action.WAIT
                return Decision(action=stuck, reason="another process is evicting for too long")
            # Once more: another rank of this node may have made the room meanwhile.
            decision = decide()
            self._give_up(decision.give_up, f"{checkpoint_id} needs room: {decision.reason}")
            self._evict(decision.evict)
        return decision

    def _give_up(self, some: Sequence[Held], reason: str) -> None:
        """Note that the flusher is to end the flush of checkpoints."""
        for one in some:
            published = self._catalog.published(one.checkpoint_id)
            if published is None or published.head.attempt != one.attempt:
                continue  # saved again since we looked
            superseded_notes.write(self._local, published.head, self._node, reason)
            self._contents.forget(one.checkpoint_id)
            self.given_up += 1
            _log.warning(
                "superseded: %s, attempt %s, %d bytes, will not be durable: %s",
                one.checkpoint_id,
                one.attempt,
                one.bytes_held,
                reason,
            )

    def _room(self) -> Room:
        disk, share = disk_of(self._local, self._limits), self._limits.local_share_max
        bounds = [
            self._limits.local_bytes_max,
            None if share is None else int(share * disk.size),
        ]
        return Room(
            pending_max=self._limits.pending_checkpoints_max,
            bytes_max=min((bound for bound in bounds if bound is not None), default=None),
            bytes_held=self.held_bytes,
            bytes_free=disk.free,
            bytes_reserve=disk.reserve,
        )

    def _held(self, but: str | None = None) -> list[Held]:
        """Return what is here of every checkpoint; an older save of `but` makes way for the new."""
        self._look()
        reports = read_reports(self._local.root)
        return [
            Held(
                checkpoint_id=name,
                attempt=one.attempt,
                sequence=one.sequence,
                bytes_held=one.bytes_evictable(),
                durable=one.durable,
                pending=name != but and _is_pending(one, reports.get(name)),
                keep=name == but or one.keep,
                launch=one.launch,
                coordinated=bool(one.node) and one.node == self._node,
                given_up=one.given_up,
                whole=one.bytes_saved == one.bytes_all
                and not (self._write_through and one.of_several),
            )
            for name, one in self._found.items()
        ]

    def _look(self) -> None:
        with self._looking:  # two saves of one writer may overlap, in threads of their own
            self._found = dict(self._contents.look())
        self.held_bytes = sum(one.bytes_all for one in self._found.values())

    def _evict(self, evictions: Sequence[Eviction]) -> int:
        """Remove local copies as they were found under the lock; return the bytes that went."""
        freed = 0
        for one in evictions:
            files = self._found[one.checkpoint_id].evictable
            self._contents.forget(one.checkpoint_id)
            for name, size in files:
                freed += size if self._remove(one.checkpoint_id, name) else 0
            _log.info(
                "evicted %s, attempt %s, %d bytes: %s; removed %s",
                one.checkpoint_id,
                one.attempt,
                one.bytes_held,
                one.reason,
                ", ".join(name for name, _ in files),
            )
        self.evicted_bytes += freed
        return freed

    def _remove(self, checkpoint_id: str, name: str) -> bool:
        path = self._local.root / layout.key(checkpoint_id, name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise from_os_error(exc, "local", str(path), "evict a file") from exc
        return True

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the run's directory against other evictors; False where one holds it for too long.

        Nothing is evicted without: of two evictors, the slower could take the manifest of a new
        save for the one of the same name that it had seen.
        """
        path = self._local.root
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise from_os_error(exc, "local", str(path), "lock the run's directory") from exc
        try:
            deadline = time.monotonic() + _LOCK_S_MAX
            while not (mine := _try_lock(fd)) and time.monotonic() < deadline:
                time.sleep(self._limits.poll_s)
            yield mine
        finally:
            os.close(fd)

    def _full(self, checkpoint_id: str, decision: Decision, waited_s: float) -> BackpressureError:
        errors = [restore_error(one.error) for one in read_reports(self._local.root).values()]
        met = next((f"; the flusher met: {error.message}" for error in errors if error), "")
        waited = f" after {waited_s:.0f} s" if waited_s >= 1 else ""
        if FlusherLock(self._local.root).holder() is None:
            return BackpressureError(
                f"no room for {checkpoint_id}{waited}: {decision.reason}; {lock.MISSING}{met}",
                "local",
                str(self._local.root),
                lock.MISSING_HINT,
            )
        return BackpressureError(
            f"no room for {checkpoint_id}{waited}: {decision.reason}{met}",
            "local",
            str(self._local.root),
            "Nothing is lost: what is here goes on to the durable tier. See 'dcp-tiered status"
            " LOCAL' for what keeps it; save less often, or raise limits such as"
            " pending_checkpoints_max and local_bytes_max.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Bytes of the file system that a local tier is on."""

    size: int
    free: int
    reserve: int
    """Of those that are free, how many are to stay so."""


def disk_of(local: LocalTier, limits: Limits) -> Disk:
    """Return what the very mount has that a local tier is on.

    Raises:
        InvalidError: It is not there.
        UnavailableError: It cannot be asked.
    """
    try:
        found = os.statvfs(local.root if local.root.exists() else local.root.parent)
    except OSError as exc:
        path = str(local.root)
        raise from_os_error(exc, "local", path, "count the bytes that are free") from exc
    size = found.f_blocks * found.f_frsize
    return Disk(
        size=size,
        free=found.f_bavail * found.f_frsize,
        reserve=min(limits.local_reserve_bytes, size // _RESERVE_SHARE),
    )


def _is_pending(found: Found, report: Report | None) -> bool:
    if found.waits is None:
        return False
    given_up = report is not None and report.state in _GIVEN_UP and report.attempt == found.waits
    return not given_up


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
