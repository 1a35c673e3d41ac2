"""Through the page cache: the engine that works everywhere, and leaves little in the cache.

Dirty pages of a checkpoint crowd out the training data and are written in bursts that stall the
trainer. So each window is dropped behind the writer: by RWF_DONTCACHE (Linux 6.14), else by
sync_file_range and POSIX_FADV_DONTNEED.
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from awscrt.checksums import crc32c

_BLOCK_BYTES = 256 << 10
_WINDOW_BYTES = 32 << 20
_DONTCACHE = 0x80
_WRITE = 2
_WAIT_WRITE_WAIT = 7
_UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)


class BufferedEngine:
    """Writes files with pwrite."""

    name = "buffered"

    @contextmanager
    def writing(self, fd: int, length_estimate: int) -> Iterator["BufferedImage"]:
        """Write one file; see `Engine.writing`."""
        del length_estimate
        yield BufferedImage(fd)


class BufferedImage:
    """A file that grows from front to back."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._flags = _DONTCACHE
        self._window = 0

    def append(self, start: int, data: memoryview) -> list[int]:
        """Write `data` at `start`; see `Image.append`."""
        crcs = [crc32c(data[at : at + _BLOCK_BYTES]) for at in range(0, len(data), _BLOCK_BYTES)]
        done = 0
        while done < len(data):
            done += self._write(data[done : done + _WINDOW_BYTES], start + done)
            if not self._flags and start + done - self._window >= _WINDOW_BYTES:
                self._drop_behind(start + done)
        return crcs

    def finish(self, length: int) -> None:
        """Cut the file to its length; see `Image.finish`."""
        os.ftruncate(self._fd, length)

    def _write(self, data: memoryview, start: int) -> int:
        try:
            return os.pwritev(self._fd, [data], start, self._flags)
        except OSError as exc:
            if not self._flags or exc.errno not in _UNKNOWN:
                raise
            self._flags = 0
            return os.pwritev(self._fd, [data], start)

    def _drop_behind(self, end: int) -> None:
        """Start writing out the newest window, wait for the one before it, and drop that."""
        before = max(0, self._window - _WINDOW_BYTES)
        offset, count = ctypes.c_long, ctypes.c_long
        _libc.sync_file_range(self._fd, offset(self._window), count(end - self._window), _WRITE)
        if self._window > before:
            span = self._window - before
            _libc.sync_file_range(self._fd, offset(before), count(span), _WAIT_WRITE_WAIT)
            os.posix_fadvise(self._fd, before, span, os.POSIX_FADV_DONTNEED)
        self._window = end
