"""An HTTP proxy in front of a real store that loses, delays, breaks and counts what passes.

It goes between a client and the server by the client's endpoint alone. The `Host` header is handed
on as it came, since requests are signed for it.
"""

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass
class Seen:
    """A request that came in, and how it was answered."""

    method: str
    path: str
    """With the query."""
    length: int
    status: int | None = None
    """What the server answered, None when the request was not handed on."""
    fault: str | None = None


@dataclass
class Fault:
    """What to do to requests that match."""

    kind: str
    """`reset`, `status`, `delay`, `stall`, `truncate` or `drop_reply`."""
    method: str
    pattern: str
    """Searched for in path and query."""
    times: int = 1
    """How many requests it hits."""
    status: int = 503
    seconds: float = 0.0
    hits: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    """Ends a stall."""

    def takes(self, method: str, path: str) -> bool:
        """Tell whether the fault hits a request."""
        mine = self.method in (method, "*") and re.search(self.pattern, path) is not None
        return mine and self.hits < self.times


class FaultProxy:
    """The proxy; runs inside `with`.

    Args:
        upstream: The endpoint of the real store.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.log: list[Seen] = []
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()

    def add(self, kind: str, method: str, pattern: str, **more: Any) -> Fault:
        """Add a fault; the first one that takes a request gets it."""
        fault = Fault(kind, method, pattern, **more)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Let everything pass from now on."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.released.set()

    def requests(self, method: str, pattern: str = "") -> list[Seen]:
        """Return what came in so far and matches."""
        with self._lock:
            seen = list(self.log)
        return [one for one in seen if one.method == method and re.search(pattern, one.path)]

    def note(self, seen: Seen) -> Fault | None:
        """Log a request and return what is to happen to it."""
        with self._lock:
            self.log.append(seen)
            for fault in self._faults:
                if fault.takes(seen.method, seen.path):
                    fault.hits += 1
                    seen.fault = fault.kind
                    return fault
        return None

    def forward(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, str, list[tuple[str, str]], bytes]:
        """Send a request on and return the whole answer."""
        host, port = self._upstream.hostname, self._upstream.port
        connection = http.client.HTTPConnection(str(host), port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body)
            reply = connection.getresponse()
            data = reply.read()
            return reply.status, reply.reason, reply.getheaders(), data
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: connections that break are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is given
        """Say nothing; the proxy has its own log."""

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._relay
        raise AttributeError(name)

    def _relay(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        seen = Seen(self.command, self.path, length)
        fault = self.proxy.note(seen)
        kind = fault.kind if fault else None
        if fault is not None:
            if kind == "delay":
                time.sleep(fault.seconds)
            if kind == "stall":
                fault.released.wait(60)
            if kind in ("stall", "reset"):
                self._reset()
                return
            if kind == "status":
                self._answer(fault.status, "Service Unavailable", [], b"")
                return
        # Our own server closed the upstream connection: hop-by-hop headers end here.
        drop = ("connection", "expect", "transfer-encoding", "content-length")
        headers = [(k, v) for k, v in self.headers.items() if k.lower() not in drop]
        headers += [("Content-Length", str(length)), ("Connection", "close")]
        try:
            status, reason, answered, data = self.proxy.forward(
                self.command, self.path, headers, body
            )
        except OSError:
            self._reset()
            return
        seen.status = status
        if kind == "drop_reply":
            self._reset()
        elif kind == "truncate":
            self._answer(status, reason, answered, data, send=len(data) // 2)
            self._reset()
        else:
            self._answer(status, reason, answered, data)

    def _answer(
        self,
        status: int,
        reason: str,
        headers: list[tuple[str, str]],
        data: bytes,
        send: int | None = None,
    ) -> None:
        self.send_response_only(status, reason)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value
            elif name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if send is None else data[:send])
            self.wfile.flush()

    def _reset(self) -> None:
        """End the connection with RST, as a machine does that goes down."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
