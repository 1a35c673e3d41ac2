"""Is what was planned in what the ranks sealed, exactly once? Proven before a publish."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dcp_tiered.errors import ConflictError, CorruptError, IncompleteError
from dcp_tiered.format.boxes import BYTES, exclusive_sum, gather, row_ids
from dcp_tiered.format.columns import Array
from dcp_tiered.format.entries import Entries
from dcp_tiered.format.shardfile import Index

_OPAQUE = -1
"""In place of the number of dimensions: opaque bytes are something else than a 0-d tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Chunks and bytes entries, planned or written; row i of every array is about part i."""

    key: Array
    """Number of the key."""
    ndim: Array
    """Dimensions, or `_OPAQUE`."""
    dtype: Array
    offsets: Array
    """Where in `dims` the offsets start."""
    sizes: Array
    """Where in `dims` the sizes start."""
    shape: Array
    """Where in `shapes` the shape of the whole tensor starts."""
    dims: Array
    shapes: Array

    @classmethod
    def planned(cls, entries: Entries) -> Self:
        owner = entries.owner()
        ndim = entries.ndim.astype("i8")
        if int((2 * ndim[owner]).sum()) != len(entries.boxes):
            raise CorruptError("the plan has a chunk of other dimensions than its tensor")
        offsets = exclusive_sum(2 * ndim[owner])
        return cls(
            key=owner,
            ndim=np.where(entries.kind == BYTES, _OPAQUE, ndim)[owner],
            dtype=entries.dtype[owner],
            offsets=offsets,
            sizes=offsets + ndim[owner],
            shape=exclusive_sum(ndim)[owner],
            dims=entries.boxes,
            shapes=entries.shape,
        )

    @classmethod
    def written(cls, keys: Array, indexes: Sequence[Index]) -> Self:
        ndim = _joined([index.ndim for index in indexes])
        kind = _joined([index.kind for index in indexes])
        dims = _joined([index.dims for index in indexes])
        offsets = exclusive_sum(3 * ndim)
        return cls(
            key=keys,
            ndim=np.where(kind == BYTES, _OPAQUE, ndim),
            dtype=_joined([index.dtype for index in indexes]),
            offsets=offsets,
            sizes=offsets + ndim,
            shape=offsets + 2 * ndim,
            dims=dims,
            shapes=dims,
        )

    def places(self, rows: Array, width: int) -> Array:
        """Return key and offsets of some parts of `width` dimensions, one row each."""
        offsets = gather(self.dims, self.offsets[rows], width)
        return np.concatenate((self.key[rows, None], offsets), axis=1)

    def contents(self, rows: Array, width: int) -> Array:
        """Return what else has to agree of some parts of `width` dimensions, one row each."""
        sizes = gather(self.dims, self.sizes[rows], width)
        shape = gather(self.shapes, self.shape[rows], width)
        return np.concatenate((self.dtype[rows, None], sizes, shape), axis=1)

    def where(self, row: int, fqns: Sequence[str]) -> str:
        """Return a part's name for a message."""
        width, start = int(self.ndim[row]), int(self.offsets[row])
        offsets = tuple(self.dims[start : start + width].tolist()) if width >= 0 else None
        return f"{fqns[int(self.key[row])]} at {offsets}"


def match(planned: Entries, indexes: Sequence[Index]) -> Entries:
    """Match a plan with the footers of all shard files, one to one.

    Args:
        planned: From DCP's own metadata; where its chunks lie is not looked at.
        indexes: Of the shard files, in the manifest's order.

    Returns:
        The plan with the places of its chunks.

    Raises:
        IncompleteError: Something is planned and was not written.
        ConflictError: Something was written twice.
        CorruptError: Something was written that is not what was planned.
    """
    number = dict(zip(planned.fqns, range(len(planned)), strict=True))
    # A key that nobody planned gets a number too, behind those of the plan.
    keys = [number.setdefault(fqn, len(number)) for index in indexes for fqn in index.fqns]
    wanted = _Parts.planned(planned)
    found = _Parts.written(np.array(keys, dtype="i8"), indexes)
    row = _pair(wanted, found, list(number))
    counts = [len(index.fqns) for index in indexes]
    starts = exclusive_sum(np.array(counts, dtype="i8"))
    shard = np.repeat(np.arange(len(counts)), counts)[row]
    return replace(planned, shard=shard.astype("<u4"), row=(row - starts[shard]).astype("<u4"))


def _pair(wanted: _Parts, found: _Parts, fqns: Sequence[str]) -> Array:
    """Return the written part of every planned one."""
    pair = np.full(len(wanted.key), -1, dtype="i8")
    twice, missing, unplanned, differs = [], [], [], []
    for ndim in np.union1d(wanted.ndim, found.ndim).tolist():
        width = max(ndim, 0)
        plan, rows = np.flatnonzero(wanted.ndim == ndim), np.flatnonzero(found.ndim == ndim)
        places = wanted.places(plan, width), found.places(rows, width)
        first, ids = row_ids(np.concatenate(places))
        in_plan, in_rows = ids[: len(plan)], ids[len(plan) :]
        times_planned = np.bincount(in_plan, minlength=len(first))
        times_written = np.bincount(in_rows, minlength=len(first))
        twice += rows[times_written[in_rows] > 1].tolist()
        missing += plan[(times_planned > times_written)[in_plan]].tolist()
        unplanned += rows[times_planned[in_rows] == 0].tolist()
        place = np.full(len(first), -1, dtype="i8")
        place[in_rows] = rows
        pair[plan] = place[in_plan]
        both = plan[pair[plan] >= 0]
        same = wanted.contents(both, width) == found.contents(pair[both], width)
        differs += both[~np.all(same, axis=1)].tolist()
    if twice:
        where = found.where(max(twice), fqns)
        raise ConflictError("written by two ranks", "local", where)
    if missing:
        raise IncompleteError(
            "planned and not written by any rank",
            "local",
            wanted.where(min(missing), fqns),
            "If plan caching is on, the structure of the state changed between saves: turn it off.",
        )
    if differs:
        where = wanted.where(min(differs), fqns)
        raise CorruptError("a chunk differs from its plan", "local", where)
    if unplanned:
        where = found.where(min(unplanned), fqns)
        raise CorruptError("written and not planned", "local", where)
    return pair


def _joined(columns: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, dtype="i8"), *columns])
