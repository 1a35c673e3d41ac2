"""CRC32C of each 256 KiB block of an item, however it is cut into pieces."""

import threading
import time

from awscrt.checksums import crc32c

from dcp_tiered.format.shardfile import BLOCK_BYTES

_LOCKED_BYTES_MAX = 4096
"""What is longer is summed by awscrt while other threads run."""
_BURST_BYTES = 4 * BLOCK_BYTES


def block_crcs(data: memoryview) -> list[int]:
    """Return the checksum of each block of flat bytes.

    Beside a main thread of plain Python a thread that gives the interpreter up waits 5 ms to get it
    back. So there it is kept for a fraction of a millisecond, and given up once for some blocks.
    """
    if threading.current_thread() is threading.main_thread():
        return [crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    crcs = []
    for at in range(0, len(data), BLOCK_BYTES):
        crcs.append(_locked(data[at : at + BLOCK_BYTES]))
        if not (at + BLOCK_BYTES) % _BURST_BYTES:
            time.sleep(0)
    return crcs


def _locked(data: memoryview) -> int:
    """Sum without letting other threads run."""
    crc = 0
    for at in range(0, len(data), _LOCKED_BYTES_MAX):
        crc = crc32c(data[at : at + _LOCKED_BYTES_MAX], crc)
    return crc


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
