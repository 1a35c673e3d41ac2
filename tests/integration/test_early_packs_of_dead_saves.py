"""Uploads that begin before their save is over, and what becomes of them when it never is."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_tiered import TieredWriter
from dcp_tiered.format import layout
from dcp_tiered.format.shardfile import Header
from tests.conftest import QUICK, Run, end_flushers, flusher_pids
from tests.format_compat import own_decoder
from tests.integration.test_cli import credentials
from tests.integration.test_early_packs import (
    HELD_S,
    LARGE,
    MIB,
    SMALL,
    Held,
    arguments_of,
    commit_of,
    keys,
    named,
    packs_of,
    save,
    state_of,
    status,
)
from tests.property.strategies import Thing, shard_bytes
from tests.support import runs
from tests.support.nodes import CountingTier, make_nodes
from tests.support.ranks import run_ranks, share_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

SLOW = {"bytes_per_second_max": MIB, "part_bytes": 16 * MIB}
HUGE = 20 * MIB
"""Takes 20 s at that rate, and more than one part."""


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do something while ranks work; what it raises counts."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
        done.result()


def fail_then_save(rank: int, arguments: dict[str, Any], size: int, go: str) -> None:
    """Let a save fail on the last rank, then save another one with the same writer."""
    with TieredWriter(**arguments) as writer:
        planner = Held(Path(go)) if rank == 1 else DefaultSavePlanner()
        error = runs.error_of(
            dcp.save,
            state_of(rank, size),
            checkpoint_id="step-1",
            storage_writer=writer,
            planner=planner,
        )
        assert "injected" in error.message
        dcp.save(state_of(rank, SMALL, 2), checkpoint_id="step-2", storage_writer=writer)
        writer.wait("durable", "step-2", timeout_s=60)


def test_a_save_that_failed_holds_up_no_other_one(s3_run: Run, tmp_path: Path) -> None:
    """Its upload is cut off: twenty seconds for what nobody will publish."""
    go, eyes = tmp_path / "go", Eyes(s3_run)

    def fail_it() -> None:
        await_that("the upload of rank 0's shard file", eyes.open_uploads, HELD_S - 20)
        go.write_text("fail")

    with beside(fail_it):
        share_ranks(2, fail_then_save, arguments_of(s3_run, **SLOW), HUGE, str(go))
    commit = commit_of(s3_run, "step-2")
    assert keys(s3_run) == named(commit, "step-2")
    await_that("the end of the upload", lambda: not eyes.open_uploads())
    assert packs_of(eyes) == []


def test_what_a_dead_flusher_had_begun_for_a_dead_save_is_aborted(
    s3_run: Run, tmp_path: Path
) -> None:
    go, eyes, left = tmp_path / "go", Eyes(s3_run), []

    def kill() -> None:
        await_that("the upload of rank 0's shard file", eyes.open_uploads, HELD_S - 20)
        end_flushers(s3_run.local)
        left.extend(eyes.open_uploads())
        go.write_text("die")

    with beside(kill), pytest.raises(AssertionError, match="rank 1 gave no answer"):
        run_ranks(2, save, arguments_of(s3_run, **SLOW), [HUGE, LARGE], str(go), timeout_s=60)
    assert len(left) == 1
    end_flushers(s3_run.local)
    code, text = flush(s3_run)
    assert (code, eyes.open_uploads(), keys(s3_run)) == (0, [], set()), text
    assert status(s3_run) == {"step-1": "saving"}


def flush(run: Run) -> tuple[int, str]:
    assert run.server is not None
    command = [str(Path(sys.executable).with_name("dcp-tiered")), "flush", str(run.local)]
    done = subprocess.run(
        command,
        env={**os.environ, **credentials(run.server), "FSSPEC_TIERED_LIMITS": '{"linger_s": 0.5}'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_flush_does_not_wait_for_the_end_of_a_save(s3_run: Run, tmp_path: Path) -> None:
    """Whether a flusher runs or not: it is about what is published."""
    go, eyes, said = tmp_path / "go", Eyes(s3_run), []

    def ask() -> None:
        await_that("rank 0's pack", lambda: packs_of(eyes), HELD_S - 40)
        said.append(flush(s3_run))
        end_flushers(s3_run.local)
        said.append(flush(s3_run))
        go.write_text("go on")

    with beside(ask):
        share_ranks(2, save, arguments_of(s3_run), [LARGE, LARGE], str(go))
    assert [code for code, _ in said] == [0, 0]
    commit = commit_of(s3_run)
    assert keys(s3_run) == named(commit)


def test_a_flusher_ends_although_a_save_goes_on(s3_run: Run, tmp_path: Path) -> None:
    """What is sealed after that starts another one."""
    go, eyes = tmp_path / "go", Eyes(s3_run)
    arguments = arguments_of(s3_run, linger_s=0.2, idle_exit_s=0.5)

    def look() -> None:
        await_that("rank 0's pack", lambda: packs_of(eyes), HELD_S - 40)
        log = runs.run_path(s3_run) / "flusher.log"
        await_that("its end", lambda: "ending" in log.read_text(), 20)
        await_that("its end", lambda: not flusher_pids(s3_run.local), 20)
        go.write_text("go on")

    with beside(look):
        share_ranks(2, save, arguments, [LARGE, LARGE], str(go))
    commit = commit_of(s3_run)
    assert keys(s3_run) == named(commit)


def marks(arguments: dict[str, Any]) -> list[Path]:
    return list(Path(arguments["local"]).glob(f"*/*/{layout.SAVING_NAME}"))


def fail_on_the_coordinator(rank: int, arguments: dict[str, Any], go: str) -> None:
    with TieredWriter(**arguments) as writer:
        runs.error_of(
            dcp.save,
            state_of(rank, LARGE),
            checkpoint_id="step-1",
            storage_writer=writer,
            planner=DefaultSavePlanner() if rank else Held(Path(go)),
        )
        assert marks(arguments) == []


def test_a_coordinator_that_fails_says_so(posix_run: Run, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text("fail")
    share_ranks(2, fail_on_the_coordinator, posix_run.arguments(), str(go))


class SealingTier(CountingTier):
    """A tier on which the first upload lasts a while, in which something else happens."""

    def __init__(self, tier: Any, meanwhile: Callable[[], None], seconds: float) -> None:
        super().__init__(tier)
        self._meanwhile, self._seconds = meanwhile, seconds

    def upload(self, key: str, source: Any) -> Any:
        if self._seconds:
            self._meanwhile()
            time.sleep(self._seconds)
            self._seconds = 0.0
        return super().upload(key, source)


def test_what_is_sealed_during_a_long_upload_is_not_packed_twice(tmp_path: Path) -> None:
    """The linger time of an id does not pass unseen while another one's bytes leave."""
    limits = replace(QUICK, linger_s=0.5)
    durable = tmp_path / "durable"
    node = make_nodes(1, tmp_path, durable, limits)[0]

    def seal(checkpoint_id: str, rank: int) -> None:
        header = Header(
            checkpoint_id=checkpoint_id,
            rank=rank,
            world_size=4,
            local_world_size=2,
            node=node.node,
            token=f"{rank:016x}",
            written_by="test",
        )
        data = shard_bytes(header, [Thing(f"w{rank}", None, (), (), (), b"bytes" * 10)]).data
        node.local.put(f"{checkpoint_id}/{layout.shard_name(rank, header.token)}", data)

    node.durable = SealingTier(node.durable, lambda: seal("b", 1), 0.8)
    node.restart()
    seal("a", 0)
    seal("b", 0)
    node.flusher.step()
    seal("a", 1)  # the last one: its upload begins, and lasts
    node.flusher.step()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        node.flusher.step()
        time.sleep(0.05)
    for checkpoint_id in ("a", "b"):
        packs = [path.read_bytes() for path in (durable / checkpoint_id).rglob("*.pack")]
        assert [len(own_decoder.pack(data)) for data in packs] == [2]
