"""How many requests are on their way at once, as the server counts them."""

import threading
import time
import uuid
from collections.abc import Callable

import pytest

from dcp_tiered.tiers.s3 import S3Tier
from dcp_tiered.tiers.s3_gate import Gate
from examples.seaweed import SeaweedS3
from tests.support.fault_proxy import Fault, FaultProxy, Request, refuse
from tests.support.sources import BytesSource, pattern

_PART = 5 << 20


class Meter:
    """Counts requests that the proxy holds at the same time."""

    def __init__(self, hold: Callable[[], object]) -> None:
        self._hold, self._lock = hold, threading.Lock()
        self._now = 0
        self.peaks: list[int] = []
        """How many there were when each came."""

    def __call__(self, request: Request) -> None:
        with self._lock:
            self._now += 1
            self.peaks.append(self._now)
        self._hold()
        with self._lock:
            self._now -= 1


def tier_behind(proxy: FaultProxy, server: SeaweedS3, **changes: int) -> tuple[S3Tier, str]:
    root = f"gate-{uuid.uuid4().hex[:8]}"
    options = {**server.storage_options(), "endpoint_url": proxy.endpoint}
    bounds = {"request_timeout_s": 20, "request_retry_s": 60, "part_bytes": _PART, **changes}
    return S3Tier(f"{server.buckets[0]}/{root}", options, **bounds), root


def sent(server: SeaweedS3, root: str) -> bytes:
    reply = server.client().get_object(Bucket=server.buckets[0], Key=f"{root}/a/pack")
    data: bytes = reply["Body"].read()
    return data


def test_parts_are_sent_in_parallel(s3_server: SeaweedS3) -> None:
    barrier = threading.Barrier(3)
    meter = Meter(lambda: barrier.wait(30))
    with FaultProxy(s3_server.endpoint) as proxy:
        tier, root = tier_behind(proxy, s3_server)
        proxy.inject("UploadPart", Fault(hook=meter))
        data = pattern(3 * _PART)
        tier.upload("a/pack", BytesSource(data))
        tier.close()
    assert max(meter.peaks) == 3
    assert sent(s3_server, root) == data


@pytest.mark.parametrize(
    "fault", [refuse(503, "SlowDown"), refuse(429, "TooManyRequests"), Fault(status=503)]
)
def test_one_at_a_time_after_a_slow_down(s3_server: SeaweedS3, fault: Fault) -> None:
    """Three are on their way and all are refused: that halves once, and two go on as one."""
    together = threading.Barrier(3)
    refused = Fault(
        hook=lambda _: together.wait(30),
        status=fault.status,
        reply_headers=fault.reply_headers,
        reply_body=fault.reply_body,
    )
    meter = Meter(lambda: time.sleep(0.05))
    with FaultProxy(s3_server.endpoint) as proxy:
        tier, root = tier_behind(proxy, s3_server)
        proxy.inject("UploadPart", refused, times=3)
        proxy.inject("UploadPart", Fault(hook=meter))
        data = pattern(3 * _PART)
        tier.upload("a/pack", BytesSource(data))
        tier.close()
        seen = len(proxy.seen("UploadPart"))
    assert meter.peaks[0] == 1
    assert max(meter.peaks) <= 2, "one more after a success, not all at once again"
    assert seen == 6
    assert sent(s3_server, root) == data


def test_never_more_than_the_bound(s3_server: SeaweedS3) -> None:
    meter = Meter(lambda: time.sleep(0.05))
    with FaultProxy(s3_server.endpoint) as proxy:
        tier, root = tier_behind(proxy, s3_server, connections_max=1)
        proxy.inject("UploadPart", Fault(hook=meter))
        data = pattern(3 * _PART)
        tier.upload("a/pack", BytesSource(data))
        tier.close()
    assert meter.peaks == [1, 1, 1]
    assert sent(s3_server, root) == data


def test_it_grows_back_by_one_in_a_round() -> None:
    gate = Gate(8)
    with gate.slot() as first, gate.slot(), gate.slot(), gate.slot():
        assert gate.slow_down(first)
        assert gate.allowed == 2
        assert not gate.slow_down(first), "one answer of the same round says nothing new"
    seen = []
    for _ in range(40):
        with gate.slot():
            gate.went_well()
        seen.append(gate.allowed)
    assert seen[1] == 3, "a round of two"
    assert seen == sorted(seen)
    assert seen[-1] == 8


def test_one_always_gets_through() -> None:
    gate = Gate(4)
    for _ in range(3):
        with gate.slot() as sent_in:
            assert gate.slow_down(sent_in)
    assert gate.allowed == 1
