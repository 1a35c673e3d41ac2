"""System calls and addresses that Python does not offer: the only module that calls libc."""

import ctypes
import errno
import mmap
import os
import struct

PAGE_BYTES = mmap.PAGESIZE
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_DIOALIGN_OFFSET = 0x98
_SYNC_WRITE = 2
_SYNC_WAIT_WRITE_WAIT = 7
_CACHESTAT = 451
"""cachestat(2), the same number on every architecture."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""Its number by machine: libc has no function for it."""
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_LOWEST = 2 << 13 | 7
_libc = ctypes.CDLL(None, use_errno=True)
_long, _size, _pointer = ctypes.c_long, ctypes.c_size_t, ctypes.c_void_p


def direct_alignment(fd: int) -> tuple[int, int] | None:
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


def open_direct(fd: int, flags: int) -> int:
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
    while length and _libc.fallocate(fd, 0, _long(0), _long(length)):
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def start_write_out(fd: int, start: int, length: int) -> None:
    """Ask the kernel to begin writing dirty pages of a range to the device."""
    _sync_file_range(fd, start, length, _SYNC_WRITE)


def wait_write_out(fd: int, start: int, length: int) -> None:
    """Wait until dirty pages of a range are on the device; metadata is not synced.

    Raises:
        OSError: A page could not be written. The kernel tells this once per descriptor: a later
            fsync would not repeat it.
    """
    _sync_file_range(fd, start, length, _SYNC_WAIT_WRITE_WAIT)


def file_system_type(path: os.PathLike[str]) -> int:
    """Return the magic number of the file system behind a path, see statfs(2).

    Raises:
        OSError: It is not there.
    """
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    return int(ctypes.c_long.from_buffer(buffer).value)


def is_cached(fd: int, start: int, length: int) -> bool:
    """Tell whether most of a range is in the page cache, without a read that would put it there.

    Args:
        fd: A regular file, open for reading.
        start: On a page border.
        length: Whole pages.
    """
    found = (ctypes.c_uint64 * 5)()
    if not _libc.syscall(_CACHESTAT, fd, (ctypes.c_uint64 * 2)(start, length), found, 0):
        return 2 * found[0] * PAGE_BYTES > length
    # Before Linux 6.5: a mapping to look through, which is many times as expensive.
    try:
        view = mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError):
        return True
    with view:
        resident = (ctypes.c_ubyte * (length // PAGE_BYTES))()
        if _libc.mincore(_pointer(address(memoryview(view))), _size(length), resident):
            return True
        return 2 * bytes(resident).count(0) < len(resident)


def lower_io_priority() -> bool:
    """Put this thread behind all others at the disk (best effort, level 7); return whether it is.

    Threads that it starts later inherit that. Source: ioprio_set(2); schedulers without priorities,
    such as `none` of NVMe, do not look at it.
    """
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is None:
        return False
    arguments = (_long(number), _long(_IOPRIO_WHO_PROCESS), _long(0), _long(_IOPRIO_LOWEST))
    return bool(_libc.syscall(*arguments) == 0)


def address(buffer: memoryview) -> int:
    """Return where a writable buffer lies in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def memory_at(where: int, length: int) -> memoryview:
    """Return writable memory by its address; the caller keeps it alive."""
    return memoryview((ctypes.c_char * length).from_address(where)).cast("B")


copy_memory = ctypes.memmove
"""`copy_memory(target address, source address, bytes)`; other threads run meanwhile."""


def _sync_file_range(fd: int, start: int, length: int, flags: int) -> None:
    while _libc.sync_file_range(fd, _long(start), _long(length), flags):
        code = ctypes.get_errno()
        if code in (*_UNSUPPORTED, errno.EINVAL, errno.ESPIPE):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
