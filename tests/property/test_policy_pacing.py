"""The token bucket, for any sequence of blocks and pauses."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.policy.pacing import Rate, take

_RATES = st.builds(Rate, bytes_per_second=st.integers(1, 10**10), burst_bytes=st.integers(0, 10**7))
_STEPS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**7)), min_size=1, max_size=30)


def passing(rate: Rate, steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return when each block passes: one client that pauses, then sends."""
    now, paid_until, passed = 0.0, -math.inf, []
    for pause, count in steps:
        now += pause
        paid_until, wait_s = take(paid_until, count, now, rate)
        assert wait_s >= 0
        now += wait_s
        passed.append((now, count))
    return passed


@given(_RATES, _STEPS)
def test_no_stretch_of_time_lets_more_pass_than_its_rate(rate: Rate, steps) -> None:
    passed = passing(rate, steps)
    largest = max(count for _, count in passed)
    for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
        total = sum(count for _, count in passed[first : last + 1])
        seconds = passed[last][0] - passed[first][0]
        allowed = rate.bytes_per_second * seconds + rate.burst_bytes + largest
        assert total <= allowed * (1 + 1e-6) + 1


@given(_RATES, _STEPS)
def test_nobody_waits_longer_than_the_bytes_before_take(rate: Rate, steps) -> None:
    passed = passing(rate, steps)
    before = sum(count for _, count in passed[:-1])
    paused = sum(pause for pause, _ in steps)
    assert passed[-1][0] <= paused + before / rate.bytes_per_second * (1 + 1e-6) + 1e-6


@given(_RATES, st.integers(1, 10**7), st.floats(0, 1e6))
def test_the_first_block_passes_at_once(rate: Rate, count: int, now: float) -> None:
    assert take(-math.inf, count, now, rate)[1] == 0
