"""Ten minutes of a job whose link is too slow, whose store goes away, and whose flushers die.

`SOAK_S` sets the length; the shares of its phases stay.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter
from tests.conftest import QUICK, Run, end_flushers, flusher_pids
from tests.support.link import Link
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes

SOAK_S = float(os.environ.get("SOAK_S", "600"))
FAST, SLOW = 0.5, 0.85
"""Shares of the time in which saves outrun the link, and until which they go on at all."""
DOWN = (0.2, 0.3)
KILL_S = 30.0
SLOW_PAUSE_S = 15.0
SIZE = 1_000_000
LINK_BYTES_PER_S = 3 << 20
LIMITS = replace(
    QUICK,
    pending_checkpoints_max=4,
    local_bytes_max=80 << 20,
    backpressure_wait_s=SOAK_S,
    commit_takeover_s=5.0,
    part_bytes=5 << 20,
)
HEADERS_BYTES_MAX = 1 << 20
"""What header, footer and manifest of a save may take on top of what its plan says."""


def state_of(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {f"of-{rank}": torch.randn(SIZE, 2, generator=generator), "step": torch.tensor(step)}


def train(rank: int, nodes: list[dict[str, Any]], journal: str, begun: float) -> None:
    """Save as fast as the writer lets us, later at leisure; then wait until all is durable."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    step = 0
    with TieredWriter(**nodes[rank]) as writer, Path(f"{journal}-{rank}").open("a") as file:
        while (share := _agreed(time.time() - begun) / SOAK_S) < SLOW:
            step += 1
            dcp.save(state_of(rank, step), checkpoint_id=f"step-{step}", storage_writer=writer)
            print(json.dumps({"saved": step, "rss": _rss(os.getpid())}), file=file, flush=True)
            if share > FAST:
                time.sleep(SLOW_PAUSE_S)
        for number in range(1, step + 1):
            writer.wait("durable", f"step-{number}", timeout_s=SOAK_S)


def _agreed(value: float) -> float:
    given = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(given, 0)
    return float(given)


def load_all(rank: int, arguments: dict[str, Any], steps: int) -> None:
    """Prove every checkpoint from the durable tier alone."""
    for step in range(1, steps + 1):
        target = {name: torch.zeros_like(value) for name, value in state_of(rank, step).items()}
        reader = TieredReader(**arguments)
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=reader)
        reader.close()
        for name, value in state_of(rank, step).items():
            assert torch.equal(target[name], value), (step, name)


