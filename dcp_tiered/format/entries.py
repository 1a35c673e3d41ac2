"""The keys of a checkpoint and where their chunks lie: columns, since there may be a million.

Row i of the first columns is about key i; `shape` holds the dimensions of all keys end to end.
`boxes`, `shard` and `row` are about chunks, in the order of their keys.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.boxes import (
    BYTES,
    NDIM_MAX,
    TENSOR,
    byte_counts,
    check_disjoint,
    check_inside,
    exclusive_sum,
    gather,
    row_ids,
)
from dcp_tiered.format.columns import Array, pack_strings, take, unpack_strings
from dcp_tiered.format.shardfile import DTYPES, ITEMSIZES, dtype_code

COLUMNS = {
    "kind": "u1",
    "dtype": "u1",
    "requires_grad": "u1",
    "ndim": "u1",
    "shape": "i8",
    "chunks": "u4",
    "boxes": "i8",
    "shard": "u4",
    "row": "u4",
}
"""Columns of a manifest, in the order in which they are stored; the names come behind them."""


class Chunk(NamedTuple):
    """Where a chunk of a tensor, or the bytes of an entry, are stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard: int
    """Position in `Manifest.shards`."""
    row: int
    """Row in that shard file's footer."""


class Entry(NamedTuple):
    """One key of the state dict; opaque bytes when `dtype` is None."""

    fqn: str
    dtype: str | None
    chunks: tuple[Chunk, ...]
    """In DCP's order; exactly one for opaque bytes."""
    shape: tuple[int, ...] = ()
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries(Collection[Entry]):
    """Entries as columns; iterating makes an `Entry` of each, which nothing here keeps."""

    fqns: list[str] = field(repr=False)
    kind: Array
    """0 tensor, 1 bytes; u1."""
    dtype: Array
    """Code; u1."""
    requires_grad: Array
    """0 or 1; u1."""
    ndim: Array
    """u1."""
    shape: Array
    """Dimensions of all tensors, end to end; i8."""
    chunks: Array
    """Number of chunks; u4."""
    boxes: Array
    """Offsets, then sizes, of every chunk, end to end; i8."""
    shard: Array
    """Position in the manifest's shard files, per chunk; u4."""
    row: Array
    """Row in that shard file's footer, per chunk; u4."""

    @classmethod
    def of(cls, entries: Collection[Entry]) -> Self:
        """Return entries as columns.

        Raises:
            InvalidError: The format has no code for a dtype.
        """
        if isinstance(entries, cls):
            return entries
        rows = list(entries)
        chunks = [chunk for entry in rows for chunk in entry.chunks]
        codes = [0 if entry.dtype is None else dtype_code(entry.dtype) for entry in rows]
        return cls.from_lists(
            [entry.fqn for entry in rows],
            kind=[BYTES if entry.dtype is None else TENSOR for entry in rows],
            dtype=codes,
            requires_grad=[entry.requires_grad for entry in rows],
            ndim=[len(entry.shape) for entry in rows],
            shape=list(chain.from_iterable(entry.shape for entry in rows)),
            chunks=[len(entry.chunks) for entry in rows],
            boxes=[n for chunk in chunks for n in (*chunk.offsets, *chunk.sizes)],
            shard=[chunk.shard for chunk in chunks],
            row=[chunk.row for chunk in chunks],
        )

    @classmethod
    def from_lists(cls, fqns: list[str], **columns: Iterable[int]) -> Self:
        """Return entries from keys and one sequence of numbers per column."""
        arrays = {name: np.array(columns[name], dtype=f"<{kind}") for name, kind in COLUMNS.items()}
        return cls(fqns=fqns, **arrays)

    @classmethod
    def decode(cls, columns: Mapping[str, Array], count: int, shards: int) -> Self:
        """Return the entries of a manifest.

        Args:
            columns: As `encode` returned them; hostile until they are checked here.
            count: Number of entries that the manifest claims.
            shards: Number of shard files that it lists.

        Raises:
            CorruptError: The columns do not fit together or describe something that cannot be.
        """
        arrays = {name: take(columns, name, kind) for name, kind in COLUMNS.items()}
        _check(arrays, count, shards)
        names, lengths = take(columns, "names", "u1"), take(columns, "name_lengths", "u4")
        fqns = unpack_strings(names, lengths, count)
        if len(set(fqns)) != count:
            raise CorruptError("manifest names a key twice")
        arrays["requires_grad"] = (arrays["requires_grad"] != 0).astype("u1")
        return cls(fqns=fqns, **arrays)

    def encode(self, shards: int) -> dict[str, Array]:
        """Return the columns of a manifest with that many shard files.

        Raises:
            CorruptError: A reader would refuse them.
        """
        arrays = {name: getattr(self, name) for name in COLUMNS}
        _check(arrays, len(self), shards)
        names, name_lengths = pack_strings(self.fqns)
        return arrays | {"name_lengths": name_lengths, "names": names}

    def __len__(self) -> int:
        return len(self.fqns)

    def __iter__(self) -> Iterator[Entry]:
        return self.chosen(range(len(self)))

    def __contains__(self, entry: object) -> bool:
        return any(entry == one for one in self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Collection):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def owner(self) -> Array:
        """Return the entry of each chunk."""
        return np.repeat(np.arange(len(self)), self.chunks)

    def chosen(self, numbers: Iterable[int]) -> Iterator[Entry]:
        """Yield some of the entries, by number."""
        ndim, counts = self.ndim.astype("i8"), self.chunks.astype("i8")
        shape_start = exclusive_sum(ndim).tolist()
        chunk_start = exclusive_sum(counts).tolist()
        box_start = exclusive_sum(2 * ndim * counts).tolist()
        lists = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "fqns"}
        column = {name: array.tolist() for name, array in lists.items()}
        for at in numbers:
            width, first, begin = column["ndim"][at], chunk_start[at], box_start[at]
            chunks = []
            for chunk in range(first, first + column["chunks"][at]):
                box = tuple(column["boxes"][begin : begin + 2 * width])
                place = column["shard"][chunk], column["row"][chunk]
                chunks.append(Chunk(box[:width], box[width:], *place))
                begin += 2 * width
            yield Entry(
                self.fqns[at],
                DTYPES[column["dtype"][at]] if column["kind"][at] == TENSOR else None,
                tuple(chunks),
                tuple(column["shape"][shape_start[at] : shape_start[at] + width]),
                bool(column["requires_grad"][at]),
            )

    def numbers(self) -> dict[tuple[str, tuple[int, ...] | None], int]:
        """Return the number of every chunk, by key and offsets; None for opaque bytes."""
        owner = self.owner()
        ndim, kind = self.ndim.astype("i8")[owner], self.kind[owner]
        box_start = exclusive_sum(2 * ndim)
        # Most chunks start where others do: each corner is one tuple.
        corners: list[tuple[int, ...] | None] = [None]
        corner = np.zeros(len(owner), dtype="i8")
        for width in np.unique(ndim).tolist():
            one = np.flatnonzero((ndim == width) & (kind == TENSOR))
            offsets = gather(self.boxes, box_start[one], width)
            first, which = row_ids(offsets)
            corner[one] = which + len(corners)
            corners += map(tuple, offsets[first].tolist())
        keys = zip(
            map(self.fqns.__getitem__, owner.tolist()),
            map(corners.__getitem__, corner.tolist()),
            strict=True,
        )
        return dict(zip(keys, range(len(owner)), strict=True))

    def alike(self) -> tuple[list[int], list[int]]:
        """Find entries that differ in nothing but their key and the places of their chunks.

        Returns:
            The number of one entry of each sort, and for every entry the position of its sort in
            that list. An entry of several chunks is a sort of its own.
        """
        ndim, counts = self.ndim.astype("i8"), self.chunks.astype("i8")
        shape_start, box_start = exclusive_sum(ndim), exclusive_sum(2 * ndim * counts)
        first: list[int] = []
        sort = np.zeros(len(self), dtype="i8")
        for width in np.unique(ndim).tolist():
            one = np.flatnonzero((ndim == width) & (counts == 1))
            keys = [self.kind[one, None], self.dtype[one, None], self.requires_grad[one, None]]
            keys += [gather(self.shape, shape_start[one], width)]
            keys += [gather(self.boxes, box_start[one], 2 * width)]
            found, which = row_ids(np.concatenate(keys, axis=1, dtype="i8"))
            sort[one] = which + len(first)
            first += one[found].tolist()
        several = np.flatnonzero(counts != 1)
        sort[several] = np.arange(len(several)) + len(first)
        return first + several.tolist(), sort.tolist()


