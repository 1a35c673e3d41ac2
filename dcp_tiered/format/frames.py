"""Frames: how a compressed pack stores the bytes of its shard files, stretch by stretch.

    as it is     the bytes themselves, of any length up to 1 GiB
    compressed   whole blocks of one item, at most 4 MiB: its elements are taken apart, and each
                 part is one zstd frame, or raw where that saves too little

The bytes of an element are not alike: sign and exponent of trained values repeat, the mantissa is
noise. So a 16-bit element is two parts of one byte, and one of 32 bits is its lower half, which is
zero where values were rounded to bfloat16, and two parts of one byte. The table of all frames is in
the pack's footer. No size in it, or in a frame, is believed before it is checked (I12).
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import zstandard

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.boxes import TENSOR
from dcp_tiered.format.columns import Array, take
from dcp_tiered.format.shardfile import LARGE_BYTES, Index, dtype_code

FEATURE = "frames"
"""Named in `requires` by what cannot be read without knowing frames."""
FRAME_BYTES = 1 << 20
"""Of raw bytes in a compressed frame: four blocks. Who wants one block has to read all of it."""
FRAME_BYTES_MAX = 4 << 20
"""What a reader takes."""
ENCODER = "frames 1, zstd " + ".".join(map(str, zstandard.ZSTD_VERSION))
"""What the bytes of a compressed pack depend on, besides those of its shard files."""
AS_IT_IS = 0
_RUN_BYTES_MAX = 1 << 30
_SHRUNK = 15, 16
"""What is stored compressed takes at most this part of its raw bytes."""
_ELEMENTS = {1: ("<u2", (1, 1)), 2: ("<u4", (2, 1, 1))}
"""By codec: the element, and the bytes of its parts, the lowest first."""
_CODECS = {"float16": 1, "bfloat16": 1, "float32": 2}
_CODEC_OF = np.zeros(256, dtype="u1")
_CODEC_OF[[dtype_code(name) for name in _CODECS]] = list(_CODECS.values())
_WIDTHS = np.array([1, 2, 4])
# Found by measuring on weights and moments: long matches only, a table that stays in the L1 cache.
_TUNED = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, window_log=17, write_content_size=True
)


def encode_frame(codec: int, raw: bytes) -> bytes | None:
    """Return the stored bytes of a frame, None when they are best kept as they are.

    Args:
        codec: What `stretches` said.
        raw: Whole elements.
    """
    if codec == AS_IT_IS:
        return None
    dtype, widths = _ELEMENTS[codec]
    words = np.frombuffer(raw, dtype)
    compressor = zstandard.ZstdCompressor(compression_params=_TUNED)
    parts: list[bytes | memoryview] = []
    shift = 0
    for width in widths:
        part = (words >> shift if shift else words).astype(f"<u{width}").data.cast("B")
        small = compressor.compress(part)
        parts.append(small if _is_shrunk(len(small), len(part)) else part)
        shift += 8 * width
    stored = b"".join((struct.pack(f"<{len(parts)}I", *map(len, parts)), *parts))
    return stored if _is_shrunk(len(stored), len(raw)) else None


def decode_frame(codec: int, stored: memoryview, raw: memoryview) -> None:
    """Fill `raw` with the bytes behind a compressed frame; whoever uses them checks their sums.

    Raises:
        CorruptError: They are not a frame of that codec and length.
    """
    dtype, widths = _ELEMENTS[codec]
    header = struct.Struct(f"<{len(widths)}I")
    if len(stored) < header.size:
        raise CorruptError("compressed frame is shorter than its header")
    lengths = header.unpack_from(stored)
    if header.size + sum(lengths) != len(stored):
        raise CorruptError("parts of a compressed frame do not fill it")
    words, end = np.frombuffer(raw, dtype), len(stored)
    for number, (width, length) in enumerate(reversed(list(zip(widths, lengths, strict=True)))):
        part = np.frombuffer(_part(stored[end - length : end], width * len(words)), f"<u{width}")
        end -= length
        if number:
            np.left_shift(words, 8 * width, out=words)
            np.bitwise_or(words, part, out=words)
        else:
            words[:] = part


def _part(stored: memoryview, length: int) -> memoryview | bytes:
    """Return the raw bytes of a part; no more than `length`, whatever it says of itself."""
    if len(stored) == length:
        return stored
    try:
        # A limit that is given to `decompress` counts only where the frame states no size.
        if len(stored) > length or zstandard.frame_content_size(stored) != length:
            raise CorruptError("part of a compressed frame has another size than it should have")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise CorruptError(f"compressed frame does not decompress: {exc}") from exc


def _is_shrunk(stored: int, raw: int) -> bool:
    most, of = _SHRUNK
    return stored * of <= raw * most


def stretches(index: Index, length: int) -> Iterator[tuple[int, int, int]]:
    """Cut a shard file into what may become a frame each.

    Args:
        index: Of the shard file.
        length: Of the whole file, bytes.

    Yields:
        Start, end and codec, each start at the end before it.
    """
    codecs = np.where(index.kind == TENSOR, _CODEC_OF[index.dtype], AS_IT_IS)
    rows = np.flatnonzero((codecs != AS_IT_IS) & (index.length >= LARGE_BYTES))
    at = 0
    for row in rows[np.argsort(index.start[rows], kind="stable")].tolist():
        start = index.start.item(row)
        end = start + index.length.item(row)
        yield from _pieces(at, start, AS_IT_IS)
        yield from _pieces(start, end, codecs.item(row))
        at = end
    yield from _pieces(at, length, AS_IT_IS)


def _pieces(start: int, end: int, codec: int) -> Iterator[tuple[int, int, int]]:
    for begin in range(start, end, FRAME_BYTES):
        yield begin, min(begin + FRAME_BYTES, end), codec


@dataclass(slots=True, kw_only=True)
class Cut:
    """A frame, or of one that is stored as it is the bytes that are wanted."""

    codec: int
    raw_start: int
    """First byte of the shard files, as they lie end to end."""
    raw_end: int
    start: int
    """First byte of the stored pack."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """The table of a pack's frames: they follow each other without gaps, raw and stored."""

    raw: Array
    """Length of each before, u4."""
    stored: Array
    """Length of each in the pack, u4."""
    codec: Array
    """u1."""
    raw_ends: Array = field(repr=False)
    stored_ends: Array = field(repr=False)

    @classmethod
    def of(cls, raw: Array, stored: Array, codec: Array) -> Self:
        """Return the table that these columns are."""
        ends = (np.cumsum(column, dtype="i8") for column in (raw, stored))
        return cls(raw=raw, stored=stored, codec=codec, raw_ends=next(ends), stored_ends=next(ends))

    def columns(self) -> dict[str, Array]:
        """Return the columns as a footer holds them."""
        return {"raw": self.raw, "stored": self.stored, "codec": self.codec}

    def cuts(self, start: int, end: int) -> list[Cut]:
        """Return what has to be read for a range of the shard files, in order."""
        first, last = np.searchsorted(self.raw_ends, (start, end - 1), side="right").tolist()
        return [self._cut(number, start, end) for number in range(first, last + 1)]

    def _cut(self, number: int, start: int, end: int) -> Cut:
        raw_end, stored_end = self.raw_ends.item(number), self.stored_ends.item(number)
        cut = Cut(
            codec=self.codec.item(number),
            raw_start=raw_end - self.raw.item(number),
            raw_end=raw_end,
            start=stored_end - self.stored.item(number),
            end=stored_end,
        )
        if cut.codec == AS_IT_IS:
            before, behind = max(0, start - cut.raw_start), max(0, cut.raw_end - end)
            cut.raw_start, cut.start = cut.raw_start + before, cut.start + before
            cut.raw_end, cut.end = cut.raw_end - behind, cut.end - behind
        return cut


