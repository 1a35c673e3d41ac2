"""Is what was planned in what the ranks sealed, exactly once? Proven before a publish."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcp_tiered.errors import ConflictError, CorruptError, IncompleteError
from dcp_tiered.format.manifest import Chunk, Entry
from dcp_tiered.format.shardfile import DTYPES, Index

_Key = tuple[str, tuple[int, ...] | None]
_Place = tuple[int, int]


class Planned(NamedTuple):
    """One key of the state as DCP's metadata describes it; opaque bytes when `dtype` is None."""

    fqn: str
    dtype: str | None
    shape: tuple[int, ...]
    requires_grad: bool
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    """Offsets and sizes."""


def match(planned: Iterable[Planned], indexes: Sequence[Index]) -> list[Entry]:
    """Match a plan with the footers of all shard files, one to one.

    Args:
        planned: From DCP's own metadata.
        indexes: Of the shard files, in the manifest's order.

    Raises:
        IncompleteError: Something is planned and was not written.
        ConflictError: Something was written twice.
        CorruptError: Something was written that is not what was planned.
    """
    written: dict[_Key, _Place] = {}
    for shard, index in enumerate(indexes):
        for row, fqn in enumerate(index.fqns):
            key = (fqn, None if index.is_bytes(row) else index.box(row)[0])
            if key in written:
                raise ConflictError("written by two ranks", "local", f"{fqn} at {key[1]}")
            written[key] = (shard, row)
    entries = [_entry(one, written, indexes) for one in planned]
    if written:
        fqn, offsets = next(iter(written))
        raise CorruptError("written and not planned", "local", f"{fqn} at {offsets}")
    return entries


def _entry(planned: Planned, written: dict[_Key, _Place], indexes: Sequence[Index]) -> Entry:
    if planned.dtype is None:
        shard, row = _take(written, planned.fqn, None)
        chunk = Chunk(offsets=(), sizes=(), shard=shard, row=row)
        return Entry(fqn=planned.fqn, dtype=None, chunks=(chunk,))
    chunks = []
    for offsets, sizes in planned.chunks:
        shard, row = _take(written, planned.fqn, offsets)
        index = indexes[shard]
        found = (*index.box(row)[1:], DTYPES[index.dtype[row]])
        if found != (sizes, planned.shape, planned.dtype):
            where = f"{planned.fqn} at {offsets}"
            raise CorruptError("a chunk differs from its plan", "local", where)
        chunks.append(Chunk(offsets=offsets, sizes=sizes, shard=shard, row=row))
    return Entry(
        fqn=planned.fqn,
        dtype=planned.dtype,
        shape=planned.shape,
        requires_grad=planned.requires_grad,
        chunks=tuple(chunks),
    )


def _take(written: dict[_Key, _Place], fqn: str, offsets: tuple[int, ...] | None) -> _Place:
    found = written.pop((fqn, offsets), None)
    if found is None:
        raise IncompleteError(
            "planned and not written by any rank",
            "local",
            f"{fqn} at {offsets}",
            "If plan caching is on, the structure of the state changed between saves: turn it off.",
        )
    return found
