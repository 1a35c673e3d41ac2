"""More is saved than the store or the disk takes: it ends within its bound, and nothing is lost."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import BackpressureError, TieredReader, TieredWriter, UnavailableError
from examples.seaweed import SeaweedS3
from tests.conftest import Run, end_flushers, flusher_pids
from tests.support import runs, storage_check, workers
from tests.support.disks import small_disk
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

ONE = 800_000
"""Bytes of one state of `runs.state_of`, a little less than its shard file."""


@pytest.fixture
def small_run(tmp_path: Path) -> Iterator[Run]:
    """Give a run on a local disk that holds a dozen states."""
    (tmp_path / "lustre").mkdir()
    with small_disk(tmp_path, 16) as disk:
        yield Run(f"tiered::file://{tmp_path}/lustre/run", disk.path)
        end_flushers(disk.path)


def lost(run: Run, eyes: Eyes) -> list[str]:
    """Return ids that were published and lie neither on this node nor in the store."""
    gone = [path for path in runs.run_path(run).iterdir() if path.is_dir()]
    return [
        path.name for path in gone if not list(path.glob("*.shard")) and not eyes.commits(path.name)
    ]


@pytest.mark.slow
def test_saves_faster_than_a_store_that_is_down_end_within_the_bound(
    tmp_path: Path, local: Path
) -> None:
    """O107."""
    with SeaweedS3(tmp_path / "weed") as server:
        run = Run("tiered::s3://ckpt/run", local, {"s3": server.storage_options()}, server)
        arguments = runs.with_limits(
            run.arguments(),
            pending_checkpoints_max=3,
            backpressure_wait_s=1.0,
            request_retry_s=0.5,
            local_bytes_max=20 * ONE,
        )
        server.stop()
        for number, name in enumerate("abc"):
            runs.save(arguments, name, number)
        with TieredWriter(**arguments) as writer:
            for name in "de":
                error = runs.error_of(
                    dcp.save, runs.state_of(9), checkpoint_id=name, storage_writer=writer
                )
                assert isinstance(error, BackpressureError)
                assert "3 checkpoints wait" in error.message
            counted = writer.metrics()
            assert counted["dcp_tiered_backpressure_waits_total"] == 2
            assert 1.0 < counted["dcp_tiered_backpressure_seconds_total"] <= 2.001
            states = {line.checkpoint_id: line.state for line in writer.status()}
            assert sorted(states) == ["a", "b", "c"]
            assert "durable" not in states.values()
        assert sorted(storage_check.published(runs.run_path(run))) == ["a", "b", "c"]
        for number, name in enumerate("abc"):
            assert runs.load(arguments, name) == number
        patient = runs.with_limits(arguments, backpressure_wait_s=60.0)
        process, answers = workers.start(runs.save, patient, "d", 3)
        await_that("the look at the room", lambda: flusher_pids(local))
        assert not runs.shards(run, "d"), "it waits before it writes"
        server.start()
        process.join(90)
        assert answers.get() == (True, None)
        for number, name in enumerate("abcd"):
            runs.wait(patient, name)
            assert runs.load(run.durable_only(), name) == number
        assert sorted(Eyes(run).check().commits) == ["a", "b", "c", "d"]
        end_flushers(local)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["posix_run", "s3_run"])
def test_what_is_not_durable_stays_though_flushers_are_killed(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """O107: the bound holds at every look, and so does the rule."""
    run: Run = request.getfixturevalue(kind)
    arguments = runs.with_limits(
        run.arguments(), local_bytes_max=4 * ONE, backpressure_wait_s=60.0, poll_s=0.02
    )
    eyes, stop, seen = Eyes(run), threading.Event(), []

    def kill() -> None:
        for delay in (0.1, 1.5, 0.5, 0.8) * 4:  # not for ever: on a busy machine a start takes long
            while not (pids := flusher_pids(run.local)) and not stop.wait(0.02):
                pass
            if not stop.wait(delay):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with TieredWriter(**arguments) as writer:
            for number in range(8):
                state = runs.state_of(number)
                dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
                files = [path.stat().st_size for path in runs.run_path(run).glob("*/*")]
                seen.append(sum(files))
                assert lost(run, eyes) == []
    finally:
        stop.set()
        killer.join()
    assert max(seen) <= 4 * ONE + 8 * 10_000, "records are small, and stay"
    for number in range(8):
        runs.wait(arguments, f"step-{number}")
        assert runs.load(arguments, f"step-{number}") == number
    assert len(eyes.check().commits) == 8


def test_a_small_disk_takes_a_run_that_is_larger(small_run: Run) -> None:
    """O055, O107: it fills up with durable ones, which go as others come."""
    arguments = runs.with_limits(small_run.arguments(), backpressure_wait_s=60.0)
    eyes = Eyes(small_run)
    free = shutil.disk_usage(small_run.local).free
    for number in range(2 * free // ONE):
        runs.save(arguments, f"step-{number}", number)
        assert lost(small_run, eyes) == []
        assert shutil.disk_usage(small_run.local).free > 0
    last = 2 * free // ONE - 1
    runs.wait(arguments, f"step-{last}")
    assert runs.load(arguments) == last
    assert runs.load(arguments, "step-0") == 0
    assert not runs.shards(small_run, "step-0")
    assert len(eyes.check().commits) == last + 1


def test_a_disk_that_is_full_while_it_is_written_to(small_run: Run) -> None:
    """O055: nobody knew that the save is so large; durable ones go, and it is written again."""
    arguments = small_run.arguments()
    for number, name in enumerate("abcdefgh"):
        runs.save(arguments, name, number)
        runs.wait(arguments, name)
    blob = os.urandom(shutil.disk_usage(small_run.local).free)
    with TieredWriter(**arguments) as writer:
        state: dict[str, Any] = {"o": {"blob": blob}, "w": torch.ones(3 * ONE // 4)}
        dcp.save(state, checkpoint_id="big", storage_writer=writer)
        writer.wait("durable", "big", timeout_s=60)
        assert writer.metrics()["dcp_tiered_evicted_bytes_total"] > 0
    target = {"o": {"blob": b""}, "w": torch.zeros(3 * ONE // 4)}
    dcp.load(target, checkpoint_id="big", storage_reader=TieredReader(**arguments))
    assert target["o"]["blob"] == blob
    assert not runs.shards(small_run, "a")
    for number, name in enumerate("abcdefgh"):
        assert runs.load(arguments, name) == number
    assert len(Eyes(small_run).check().commits) == 9


def test_a_full_disk_without_anything_durable_fails_cleanly(small_run: Run) -> None:
    """O055, O107: what is not durable stays, whatever a save would need."""
    with runs.no_flusher(small_run):
        for number, name in enumerate("ab"):
            runs.save(small_run.arguments(), name, number)
        with TieredWriter(**small_run.arguments()) as writer:
            state = {"w": torch.ones(8 << 20)}
            error = runs.error_of(dcp.save, state, checkpoint_id="big", storage_writer=writer)
        assert isinstance(error, UnavailableError)
        assert error.errno == errno.ENOSPC
        assert not runs.shards(small_run, "big")
        assert [runs.load(small_run.arguments(), name) for name in "ab"] == [0, 1]
    runs.save(small_run.arguments(), "c", 2)
    for name in "abc":
        runs.wait(small_run.arguments(), name)
    assert sorted(Eyes(small_run).check().commits) == ["a", "b", "c"]


def save_many(rank: int, arguments: dict[str, Any], count: int) -> None:
    with TieredWriter(**arguments) as writer:
        for number in range(count):
            state = {f"of-{rank}": torch.full((25_000,), number), "all": torch.arange(30_000)}
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)


@pytest.mark.slow
def test_ranks_that_share_a_small_disk_do_not_fill_it(small_run: Run) -> None:
    """Four ranks see the same room; one of them asks."""
    arguments = runs.with_limits(small_run.arguments(), backpressure_wait_s=60.0)
    run_ranks(4, save_many, arguments, 30)
    eyes = Eyes(small_run)
    await_that("all commits", lambda: len(eyes.check_new().commits) >= 1 and not missing(eyes, 30))
    assert lost(small_run, eyes) == []
    for number in (0, 13, 29):
        target = {f"of-{rank}": torch.zeros(25_000, dtype=torch.int64) for rank in range(4)}
        reader = TieredReader(**arguments)
        dcp.load(target, checkpoint_id=f"step-{number}", storage_reader=reader)
        assert all(int(value.min()) == int(value.max()) == number for value in target.values())


def missing(eyes: Eyes, count: int) -> list[int]:
    return [number for number in range(count) if not eyes.commits(f"step-{number}")]
