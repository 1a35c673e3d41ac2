"""One request to an object store: a client per process, one retry layer with one deadline.

For the stores whose clients speak HTTP in threads, as those of Google and Azure do. S3 has its own
in `s3_requests`, which knows what its checksums and its pins need.
"""

import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dcp_tiered.errors import TieredError
from dcp_tiered.tiers.http_errors import RefusedError
from dcp_tiered.tiers.object_client import Client, Place
from dcp_tiered.tiers.s3_errors import OVERLOADED_STATUS
from dcp_tiered.tiers.s3_gate import Gate

_log = logging.getLogger(__name__)
_PAUSE_S_MAX = 8.0
C = TypeVar("C", bound=Client)
T = TypeVar("T")


class StoreRequests(Generic[C]):
    """Sends requests about one bucket.

    Args:
        place: Which bucket, and how to reach it; has to survive pickling.
        request_retry_s: How long one request is tried again before its error is raised.
        connections_max: Requests on their way at once.
    """

    def __init__(self, place: Place[C], request_retry_s: float, connections_max: int) -> None:
        self.place = place
        self._retry_s = request_retry_s
        self._connections_max = connections_max
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections and locks behind: a client does not survive another process."""
        return {**self.__dict__, "_client": None, "_lock": None, "_gate": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def forget(self) -> None:
        """Start anew, as in a forked child: the parent's sockets are not ours, nor is its lock."""
        self._client: C | None = None
        self._lock = threading.Lock()
        self._gate = Gate(self._connections_max)
        _alive.add(self)

    def call(self, doing: str, key: str, send: Callable[[C], T], *, until: float = math.inf) -> T:
        """Send one request until it succeeds, fails for good, or its time is over.

        Args:
            doing: What it is, for messages.
            key: The object's key in the bucket, for messages; empty for the bucket itself.
            send: Sends it once and consumes the reply; called for every try.
            until: When to try no more at the latest, by the monotonic clock.
        """
        deadline = min(time.monotonic() + self._retry_s, until)
        attempt = 0
        while True:
            attempt += 1
            try:
                client = self._connect()
                waited = time.monotonic()
                with self._gate.slot() as sent_in:
                    # A turn at the gate is no silence of the store.
                    deadline = min(deadline + time.monotonic() - waited, until)
                    return self._send(client, send, sent_in)
            except TieredError:
                raise
            except Exception as exc:  # noqa: BLE001 - translated
                said = f"{doing} on try {attempt}"
                error, retryable = self.place.translate(exc, said, f"{self.place.url}/{key}")
                pause = random.uniform(0, min(_PAUSE_S_MAX, 0.2 * 2**attempt))  # noqa: S311 - jitter
                if not retryable or time.monotonic() + pause > deadline:
                    # What the client raised may hold a signed URL; the message has the rest.
                    raise error from None
                _log.info("retrying: %s", error.message)
                time.sleep(pause)

    def close(self) -> None:
        """Give connections back."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _send(self, client: C, send: Callable[[C], T], sent_in: int) -> T:
        """Send one request once, and tell the gate how that went."""
        try:
            result = send(client)
        except Exception as exc:
            refused = self.place.refusal(exc)
            if _is_overloaded(refused) and self._gate.slow_down(sent_in):
                _log.info("store is overloaded, %d requests at once now", self._gate.allowed)
            raise
        self._gate.went_well()
        return result

    def _connect(self) -> C:
        with self._lock:
            if self._client is None:
                self._client = self.place.connect()
            return self._client


def _is_overloaded(refused: RefusedError | None) -> bool:
    return refused is not None and refused.status in OVERLOADED_STATUS


_alive: weakref.WeakSet[StoreRequests[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for requests in list(_alive):
        requests.forget()


os.register_at_fork(after_in_child=_after_fork)
