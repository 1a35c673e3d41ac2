"""Nodes are lost, flushers die, a store is out of reach: what is committed, and what status says.

Three or four nodes, each with a local root, a rank and a flusher process of its own.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter, config, stack
from dcp_tiered.format import layout
from dcp_tiered.run_url import parse_url
from dcp_tiered.services import identity, progress
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import Run, end_flushers, flusher_pids
from tests.support import runs, storage_check
from tests.support.fault_proxy import RESET, FaultProxy
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

Arguments = dict[str, Any]
LARGE = 12_000_000


def state_of(rank: int, seed: int, size: int = 3000) -> dict[str, Any]:
    return {f"of-{rank}": torch.arange(size, dtype=torch.int64) * (seed + 3) + rank}


def save(rank: int, nodes: list[Arguments], ids: list[str], size: int) -> None:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with TieredWriter(**nodes[rank]) as writer:
        for seed, checkpoint_id in enumerate(ids):
            mine = size if rank == 0 else 3000
            dcp.save(state_of(rank, seed, mine), checkpoint_id=checkpoint_id, storage_writer=writer)


def load(rank: int, nodes: list[Arguments], ids: list[str]) -> None:
    for seed, checkpoint_id in enumerate(ids):
        target = {f"of-{rank}": torch.zeros(3000, dtype=torch.int64)}
        dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=TieredReader(**nodes[rank]))
        assert torch.equal(target[f"of-{rank}"], state_of(rank, seed)[f"of-{rank}"])


def make(run: Run, count: int, path: Path, **limits: Any) -> list[Arguments]:
    """Return a writer's arguments on each node; the first has the run's own local tier."""
    arguments = runs.with_limits(run.arguments(), **{"idle_exit_s": 60.0, **limits})
    nodes = [arguments]
    for number in range(1, count):
        local = path / f"nvme-{number}"
        local.mkdir()
        nodes.append({**arguments, "local": str(local)})
    return nodes


def tier_of(node: Arguments) -> PosixTier:
    root = Path(node["local"]) / layout.run_directory(parse_url(node["url"]).root)
    return PosixTier(root, root.parent, "local")


def start_flusher(node: Arguments) -> None:
    options = {key: node[key] for key in ("s3",) if key in node}
    settings = config.settings(node["url"], node["local"], options, node["limits"])
    built = stack.build(settings)

    def is_there() -> bool:
        built.keep_flusher()  # not at once: a process that was killed takes time to end
        return bool(flusher_pids(Path(node["local"])))

    await_that("a flusher", is_there)
    built.close()


def line_of(node: Arguments, checkpoint_id: str = "a") -> progress.CheckpointStatus:
    lines = progress.status(Catalog(tier_of(node), None), tier_of(node))
    return next(line for line in lines if line.checkpoint_id == checkpoint_id)


@contextmanager
def without_flushers(nodes: list[Arguments]) -> Iterator[None]:
    with ExitStack() as held:
        for node in nodes:
            root = tier_of(node).root
            root.mkdir(exist_ok=True)
            assert held.enter_context(FlusherLock(root).hold(identity.current()))
        yield


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[None]:
    yield
    for local in tmp_path.glob("nvme-*"):
        end_flushers(local)


def lose_before(run: Run, first: Arguments, eyes: Eyes) -> None:
    """Put the manifest there, and nothing else."""
    root = Path(run.url.removeprefix("tiered::file://"))
    catalog = Catalog(tier_of(first), PosixTier(root, root.parent, "durable"))
    published = catalog.published("a")
    assert published is not None
    catalog.put_manifest(published)


def lose_during(run: Run, first: Arguments, eyes: Eyes) -> None:
    start_flusher(first)
    await_that("the manifest", lambda: [key for key in sorted(eyes.keys()) if "/manifest-" in key])
    end_flushers(run.local)


def lose_after(run: Run, first: Arguments, eyes: Eyes) -> None:
    start_flusher(first)
    await_that("its pack", lambda: [key for key in sorted(eyes.keys()) if key.endswith(".ok")])
    end_flushers(run.local)


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize(
    ("lose", "is_whole"), [(lose_before, False), (lose_during, False), (lose_after, True)]
)
def test_the_coordinators_node_is_lost(
    lose: Any, is_whole: bool, posix_run: Run, tmp_path: Path
) -> None:
    nodes = make(posix_run, 3, tmp_path, commit_takeover_s=1.0, incomplete_after_s=4.0)
    eyes = Eyes(posix_run)
    with without_flushers(nodes):
        run_ranks(3, save, nodes, ["a"], LARGE)
    lose(posix_run, nodes[0], eyes)
    assert eyes.check().commits == {}
    first = storage_check.published(tier_of(nodes[0]).root)["a"]
    for node in nodes[1:]:
        start_flusher(node)
    if is_whole:
        for node in nodes[1:]:
            await_that("the commit", lambda node=node: line_of(node).level == "durable")
        (commit,) = eyes.check().commits["a"]
        assert commit["committed_by"] not in ("", first["node"])
        assert commit["attempt"] == first["attempt"]
    else:
        for node in nodes[1:]:
            line = await_that("an answer", lambda node=node: incomplete(node))
            assert line.level == "local", "its manifest reached the other nodes"
            assert f"node {first['node']} (ranks 0)" in (line.error or "")
        assert eyes.check().commits == {}
    # The node comes back after all: nothing is committed twice, and all of it gets durable.
    start_flusher(nodes[0])
    for node in nodes:
        await_that("durable", lambda node=node: line_of(node).level == "durable")
    assert eyes.check().attempts("a") == [first["attempt"]]


def incomplete(node: Arguments) -> progress.CheckpointStatus | None:
    line = line_of(node)
    return line if line.state == "incomplete" else None


def wait_local(rank: int, nodes: list[Arguments]) -> str:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with TieredWriter(**nodes[rank]) as writer:
        dcp.save(state_of(rank, 0), checkpoint_id="a", storage_writer=writer)
        writer.wait("local", "a", timeout_s=60)
        return next(line.level for line in writer.status())


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_local_does_not_wait_for_the_packs_of_others(posix_run: Run, tmp_path: Path) -> None:
    """The third node's flusher never uploads, so there is no commit that could tell."""
    nodes = make(posix_run, 3, tmp_path)
    with without_flushers(nodes[2:]):
        levels = run_ranks(3, wait_local_but_last, nodes)
    assert levels[:2] == ["local", "local"]
    assert Eyes(posix_run).check().commits == {}


