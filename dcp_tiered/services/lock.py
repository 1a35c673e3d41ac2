"""One flusher per node and run: a lock on a file that says who holds it and who started the holder."""

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcp_tiered.errors import from_os_error
from dcp_tiered.format import layout
from dcp_tiered.services import identity
from dcp_tiered.services.identity import ProcessIdentity

_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The flusher that runs, and the trainer or command that started it."""

    flusher: ProcessIdentity | None
    """None for the moment in which it has the lock and has not said so yet."""
    starter: ProcessIdentity | None

    def is_orphaned(self) -> bool:
        """Tell whether its starter is gone, so that a newcomer's options count more than its own."""
        if self.flusher is None:
            return False
        return self.starter is None or not self.starter.is_alive()


class FlusherLock:
    """The lock file of a run directory."""

    def __init__(self, run_path: Path) -> None:
        self._path = run_path / layout.LOCK_FILE
        self._takeover = run_path / layout.TAKEOVER_FILE

    def holder(self) -> Holder | None:
        """Return who holds the lock, None when nobody does."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise from_os_error(
                exc, "local", str(self._path), "look at the flusher's lock"
            ) from exc
        try:
            if _try_lock(fd):
                return None
            holder = _parse(os.pread(fd, 1 << 16, 0))
        finally:
            os.close(fd)
        if holder.flusher is None or not holder.flusher.is_alive():
            # The lock is held and the file speaks of an earlier holder: the new one is just starting.
            return Holder(flusher=None, starter=None)
        return holder

    @contextmanager
    def hold(self, starter: ProcessIdentity | None) -> Iterator[bool]:
        """Take the lock for the block; the value says whether it was free."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError as exc:
            raise from_os_error(exc, "local", str(self._path), "open the flusher's lock") from exc
        try:
            if not _try_lock(fd):
                yield False
                return
            mine = identity.current()
            text = json.dumps(
                {
                    "pid": mine.pid,
                    "flusher": mine.to_json(),
                    "starter": starter.to_json() if starter else None,
                }
            )
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
            with contextlib.suppress(FileNotFoundError):
                self._takeover.unlink()
            yield True
        finally:
            os.close(fd)

    def ask_to_hand_over(self) -> None:
        """Ask the holder to end after the request it is in."""
        self._takeover.touch(mode=_FILE_MODE)

    def asked_to_hand_over(self) -> bool:
        """Tell the holder whether a newcomer waits."""
        return self._takeover.exists()

    def kill_holder(self) -> None:
        """End a holder that does not hand over: it may be killed at any instant (I11)."""
        holder = self.holder()
        if holder is None or holder.flusher is None:
            return
        flusher = holder.flusher
        here = identity.current()
        if (flusher.host, flusher.namespace) == (here.host, here.namespace) and flusher.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(flusher.pid, signal.SIGKILL)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parse(data: bytes) -> Holder:
    try:
        fields = json.loads(data)
    except ValueError:
        fields = {}
    return Holder(
        flusher=identity.from_json(fields.get("flusher")),
        starter=identity.from_json(fields.get("starter")),
    )
