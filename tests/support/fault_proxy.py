"""A proxy in front of an S3 server that makes the faults which a sound server does not have.

    with FaultProxy(server.endpoint) as proxy:
        proxy.inject("UploadPart", refuse(503, "SlowDown"), times=1)
        proxy.add("drop_reply", "PUT", "record-1")
        tier = S3Tier(..., {"endpoint_url": proxy.endpoint, ...})

The Host header passes through, so signatures stay valid.
"""

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import parse_qs, urlsplit

REQUEST_ID = "REQUEST-4711"


@dataclass(slots=True)
class Request:
    """A request as it came in."""

    operation: str
    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    length: int
    """Of the body, as announced."""
    body: bytes = b""
    """As received, which is less when the connection broke first."""
    status: int | None = None
    """What the server answered, None where it was not asked."""

    @property
    def key(self) -> str:
        """The last component of the object's key."""
        return urlsplit(self.path).path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to do to a request; the parts are done in the order of the fields."""

    hook: Callable[[Request], None] | None = None
    """Called first."""
    stall: bool = False
    """Read nothing and answer nothing, not even `100 Continue`."""
    delay_s: float = 0
    reset_after: int | None = None
    """Read this many bytes of the body, then reset the connection."""
    status: int | None = None
    """Answer with this, `reply_headers` and `reply_body`, and do not tell the server."""
    reply_headers: Mapping[str, str] = field(default_factory=dict)
    """Also replace headers of the server's answer; an empty value removes one."""
    reply_body: bytes = b""
    drop_response: bool = False
    """Let the server act, then reset the connection."""
    flip_byte: bool = False
    """Change one bit in the middle of the answer's body."""
    without: bytes = b""
    """Take what this pattern finds out of the answer's body."""
    truncate: bool = False
    """Break the answer off in the middle of its body."""


def refuse(
    status: int, code: str, *, headers: Mapping[str, str] | None = None, **extra: str
) -> Fault:
    """Return a fault that answers with S3's error document; `extra` adds elements to it."""
    elements = {"Code": code, "Message": "injected", "RequestId": REQUEST_ID, **extra}
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in elements.items())
    return Fault(
        status=status,
        reply_headers={"x-amz-request-id": REQUEST_ID, **(headers or {})},
        reply_body=f"<?xml version='1.0'?><Error>{inner}</Error>".encode(),
    )


RESET = Fault(reset_after=0)
STALL = Fault(stall=True)
LOST_REPLY = Fault(drop_response=True)
TRUNCATED = Fault(truncate=True)


KINDS = {
    "reset": RESET,
    "stall": STALL,
    "drop_reply": LOST_REPLY,
    "truncate": TRUNCATED,
    "status": Fault(status=503),
}


@dataclass(slots=True)
class Rule:
    """Which requests a fault is for, and how many it has met."""

    operation: str | None
    fault: Fault
    left: float
    when: Callable[[Request], bool] | None
    hits: int = 0

    def takes(self, request: Request) -> bool:
        """Tell whether this is one of them, and count it."""
        if self.operation not in (None, request.operation) or self.left <= 0:
            return False
        if self.when is not None and not self.when(request):
            return False
        self.left -= 1
        self.hits += 1
        return True