def wait_local_but_last(rank: int, nodes: list[Arguments]) -> str:
    if rank < 2:
        return wait_local(rank, nodes)
    save(rank, nodes, ["a"], 3000)
    return ""


def replace_and_wait(rank: int, nodes: list[Arguments]) -> int:
    """Save an id twice; the second rank has nothing to save the second time."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with TieredWriter(**nodes[rank], overwrite=True) as writer:
        dcp.save(state_of(rank, 0), checkpoint_id="a", storage_writer=writer)
        writer.wait("durable", "a", timeout_s=60)
        time.sleep(1.5)  # further apart than clocks may be
        same = {"all": torch.arange(1000)}
        dcp.async_save(same, checkpoint_id="a", storage_writer=writer).result()
        writer.wait("durable", "a", timeout_s=60)
    root = Path(nodes[rank]["url"].removeprefix("tiered::file://")) / "a"
    return len(list(root.glob("record-*.json")))


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_wait_after_a_replacement_is_not_about_the_old_one(posix_run: Run, tmp_path: Path) -> None:
    nodes = make(posix_run, 2, tmp_path)
    assert run_ranks(2, replace_and_wait, nodes) == [2, 2]
    (_, second) = Eyes(posix_run).check().commits["a"]
    assert len(second["placements"]) == 1, "the other node has no shard file of it"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ended")
def test_flushers_are_killed_and_a_node_is_cut_off(s3_run: Run, tmp_path: Path) -> None:
    rng = random.Random(11)
    ids = [f"step-{number}" for number in range(4)]
    with FaultProxy(s3_run.server.endpoint if s3_run.server else None) as proxy:
        nodes = make(s3_run, 4, tmp_path, commit_takeover_s=1.0, idle_exit_s=60.0)
        nodes[2] = {**nodes[2], "s3": {**nodes[2]["s3"], "endpoint_url": proxy.endpoint}}
        with without_flushers(nodes):
            run_ranks(4, save, nodes, ids, 3000)
        for _ in range(12):
            for node in nodes:
                start_flusher(node)
            if rng.random() < 0.5:
                proxy.inject(None, RESET)
            else:
                proxy.clear()
            time.sleep(rng.uniform(0.1, 0.9))
            for node in rng.sample(nodes, 2):
                end_flushers(Path(node["local"]))
            Eyes(s3_run).check()
        proxy.clear()
        for node in nodes:
            start_flusher(node)
        for node in nodes:
            for name in ids:
                await_that(
                    name, lambda node=node, name=name: line_of(node, name).level == "durable"
                )
        checked = Eyes(s3_run).check()
        assert {name: len(found) for name, found in checked.commits.items()} == dict.fromkeys(
            ids, 1
        )
        assert all(len(found[0]["packs"]) == 4 for found in checked.commits.values())
        run_ranks(4, load, nodes, ids)
