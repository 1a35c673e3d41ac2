"""Which shard files share a pack, for any set of them."""

from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.policy.packing import Candidate, group

_CANDIDATES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120)), max_size=15).map(
    lambda rows: [
        Candidate(name=f"{rank}-{number:016x}.shard", rank=rank, length=length)
        for number, (rank, length) in enumerate(rows)
    ]
)
_TARGETS = st.integers(1, 150)


@given(_CANDIDATES, _TARGETS)
def test_every_shard_file_is_in_one_pack(candidates: list[Candidate], target: int) -> None:
    names = [one.name for pack in group(candidates, target) for one in pack]
    assert sorted(names) == sorted(one.name for one in candidates)


@given(_CANDIDATES, _TARGETS)
def test_packs_keep_to_the_target_and_large_files_are_alone(
    candidates: list[Candidate], target: int
) -> None:
    for pack in group(candidates, target):
        assert pack
        if any(one.length >= target for one in pack):
            assert len(pack) == 1
        else:
            assert sum(one.length for one in pack) <= target


@given(_CANDIDATES, _TARGETS)
def test_a_pack_holds_one_shard_file_per_rank(candidates: list[Candidate], target: int) -> None:
    for pack in group(candidates, target):
        assert len({one.rank for one in pack}) == len(pack)


@given(_CANDIDATES, _TARGETS, st.randoms(use_true_random=False))
def test_order_of_discovery_makes_no_difference(
    candidates: list[Candidate], target: int, chance
) -> None:
    other = list(candidates)
    chance.shuffle(other)
    assert group(other, target) == group(candidates, target)


def test_small_files_of_different_ranks_share_a_pack() -> None:
    small = [Candidate(name=f"{rank}-x", rank=rank, length=10) for rank in range(4)]
    assert group(small, 100) == [small]
