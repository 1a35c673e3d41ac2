"""Columns in one blob: a JSON header, then raw little-endian arrays, then zstd around all of it.

    u32 header length | header JSON {"meta": ..., "columns": [[name, dtype, count], ...]} | arrays

Each array starts on a multiple of 8 counted from the start of the blob. The blob is what footers
and manifests are made of. Everything is checked before it is used, and no size in it is believed
before the bytes are there (I12).
"""

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format.fields import is_int, rows, shown

Array = npt.NDArray[Any]

RAW_BYTES_MAX = 1 << 31
"""Bound on a decompressed blob: 20 million items at about 100 bytes."""
_RATIO_MAX = 64
_RATIO_SLACK = 1 << 20
_DTYPES = {"u1": 1, "u4": 4, "i8": 8}
_LENGTH = struct.Struct("<I")
_LEVEL = 3
_WINDOW_BYTES_MAX = 1 << 23
_READ_BYTES = 1 << 24
# A zstd frame of raw blocks: magic, descriptor (8-byte content size), window (1 MiB), content size.
_RAW_FRAME = struct.Struct("<IBBQ")
_RAW_BLOCK_BYTES = 1 << 17


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
        CorruptError: It is not a blob, or its arrays do not fill it exactly.
    """
    position = _LENGTH.size + _header_length(raw[: _LENGTH.size], len(raw))
    meta, described = _header(raw[_LENGTH.size : position])
    columns: dict[str, Array] = {}
    for entry in described:
        name, dtype, count = _column(entry)
        size = count * _DTYPES[dtype]
        if name in columns or position % 8 or size > len(raw) - position:
            raise CorruptError(f"index column {name[:40]!r} is there twice or does not fit")
        columns[name] = np.frombuffer(raw, dtype=f"<{dtype}", count=count, offset=position)
        position += size + -size % 8
    if position != len(raw):
        raise CorruptError("index columns do not fill the index")
    return meta, columns


def decode_meta(stored: bytes, raw_length: int) -> dict[str, Any]:
    """Return a compressed blob's header without decompressing its arrays; see `decompress`."""
    frame = _open_frame(stored, raw_length)
    length = _header_length(_read(frame, _LENGTH.size), raw_length)
    return _header(_read(frame, length))[0]


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
    """Compress a blob into one zstd frame with its size in the header.

    What compresses better than `decompress` believes, such as the checksums of a terabyte of zeros,
    is framed uncompressed.

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
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    return stored if len(raw) <= _raw_length_max(len(stored)) else _raw_frame(raw)


def decompress(stored: bytes, raw_length: int) -> bytes:
    """Decompress a blob whose size was stated elsewhere.

    The statement is hostile until proven: it is bounded by what real indexes compress to, the frame
    must repeat it, and memory grows only with bytes that really came out.

    Raises:
        CorruptError: The data is not one zstd frame of exactly that size.
    """
    frame = _open_frame(stored, raw_length)
    raw = _read(frame, raw_length)
    try:
        more = frame.read(1)
    except zstandard.ZstdError:
        more = b"?"  # bytes behind the frame that are no frame
    if more:
        raise CorruptError("index has bytes behind its end")
    return raw


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
    bounds = [0, *np.cumsum(lengths, dtype="i8").tolist()]
    data = blob.tobytes()
    if data.isascii():
        ascii_text = data.decode("ascii")
        return [ascii_text[start:end] for start, end in pairwise(bounds)]
    try:
        return [data[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(bounds)]
    except UnicodeDecodeError as exc:
        raise CorruptError("a name in the index is not UTF-8") from exc


def canonical_json(value: object) -> bytes:
    """Encode plain data the one way that equal values share: sorted, compact, UTF-8.

    A lone surrogate is stored as if UTF-8 had it: escaped, two of them would come back as one.

    Raises:
        InvalidError: It holds something that is not plain data, or a NaN.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidError(f"not plain data: {exc}") from exc
    return text.encode("utf-8", "surrogatepass")


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object from storage.

    Raises:
        CorruptError: It is not one.
    """
    try:
        value = _JSON.decode(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as exc:
        raise CorruptError(f"not JSON: {str(exc)[:200]}") from exc
    if not isinstance(value, dict):
        raise CorruptError("not a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _header_length(data: bytes, raw_length: int) -> int:
    if len(data) < _LENGTH.size:
        raise CorruptError("index is too short to hold a header")
    length: int = _LENGTH.unpack(data)[0]
    if length > raw_length - _LENGTH.size:
        raise CorruptError("index header reaches past the end of the index")
    return length


def _header(data: bytes) -> tuple[dict[str, Any], list[Any]]:
    header = parse_json(data)
    meta = header.get("meta")
    if not isinstance(meta, dict):
        raise CorruptError("index header lacks 'meta'")
    return meta, rows(header, "columns")


def _column(entry: object) -> tuple[str, str, int]:
    if isinstance(entry, list) and len(entry) == 3:  # noqa: PLR2004 - name, dtype, count
        name, dtype, count = entry
        known = isinstance(name, str) and isinstance(dtype, str) and dtype in _DTYPES
        if known and is_int(count, 0, RAW_BYTES_MAX):
            return name, dtype, count
    raise CorruptError(f"index header describes a column that cannot be: {shown(entry)}")


def _raw_length_max(stored_length: int) -> int:
    return stored_length * _RATIO_MAX + _RATIO_SLACK


def _raw_frame(raw: bytes) -> bytes:
    parts = [_RAW_FRAME.pack(0xFD2FB528, 0xC0, 0x50, len(raw))]
    for start in range(0, len(raw), _RAW_BLOCK_BYTES):
        block = raw[start : start + _RAW_BLOCK_BYTES]
        is_last = start + len(block) == len(raw)
        parts += (struct.pack("<I", len(block) << 3 | is_last)[:3], block)
    return b"".join(parts)


def _open_frame(stored: bytes, raw_length: int) -> zstandard.ZstdDecompressionReader:
    if raw_length > min(RAW_BYTES_MAX, _raw_length_max(len(stored))):
        raise CorruptError(f"index claims {raw_length} bytes from {len(stored)} stored ones")
    try:
        size = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as exc:
        raise CorruptError(f"index does not decompress: {exc}") from exc
    if size != raw_length:
        raise CorruptError("index size differs from what its frame says")
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(stored)


def _read(frame: zstandard.ZstdDecompressionReader, length: int) -> bytes:
    parts = []
    left = length
    try:
        while left and (part := frame.read(min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
    except zstandard.ZstdError as exc:
        raise CorruptError(f"index does not decompress: {exc}") from exc
    if left:
        raise CorruptError("index does not decompress to its stated size")
    return b"".join(parts)