def _check(columns: dict[str, Array], count: int, shards: int) -> None:
    """Refuse columns that do not fit together, or boxes that cannot be."""
    counts = columns["chunks"].astype("i8")
    flat = [columns[name] for name in ("kind", "dtype", "requires_grad", "ndim")]
    if any(len(one) != count for one in (*flat, counts)):
        raise CorruptError("manifest columns differ in length")
    kind, ndim = columns["kind"], columns["ndim"].astype("i8")
    if np.any(kind > BYTES) or np.any(columns["dtype"] >= len(DTYPES)):
        raise CorruptError("manifest has a kind or dtype that this format does not know")
    opaque = kind == BYTES
    if np.any(ndim > NDIM_MAX) or np.any(ndim[opaque]) or np.any(counts[opaque] != 1):
        raise CorruptError("manifest has an entry with impossible dimensions or chunks")
    shard, total = columns["shard"], int(counts.sum())
    apart = len(shard) != total or len(columns["row"]) != total
    if apart or (total and int(shard.max()) >= shards):
        raise CorruptError("manifest has a chunk in no shard file that it lists")
    shape, boxes = columns["shape"], columns["boxes"]
    if int(ndim.sum()) != len(shape) or int((2 * ndim * counts).sum()) != len(boxes):
        raise CorruptError("manifest's dimensions do not add up")
    _check_boxes(ndim, counts, ITEMSIZES[columns["dtype"]], shape, boxes)


def _check_boxes(ndim: Array, counts: Array, itemsize: Array, shape: Array, boxes: Array) -> None:
    """Refuse chunks outside their tensor; together they may not claim more than the tensor."""
    owner = np.repeat(np.arange(len(ndim)), counts)
    shape_start, box_start = exclusive_sum(ndim), exclusive_sum(2 * ndim[owner])
    wholes, parts = np.zeros(len(ndim), dtype="i8"), np.zeros(len(owner), dtype="i8")
    for value in np.unique(ndim).tolist():
        entry, chunk = np.flatnonzero(ndim == value), np.flatnonzero(ndim[owner] == value)
        whole = gather(shape, shape_start[entry], value)
        box = gather(boxes, box_start[chunk], 2 * value)
        around = gather(shape, shape_start[owner[chunk]], value)
        check_inside(box[:, :value], box[:, value:], around)
        check_inside(np.zeros_like(whole), whole, whole)
        wholes[entry] = byte_counts(whole, itemsize[entry])
        parts[chunk] = byte_counts(box[:, value:], itemsize[owner[chunk]])
    check_disjoint(owner, parts, wholes)