def _rss(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


@dataclass
class Soak:
    """What is done to the job from outside, and what is seen of it on the storage."""

    run: Run
    locals: list[Path]
    link: Link
    begun: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Share of the time; most checkpoints that wait on a node; most bytes on a node."""
    flusher_rss: list[tuple[float, int]] = field(default_factory=list)
    kills: int = 0

    def __post_init__(self) -> None:
        self.over = threading.Event()
        self.eyes = Eyes(self.run)
        self._threads = [
            threading.Thread(target=work) for work in (self._sample, self._kill, self._cut)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def share(self) -> float:
        return (time.time() - self.begun) / SOAK_S

    def _sample(self) -> None:
        while not self.over.wait(0.5):
            sealed = [self._sealed(local) for local in self.locals]
            # Asked after the nodes, so that what has become durable meanwhile does not count.
            keys = self.eyes.keys()
            durable = {key.partition("/")[0] for key in keys if "/record-" in key}
            waiting = max(len(ids - durable) for ids in sealed)
            self.samples.append((self.share(), waiting, max(map(self._bytes, self.locals))))
            for local in self.locals:
                for pid in flusher_pids(local):
                    with suppress(OSError, IndexError):
                        self.flusher_rss.append((self.share(), _rss(pid)))

    @staticmethod
    def _sealed(local: Path) -> set[str]:
        return {path.parent.name for path in local.glob("*/step-*/*.shard")}

    @staticmethod
    def _bytes(local: Path) -> int:
        total = 0
        for path in local.glob("*/step-*/*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def _kill(self) -> None:
        while not self.over.wait(KILL_S):
            for pid in flusher_pids(self.locals[self.kills % len(self.locals)]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.kills += 1

    def _cut(self) -> None:
        for moment, work in zip(DOWN, (self.link.cut, self.link.join), strict=True):
            if self.over.wait(max(0.0, (moment - self.share()) * SOAK_S)):
                break
            work()
        self.link.join()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "other-node"
    path.mkdir()
    yield path
    end_flushers(path)


@pytest.mark.torture
@pytest.mark.timeout(3 * SOAK_S + 300)
def test_soak(s3_run: Run, other: Path, tmp_path: Path) -> None:
    assert s3_run.server is not None
    journal = tmp_path / "journal"
    with Link(s3_run.server.endpoint, LINK_BYTES_PER_S) as link:
        options = {**s3_run.options["s3"], "endpoint_url": link.endpoint}
        common = {"url": s3_run.url, "limits": LIMITS, "s3": options}
        nodes = [{**common, "local": str(local)} for local in (s3_run.local, other)]
        begun = time.time()
        with Soak(s3_run, [s3_run.local, other], link, begun) as soak:
            run_ranks(2, train, nodes, str(journal), begun, timeout_s=3 * SOAK_S)
    steps = [_lines(journal, rank) for rank in (0, 1)]
    saved = len(steps[0])
    assert saved == len(steps[1]) > LIMITS.pending_checkpoints_max
    for local in (s3_run.local, other):
        assert _states(local) == {"durable"}
        end_flushers(local)

    # The queue was full, and never more than full.
    assert max(waiting for _, waiting, _ in soak.samples) == LIMITS.pending_checkpoints_max
    assert LIMITS.local_bytes_max is not None
    most = max(held for _, _, held in soak.samples)
    assert most <= LIMITS.local_bytes_max + HEADERS_BYTES_MAX
    assert soak.kills >= 0.6 * SOAK_S / KILL_S

    _check_bucket(soak.eyes, saved)
    run_ranks(2, load_all, s3_run.durable_only(), saved, timeout_s=SOAK_S)

    trained = [[line["rss"] for line in lines] for lines in steps]
    for rss in trained:
        _assert_flat(rss)
    _assert_flat([rss for _, rss in soak.flusher_rss])
    print(
        f"{saved} checkpoints, {soak.kills} kills, {len(soak.samples)} samples,"
        f" most on a node {most >> 20} MiB, trainer {max(map(max, trained)) >> 20} MiB,"
        f" flusher {max(rss for _, rss in soak.flusher_rss) >> 20} MiB"
    )


def _lines(journal: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{journal}-{rank}").read_text().splitlines()]


def _states(local: Path) -> set[str]:
    command = [str(Path(sys.executable).with_name("dcp-tiered")), "status", "--json", str(local)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line["state"] for line in json.loads(done.stdout)["checkpoints"]}


def _check_bucket(eyes: Eyes, saved: int) -> None:
    """Every checkpoint is committed once, and no object is there that no commit names."""
    commits = eyes.check().commits
    assert sorted(commits) == sorted(f"step-{number}" for number in range(1, saved + 1))
    named = set()
    for checkpoint_id, (commit,) in commits.items():
        names = [pack["name"] for pack in commit["packs"]]
        names += ["record-1.json", f"manifest-{commit['attempt']}.json"]
        named |= {f"{checkpoint_id}/{name}" for name in names}
    assert set(eyes.keys()) == named
    assert eyes.open_uploads() == []


def _assert_flat(rss: list[int]) -> None:
    """Compare the middle of the run with its end: the start has caches to fill."""
    third = len(rss) // 3
    middle, end = statistics.median(rss[third : 2 * third]), statistics.median(rss[2 * third :])
    assert end <= 1.1 * middle + (8 << 20), (middle, end)
