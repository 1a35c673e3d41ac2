"""The local tier stays within its bounds: saves wait or fail, what is durable is evicted."""

import logging
import os
import shutil
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import (
    BackpressureError,
    ConflictError,
    InvalidError,
    NoCheckpointError,
    TieredReader,
    TieredWriter,
    cause,
)
from dcp_tiered.config import settings
from dcp_tiered.services import run_directory
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_space import LocalSpace
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import QUICK, Run, end_flushers
from tests.support import runs, workers
from tests.support.disks import small_disk
from tests.support.nodes import make_nodes, publish
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

ONE = 800_000
"""Bytes of one state of `runs.state_of`, a little less than its shard file."""
KINDS = pytest.mark.parametrize("kind", ["posix_run", "s3_run"])


def present(path: Path) -> list[str]:
    """Return the ids that have shard files below a run's directory."""
    return sorted({file.parent.name for file in path.glob("*/*.shard")})


def bytes_of(path: Path) -> int:
    """Return what checkpoints take below a run's directory."""
    return sum(file.stat().st_size for file in path.glob("*/*"))


def space_of(run: Run, **limits: Any) -> LocalSpace:
    local = PosixTier(runs.run_path(run), run.local, "local")
    return LocalSpace(Catalog(local, None), local, replace(QUICK, **limits))


