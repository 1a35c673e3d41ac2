"""Which shard files share a pack."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sealed shard file that is not in a pack yet."""

    name: str
    rank: int
    length: int
    """Bytes."""


def is_alone(length: int, pack_bytes_target: int) -> bool:
    """Tell whether a shard file of that many bytes is a pack of its own, whatever else there is."""
    return length >= pack_bytes_target


def group(candidates: Sequence[Candidate], pack_bytes_target: int) -> list[list[Candidate]]:
    """Group shard files of one node and checkpoint into packs.

    One of at least the target size is alone; smaller ones are taken by rank and share packs up to
    the target. A second shard file of a rank belongs to another attempt, so it closes the group.
    The same shard files always give the same groups, so a flusher that starts over finds the packs
    of its predecessor.

    Args:
        candidates: In any order.
        pack_bytes_target: Bytes.

    Returns:
        Groups in the order in which to upload them.
    """
    groups: list[list[Candidate]] = []
    current: list[Candidate] = []
    ranks: set[int] = set()
    total = 0
    for candidate in sorted(candidates, key=lambda one: (one.rank, one.name)):
        if is_alone(candidate.length, pack_bytes_target):
            groups.append([candidate])
            continue
        if current and (total + candidate.length > pack_bytes_target or candidate.rank in ranks):
            groups.append(current)
            current, ranks, total = [], set(), 0
        current.append(candidate)
        ranks.add(candidate.rank)
        total += candidate.length
    return [*groups, current] if current else groups
