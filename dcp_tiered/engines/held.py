"""A file that is only held in memory, where the local tier has no room for it.

Nothing is copied that lies in host memory: the pieces are the tensors themselves.
"""

from bisect import bisect_right

from awscrt.checksums import crc32c

from dcp_tiered.engines.block_sums import block_crcs
from dcp_tiered.interfaces import DeviceBytes

_CHECK_BYTES = 8 << 20


class HeldImage:
    """An `Image` that keeps what is appended, and a `Source` of it once it is finished."""

    def __init__(self) -> None:
        self.length = 0
        self.crc32c = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []

    def append(self, start: int, data: memoryview | DeviceBytes) -> list[int]:
        """Hold `data` at `start`; see `Image.append`."""
        if not isinstance(data, memoryview):
            host = memoryview(bytearray(data.nbytes))
            data.copy_to(0, host)
            data = host
        if data.nbytes:
            self._starts.append(start)
            self._pieces.append(data)
        return block_crcs(data)

    def finish(self, length: int) -> None:
        """Fix the length; see `Image.finish`."""
        self.length = length

    def pread(self, length: int, start: int) -> bytes:
        """Return exactly `length` bytes from `start`; what was never appended reads as zeros."""
        out = bytearray(length)
        number = max(0, bisect_right(self._starts, start) - 1)
        for at, piece in zip(self._starts[number:], self._pieces[number:], strict=True):
            if at >= start + length:
                break
            first, last = max(at, start), min(at + piece.nbytes, start + length)
            if first < last:
                out[first - start : last - start] = piece[first - at : last - at]
        return bytes(out)

    def copy_into(self, fd: int, length: int, start: int) -> int:
        """Return 0: it lies in no file; see `Source.copy_into`."""
        del fd, length, start
        return 0

    def checksum(self, length: int, start: int) -> int:
        """Return the CRC32C of a range."""
        crc, end = 0, start + length
        while start < end:
            data = self.pread(min(_CHECK_BYTES, end - start), start)
            crc = crc32c(data, crc)
            start += len(data)
        return crc
