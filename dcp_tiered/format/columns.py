"""Columns in one blob: a JSON header, then raw little-endian arrays, then zstd around all of it.

    u32 header length | header JSON {"meta": ..., "columns": [[name, dtype, count], ...]} | arrays

Each array starts on a multiple of 8 counted from the start of the blob. The blob is what footers and
manifests are made of. Everything is checked before it is used, and no size in it is believed before
the bytes are there (I12).
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from dcp_tiered.errors import CorruptError, InvalidError

Array = npt.NDArray[Any]

RAW_BYTES_MAX = 1 << 31
"""Bound on a decompressed blob: 20 million items at about 100 bytes."""
_RATIO_MAX = 512
_RATIO_SLACK = 1 << 20
_DTYPES = {"u1": 1, "u4": 4, "i8": 8}
_LENGTH = struct.Struct("<I")
_LEVEL = 3
_WINDOW_BYTES_MAX = 1 << 27


def encode(meta: Mapping[str, Any], columns: Mapping[str, Array]) -> bytes:
    """Encode a header and named one-dimensional arrays (dtype u1, u4 or i8) into a blob."""
    described = []
    parts: list[bytes] = []
    for name, array in columns.items():
        dtype = array.dtype.str.lstrip("<|")
        if array.ndim != 1 or dtype not in _DTYPES:
            raise InvalidError(f"column {name!r} is not a flat array of u1, u4 or i8")
        described.append([name, dtype, len(array)])
        data = array.tobytes()
        parts += (data, bytes(-len(data) % 8))
    header = canonical_json({"meta": meta, "columns": described})
    header += b" " * (-(len(header) + _LENGTH.size) % 8)
    return b"".join((_LENGTH.pack(len(header)), header, *parts))


def decode(raw: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Decode a blob into its header and its arrays, which are views of `raw`.

    Raises:
        CorruptError: It is not a blob, or an array does not fit into it.
    """
    if len(raw) < _LENGTH.size:
        raise CorruptError("index is too short to hold a header")
    (length,) = _LENGTH.unpack_from(raw)
    position = _LENGTH.size + length
    if position > len(raw):
        raise CorruptError("index header reaches past the end of the index")
    header = parse_json(raw[_LENGTH.size : position])
    meta, described = header.get("meta"), header.get("columns")
    if not isinstance(meta, dict) or not isinstance(described, list):
        raise CorruptError("index header lacks 'meta' or 'columns'")
    columns: dict[str, Array] = {}
    for entry in described:
        name, dtype, count = _column(entry)
        size = count * _DTYPES[dtype]
        if size > len(raw) - position:
            raise CorruptError(f"index column {name!r} reaches past the end of the index")
        columns[name] = np.frombuffer(raw, dtype=f"<{dtype}", count=count, offset=position)
        position += size + -size % 8
    return meta, columns


def take(columns: Mapping[str, Array], name: str, dtype: str) -> Array:
    """Return a column that must be there with that dtype.

    Raises:
        CorruptError: It is missing or of another type.
    """
    array = columns.get(name)
    if array is None or array.dtype.str.lstrip("<|") != dtype:
        raise CorruptError(f"index column {name!r} of type {dtype} is missing")
    return array


def compress(raw: bytes) -> bytes:
    """Compress a blob, with its size in the frame header.

    Raises:
        InvalidError: It is larger than a reader accepts.
    """
    if len(raw) > RAW_BYTES_MAX:
        raise InvalidError(
            f"index of {len(raw)} bytes exceeds the limit of {RAW_BYTES_MAX}",
            None,
            None,
            "Save fewer, larger tensors per rank.",
        )
    return zstandard.ZstdCompressor(level=_LEVEL).compress(raw)


def decompress(stored: bytes, raw_length: int) -> bytes:
    """Decompress a blob whose size was stated elsewhere.

    The statement is hostile until proven: it is bounded by what real indexes compress to, the frame
    must repeat it, and memory grows only with bytes that really came out.

    Raises:
        CorruptError: The data is not one zstd frame of exactly that size.
    """
    if raw_length > min(RAW_BYTES_MAX, len(stored) * _RATIO_MAX + _RATIO_SLACK):
        raise CorruptError(f"index claims {raw_length} bytes from {len(stored)} stored ones")
    try:
        if zstandard.frame_content_size(stored) != raw_length:
            raise CorruptError("index size differs from what its frame says")
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(stored)
        parts = []
        left = raw_length
        while left:
            part = reader.read(min(left, 1 << 24))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        if left or reader.read(1):
            raise CorruptError("index does not decompress to its stated size")
    except zstandard.ZstdError as exc:
        raise CorruptError(f"index does not decompress: {exc}") from exc
    return b"".join(parts)


def pack_strings(strings: Sequence[str]) -> tuple[Array, Array]:
    """Return UTF-8 bytes of all strings, end to end, and the length in bytes of each."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
    lengths = np.fromiter((len(data) for data in encoded), dtype="<u4", count=len(encoded))
    return np.frombuffer(b"".join(encoded), dtype="u1"), lengths


def unpack_strings(blob: Array, lengths: Array, count: int) -> list[str]:
    """Return the strings that `pack_strings` packed.

    Raises:
        CorruptError: The lengths do not add up or the bytes are not UTF-8.
    """
    if len(lengths) != count or int(lengths.sum(dtype="i8")) != len(blob):
        raise CorruptError("names in the index do not add up")
    data = blob.tobytes()
    ends = np.cumsum(lengths, dtype="i8").tolist()
    strings, start = [], 0
    try:
        for end in ends:
            strings.append(data[start:end].decode("utf-8", "surrogatepass"))
            start = end
    except UnicodeDecodeError as exc:
        raise CorruptError("a name in the index is not UTF-8") from exc
    return strings


def canonical_json(value: object) -> bytes:
    """Encode plain data the one way that equal values share.

    Raises:
        InvalidError: It holds something that is not plain data, or a NaN.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidError(f"not plain data: {exc}") from exc
    return text.encode("ascii")


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object from storage.

    Raises:
        CorruptError: It is not one.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise CorruptError(f"not JSON: {str(exc)[:200]}") from exc
    if not isinstance(value, dict):
        raise CorruptError("not a JSON object")
    return value


def _column(entry: object) -> tuple[str, str, int]:
    if isinstance(entry, list) and len(entry) == 3:  # noqa: PLR2004 - name, dtype, count
        name, dtype, count = entry
        if (
            isinstance(name, str)
            and dtype in _DTYPES
            and isinstance(count, int)
            and not isinstance(count, bool)
            and 0 <= count <= RAW_BYTES_MAX
        ):
            return name, dtype, count
    raise CorruptError("index header describes a column that cannot be")
