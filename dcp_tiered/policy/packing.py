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
    """Group shard files of one node and checkpoint into packs, as few as their bytes allow.

    One of at least the target size is alone; smaller ones share packs up to the target, the largest
    first, each in the first pack that has room (first-fit decreasing: at most 11/9 of the fewest
    possible and one). Two of one rank belong to different attempts, so they share none. The same
    shard files always give the same groups, so a flusher that starts over finds the packs of its
    predecessor.

    Args:
        candidates: In any order.
        pack_bytes_target: Bytes.

    Returns:
        Groups in the order in which to upload them, each by rank.
    """
    groups: list[list[Candidate]] = []
    for candidate in sorted(candidates, key=lambda one: (-one.length, one.rank, one.name)):
        fitting = (one for one in groups if _has_room(one, candidate, pack_bytes_target))
        chosen = next(fitting, None)
        if chosen is None:
            groups.append([candidate])
        else:
            chosen.append(candidate)
    return [sorted(one, key=lambda member: (member.rank, member.name)) for one in groups]


def _has_room(members: list[Candidate], candidate: Candidate, pack_bytes_target: int) -> bool:
    total = sum(member.length for member in members) + candidate.length
    return total <= pack_bytes_target and all(one.rank != candidate.rank for one in members)