@KINDS
def test_an_evicted_checkpoint_is_loaded_from_the_durable_tier(
    kind: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(kind)
    arguments = runs.with_limits(run.arguments(), local_bytes_max=3 * ONE)
    for number, name in enumerate("abcde"):
        runs.save(arguments, name, number)
        runs.wait(arguments, name)
        assert bytes_of(runs.run_path(run)) <= 3 * ONE
    # The flusher makes room for the next one ahead of it.
    await_that("the eviction", lambda: present(runs.run_path(run)) == ["e"])
    for number, name in enumerate("abcde"):
        assert runs.load(arguments, name) == number
        assert runs.load(run.durable_only(), name) == number
        runs.wait(arguments, name, 5)
    with TieredWriter(**arguments) as writer:
        assert {line.checkpoint_id: line.state for line in writer.status()} == dict.fromkeys(
            "abcde", "durable"
        )
        error = runs.error_of(dcp.save, runs.state_of(9), checkpoint_id="a", storage_writer=writer)
        assert isinstance(error, ConflictError), "an evicted id is as taken as before"
    reader = TieredReader(**arguments)
    target = {**runs.state_of(0), "n": -1}
    dcp.load(target, storage_reader=reader)
    assert (runs.number_of(target), reader.bytes_read["durable"]) == (4, 0)
    assert sorted(Eyes(run).check().commits) == list("abcde")


def test_fail_is_told_before_a_byte_is_written(posix_run: Run) -> None:
    arguments = runs.with_limits(posix_run.arguments(), pending_checkpoints_max=2)
    arguments |= {"tiered": {"on_full": "fail"}}
    with runs.no_flusher(posix_run):
        runs.save(arguments, "a", 1)
        runs.save(arguments, "b", 2)
        error = runs.error_of(runs.save, arguments, "c", 3)
        assert isinstance(error, BackpressureError)
        assert "2 checkpoints wait" in error.message
        assert (error.tier, error.key) == ("local", str(runs.run_path(posix_run)))
        assert "dcp-tiered status" in (error.hint or "")
        assert present(runs.run_path(posix_run)) == ["a", "b"]
        assert runs.load(arguments) == 2
        runs.save(arguments, "b", 4, overwrite=True)  # no more waits than before
    runs.wait(arguments, "b")
    runs.save(arguments, "c", 3)
    runs.wait(arguments, "c")
    assert sorted(Eyes(posix_run).check().commits) == ["a", "b", "c"]


def test_block_goes_on_when_the_flusher_does(posix_run: Run) -> None:
    arguments = runs.with_limits(
        posix_run.arguments(), pending_checkpoints_max=1, backpressure_wait_s=60.0
    )
    with ExitStack() as held, TieredWriter(**arguments) as writer:
        held.enter_context(runs.no_flusher(posix_run))
        runs.save(arguments, "a", 1)
        threading.Timer(1.0, held.close).start()
        dcp.save(runs.state_of(2), checkpoint_id="b", storage_writer=writer)
        assert Eyes(posix_run).commits("a"), "it went on before the first one was durable"
        counted = writer.metrics()
        assert counted["dcp_tiered_backpressure_waits_total"] == 1
        assert counted["dcp_tiered_backpressure_seconds_total"] > 0
        writer.wait("durable", "b", timeout_s=60)


def test_a_save_that_waits_in_vain_says_that_no_flusher_runs(posix_run: Run) -> None:
    arguments = runs.with_limits(
        posix_run.arguments(), pending_checkpoints_max=1, backpressure_wait_s=0.2
    )
    runs.save(arguments, "a", 1, flusher="external")
    error = runs.error_of(runs.save, arguments, "b", 2, flusher="external")
    assert isinstance(error, BackpressureError)
    assert "no flusher runs on this node" in error.message
    assert "--follow" in (error.hint or "")


def test_a_run_without_a_durable_tier_is_not_held_up(local: Path) -> None:
    limits = replace(QUICK, pending_checkpoints_max=1, local_bytes_max=1)
    (local / "run").mkdir()
    for number in range(3):
        runs.save({"url": f"tiered://{local}/run", "limits": limits}, f"step-{number}", number)
    for number in range(3):
        arguments = {"url": f"tiered://{local}/run"}
        assert runs.load(arguments, f"step-{number}") == number


def save_on_four(rank: int, arguments: dict[str, Any], launcher: bool) -> list[str]:
    if not launcher:
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    ends = []
    with TieredWriter(**arguments) as writer:
        for name in ("a", "b", "c"):
            state = {f"of-{rank}": torch.full((3000,), rank)}
            try:
                dcp.save(state, checkpoint_id=name, storage_writer=writer)
            except BaseException as exc:  # noqa: BLE001 - the error is the result
                ends.append(f"{type(cause(exc)).__name__}: {cause(exc)}")
            else:
                ends.append("saved")
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [True, False])
@pytest.mark.parametrize("on_full", ["block", "fail"])
def test_four_ranks_get_the_same_error(on_full: str, launcher: bool, posix_run: Run) -> None:
    arguments = runs.with_limits(
        posix_run.arguments(), pending_checkpoints_max=2, backpressure_wait_s=1.0
    )
    with runs.no_flusher(posix_run):
        answers = run_ranks(4, save_on_four, {**arguments, "on_full": on_full}, launcher)
        assert len({tuple(answer) for answer in answers}) == 1
        assert answers[0][:2] == ["saved", "saved"]
        assert answers[0][2].startswith("BackpressureError: no room for c")
        assert present(runs.run_path(posix_run)) == ["a", "b"]


def save_on_nodes(rank: int, nodes: list[str], arguments: dict[str, Any]) -> list[int]:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    mine = {**arguments, "local": nodes[rank]}
    with TieredWriter(**mine) as writer:
        for number in range(5):
            state = {f"of-{rank}": torch.full((100_000,), number), "all": torch.arange(9)}
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
    with TieredWriter(**mine) as writer:
        writer.wait("durable", "step-4", timeout_s=60)
    seen = []
    for number in range(5):
        target = {f"of-{rank}": torch.zeros(100_000, dtype=torch.int64)}
        reader = TieredReader(**mine)
        dcp.load(target, checkpoint_id=f"step-{number}", storage_reader=reader)
        reader.close()
        assert len(target[f"of-{rank}"].unique()) == 1
        seen.append(int(target[f"of-{rank}"][0]))
    return seen


