"""A table of frames that lies, and frames that do, end in CorruptError before memory is taken."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format import columns
from dcp_tiered.format.footer import TRAILER_BYTES, decode_footer, encode_footer
from dcp_tiered.format.frames import FRAME_BYTES_MAX, decode_frame, encode_frame
from dcp_tiered.format.pack import (
    END_MAGIC,
    Pack,
    compressed_pack,
    decode_pack,
    decode_pack_and_frames,
    decode_pack_trailer,
    plan_pack,
)
from dcp_tiered.format.records import decode_record, encode_record
from tests.unit.format.samples import COMMIT, REFUSED, little_memory, summed

GOLDEN = Path(__file__).parents[2] / "format_compat" / "v1-frames"
WHOLE = (GOLDEN / "compressed.pack").read_bytes()
NAME = "packs/0a1b2c3d4e5f-163c474d36bb3e38.pack"
TRAILER = decode_pack_trailer(WHOLE[-TRAILER_BYTES:], len(WHOLE))
META, TABLE = columns.decode(decode_footer(TRAILER, WHOLE[TRAILER.start : -TRAILER_BYTES]))
"""Rows: 4096 bytes as they are, 320000 of codec 1, as they are, 640000 of codec 2, as they are."""


def read(table: dict[str, np.ndarray], **changes: object) -> Pack:
    """Decode the golden pack's end with another table, all checksums right."""
    tail = encode_footer(columns.encode({**META, **changes}, table), TRAILER.start, END_MAGIC)
    trailer = decode_pack_trailer(tail[-TRAILER_BYTES:], TRAILER.start + len(tail))
    return decode_pack(NAME, trailer, tail)


def changed(column: str, row: int, value: int, **others: int) -> dict[str, np.ndarray]:
    table = {name: array.copy() for name, array in TABLE.items()}
    table[column][row] = value
    for name, more in others.items():
        table[name][row] += more
    return table


def test_the_table_as_it_was_is_read() -> None:
    assert read(dict(TABLE)).raw_length == int(TABLE["raw"].sum())


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        ("codec", 1, 0),  # then it would be stored with another length than it has
        ("codec", 1, 3),
        ("codec", 1, 255),
        ("codec", 0, 1),  # stored as it is
        ("raw", 0, 0),
        ("raw", 0, 4097),
        ("raw", 1, 320_002),  # covers more than the shard files
        ("raw", 1, 319_998),
        ("raw", 1, 320_001),  # half an element
        ("raw", 3, 640_002),
        ("raw", 1, FRAME_BYTES_MAX + 2),
        ("raw", 1, (1 << 32) - 2),
        ("stored", 1, 0),
        ("stored", 1, 192_674),  # reaches into the next one
        ("stored", 1, (1 << 32) - 1),
        ("stored", 0, 1),
    ],
)
def test_a_table_that_cannot_be_is_refused(column: str, row: int, value: int) -> None:
    with little_memory(), pytest.raises(CorruptError):
        read(changed(column, row, value))


def test_frames_larger_than_their_bound_are_refused_though_they_add_up() -> None:
    """One frame of more than 4 MiB, in a pack of one shard file that has just that length."""
    length = FRAME_BYTES_MAX + 2
    for raw, bad in ((length, True), (FRAME_BYTES_MAX, False)):
        shards = [[META["shards"][0][0], 0, raw, 1]]
        table = {
            "raw": np.array([raw], "<u4"),
            "stored": np.array([TRAILER.start], "<u4"),
            "codec": np.array([1], "u1"),
        }
        if bad:
            with little_memory(), pytest.raises(CorruptError, match="length that cannot be"):
                read(table, shards=shards)
        else:
            assert read(table, shards=shards).raw_length == raw


def test_columns_that_are_missing_or_differ_in_length_are_refused() -> None:
    for name in TABLE:
        with pytest.raises(CorruptError):
            read({other: array for other, array in TABLE.items() if other != name})
        with pytest.raises(CorruptError):
            read({**TABLE, name: TABLE[name][:-1]})
    with pytest.raises(CorruptError):
        read({name: array[:0] for name, array in TABLE.items()})
    with pytest.raises(CorruptError):
        read({**TABLE, "codec": TABLE["codec"].astype("<u4")})


