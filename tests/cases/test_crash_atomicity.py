"""Cases of the group "crash and atomicity": what a kill at an exact point leaves behind."""

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_tiered import IncompleteError, NoCheckpointError, TieredReader, TieredWriter
from tests.conftest import Run, flusher_pids
from tests.support import runs, workers
from tests.support.fault_proxy import FaultProxy
from tests.support.storage_check import Eyes, published
from tests.support.workers import await_that


class DiesWhileWriting(DefaultSavePlanner):
    """Kills its process when the second item is asked for: the shard file is half written."""

    asked = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.asked += 1
        if self.asked > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


class DiesBeforePublish(TieredWriter):
    """Kills its process when all shard files are sealed and nothing is published."""

    def finish(self, metadata: Any, results: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAfterPublish(TieredWriter):
    """Kills its process right after the publish."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(arguments: dict[str, Any], checkpoint_id: str, number: int, point: str) -> None:
    cls = {"sealed": DiesBeforePublish, "published": DiesAfterPublish}.get(point, TieredWriter)
    planner = DiesWhileWriting() if point == "writing" else DefaultSavePlanner()
    dcp.save(
        runs.state_of(number),
        checkpoint_id=checkpoint_id,
        storage_writer=cls(**arguments),
        planner=planner,
    )


def die(run: Run, checkpoint_id: str, number: int, point: str, **more: Any) -> None:
    """Save in a process that is killed at a point."""
    arguments = {**run.arguments(), **more}
    process, _ = workers.start(save_and_die, arguments, checkpoint_id, number, point)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("point", ["writing", "sealed"])
def test_a_save_that_was_cut_off_is_never_loaded_and_its_id_is_free(
    point: str, posix_run: Run
) -> None:
    """O045, O046, O050: the new attempt refers to nothing of the first one."""
    runs.save(posix_run.arguments(), "step-1", 1)
    die(posix_run, "step-2", 2, point)
    left = {path.name for path in runs.shards(posix_run, "step-2")}
    assert len(left) == (point == "sealed")
    assert runs.load(posix_run.arguments()) == 1
    assert isinstance(runs.error_of(runs.load, posix_run.arguments(), "step-2"), Exception)
    runs.save(posix_run.arguments(), "step-2", 22)
    runs.wait(posix_run.arguments(), "step-2")
    assert runs.load(posix_run.arguments()) == runs.load(posix_run.durable_only()) == 22
    (commit,) = Eyes(posix_run).check().commits["step-2"]
    assert not left & {row["shard"] for row in commit["placements"]}


@pytest.mark.parametrize("point", ["writing", "sealed"])
def test_only_incomplete_checkpoints_are_no_fresh_start(point: str, posix_run: Run) -> None:
    """O048: told apart from a run that has none at all."""
    error = runs.error_of(runs.load, posix_run.arguments())
    assert isinstance(error, NoCheckpointError)
    die(posix_run, "step-1", 1, point)
    error = runs.error_of(runs.load, posix_run.arguments())
    if point == "sealed":
        assert isinstance(error, IncompleteError)
        assert "step-1" in error.message
    else:
        assert isinstance(error, NoCheckpointError), "nothing of it is left"
    runs.save(posix_run.arguments(), "step-1", 11)
    assert runs.load(posix_run.arguments()) == 11


def test_a_published_save_of_a_killed_trainer_becomes_durable(posix_run: Run) -> None:
    """O042, O044: by the flusher that it left behind."""
    die(posix_run, "step-1", 1, "published")
    await_that("the commit", lambda: Eyes(posix_run).check().commits)
    assert runs.load(posix_run.arguments()) == runs.load(posix_run.durable_only()) == 1


def test_a_leftover_that_was_published_can_be_saved_over(posix_run: Run) -> None:
    """O049, O050: killed before anything was uploaded, and the resumed run gets there again."""
    with runs.no_flusher(posix_run):
        die(posix_run, "step-1", 1, "published")
        runs.save(posix_run.arguments(), "step-1", 11)
    runs.wait(posix_run.arguments(), "step-1")
    assert Eyes(posix_run).check().attempts("step-1") == [
        published(runs.run_path(posix_run))["step-1"]["attempt"]
    ]
    assert runs.load(posix_run.durable_only(), "step-1") == 11


@pytest.mark.parametrize("point", ["writing", "sealed", "published"])
def test_an_overwrite_that_was_cut_off_leaves_the_old_one(point: str, posix_run: Run) -> None:
    """O054: from the local tier it is the old one too, or the new one once that is published."""
    runs.save(posix_run.arguments(), "best", 1)
    runs.wait(posix_run.arguments(), "best")
    await_that("the flusher ends", lambda: not flusher_pids(posix_run.local))
    with runs.no_flusher(posix_run):
        die(posix_run, "best", 2, point, overwrite=True)
        assert runs.load(posix_run.durable_only(), "best") == 1
        assert runs.load(posix_run.arguments(), "best") == (2 if point == "published" else 1)
    runs.save(posix_run.arguments(), "best", 3, overwrite=True)
    runs.wait({**posix_run.arguments()}, "best")
    assert runs.load(posix_run.durable_only(), "best") == 3
    assert len(Eyes(posix_run).check().attempts("best")) == 2


def end_by(arguments: dict[str, Any], how: str) -> None:
    runs.save(arguments, "a", 1)
    if how == "exit":
        sys.exit(1)
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError(how)


@pytest.mark.parametrize("how", ["exit", "exception", "sigterm"])
def test_a_trainer_that_ends_right_after_a_save_loses_nothing(how: str, posix_run: Run) -> None:
    """O042."""
    process, _ = workers.start(end_by, posix_run.arguments(), how)
    process.join(60)
    assert process.exitcode is not None
    await_that("the commit", lambda: Eyes(posix_run).check().commits)
    assert runs.load(posix_run.durable_only()) == 1


def test_a_killed_upload_is_aborted_and_done_again(s3_run: Run) -> None:
    """O113: kill -9 of the flusher in the middle of a multipart upload, three times."""
    assert s3_run.server is not None
    limits = replace(s3_run.limits, part_bytes=16 << 20, request_timeout_s=30.0)
    values = torch.arange(5_000_000, dtype=torch.int32)
    eyes = Eyes(s3_run)
    with FaultProxy(s3_run.server.endpoint) as proxy:
        arguments = {**runs.behind(s3_run, proxy.endpoint), "limits": limits}
        with TieredWriter(**arguments) as writer:
            for number in range(3):
                fault = proxy.add("stall", "PUT", r"partNumber=2\b")
                if not number:
                    dcp.save({"v": values}, checkpoint_id="a", storage_writer=writer)
                await_that("an upload", lambda f=fault: keep(writer) and f.hits)
                (pid,) = flusher_pids(s3_run.local)
                assert len(eyes.open_uploads()) == 1
                os.kill(pid, signal.SIGKILL)
                await_that("its end", lambda p=pid: p not in flusher_pids(s3_run.local))
                proxy.clear()
            writer.wait("durable", "a", timeout_s=60)
    assert eyes.open_uploads() == []
    assert len(eyes.check().attempts("a")) == 1
    target = {"v": torch.zeros_like(values)}
    dcp.load(target, storage_reader=TieredReader(**s3_run.durable_only()))
    assert torch.equal(target["v"], values)


def keep(writer: TieredWriter) -> bool:
    writer._stack.keep_flusher()
    return True
