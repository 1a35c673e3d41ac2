"""Whose turn it is to commit: every node finds the same order, and only a few have a turn."""

from dcp_tiered.policy.takeover import begins_after_s, turn

NODES = [f"{number:012x}" for number in range(1000)]


def test_every_node_has_a_turn_of_its_own() -> None:
    turns = [turn("a" * 16, NODES, NODES[3], node) for node in NODES]
    assert turns[3] == 0
    assert sorted(turns) == list(range(1000))


def test_another_attempt_has_another_order() -> None:
    orders = {
        tuple(sorted(NODES[:20], key=lambda node, a=attempt: turn(a, NODES[:20], NODES[0], node)))
        for attempt in ("a" * 16, "b" * 16, "c" * 16)
    }
    assert len(orders) == 3


def test_the_coordinator_need_not_hold_shard_files() -> None:
    assert sorted(turn("a" * 16, NODES[:3], "f" * 12, node) for node in NODES[:3]) == [1, 2, 3]


def test_turns_begin_one_after_the_other_and_end() -> None:
    begins = [begins_after_s(number, 60.0, 600.0) for number in range(13)]
    assert begins == [60.0 * number for number in range(11)] + [None, None]
    assert begins_after_s(1, 60.0, 5.0) == 60.0, "one always has a turn"
