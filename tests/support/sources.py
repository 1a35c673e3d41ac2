"""Sources of bytes for uploads: from memory, damaged, counted."""

import hashlib
import threading

from awscrt.checksums import crc32c


class BytesSource:
    """A `Source` in memory.

    Args:
        data: Its bytes.
        crc: The checksum it claims; the true one by default.
    """

    def __init__(self, data: bytes, crc: int | None = None) -> None:
        self.data = data
        self.length = len(data)
        self.crc32c = crc32c(data) if crc is None else crc
        self.bytes_read = 0
        self._lock = threading.Lock()

    def pread(self, length: int, start: int) -> bytes:
        """Return a slice."""
        assert 0 < length <= self.length - start, "asked for bytes that are not there"
        with self._lock:
            self.bytes_read += length
        return self.data[start : start + length]

    def copy_into(self, fd: int, length: int, start: int) -> int:
        del fd, length, start
        return 0

    def checksum(self, length: int, start: int) -> int:
        """Return the true checksum of a slice, without reading."""
        return crc32c(memoryview(self.data)[start : start + length])


def pattern(length: int, seed: str = "") -> bytes:
    """Return bytes in which no two places look alike, so that a shifted read is noticed."""
    return hashlib.shake_128(f"{length} {seed}".encode()).digest(length)
