"""Locks on files that end with their process and can be looked at without being taken.

These are open file description locks: a child that was forked has them too until it ends.
"""

import errno
import fcntl
import os
import struct

_LOCK = struct.Struct("@hhqqi4x")
_BUSY = (errno.EAGAIN, errno.EACCES)


def try_lock(fd: int) -> bool:
    """Lock a file that is open for writing; return whether nobody else has it locked.

    Raises:
        OSError: It cannot be locked at all.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
    except OSError as exc:
        if exc.errno in _BUSY:
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Give a lock back, also for children that have the descriptor.

    Raises:
        OSError: The file system did not take it.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))


def is_locked(fd: int) -> bool:
    """Tell whether somebody else has a file locked.

    Raises:
        OSError: It cannot be looked at.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _request(kind: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
