"""One rank's shard file: onto the local tier, or past it where that is full and may be passed by.

A shard file that is written through is a pack of its own on the durable tier before the save ends.
No local copy of it exists, so its checkpoint can be loaded as soon as it is committed, not before.
"""

import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_tiered import metrics, save_items, stack
from dcp_tiered.engines import shard_sink
from dcp_tiered.engines.held import HeldImage
from dcp_tiered.engines.shard_sink import ShardSink
from dcp_tiered.errors import TieredError, UnavailableError
from dcp_tiered.format import layout
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.pack import plan_pack
from dcp_tiered.format.shardfile import END_MAGIC, PAGE_BYTES, Header, Index, decode_index
from dcp_tiered.metrics import Sample
from dcp_tiered.services.local_space import LocalSpace
from dcp_tiered.stack import Stack
from dcp_tiered.version import __version__

if TYPE_CHECKING:
    from dcp_tiered.interfaces import Engine

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """What a rank tells the coordinator about its shard file; one per rank and save."""

    name: str
    node: str
    length: int
    crc32c: int
    footer_start: int
    tail: bytes
    """Footer and trailer: the columnar index of what is in the file."""
    policy_sha256: str | None
    """Of the residency policy that this rank was given."""

    def index(self) -> Index:
        """Return what is in the file."""
        trailer = decode_trailer(self.tail[-TRAILER_BYTES:], self.length, END_MAGIC)
        return decode_index(trailer, self.tail[: trailer.stored_length])


class ShardWriter:
    """Writes the shard files of one rank; its buffers serve many saves.

    Args:
        stack_: The run on this node.
        space: Its local tier, to be freed where the disk is full.
        trust_bytes: Write objects that `torch.load(weights_only=True)` refuses.
    """

    def __init__(self, stack_: Stack, space: LocalSpace, *, trust_bytes: bool) -> None:
        self._stack = stack_
        self._space = space
        self._trust_bytes = trust_bytes
        self._arena = stack.write_arena()
        self._engine: Engine | None = None
        self._bytes_through = 0

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this object."""
        yield metrics.WRITE_THROUGH_BYTES, {}, self._bytes_through
        yield from self._arena.samples("write")

    def write(self, header: Header, plan: SavePlan, planner: SavePlanner) -> ShardResult:
        """Write a shard file; on a full disk evict what is durable, and try again.

        How much is needed is not known: objects have no size before they are written, and other
        ranks want room too. So every try asks for twice as much, until nothing is left to evict.

        Raises:
            UnavailableError: The disk is full or fails; or the store does, where the file was to
                be written through.
            ResidencyError: It was to be written through, and may not leave this node.
        """
        wanted = PAGE_BYTES + save_items.bytes_of(plan.items)
        while True:
            try:
                return self._write(header, plan, planner)
            except UnavailableError as exc:
                if exc.errno not in _FULL:
                    raise
                if self._space.free(wanted):
                    _log.warning("evicted durable checkpoints, writing again: %s", exc)
                elif self._stack.settings.on_local_full == "write_through":
                    return self._write_through(header, plan, planner, exc)
                else:
                    raise
            wanted *= 2

    def _write(self, header: Header, plan: SavePlan, planner: SavePlanner) -> ShardResult:
        local = self._stack.need_local()
        name = layout.shard_name(header.rank, header.token)
        estimate = PAGE_BYTES + save_items.bytes_of(plan.items)
        engine = self._engine = self._engine or stack.engine(
            self._stack.settings, local.base, self._arena
        )
        with local.create(layout.key(header.checkpoint_id, name)) as staged:
            with shard_sink.writing(staged, engine, header, estimate) as sink:
                result = self._fill(sink, header, plan, planner)
            staged.seal()
        return result

    def _write_through(
        self, header: Header, plan: SavePlan, planner: SavePlanner, full: TieredError
    ) -> ShardResult:
        """Bring a shard file to the durable tier as a pack, without a file on this node."""
        image = HeldImage()
        checkpoint_id = header.checkpoint_id
        result = self._fill(ShardSink(image, checkpoint_id, header), header, plan, planner)
        row = (result.name, result.length, result.crc32c)
        pack = plan_pack(checkpoint_id, header.node, [row], __version__)
        image.append(result.length, memoryview(pack.tail))
        image.length, image.crc32c = pack.length, pack.crc32c
        _log.warning("writing %d bytes through to the durable tier: %s", pack.length, full)
        with stack.write_through(self._stack) as packs:
            packs.send(checkpoint_id, pack, image)
        self._bytes_through += pack.length
        return result

    def _fill(
        self, sink: ShardSink, header: Header, plan: SavePlan, planner: SavePlanner
    ) -> ShardResult:
        for item, length in save_items.in_order(plan.items):
            save_items.write(sink, item, length, planner, trust_bytes=self._trust_bytes)
        footer_start, tail = sink.finish()
        return ShardResult(
            name=layout.shard_name(header.rank, header.token),
            node=header.node,
            length=sink.builder.cursor,
            crc32c=sink.builder.crc,
            footer_start=footer_start,
            tail=tail,
            policy_sha256=self._stack.policy_sha256(),
        )
