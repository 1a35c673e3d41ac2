"""The durable tier as a flusher sees it: what is uploaded is paced, counted, and ends in time.

All but what creates objects is handed through.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dcp_tiered import metrics
from dcp_tiered.errors import TieredError
from dcp_tiered.interfaces import DurableTier, ObjectInfo, Source
from dcp_tiered.metrics import Sample
from dcp_tiered.policy import draining, pacing
from dcp_tiered.services.wrapped_tier import WrappedTier

_BURST_BYTES = 1 << 20
STAYS_HINT = "It stays on this node; the next flusher that starts there goes on with it."


class TooLateError(TieredError):
    """The process has to end before an upload would."""


def never() -> float:
    """Return the deadline of a process that has none."""
    return math.inf


class Outgoing(WrappedTier):
    """A durable tier with a rate and a deadline; as safe for threads as that tier is.

    Args:
        tier: Where to.
        bytes_per_second_max: Of all uploads together, None for no bound.
        due: Returns when uploads have to be over, by the monotonic clock; asked again and again.
        sent: Bytes of each checkpoint that are known to be there already.
    """

    def __init__(
        self,
        tier: DurableTier,
        bytes_per_second_max: int | None,
        due: Callable[[], float] = never,
        sent: dict[str, int] | None = None,
    ) -> None:
        super().__init__(tier)
        self.sent = dict(sent or {})
        """Bytes uploaded so far, by checkpoint id."""
        self.due = due
        self._rate = bytes_per_second_max and pacing.Rate(
            bytes_per_second=bytes_per_second_max, burst_bytes=_BURST_BYTES
        )
        self._paid_until = -math.inf
        self._waited_s = 0.0
        self._bytes = 0
        self._objects = 0
        self._measured: float | None = None
        """Bytes per second of the last upload."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Outgoing({self._tier!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock behind."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        super().put(key, data)
        with self._lock:
            self._objects += 1

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object; see `DurableTier.upload`.

        Raises:
            TooLateError: It would end too late, or has been cut off because it did.
        """
        begun = time.monotonic()
        if not draining.ends_in_time(source.length, self.due() - begun, self._measured):
            raise TooLateError(
                f"not begun: {source.length} bytes take longer than there is time",
                self.name,
                key,
                STAYS_HINT,
            )
        body = _Body(source, self._let_pass)
        info = self._tier.upload(key, body)
        self._note(key.partition("/")[0], source.length, body.count, time.monotonic() - begun)
        return info

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this process, those of the tier included."""
        yield metrics.OBJECTS, {}, self._objects
        yield metrics.UPLOAD_BYTES, {}, self._bytes
        yield metrics.PACING, {}, self._waited_s
        if isinstance(self._tier, metrics.Source):
            yield from self._tier.samples()

    def _let_pass(self, count: int) -> None:
        """Return when that many bytes may leave."""
        wait_s = 0.0
        with self._lock:
            now = time.monotonic()
            if self._rate:
                self._paid_until, wait_s = pacing.take(self._paid_until, count, now, self._rate)
                self._waited_s += wait_s
            self._bytes += count
        if now + wait_s >= self.due():
            raise TooLateError("cut off: the time to end has come", self.name, self.url, STAYS_HINT)
        if wait_s:
            time.sleep(wait_s)

    def _note(self, checkpoint_id: str, length: int, passed: int, seconds: float) -> None:
        with self._lock:
            self.sent[checkpoint_id] = self.sent.get(checkpoint_id, 0) + length
            self._objects += passed > 0  # else it was there already
            if passed >= length > 0:  # less has passed of what was there already
                self._measured = length / max(seconds, 1e-6)


class _Body:
    """A source that asks before bytes leave; what is read for a checksum only does not."""

    def __init__(self, source: Source, let_pass: Callable[[int], None]) -> None:
        self.length, self.crc32c = source.length, source.crc32c
        self.count = 0
        self._source, self._let_pass = source, let_pass

    def pread(self, length: int, start: int) -> bytes:
        """Return exactly `length` bytes from `start`, when they may leave."""
        self._let_pass(length)
        self.count += length
        return self._source.pread(length, start)

    def copy_into(self, fd: int, length: int, start: int) -> int:
        """Copy a range within a file system, when its bytes may leave; see `Source.copy_into`."""
        count = self._source.copy_into(fd, length, start)
        self._let_pass(count)
        self.count += count
        return count

    def checksum(self, length: int, start: int) -> int:
        """Return the CRC32C of a range."""
        return self._source.checksum(length, start)
