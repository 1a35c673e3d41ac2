"""Cutting and merging reads, against numpy doing the same by brute force."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_tiered.policy.ranges import coalesce, parts, span

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@st.composite
def _boxes(draw: Callable) -> Box:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    lengths = tuple(draw(st.integers(0, size)) for size in shape)
    offsets = tuple(
        draw(st.integers(0, size - length)) for size, length in zip(shape, lengths, strict=True)
    )
    return offsets, lengths, shape


def _mask(offsets: tuple[int, ...], lengths: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, dtype="i8")
    mask[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = 1
    return mask.reshape(-1)


@given(_boxes(), st.integers(1, 60), st.integers(0, 20))
def test_parts_cover_the_box_exactly_once(box: Box, elements_max: int, gap_max: int) -> None:
    shape = box[2]
    total = np.zeros(math.prod(shape), dtype="i8")
    for offsets, lengths in parts(*box, elements_max, gap_max):
        total += _mask(offsets, lengths, shape)
    assert total.tolist() == _mask(*box).tolist()


@given(_boxes(), st.integers(1, 60), st.integers(0, 20))
def test_parts_come_in_memory_order_and_within_the_bound(
    box: Box, elements_max: int, gap_max: int
) -> None:
    end = 0
    for offsets, lengths in parts(*box, elements_max, gap_max):
        touched = np.flatnonzero(_mask(offsets, lengths, box[2]))
        assert span(offsets, lengths, box[2]) == (touched[0], touched[-1] + 1)
        assert touched[-1] + 1 - touched[0] <= elements_max
        assert touched[0] >= end
        end = touched[-1] + 1


@given(_boxes(), st.integers(1, 60), st.integers(1, 20))
@example(((0, 0, 0), (2, 4, 3), (2, 40, 4)), 1000, 8)  # narrow gaps inside, a wide one outside
def test_no_block_is_read_that_the_box_does_not_touch(
    box: Box, elements_max: int, block: int
) -> None:
    """A gap shorter than a block never holds a whole one."""
    needed = set((np.flatnonzero(_mask(*box)) // block).tolist())
    read = set()
    for offsets, lengths in parts(*box, elements_max, block - 1):
        first, end = span(offsets, lengths, box[2])
        read |= set(range(first // block, -(-end // block)))
    assert read == needed


def test_a_whole_chunk_within_the_bound_is_one_part() -> None:
    assert list(parts((0, 0), (5, 4), (5, 4), 20, 0)) == [((0, 0), (5, 4))]


class Extent(NamedTuple):
    start: int
    end: int
    what: object


_EXTENTS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))),
    max_size=15,
)


@given(_EXTENTS, st.integers(0, 30), st.integers(1, 120))
def test_coalesce_puts_every_extent_into_one_read_that_holds_it(
    ranges: list[tuple[int, int]], gap_max: int, bytes_max: int
) -> None:
    extents = [Extent(start, end, number) for number, (start, end) in enumerate(ranges)]
    reads = coalesce(extents, gap_max, bytes_max)
    assert sorted(e.what for _, _, inside in reads for e in inside) == list(range(len(extents)))
    assert [start for start, _, _ in reads] == sorted(start for start, _, _ in reads)
    for start, end, inside in reads:
        assert min(e.start for e in inside) == start
        assert max(e.end for e in inside) == end


@given(_EXTENTS, st.integers(0, 30), st.integers(1, 120))
def test_coalesce_keeps_to_its_bounds(
    ranges: list[tuple[int, int]], gap_max: int, bytes_max: int
) -> None:
    extents = [Extent(start, end, None) for start, end in ranges]
    for start, end, inside in coalesce(extents, gap_max, bytes_max):
        assert end - start <= max(bytes_max, *(e.end - e.start for e in inside))
        reached = start
        for extent in sorted(inside, key=lambda one: one.start):
            assert extent.start - reached <= gap_max
            reached = max(reached, extent.end)


def test_an_extent_inside_a_large_one_is_not_read_again() -> None:
    reads = coalesce([Extent(0, 100, "all"), Extent(10, 20, "part")], 0, 50)
    assert [(start, end) for start, end, _ in reads] == [(0, 100)]
