"""The only place that decides which objects go when a checkpoint is removed.

What was committed before the removal goes, and what belongs to attempts that nobody can commit any
more. All else may belong to a save that goes on, and stays.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.records import Commit, Record, expired_commits, is_fenced, is_withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """Names below one checkpoint id; each stage goes before the next one begins.

    A pack is known by its record or its manifest, and says by itself what is in it: so as long as
    something of an attempt is left, a later look can tell whose it is.
    """

    stages: tuple[tuple[str, ...], ...]
    """Objects that vouch for packs, packs, manifests."""
    stay: tuple[str, ...]
    """What is neither one of these nor a record."""


def plan_removal(
    names: Sequence[str],
    log: Mapping[int, Record],
    heads: Collection[Head],
    packs: Mapping[str, Collection[str]],
) -> Going:
    """Decide what goes of an id that was removed.

    Args:
        names: All objects below the id.
        log: Its records.
        heads: Of the manifests there that no commit names.
        packs: Shard files in the packs there, none where they cannot be read.
    """
    withdrawn = expired_commits(log)
    living = [one for one in log.values() if isinstance(one, Commit) and one not in withdrawn]
    dead = [head for head in heads if _is_dead(head, log)]
    attempts = {commit.attempt for commit in withdrawn} | {head.attempt for head in dead}
    attempts -= {commit.attempt for commit in living}
    shards = {place.shard for commit in withdrawn for place in commit.placements}
    shards |= {shard.name for head in dead for shard in head.shards}
    named = {pack.name for commit in withdrawn for pack in commit.packs}
    # Of a pack that cannot be read only its name says whose it is; one may hold files of others.
    gone = {
        name
        for name, inside in packs.items()
        if shards.issuperset(inside) and (inside or name in named)
    }
    gone |= named - packs.keys()  # gone already, and perhaps not what vouches for them
    gone -= {pack.name for commit in living for pack in commit.packs}
    stages = [
        {layout.ok_name(name) for name in gone},
        gone,
        {layout.manifest_name(attempt) for attempt in attempts},
    ]
    going = set().union(*stages)
    return Going(
        stages=tuple(tuple(name for name in names if name in stage) for stage in stages),
        stay=tuple(
            name for name in names if name not in going and layout.record_number(name) is None
        ),
    )


def _is_dead(head: Head, log: Mapping[int, Record]) -> bool:
    fenced = is_fenced(log.values(), head.attempt)
    return fenced or is_withdrawn(log, head.attempt, head.sequence, head.supersedes)
