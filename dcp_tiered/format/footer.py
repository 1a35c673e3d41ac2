"""The last bytes of a shard file or pack: a compressed index and a trailer that finds it.

last 48 bytes: footer start u64, stored length u32, raw length u32, sha256[:16] of the stored
               bytes, file length u64, magic (8 bytes)
"""

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format.columns import compress, decompress
from dcp_tiered.format.fields import NUMBER_MAX, is_int, shown

TRAILER_BYTES = 48
STORED_BYTES_MAX = 1 << 30
VERSION = 1
_TRAILER = struct.Struct("<QII16sQ8s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """Where a footer lies; checked against the length of the file it was read from."""

    start: int
    stored_length: int
    raw_length: int
    digest: bytes


def encode_footer(raw: bytes, start: int, magic: bytes) -> bytes:
    """Return footer and trailer for a file whose footer starts at `start`."""
    stored = compress(raw)
    if len(stored) > STORED_BYTES_MAX:
        raise InvalidError(f"footer of {len(stored)} bytes exceeds {STORED_BYTES_MAX}")
    trailer = _TRAILER.pack(
        start,
        len(stored),
        len(raw),
        hashlib.sha256(stored).digest()[:16],
        start + len(stored) + TRAILER_BYTES,
        magic,
    )
    return stored + trailer


def decode_trailer(data: bytes, file_length: int, magic: bytes) -> Trailer:
    """Decode the last 48 bytes of a file.

    Raises:
        CorruptError: They are not the trailer of a file of that length and kind.
    """
    if len(data) != TRAILER_BYTES:
        raise CorruptError("file is too short to hold a footer")
    start, stored, raw, digest, length, found = _TRAILER.unpack(data)
    if found != magic:
        raise CorruptError(f"file does not end in {magic!r}: truncated, or not ours")
    if length > NUMBER_MAX or length != file_length or start + stored + TRAILER_BYTES != length:
        raise CorruptError(f"file of {file_length} bytes says that it has {length}")
    if stored > STORED_BYTES_MAX:
        raise CorruptError(f"footer claims {stored} bytes")
    return Trailer(start=start, stored_length=stored, raw_length=raw, digest=digest)


def decode_footer(trailer: Trailer, stored: bytes) -> bytes:
    """Return the raw index behind a trailer.

    Raises:
        CorruptError: The stored bytes are not the ones that were written.
    """
    if len(stored) != trailer.stored_length:
        raise CorruptError("footer is cut short")
    if hashlib.sha256(stored).digest()[:16] != trailer.digest:
        raise CorruptError("footer checksum mismatch")
    return decompress(stored, trailer.raw_length)


def check_features(
    version: object, requires: object, written_by: object, known: Collection[str] = ()
) -> None:
    """Refuse what this version cannot read, by name.

    Args:
        version: Of the format.
        requires: Features that are needed to read it.
        written_by: Version of dcp_tiered.
        known: Features that the caller can read.

    Raises:
        InvalidError: It needs a newer dcp_tiered.
        CorruptError: The fields are not what they should be.
    """
    if not is_int(version, 1):
        raise CorruptError("format version is not a positive integer")
    if not isinstance(requires, list) or not all(isinstance(name, str) for name in requires):
        raise CorruptError("'requires' is not a list of names")
    needs = (
        [f"format version {version}"]
        if version > VERSION
        else [name for name in requires if name not in known]
    )
    if needs:
        raise InvalidError(
            f"written by dcp_tiered {shown(written_by, 40)}, needs {', '.join(needs)[:200]}",
            None,
            None,
            "Install a newer dcp_tiered: 'pip install -U dcp-tiered'.",
        )
