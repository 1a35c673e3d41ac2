"""Whether an object that is there is what it should be: by the store's checksum, or by reading.

Reading is the only way where a store keeps no checksum.
"""

from typing import Protocol

from awscrt.checksums import crc32c

from dcp_tiered.errors import CorruptError
from dcp_tiered.interfaces import ObjectInfo, Source

_READ_BYTES = 8 << 20


class Reads(Protocol):
    """What is asked of a tier."""

    name: str

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`."""
        ...


def stored_crc32c(tier: Reads, key: str, length: int) -> int:
    """Return the CRC32C of an object of that length, by reading all of it."""
    crc, at = 0, 0
    buffer = memoryview(bytearray(min(_READ_BYTES, length)))
    while at < length:
        part = buffer[: min(len(buffer), length - at)]
        tier.read_into(key, at, part)
        crc = crc32c(part, crc)
        at += len(part)
    return crc


def may_be(found: ObjectInfo, source: Source) -> bool:
    """Tell whether what is there is a source, as far as the store can say."""
    return found.length == source.length and found.crc32c in (None, source.crc32c)


def need_ours(tier: Reads, found: ObjectInfo, source: Source, where: str) -> ObjectInfo:
    """Return what is there if it is the source.

    Args:
        tier: Where it is read, if the store keeps no checksum of it.
        found: What the store says of it.
        source: What it should be.
        where: For the message.

    Raises:
        CorruptError: It has other bytes.
    """
    is_ours = may_be(found, source)
    if is_ours and found.crc32c is None:
        is_ours = stored_crc32c(tier, found.key, found.length) == source.crc32c
    if not is_ours:
        raise CorruptError("object is there with other bytes than ours", tier.name, where)
    return found