class FaultProxy:
    """Passes requests to a server, or does to them what was injected.

    Args:
        upstream: Endpoint of the server; None when every request is answered by a rule.
    """

    def __init__(self, upstream: str | None = None) -> None:
        self._upstream = urlsplit(upstream).netloc if upstream else None
        self._rules: list[Rule] = []
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.log: list[Request] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def inject(
        self,
        operation: str | None,
        fault: Fault,
        *,
        times: int | None = None,
        when: Callable[[Request], bool] | None = None,
    ) -> Rule:
        """Do `fault` to the next requests of an operation, or of all; for ever without `times`."""
        left = float("inf") if times is None else times
        rule = Rule(operation, fault, left, when)
        self._rules.append(rule)
        return rule

    def add(
        self, kind: str, method: str, pattern: str, *, times: int = 1, seconds: float = 0
    ) -> Rule:
        """Do something to the next requests of a method, `*` for any, whose target matches.

        Args:
            kind: One of `KINDS`, or `delay`.
            method: Such as `PUT`.
            pattern: Searched for in path and query.
            times: How many requests it is done to.
            seconds: Of delay.
        """
        fault = Fault(delay_s=seconds) if kind == "delay" else KINDS[kind]

        def when(request: Request) -> bool:
            matches = re.search(pattern, request.path) is not None
            return matches and method in ("*", request.method)

        return self.inject(None, fault, times=times, when=when)

    def clear(self) -> None:
        """Be a good proxy again; what is stalled breaks off."""
        with self._lock:
            self._rules.clear()
            released, self._released = self._released, threading.Event()
        released.set()

    def seen(self, operation: str) -> list[Request]:
        """Return the requests of an operation, in the order they came."""
        return [request for request in self.log if request.operation == operation]

    def requests(self, method: str, pattern: str = "") -> list[Request]:
        """Return the requests of a method whose target matches, in the order they came."""
        return [r for r in self.log if r.method == method and re.search(pattern, r.path)]

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            with connection.makefile("rb") as stream:
                while (request := _read_head(stream)) is not None:
                    if not self._handle(connection, stream, request):
                        return
        except OSError:
            return  # the client went away
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _fault(self, request: Request) -> Fault:
        with self._lock:
            self.log.append(request)
            for rule in self._rules:
                if rule.takes(request):
                    return rule.fault
        return Fault()

    def _handle(self, connection: socket.socket, stream: BinaryIO, request: Request) -> bool:
        """Answer one request; return whether the connection can be used again."""
        released = self._released
        fault = self._fault(request)
        if fault.hook is not None:
            fault.hook(request)
        if fault.stall:
            released.wait()
            return _reset(connection)
        self._closing.wait(fault.delay_s)
        if request.headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.reset_after is not None:
            request.body = stream.read(min(fault.reset_after, request.length))
            return _reset(connection)
        request.body = stream.read(request.length)
        if len(request.body) < request.length:
            return False
        if fault.status is not None:
            _reply(connection, request, fault.status, dict(fault.reply_headers), fault.reply_body)
            return True
        status, headers, body = self._forward(request)
        request.status = status
        if fault.drop_response:
            return _reset(connection)
        headers |= fault.reply_headers
        if fault.flip_byte:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if fault.without:
            body = re.sub(fault.without, b"", body)
        if fault.truncate:
            _reply(connection, request, status, headers, body, cut=len(body) // 2)
            return False
        _reply(connection, request, status, headers, body)
        return True

    def _forward(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        assert self._upstream is not None, f"no rule answers {request.operation}"
        upstream = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            upstream.putrequest(
                request.method, request.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers.items():
                if name != "expect":
                    upstream.putheader(name, value)
            upstream.endheaders(request.body)
            reply = upstream.getresponse()
            headers = {name.lower(): value for name, value in reply.getheaders()}
            return reply.status, headers, reply.read()
        finally:
            upstream.close()


def _read_head(stream: BinaryIO) -> Request | None:
    line = stream.readline().decode("latin-1")
    if not line:
        return None
    method, target, _ = line.split(" ", 2)
    headers: dict[str, str] = {}
    while (line := stream.readline().decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    length = int(headers.get("content-length", 0))
    return Request(_operation(method, target), method, target, headers, length)


def _operation(method: str, target: str) -> str:
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    if re.fullmatch(r"/[^/]+/?", url.path) and not query:
        return {"PUT": "CreateBucket", "HEAD": "HeadBucket"}.get(method, f"{method} bucket")
    table = [
        ("PUT", "partNumber", "UploadPart"),
        ("POST", "uploads", "CreateMultipartUpload"),
        ("POST", "uploadId", "CompleteMultipartUpload"),
        ("DELETE", "uploadId", "AbortMultipartUpload"),
        ("GET", "uploads", "ListMultipartUploads"),
        ("GET", "list-type", "ListObjectsV2"),
    ]
    for verb, parameter, name in table:
        if method == verb and parameter in query:
            return name
    return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject"}.get(method, method)


def _reply(
    connection: socket.socket,
    request: Request,
    status: int,
    headers: dict[str, str],
    body: bytes,
    *,
    cut: int | None = None,
) -> None:
    hop = ("connection", "transfer-encoding")
    kept = {name: value for name, value in headers.items() if value and name not in hop}
    if request.method != "HEAD":
        kept["content-length"] = str(len(body))
    lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'x')}"]
    lines += [f"{name}: {value}" for name, value in kept.items()]
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    if request.method != "HEAD":
        connection.sendall(body if cut is None else body[:cut])


def _reset(connection: socket.socket) -> bool:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False
