"""DCP's read items into few reads, and what was read into the targets.

What lies side by side in file and target is copied by the thread that reads it, or read straight
into the target; the rest goes through torch, by the thread that DCP calls.
"""

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_tiered.engines import tensors
from dcp_tiered.engines.targets import flat_address, is_one_run
from dcp_tiered.errors import InvalidError
from dcp_tiered.format.entries import Entries
from dcp_tiered.format.shardfile import BLOCK_BYTES, DTYPES, Index
from dcp_tiered.policy import ranges
from dcp_tiered.services.shard_access import Part, ShardAccess, whole_blocks

READ_BYTES_MAX = 8 << 20
_FOOTER_THREADS = 4
_GAP_BYTES_MAX = 128 << 10
"""Smaller than a block: no block is read that nobody asked for."""
_Box = tuple[tuple[int, ...], tuple[int, ...]]


class Chunks:
    """The stored chunks of a checkpoint, to be found by what DCP's plans say."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self._numbers = entries.numbers()

    def find(self, item: ReadItem) -> int:
        """Return the number of the chunk that an item reads.

        Raises:
            InvalidError: There is none.
        """
        fqn, offsets = item.storage_index.fqn, _offsets(item)
        number = self._numbers.get((fqn, offsets))
        if number is None:
            raise InvalidError(
                "the checkpoint has no "
                + ("object of that name" if offsets is None else f"tensor chunk at {(*offsets,)}"),
                None,
                fqn,
                "Load it as the kind of value that was saved; 'dcp-tiered inspect' shows it.",
            )
        return number


@dataclass(slots=True)
class Target:
    """A read item and how many of its pieces are still missing."""

    item: ReadItem
    pieces_left: int = 0
    tensor: torch.Tensor | None = None

    def resolve(self, planner: LoadPlanner) -> torch.Tensor:
        """Return the tensor that the item goes to; the planner is asked once.

        Raises:
            InvalidError: It has another shape.
        """
        tensor = self.tensor
        if tensor is None:
            tensor = self.tensor = planner.resolve_tensor(self.item).detach()
            if tensor.size() != self.item.lengths:
                raise InvalidError(
                    f"target has shape {tuple(tensor.size())} and"
                    f" {tuple(self.item.lengths)} is read",
                    None,
                    self.item.dest_index.fqn,
                    "Load into a state dict of the shapes that were saved.",
                )
        return tensor


@dataclass(slots=True)
class Piece(Part):
    """Bytes of a read item that are read at once."""

    target: Target
    box: _Box | None = None
    """Offsets in the stored chunk, and lengths; None for all that the item reads."""
    at: int | None = None
    """First byte of the target, whose memory is one run; None where a box says it."""
    is_placed: bool = False
    """The reading thread puts the bytes into the target."""

    def find_place(self, index: Index, planner: LoadPlanner) -> None:
        """Find out where in memory the bytes go as they are, if they do."""
        dtype = _dtype(index.dtype.item(self.row))
        place = self._place(planner)
        # As many bytes as elements: there are no gaps between rows in what is read.
        if self.box is None or place.numel() * dtype.itemsize == self.last - self.first:
            self.address = flat_address(place, dtype)
            self.is_placed = self.address is not None

    def copy(self, index: Index, data: memoryview, start: int, planner: LoadPlanner) -> None:
        """Copy values from the bytes of a read, which begins at `start`, into the target."""
        dtype, at = _dtype(index.dtype.item(self.row)), self.item_start - start
        wanted = data[at + self.first : at + self.last]
        place = self._place(planner)
        sizes = index.box(self.row)[1] if self.at is None else tuple(place.shape)
        lengths = self.box[1] if self.box else sizes
        place.copy_(tensors.box_view(wanted, dtype, 0, lengths, sizes))

    def _place(self, planner: LoadPlanner) -> torch.Tensor:
        """Return the part of the target that this piece fills."""
        place = self.target.resolve(planner)
        if self.at is not None:
            size = place.dtype.itemsize
            return place.view(-1).narrow(0, self.at // size, (self.last - self.first) // size)
        if self.box is not None:
            first = self.target.item.storage_offsets
            for dim, (offset, length) in enumerate(zip(*self.box, strict=True)):
                place = place.narrow(dim, offset - first[dim], length)
        return place


@dataclass(slots=True)
class Read:
    """One read of a shard file and what is wanted of it."""

    shard: int
    start: int
    end: int
    pieces: list[Piece]


def plan_reads(
    items: Sequence[ReadItem], chunks: Chunks, access: ShardAccess, planner: LoadPlanner
) -> list[Read]:
    """Return what to read, ordered by shard file and place in it; commits what is empty.

    Args:
        items: Of DCP's plan.
        chunks: Of the checkpoint.
        access: To its shard files.
        planner: DCP's.

    Raises:
        CorruptError: A shard file has something else there than the manifest says.
        InvalidError: The plan reads what the checkpoint does not have.
    """
    # Numbers, not tuples: a million objects more would make Python look through all there are.
    numbers = [chunks.find(item) for item in items]
    shards = np.unique(chunks.entries.shard[numbers]).tolist()
    with ThreadPoolExecutor(_FOOTER_THREADS, "dcp-tiered-footer") as pool:
        indexes = dict(zip(shards, pool.map(access.index, shards), strict=True))
    wanted: dict[int, list[Piece]] = {shard: [] for shard in shards}
    for item, number in zip(items, numbers, strict=True):
        shard, row = chunks.entries.shard.item(number), chunks.entries.row.item(number)
        index, target = indexes[shard], Target(item)
        sizes = index.require(row, item.storage_index.fqn, _offsets(item))
        length = index.length.item(row)
        is_whole = sizes is None or (item.lengths == sizes and not any(item.storage_offsets))
        if sizes is None or (is_whole and 0 < length <= READ_BYTES_MAX):
            wanted[shard].append(_piece(index, row, target, 0, length))
        elif item.lengths.numel():
            wanted[shard] += _pieces(index, row, sizes, target, planner)
        if not target.pieces_left:
            planner.commit_tensor(item, target.resolve(planner))
    return [
        Read(shard, start, end, inside)
        for shard, pieces in wanted.items()
        for start, end, inside in ranges.coalesce(pieces, _GAP_BYTES_MAX, READ_BYTES_MAX)
    ]


def _offsets(item: ReadItem) -> tuple[int, ...] | None:
    """Return where the stored chunk lies in its tensor, None for opaque bytes."""
    return None if item.type is LoadItemType.BYTE_IO else item.storage_index.offset or ()


def _pieces(
    index: Index, row: int, sizes: tuple[int, ...], target: Target, planner: LoadPlanner
) -> list[Piece]:
    """Cut a read item into pieces that are worth one read each."""
    item = target.item
    _check_box(item, sizes)
    dtype = _dtype(index.dtype.item(row))
    first, end = ranges.span(item.storage_offsets, item.lengths, sizes)
    if end - first == item.lengths.numel() and is_one_run(target.resolve(planner), dtype):
        return _runs(index, row, target, first * dtype.itemsize, end * dtype.itemsize)
    return [
        _piece(index, row, target, first * dtype.itemsize, end * dtype.itemsize, box=box)
        for box in ranges.parts(
            item.storage_offsets,
            item.lengths,
            sizes,
            READ_BYTES_MAX // dtype.itemsize,
            (BLOCK_BYTES - 1) // dtype.itemsize,
        )
        for first, end in [ranges.span(*box, sizes)]
    ]


def _runs(index: Index, row: int, target: Target, first: int, last: int) -> list[Piece]:
    """Cut bytes that lie side by side in file and target, on borders of blocks."""
    border = first - first % READ_BYTES_MAX + READ_BYTES_MAX
    cuts = [first, *range(border, last, READ_BYTES_MAX), last]
    return [
        _piece(index, row, target, begin, end, at=begin - first)
        for begin, end in itertools.pairwise(cuts)
    ]


def _piece(
    index: Index,
    row: int,
    target: Target,
    first: int,
    last: int,
    *,
    box: _Box | None = None,
    at: int | None = None,
) -> Piece:
    target.pieces_left += 1
    item_start = index.start.item(row)
    start, end = whole_blocks(item_start, index.length.item(row), first, last)
    return Piece(row, item_start, first, last, start, end, None, target, box, at)


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


@functools.cache
def _dtype(code: int) -> torch.dtype:
    return tensors.dtype_of(DTYPES[code])
