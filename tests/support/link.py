"""A network link to a server: as slow as wanted, and cut off and joined again at will."""

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 64 << 10


class Link:
    """Passes bytes on, in both directions.

    Args:
        upstream: Endpoint of the server.
        bytes_per_second: To the server, of all connections together.
        listener: Where clients come in; None: a port of this machine.
    """

    def __init__(
        self, upstream: str, bytes_per_second: float, listener: socket.socket | None = None
    ) -> None:
        address = urlsplit(upstream)
        self._upstream = (str(address.hostname), int(address.port or 80))
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._sockets: set[socket.socket] = set()
        self._is_cut = False
        self._listener = listener or socket.create_server(("127.0.0.1", 0), backlog=128)
        host, port = self._listener.getsockname()
        self.endpoint = f"http://{host}:{port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="link", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection, and each new one, until `join`."""
        with self._lock:
            self._is_cut = True
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Let bytes pass again."""
        self._is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="link", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self._is_cut:
                return
            with socket.create_connection(self._upstream) as server:
                pair = {client, server}
                with self._lock:
                    self._sockets |= pair
                try:
                    back = threading.Thread(
                        target=self._pipe, args=(server, client), name="link", daemon=True
                    )
                    back.start()
                    self._pipe(client, server, self._await_turn)
                    back.join()
                finally:
                    with self._lock:
                        self._sockets -= pair

    @staticmethod
    def _pipe(source: socket.socket, target: socket.socket, await_turn: object = None) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if callable(await_turn):
                    await_turn(len(data))
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _await_turn(self, size: int) -> None:
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + size / self._rate
            pause = self._free_at - time.monotonic()
        time.sleep(max(0.0, pause))
