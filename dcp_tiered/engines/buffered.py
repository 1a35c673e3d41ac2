"""Through the page cache: the engine that works everywhere, and leaves little in the cache.

Dirty pages of a checkpoint crowd out the training data and are written in bursts that stall the
trainer. So each window is dropped behind the writer: by RWF_DONTCACHE (Linux 6.14), else by
sync_file_range and POSIX_FADV_DONTNEED.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_tiered.engines.block_sums import BlockSums, block_crcs
from dcp_tiered.interfaces import DeviceBytes
from dcp_tiered.syscalls import start_write_out, wait_write_out

_COPY_BYTES = 8 << 20
_WINDOW_BYTES = 32 << 20
_DONTCACHE = 0x80
_UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


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

    def append(self, start: int, data: memoryview | DeviceBytes) -> list[int]:
        """Write `data` at `start`; see `Image.append`."""
        if isinstance(data, memoryview):
            self._write_all(start, data)
            return block_crcs(data)
        sums, buffer = BlockSums(), memoryview(bytearray(min(data.nbytes, _COPY_BYTES)))
        for at in range(0, data.nbytes, _COPY_BYTES):
            part = buffer[: data.nbytes - at]
            data.copy_to(at, part)
            sums.feed(part)
            self._write_all(start + at, part)
        return sums.crcs

    def finish(self, length: int) -> None:
        """Cut the file to its length; see `Image.finish`."""
        os.ftruncate(self._fd, length)

    def _write_all(self, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._write(data[done : done + _WINDOW_BYTES], start + done)
            if not self._flags and start + done - self._window >= _WINDOW_BYTES:
                self._drop_behind(start + done)

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
        start_write_out(self._fd, self._window, end - self._window)
        if self._window > before:
            span = self._window - before
            wait_write_out(self._fd, before, span)
            os.posix_fadvise(self._fd, before, span, os.POSIX_FADV_DONTNEED)
        self._window = end
