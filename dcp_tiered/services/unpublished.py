"""Shard files that no manifest known on this node names: uploaded before their save is over.

Those that are packs of their own go at once; smaller ones once the node's other ranks have sealed
theirs, or after a linger time.

Where other nodes take part, the manifest, which the coordinator's node puts on the durable tier, is
awaited and published here too, so that a resume and `wait` find it; from then on the flusher treats
the checkpoint like one of its own. A commit that comes first does as well.

Where all ranks are on this node, the coordinator's mark tells whether the save still goes on: what
is left of one that died stays where it is.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dcp_tiered.config import Limits
from dcp_tiered.errors import CorruptError, IncompleteError, ResidencyError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import decode_head
from dcp_tiered.format.records import Commit, Record, expired_commits, state_of
from dcp_tiered.format.shardfile import Header
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy.packing import is_alone
from dcp_tiered.services import shard_headers, superseded_notes
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.lanes import HeldUpError, Lanes, UnwantedError
from dcp_tiered.services.local_changes import LocalChanges
from dcp_tiered.services.own_packs import OwnPacks
from dcp_tiered.services.progress import Report, ReportFile, describe_error
from dcp_tiered.services.residency import Guard
from dcp_tiered.services.save_mark import saving_since

_log = logging.getLogger(__name__)
_ASK_S_MAX = 15.0
_LOOK_S = 1.0
"""How often it is looked, while packs are uploaded, whether they are wanted, and for a manifest."""
_BAD_TRIES_MAX = 3


@dataclass(kw_only=True)
class _Waiting:
    """Shard files of one checkpoint id that no manifest or commit known here names."""

    since: float
    """When the last of them was found."""
    names: frozenset[str]
    headers: dict[str, Header] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    """Bytes of each."""
    sent: set[str] = field(default_factory=set)
    """Those in verified packs."""
    is_idle: bool = False
    """Nothing more of them can leave before there is a manifest."""
    log: dict[int, Record] = field(default_factory=dict)
    """The records of the id that were read so far."""
    attempts: set[str] = field(default_factory=set)
    """Attempts whose manifests on the durable tier have been looked at."""
    looked_at: float = 0.0
    asked: int = 0
    tried_at: float = 0.0
    not_before: float = 0.0
    bad_tries: int = 0
    error: TieredError | None = None


class UnpublishedShards:
    """Uploads this node's shard files of checkpoints that are not published here.

    Args:
        catalog: The run's catalog.
        own_packs: Groups and uploads.
        lanes: Where uploads run.
        local: The run's directory.
        limits: Bounds.
        reports: What `status` shows.
        residency: Whether what this node saves may leave by this flusher.
        wanted: Tells whether a save waits for room that a commit by others may have made.
    """

    def __init__(
        self,
        catalog: Catalog,
        own_packs: OwnPacks,
        lanes: Lanes,
        local: LocalTier,
        limits: Limits,
        reports: ReportFile,
        residency: Guard,
        wanted: Callable[[], bool],
    ) -> None:
        self._catalog = catalog
        self._own_packs = own_packs
        self._lanes = lanes
        self._local = local
        self._limits = limits
        self._reports = reports
        self._residency = residency
        self._wanted = wanted
        self._changes = LocalChanges(local)
        self._waiting: dict[str, _Waiting] = {}
        self._ended: dict[str, _Waiting] = {}
        """Given up, or left over: not looked at again as long as the names are the same."""

    def has_work(self) -> bool:
        """Tell whether something is to be done with shard files that wait for their manifest."""
        self._look()
        return any(not waiting.is_idle for waiting in self._waiting.values())

    def ids(self) -> set[str]:
        """Return what waits here, as of the last look."""
        return set(self._waiting)

    def failures(self) -> dict[str, TieredError]:
        """Return the error of the last try of every id whose shard files are not durable."""
        states = self._ended | self._waiting
        return {name: state.error for name, state in states.items() if state.error is not None}

    def step(self) -> bool:
        """Upload what is ready and look for commits; return whether anything was still to be done.

        So is what has just got its manifest: it goes on as a published checkpoint.
        """
        is_open = self.has_work()
        wanted = self._wanted()
        for checkpoint_id in list(self._waiting):
            self._look()  # an upload may have taken long, and others have been sealed meanwhile
            waiting = self._waiting.get(checkpoint_id)
            if waiting is None:
                continue
            looked_s = time.time() - waiting.tried_at
            soon = wanted and waiting.error is None and looked_s >= _LOOK_S
            if time.monotonic() < waiting.not_before and not soon:
                continue
            if self._lanes.is_held_up(checkpoint_id):
                continue
            waiting.tried_at = time.time()
            try:
                self._advance(checkpoint_id, waiting)
            except HeldUpError as exc:
                waiting.error, waiting.not_before = exc, time.monotonic() + _LOOK_S
                self._report(checkpoint_id, waiting, "uploading", exc)
            except TieredError as exc:
                self._failed(checkpoint_id, waiting, exc)
            except Exception as exc:  # noqa: BLE001 - logged and reported
                # One checkpoint that trips over a mistake of ours must not hold up all the others.
                _log.exception("cannot flush shard files of %s", checkpoint_id)
                text = f"{type(exc).__name__}: {str(exc)[:200]}"
                error = CorruptError(text, "local", checkpoint_id, "Look at flusher.log.")
                self._failed(checkpoint_id, waiting, error)
        return is_open

    def _failed(self, checkpoint_id: str, waiting: _Waiting, error: TieredError) -> None:
        """Note an error and come back later; damage is looked at a few times only."""
        waiting.error = error
        waiting.asked += 1
        waiting.not_before = time.monotonic() + min(
            self._limits.flush_retry_s_max, 0.25 * 2 ** min(waiting.asked, 16)
        )
        waiting.bad_tries += isinstance(error, CorruptError)
        ended = waiting.bad_tries >= _BAD_TRIES_MAX
        held = isinstance(error, ResidencyError)
        what = "damaged" if ended else "held_residency" if held else "failed"
        self._report(checkpoint_id, waiting, what, error)
        _log.warning("shard files of %s are not durable yet: %s", checkpoint_id, error)
        if ended:
            self._end(checkpoint_id, waiting)

    def _report(
        self, checkpoint_id: str, waiting: _Waiting, state: str, error: TieredError
    ) -> None:
        self._reports.set(
            Report(
                checkpoint_id=checkpoint_id,
                attempt="",
                state=state,
                at=waiting.tried_at,
                error=describe_error(error),
            )
        )

    def _look(self) -> None:
        """Find shard files that are neither published here nor in a commit known here."""
        ids = self._catalog.local_ids()
        for gone in (self._waiting.keys() | self._ended.keys()) - set(ids):
            self._waiting.pop(gone, None)
            self._ended.pop(gone, None)
            self._lanes.abandon(gone)
            self._reports.drop(gone)
        for checkpoint_id in ids:
            if self._changes.is_unchanged(checkpoint_id):
                continue
            mark = self._changes.mark(checkpoint_id)
            try:
                names = self._catalog.unnamed(checkpoint_id)
            except TieredError as exc:
                if checkpoint_id in self._waiting:
                    _log.warning("cannot look at shard files of %s: %s", checkpoint_id, exc)
                self._waiting.pop(checkpoint_id, None)
                continue
            self._changes.remember(checkpoint_id, mark)
            known, ended = self._waiting.get(checkpoint_id), self._ended.get(checkpoint_id)
            if not names or (ended is not None and names == ended.names):
                self._waiting.pop(checkpoint_id, None)
            elif known is None or known.names != names:
                # What a manifest names by now goes on: the flusher waits for it.
                if known is not None and known.names - set(self._catalog.sealed(checkpoint_id)):
                    self._lanes.abandon(checkpoint_id)
                self._waiting[checkpoint_id] = _renewed(known, names)

    def _advance(self, checkpoint_id: str, waiting: _Waiting) -> None:
        for name in waiting.names - waiting.headers.keys():
            waiting.headers[name] = shard_headers.header(self._local, checkpoint_id, name)
            key = layout.key(checkpoint_id, name)
            waiting.lengths[name] = self._local.head(key).length
        if all(map(shard_headers.is_of_one_node, waiting.headers.values())):
            self._advance_alone(checkpoint_id, waiting)
        else:
            self._advance_with_others(checkpoint_id, waiting)

    def _advance_alone(self, checkpoint_id: str, waiting: _Waiting) -> None:
        """Upload what has been sealed while the slower ranks of this node are still writing."""
        since = saving_since(self._local, checkpoint_id)
        sealed = {name: self._sealed_at(checkpoint_id, name) for name in waiting.names}
        age_s = (time.time_ns() - max(sealed.values())) / 1e9
        if since is None or age_s > self._limits.incomplete_after_s:
            self._end_dead(checkpoint_id, waiting)
            return
        mine = {name for name, at in sealed.items() if at >= since}
        ranks = {waiting.headers[name].rank for name in mine}
        world_size = max((waiting.headers[name].world_size for name in mine), default=0)
        lingered = time.monotonic() - waiting.since >= self._limits.linger_s
        if len(ranks) >= world_size and not lingered:
            return  # its manifest comes any moment
        try:
            ready = mine if lingered else self._large(waiting, mine)
            check = self._until_it_dies(checkpoint_id, frozenset(mine), since)
            self._upload(checkpoint_id, waiting, ready, check, check)
        except UnwantedError:
            self._end_dead(checkpoint_id, waiting)
        else:
            waiting.is_idle = lingered

    def _until_it_dies(
        self, checkpoint_id: str, names: frozenset[str], since: int
    ) -> Callable[[], None]:
        """Return what ends an upload by raising when nobody wants what it uploads any more.

        Args:
            checkpoint_id: The id.
            names: The shard files.
            since: When their save began, see `saving_since`.
        """
        looked_at = time.monotonic()

        def check() -> None:
            nonlocal looked_at
            if time.monotonic() - looked_at < _LOOK_S:
                return
            looked_at = time.monotonic()
            # Asked in this order: a save has published before it is over.
            if saving_since(self._local, checkpoint_id) == since:
                return
            if names & self._catalog.unnamed(checkpoint_id):
                raise UnwantedError("its save is over without a manifest", "local", checkpoint_id)
            published = self._catalog.published(checkpoint_id)
            if published is not None and superseded_notes.is_given_up(
                self._local, checkpoint_id, published.head.attempt
            ):
                raise UnwantedError("its flush was given up", "local", checkpoint_id)

        return check

    def _end_dead(self, checkpoint_id: str, waiting: _Waiting) -> None:
        """Leave shard files where they are: their save died, or failed in a process that lives."""
        self._went_well(checkpoint_id, waiting)
        try:
            self._own_packs.tidy(checkpoint_id, waiting.names)
        except TieredError as exc:
            _log.warning("what a flusher before had begun to upload stays open: %s", exc)
        self._end(checkpoint_id, waiting)

    def _advance_with_others(self, checkpoint_id: str, waiting: _Waiting) -> None:
        is_ready = self._is_ready(waiting)
        ready = set(waiting.names) if is_ready else self._large(waiting, waiting.names)
        if ready - waiting.sent:
            is_before_us = self._own_packs.is_before_us(checkpoint_id, waiting.names)
            if is_before_us and self._is_decided(checkpoint_id, waiting):
                return  # committed, and perhaps removed, while no flusher ran here
            adopt = self._adopting(checkpoint_id, waiting)
            # Whether these are wanted is not known before their manifest is: nothing is checked.
            self._upload(checkpoint_id, waiting, ready, adopt, lambda: None)
        if not is_ready or self._is_settled(checkpoint_id, waiting):
            return
        waiting.asked += 1
        waiting.not_before = time.monotonic() + min(_ASK_S_MAX, 0.25 * 2 ** min(waiting.asked, 8))
        if time.monotonic() - waiting.since > self._limits.incomplete_after_s:
            self._give_up(checkpoint_id, waiting)

    def _large(self, waiting: _Waiting, names: Collection[str]) -> set[str]:
        """Return those that are packs of their own."""
        target = self._limits.pack_bytes_target
        return {name for name in names if is_alone(waiting.lengths[name], target)}

    def _is_settled(self, checkpoint_id: str, waiting: _Waiting) -> bool:
        """Look for a commit and for a manifest; return whether nothing is left to wait for here."""
        if self._is_decided(checkpoint_id, waiting):
            return True
        if waiting.names == self._left_over(checkpoint_id, waiting.names):
            self._end(checkpoint_id, waiting)
            return True
        if self._adopt_manifest(checkpoint_id, waiting):
            self._reports.drop(checkpoint_id)
            self._waiting.pop(checkpoint_id)  # what it does not name is found at the next look
            return True
        return False

    def _is_decided(self, checkpoint_id: str, waiting: _Waiting) -> bool:
        """Look for a commit, withdrawn or not; what is older than that is not waited for either."""
        if not self._note_commit(checkpoint_id, waiting):
            return False
        self._reports.drop(checkpoint_id)
        waiting.error = None
        if left := self._left_over(checkpoint_id, waiting.names):
            waiting.names = left
            self._end(checkpoint_id, waiting)
        return True

    def _give_up(self, checkpoint_id: str, waiting: _Waiting) -> None:
        ranks = ", ".join(str(header.rank) for header in waiting.headers.values())
        waiting.error = IncompleteError(
            "neither a manifest nor a commit on the durable tier names the shard files of this node"
            f" (ranks {ranks[:80]})",
            "durable",
            checkpoint_id,
            "The coordinator's node puts the manifest there: look at 'dcp-tiered status' on it.",
        )
        self._report(checkpoint_id, waiting, "incomplete", waiting.error)
        _log.error("giving up on shard files of %s: %s", checkpoint_id, waiting.error)
        self._end(checkpoint_id, waiting)

    def _end(self, checkpoint_id: str, waiting: _Waiting) -> None:
        self._ended[checkpoint_id] = waiting
        self._waiting.pop(checkpoint_id, None)

    def _left_over(self, checkpoint_id: str, names: frozenset[str]) -> frozenset[str]:
        """Return the shard files that are older than some that a commit known here places.

        They are of a save that was cut off before the one that was committed, and nobody will ever
        commit them.
        """
        placed = self._catalog.noted_shards(checkpoint_id)
        newest = max((self._sealed_at(checkpoint_id, name) for name in placed), default=0)
        return frozenset(name for name in names if self._sealed_at(checkpoint_id, name) < newest)

    def _sealed_at(self, checkpoint_id: str, name: str) -> int:
        return shard_headers.sealed_at(self._local, checkpoint_id, name)

    def _is_ready(self, waiting: _Waiting) -> bool:
        complete = shard_headers.all_ranks_are_here(list(waiting.headers.values()))
        return complete or time.monotonic() - waiting.since >= self._limits.linger_s

    def _upload(
        self,
        checkpoint_id: str,
        waiting: _Waiting,
        ready: set[str],
        uploaded: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        """Upload what is not there yet of what is ready, and may leave without a manifest.

        Args:
            checkpoint_id: The id.
            waiting: Its shard files.
            ready: Those that may go now.
            uploaded: Called after each pack.
            check: Called again and again while bytes leave, by several threads; ends the upload by
                raising.
        """
        headers, is_mine = waiting.headers, self._residency.is_mine
        todo = sorted(name for name in ready - waiting.sent if is_mine(headers[name].policy_sha256))
        if not todo:
            return
        rows = [shard_headers.row(self._local, checkpoint_id, name) for name in todo]

        def upload(moved: Callable[[], None]) -> None:
            def both() -> None:
                moved()
                check()

            self._own_packs.upload(checkpoint_id, rows, lambda _: uploaded(), both)

        def is_published() -> bool:
            # From then on the flusher knows whether it is late, or not wanted any more.
            return self._catalog.unnamed(checkpoint_id).isdisjoint(todo)

        self._lanes.run(checkpoint_id, " ".join(todo), upload, until=is_published)
        waiting.sent.update(todo)
        self._went_well(checkpoint_id, waiting)

    def _adopting(self, checkpoint_id: str, waiting: _Waiting) -> Callable[[], None]:
        """Return what publishes a manifest here that has come to the durable tier meanwhile.

        `wait("local")` on this node is not to last as long as an upload.
        """

        def look() -> None:
            if time.monotonic() - waiting.looked_at >= _LOOK_S:
                waiting.looked_at = time.monotonic()
                self._adopt_manifest(checkpoint_id, waiting)

        return look

    def _went_well(self, checkpoint_id: str, waiting: _Waiting) -> None:
        """Forget the error of the try before, if it had one."""
        if waiting.error is not None:
            waiting.error = None
            self._reports.drop(checkpoint_id)

    def _note_commit(self, checkpoint_id: str, waiting: _Waiting) -> bool:
        """Copy the commit that names these shard files and its manifest, once they are there."""
        self._catalog.follow(checkpoint_id, waiting.log)
        highest, state = state_of(waiting.log)
        if isinstance(state, Commit) and _places(state, waiting.names):
            self._catalog.note(state, highest)
            self._copy_manifest(state)
            return True
        if any(_places(commit, waiting.names) for commit in expired_commits(waiting.log)):
            _log.warning("removed: %s, of which shard files are here", checkpoint_id)
            self._catalog.note_log(checkpoint_id)
            return True
        return False

    def _adopt_manifest(self, checkpoint_id: str, waiting: _Waiting) -> bool:
        """Publish here pending manifests that name these shard files; return whether one does."""
        for attempt, data in self._catalog.pending(checkpoint_id, waiting.attempts).items():
            waiting.attempts.add(attempt)
            try:
                if waiting.names & {shard.name for shard in decode_head(data).shards}:
                    self._catalog.adopt(checkpoint_id, data)
            except CorruptError as exc:
                _log.warning("ignoring a damaged manifest of %s: %s", checkpoint_id, exc)
        return not waiting.names <= self._catalog.unnamed(checkpoint_id)

    def _copy_manifest(self, commit: Commit) -> None:
        """Show the manifest of a committed checkpoint on this node too: a resume looks here first.

        What is missed here is read from the durable tier, so an error is none of the flush.
        """
        try:
            published = self._catalog.published(commit.checkpoint_id)
            if published is None or published.head.sequence < commit.sequence:
                self._catalog.adopt(commit.checkpoint_id, self._catalog.manifest_of(commit))
        except TieredError as exc:
            _log.warning("no copy of the manifest of %s here: %s", commit.checkpoint_id, exc)


def _places(commit: Commit, names: frozenset[str]) -> bool:
    return not names.isdisjoint(one.shard for one in commit.placements)


def _renewed(known: _Waiting | None, names: frozenset[str]) -> _Waiting:
    """Return the state of shard files to which others have come, or of which some are gone."""
    renewed = _Waiting(since=time.monotonic(), names=names)
    if known is not None:
        renewed.headers = {name: known.headers[name] for name in known.headers.keys() & names}
        renewed.lengths = {name: known.lengths[name] for name in renewed.headers}
        renewed.sent = known.sent & names
    return renewed
