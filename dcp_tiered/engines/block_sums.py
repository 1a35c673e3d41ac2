"""CRC32C of each 256 KiB block of an item, however it is cut into pieces."""

from awscrt.checksums import crc32c

from dcp_tiered.format.shardfile import BLOCK_BYTES


def block_crcs(data: memoryview) -> list[int]:
    """Return the checksum of each block of flat bytes."""
    return [crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


class BlockSums:
    """Checksums of an item that comes piece by piece."""

    def __init__(self) -> None:
        self.crcs: list[int] = []
        """One for each block that has begun."""
        self._room = 0

    def feed(self, data: memoryview) -> None:
        """Take the next piece."""
        while data:
            if not self._room:
                self.crcs.append(0)
                self._room = BLOCK_BYTES
            part = data[: self._room]
            self.crcs[-1] = crc32c(part, self.crcs[-1])
            self._room -= len(part)
            data = data[len(part) :]
