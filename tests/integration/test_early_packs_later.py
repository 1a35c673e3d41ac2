"""Uploads that began early and outlive their save; and drains beside saves that go on."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_tiered import TieredWriter
from dcp_tiered.format import layout
from dcp_tiered.format.shardfile import Header
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import Run, end_flushers
from tests.integration.test_early_packs import (
    HELD_S,
    LARGE,
    SMALL,
    Held,
    arguments_of,
    commit_of,
    keys,
    named,
    packs_of,
    save,
    start_drain,
    state_of,
    status,
)
from tests.integration.test_early_packs_of_dead_saves import HUGE, SLOW, beside, marks
from tests.property.strategies import Thing, shard_bytes
from tests.support import runs
from tests.support.ranks import share_ranks
from tests.support.storage_check import Eyes, published
from tests.support.workers import await_that

pytestmark = pytest.mark.slow


def one_large_then_small(rank: int, arguments: dict[str, Any], go: str) -> None:
    """Publish a save whose upload has begun and lasts, then save more."""
    with TieredWriter(**arguments) as writer:
        for number in (1, 2, 3):
            is_first = number == 1
            size = HUGE if is_first and rank == 0 else SMALL
            dcp.save(
                state_of(rank, size, number),
                checkpoint_id=f"step-{number}",
                storage_writer=writer,
                planner=Held(Path(go)) if is_first and rank else DefaultSavePlanner(),
            )
        writer.wait("durable", "step-3", timeout_s=60)


@pytest.mark.parametrize("why", ["superseded", "late"])
def test_an_upload_that_began_early_holds_up_others_no_longer_than_another(
    why: str, s3_run: Run, tmp_path: Path
) -> None:
    go, eyes = tmp_path / "go", Eyes(s3_run)
    limits = {"pending_checkpoints_max": 2} if why == "superseded" else {"flush_deadline_s": 1.0}
    arguments = arguments_of(s3_run, **SLOW, **limits)
    if why == "superseded":
        arguments["on_full"] = "supersede"

    def publish() -> None:
        await_that("the upload of rank 0's shard file", eyes.open_uploads, HELD_S - 20)
        go.write_text("go on")

    with beside(publish):
        share_ranks(2, one_large_then_small, arguments, str(go))
    assert packs_of(eyes) == [], "the others did not wait for it"
    if why == "late":
        assert status(s3_run)["step-1"] == "late"
        end_flushers(s3_run.local)
        return
    await_that("the end of the upload", lambda: not eyes.open_uploads())
    assert packs_of(eyes) == []
    assert status(s3_run)["step-1"] == "superseded"


def test_an_upload_goes_on_when_its_save_has_published(s3_run: Run, tmp_path: Path) -> None:
    """Also beside what a dead save left under the id, and a save that other nodes publish."""
    go, eyes = tmp_path / "go", Eyes(s3_run)
    local = PosixTier(runs.run_path(s3_run), s3_run.local, "local")
    for checkpoint_id, local_world_size in (("step-1", 2), ("with-others", 1)):
        header = Header(
            checkpoint_id=checkpoint_id,
            rank=0,
            world_size=2,
            local_world_size=local_world_size,
            node="0" * 12,
            token="0" * 16,
            written_by="test",
        )
        data = shard_bytes(header, [Thing("w", None, (), (), (), b"bytes")]).data
        local.put(f"{checkpoint_id}/{layout.shard_name(0, header.token)}", data)

    def publish() -> None:
        (begun,) = await_that("the upload of rank 0's shard file", eyes.upload_ids)
        go.write_text("go on")
        path = runs.run_path(s3_run)
        await_that("the publish", lambda: published(path))
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            assert eyes.upload_ids() == [begun]
            time.sleep(0.2)

    with beside(publish):
        share_ranks(2, save, arguments_of(s3_run, **SLOW), [HUGE, SMALL], str(go))
    end_flushers(s3_run.local)


def fail_then_save_again(rank: int, arguments: dict[str, Any], go: str) -> None:
    with TieredWriter(**arguments) as writer:
        planner = Held(Path(go)) if rank else DefaultSavePlanner()
        options = {"checkpoint_id": "step-1", "storage_writer": writer}
        runs.error_of(dcp.save, state_of(rank, HUGE), planner=planner, **options)
        dcp.save(state_of(rank, SMALL, 2), **options)
        writer.wait("durable", "step-1", timeout_s=60)


def test_a_save_that_is_made_again_does_not_wait_for_what_died(s3_run: Run, tmp_path: Path) -> None:
    go, eyes = tmp_path / "go", Eyes(s3_run)

    def fail_it() -> None:
        await_that("the upload of rank 0's shard file", eyes.open_uploads, HELD_S - 20)
        go.write_text("fail")

    with beside(fail_it):
        share_ranks(2, fail_then_save_again, arguments_of(s3_run, **SLOW), str(go))
    commit = commit_of(s3_run)
    assert keys(s3_run) == named(commit)


def close_while_saving(rank: int, arguments: dict[str, Any], go: str) -> None:
    writer = TieredWriter(**arguments)
    with ThreadPoolExecutor(1) as pool:
        planner = Held(Path(go)) if rank else DefaultSavePlanner()
        options = {"checkpoint_id": "step-1", "storage_writer": writer, "planner": planner}
        done = pool.submit(dcp.save, state_of(rank, LARGE), **options)
        if rank == 0:
            await_that("the mark", lambda: marks(arguments))
            writer.close()
            assert marks(arguments), "the save goes on"
            Path(go).write_text("go on")
        done.result()
    assert rank or not marks(arguments)


def test_closing_a_writer_ends_no_save_of_another_thread(posix_run: Run, tmp_path: Path) -> None:
    share_ranks(2, close_while_saving, posix_run.arguments(), str(tmp_path / "go"))
    commit_of(posix_run)


def test_a_drain_finds_what_a_flusher_with_another_target_sent(s3_run: Run, tmp_path: Path) -> None:
    go, eyes, said = tmp_path / "go", Eyes(s3_run), []

    def drain() -> None:
        await_that("two packs", lambda: len(packs_of(eyes)) >= 2, HELD_S - 40)
        end_flushers(s3_run.local)
        process = start_drain(s3_run, "40s", pack_bytes_target=1 << 30)
        go.write_text("go on")
        said.append((process.communicate()[0], process.returncode))

    with beside(drain):
        share_ranks(3, save, arguments_of(s3_run, linger_s=10.0), [LARGE] * 3, str(go))
    commit = commit_of(s3_run)
    assert keys(s3_run) == named(commit)
    assert said[0][1] == 0, said


def test_a_drain_waits_for_a_save_although_another_checkpoint_is_hopeless(
    s3_run: Run, tmp_path: Path
) -> None:
    other = tmp_path / "other-node"
    other.mkdir()
    elsewhere = {**s3_run.arguments(), "local": str(other)}
    with runs.no_flusher(s3_run):
        runs.save(s3_run.arguments(), "lost", 1)
        runs.save(elsewhere, "lost", 2, overwrite=True)
        runs.wait(elsewhere, "lost")
    end_flushers(other)
    go, eyes, said = tmp_path / "go", Eyes(s3_run), []

    def drain() -> None:
        await_that("rank 0's pack", lambda: packs_of(eyes), HELD_S - 40)
        process = start_drain(s3_run, "60s")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4)
        go.write_text("go on")
        said.append((process.communicate()[0], process.returncode))

    with beside(drain):
        share_ranks(2, save, arguments_of(s3_run), [LARGE, LARGE], str(go))
    assert len(eyes.commits("step-1")) == 1, said
    assert "lost: stays on this node" in said[0][0]
    assert said[0][1] == 4


def test_a_drain_leaves_runs_in_which_a_save_goes_on_for_the_end(
    s3_run: Run, tmp_path: Path
) -> None:
    go, eyes, said = tmp_path / "go", Eyes(s3_run), []
    live, done = (
        {**arguments_of(s3_run), "url": f"{s3_run.url}/{name}"} for name in ("run-a", "run-b")
    )
    with TieredWriter(**done, flusher="external") as writer:
        dcp.save(state_of(0, LARGE), checkpoint_id="x", storage_writer=writer)

    def drain() -> None:
        await_that("rank 0's pack", lambda: "/packs/" in " ".join(eyes.keys()))
        process = start_drain(s3_run, "7s")
        said.append((process.communicate()[0], process.returncode))
        go.write_text("go on")

    with beside(drain):
        share_ranks(2, save, live, [LARGE, LARGE], str(go))
    ((text, code),) = said
    assert f"{done['url']}: x: durable" in text
    assert "step-1: stays on this node: its save is not over" in text
    assert code == 4
