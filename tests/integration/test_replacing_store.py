"""A store that ignores "only if it is not there": one node commits, and the record says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.format.records import Commit, decode_record, encode_record
from dcp_tiered.services import flusher, progress
from dcp_tiered.services.catalog import Catalog
from tests.conftest import QUICK, Run
from tests.support.nodes import CountingTier, Node, make_nodes, publish
from tests.support.storage_check import Eyes
from tests.support.tiers import mounted_tier

LIMITS = replace(QUICK, linger_s=60.0, commit_takeover_s=0.05, incomplete_after_s=1.0)


class ReplacingTier(CountingTier):
    """Replaces what is there; somebody else may do so right after it."""

    def __init__(self, root: Path, rival: Callable[[bytes], bytes] | None = None) -> None:
        super().__init__(mounted_tier(root, root.parent))
        self._root, self._rival = root, rival

    def put(self, key: str, data: bytes) -> None:
        path = self._root / key
        path.unlink(missing_ok=True)
        super().put(key, data)
        if self._rival is not None and "/record-" in key:
            path.write_bytes(self._rival(data))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "_SETTLE_S", 0.05)


def started(path: Path, replaces: bool, **how: Any) -> tuple[list[Node], Eyes]:
    """Return two nodes whose packs are on the durable tier; nothing is published."""
    durable = path / "lustre" / "run"
    durable.parent.mkdir(parents=True)
    nodes = make_nodes(2, path / "nvme", durable, LIMITS)
    for node in nodes:
        if replaces:
            node.durable = ReplacingTier(durable, **how)
            node.restart()
        node.seal("a", 2, f"{node.rank:016x}")
    return nodes, Eyes(Run(url=f"tiered::file://{durable}", local=nodes[0].local.root))


def settle(node: Node) -> None:
    while node.flusher.step():
        pass


@pytest.mark.parametrize("replaces", [False, True])
def test_the_record_says_when_a_store_replaces(replaces: bool, tmp_path: Path) -> None:
    nodes, eyes = started(tmp_path, replaces)
    nodes[1].flusher.step()
    publish(nodes, "a")
    settle(nodes[0])
    (commit,) = eyes.check().commits["a"]
    assert commit["committed_by"] == nodes[0].node
    assert commit.get("exclusive") is (False if replaces else None)


@pytest.mark.parametrize("replaces", [False, True])
def test_nobody_takes_a_commit_over_in_a_store_that_replaces(
    replaces: bool, tmp_path: Path
) -> None:
    nodes, eyes = started(tmp_path, replaces)
    for node in nodes:
        node.flusher.step()
    published = publish(nodes, "a")
    Catalog(nodes[0].local, nodes[0].durable).put_manifest(published)
    settle(nodes[1])  # and the coordinator's node is lost
    (line,) = progress.status(Catalog(nodes[1].local, None), nodes[1].local)
    if replaces:
        assert eyes.check().commits == {}
        assert line.error is not None
        assert f"only node {nodes[0].node} may commit" in line.error
    else:
        (commit,) = eyes.check().commits["a"]
        assert commit["committed_by"] == nodes[1].node


def test_who_was_replaced_at_once_does_not_believe_in_its_commit(tmp_path: Path) -> None:
    def rival(data: bytes) -> bytes:
        ours = decode_record(data, "a")
        assert isinstance(ours, Commit)
        return encode_record(replace(ours, attempt="f" * 16), "rival")

    nodes, _ = started(tmp_path, replaces=True, rival=rival)
    nodes[1].flusher.step()
    publish(nodes, "a")
    settle(nodes[0])
    error = nodes[0].flusher.failures()["a"]
    assert f"committed already, by attempt {'f' * 16}" in error.message
    (line,) = progress.status(Catalog(nodes[0].local, None), nodes[0].local)
    assert line.level == "local"
