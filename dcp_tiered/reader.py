"""DCP's `StorageReader`: a resume reads the nearest complete copy, on any number of ranks.

Follow one load: `read_metadata` agrees across ranks on a checkpoint and decodes its manifest, DCP
plans, `prepare_global_plan` proves that all ranks read the same one, `read_data` reads the blocks
that are needed, verifies them and copies them into the targets.
"""

import dataclasses
import io
import logging
import os
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_tiered import config, stack
from dcp_tiered.config import Limits
from dcp_tiered.engines import tensors
from dcp_tiered.engines.arena import Arena
from dcp_tiered.errors import ConflictError, InvalidError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Entry, Manifest, decode_manifest
from dcp_tiered.format.shardfile import BLOCK_BYTES, DTYPES, block_count, dtype_bytes
from dcp_tiered.policy import ranges
from dcp_tiered.policy.ranges import Extent
from dcp_tiered.services import resolve
from dcp_tiered.services.resolve import Choice, Offer
from dcp_tiered.services.shard_access import ShardAccess

_log = logging.getLogger(__name__)

_THREADS = 4
_READ_BYTES_MAX = 8 << 20
_BUFFER_BYTES = _READ_BYTES_MAX + (1 << 20)
"""Room for the page at either end that a read around the page cache takes along."""
_GAP_BYTES_MAX = 128 << 10
"""Smaller than a block: no block is read that nobody asked for."""
_UNSAFE_HINT = (
    "Allow its class with torch.serialization.add_safe_globals, or pass trust_bytes=True to"
    " TieredReader if you trust what is in the storage."
)


@dataclass(kw_only=True)
class _Load:
    """State of one load; nothing of an earlier one is kept."""

    choice: Choice
    manifest: Manifest
    access: ShardAccess
    located: dict[tuple[str, tuple[int, ...] | None], tuple[int, int]]
    """Shard file and row of every chunk, by key and offsets; None for opaque bytes."""


