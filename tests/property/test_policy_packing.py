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


@given(st.lists(st.integers(1, 99), max_size=7))
def test_packs_are_about_as_few_as_can_be(lengths: list[int]) -> None:
    """Against the best of all ways to group them."""
    files = [
        Candidate(name=f"{rank}-x.shard", rank=rank, length=length)
        for rank, length in enumerate(lengths)
    ]
    assert len(group(files, 100)) <= (11 * fewest(lengths, []) + 6) // 9


def fewest(lengths: list[int], packs: list[int]) -> int:
    """Return how many packs of 100 bytes hold what lies in some already, and more files."""
    if not lengths:
        return len(packs)
    first, *rest = lengths
    ways = [fewest(rest, [*packs, first])]
    for at, held in enumerate(packs):
        if held + first <= 100:
            ways.append(fewest(rest, [*packs[:at], held + first, *packs[at + 1 :]]))
    return min(ways)


def test_a_pack_that_is_not_full_takes_what_comes_later() -> None:
    sizes = [30, 80, 30, 80, 30]
    files = [Candidate(name=f"{rank}-x", rank=rank, length=size) for rank, size in enumerate(sizes)]
    ranks = [[one.rank for one in pack] for pack in group(files, 100)]
    assert ranks == [[1], [3], [0, 2, 4]]


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
