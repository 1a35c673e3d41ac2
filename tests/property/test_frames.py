"""Frames give back what went in, and their table says where any range of it lies."""

import random
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.format.frames import (
    AS_IT_IS,
    FRAME_BYTES,
    Builder,
    Frames,
    decode_frame,
    encode_frame,
    parse_frames,
    stretches,
)
from dcp_tiered.format.shardfile import DTYPES, Index
from tests.format_compat import own_decoder

WIDTHS = {1: 2, 2: 4}
FLOATS = {"float32": 2, "bfloat16": 1, "float16": 1}


def made_of(parts: list[str], count: int, noise: random.Random) -> bytes:
    """Return elements whose byte 0, 1, ... is noise, the same everywhere, or one of few."""
    planes = {
        "noise": lambda: noise.randbytes(count),
        "same": lambda: bytes([noise.randrange(256)]) * count,
        "few": lambda: bytes(noise.choices(b"\x3b\x3c\xbb", k=count)),
    }
    raw = bytearray(count * len(parts))
    for number, kind in enumerate(parts):
        raw[number :: len(parts)] = planes[kind]()
    return bytes(raw)


@st.composite
def frames_of(draw: Callable) -> tuple[int, bytes]:
    codec = draw(st.sampled_from([1, 2]))
    kinds = st.sampled_from(["noise", "same", "few"])
    parts = draw(st.lists(kinds, min_size=WIDTHS[codec], max_size=WIDTHS[codec]))
    count = draw(st.sampled_from([1, 2, 7, 100, 4096]) | st.integers(1, 50_000))
    return codec, made_of(parts, count, random.Random(draw(st.integers(0, 1 << 30))))


@given(frame=frames_of(), off=st.integers(0, 3))
def test_a_frame_gives_back_every_byte(frame: tuple[int, bytes], off: int) -> None:
    codec, raw = frame
    stored = encode_frame(codec, raw)
    if stored is None:
        return
    assert len(stored) < len(raw)
    assert own_decoder.frame(codec, stored, len(raw)) == raw
    # Whatever border the target lies on, and nothing beside it.
    target = bytearray(b"\xee" * (len(raw) + 8))
    decode_frame(codec, memoryview(stored), memoryview(target)[off : off + len(raw)])
    assert target == b"\xee" * off + raw + b"\xee" * (8 - off)


def test_what_is_stored_as_one_part_raw_and_one_compressed_is_smaller() -> None:
    """The claim: exponents shrink, noise does not, and zeros below them vanish."""
    noise, count = random.Random(3), 100_000
    sizes = {
        "bfloat16": (1, ["noise", "few"]),
        "float32": (2, ["noise", "noise", "noise", "few"]),
        "rounded": (2, ["same", "same", "noise", "few"]),
    }
    share = {}
    for name, (codec, parts) in sizes.items():
        raw = made_of(parts, count, noise)
        share[name] = len(encode_frame(codec, raw) or raw) / len(raw)
    assert share["bfloat16"] < 0.65
    assert share["float32"] < 0.85
    assert share["rounded"] < 0.35
    for codec in WIDTHS:
        assert encode_frame(codec, noise.randbytes(4 * count)) is None
    assert encode_frame(AS_IT_IS, bytes(count)) is None


@st.composite
def tables(draw: Callable) -> tuple[Frames, list[tuple[int, int, int]]]:
    """Draw a table and the same as rows, where what is stored as it is was joined."""
    rows: list[tuple[int, int, int]] = []
    builder = Builder()
    for codec in draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)):
        raw = draw(st.integers(2, 500)) * 4
        stored = raw if codec == AS_IT_IS else draw(st.integers(1, raw - 1))
        builder.add(codec, raw, stored)
        if codec == AS_IT_IS and rows and rows[-1][0] == AS_IT_IS:
            raw = stored = rows.pop()[1] + raw
        rows.append((codec, raw, stored))
    return builder.finish(), rows


@given(table=tables(), data=st.data())
def test_a_range_is_cut_into_the_frames_that_hold_it(
    table: tuple[Frames, list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    frames, rows = table
    total, length = (sum(row[n] for row in rows) for n in (1, 2))
    assert parse_frames(frames.columns(), total, length).raw_ends.tolist()[-1] == total
    start = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(start + 1, total))
    raw_at = stored_at = 0
    expected = []
    for codec, raw, stored in rows:
        low, high = max(start, raw_at), min(end, raw_at + raw)
        if low < high:
            moved = stored_at - raw_at
            whole = (codec, raw_at, raw_at + raw, stored_at, stored_at + stored)
            part = (codec, low, high, low + moved, high + moved)
            expected.append(part if codec == AS_IT_IS else whole)
        raw_at, stored_at = raw_at + raw, stored_at + stored
    found = frames.cuts(start, end)
    assert [(c.codec, c.raw_start, c.raw_end, c.start, c.end) for c in found] == expected


ITEMS = st.lists(
    st.tuples(
        st.sampled_from([*FLOATS, "int64", "float64", "uint8"]),
        st.sampled_from([0, 8, 65528, 65536, 70_000, FRAME_BYTES, 3 * FRAME_BYTES + 40]),
        st.booleans(),
    ),
    max_size=8,
)


@given(items=ITEMS, shuffle=st.randoms(use_true_random=False))
def test_a_shard_file_is_cut_along_its_large_float_items(
    items: list[tuple[str, int, bool]], shuffle: random.Random
) -> None:
    cursor, rows = 4096, []
    for dtype, length, opaque in items:
        cursor += -cursor % 4096
        rows.append((DTYPES.index(dtype), cursor, length, int(opaque)))
        cursor += length
    shuffle.shuffle(rows)
    dtype, start, length, kind = (np.array([row[n] for row in rows], dtype="i8") for n in range(4))
    none = np.zeros(0, dtype="i8")
    index = Index(
        fqns=[""] * len(rows),
        kind=kind.astype("u1"),
        dtype=dtype.astype("u1"),
        start=start,
        length=length,
        ndim=none,
        dims=none,
        crcs=none,
        crc=0,
        dims_start=none,
        crcs_start=none,
    )
    found = list(stretches(index, cursor + 100))
    assert [one[0] for one in found] == [0, *(one[1] for one in found)][: len(found)]
    assert found[-1][1] == cursor + 100
    assert max(end - begin for begin, end, _ in found) <= FRAME_BYTES
    expected = {
        (first, min(first + FRAME_BYTES, begin + size), FLOATS[DTYPES[code]])
        for code, begin, size, opaque in rows
        if size >= 65536 and not opaque and DTYPES[code] in FLOATS
        for first in range(begin, begin + size, FRAME_BYTES)
    }
    assert {one for one in found if one[2] != AS_IT_IS} == expected