@dataclass(kw_only=True)
class _Target:
    """A read item and how many of its parts are still missing."""

    item: ReadItem
    tensor: torch.Tensor | None = None
    parts_left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a read item that is read at once."""

    target: _Target
    row: int
    first_block: int
    end_block: int
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


class TieredReader(StorageReader):
    """Read DCP checkpoints from the nearest complete copy.

    `dcp.load` with a `checkpoint_id` loads that one, without it the newest complete one. When a
    process group is initialised, all its ranks have to take part, since they agree on what they
    load.

    Args:
        url: The run, as for `TieredWriter`.
        local: Directory on this node's NVMe. Default: `FSSPEC_TIERED_LOCAL`; without one,
            everything is read from the durable tier.
        process_group: The group given to `dcp.load`; None is the default group, as there.
        no_dist: Do not talk to other ranks, as `dcp.load(no_dist=True)`.
        trust_bytes: Load objects that `torch.load(weights_only=True)` refuses. They can run code.
        limits: Bounds that differ from the defaults.
        **options: fsspec options by protocol, such as `s3={"endpoint_url": ...}`.

    Raises:
        InvalidError: The URL or an option cannot be right.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        local: str | os.PathLike[str] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        trust_bytes: bool = False,
        limits: Limits | None = None,
        **options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._settings = config.settings(url, local, options, limits)
        self._group = process_group
        self._no_dist = no_dist
        self._trust_bytes = trust_bytes
        self._requested: object = None
        self._load: _Load | None = None
        self._stack = stack.build(self._settings)
        count = self._settings.limits.inflight_bytes_max // _BUFFER_BYTES
        self._arena = Arena(_BUFFER_BYTES, min(max(1, count), _THREADS + 2))
        if self._settings.local is None:
            _log.info("no local tier is configured, reading from %s only", self._settings.url.root)

    def __repr__(self) -> str:
        return f"TieredReader({self._settings.url.root!r}, local={str(self._settings.local)!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the checkpoint that was loaded last, or that was asked for."""
        if self._load is not None:
            return self._load.choice.checkpoint_id
        return None if self._requested is None else str(self._requested)

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes that the last load read on this rank, by tier."""
        return dict(self._load.access.bytes_read) if self._load else {}

    # What DCP calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Store the id of the next load."""
        self._requested = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Agree on a checkpoint and describe it.

        There is no parameter named `kwargs`: DCP would take it as leave to try again without
        collectives, and a failure on one rank would leave the others waiting.
        """
        requested, self._requested, self._load = self._requested, None, None
        try:
            choice = self._agree(requested)
            self._load = self._open(choice)
            return _metadata_of(self._load.manifest)
        except TieredError as exc:
            _log.error("cannot read the checkpoint's metadata: %s", exc)
            # DCP swallows every Exception here and reports "metadata is None". Its own exception
            # type, which is none, carries the cause to all ranks.
            raise CheckpointException(
                "read_metadata", {self._rank(): (exc, traceback.StackSummary())}
            ) from exc

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Nothing to do: `read_metadata` did it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which checkpoint this rank reads."""
        choice = self._current().choice
        return dataclasses.replace(
            plan, storage_data=(choice.checkpoint_id, choice.attempt, choice.sha256)
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Prove that all ranks read the same checkpoint."""
        seen = {plan.storage_data for plan in plans if plan.storage_data is not None}
        if len(seen) > 1:
            text = ", ".join(sorted(f"{name} (attempt {attempt})" for name, attempt, _ in seen))
            raise ConflictError(
                f"ranks would load different checkpoints: {text[:500]}",
                None,
                None,
                "Give TieredReader the process_group that dcp.load gets, or the same checkpoint_id"
                " to all ranks.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, verify and copy what the plan asks for."""
        load = self._current()
        for shard, extents in self._extents(load, plan, planner).items():
            reads = ranges.coalesce(extents, _GAP_BYTES_MAX, _READ_BYTES_MAX)
            for inside, start, data in self._read_all(load.access, shard, reads):
                for extent in inside:
                    part = data[extent.start - start : extent.end - start]
                    self._deliver(load, shard, extent.what, part, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether DCP may use this text as a checkpoint id with this reader."""
        return isinstance(checkpoint_id, str) and layout.is_checkpoint_id(checkpoint_id)

    def close(self) -> None:
        """Give connections back."""
        self._stack.close()

    # How.

    def _current(self) -> _Load:
        if self._load is None:
            raise InvalidError("no load is going on: DCP did not call read_metadata")
        return self._load

    def _talks(self) -> bool:
        return not self._no_dist and dist.is_available() and dist.is_initialized()

    def _rank(self) -> int:
        return dist.get_rank(self._group) if self._talks() else 0

    def _agree(self, requested: object) -> Choice:
        """Choose one checkpoint for all ranks: the one collective of ours."""
        catalog = self._stack.catalog
        offer = resolve.offer(catalog, requested)
        if not self._talks():
            choice = resolve.choose(catalog, [offer])
        else:
            choice = self._agree_across_ranks(offer)
        if isinstance(choice, TieredError):
            raise choice
        return choice

    def _agree_across_ranks(self, offer: Offer) -> Choice | TieredError:
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        offers: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(offer, offers, dst=first, group=self._group)
        answer: list[Any] = [resolve.choose(self._stack.catalog, offers) if offers else None]
        dist.broadcast_object_list(answer, src=first, group=self._group)
        choice: Choice | TieredError = answer[0]
        return choice

    def _open(self, choice: Choice) -> _Load:
        data = choice.manifest or resolve.local_manifest(self._stack.catalog, choice)
        manifest = decode_manifest(data)
        located: dict[tuple[str, tuple[int, ...] | None], tuple[int, int]] = {}
        for entry in manifest.entries:
            for chunk in entry.chunks:
                key = (entry.fqn, None if entry.dtype is None else chunk.offsets)
                located[key] = (chunk.shard, chunk.row)
        access = ShardAccess(manifest.head, choice.commit, self._stack.local, self._stack.durable)
        _log.info(
            "loading %s, step %s, attempt %s, %s",
            choice.checkpoint_id,
            manifest.head.step,
            choice.attempt,
            "durable" if choice.commit else "on local tiers only",
        )
        return _Load(choice=choice, manifest=manifest, access=access, located=located)

    def _extents(
        self, load: _Load, plan: LoadPlan, planner: LoadPlanner
    ) -> dict[int, list[Extent[_Part]]]:
        """Return the byte ranges to read, by shard file."""
        items = [(item, *self._locate(load, item)) for item in plan.items]
        shards = sorted({shard for _, shard, _ in items})
        with ThreadPoolExecutor(_THREADS, "dcp-tiered-footer") as pool:
            list(pool.map(load.access.index, shards))
        extents: dict[int, list[Extent[_Part]]] = {shard: [] for shard in shards}
        for item, shard, row in items:
            target = _Target(item=item)
            index = load.access.index(shard)
            index.require(row, item.storage_index.fqn, _offsets(item))
            start, length = int(index.start[row]), int(index.length[row])
            for part in self._parts(load, target, shard, row):
                target.parts_left += 1
                begin = start + part.first_block * BLOCK_BYTES
                end = start + min(length, part.end_block * BLOCK_BYTES)
                extents[shard].append(Extent(begin, end, part))
            if not target.parts_left:
                planner.commit_tensor(item, _resolve(target, planner))
        return extents

    def _locate(self, load: _Load, item: ReadItem) -> tuple[int, int]:
        stored = item.storage_index
        opaque = item.type is LoadItemType.BYTE_IO
        offsets = _offsets(item)
        found = load.located.get((stored.fqn, offsets))
        if found is None:
            raise InvalidError(
                f"the checkpoint has no {'object' if opaque else 'tensor chunk'} of that name"
                + ("" if opaque else f" at {offsets}"),
                None,
                stored.fqn,
                "Load it as the kind of value that was saved; 'dcp-tiered inspect' shows it.",
            )
        return found

    def _parts(self, load: _Load, target: _Target, shard: int, row: int) -> Iterator[_Part]:
        index, item = load.access.index(shard), target.item
        if item.type is LoadItemType.BYTE_IO:
            yield _Part(
                target=target,
                row=row,
                first_block=0,
                end_block=block_count(int(index.length[row])),
            )
            return
        itemsize = dtype_bytes(int(index.dtype[row]))
        sizes = index.box(row)[1]
        _check_box(item, sizes)
        for offsets, lengths in ranges.parts(
            item.storage_offsets,
            item.lengths,
            sizes,
            _READ_BYTES_MAX // itemsize,
            (BLOCK_BYTES - 1) // itemsize,
        ):
            first, end = ranges.span(offsets, lengths, sizes)
            yield _Part(
                target=target,
                row=row,
                first_block=first * itemsize // BLOCK_BYTES,
                end_block=block_count(end * itemsize),
                offsets=offsets,
                lengths=lengths,
            )

    def _read_all(
        self, access: ShardAccess, shard: int, reads: list[tuple[int, int, list[Extent[_Part]]]]
    ) -> Iterator[tuple[list[Extent[_Part]], int, memoryview]]:
        """Read in several threads, in order, into the arena's buffers and nothing else.

        What is yielded stays as it is until the next one is asked for.
        """

        def read(
            start: int, end: int, inside: list[Extent[_Part]], buffer: memoryview
        ) -> memoryview:
            wanted = [(e.what.row, e.what.first_block, e.what.end_block) for e in inside]
            return access.read(shard, start, end, wanted, buffer)

        def deliver() -> tuple[list[Extent[_Part]], int, memoryview]:
            inside, start, future, _ = waiting[0]
            return inside, start, future.result()

        def release() -> None:
            buffer = waiting.popleft()[3]
            if len(buffer) == arena.buffer_bytes:
                arena.give_back(buffer)

        arena = self._arena
        waiting: deque[tuple[list[Extent[_Part]], int, ThreadFuture[memoryview], memoryview]] = (
            deque()
        )
        pool = ThreadPoolExecutor(_THREADS, "dcp-tiered-read")
        try:
            for start, end, inside in reads:
                if len(waiting) == arena.count:
                    yield deliver()
                    release()
                # A single object larger than a buffer gets memory of its own.
                small = end - start <= arena.buffer_bytes
                buffer = arena.take() if small else memoryview(bytearray(end - start))
                future = pool.submit(read, start, end, inside, buffer)
                waiting.append((inside, start, future, buffer))
            while waiting:
                yield deliver()
                release()
        finally:
            pool.shutdown(cancel_futures=True)
            while waiting:
                release()

    def _deliver(
        self, load: _Load, shard: int, part: _Part, data: memoryview, planner: LoadPlanner
    ) -> None:
        """Copy verified bytes into their target, and commit it when it is whole."""
        target, item = part.target, part.target.item
        if item.type is LoadItemType.BYTE_IO:
            stream = io.BytesIO(data)
            if not self._trust_bytes:
                tensors.check_loadable(item.storage_index.fqn, stream, _UNSAFE_HINT)
            planner.load_bytes(item, stream)
            return
        index = load.access.index(shard)
        sizes = index.box(part.row)[1]
        dtype = tensors.dtype_of(DTYPES[index.dtype[part.row]])
        first = ranges.span(part.offsets, part.lengths, sizes)[0]
        before = part.first_block * BLOCK_BYTES // dtype.itemsize
        values = tensors.box_view(data, dtype, first - before, part.lengths, sizes)
        whole = _resolve(target, planner)
        place = whole
        for dim, (offset, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
            place = place.narrow(dim, offset - item.storage_offsets[dim], length)
        place.copy_(values)
        target.parts_left -= 1
        if not target.parts_left:
            planner.commit_tensor(item, whole)
            target.tensor = None


def _offsets(item: ReadItem) -> tuple[int, ...] | None:
    """Return where the stored chunk lies in its tensor, None for opaque bytes."""
    if item.type is LoadItemType.BYTE_IO:
        return None
    return tuple(item.storage_index.offset or ())


def _resolve(target: _Target, planner: LoadPlanner) -> torch.Tensor:
    """Return the tensor that a read item goes to, asked for once."""
    if target.tensor is None:
        target.tensor = planner.resolve_tensor(target.item).detach()
        if target.tensor.size() != target.item.lengths:
            raise InvalidError(
                f"target has shape {tuple(target.tensor.size())} and"
                f" {tuple(target.item.lengths)} is read",
                None,
                target.item.dest_index.fqn,
                "Load into a state dict of the shapes that were saved.",
            )
    return target.tensor


def _check_box(item: ReadItem, sizes: tuple[int, ...]) -> None:
    boxes = zip(item.storage_offsets, item.lengths, sizes, strict=False)
    if not len(item.storage_offsets) == len(item.lengths) == len(sizes) or any(
        offset < 0 or length < 0 or offset + length > size for offset, length, size in boxes
    ):
        raise InvalidError(
            f"the plan reads {tuple(item.lengths)} at {tuple(item.storage_offsets)} from a chunk of"
            f" shape {sizes}",
            None,
            item.storage_index.fqn,
        )


def _metadata_of(manifest: Manifest) -> Metadata:
    """Return DCP's description of a checkpoint."""
    return Metadata(
        state_dict_metadata={entry.fqn: _storage_metadata(entry) for entry in manifest.entries},
        planner_data=manifest.planner_data,
    )


def _storage_metadata(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.dtype is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=tensors.dtype_of(entry.dtype), requires_grad=entry.requires_grad
        ),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ],
    )
