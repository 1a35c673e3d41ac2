"""Local to durable, in the background: manifest, packs, commit, for one run on one node.

Its only state is what lies on the two tiers, so it may be killed at any instant and the next one
goes on (I11). Nothing here decides what a checkpoint is: the catalog does.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from dcp_tiered import metrics
from dcp_tiered.config import Limits
from dcp_tiered.errors import (
    ConflictError,
    CorruptError,
    ExpiredError,
    IncompleteError,
    InvalidError,
    ResidencyError,
    SupersededError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.pack import Pack
from dcp_tiered.format.records import Commit, Record
from dcp_tiered.interfaces import DurableTier, LocalTier
from dcp_tiered.metrics import Sample
from dcp_tiered.policy import takeover
from dcp_tiered.services import doorbell, superseded_notes
from dcp_tiered.services.catalog import Catalog, Published
from dcp_tiered.services.claim import Claim
from dcp_tiered.services.lanes import HeldUpError, Lanes
from dcp_tiered.services.local_changes import LocalChanges
from dcp_tiered.services.local_space import LocalSpace
from dcp_tiered.services.no_policy import NoPolicy
from dcp_tiered.services.outgoing import never
from dcp_tiered.services.own_packs import OwnPacks
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.progress import Report, ReportFile, describe_error
from dcp_tiered.services.residency import Guard
from dcp_tiered.services.superseding import Superseding
from dcp_tiered.services.unpublished import UnpublishedShards

_log = logging.getLogger(__name__)
_FIXABLE_PAUSE_S_MAX = 5.0
"""A wrong key or bucket is looked at again this often, so that `wait` gets its answer soon."""
_BAD_TRIES_MAX = 3
"""Bytes that are wrong in memory once may be right the next time; on disk they stay wrong."""
_OTHERS_PAUSE_S = (0.25, 60.0)
"""Shortest and longest pause between two looks for packs or for a commit of other nodes."""
_WANTED_PAUSE_S = 1.0
"""The same where a save on this node waits for room."""
_HELD_UP_PAUSE_S = 1.0
"""Pause between two looks for the end of an upload that others do not wait for."""
_SETTLE_S = 2.0
"""How long a record stands before it is believed, where two writers may replace one another."""
_OTHERS_PAUSE_SHARE = 0.25
"""Of the time waited so far: so the looks grow with its logarithm, and not with the time."""


@dataclass(kw_only=True)
class _Open:
    """A checkpoint that is not durable yet."""

    attempt: str
    sequence: int
    since: float
    tries: int = 0
    bad_tries: int = 0
    """Tries in a row that met something that another try hardly changes."""
    tried_at: float = 0.0
    """Wall clock at the begin of the last try."""
    failed_at: float = 0.0
    """The same of the try that met `error`: `wait` believes it only if that try began later."""
    not_before: float = 0.0
    error: TieredError | None = None
    log: dict[int, Record] = field(default_factory=dict)
    """The records of the id that were read so far."""
    claim: Claim | None = None
    """What is on the durable tier once all of this node's packs are; None before."""
    settled: bool = False
    """Durable, or given up for good: not looked at again."""
    overdue: bool = False
    """Not durable after `flush_deadline_s`."""
    late: bool = False
    """Waits for other nodes for too long already: tried on, but no reason to stay for."""

    def is_due(self, *, wanted: bool) -> bool:
        """Tell whether to try now; sooner if a save waits for room that others may have made."""
        if time.monotonic() >= self.not_before:
            return True
        looked_s = time.time() - self.tried_at
        return wanted and isinstance(self.error, IncompleteError) and looked_s >= _WANTED_PAUSE_S

    def keeps_us(self) -> bool:
        """Tell whether the flusher may not end as long as this is so."""
        return not self.settled and not self.late


