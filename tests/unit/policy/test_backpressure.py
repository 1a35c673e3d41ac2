"""A save is admitted, waits or fails, and what is evicted for it is durable and not the newest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.policy.backpressure import (
    Action,
    Eviction,
    Held,
    Room,
    plan_freeing,
    plan_save,
    plan_trim,
)

GB = 1 << 30
ROOMY = Room(pending_max=3, bytes_max=None, bytes_held=0, bytes_free=100 * GB, bytes_reserve=GB)


def held(sequence: int, what: str = "", gigabytes: int = 10) -> Held:
    """Return a checkpoint: D durable, P pending, K kept by the user, nothing: failed for good.

    With S its flush is given up, with O another node coordinates it, with L it is of an earlier
    launch, with T it was written through.
    """
    return Held(
        checkpoint_id=f"step-{sequence}",
        attempt=f"{sequence:016x}",
        sequence=sequence,
        bytes_held=gigabytes * GB,
        durable="D" in what,
        pending="P" in what,
        keep="K" in what,
        given_up="S" in what,
        coordinated="O" not in what,
        launch="earlier" if "L" in what else "this",
        whole="T" not in what,
    )


def of(*whats: str) -> list[Held]:
    """Return checkpoints, oldest first."""
    return [held(number, what) for number, what in enumerate(whats, 1)]


def steps(evictions: tuple[Eviction, ...]) -> list[int]:
    return [int(one.checkpoint_id.removeprefix("step-")) for one in evictions]


TABLE = [
    # what is there, room, gigabytes needed -> block, fail, steps evicted
    ("first save", of(), ROOMY, 10, "admit", "admit", []),
    ("queue not full", of("D", "P", "P"), ROOMY, 10, "admit", "admit", []),
    ("queue full", of("P", "P", "P"), ROOMY, 10, "wait", "fail", []),
    ("given up, so not in the queue", of("", "", "", "P"), ROOMY, 10, "admit", "admit", []),
    (
        "queue of one",
        of("P"),
        replace(ROOMY, pending_max=1),
        10,
        "wait",
        "fail",
        [],
    ),
    ("disk full of durable ones", of("D", "D", "D"), "full", 10, "admit", "admit", [1]),
    ("needs two of them", of("D", "D", "D"), "full", 15, "admit", "admit", [1, 2]),
    ("oldest durable first", of("P", "D", "D", "D"), "full", 10, "admit", "admit", [2]),
    ("kept by the user", of("DK", "D", "D"), "full", 10, "admit", "admit", [2]),
    ("nothing evicted while it waits", of("D", "P", "D", "P"), "full", 15, "wait", "fail", []),
    ("newest durable stays until a newer one is", of("D", "P"), "full", 10, "wait", "fail", []),
    ("what is given up goes never", of("D", ""), "full", 10, "admit", "admit", []),
    ("only the newest", of("D"), "full", 10, "admit", "admit", []),
    ("larger than all there is", of("D", "D", "P"), "full", 500, "admit", "admit", []),
    ("over the run's bound", of("D", "D"), "bound", 10, "admit", "admit", [1]),
    ("over it for ever", of("D", "D"), "bound", 500, "fail", "fail", []),
    ("over it until flushed", of("P", "P"), "bound", 10, "wait", "fail", []),
    ("under it", of("D", "D"), "bound", 0, "admit", "admit", []),
]


@pytest.mark.parametrize(
    ("there", "room", "needed", "block", "fail", "evicted"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(there, room, needed, block, fail, evicted) -> None:
    total = sum(one.bytes_held for one in there)
    if room == "full":
        room = replace(ROOMY, bytes_free=GB, bytes_held=total, pending_max=9)
    if room == "bound":
        room = replace(ROOMY, bytes_max=total, bytes_held=total, pending_max=9)
    for on_full, action in (("block", block), ("fail", fail)):
        decision = plan_save(there, room, needed * GB, on_full)
        assert (decision.action.value, steps(decision.evict)) == (action, evicted)
        assert decision.reason
        assert all("durable" in one.reason for one in decision.evict)


SUPERSEDE = [
    # what is there, room, gigabytes needed -> action, steps given up, steps evicted
    ("queue not full", of("P", "P"), ROOMY, 10, "admit", [], []),
    ("the oldest", of("P", "P", "P"), ROOMY, 10, "wait", [1], []),
    ("as many as needed", of("P", "P", "P", "P", "P"), ROOMY, 10, "wait", [1, 2, 3], []),
    ("all but the newest", of("P"), replace(ROOMY, pending_max=1), 10, "wait", [], []),
    ("not a kept one", of("PK", "P", "P"), ROOMY, 10, "wait", [2], []),
    ("not one of another node", of("PO", "P", "P"), ROOMY, 10, "wait", [2], []),
    ("nothing qualifies", of("PO", "PK", "P"), ROOMY, 10, "wait", [], []),
    ("one is on its way to other nodes", of("PS", "P", "P"), ROOMY, 10, "wait", [], []),
    ("one is, and one more is needed", of("PS", "P", "P", "P"), ROOMY, 10, "wait", [2], []),
    ("given up for good does not count", of("S", "P", "P"), ROOMY, 10, "admit", [], []),
    ("the newest that is sound stays", of("P", "P", "P", ""), ROOMY, 10, "wait", [1], []),
    (
        "even if a newer one failed",
        of("P", "", ""),
        replace(ROOMY, pending_max=1),
        9,
        "wait",
        [],
        [],
    ),
    ("bytes: the oldest", of("P", "P", "P"), "full", 10, "wait", [1], []),
    ("bytes: two of them", of("P", "P", "P"), "full", 15, "wait", [1, 2], []),
    ("bytes: not where that is not enough", of("P", "P", "P"), "full", 25, "admit", [], []),
    ("bytes: only what a kept one lets", of("PK", "P", "P"), "full", 10, "wait", [2], []),
    ("bytes: superseded ones go", of("S", "S", "P"), "full", 10, "admit", [], [1]),
    ("bytes: durable ones before them", of("S", "D", "D", "P"), "full", 10, "admit", [], [2]),
    ("bytes: then them", of("S", "D", "D", "P"), "full", 15, "admit", [], [2, 1]),
    ("bytes: one goes once other nodes know", of("PS", "P", "P"), "full", 10, "wait", [], []),
    ("bytes: not of an earlier launch", of("PL", "P", "P"), "full", 10, "wait", [2], []),
    ("bytes: unless a newer one is durable", of("PL", "D", "P"), "full", 10, "wait", [1], []),
    ("bytes: a resumed one stays", of("SL", "P"), "full", 10, "wait", [], []),
    ("bytes: the last that loads here stays", of("S", "PT"), "full", 10, "wait", [], []),
    ("bytes: until a newer one is durable", of("S", "DT", "PT"), "full", 10, "admit", [], [1]),
    ("bytes: not before a newer one is sound", of("S", ""), "full", 10, "admit", [], []),
]


@pytest.mark.parametrize(
    ("there", "room", "needed", "action", "given_up", "evicted"),
    [row[1:] for row in SUPERSEDE],
    ids=[row[0] for row in SUPERSEDE],
)
def test_supersede(there, room, needed, action, given_up, evicted) -> None:
    if room == "full":
        room = replace(ROOMY, bytes_free=GB, pending_max=9)
    decision = plan_save(there, room, needed * GB, "supersede")
    assert (decision.action.value, steps(decision.give_up)) == (action, given_up)
    assert steps(decision.evict) == evicted
    assert plan_save(there, room, needed * GB, "block").give_up == ()
    assert plan_save(there, room, needed * GB, "fail").give_up == ()


def test_superseded_ones_stay_until_a_save_or_the_disk_asks() -> None:
    room = replace(ROOMY, bytes_free=GB)
    assert steps(plan_trim(of("S", "D", "D", "P"), room)) == [2]
    assert steps(plan_freeing(of("S", "D", "D", "P"), 15 * GB)) == [2, 1]
    evicted = plan_freeing(of("S", "D", "D", "P"), 15 * GB)
    assert [one.reason.partition(",")[0] for one in evicted] == ["durable", "superseded"]


def test_the_reserve_stays_free() -> None:
    room = replace(ROOMY, bytes_free=11 * GB)
    assert plan_save(of("D", "D"), room, 10 * GB, "block").evict == ()
    one_more = plan_save(of("D", "D"), room, 10 * GB + 1, "block")
    assert steps(one_more.evict) == [1]


def test_a_reason_has_the_numbers() -> None:
    room = replace(ROOMY, bytes_max=20, bytes_held=21, bytes_free=5, bytes_reserve=7)
    reason = plan_save(of("P", "P"), room, 9, "fail").reason
    for number in ("9 needed", "5 free", "7 of them", "21 of at most 20"):
        assert number in reason
    assert "at most 3" in plan_save(of("P", "P", "P"), ROOMY, 9, "fail").reason


def test_trim_makes_room_for_one_like_the_newest() -> None:
    room = replace(ROOMY, bytes_free=9 * GB)
    assert steps(plan_trim(of("D", "D", "D", "P"), room)) == [1]
    assert steps(plan_trim([*of("D", "D", "D"), held(4, "P", 20)], room)) == [1, 2]
    assert plan_trim(of("D", "D", "P"), ROOMY) == ()
    assert plan_trim([], replace(ROOMY, bytes_free=0)) == ()


def test_a_disk_that_says_it_is_full_is_believed() -> None:
    """O055: whatever statvfs says is free."""
    assert steps(plan_freeing(of("D", "P", "D", "D"), 15 * GB)) == [1, 3]
    assert plan_freeing(of("D"), GB) == ()


_held = st.builds(
    Held,
    checkpoint_id=st.text("abc", min_size=1, max_size=3),
    attempt=st.sampled_from(["0" * 16, ""]),
    sequence=st.integers(0, 6),
    bytes_held=st.integers(0, 50),
    durable=st.booleans(),
    pending=st.booleans(),
    keep=st.booleans(),
    launch=st.sampled_from(["this", "earlier"]),
    coordinated=st.booleans(),
    given_up=st.booleans(),
)
_many = st.lists(_held, max_size=8, unique_by=lambda one: one.checkpoint_id)
_room = st.builds(
    Room,
    pending_max=st.integers(1, 9),
    bytes_max=st.none() | st.integers(1, 200),
    bytes_held=st.integers(0, 400),
    bytes_free=st.integers(0, 100),
    bytes_reserve=st.integers(0, 60),
)


@given(_many, _room, st.integers(0, 300), st.sampled_from(["block", "fail", "supersede"]))
def test_what_may_be_durable_and_what_is_newest_is_never_touched(many, room, needed, on_full):
    """O107, I6, I7."""
    decision = plan_save(many, room, needed, on_full)
    by_id = {one.checkpoint_id: one for one in many}
    newest = max((one.sequence for one in many), default=0)
    newest_durable = max((one.sequence for one in many if one.durable), default=0)
    for evictions in (decision.evict, plan_trim(many, room), plan_freeing(many, needed)):
        for eviction in evictions:
            one = by_id[eviction.checkpoint_id]
            assert not one.keep
            assert one.sequence < newest
            if one.durable:
                assert one.sequence < newest_durable
            else:
                assert one.given_up
                assert not one.pending
                assert one.sequence < newest_sound(many)
                sounds = [other for other in many if is_sound(other)]
                launch = max(sounds, key=lambda other: other.sequence).launch
                assert one.sequence < newest_durable or one.launch == launch
        gone = {eviction.checkpoint_id for eviction in evictions}
        last = max((by_id[name].sequence for name in gone if by_id[name].durable), default=0)
        spared = [one for one in many if one.bytes_held and one.checkpoint_id not in gone]
        assert all(one.keep or not one.durable or one.sequence >= last for one in spared)
        if any(not by_id[name].durable for name in gone):
            left = [one for one in spared if one.durable and not one.keep]
            assert all(one.sequence >= min(newest, newest_durable) for one in left)


def is_sound(one: Held) -> bool:
    return bool(one.attempt) and (one.durable or (one.pending and not one.given_up))


def newest_sound(many: list[Held]) -> int:
    return max((one.sequence for one in many if is_sound(one)), default=0)


@given(_many, _room, st.integers(0, 300))
def test_only_what_may_be_given_up_is_and_no_more_than_needed(many, room, needed):
    decision = plan_save(many, room, needed, "supersede")
    for one in decision.give_up:
        assert one.pending
        assert one.coordinated
        assert one.attempt
        assert not one.keep
        assert not one.durable
        assert not one.given_up
        assert one.sequence < newest_sound(many)
    if not decision.give_up:
        block = plan_save(many, room, needed, "block")
        assert (decision.action, decision.evict) == (block.action, block.evict)
        return
    assert decision.action is Action.WAIT
    assert not decision.evict

    def without_waiting(some) -> Action:
        after = [
            replace(one, given_up=True, pending=False) if one.given_up or one in some else one
            for one in many
        ]
        return plan_save(after, room, needed, "block").action

    enough = decision.give_up
    by_bytes = sum(one.pending for one in many) < room.pending_max
    if by_bytes:
        assert without_waiting(enough) is Action.ADMIT
        assert without_waiting(enough[:-1]) is not Action.ADMIT
    else:
        going = sum(one.pending and one.given_up for one in many)
        pending = sum(one.pending for one in many) - going
        assert pending - len(enough) >= room.pending_max - 1


@given(_many, _room, st.integers(0, 300))
def test_block_and_fail_differ_in_nothing_but_waiting(many, room, needed):
    block, fail = (plan_save(many, room, needed, on_full) for on_full in ("block", "fail"))
    assert fail.action is not Action.WAIT
    assert (block.action is Action.ADMIT) == (fail.action is Action.ADMIT)
    assert block.evict == fail.evict
    assert block.action is Action.ADMIT or not block.evict


@given(_many, _room, st.integers(0, 300))
def test_who_waits_waits_for_something(many, room, needed):
    """Once all that waits is durable, a save that waited for room is admitted."""
    if plan_save(many, room, needed, "block").action is Action.WAIT:
        assert any(one.pending for one in many)
        done = [replace(one, durable=one.durable or one.pending, pending=False) for one in many]
        assert plan_save(done, room, needed, "block").action is not Action.WAIT


@given(_many, _room, st.integers(0, 300))
def test_an_admitted_save_fits_or_the_disk_has_to_tell(many, room, needed):
    decision = plan_save(many, room, needed, "block")
    if decision.action is Action.ADMIT:
        freed = sum(one.bytes_held for one in decision.evict)
        fits = room.bytes_free + freed >= needed + room.bytes_reserve
        assert fits or "the disk will tell" in decision.reason
