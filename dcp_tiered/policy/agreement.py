"""Whether all ranks of a save are held to the same residency policy."""

from collections.abc import Mapping

_RANKS_SHOWN = 8


def disagreement(policies: Mapping[int, str | None]) -> str | None:
    """Return which ranks have which policy, None when all have the same.

    Args:
        policies: Hash of the policy by rank; None for a rank that has none.
    """
    by_policy: dict[str | None, list[int]] = {}
    for rank, sha in sorted(policies.items()):
        by_policy.setdefault(sha, []).append(rank)
    if len(by_policy) < 2:  # noqa: PLR2004 - one is agreement
        return None
    return "; ".join(f"{_name(sha)} on {_shown(ranks)}" for sha, ranks in by_policy.items())[:500]


def _name(sha: str | None) -> str:
    return "none" if sha is None else f"policy {sha[:12]}"


def _shown(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    many = "rank" if len(ranks) == 1 else "ranks"
    return f"{many} {', '.join(map(str, ranks[:_RANKS_SHOWN]))}{more}"
