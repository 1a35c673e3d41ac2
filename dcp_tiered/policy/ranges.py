"""Many small reads into few: parts of boxes that are worth one read each, and merged ranges."""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

E = TypeVar("E", bound="Extent")


def parts(
    offsets: Sequence[int],
    lengths: Sequence[int],
    sizes: Sequence[int],
    elements_max: int,
    gap_max: int,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box of a row-major chunk into parts that are each worth one contiguous read.

    Args:
        offsets: First element of the box in the chunk, per dimension.
        lengths: Extent of the box, per dimension.
        sizes: Shape of the chunk.
        elements_max: Most elements between the first and the last one of a part.
        gap_max: Elements that may be read in vain between two contiguous runs of a part.

    Yields:
        Offsets and lengths of disjoint parts, in memory order; none for an empty box.
    """
    if math.prod(lengths) == 0:
        return
    todo = [(tuple(offsets), tuple(lengths))]
    while todo:
        at, extent = todo.pop()
        dim = next((d for d, length in enumerate(extent) if length > 1), None)
        if dim is None:
            yield at, extent
            continue
        first, end = span(at, extent, sizes)
        stride = math.prod(sizes[dim + 1 :])
        # Gaps only shrink inwards: when those of the outermost dimension are narrow, all are.
        gap = extent[dim] * stride - (end - first)
        if gap <= gap_max and end - first <= elements_max:
            yield at, extent
            continue
        step = 1 if gap > gap_max else max(1, min(-(-extent[dim] // 2), elements_max // stride))
        for start in reversed(range(0, extent[dim], step)):
            part = min(step, extent[dim] - start)
            todo.append(
                (
                    (*at[:dim], at[dim] + start, *at[dim + 1 :]),
                    (*extent[:dim], part, *extent[dim + 1 :]),
                )
            )


def span(offsets: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return the half-open range of elements from the first to the last one of a non-empty box."""
    first = last = 0
    for offset, length, size in zip(offsets, lengths, sizes, strict=True):
        first = first * size + offset
        last = last * size + offset + length - 1
    return first, last + 1


class Extent(Protocol):
    """A half-open byte range of a file."""

    start: int
    end: int


def coalesce(extents: Sequence[E], gap_max: int, bytes_max: int) -> list[tuple[int, int, list[E]]]:
    """Merge byte ranges of one file into few reads.

    Args:
        extents: In any order; they may overlap.
        gap_max: Bytes that may be read in vain between two ranges rather than asking twice.
        bytes_max: Most bytes of a merged read; a single larger range stays whole.

    Returns:
        Start, end and the ranges inside, for every read, ordered by start.
    """
    reads: list[tuple[int, int, list[E]]] = []
    for extent in sorted(extents, key=attrgetter("start", "end")):
        if reads:
            start, end, inside = reads[-1]
            new_end = max(end, extent.end)
            if extent.start <= end + gap_max and new_end - start <= max(bytes_max, end - start):
                inside.append(extent)
                reads[-1] = (start, new_end, inside)
                continue
        reads.append((extent.start, extent.end, [extent]))
    return reads
