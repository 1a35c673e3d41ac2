"""What to upload, and what not, when the time until a node goes away is short."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A checkpoint that is not durable yet."""

    checkpoint_id: str
    bytes_left: int
    """Of this node, not on the durable tier yet."""
    sequence: int
    """Order of checkpoints: higher is newer."""


def order(pending: Iterable[Pending]) -> list[str]:
    """Return ids in the order that completes the most checkpoints by any deadline.

    The fewest bytes first; of equal ones the newest first, since a resume wants that one.
    """
    ranked = sorted(pending, key=lambda one: (one.bytes_left, -one.sequence, one.checkpoint_id))
    return [one.checkpoint_id for one in ranked]


def ends_in_time(length: int, seconds_left: float, bytes_per_second: float | None) -> bool:
    """Tell whether to start sending an object of `length` bytes, which is worth nothing cut off.

    Where no rate is known, it is worth a try.
    """
    if seconds_left <= 0:
        return False
    return bytes_per_second is None or length <= bytes_per_second * seconds_left
