"""O_DIRECT: around the page cache, at the speed of the device.

A file is written as one image from front to back. What lies in ordinary memory is copied once,
through aligned buffers, and summed while it is in the cache; what is aligned already (a staging
arena) is written from where it lies. Two threads keep the device busy while the next buffer fills.
"""

import ctypes
import errno
import os
import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from awscrt.checksums import crc32c

from dcp_tiered.engines.arena import Arena
from dcp_tiered.interfaces import PAGE_BYTES

_THREADS = 2
_BLOCK_BYTES = 256 << 10
_SMALL_BYTES = 16 << 10
_IN_PLACE_BYTES = 1 << 20
"""An aligned item is written from where it lies from this size on; below, a copy costs less than
one more request to the device."""
_REQUEST_BYTES = 16 << 20
_REQUESTS_MAX = 4
"""Requests on their way: what they are written from is held until they are done."""
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_DIOALIGN_OFFSET = 0x98
_libc = ctypes.CDLL(None, use_errno=True)


def alignment(fd: int) -> tuple[int, int] | None:
    """Return how O_DIRECT wants memory and offsets aligned, None where the file cannot have it.

    Source: statx(2), STATX_DIOALIGN, Linux 6.1. A file system without an answer is taken at a page.
    """
    buffer = ctypes.create_string_buffer(256)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return PAGE_BYTES, PAGE_BYTES
    if not struct.unpack_from("I", buffer)[0] & _STATX_DIOALIGN:
        return PAGE_BYTES, PAGE_BYTES
    memory, offset = struct.unpack_from("II", buffer, _DIOALIGN_OFFSET)
    return (memory, offset) if memory else None


def reopen(fd: int, flags: int) -> int:
    """Open the file behind a descriptor once more, around the page cache.

    Raises:
        OSError: EINVAL where the file system has no O_DIRECT.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)


def reserve(fd: int, length: int) -> None:
    """Reserve space, so that a full disk is told before the first byte; not everywhere possible.

    Raises:
        OSError: There is not that much space, with errno.
    """
    if length and _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(length)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(code, os.strerror(code))


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
        direct = reopen(fd, os.O_RDWR)
        try:
            aligned = alignment(direct)
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

    def append(self, start: int, data: memoryview) -> list[int]:
        """Write `data` at `start`; see `Image.append`."""
        if self._in_place(start, data):
            length = len(data) - len(data) % PAGE_BYTES
            self._submit_buffer()
            for at in range(0, length, _REQUEST_BYTES):
                part = data[at : min(length, at + _REQUEST_BYTES)]
                self._submit(part, start + at)
            crcs = [
                crc32c(data[at : at + _BLOCK_BYTES]) for at in range(0, len(data), _BLOCK_BYTES)
            ]
            self._end = start + length
            if length < len(data):
                self._copy(start + length, data[length:])
            return crcs
        return self._copy_summed(start, data)

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

    def _copy_summed(self, start: int, data: memoryview) -> list[int]:
        """Copy block by block; return the checksum of each."""
        return [
            self._copy(start + at, data[at : at + _BLOCK_BYTES])
            for at in range(0, len(data), _BLOCK_BYTES)
        ]

    def _copy(self, start: int, data: memoryview) -> int:
        """Copy into buffers and sum where it was copied to, while it is in the cache."""
        crc = 0
        self._fill_gap(start)
        while data:
            buffer, at = self._room()
            count = min(len(data), len(buffer) - at)
            target = buffer[at : at + count]
            if count < _SMALL_BYTES:
                target[:] = data[:count]
            else:
                # Unlike an assignment to the view, this lets other threads run.
                np.copyto(
                    np.frombuffer(target, dtype="u1"), np.frombuffer(data[:count], dtype="u1")
                )
            crc = crc32c(target, crc)
            data = data[count:]
            self._end += count
        return crc

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


def _write(fd: int, data: memoryview, start: int) -> None:
    """Write all of an aligned buffer; a short write is carried on from the last whole page."""
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], start + done)
        whole = count - count % PAGE_BYTES if done + count < len(data) else count
        if not whole:
            raise OSError(errno.EIO, "device takes less than a page at a time")
        done += whole
