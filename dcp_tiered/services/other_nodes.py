"""The part of a flush on nodes that did not publish: the coordinator's manifest is not here.

Shard files of such a node are uploaded once the node's other ranks have sealed theirs, or after a
linger time, and then the commit is awaited. On the coordinator's node, shard files without a manifest
are a save that is still going on or one that died, so they stay where they are.
"""

import logging
import time
from dataclasses import dataclass, field

from dcp_tiered.config import Limits
from dcp_tiered.errors import TieredError
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
from dcp_tiered.services.packs import PackStore
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)
_ASK_S_MAX = 15.0


@dataclass(kw_only=True)
class _Waiting:
    """Shard files of one checkpoint id that no manifest or commit known here names."""

    since: float
    names: frozenset[str]
    headers: dict[str, Header] = field(default_factory=dict)
    uploaded: bool = False
    asked: int = 0
    not_before: float = 0.0


class UnpublishedShards:
    """Uploads this node's shard files of checkpoints that another node publishes."""

    def __init__(
        self, catalog: Catalog, packs: PackStore, local: LocalTier, node: str, limits: Limits
    ) -> None:
        self._catalog = catalog
        self._packs = packs
        self._local = local
        self._node = node
        self._limits = limits
        self._waiting: dict[str, _Waiting] = {}
        self._ended: dict[str, frozenset[str]] = {}

    def has_work(self) -> bool:
        """Tell whether shard files of other nodes' checkpoints wait here."""
        self._look()
        return bool(self._waiting)

    def step(self) -> bool:
        """Upload what is ready and look for commits; return whether anything is still open."""
        self._look()
        for checkpoint_id, waiting in list(self._waiting.items()):
            if time.monotonic() < waiting.not_before:
                continue
            try:
                self._advance(checkpoint_id, waiting)
            except TieredError as exc:
                waiting.asked += 1
                waiting.not_before = time.monotonic() + self._limits.flush_retry_s_max / 4
                _log.warning("shard files of %s are not durable yet: %s", checkpoint_id, exc)
        return bool(self._waiting)

    def _look(self) -> None:
        """Find shard files that are neither published here nor in a commit known here."""
        for checkpoint_id in self._catalog.local_ids():
            try:
                names = self._unnamed(checkpoint_id)
            except TieredError:
                continue
            known = self._waiting.get(checkpoint_id)
            if not names or names == self._ended.get(checkpoint_id):
                self._waiting.pop(checkpoint_id, None)
            elif known is None or known.names != names:
                self._waiting[checkpoint_id] = _Waiting(since=time.monotonic(), names=names)

    def _unnamed(self, checkpoint_id: str) -> frozenset[str]:
        sealed = self._catalog.sealed(checkpoint_id)
        if not sealed or self._catalog.published(checkpoint_id) is not None:
            return frozenset()
        commit = self._catalog.noted(checkpoint_id)
        placed = {place.shard for place in commit.placements} if commit else set()
        return frozenset(sealed) - placed

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
            return
        waiting.asked += 1
        waiting.not_before = time.monotonic() + min(_ASK_S_MAX, 0.25 * 2 ** min(waiting.asked, 8))
        if time.monotonic() - waiting.since > self._limits.incomplete_after_s:
            _log.error("no commit names the shard files of %s; giving up on them", checkpoint_id)
            self._end(checkpoint_id, waiting)

    def _end(self, checkpoint_id: str, waiting: _Waiting) -> None:
        self._ended[checkpoint_id] = waiting.names
        self._waiting.pop(checkpoint_id, None)

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
        """Copy the commit that names these shard files, once it is there."""
        highest, state = state_of(self._catalog.records(checkpoint_id))
        if isinstance(state, Commit) and names & {place.shard for place in state.placements}:
            self._catalog.note(state, highest)
            return True
        return False

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
    return header.local_world_size == header.world_size or header.world_size == 1
