"""Which objects go with a checkpoint: those that no commit can ever name again."""

from dataclasses import replace

import pytest

from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Head, ShardRef
from dcp_tiered.format.records import Commit, Expired, Fence, PackRef, Placement, is_withdrawn
from dcp_tiered.policy.removal import plan_removal

NODE = "b" * 12


def attempt(letter: str) -> str:
    return letter * 16


def shard(letter: str) -> str:
    return layout.shard_name(0, attempt(letter))


def pack(letter: str) -> str:
    return f"packs/{NODE}-{attempt(letter)}.pack"


def manifest(letter: str) -> str:
    return layout.manifest_name(attempt(letter))


def commit(letter: str, sequence: int) -> Commit:
    return Commit(
        checkpoint_id="x",
        attempt=attempt(letter),
        sequence=sequence,
        step=1,
        manifest_sha256="0" * 64,
        manifest_length=1,
        packs=(PackRef(name=pack(letter), length=1, crc32c=0),),
        placements=(Placement(shard=shard(letter), pack=0, start=0),),
        bytes_stored=1,
        committed_by=NODE,
        committed_at="2026-11-30",
    )


def head(letter: str, sequence: int, *supersedes: str) -> Head:
    return Head(
        checkpoint_id="x",
        attempt=attempt(letter),
        launch="host:1",
        node=NODE,
        sequence=sequence,
        step=1,
        metadata={},
        supersedes=tuple(map(attempt, supersedes)),
        world_size=1,
        written_by={},
        shards=(ShardRef(name=shard(letter), node=NODE, length=1, crc32c=0, footer_start=0),),
    )


EXPIRED = Expired(checkpoint_id="x")


def test_a_living_commit_keeps_what_it_names():
    log = {1: commit("a", 10), 2: EXPIRED, 3: commit("c", 20)}
    mine = [manifest("c"), pack("c"), f"{pack('c')}.ok"]
    theirs = [manifest("a"), pack("a"), f"{pack('a')}.ok"]
    records = [layout.record_name(number) for number in log]
    inside = {pack(letter): (shard(letter),) for letter in "ac"}
    going = plan_removal([*mine, *theirs, *records, "notes"], log, [], inside)
    assert going.stages == ((theirs[2],), (theirs[1],), (theirs[0],))
    assert set(going.stay) == {*mine, "notes"}


def test_what_a_living_commit_names_stays_whoever_named_it_before():
    log = {1: commit("a", 10), 2: EXPIRED, 3: replace(commit("c", 20), packs=commit("a", 1).packs)}
    names = [pack("a"), f"{pack('a')}.ok", manifest("c")]
    going = plan_removal(names, log, [], {pack("a"): (shard("a"),)})
    assert going.stages == ((), (), ())
    assert going.stay == tuple(names)


def test_a_pack_with_a_file_of_another_attempt_stays():
    """That may be about to be committed with it."""
    log = {1: commit("a", 10), 2: EXPIRED}
    names = [pack("a"), f"{pack('a')}.ok", manifest("a")]
    going = plan_removal(names, log, [], {pack("a"): (shard("a"), shard("b"))})
    assert going.stages == ((), (), (manifest("a"),))
    assert going.stay == (pack("a"), f"{pack('a')}.ok")


def test_of_a_withdrawn_commit_what_cannot_be_read_goes_too():
    log = {1: commit("a", 10), 2: EXPIRED}
    names = [pack("a"), f"{pack('a')}.ok"]
    assert plan_removal(names, log, [], {pack("a"): ()}).stay == ()
    assert plan_removal(names[1:], log, [], {}).stay == ()


def test_nothing_goes_before_it_is_withdrawn():
    names = [manifest("a"), pack("a"), f"{pack('a')}.ok"]
    for log in ({1: commit("a", 10)}, {}, {1: EXPIRED, 2: commit("a", 10)}):
        going = plan_removal(names, log, [], {pack("a"): (shard("a"),)})
        assert going.stages == ((), (), ())
        assert going.stay == tuple(names)


@pytest.mark.parametrize(
    ("sequence", "supersedes", "fenced", "goes"),
    [
        (9, (), False, True),  # it lost against what was removed
        (10, (), False, True),
        (11, (), False, False),  # saved later
        (9, ("a",), False, False),  # saved later, by a clock that is behind
        (11, ("a",), True, True),  # given up
    ],
)
def test_of_what_no_commit_names_the_dead_goes(sequence, supersedes, fenced, goes):
    log = {1: commit("a", 10), 2: EXPIRED}
    if fenced:
        log[3] = Fence(checkpoint_id="x", attempts=(attempt("d"),))
    other = head("d", sequence, *supersedes)
    names = [manifest("d"), pack("d"), f"{pack('d')}.ok", pack("e"), pack("f")]
    inside = {
        pack("d"): (shard("d"),),
        pack("e"): (shard("d"), shard("e")),  # with a file that nobody here knows
        pack("f"): (),  # cannot be read
    }
    going = plan_removal(names, log, [other], inside)
    mine = {manifest("d"), pack("d"), f"{pack('d')}.ok"}
    assert {name for stage in going.stages for name in stage} == (mine if goes else set())
    assert {pack("e"), pack("f")} <= set(going.stay)
    assert fenced or goes == is_withdrawn(log, other.attempt, sequence, other.supersedes)
