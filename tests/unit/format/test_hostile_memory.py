"""Tiny hostile input never causes a large allocation or an endless recursion."""

import json
from typing import Any

import pytest
import zstandard

from dcp_tiered.errors import CorruptError
from dcp_tiered.format import columns
from dcp_tiered.format.manifest import (
    decode_manifest,
)
from dcp_tiered.format.plain import from_tagged
from tests.unit.format.samples import (
    RECORD,
    REFUSED,
    STORED,
    little_memory,
    read_record,
    sealed,
)


def bomb(length: int) -> bytes:
    """Return a zstd frame of zeros."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=length)
    part = bytes(1 << 20)
    parts = [compressor.compress(part) for _ in range(length >> 20)]
    return b"".join([*parts, compressor.flush()])


@pytest.mark.parametrize("claim", [0, 1, 1 << 20, (1 << 28) - 1, 1 << 28, 1 << 31, 1 << 62])
def test_a_zstd_bomb_is_refused_whatever_it_claims(claim: int) -> None:
    frame = bomb(1 << 28)
    assert len(frame) < 1 << 16
    with little_memory(), pytest.raises(CorruptError):
        columns.decompress(frame, claim)
    with little_memory(), pytest.raises(CorruptError):
        columns.decode_meta(frame, claim)


@pytest.mark.parametrize("claim", [1 << 20, 1 << 24, 1 << 31])
def test_a_frame_whose_size_is_a_lie_is_refused(claim: int) -> None:
    """The frame says the same as the trailer and holds less."""
    frame = bytearray(zstandard.compress(bytes(1 << 19)))
    assert frame[4] & 0xC0 == 0x80  # the content size is stored in 4 bytes
    at = 5 if frame[4] & 0x20 else 6
    frame[at : at + 4] = claim.to_bytes(4, "little")
    with little_memory(), pytest.raises(CorruptError):
        columns.decompress(bytes(frame), claim)


def test_a_frame_that_asks_for_a_huge_window_is_refused() -> None:
    """Magic, 8-byte size, a window of 2 GiB, one raw block of nothing."""
    frame = bytes.fromhex("28b52ffd c0 a8") + (1 << 20).to_bytes(8, "little") + b"\1\0\0"
    with little_memory(), pytest.raises(CorruptError):
        columns.decompress(frame, 1 << 20)


@pytest.mark.parametrize(
    "junk",
    [b"[" * 1_000_000, b"[" * 500_000 + b"]" * 500_000, b'{"a":' * 200_000, b"[[],[]," * 140_000],
    ids=["open", "closed", "objects", "wide"],
)
def test_json_nested_without_end_is_refused(junk: bytes) -> None:
    texts = [junk, b'{"format":"dcp_tiered record","version":1,"requires":' + junk + b"}"]
    for text in texts:
        with little_memory(), pytest.raises(CorruptError):
            read_record(text)
        with little_memory(), pytest.raises(CorruptError):
            columns.decode(len(text).to_bytes(4, "little") + text)
    nested = b'{"columns":[],"meta":{"metadata":' + junk + b"}}"
    raw = len(nested).to_bytes(4, "little") + nested
    with little_memory(), pytest.raises(CorruptError):
        decode_manifest(sealed(raw, json.loads(STORED.partition(b"\n")[0])))


@pytest.mark.parametrize("place", ["kind", "attempts", "version", "written_by", "checkpoint_id"])
def test_nesting_that_the_parser_accepts_is_refused_too(place: str) -> None:
    """Deep enough to be parsed and too deep to be printed or written again."""
    base = {"format": "dcp_tiered record", "version": 1, "requires": ["x"], "crc32c": 1}
    for depth in (60, 300, 900, 5000):
        text = json.dumps(base | {place: "DEEP"}).encode()
        with pytest.raises(REFUSED):
            read_record(text.replace(b'"DEEP"', b"[" * depth + b"]" * depth))


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_none_are_refused(text: bytes) -> None:
    for field in ("sequence", "bytes_stored", "step"):
        data = RECORD.replace(b'"%s":' % field.encode(), b'"%s":%s,"x":' % (field.encode(), text))
        with pytest.raises(CorruptError):
            read_record(data)
    with pytest.raises(CorruptError):
        from_tagged(columns.parse_json(b'{"v":' + text + b"}")["v"])


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity"])
def test_constants_that_json_lacks_are_refused_everywhere(text: bytes) -> None:
    with pytest.raises(CorruptError, match="not JSON"):
        columns.parse_json(b'{"v":[' + text + b"]}")


def test_integers_of_thousands_of_digits_are_refused() -> None:
    for digits in (100, 4000, 5000):
        data = RECORD.replace(b'"sequence":5', b'"sequence":' + b"9" * digits)
        with little_memory(), pytest.raises(CorruptError):
            read_record(data)


def blob_of(described: list[Any]) -> bytes:
    header = json.dumps({"meta": {}, "columns": described}).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize(
    "column",
    [
        ["x", "i8", 1],
        ["x", "i8", (1 << 31) - 1],
        ["x", "i8", 1 << 62],
        ["x", "i8", -1],
        ["x", "i8", True],
        ["x", "i8", 1.0],
        ["x", "O", 0],
        ["x", "f8", 0],
        ["x", [], 0],
        ["x", {}, 0],
        [None, "u1", 0],
        ["x", "u1"],
        "xu1",
        None,
    ],
)
def test_a_column_that_cannot_be_is_refused(column: object) -> None:
    with little_memory(), pytest.raises(CorruptError):
        columns.decode(blob_of([column]))


def test_many_columns_are_only_as_many_as_were_sent() -> None:
    described = [[str(number), "u1", 0] for number in range(5_000)]
    with little_memory():
        assert len(columns.decode(blob_of(described))[1]) == 5_000
        with pytest.raises(CorruptError, match="twice"):
            columns.decode(blob_of([*described, described[0]]))


def test_bytes_behind_a_frame_are_refused() -> None:
    frame = zstandard.compress(b"index")
    assert columns.decompress(frame, 5) == b"index"
    for more in (b"x", b"junk that is no frame", frame):
        with pytest.raises(CorruptError):
            columns.decompress(frame + more, 5)


@pytest.mark.parametrize(
    "value",
    [
        {"d": [["a", 1], ["a", 2]]},
        {"d": [["a"]]},
        {"d": [["a", 1, 2]]},
        {"d": ["ab"]},
        {"d": [[{"l": []}, 1]]},
        {"d": {}},
        {"t": 1},
        {"x": []},
        {"t": [], "l": []},
        {"f": "1"},
        {},
        [],
    ],
    ids=str,
)
def test_plain_data_that_is_malformed_is_refused(value: object) -> None:
    with pytest.raises(CorruptError, match="plain data"):
        from_tagged(value)
