"""Whether ranks are held to one policy, and how it is said that they are not."""

import pytest

from dcp_tiered.policy.agreement import disagreement

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({}, None),
        ({0: A}, None),
        ({0: A, 1: A}, None),
        ({0: None, 1: None}, None),
        ({0: A, 1: B}, f"policy {A[:12]} on rank 0; policy {B[:12]} on rank 1"),
        ({2: None, 0: A, 1: A}, f"policy {A[:12]} on ranks 0, 1; none on rank 2"),
    ],
)
def test_one_policy_or_who_has_which(policies, said):
    assert disagreement(policies) == said


def test_what_is_said_of_many_ranks_is_short():
    said = disagreement({rank: A if rank else B for rank in range(10_000)})
    assert said is not None
    assert "and 9991 more" in said
    assert len(said) < 200