class Flusher:
    """Brings every checkpoint of one run directory to the durable tier.

    Args:
        local: The run's directory.
        durable: Where to.
        node: This local root's id.
        limits: Bounds.
        stop: Asked between requests; True makes the flusher end soon.
        residency: Asked before each commit for what the record says of it, and once more after;
            raises where a policy forbids it. None: there is no policy.
        compression: Of packs, one of `config.COMPRESSIONS`.
        due: Returns when uploads have to be over, by the monotonic clock.
    """

    def __init__(
        self,
        local: LocalTier,
        durable: DurableTier,
        node: str,
        limits: Limits,
        stop: Callable[[], bool],
        residency: Guard | None = None,
        compression: str = "off",
        due: Callable[[], float] = never,
    ) -> None:
        self._catalog = Catalog(local, durable)
        self._packs = PackStore(local, durable)
        self._local = local
        self._node = node
        self._limits = limits
        self._stop = stop
        self.residency = residency or NoPolicy()
        self._exclusive: bool | None = None
        """Whether the store lets one of two writers in; None until the first commit asks."""
        self._open: dict[str, _Open] = {}
        self._commits = 0
        self._worked_at = 0.0
        self._changes = LocalChanges(local)
        self._reports = ReportFile(run_path=local.root)
        self._space = LocalSpace(self._catalog, local, limits)
        self._own_packs = OwnPacks(
            self._catalog, local, self._packs, node, limits, stop, compression
        )
        self._superseding = Superseding(self._catalog, local, limits)
        self._lanes = Lanes(limits.request_timeout_s, due)
        self._unpublished = UnpublishedShards(
            self._catalog,
            self._own_packs,
            self._lanes,
            local,
            limits,
            self._reports,
            self.residency,
            self._space.is_wanted,
        )

    def run(self, idle_exit_s: float, after_step: Callable[[], None]) -> None:
        """Flush until there has been nothing to do for `idle_exit_s` seconds, or `stop`.

        Args:
            idle_exit_s: Seconds.
            after_step: Called after each look at the local tier.
        """
        self._reports.write()
        here = [self._local.root]
        self._worked_at = time.monotonic()
        while not self._stop():
            heard = doorbell.heard(here)
            if self.turn():
                self._worked_at = time.monotonic()
            elif time.monotonic() - self._worked_at >= idle_exit_s:
                return
            after_step()
            doorbell.wait(here, heard, self._limits.poll_s)

    def close(self) -> None:
        """Let go of uploads that are held up: another flusher goes on with their checkpoints."""
        self._lanes.abandon()

    def turn(self) -> bool:
        """Do one step, and look at the target when that is due; tell whether to stay.

        As long as a violation stands somebody has to see when it is mended.
        """
        busy = self.step()
        if not busy:
            self.residency.settle()
        return self.residency.watch() or busy

    def step(self, ranked: Callable[[list[str]], list[str]] = list) -> bool:
        """Try every checkpoint whose time has come; return whether any is still open.

        Args:
            ranked: Brings ids into the order in which to try them; they come oldest first.
        """
        fencing = self._superseding.step()
        work = ranked(self._work())
        self._tell_overdue(work)
        wanted = self._space.is_wanted()
        for checkpoint_id in work:
            if self._stop():
                return True
            state = self._open[checkpoint_id]
            if not state.is_due(wanted=wanted) or self._is_held_up(checkpoint_id, state):
                continue
            goes_on = self._try(checkpoint_id)
            self._worked_at = time.monotonic()
            if not goes_on:
                break
            self._space.trim()
            fencing = self._superseding.step()
        waiting = self._unpublished.step()
        self._space.trim()
        return fencing or waiting or any(self._open[name].keeps_us() for name in work)

    def _tell_overdue(self, work: list[str]) -> None:
        """Say once of each checkpoint that it should have been durable by now."""
        for checkpoint_id in work:
            state = self._open[checkpoint_id]
            if not state.overdue and self._is_overdue(state):
                state.overdue = True
                self._report(checkpoint_id, state, "waiting")
                _log.error(
                    "late: %s is not durable %g s after it was published; trying on",
                    checkpoint_id,
                    self._limits.flush_deadline_s,
                )

    def _is_overdue(self, state: _Open) -> bool:
        deadline_s = self._limits.flush_deadline_s
        return deadline_s is not None and time.time() - state.sequence / 1e9 > deadline_s

    def _is_held_up(self, checkpoint_id: str, state: _Open) -> bool:
        """Tell whether an upload goes on that others are not to wait for, or has to wait itself."""
        if superseded_notes.is_given_up(self._local, checkpoint_id, state.attempt):
            return False
        is_late = partial(self._is_overdue, state)
        if self._lanes.is_known(checkpoint_id):
            return self._lanes.is_held_up(checkpoint_id, is_late)
        return isinstance(state.error, HeldUpError) and self._lanes.are_taken()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this process."""
        waiting = [state.since for state in self._open.values() if not state.settled]
        yield metrics.COMMITS, {}, self._commits
        yield metrics.PENDING, {}, len(waiting)
        yield metrics.PENDING_AGE, {}, time.monotonic() - min(waiting, default=time.monotonic())
        yield metrics.HELD_UP, {}, self._lanes.held_up()
        yield from self._space.samples()

    def has_work(self) -> bool:
        """Tell whether something on this node is not durable yet, without asking the store."""
        mine = any(self._open[name].keeps_us() for name in self._work())
        return mine or self._unpublished.has_work() or self._superseding.has_work()

    def open_ids(self) -> list[str]:
        """Return what is published here and not durable, without asking the store; oldest first."""
        return self._work()

    def unpublished_ids(self) -> set[str]:
        """Return ids of which shard files without a manifest wait here, as of the last step."""
        return self._unpublished.ids()

    def failures(self) -> dict[str, TieredError]:
        """Return the error of the last try of every checkpoint that is not durable, by id."""
        own = {name: state.error for name, state in self._open.items() if state.error is not None}
        return self._unpublished.failures() | own

    def _work(self) -> list[str]:
        """Return ids that are published and neither durable nor given up, oldest first."""
        ids = self._catalog.local_ids()
        for gone in self._open.keys() - set(ids):
            self._forget(gone)
        for checkpoint_id in ids:
            if not self._changes.is_unchanged(checkpoint_id):
                self._look(checkpoint_id)
        work = [name for name, state in self._open.items() if not state.settled]
        return sorted(work, key=lambda name: self._open[name].sequence)

    def _look(self, checkpoint_id: str) -> None:
        """Find out what has been published under an id since the last look."""
        mark = self._changes.mark(checkpoint_id)
        try:
            published = self._catalog.published(checkpoint_id)
            if published is None:
                self._forget(checkpoint_id)
            else:
                self._take_up(published)
        except TieredError as exc:
            self._give_up_damaged(checkpoint_id, exc)
            if not isinstance(exc, CorruptError):
                return  # a disk that fails to read may read the next time
        self._changes.remember(checkpoint_id, mark)

    def _forget(self, checkpoint_id: str) -> None:
        if self._open.pop(checkpoint_id, None) is not None:
            self._end_work(checkpoint_id)

    def _take_up(self, published: Published) -> None:
        head = published.head
        known = self._open.get(head.checkpoint_id)
        if known is None or known.attempt != head.attempt:
            if known is not None:
                self._lanes.abandon(head.checkpoint_id)
            self._open[head.checkpoint_id] = _Open(
                attempt=head.attempt,
                sequence=head.sequence,
                since=time.monotonic(),
                settled=self._is_noted(head) or self._is_given_up(head),
            )

    def _is_noted(self, head: Head) -> bool:
        """Tell whether this node knows an attempt to be durable, or to have been and be removed."""
        catalog, name = self._catalog, head.checkpoint_id
        known = catalog.noted(name) or catalog.noted_expired(name)
        return known is not None and known.attempt == head.attempt

    def _give_up_damaged(self, checkpoint_id: str, exc: TieredError) -> None:
        state = self._open.get(checkpoint_id)
        if state is None or not state.settled:
            _log.error("skipping a damaged local checkpoint: %s", exc)
            self._lanes.abandon(checkpoint_id)
            state = _Open(attempt="", sequence=0, since=0.0, error=exc, settled=True)
            self._open[checkpoint_id] = state
            self._report(checkpoint_id, state, "damaged")

    def _try(self, checkpoint_id: str) -> bool:
        """Flush one checkpoint; return False when the store is down: then others may wait too."""
        state = self._open[checkpoint_id]
        state.tries += 1
        state.tried_at = time.time()
        try:
            published = self._catalog.published(checkpoint_id)
            if published is None or published.head.attempt != state.attempt:
                return True  # replaced or removed since we looked
            commit = self._flush(published)
        except SupersededError as exc:
            self._end_superseded(checkpoint_id, state, exc)
        except ExpiredError as exc:
            self._end_quietly(checkpoint_id, state)
            _log.warning("removed: %s, attempt %s: %s", checkpoint_id, state.attempt, exc)
        except ConflictError as exc:
            self._settle(checkpoint_id, state, exc, "conflict")
        except IncompleteError as exc:
            self._await_others(checkpoint_id, state, exc)
        except CorruptError as exc:
            self._retry_few(checkpoint_id, state, exc, "damaged")
        except ResidencyError as exc:
            self._retry(checkpoint_id, state, exc, "held_residency", fixable=True)
        except HeldUpError as exc:
            state.error, state.failed_at = exc, state.tried_at
            state.not_before = time.monotonic() + _HELD_UP_PAUSE_S
            self._tell_overdue([checkpoint_id])
            self._report(checkpoint_id, state, "uploading", self._reports.bytes_of(checkpoint_id))
        except TieredError as exc:
            self._retry(checkpoint_id, state, exc, "failed", fixable=isinstance(exc, InvalidError))
            return not isinstance(exc, UnavailableError)
        except Exception as exc:  # noqa: BLE001 - logged and reported
            # One checkpoint that trips over a mistake of ours must not hold up all the others.
            _log.exception("cannot flush %s", checkpoint_id)
            text = f"{type(exc).__name__}: {str(exc)[:200]}"
            error = TieredError(text, "durable", checkpoint_id, "Look at flusher.log.")
            self._retry_few(checkpoint_id, state, error, "failed")
        else:
            self._commits += 1
            self._end_pauses()
            self._end_quietly(checkpoint_id, state)
            _log.info(
                "durable: %s, step %s, %d bytes in %d packs",
                checkpoint_id,
                commit.step,
                commit.bytes_stored,
                len(commit.packs),
            )
        return True

    def _settle(self, checkpoint_id: str, state: _Open, error: TieredError, what: str) -> None:
        """Give a checkpoint up: it stays on this node, and the report says why."""
        state.settled, state.error, state.failed_at = True, error, state.tried_at
        self._lanes.abandon(checkpoint_id)
        self._report(checkpoint_id, state, what)
        _log.error("checkpoint %s stays local: %s", checkpoint_id, error)

    def _end_superseded(self, checkpoint_id: str, state: _Open, error: SupersededError) -> None:
        """End a flush that was given up; the note tells, and has `Superseding` see to the fence."""
        self._end_quietly(checkpoint_id, state)
        _log.warning("superseded: %s, attempt %s: %s", checkpoint_id, state.attempt, error)

    def _end_quietly(self, checkpoint_id: str, state: _Open) -> None:
        """Look at an id no more and report nothing: what lies on this node says what it is."""
        state.settled, state.error = True, None
        self._end_work(checkpoint_id)

    def _end_work(self, checkpoint_id: str) -> None:
        self._lanes.abandon(checkpoint_id)
        self._reports.drop(checkpoint_id)

    def _is_given_up(self, head: Head) -> bool:
        return superseded_notes.is_given_up(self._local, head.checkpoint_id, head.attempt)

    def _check_wanted(self, head: Head) -> None:
        """Pass unless the flush of an attempt was given up since it began.

        Raises:
            SupersededError: It was.
        """
        if self._is_given_up(head):
            raise superseded_notes.error_of(head.checkpoint_id, "newer ones need the room")

    def _retry_few(self, checkpoint_id: str, state: _Open, error: TieredError, what: str) -> None:
        """Try again a few times what is probably as bad the next time, then give it up."""
        state.bad_tries += 1
        if state.bad_tries >= _BAD_TRIES_MAX:
            self._settle(checkpoint_id, state, error, what)
        else:
            self._retry(checkpoint_id, state, error, "failed")

    def _await_others(self, checkpoint_id: str, state: _Open, error: TieredError) -> None:
        """Come back when other nodes may have got on; the longer they take, the later."""
        waited = time.monotonic() - state.since
        state.late = waited > self._limits.incomplete_after_s
        state.error, state.failed_at = error, state.tried_at
        least, most = _OTHERS_PAUSE_S
        state.not_before = time.monotonic() + min(most, max(least, waited * _OTHERS_PAUSE_SHARE))
        self._report(checkpoint_id, state, "incomplete" if state.late else "waiting")
        _log.info("%s is not durable yet: %s", checkpoint_id, error)

    def _retry(
        self,
        checkpoint_id: str,
        state: _Open,
        error: TieredError,
        what: str,
        *,
        fixable: bool = False,
    ) -> None:
        """Come back to a checkpoint later; soon, if it waits for something that may change soon."""
        state.claim = None  # what was on the durable tier may be gone
        state.error, state.failed_at = error, state.tried_at
        longest_s = self._limits.flush_retry_s_max
        self._pause(state, min(_FIXABLE_PAUSE_S_MAX, longest_s) if fixable else longest_s)
        self._report(checkpoint_id, state, what)
        _log.warning("try %d of %s: %s", state.tries, checkpoint_id, error)

    def _end_pauses(self) -> None:
        """Try at once what waits for a store that was down: it has just answered."""
        for state in self._open.values():
            if isinstance(state.error, UnavailableError):
                state.not_before = 0.0

    def _pause(self, state: _Open, longest_s: float) -> None:
        state.not_before = time.monotonic() + min(longest_s, 0.25 * 2 ** min(state.tries, 16))

    def _report(self, checkpoint_id: str, state: _Open, what: str, bytes_done: int = 0) -> None:
        self._reports.set(
            Report(
                checkpoint_id=checkpoint_id,
                attempt=state.attempt,
                state=what,
                bytes_done=bytes_done,
                tries=state.tries,
                at=state.failed_at,
                error=describe_error(state.error) if state.error else None,
                late=state.overdue,
            )
        )

    def _flush(self, published: Published) -> Commit:
        """Bring one checkpoint to the durable tier, or note here that it is not to be there."""
        try:
            return self._bring(published)
        except ExpiredError:
            self._catalog.note_log(published.head.checkpoint_id)
            raise
        except SupersededError as exc:
            superseded_notes.write(self._local, published.head, self._node, exc.message)
            raise

    def _bring(self, published: Published) -> Commit:
        """Bring one checkpoint to the durable tier: manifest, then packs, then the record."""
        head = published.head
        state = self._open[head.checkpoint_id]
        self._check_wanted(head)
        self.residency.admit(head.policy_sha256)
        self._catalog.follow(head.checkpoint_id, state.log)
        highest, mine = self._catalog.may_commit(head, state.log)
        if mine is not None:
            self._catalog.note(mine, highest)
            return mine
        turn = self._turn(head)
        if state.claim is None:
            self._report(head.checkpoint_id, state, "uploading")
            if turn == 0:
                self._catalog.put_manifest(published)
            state.claim = self._upload_own(published, state)
        self._await_turn(head, state, turn)
        state.claim.look()
        if turn > 0:
            _log.warning("committing %s in place of node %s", head.checkpoint_id, head.node)
            self._catalog.put_manifest(published)
        commit = self._commit(published, state.claim, turn)
        self.residency.settle()
        return commit

    def _commit(self, published: Published, claim: Claim, turn: int) -> Commit:
        """Append the record; where the store lets two writers in, on the coordinator's node alone.

        Raises:
            IncompleteError: The commit is left to that node.
        """
        head = published.head
        if self._exclusive is None:
            self._exclusive = self._catalog.is_exclusive(published)
            if not self._exclusive:
                _log.warning("two writers may replace one another: no node takes a commit over")
        exclusive = self._exclusive
        if not exclusive and turn > 0:
            raise IncompleteError(
                f"the store does not keep two writers apart, so only node {head.node} may commit",
                "durable",
                head.checkpoint_id,
                "Start a flusher on that node; if it is lost, load an older checkpoint.",
            )

        def make() -> Commit:
            commit = replace(claim.make(), exclusive=exclusive)
            self._check_wanted(head)
            return commit

        return self._catalog.commit(head, make, 0.0 if exclusive else _SETTLE_S)

    def _upload_own(self, published: Published, state: _Open) -> Claim:
        """Upload and verify this node's packs of a checkpoint."""
        head = published.head
        present = set(self._catalog.sealed(head.checkpoint_id))
        rows = [
            (shard.name, shard.length, shard.crc32c)
            for shard in head.shards
            if shard.name in present  # whichever id this node had when it sealed them
        ]

        def upload(moved: Callable[[], None]) -> dict[str, Pack]:
            def check() -> None:
                moved()
                self._check_wanted(head)

            def uploaded(done: int) -> None:
                moved()
                self._reports.uploaded(head.checkpoint_id, head.attempt, done)

            return self._own_packs.upload(head.checkpoint_id, rows, uploaded, check)

        is_late = partial(self._is_overdue, state)
        packs = self._lanes.run(head.checkpoint_id, head.attempt, upload, is_late)
        evidence = partial(self.residency.require, fresh=True)
        claim = Claim(self._packs, published, self._node, evidence)
        claim.add(packs)
        return claim

    def _turn(self, head: Head) -> int:
        """Return 0 on the coordinator's node, else how many turns of others come before ours."""
        present = set(self._catalog.sealed(head.checkpoint_id))
        here = {shard.node for shard in head.shards if shard.name in present}
        nodes = {shard.node for shard in head.shards}
        if self._node == head.node or head.node in here or here == nodes:
            return 0
        return takeover.turn(head.attempt, nodes, head.node, min(here, default=self._node))

    def _await_turn(self, head: Head, state: _Open, turn: int) -> None:
        """Pass on the coordinator's node, or when others have left the commit to us for too long.

        Raises:
            IncompleteError: It is not our turn yet.
        """
        limits = self._limits
        begin = takeover.begins_after_s(turn, limits.commit_takeover_s, limits.incomplete_after_s)
        if begin is not None and time.monotonic() - state.since >= begin:
            return
        raise IncompleteError(
            f"this node's packs are there, and node {head.node} has not committed them yet",
            "durable",
            head.checkpoint_id,
            "Look at 'dcp-tiered status' on that node; if it is lost, others commit in its place.",
        )