@pytest.mark.slow
def test_each_node_keeps_its_own_bounds(s3_run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other-node"
    other.mkdir()
    arguments = runs.with_limits(
        s3_run.arguments(), local_bytes_max=3 * ONE, pending_checkpoints_max=2
    )
    try:
        nodes = [str(s3_run.local), str(other)]
        assert run_ranks(2, save_on_nodes, nodes, arguments) == [[0, 1, 2, 3, 4]] * 2
        commits = Eyes(s3_run).check().commits
        assert sorted(commits) == [f"step-{number}" for number in range(5)]
        for node in (runs.run_path(s3_run), other / runs.run_path(s3_run).name):
            await_that("the eviction", lambda node=node: present(node) == ["step-4"])
    finally:
        end_flushers(other)


def evict_until_killed(run: Run, after: int) -> None:
    space = space_of(run, local_bytes_max=1)
    remove, gone = space._remove, []

    def remove_or_die(checkpoint_id: str, name: str) -> bool:
        if len(gone) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        gone.append(name)
        return remove(checkpoint_id, name)

    space._remove = remove_or_die
    space.trim()


@pytest.mark.parametrize("after", range(4))
def test_an_eviction_may_be_killed_anywhere(after: int, posix_run: Run) -> None:
    """I11, O047: what is left loads right, passes for nothing it is not, and goes the next time."""
    arguments = posix_run.arguments()
    for number, name in enumerate("abc"):
        runs.save(arguments, name, number)
        runs.wait(arguments, name)
    end_flushers(posix_run.local)
    process, _ = workers.start(evict_until_killed, posix_run, after)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    files = [file for name in "ab" for file in (runs.run_path(posix_run) / name).iterdir()]
    assert len(files) == 6 - after, "manifest, shard file and record of each, less what went"
    for number, name in enumerate("abc"):
        assert runs.load(arguments, name) == number
    with TieredWriter(**arguments) as writer:
        assert [line.state for line in writer.status()] == ["durable"] * 3
    store = Path(posix_run.url.removeprefix("tiered::file://"))
    store.rename(store.with_name("away"))
    for name in "ab":
        whole = (runs.run_path(posix_run) / name / "published-1.json").exists()
        if whole:
            assert runs.load(arguments, name) == "ab".index(name)
        else:
            assert not isinstance(runs.error_of(runs.load, arguments, name), NoCheckpointError)
    store.with_name("away").rename(store)
    space_of(posix_run, local_bytes_max=1).trim()
    assert present(runs.run_path(posix_run)) == ["c"]
    names = [file.name for name in "ab" for file in (runs.run_path(posix_run) / name).iterdir()]
    assert names == ["record-1.json"] * 2


def test_a_copy_that_lost_against_another_job_stays(s3_run: Run, tmp_path: Path) -> None:
    """It is the only one there is of that save."""
    other = tmp_path / "other-nvme"
    other.mkdir()
    arguments = runs.with_limits(s3_run.arguments(), local_bytes_max=1 << 40)
    try:
        with runs.no_flusher(s3_run):
            runs.save(arguments, "x", 1)
            rival = {**arguments, "local": str(other)}
            runs.save(rival, "x", 2)
            runs.wait(rival, "x")
        assert isinstance(runs.error_of(runs.wait, arguments, "x"), ConflictError)
        for number, name in enumerate("ab"):
            runs.save(arguments, name, number)
            runs.wait(arguments, name)
        end_flushers(s3_run.local)
        mine = runs.run_path(s3_run)
        space_of(s3_run, local_bytes_max=1).trim()
        assert present(mine) == ["b", "x"]
        # Nor does it matter that this node learns of the winner.
        shutil.copy(other / mine.name / "x" / "record-1.json", mine / "x")
        space_of(s3_run, local_bytes_max=1).trim()
        assert present(mine) == ["b", "x"]
        assert (mine / "x" / "published-1.json").exists()
        space_of(s3_run, pending_checkpoints_max=1).admit("c", ONE, "fail", lambda: None)
    finally:
        end_flushers(other)


def test_the_log_says_what_went_and_why(posix_run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate("ab"):
        runs.save(posix_run.arguments(), name, number)
        runs.wait(posix_run.arguments(), name)
    end_flushers(posix_run.local)
    (shard,) = runs.shards(posix_run, "a")
    with caplog.at_level(logging.INFO, "dcp_tiered"):
        space_of(posix_run, local_bytes_max=1).trim()
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if line.startswith("evicted a, attempt ")]
    assert "durable, and" in line
    assert f"removed published-1.json, {shard.name}" in line


def test_a_bound_may_be_a_share_of_the_very_mount(tmp_path: Path) -> None:
    """Of the disk below the mount point, not of the one above it; the smaller bound counts."""
    (tmp_path / "lustre").mkdir()
    with small_disk(tmp_path, 16) as disk:
        run = Run(f"tiered::file://{tmp_path}/lustre/run", disk.path)
        share = 2.5 * ONE / (os.statvfs(disk.path).f_blocks * os.statvfs(disk.path).f_frsize)
        arguments = runs.with_limits(
            run.arguments(), local_share_max=share, local_bytes_max=20 * ONE, backpressure_wait_s=0
        )
        with runs.no_flusher(run):
            for number, name in enumerate("ab"):
                runs.save(arguments, name, number)
            error = runs.error_of(runs.save, arguments, "c", 2)
        assert isinstance(error, BackpressureError)
        assert present(runs.run_path(run)) == ["a", "b"]
        end_flushers(disk.path)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"on_full": "drop"}, "block, fail, supersede"),
        ({"tiered": {"on_full": "wait"}}, "block, fail"),
        ({"limits": replace(QUICK, pending_checkpoints_max=0)}, "pending_checkpoints_max"),
        ({"limits": replace(QUICK, local_bytes_max=0)}, "local_bytes_max"),
        ({"limits": replace(QUICK, local_share_max=0.0)}, "local_share_max"),
        ({"limits": replace(QUICK, local_share_max=50)}, "local_share_max"),
        ({"limits": replace(QUICK, local_reserve_bytes=-1)}, "local_reserve_bytes"),
        ({"limits": replace(QUICK, backpressure_wait_s=float("nan"))}, "backpressure_wait_s"),
        ({"tiered": {"limits": {"local_bytes_max": "1GB"}}}, "local_bytes_max"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(
    wrong: dict[str, Any], word: str, local: Path
) -> None:
    with pytest.raises(InvalidError, match=word):
        TieredWriter(**{"url": "tiered::s3://bucket/run", "local": str(local), **wrong})


def test_a_text_in_the_environment_chooses(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_TIERED_ON_FULL", "fail")
    assert settings("tiered::s3://bucket/run").on_full == "fail"
    assert settings("tiered::s3://bucket/run", on_full="block").on_full == "block"
    monkeypatch.delenv("FSSPEC_TIERED_ON_FULL")
    assert settings("tiered::s3://bucket/run").on_full == "block"


def test_a_save_that_wrote_through_is_no_measure_of_the_next(tmp_path: Path) -> None:
    """Else every save after it seems to need no room, waits for none and writes through too."""
    (node,) = make_nodes(1, tmp_path, tmp_path / "durable", QUICK)
    assert run_directory.open_node(node.local, node.node) == node.node
    node.seal("a", 1, "0" * 16)
    publish([node], "a")
    (shard,) = (node.local.root / "a").glob("*.shard")
    space = LocalSpace(Catalog(node.local, None), node.local, QUICK)
    before = space.expected_bytes(1 << 40)
    assert before == bytes_of(node.local.root)
    shard.unlink()
    space = LocalSpace(Catalog(node.local, None), node.local, QUICK)
    assert space.expected_bytes(1 << 40) == before
