"""Nodes with a network of their own: namespaces on one bridge, each of which can be cut off.

A cut is a dead wire: packets vanish, nothing is refused, and connections live on if it is short.
The server outside is reached through a relay whose port lies on the bridge. Needs root.
"""

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.link import Link

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.77"
_LINE_BYTES_PER_S = 1e9


def may_make() -> bool:
    """Tell whether this process may make namespaces."""
    made = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False)
    return made.returncode == 0


class Network:
    """A bridge in a namespace of its own, and one namespace for each node.

    Args:
        nodes: How many.
        upstream: Endpoint of the server outside.
    """

    def __init__(self, nodes: int, upstream: str) -> None:
        stem = f"dcpt{os.getpid()}"
        self._hub = f"{stem}-hub"
        self._names = [f"{stem}-{number}" for number in range(nodes)]
        self.addresses = [f"{_SUBNET}.{number + 2}" for number in range(nodes)]
        self._upstream = upstream
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._make(undo)
            with entered(self.path(self._hub)):
                listener = socket.create_server((f"{_SUBNET}.1", 0), backlog=128)
            link = Link(self._upstream, _LINE_BYTES_PER_S, listener)
            self.endpoint = undo.enter_context(link).endpoint
            self._open = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def node(self, number: int) -> Path:
        """Return the namespace of a node, for `enter`."""
        return self.path(self._names[number])

    def cut(self, number: int) -> None:
        """Let everything vanish that a node sends or is sent."""
        _ip("-n", self._hub, "link", "set", f"port{number}", "down")

    def join(self, number: int) -> None:
        """Mend the wire."""
        _ip("-n", self._hub, "link", "set", f"port{number}", "up")

    @staticmethod
    def path(name: str) -> Path:
        """Return where a namespace can be opened."""
        return Path("/run/netns") / name

    def _make(self, undo: ExitStack) -> None:
        for name in (self._hub, *self._names):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "address", "add", f"{_SUBNET}.1/24", "dev", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            peer = ("peer", "name", "eth0", "netns", name)
            _ip("-n", self._hub, "link", "add", port, "type", "veth", *peer)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.addresses[number]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")


def enter(namespace: Path) -> None:
    """Move this thread, and what it starts from now on, into a namespace."""
    with namespace.open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", str(namespace))


@contextmanager
def entered(namespace: Path) -> Iterator[None]:
    """Be in a namespace for a while."""
    home = Path(f"/proc/self/task/{threading.get_native_id()}/ns/net")
    with home.open("rb") as file:
        enter(namespace)
        try:
            yield
        finally:
            enter(Path(f"/proc/self/fd/{file.fileno()}"))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
