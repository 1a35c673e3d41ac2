"""Which checkpoint goes first when time is short."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.policy.draining import Pending, ends_in_time, order

_PENDING = st.lists(st.integers(0, 20), max_size=6).map(
    lambda sizes: [
        Pending(checkpoint_id=f"step-{number}", bytes_left=size, sequence=number)
        for number, size in enumerate(sizes)
    ]
)


def completed(pending: list[Pending], ids: tuple[str, ...] | list[str], budget: int) -> int:
    """Return how many checkpoints an order completes with a number of bytes."""
    sizes = {one.checkpoint_id: one.bytes_left for one in pending}
    sums = itertools.accumulate(sizes[one] for one in ids)
    return sum(total <= budget for total in sums)


@given(_PENDING, st.integers(0, 60))
def test_no_order_completes_more_by_any_deadline(pending: list[Pending], budget: int) -> None:
    ids = order(pending)
    assert sorted(ids) == sorted(one.checkpoint_id for one in pending)
    best = max(completed(pending, other, budget) for other in itertools.permutations(ids))
    assert completed(pending, ids, budget) == best


def test_of_equal_ones_the_newest_goes_first() -> None:
    sizes = {"old": 5, "new": 5, "most": 9, "least": 1}
    pending = [
        Pending(checkpoint_id=name, bytes_left=size, sequence=number)
        for number, (name, size) in enumerate(sizes.items())
    ]
    assert order(pending) == ["least", "new", "old", "most"]


def test_what_ends_in_time() -> None:
    assert ends_in_time(100, 10, 10)
    assert not ends_in_time(101, 10, 10)
    assert ends_in_time(10**12, 0.1, None), "worth a try"
    assert not ends_in_time(1, 0, None)
    assert ends_in_time(10**15, float("inf"), 1.0)