def test_a_pack_that_says_nothing_of_frames_must_not_have_them() -> None:
    with pytest.raises(CorruptError):
        read(dict(TABLE), requires=[])
    with pytest.raises(InvalidError, match="needs planes"):
        read(dict(TABLE), requires=["frames", "planes"])
    for crc in (None, -1, 1 << 32, "1"):
        with pytest.raises(CorruptError):
            read(dict(TABLE), crc32c=crc)


def test_frames_that_do_not_cover_the_shard_files_are_not_written() -> None:
    plan = plan_pack("step-1", "0" * 12, [("1-" + "a" * 16 + ".shard", 970_000, 7)], "0.1")
    _, frames = decode_pack_and_frames(NAME, TRAILER, WHOLE[TRAILER.start :])
    assert frames is not None
    with pytest.raises(InvalidError, match="would not read back"):
        compressed_pack("step-1", plan, frames, 1, "0.1")


# What a frame says of itself.

RAW = bytes(range(256)) * 2 + bytes(1 << 16)


def frame(*parts: bytes, lengths: tuple[int, ...] | None = None) -> bytes:
    said = lengths or tuple(map(len, parts))
    return struct.pack(f"<{len(said)}I", *said) + b"".join(parts)


def decode(stored: bytes, length: int, codec: int = 1) -> bytes:
    target = bytearray(length)
    decode_frame(codec, memoryview(stored), memoryview(target))
    return bytes(target)


def test_a_frame_by_hand_is_read() -> None:
    low, high = zstandard.compress(bytes(1000)), bytes(range(200)) * 5
    assert decode(frame(low, high), 2000)[1::2] == high
    stored = encode_frame(1, RAW)
    assert stored is not None
    assert decode(stored, len(RAW)) == RAW


ZEROS = zstandard.compress(bytes(1000))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
BOMB = zstandard.compress(bytes(1 << 24))
LIE = bytearray(zstandard.compress(bytes(1 << 20)))
assert LIE[4] & 0xC0 == 0x80, "the content size is stored in 4 bytes"
LIE_AT = 5 if LIE[4] & 0x20 else 6
LIE[LIE_AT : LIE_AT + 4] = (1000).to_bytes(4, "little")


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\0" * 7,
        frame(ZEROS),
        frame(ZEROS, ZEROS, lengths=(len(ZEROS), len(ZEROS) - 1)),
        frame(ZEROS, ZEROS, lengths=(len(ZEROS), len(ZEROS) + 1)),
        frame(ZEROS, ZEROS, lengths=((1 << 32) - 1, 2 * len(ZEROS) + 1)),
        frame(ZEROS, b""),
        frame(ZEROS, b"junk"),
        frame(ZEROS, ZEROS[:-1]),
        frame(ZEROS, ZEROS + b"x"),
        frame(ZEROS, ZEROS + ZEROS),
        frame(ZEROS, zstandard.compress(bytes(999))),
        frame(ZEROS, zstandard.compress(bytes(1001))),
        frame(ZEROS, UNSIZED),
        frame(ZEROS, bytes(LIE)),
        frame(ZEROS, bytes(1001)),
        frame(ZEROS, BOMB[:999]),
        frame(ZEROS, BOMB),
        frame(ZEROS, b"\x50\x2a\x4d\x18\x04\0\0\0four"),  # skippable, as zstd calls it
    ],
)
def test_a_frame_that_lies_is_refused(stored: bytes) -> None:
    with little_memory(1 << 20), pytest.raises(CorruptError):
        decode(stored, 2000)


def test_a_frame_of_the_other_codec_is_refused() -> None:
    stored = encode_frame(1, RAW)
    assert stored is not None
    with pytest.raises(CorruptError):
        decode(stored, len(RAW), codec=2)


# What a commit says of a compressed pack.


def test_a_commit_with_frames_names_them_and_places_behind_the_stored_length() -> None:
    pack = replace(COMMIT.packs[0], raw_length=20_000)
    place = replace(COMMIT.placements[0], start=16_384)
    commit = replace(COMMIT, packs=(pack,), placements=(place,))
    data = encode_record(commit, "0.1")
    assert b'"requires":["frames"]' in data
    assert decode_record(data, "step-1") == commit
    assert b"raw_length" not in encode_record(COMMIT, "0.1")
    fields = json.loads(data)
    for bad in (0, -1, 16_384, "x", 1 << 62, True):
        fields["packs"][0]["raw_length"] = bad
        with pytest.raises(REFUSED):
            decode_record(summed(fields), "step-1")
