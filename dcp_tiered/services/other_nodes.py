"""The part of a flush on nodes that did not publish: the coordinator's manifest is not here.

Shard files of such a node are uploaded once the node's other ranks have sealed theirs, or after a
linger time, and then the commit is awaited. Where all ranks are on this node, shard files without a
manifest are a save that is still going on or one that died, so they stay where they are.
"""

import logging
import time
from dataclasses import dataclass, field

from dcp_tiered.config import Limits
from dcp_tiered.errors import AlreadyExistsError, CorruptError, IncompleteError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.pack import Pack, plan_pack
from dcp_tiered.format.records import Commit, state_of
from dcp_tiered.format.shardfile import (
    END_MAGIC,
    PAGE_BYTES,
    Header,
    decode_header,
    decode_index,
    file_crc,
)
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy.packing import Candidate, group
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_changes import LocalChanges
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.progress import Report, ReportFile, describe_error
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)
_ASK_S_MAX = 15.0
_BAD_TRIES_MAX = 3


@dataclass(kw_only=True)
class _Waiting:
    """Shard files of one checkpoint id that no manifest or commit known here names."""

    since: float
    names: frozenset[str]
    headers: dict[str, Header] = field(default_factory=dict)
    uploaded: bool = False
    asked: int = 0
    tried_at: float = 0.0
    not_before: float = 0.0
    bad_tries: int = 0
    error: TieredError | None = None


