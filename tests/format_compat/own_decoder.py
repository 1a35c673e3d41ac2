"""A second decoder, written from docs/format.md alone: the oracle for the package's own.

It imports nothing of dcp_tiered and no numpy. It checks every checksum and trusts sizes, which a
test may.
"""

import hashlib
import json
import struct
from typing import Any

import zstandard

TYPES = {"u1": "B", "u4": "I", "i8": "q"}


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC, one byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def blob(raw: bytes) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Header length u32, header, arrays that are padded to 8 bytes."""
    (length,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + length].decode("utf-8", "surrogatepass"))
    position, arrays = 4 + length, {}
    for name, kind, count in header["columns"]:
        arrays[name] = list(struct.unpack_from(f"<{count}{TYPES[kind]}", raw, position))
        size = struct.calcsize(f"<{count}{TYPES[kind]}")
        position += size + -size % 8
    assert position == len(raw)
    return header["meta"], arrays


def names(arrays: dict[str, list[int]]) -> list[str]:
    """UTF-8 end to end, with a length for each."""
    data, start, found = bytes(arrays["names"]), 0, []
    for length in arrays["name_lengths"]:
        found.append(data[start : start + length].decode("utf-8", "surrogatepass"))
        start += length
    return found


def footer(data: bytes, magic: bytes) -> tuple[int, dict[str, Any], dict[str, list[int]]]:
    """The index that the last 48 bytes of a shard file or pack point to, and where it starts."""
    start, stored, raw, digest, length, found = struct.unpack("<QII16sQ8s", data[-48:])
    assert (found, length, start + stored + 48) == (magic, len(data), len(data))
    compressed = data[start : start + stored]
    assert hashlib.sha256(compressed).digest()[:16] == digest
    index = zstandard.decompress(compressed)
    assert len(index) == raw
    return start, *blob(index)


def shard_file(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and items, each with its bytes; every block checksum is checked."""
    magic, version, length, crc = struct.unpack_from("<8sIII", data)
    assert (magic, version, crc) == (b"DCPTSHR1", 1, crc32c(data[20:4096]))
    header = json.loads(data[20 : 20 + length])
    start, meta, arrays = footer(data, b"DCPTEND1")
    assert meta["crc32c"] == crc32c(data[:start])
    items, dims, crcs = [], iter(arrays["dims"]), iter(arrays["crcs"])
    for row, name in enumerate(names(arrays)):
        at, size, ndim = (arrays[column][row] for column in ("start", "length", "ndim"))
        raw = data[at : at + size]
        for block in range(0, size, 262144):
            assert crc32c(raw[block : block + 262144]) == next(crcs)
        box = [tuple(next(dims) for _ in range(ndim)) for _ in range(3)]
        opaque = arrays["kind"][row] == 1
        items.append(
            {
                "name": name,
                "dtype": None if opaque else arrays["dtype"][row],
                "box": box,
                "start": at,
                "bytes": raw,
            }
        )
    return header, items


def frame(codec: int, stored: bytes, length: int) -> bytes:
    """Stored bytes as they are, or parts of elements, each of them zstd or not."""
    if codec == 0:
        return stored
    widths = {1: [1, 1], 2: [2, 1, 1]}[codec]
    size, at, offset, raw = sum(widths), 4 * len(widths), 0, bytearray(length)
    for width, count in zip(widths, struct.unpack_from(f"<{len(widths)}I", stored), strict=True):
        part, at = stored[at : at + count], at + count
        if count < length // size * width:
            part = zstandard.decompress(part)
        for byte in range(width):
            raw[offset + byte :: size] = part[byte::width]
        offset += width
    assert at == len(stored)
    return bytes(raw)


def unpacked(data: bytes) -> bytes:
    """A pack's shard files, end to end."""
    start, meta, arrays = footer(data, b"DCPTPAK1")
    if not meta["requires"]:
        return data[:start]
    assert meta["requires"] == ["frames"]
    at, parts = 0, []
    for raw, stored, codec in zip(*(arrays[n] for n in ("raw", "stored", "codec")), strict=True):
        parts.append(frame(codec, data[at : at + stored], raw))
        at += stored
    assert at == start
    return b"".join(parts)


def pack(data: bytes) -> dict[str, bytes]:
    """Shard files by name; their checksums are checked."""
    start, meta, _ = footer(data, b"DCPTPAK1")
    if meta["requires"]:
        assert crc32c(data[:start]) == meta["crc32c"]
    found, data = {}, unpacked(data)
    for name, start, length, crc in meta["shards"]:
        assert start % 4096 == 0
        found[name] = data[start : start + length]
        assert crc32c(found[name]) == crc
    return found


def plain(value: Any) -> Any:
    """Tagged JSON as what it was."""
    if not isinstance(value, dict):
        return value
    ((tag, parts),) = value.items()
    if tag == "f":
        return float(parts)
    if tag == "d":
        return {plain(key): plain(part) for key, part in parts}
    return (tuple if tag == "t" else list)(plain(part) for part in parts)


def manifest(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """What the header says, the entries, and the planner's data."""
    line, _, stored = data.partition(b"\n")
    fields = json.loads(line)
    assert (fields["format"], fields["version"]) == ("dcp_tiered manifest", 1)
    assert hashlib.sha256(stored).hexdigest() == fields["sha256"]
    raw = zstandard.decompress(stored)
    assert len(raw) == fields["raw_bytes"]
    meta, arrays = blob(raw)
    meta["metadata"] = plain(meta["metadata"])
    planner = json.loads(bytes(arrays["planner"]).decode("utf-8", "surrogatepass"))
    shape, boxes = iter(arrays["shape"]), iter(arrays["boxes"])
    places = iter(zip(arrays["shard"], arrays["row"], strict=True))
    entries = []
    for row, name in enumerate(names(arrays)):
        ndim = arrays["ndim"][row]
        entry = {
            "name": name,
            "dtype": None if arrays["kind"][row] else arrays["dtype"][row],
            "requires_grad": bool(arrays["requires_grad"][row]),
            "shape": tuple(next(shape) for _ in range(ndim)),
            "chunks": [],
        }
        for _ in range(arrays["chunks"][row]):
            box = tuple(next(boxes) for _ in range(2 * ndim))
            entry["chunks"].append((box[:ndim], box[ndim:], *next(places)))
        entries.append(entry)
    assert next(boxes, None) is next(places, None) is next(shape, None) is None
    return meta, entries, plain(planner["data"])


def record(data: bytes) -> dict[str, Any]:
    """A JSON object whose crc32c is that of the same object, sorted and compact, without it."""
    fields = json.loads(data)
    crc = fields.pop("crc32c")
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert crc32c(text.encode()) == crc
    return fields
