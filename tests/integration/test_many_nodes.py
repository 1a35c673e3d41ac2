"""A thousand nodes: what each asks of the store does not grow with how many there are.

All thousand upload. Of those that only wait after that, which do not know of one another, some are
let go on: a decoded record of a thousand packs takes longer than all requests of a test.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_tiered.services import progress
from dcp_tiered.services.catalog import Catalog
from tests.conftest import QUICK, Run
from tests.support.nodes import Node, make_nodes, publish
from tests.support.storage_check import Eyes

LIMITS = replace(QUICK, linger_s=60.0, incomplete_after_s=600.0)
SAMPLE = 10
THOUSAND = pytest.param(1000, marks=pytest.mark.torture)
"""A minute each: with `make torture` only."""


def settle(nodes: list[Node]) -> None:
    """Let flushers work until none of them has anything to stay for."""
    busy = nodes
    while busy:
        busy = [node for node in busy if node.flusher.step()]
        time.sleep(0.02)


def asked(node: Node) -> int:
    return sum(node.durable.requests[name] for name in ("LIST", "GET", "HEAD"))


def started(count: int, path: Path) -> tuple[list[Node], Eyes]:
    """Return nodes that have all sealed a shard file; none is uploaded."""
    durable = path / "lustre" / "run"
    durable.parent.mkdir(parents=True)
    nodes = make_nodes(count, path / "nvme", durable, LIMITS)
    for node in nodes:
        node.seal("a", count, f"{node.rank:016x}")
    return nodes, Eyes(Run(url=f"tiered::file://{durable}", local=nodes[0].local.root))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [20, 100, THOUSAND])
def test_requests_per_node_do_not_grow_with_the_nodes(count: int, tmp_path: Path) -> None:
    nodes, eyes = started(count, tmp_path)
    for node in nodes[1:]:
        node.flusher.step()  # there is no manifest yet
    publish(nodes, "a")
    some = nodes[:: -(-count // SAMPLE)]
    settle(some)
    (commit,) = eyes.check().commits["a"]
    assert commit["committed_by"] == nodes[0].node
    assert len(commit["packs"]) == count
    for node in nodes[1:]:
        requests = node.durable.requests
        assert asked(node) <= 25, requests
        assert requests["LIST"] <= 5, requests
        assert requests["PUT"] == 2, "a pack and its .ok"
    first = nodes[0].durable.requests
    pages = 1 + 2 * count // 1000
    assert first["LIST"] <= 6 * pages, first
    # Each pack is read once, in two requests and one for its .ok, and asked for again in two.
    assert asked(nodes[0]) <= 5 * count + 10 * pages + 20, first
    for node in some:
        (line,) = progress.status(Catalog(node.local, None), node.local)
        assert (line.level, line.state, line.error) == ("durable", "durable", None)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [100, THOUSAND])
def test_a_lost_node_among_many_does_not_make_all_look_at_all(count: int, tmp_path: Path) -> None:
    """The coordinator's node is lost after its manifest, another one before its pack."""
    nodes, eyes = started(count, tmp_path)
    lost = count * 7 // 10
    for node in nodes[1:]:
        if node.rank != lost:
            node.flusher.step()
    published = publish(nodes, "a")
    Catalog(nodes[0].local, nodes[0].durable).put_manifest(published)
    left = [node for node in nodes[1 :: count // 40] if node.rank != lost]
    for node in left:
        # Few of the nodes go on, so there are more turns than usual, for some to be theirs.
        node.limits = replace(LIMITS, commit_takeover_s=0.1, incomplete_after_s=6.0)
        node.restart()
    settle(left)
    assert eyes.check().commits == {}
    readers = [node for node in left if asked(node) > count]
    assert 1 <= len(readers) <= 60, "only those whose turn it was have looked at all packs"
    for node in left:
        most = 4 * count if node in readers else 60
        assert asked(node) <= most, node.durable.requests
        assert node in readers or node.durable.requests["LIST"] <= 12
        (line,) = progress.status(Catalog(node.local, None), node.local)
        assert (line.level, line.state) == ("local", "incomplete")
        assert line.error is not None
        assert (f"node {lost:012x} (ranks {lost})" in line.error) == (node in readers)
