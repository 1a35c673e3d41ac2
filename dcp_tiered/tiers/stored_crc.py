"""The checksum of an object as it reads: the only one there is where a store keeps none."""

from typing import Protocol

from awscrt.checksums import crc32c

_READ_BYTES = 8 << 20


class Reads(Protocol):
    """What is asked of a tier."""

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