def parse_frames(columns: Mapping[str, Array], raw_length: int, stored_length: int) -> Frames:
    """Return the table out of a footer's columns.

    Args:
        columns: Of the footer.
        raw_length: What the shard files take, end to end.
        stored_length: Where the pack's footer starts.

    Raises:
        CorruptError: It describes something else, or what cannot be.
    """
    raw, stored = take(columns, "raw", "u4"), take(columns, "stored", "u4")
    codec = take(columns, "codec", "u1")
    if not len(raw) == len(stored) == len(codec):
        raise CorruptError("columns of the frame table differ in length")
    if np.any(codec >= len(_WIDTHS)):
        raise CorruptError("a frame has a codec that this format does not know")
    plain = codec == AS_IT_IS
    if not np.all(raw) or not np.all(stored) or np.any(raw[plain] != stored[plain]):
        raise CorruptError("a frame is empty, or stored as it is with another length")
    too_large = (raw > FRAME_BYTES_MAX) | (stored >= raw) | (raw % _WIDTHS[codec] != 0)
    if np.any(too_large & ~plain):
        raise CorruptError("a compressed frame has a length that cannot be")
    frames = Frames.of(raw, stored, codec)
    found = [int(ends[-1]) if len(ends) else 0 for ends in (frames.raw_ends, frames.stored_ends)]
    if found != [raw_length, stored_length]:
        raise CorruptError("frames do not cover the pack")
    return frames


class Builder:
    """Collects the frames of one pack in the order in which they are written."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []

    def add(self, codec: int, raw: int, stored: int) -> None:
        """Take note of a frame; one that is stored as it is joins such a one before it."""
        if codec == AS_IT_IS and self._rows:
            last_codec, last, _ = self._rows[-1]
            if last_codec == AS_IT_IS and last + raw <= _RUN_BYTES_MAX:
                raw = stored = last + raw
                self._rows.pop()
        self._rows.append((codec, raw, stored))

    def finish(self) -> Frames:
        """Return the table."""
        codec, raw, stored = zip(*self._rows, strict=True) if self._rows else ((), (), ())
        lengths = (np.array(column, dtype="<u4") for column in (raw, stored))
        return Frames.of(next(lengths), next(lengths), np.array(codec, dtype="u1"))
