"""DCP's `StorageReader`: a resume reads the nearest complete copy, on any number of ranks.

Follow one load: `read_metadata` agrees across ranks on a checkpoint and decodes its manifest, DCP
plans, `prepare_global_plan` proves that all ranks read the same one, `read_data` reads the blocks
that are needed, verifies them and copies them into the targets.
"""

import dataclasses
import io
import logging
import os
import time
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_tiered import config, metrics, stack
from dcp_tiered.config import Limits
from dcp_tiered.engines import tensors
from dcp_tiered.engines.arena import Arena
from dcp_tiered.errors import ConflictError, InvalidError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Entries, Entry, Manifest, decode_manifest
from dcp_tiered.load_items import READ_BYTES_MAX, Chunks, Piece, Read, plan_reads
from dcp_tiered.metrics import Sample
from dcp_tiered.services import resolve
from dcp_tiered.services.resolve import Choice, Offer
from dcp_tiered.services.shard_access import ShardAccess
from dcp_tiered.syscalls import memory_at

_log = logging.getLogger(__name__)

_THREADS = 3
_STRAIGHT_BYTES_MIN = 1 << 20
"""A read of this size that fills its target alone goes there without a copy, if memory allows."""
_BUFFER_BYTES = READ_BYTES_MAX + (64 << 10)
"""Room for the page at either end that a read around the page cache takes along."""
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
    chunks: Chunks


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
        residency: A policy, as for `TieredWriter`: the durable tier is read only where that allows
            it to be, and every request is held to host, region and owner.
        **options: fsspec options by protocol, such as `s3={"endpoint_url": ...}`.

    Raises:
        InvalidError: The URL, the policy or an option cannot be right.
        ResidencyError: The policy has no rule for such a durable tier.
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
        residency: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._settings = config.settings(url, local, options, limits, residency=residency)
        self._group = process_group
        self._no_dist = no_dist
        self._trust_bytes = trust_bytes
        self._requested: object = None
        self._load: _Load | None = None
        self._read_s = 0.0
        self._read_bytes = {"local": 0, "durable": 0}
        self._stack = stack.build_reading(self._settings)
        count = self._settings.limits.inflight_bytes_max // _BUFFER_BYTES
        self._arena = Arena(_BUFFER_BYTES, min(count, _THREADS + 1))
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
        load, begun = self._current(), time.monotonic()
        reads = plan_reads(plan.items, load.chunks, load.access, planner)
        for read, data in self._read_all(load, reads, planner):
            for piece in read.pieces:
                self._deliver(load, read, piece, data, planner)
        self._read_s += time.monotonic() - begun
        for tier, count in load.access.bytes_read.items():
            self._read_bytes[tier] += count
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether DCP may use this text as a checkpoint id with this reader."""
        return isinstance(checkpoint_id, str) and layout.is_checkpoint_id(checkpoint_id)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this reader, see `dcp_tiered.metrics`."""
        yield metrics.READ, {}, self._read_s
        for tier, count in self._read_bytes.items():
            yield metrics.READ_BYTES, {"tier": tier}, count
        yield from self._arena.samples("read")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this reader, by name."""
        return metrics.flat(self.samples())

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
        choice = resolve.with_manifest(self._stack.catalog, choice)
        manifest = decode_manifest(choice.manifest or b"")
        chunks = Chunks(Entries.of(manifest.entries))
        access = ShardAccess(manifest.head, choice.commit, self._stack.local, self._stack.durable)
        _log.info(
            "loading %s, step %s, attempt %s, %s",
            choice.checkpoint_id,
            manifest.head.step,
            choice.attempt,
            "durable" if choice.commit else "on local tiers only",
        )
        return _Load(choice=choice, manifest=manifest, access=access, chunks=chunks)

    def _read_all(
        self, load: _Load, reads: list[Read], planner: LoadPlanner
    ) -> Iterator[tuple[Read, memoryview]]:
        """Read in several threads, in order: into targets, or into the arena's buffers.

        What is yielded stays as it is until the next one is asked for.
        """
        waiting: deque[tuple[Read, memoryview, ThreadFuture[memoryview]]] = deque()
        pool = ThreadPoolExecutor(_THREADS, "dcp-tiered-read")

        def deliver() -> tuple[Read, memoryview]:
            read, _, future = waiting[0]
            return read, future.result()

        def release() -> None:
            read, buffer, _ = waiting.popleft()
            read.pieces.clear()  # there may be a million
            if len(buffer) == self._arena.buffer_bytes:
                self._arena.give_back(buffer)

        try:
            for read in reads:
                # What is larger than a buffer takes memory of its own, when nothing else does.
                is_large = read.end - read.start > self._arena.buffer_bytes
                while waiting and (is_large or len(waiting) == self._arena.count):
                    yield deliver()
                    release()
                buffer = self._prepare(load, read, planner)
                args = read.shard, read.start, read.end, read.pieces, buffer
                waiting.append((read, buffer, pool.submit(load.access.read, *args)))
            while waiting:
                yield deliver()
                release()
        finally:
            pool.shutdown(cancel_futures=True)
            while waiting:
                release()

    def _prepare(self, load: _Load, read: Read, planner: LoadPlanner) -> memoryview:
        """Find the targets of a read; return the memory that it goes to."""
        index = load.access.index(read.shard)
        for piece in read.pieces:
            if piece.target.item.type is not LoadItemType.BYTE_IO:
                piece.find_place(index, planner)
        length, first = read.end - read.start, read.pieces[0]
        if len(read.pieces) == 1 and length >= _STRAIGHT_BYTES_MIN and first.is_whole_blocks:
            where = first.address
            if where is not None and where % load.access.alignment(read.shard) == 0:
                first.address = None
                return memory_at(where, length)
        small = length <= self._arena.buffer_bytes
        return self._arena.take() if small else memoryview(bytearray(length))

    def _deliver(
        self, load: _Load, read: Read, piece: Piece, data: memoryview, planner: LoadPlanner
    ) -> None:
        """Put verified bytes into their target, if they are not there; commit it when whole."""
        target = piece.target
        if target.item.type is LoadItemType.BYTE_IO:
            stream = io.BytesIO(data[piece.start - read.start : piece.end - read.start])
            if not self._trust_bytes:
                tensors.check_loadable(target.item.storage_index.fqn, stream, _UNSAFE_HINT)
            planner.load_bytes(target.item, stream)
            return
        if not piece.is_placed:
            piece.copy(load.access.index(read.shard), data, read.start, planner)
        target.pieces_left -= 1
        if not target.pieces_left:
            planner.commit_tensor(target.item, target.resolve(planner))
            target.tensor = None


def _metadata_of(manifest: Manifest) -> Metadata:
    """Return DCP's description of a checkpoint.

    Keys of the same kind, shape and properties share one object, which DCP only reads: there may be
    a million keys, and what is made for each is walked by the garbage collector again and again.
    """
    entries = Entries.of(manifest.entries)
    numbers, sorts = entries.alike()
    made = [_storage_metadata(entry) for entry in entries.chosen(numbers)]
    described = dict(zip(entries.fqns, map(made.__getitem__, sorts), strict=True))
    return Metadata(state_dict_metadata=described, planner_data=manifest.planner_data)


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
