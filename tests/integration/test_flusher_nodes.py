"""Several nodes, each with a local tier and a flusher of its own: one commit when all is there."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter
from dcp_tiered.format import layout
from dcp_tiered.run_url import parse_url
from dcp_tiered.services import identity, progress
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import Run, end_flushers
from tests.support import runs, storage_check
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that


def on_its_node(rank: int, nodes: list[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a writer's arguments on the node of a rank, as torchrun would set its environment."""
    ranks = dist.get_world_size() // len(nodes)
    os.environ |= {"LOCAL_RANK": str(rank % ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**arguments, "local": nodes[rank // ranks]}


def state_of(rank: int) -> dict[str, Any]:
    return {f"of-{rank}": torch.full((3000,), float(rank)), "all": torch.arange(50)}


def save_only(rank: int, nodes: list[str], arguments: dict[str, Any], checkpoint_id: str) -> None:
    with TieredWriter(**on_its_node(rank, nodes, arguments)) as writer:
        dcp.save(state_of(rank), checkpoint_id=checkpoint_id, storage_writer=writer)


def wait_then_save(rank: int, nodes: list[str], arguments: dict[str, Any]) -> list[str]:
    """Wait for an old one, then save more, and wait for each on every rank."""
    mine = on_its_node(rank, nodes, arguments)
    with TieredWriter(**mine) as writer:
        writer.wait("durable", "cut", timeout_s=60)
        dcp.save(state_of(rank), checkpoint_id="next", storage_writer=writer)
        writer.wait("durable", "next", timeout_s=60)
        writer.wait("local", "next", timeout_s=60)
        # One rank writes all of it: on the other node there is nothing that would tell.
        same = {"all": torch.arange(1000)}
        dcp.save(same, checkpoint_id="lean", storage_writer=writer)
        writer.wait("durable", "lean", timeout_s=60)
        states = [line.state for line in writer.status()]
    target = {name: torch.zeros_like(value) for name, value in state_of(rank).items()}
    dcp.load(target, checkpoint_id="next", storage_reader=TieredReader(**mine))
    assert all(torch.equal(target[name], value) for name, value in state_of(rank).items())
    return states


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_two_nodes_commit_together(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(kind)
    other = tmp_path / "other-node"
    other.mkdir()
    nodes = [str(run.local), str(other)]
    arguments = runs.with_limits(run.arguments(), incomplete_after_s=2.0)
    name = layout.run_directory(parse_url(run.url).root)
    (other / name).mkdir()
    eyes = Eyes(run)
    try:
        with FlusherLock(other / name).hold(identity.current()) as mine:
            assert mine
            # The other node's flusher is dead for good: its parts stay where they are.
            run_ranks(4, save_only, nodes, arguments, "cut")
            node = PosixTier(runs.run_path(run), run.local, "local")
            line = await_that("the report", lambda: reported(node, "incomplete"))
            missing = storage_check.published(runs.run_path(run))["cut"]["shards"]
            absent = {row[1] for row in missing if row[0].partition("-")[0] in ("2", "3")}
            assert len(absent) == 1
            assert f"node {absent.pop()} (ranks 2, 3)" in line.error
            assert eyes.check().commits == {}
        states = run_ranks(4, wait_then_save, nodes, arguments)
        assert [sorted(set(one)) for one in states] == [["durable"]] * 4
        commits = eyes.check().commits
        assert {name: len(found) for name, found in commits.items()} == {
            "cut": 1,
            "next": 1,
            "lean": 1,
        }
        assert len(commits["next"][0]["packs"]) == 2, "one pack of each node"
        assert (other / name / "next" / "published-1.json").exists()
    finally:
        end_flushers(other)


def reported(local: PosixTier, state: str) -> Any:
    lines = progress.status(Catalog(local, None), local)
    return next((line for line in lines if line.state == state), None)


def save_and_wait(rank: int, arguments: dict[str, Any]) -> None:
    with TieredWriter(**on_its_node(rank, [arguments["local"]], arguments)) as writer:
        dcp.save(state_of(rank), checkpoint_id="a", storage_writer=writer)
        writer.wait("durable", "a", timeout_s=60)


@pytest.mark.slow
def test_eight_ranks_of_a_node_leave_three_objects(s3_run: Run) -> None:
    run_ranks(8, save_and_wait, s3_run.arguments())
    eyes = Eyes(s3_run)
    (commit,) = eyes.check().commits["a"]
    assert len(commit["placements"]) == 8
    assert sorted(eyes.keys()) == [
        f"a/manifest-{commit['attempt']}.json",
        f"a/{commit['packs'][0]['name']}",
        "a/record-1.json",
    ]
