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


def from_json(fields: object) -> ProcessIdentity | None:
    """Return the identity that plain data describes, None when it describes none."""
    if not isinstance(fields, dict):
        return None
    try:
        return ProcessIdentity(**fields)
    except TypeError:
        return None


def _started(pid: int) -> str | None:
    try:
        # The second field may hold spaces and brackets; what follows its last ')' does not.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in ("Z", "X") else started


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
