"""Which process is it: identities that survive in files and cannot be mistaken for a reused pid."""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process on one host since one boot."""

    host: str
    boot: str
    namespace: str
    """Of process ids: a container cannot see the processes of another."""
    pid: int
    started: str
    """Clock ticks since boot: tells a process from a later one with its pid."""

    def is_alive(self) -> bool:
        """Tell whether the process runs; True when that cannot be known from here."""
        here = current()
        if (self.host, self.namespace) != (here.host, here.namespace):
            return True
        return self.boot == here.boot and _started(self.pid) == self.started

    def is_stopped(self) -> bool:
        """Tell whether the process is there and does nothing, as after SIGSTOP."""
        here = current()
        if (self.host, self.namespace, self.boot) != (here.host, here.namespace, here.boot):
            return False
        state, started = _stat(self.pid)
        return started == self.started and state == "T"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def text(self) -> str:
        """Return the identity as one word."""
        return f"{self.host}-{self.boot[:8]}-{self.pid}-{self.started}"


def current() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        pid=pid,
        started=_started(pid) or "",
    )


def is_running(text: str) -> bool:
    """Tell whether the process behind `ProcessIdentity.text` runs on this machine for certain."""
    here = current()
    try:
        host, boot, pid, started = text.rsplit("-", 3)
        return (host, boot) == (here.host, here.boot[:8]) and _started(int(pid)) == started
    except ValueError:
        return False


def from_json(fields: object) -> ProcessIdentity | None:
    """Return the identity that plain data describes, None when it describes none."""
    if not isinstance(fields, dict):
        return None
    pid = fields.get("pid")
    texts = [value for name, value in fields.items() if name != "pid"]
    if not isinstance(pid, int) or pid < 1 or not all(isinstance(text, str) for text in texts):
        return None
    try:
        return ProcessIdentity(**fields)
    except TypeError:
        return None


def _started(pid: int) -> str | None:
    """Return when a process started, None when it does not run."""
    state, started = _stat(pid)
    return None if state in ("", "Z", "X") else started


def _stat(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, empty when there is none."""
    try:
        # The second field may hold spaces and brackets; what follows its last ')' does not.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, ValueError, IndexError):
        return "", ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - not a path, a name such as pid:[4026531836]
    except OSError:
        return ""
