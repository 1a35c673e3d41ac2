"""The durable tier fails: a save goes on, the error says what to do, and nothing is lost."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import (
    CorruptError,
    InvalidError,
    NoCheckpointError,
    TieredError,
    TieredWriter,
    UnavailableError,
    cause,
)
from examples.seaweed import SeaweedS3
from tests.conftest import Run, end_flushers, flusher_pids
from tests.support import runs
from tests.support.fault_proxy import FaultProxy
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that


@pytest.fixture
def proxy(s3_run: Run) -> Iterator[FaultProxy]:
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as made:
        yield made


def refusals(run: Run) -> dict[str, dict[str, Any]]:
    """Return arguments that the store refuses, by what is wrong with them."""
    arguments, s3 = run.arguments(), run.options["s3"]
    return {
        "bucket": {**arguments, "url": run.url.replace("//ckpt/", "//no-such-bucket/")},
        "key": {**arguments, "s3": {**s3, "key": "nobody"}},
        "secret": {**arguments, "s3": {**s3, "secret": "not-the-secret-at-all"}},
    }


@pytest.mark.parametrize("wrong", ["bucket", "key", "secret"])
def test_a_refusal_ends_the_wait_and_not_the_save(wrong: str, s3_run: Run) -> None:
    """O073, O117."""
    arguments = refusals(s3_run)[wrong]
    runs.save(arguments, "a", 1)
    error = runs.error_of(runs.wait, arguments, "a", 60)
    assert isinstance(error, InvalidError)
    assert error.tier == "durable"
    assert error.key is not None
    assert error.key.startswith("s3://")
    assert error.hint
    assert "not-the-secret-at-all" not in str(error)
    assert runs.load(arguments, "a") == 1, "what is local can be loaded all the same"
    assert s3_run.server is not None
    buckets = s3_run.server.client().list_buckets()["Buckets"]
    assert [bucket["Name"] for bucket in buckets] == list(s3_run.server.buckets)


def save_and_wait(rank: int, arguments: dict[str, Any]) -> TieredError | None:
    with TieredWriter(**arguments) as writer:
        state = {f"of-{rank}": torch.full((100,), rank), "n": torch.arange(10)}
        try:
            dcp.save(state, checkpoint_id="a", storage_writer=writer)
            writer.wait("durable", "a", timeout_s=60)
        except BaseException as exc:
            found = cause(exc)
            if found is None:
                raise
            return found
    return None


def save_three_times(rank: int, several: list[dict[str, Any]]) -> list[TieredError | None]:
    return [save_and_wait(rank, arguments) for arguments in several]


@pytest.mark.slow
def test_every_rank_gets_the_same_refusal(s3_run: Run, tmp_path: Path, read_only: Path) -> None:
    """A bucket that is not there, and a local tier that is missing or not writable."""
    missing = tmp_path / "missing"
    several = [
        refusals(s3_run)["bucket"],
        {**s3_run.arguments(), "local": str(missing)},
        {**s3_run.arguments(), "local": str(read_only)},
    ]
    for bucket, absent, denied in run_ranks(2, save_three_times, several):
        assert isinstance(bucket, InvalidError)
        assert "NoSuchBucket" in bucket.message
        assert (bucket.tier, bool(bucket.key), bool(bucket.hint)) == ("durable", True, True)
        assert isinstance(absent, InvalidError)
        assert (absent.tier, absent.key) == ("local", str(missing))
        assert (absent.errno, bool(absent.hint)) == (errno.ENOENT, True)
        assert isinstance(denied, InvalidError)
        assert (denied.tier, denied.key) == ("local", str(read_only))
        assert (denied.errno, bool(denied.hint)) == (errno.EACCES, True)
    assert not missing.exists(), "the local tier's base is never created"


def test_a_flush_completes_when_the_store_is_back(tmp_path: Path, local: Path) -> None:
    """The store is down while two saves run, and for a while after."""
    with SeaweedS3(tmp_path / "weed") as server:
        run = Run("tiered::s3://ckpt/run", local, {"s3": server.storage_options()}, server)
        server.stop()
        runs.save(run.arguments(), "a", 1)
        runs.save(run.arguments(), "b", 2)
        error = runs.error_of(runs.wait, run.arguments(), "b", 15)
        assert isinstance(error, UnavailableError)
        assert server.endpoint in f"{error}"
        server.start()
        runs.wait(run.arguments(), "a")
        runs.wait(run.arguments(), "b")
        assert {name: len(c) for name, c in Eyes(run).check().commits.items()} == {"a": 1, "b": 1}
        end_flushers(local)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "stall", "method": "PUT", "pattern": r"\.pack", "times": 1},
        {"kind": "status", "method": "*", "pattern": ".", "times": 6},
        {"kind": "reset", "method": "*", "pattern": ".", "times": 6},
        {"kind": "delay", "method": "*", "pattern": ".", "times": 100, "seconds": 0.1},
        {"kind": "truncate", "method": "GET", "pattern": "/a/record", "times": 2},
        {"kind": "truncate", "method": "GET", "pattern": "list-type", "times": 2},
    ],
    ids=["stall", "503", "reset", "slow", "truncated-get", "truncated-list"],
)
def test_a_store_that_fails_for_a_while_costs_time_only(
    fault: dict[str, Any], s3_run: Run, proxy: FaultProxy
) -> None:
    """O069, O070."""
    arguments = runs.with_limits(runs.behind(s3_run, proxy.endpoint), request_timeout_s=2.0)
    with runs.no_flusher(s3_run):
        runs.save(arguments, "a", 1)  # the writer's own question is not what is tested
    added = proxy.add(**fault)
    runs.wait(arguments, "a")
    assert added.hits > 0
    assert len(Eyes(s3_run).check().attempts("a")) == 1


def test_a_truncated_pack_read_is_carried_on(s3_run: Run, proxy: FaultProxy) -> None:
    runs.save(s3_run.arguments(), "a", 1)
    runs.wait(s3_run.arguments(), "a")
    fault = proxy.add("truncate", "GET", r"\.pack", times=3)
    arguments = {**s3_run.durable_only(), "s3": runs.behind(s3_run, proxy.endpoint)["s3"]}
    assert runs.load(arguments, "a") == 1
    assert fault.hits == 3


def test_a_flipped_bit_is_never_uploaded_as_good(s3_run: Run) -> None:
    """O057: the flusher names the file, and other checkpoints become durable all the same."""
    with runs.no_flusher(s3_run):
        runs.save(s3_run.arguments(), "bad", 1)
        runs.save(s3_run.arguments(), "good", 2)
        (shard,) = runs.shards(s3_run, "bad")
        runs.flip_bit(shard, 5000)
    runs.wait(s3_run.arguments(), "good")
    error = runs.error_of(runs.wait, s3_run.arguments(), "bad")
    assert isinstance(error, CorruptError)
    assert (error.tier, error.key) == ("local", str(shard))
    assert error.hint
    with TieredWriter(**s3_run.arguments()) as writer:
        lines = {line.checkpoint_id: line for line in writer.status()}
    assert (lines["bad"].state, lines["good"].state) == ("damaged", "durable")
    assert shard.name in (lines["bad"].error or "")
    checked = Eyes(s3_run).check()
    assert list(checked.commits) == ["good"]
    assert not [key for key in sorted(s3_run.keys()) if key.startswith("bad/packs/")]
    # The same values can be saved under another id, so nothing is lost.
    runs.save(s3_run.arguments(), "again", 1)
    runs.wait(s3_run.arguments(), "again")


def test_a_truncated_shard_file_is_damage_and_not_a_retry_for_ever(posix_run: Run) -> None:
    with runs.no_flusher(posix_run):
        runs.save(posix_run.arguments(), "bad", 1)
        (shard,) = runs.shards(posix_run, "bad")
        os.truncate(shard, 6000)
    error = runs.error_of(runs.wait, posix_run.arguments(), "bad")
    assert isinstance(error, CorruptError)
    assert error.key == str(shard)
    await_that("the flusher ends", lambda: not flushers(posix_run))


def flushers(run: Run) -> list[int]:
    return flusher_pids(run.local)


def test_a_mount_that_is_gone_is_an_error_and_not_an_empty_tier(posix_run: Run) -> None:
    base = Path(posix_run.url.removeprefix("tiered::file://")).parent
    runs.save(posix_run.arguments(), "a", 1)
    runs.wait(posix_run.arguments(), "a")
    base.rename(base.with_name("unmounted"))
    error = runs.error_of(runs.load, posix_run.durable_only())
    assert isinstance(error, InvalidError)
    assert not isinstance(error, NoCheckpointError)
    assert (error.tier, error.key) == ("durable", str(base))
    runs.save(posix_run.arguments(), "b", 2)
    error = runs.error_of(runs.wait, posix_run.arguments(), "b")
    assert isinstance(error, InvalidError)
    assert error.tier == "durable"
    assert error.hint
    assert not base.exists(), "the mount point was filled on the disk below"
    base.with_name("unmounted").rename(base)
    runs.wait(posix_run.arguments(), "b")
    assert runs.load(posix_run.durable_only()) == 2


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Give a directory that this user cannot write to; root needs a mount for that."""
    path = tmp_path / "read-only"
    path.mkdir()
    if os.geteuid():
        path.chmod(0o555)
        yield path
        path.chmod(0o755)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("root needs a read-only mount, which is not allowed here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_durable_disk_is_an_error_until_there_is_room(small_disk: Path, local: Path) -> None:
    """O055, O122."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3_800_000))
    run = Run(f"tiered::file://{small_disk}/run", local)
    runs.save(run.arguments(), "a", 1)
    error = runs.error_of(runs.wait, run.arguments(), "a", 5)
    assert isinstance(error, UnavailableError)
    assert (error.tier, error.errno) == ("durable", errno.ENOSPC)
    assert "free" in error.message
    assert error.hint
    ballast.unlink()
    runs.wait(run.arguments(), "a")
    assert list(Eyes(run).check().commits) == ["a"]
    end_flushers(local)


def test_a_full_local_disk_fails_the_save_and_keeps_what_was_there(
    small_disk: Path, tmp_path: Path
) -> None:
    """O055, O122: the error has errno, path, bytes asked and bytes free."""
    (tmp_path / "lustre").mkdir()
    run = Run(f"tiered::file://{tmp_path}/lustre/run", small_disk)
    try:
        runs.save(run.arguments(), "a", 1)
        with TieredWriter(**run.arguments()) as writer:
            state = {"big": torch.ones(4_000_000)}
            error = runs.error_of(dcp.save, state, checkpoint_id="b", storage_writer=writer)
        assert isinstance(error, UnavailableError)
        assert (error.tier, error.errno) == ("local", errno.ENOSPC)
        assert error.key is not None
        assert error.key.startswith(str(small_disk))
        assert "asked" in error.message
        assert "free" in error.message
        assert not runs.shards(run, "b")
        runs.save(run.arguments(), "c", 3)  # the space of the failed one is free again
        runs.wait(run.arguments(), "a")
        runs.wait(run.arguments(), "c")
        assert sorted(Eyes(run).check().commits) == ["a", "c"]
    finally:
        end_flushers(small_disk)


def test_a_flusher_works_on_a_full_local_disk(small_disk: Path, tmp_path: Path) -> None:
    """Lock, status and log cannot be written, and the upload goes on."""
    (tmp_path / "lustre").mkdir()
    run = Run(f"tiered::file://{tmp_path}/lustre/run", small_disk)
    with runs.no_flusher(run):
        runs.save(run.arguments(), "a", 1)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    assert shutil.disk_usage(small_disk).free == 0
    try:
        with TieredWriter(**run.arguments()) as writer:
            writer._stack.keep_flusher()
            await_that("the commit", lambda: Eyes(run).check().commits)
            (small_disk / "ballast").unlink()
            writer.wait("durable", "a", timeout_s=60)
    finally:
        end_flushers(small_disk)