class UnpublishedShards:
    """Uploads this node's shard files of checkpoints that another node publishes."""

    def __init__(
        self,
        catalog: Catalog,
        packs: PackStore,
        local: LocalTier,
        node: str,
        limits: Limits,
        reports: ReportFile,
    ) -> None:
        self._catalog = catalog
        self._packs = packs
        self._local = local
        self._node = node
        self._limits = limits
        self._reports = reports
        self._changes = LocalChanges(local)
        self._waiting: dict[str, _Waiting] = {}
        self._ended: dict[str, _Waiting] = {}
        """Given up, or left over: not looked at again as long as the names are the same."""

    def has_work(self) -> bool:
        """Tell whether shard files of other nodes' checkpoints wait here."""
        self._look()
        return bool(self._waiting)

    def failures(self) -> dict[str, TieredError]:
        """Return the error of the last try of every id whose shard files are not durable."""
        states = self._ended | self._waiting
        return {name: state.error for name, state in states.items() if state.error is not None}

    def step(self) -> bool:
        """Upload what is ready and look for commits; return whether anything is still open."""
        self._look()
        for checkpoint_id, waiting in list(self._waiting.items()):
            if time.monotonic() < waiting.not_before:
                continue
            waiting.tried_at = time.time()
            try:
                self._advance(checkpoint_id, waiting)
            except TieredError as exc:
                self._failed(checkpoint_id, waiting, exc)
            except Exception as exc:  # noqa: BLE001 - logged and reported
                # One checkpoint that trips over a mistake of ours must not hold up all the others.
                _log.exception("cannot flush shard files of %s", checkpoint_id)
                text = f"{type(exc).__name__}: {str(exc)[:200]}"
                error = CorruptError(text, "local", checkpoint_id, "Look at flusher.log.")
                self._failed(checkpoint_id, waiting, error)
        return bool(self._waiting)

    def _failed(self, checkpoint_id: str, waiting: _Waiting, error: TieredError) -> None:
        """Note an error and come back later; damage is looked at a few times only."""
        waiting.error = error
        waiting.asked += 1
        waiting.not_before = time.monotonic() + min(
            self._limits.flush_retry_s_max, 0.25 * 2 ** min(waiting.asked, 16)
        )
        waiting.bad_tries += isinstance(error, CorruptError)
        ended = waiting.bad_tries >= _BAD_TRIES_MAX
        self._report(checkpoint_id, waiting, "damaged" if ended else "failed", error)
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
        for checkpoint_id in ids:
            if self._changes.is_unchanged(checkpoint_id):
                continue
            mark = self._changes.mark(checkpoint_id)
            try:
                names = self._unnamed(checkpoint_id)
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
                self._waiting[checkpoint_id] = _Waiting(since=time.monotonic(), names=names)

    def _unnamed(self, checkpoint_id: str) -> frozenset[str]:
        """Return the shard files that no manifest and no commit known on this node names.

        A manifest alone does not answer for the whole directory: the coordinator may have been on
        this node for an older save of the id and be on another one now.
        """
        sealed = frozenset(self._catalog.sealed(checkpoint_id))
        if not sealed:
            return sealed
        sealed -= self._catalog.noted_shards(checkpoint_id)
        return sealed - self._catalog.published_shards(checkpoint_id) if sealed else sealed

    def _advance(self, checkpoint_id: str, waiting: _Waiting) -> None:
        if not waiting.headers:
            waiting.headers = {name: self._header(checkpoint_id, name) for name in waiting.names}
        if not self._is_ready(waiting):
            return
        if all(_is_single_node(header) for header in waiting.headers.values()):
            self._end(checkpoint_id, waiting)
            return
        if not waiting.uploaded:
            self._upload(checkpoint_id, waiting)
            waiting.uploaded = True
        if self._note_commit(checkpoint_id, waiting.names):
            self._reports.drop(checkpoint_id)
            waiting.error = None
            if left := self._left_over(checkpoint_id, waiting.names):
                waiting.names = left
                self._end(checkpoint_id, waiting)
            return
        if waiting.names == self._left_over(checkpoint_id, waiting.names):
            self._end(checkpoint_id, waiting)
            return
        waiting.asked += 1
        waiting.not_before = time.monotonic() + min(_ASK_S_MAX, 0.25 * 2 ** min(waiting.asked, 8))
        if time.monotonic() - waiting.since > self._limits.incomplete_after_s:
            waiting.error = IncompleteError(
                "no commit names the shard files of this node",
                "durable",
                checkpoint_id,
                "Look at 'dcp-tiered status' on the coordinator's node, which commits.",
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
        try:
            return (self._local.root / checkpoint_id / name).stat().st_mtime_ns
        except OSError:
            return 0

    def _is_ready(self, waiting: _Waiting) -> bool:
        expected = {header.local_world_size for header in waiting.headers.values()}
        ranks = {header.rank for header in waiting.headers.values()}
        complete = None not in expected and len(ranks) >= max(n for n in expected if n is not None)
        return complete or time.monotonic() - waiting.since >= self._limits.linger_s

    def _upload(self, checkpoint_id: str, waiting: _Waiting) -> None:
        there: dict[str, Pack] = {}
        self._packs.find(checkpoint_id, there)
        packed = {shard.name for pack in there.values() for shard in pack.shards}
        rows = {name: self._row(checkpoint_id, name) for name in waiting.names - packed}
        candidates = [
            Candidate(name=name, rank=layout.shard_rank(name) or 0, length=row[1])
            for name, row in rows.items()
        ]
        for chosen in group(candidates, self._limits.pack_bytes_target):
            pack = plan_pack(
                checkpoint_id, self._node, [rows[one.name] for one in chosen], __version__
            )
            self._packs.upload(checkpoint_id, pack)

    def _note_commit(self, checkpoint_id: str, names: frozenset[str]) -> bool:
        """Copy the commit that names these shard files and its manifest, once they are there."""
        highest, state = state_of(self._catalog.records(checkpoint_id))
        if isinstance(state, Commit) and names & {place.shard for place in state.placements}:
            self._catalog.note(state, highest)
            self._copy_manifest(state)
            return True
        return False

    def _copy_manifest(self, commit: Commit) -> None:
        """Show the manifest of a committed checkpoint on this node too: a resume looks here first.

        What is missed here is read from the durable tier, so an error is none of the flush.
        """
        try:
            published = self._catalog.published(commit.checkpoint_id)
            if published is None or published.head.sequence < commit.sequence:
                number = 1 if published is None else published.number + 1
                name = layout.published_name(number)
                data = self._catalog.manifest_of(commit)
                self._local.put(layout.key(commit.checkpoint_id, name), data)
        except AlreadyExistsError:
            pass
        except TieredError as exc:
            _log.warning("no copy of the manifest of %s here: %s", commit.checkpoint_id, exc)

    def _header(self, checkpoint_id: str, name: str) -> Header:
        page = bytearray(PAGE_BYTES)
        self._local.read_into(layout.key(checkpoint_id, name), 0, memoryview(page))
        return decode_header(bytes(page))

    def _row(self, checkpoint_id: str, name: str) -> tuple[str, int, int]:
        """Return name, length and checksum of a shard file from its own footer."""
        key = layout.key(checkpoint_id, name)
        length = self._local.head(key).length
        end = bytearray(TRAILER_BYTES)
        self._local.read_into(key, length - TRAILER_BYTES, memoryview(end))
        trailer = decode_trailer(bytes(end), length, END_MAGIC)
        tail = bytearray(length - trailer.start)
        self._local.read_into(key, trailer.start, memoryview(tail))
        index = decode_index(trailer, bytes(tail[: trailer.stored_length]))
        return name, length, file_crc(index, bytes(tail))


def _is_single_node(header: Header) -> bool:
    return header.world_size in (header.local_world_size, 1)
