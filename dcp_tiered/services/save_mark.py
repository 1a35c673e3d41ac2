"""Whether a save goes on whose ranks are all on this node, and since when.

A file beside the shard files that the coordinator keeps locked until it has published. However its
process ends, the lock ends with it: shard files that are older than the lock, or without one, are
of a save that nobody will publish any more.
"""

import contextlib
import os
import weakref
from pathlib import Path

from dcp_tiered.errors import TieredError
from dcp_tiered.format import layout
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services import file_locks

_FILE_MODE = 0o600


class SaveMark:
    """Says that a save goes on, until it is released or nothing refers to it any more.

    It is for the flusher, which without one only begins later: so nothing here fails a save.

    Args:
        local: The run's directory.
        checkpoint_id: What is saved.
    """

    def __init__(self, local: LocalTier, checkpoint_id: str) -> None:
        self._end: weakref.finalize[..., SaveMark] | None = None
        path = _path(local, checkpoint_id)
        with contextlib.suppress(OSError, TieredError):
            local.make_directory(checkpoint_id)
            # A new file: of the old one a child of a process that died may still hold the lock.
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
            self._end = weakref.finalize(self, _give_back, fd, path, os.getpid())
            self._end.atexit = False
            file_locks.try_lock(fd)

    def release(self) -> None:
        """Say so no longer."""
        if self._end is not None:
            self._end()


def _give_back(fd: int, path: Path, pid: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == pid:  # else this is a child that was forked meanwhile
            if path.stat().st_ino == os.fstat(fd).st_ino:  # else it is of another save by now
                path.unlink()
            file_locks.unlock(fd)
    os.close(fd)


def saving_since(local: LocalTier, checkpoint_id: str) -> int | None:
    """Return since when an id is being saved, nanoseconds by the clock of files; None if it is not.

    Args:
        local: The run's directory.
        checkpoint_id: The id.
    """
    try:
        fd = os.open(_path(local, checkpoint_id), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not file_locks.is_locked(fd):
            return None
        return os.fstat(fd).st_mtime_ns
    except OSError:
        return None
    finally:
        os.close(fd)


def is_saving(local: LocalTier) -> bool:
    """Tell whether a save of any id goes on in a run's directory, as far as marks say."""
    ids = filter(layout.is_checkpoint_id, local.list_directories())
    return any(saving_since(local, checkpoint_id) is not None for checkpoint_id in ids)


def _path(local: LocalTier, checkpoint_id: str) -> Path:
    return local.root / layout.key(checkpoint_id, layout.SAVING_NAME)
