"""One flusher per node and run: a lock on a file that says who holds it and who started the holder.

The lock ends with its process however that ends, and it is looked at without being taken: a look
that took it for a moment would turn away the one flusher that is just starting, and nobody would
flush.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcp_tiered.errors import from_os_error
from dcp_tiered.format import layout
from dcp_tiered.services import file_locks, identity
from dcp_tiered.services.identity import ProcessIdentity

_FILE_MODE = 0o600
_TEXT_BYTES = 2048
"""The holder's text is padded to this and goes over the last one: a full disk has room for that."""
MISSING = "no flusher runs on this node"
MISSING_HINT = (
    "Nothing is lost: 'dcp-tiered flush LOCAL' brings what is here to the durable tier. With"
    " flusher='external' 'dcp-tiered flush LOCAL --follow' has to run beside the job."
)
"""What whoever waits for a flusher is told where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The flusher that runs, and the trainer or command that started it."""

    flusher: ProcessIdentity | None
    """None for the moment in which it has the lock and has not said so yet."""
    starter: ProcessIdentity | None

    def is_orphaned(self) -> bool:
        """Tell whether a newcomer should replace it.

        Its starter is gone, so that a newcomer's options count more than its own, or it was stopped
        and flushes nothing.
        """
        if self.flusher is None:
            return False
        gone = self.starter is None or not self.starter.is_alive()
        return gone or self.flusher.is_stopped()


class FlusherLock:
    """The lock file of a run directory."""

    def __init__(self, run_path: Path) -> None:
        self._path = run_path / layout.LOCK_FILE
        self._takeover = run_path / layout.TAKEOVER_FILE
        self._fd: int | None = None
        """While this object holds the lock."""

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
            if not file_locks.is_locked(fd):
                return None
            holder = _parse(os.pread(fd, _TEXT_BYTES, 0))
        except OSError as exc:
            raise from_os_error(
                exc, "local", str(self._path), "look at the flusher's lock"
            ) from exc
        finally:
            os.close(fd)
        if holder.flusher is None or not holder.flusher.is_alive():
            # The lock is held and the file speaks of an earlier holder: the new one is starting.
            return Holder(flusher=None, starter=None)
        return holder

    def was_killed(self) -> bool:
        """Tell whether the last holder is gone and did not end by itself."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return (
                not file_locks.is_locked(fd)
                and _parse(os.pread(fd, _TEXT_BYTES, 0)).flusher is not None
            )
        except OSError:
            return False
        finally:
            os.close(fd)

    @contextmanager
    def hold(self, starter: ProcessIdentity | None) -> Iterator[bool]:
        """Take the lock for the block; the value says whether it was free."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError as exc:
            raise from_os_error(exc, "local", str(self._path), "open the flusher's lock") from exc
        try:
            if not file_locks.try_lock(fd):
                yield False
                return
            self._fd = fd
            _introduce(fd, starter)
            with contextlib.suppress(OSError):
                self._takeover.unlink()
            yield True
            with contextlib.suppress(OSError):
                # Nobody has to start one in place of this one. The file keeps its length: once its
                # room was given back, the next holder could not say who it is on a full disk.
                os.pwrite(fd, b" " * _TEXT_BYTES, 0)
        finally:
            self._fd = None
            os.close(fd)

    def ask_to_hand_over(self) -> None:
        """Ask the holder, and nobody after it, to end after the request it is in."""
        holder = self.holder()
        if holder is None or holder.flusher is None:
            return
        temporary = self._takeover.with_name(f"{self._takeover.name}.{os.getpid()}")
        try:
            temporary.write_text(holder.flusher.text(), encoding="utf-8")
            temporary.replace(self._takeover)
        except OSError as exc:
            with contextlib.suppress(OSError):
                temporary.unlink()
            path = str(self._takeover)
            raise from_os_error(exc, "local", path, "ask the flusher to hand over") from exc

    def asked_to_hand_over(self) -> bool:
        """Tell the holder whether to end: a newcomer waits, or the lock file is not its own now."""
        if self._fd is None:
            return False
        try:
            if self._path.stat().st_ino != os.fstat(self._fd).st_ino:
                return True
            asked = self._takeover.read_text(encoding="utf-8")
        except FileNotFoundError:
            # Without a lock file the run's directory was removed; another one has its own flusher.
            return not self._path.exists()
        except (OSError, ValueError):
            return False
        return asked == identity.current().text()

    def kill_holder(self) -> None:
        """End a holder that does not hand over: it may be killed at any instant (I11)."""
        holder = self.holder()
        if holder is None or holder.flusher is None:
            return
        flusher = holder.flusher
        here = identity.current()
        if (flusher.host, flusher.namespace) != (here.host, here.namespace):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(flusher.pid)
            try:
                # Looked at once more behind the descriptor: this cannot hit a reused pid.
                if flusher.is_alive():
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def _introduce(fd: int, starter: ProcessIdentity | None) -> None:
    """Write into the lock file who holds it; a flusher works on even where that fails."""
    mine = identity.current()
    text = json.dumps(
        {
            "pid": mine.pid,
            "flusher": mine.to_json(),
            "starter": starter.to_json() if starter else None,
        }
    )
    with contextlib.suppress(OSError):
        os.pwrite(fd, text.encode().ljust(_TEXT_BYTES), 0)
        os.ftruncate(fd, _TEXT_BYTES)


def _parse(data: bytes) -> Holder:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        fields = {}
    return Holder(
        flusher=identity.from_json(fields.get("flusher")),
        starter=identity.from_json(fields.get("starter")),
    )
