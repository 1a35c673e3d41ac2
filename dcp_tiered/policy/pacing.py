"""How fast bytes may leave: a token bucket, kept as the one moment at which it is empty again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What may pass."""

    bytes_per_second: float
    burst_bytes: int
    """What may pass at once after a quiet time."""


def take(paid_until: float, count: int, now: float, rate: Rate) -> tuple[float, float]:
    """Take bytes out of the bucket; they may pass when the wait is over.

    In any stretch of time no more passes than its seconds allow, one burst, and one block of the
    largest size that was asked for; and nobody waits who has not taken more than that. Whoever asks
    is served, so a block larger than the burst passes too, and is paid for afterwards.

    Args:
        paid_until: What the last call returned; anything in the past at the first.
        count: Bytes.
        now: By a clock that only goes on, seconds.
        rate: What may pass.

    Returns:
        The moment up to which the rate is used up, and the seconds to wait out first.
    """
    begin = max(paid_until, now - rate.burst_bytes / rate.bytes_per_second)
    return begin + count / rate.bytes_per_second, max(0.0, begin - now)
