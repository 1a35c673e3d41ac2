"""O_DIRECT: around the page cache, at the speed of the device.

A file is written as one image from front to back. What lies in ordinary memory is copied once,
through aligned buffers, and summed while it is in the cache; what is aligned already (a staging
arena) is written from where it lies. Two threads keep the device busy while the next buffer fills.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.block_sums import BlockSums, block_crcs
from dcp_tiered.format.shardfile import BLOCK_BYTES
from dcp_tiered.interfaces import DeviceBytes
from dcp_tiered.syscalls import PAGE_BYTES, direct_alignment, open_direct, reserve

_THREADS = 3
_SMALL_BYTES = 16 << 10
_IN_PLACE_BYTES = 1 << 20
"""An aligned item is written from where it lies from this size on; below, a copy costs less than
one more request to the device."""
_REQUEST_BYTES = 16 << 20
_REQUESTS_MAX = 8
"""Requests on their way: what they are written from is held until they are done."""


class DirectEngine:
    """Writes and reads files around the page cache.

    Args:
        arena: Buffers for what is not aligned.
    """

    name = "direct"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @contextmanager
    def writing(self, fd: int, length_estimate: int) -> Iterator["DirectImage"]:
        """Write one file; see `Engine.writing`."""
        direct = open_direct(fd, os.O_RDWR)
        try:
            aligned = direct_alignment(direct)
            if aligned is None:
                raise OSError(errno.EINVAL, "file system has no O_DIRECT")
            reserve(fd, length_estimate)
            with ThreadPoolExecutor(_THREADS, "dcp-tiered-write") as pool:
                image = DirectImage(direct, self._arena, pool, aligned[0])
                try:
                    yield image
                finally:
                    image.settle()
        finally:
            os.close(direct)


class DirectImage:
    """A file that grows from front to back."""

    def __init__(
        self, fd: int, arena: Arena, pool: ThreadPoolExecutor, memory_alignment: int
    ) -> None:
        self._fd = fd
        self._arena = arena
        self._pool = pool
        self._memory_alignment = memory_alignment
        self._buffer: memoryview | None = None
        self._buffer_start = 0
        self._end = 0
        self._futures: deque[Future[None]] = deque()

    def append(self, start: int, data: memoryview | DeviceBytes) -> list[int]:
        """Write `data` at `start`; see `Image.append`."""
        if not isinstance(data, memoryview):
            return self._copy(start, data.nbytes, data.copy_to, self._arena.buffer_bytes)
        if self._in_place(start, data):
            return self._write_in_place(start, data)
        return self._copy(start, len(data), _copier(data), BLOCK_BYTES)

    def finish(self, length: int) -> None:
        """Hand everything to the device; see `Image.finish`."""
        self._submit_buffer()
        while self._futures:
            self._futures.popleft().result()
        os.ftruncate(self._fd, length)

    def settle(self) -> None:
        """Wait until no thread uses a buffer, whatever happened, and give the buffers back."""
        for future in self._futures:
            future.exception()
        if self._buffer is not None:
            self._arena.give_back(self._buffer)
            self._buffer = None

    def _in_place(self, start: int, data: memoryview) -> bool:
        if len(data) < _IN_PLACE_BYTES or start % PAGE_BYTES:
            return False
        address = np.frombuffer(data, dtype="u1").__array_interface__["data"][0]
        return bool(address % self._memory_alignment == 0)

    def _write_in_place(self, start: int, data: memoryview) -> list[int]:
        """Write whole pages from where they lie, and copy the rest of less than a page."""
        length = len(data) - len(data) % PAGE_BYTES
        self._submit_buffer()
        for at in range(0, length, _REQUEST_BYTES):
            self._submit(data[at : min(length, at + _REQUEST_BYTES)], start + at)
        crcs = block_crcs(data)
        self._end = start + length
        if length < len(data):
            rest = data[length:]
            self._copy(start + length, len(rest), _copier(rest), BLOCK_BYTES)
        return crcs

    def _copy(
        self, start: int, length: int, copy_to: Callable[[int, memoryview], None], step: int
    ) -> list[int]:
        """Copy into buffers, at most `step` bytes at a time, and sum while they are in the cache.

        Returns:
            The checksum of each block.
        """
        sums = BlockSums()
        self._fill_gap(start)
        done = 0
        while done < length:
            buffer, at = self._room()
            count = min(step, length - done, len(buffer) - at)
            target = buffer[at : at + count]
            copy_to(done, target)
            sums.feed(target)
            done += count
            self._end += count
        return sums.crcs

    def _fill_gap(self, start: int) -> None:
        """Fill with zeros up to `start`; a large hole is left to the file system."""
        gap = start - self._end
        if gap >= PAGE_BYTES:
            self._submit_buffer()
            self._end = start - start % PAGE_BYTES
            gap = start - self._end
        while gap:
            buffer, at = self._room()
            count = min(gap, len(buffer) - at)
            buffer[at : at + count] = bytes(count)
            self._end += count
            gap -= count

    def _room(self) -> tuple[memoryview, int]:
        """Return the current buffer and where its free part starts; there is some."""
        if self._buffer is not None and self._end - self._buffer_start == len(self._buffer):
            self._submit_buffer()
        if self._buffer is None:
            self._buffer = self._arena.take()
            self._buffer_start = self._end
        return self._buffer, self._end - self._buffer_start

    def _submit_buffer(self) -> None:
        """Give the current buffer to a thread, padded to a whole page."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        used = self._end - self._buffer_start
        padded = used + -used % PAGE_BYTES
        buffer[used:padded] = bytes(padded - used)
        self._end = self._buffer_start + padded
        try:
            future = self._submit(buffer[:padded], self._buffer_start)
        except BaseException:
            self._arena.give_back(buffer)
            raise
        future.add_done_callback(lambda _: self._arena.give_back(buffer))

    def _submit(self, data: memoryview, start: int) -> Future[None]:
        """Give a request to a thread; wait for the oldest one, and its error, when many are out."""
        while len(self._futures) >= _REQUESTS_MAX:
            self._futures.popleft().result()
        future = self._pool.submit(_write, self._fd, data, start)
        self._futures.append(future)
        return future


def _copier(data: memoryview) -> Callable[[int, memoryview], None]:
    """Return what copies a part of host memory."""

    def copy_to(start: int, target: memoryview) -> None:
        part = data[start : start + len(target)]
        if len(target) < _SMALL_BYTES:
            target[:] = part
        else:
            # Unlike an assignment to the view, this lets other threads run.
            np.copyto(np.frombuffer(target, dtype="u1"), np.frombuffer(part, dtype="u1"))

    return copy_to


def _write(fd: int, data: memoryview, start: int) -> None:
    """Write all of an aligned buffer; a short write is carried on from the last whole page."""
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], start + done)
        whole = count - count % PAGE_BYTES if done + count < len(data) else count
        if not whole:
            raise OSError(errno.EIO, "device takes less than a page at a time")
        done += whole
