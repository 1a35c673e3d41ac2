"""Which nodes commit a checkpoint, and when, if the coordinator's node does not."""

import hashlib
from collections.abc import Collection


def turn(attempt: str, nodes: Collection[str], coordinator: str, node: str) -> int:
    """Return when a node's turn to commit comes: 0 for the coordinator's node, then 1, 2, ...

    The order is drawn anew for every attempt, and every node draws the same one: so they take turns
    without a word to each other, and a rack that fails with the coordinator is spread over it.

    Args:
        attempt: The attempt to commit.
        nodes: Ids of the nodes that hold shard files of it.
        coordinator: Id of the node that published it.
        node: The node that asks.
    """
    if node == coordinator:
        return 0
    mine = _draw(attempt, node)
    return 1 + sum(_draw(attempt, other) < mine for other in set(nodes) - {coordinator, node})


def begins_after_s(turn: int, takeover_s: float, give_up_s: float) -> float | None:
    """Return after how many seconds without a commit a turn begins, None when it never does.

    Those that would begin after `give_up_s` never do, except the first: so no more nodes look at
    all packs than the times allow, however many nodes there are.
    """
    begin = takeover_s * turn
    return begin if turn <= 1 or begin <= give_up_s else None


def _draw(attempt: str, node: str) -> bytes:
    return hashlib.sha256(f"{attempt}/{node}".encode()).digest()
