"""Nodes with networks of their own, whose wires are cut and whose flushers die, at random."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter
from tests.conftest import QUICK, Run, end_flushers, flusher_pids
from tests.support import netns, workers
from tests.support.storage_check import Eyes

pytestmark = pytest.mark.skipif(not netns.may_make(), reason="making namespaces needs root")
NODES = 3
SAVES = 5
DISTURBANCES = 8
PORT = 29411
LIMITS = replace(
    QUICK,
    request_timeout_s=2.0,
    idle_exit_s=60.0,
    request_retry_s=1.0,
    pending_checkpoints_max=3,
    commit_takeover_s=4.0,
)


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {f"of-{rank}": torch.arange(20_000) * step + rank, "all": torch.full((100,), step)}


def train(rank: int, namespace: Path, master: str, arguments: dict[str, Any]) -> list[str]:
    """Save, and return the states in which this rank sees the checkpoints in the end."""
    netns.enter(namespace)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    where = f"tcp://{master}:{PORT}"
    limit = timedelta(seconds=180)
    dist.init_process_group("gloo", where, rank=rank, world_size=NODES, timeout=limit)
    try:
        with TieredWriter(**arguments) as writer:
            for step in range(1, SAVES + 1):
                state = state_of(rank, step)
                dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
                time.sleep(0.3)
            for step in range(1, SAVES + 1):
                writer.wait("durable", f"step-{step}", timeout_s=60)
            states = [line.state for line in writer.status()]
        target = {name: torch.zeros_like(value) for name, value in state_of(rank, 0).items()}
        reader = TieredReader(**{**arguments, "local": None})
        dcp.load(target, storage_reader=reader)
        reader.close()
        assert reader.checkpoint_id == f"step-{SAVES}"
        for name, value in state_of(rank, SAVES).items():
            assert torch.equal(target[name], value)
        return states
    finally:
        dist.destroy_process_group()


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[list[Path]]:
    made = [tmp_path / f"node-{number}" for number in range(NODES)]
    for root in made:
        root.mkdir()
    yield made
    for root in made:
        end_flushers(root)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nodes_that_are_cut_off_and_killed(s3_run: Run, roots: list[Path]) -> None:
    assert s3_run.server is not None
    seed = int(os.environ.get("TORTURE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"TORTURE_SEED={seed}")
    rng = random.Random(seed)
    with netns.Network(NODES, s3_run.server.endpoint) as network:
        options = {**s3_run.options["s3"], "endpoint_url": network.endpoint}
        started = [
            workers.start(
                train,
                rank,
                network.node(rank),
                network.addresses[0],
                {"url": s3_run.url, "local": str(roots[rank]), "limits": LIMITS, "s3": options},
            )
            for rank in range(NODES)
        ]
        try:
            for _ in range(DISTURBANCES):
                disturb(network, roots, rng)
            for process, _ in started:
                process.join(180)
            results = [answers.get() for _, answers in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    assert [ok for ok, _ in results] == [True] * NODES, results
    assert [set(states) for _, states in results] == [{"durable"}] * NODES
    eyes = Eyes(s3_run)
    commits = eyes.check().commits
    ids = [f"step-{step}" for step in range(1, SAVES + 1)]
    assert {name: len(found) for name, found in commits.items()} == dict.fromkeys(ids, 1)
    assert all(len(commits[name][0]["packs"]) == NODES for name in ids), "one pack of each node"
    assert eyes.open_uploads() == []


def disturb(network: netns.Network, roots: list[Path], rng: random.Random) -> None:
    """Cut one node off for a while, or kill its flusher, and leave some time for work."""
    victim = rng.randrange(NODES)
    if rng.random() < 0.5:
        network.cut(victim)
        time.sleep(rng.uniform(0.2, 3.0))
        network.join(victim)
    else:
        for pid in flusher_pids(roots[victim]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    time.sleep(rng.uniform(0.5, 2.0))
