"""The local tier is full of what may not go: parts of a save go past it, and all rules hold."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import (
    IncompleteError,
    InvalidError,
    ResidencyError,
    TieredWriter,
    UnavailableError,
)
from examples.seaweed import SeaweedS3
from tests.conftest import Run, end_flushers
from tests.support import runs, storage_check
from tests.support.disks import small_disk
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes

pytestmark = pytest.mark.slow
LEFT_BYTES = 600_000
"""Less than a state of `runs.state_of` takes, and enough for its manifest."""


def fill(disk: Path) -> None:
    """Leave little room on a disk, as another job might."""
    free = os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize  # root may take all of it
    fd = os.open(disk / "ballast", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, free - LEFT_BYTES)
    os.close(fd)


@pytest.fixture
def full_run(s3_run: Run, tmp_path: Path) -> Iterator[Run]:
    """Give a run whose local tier is full, with the disk's reserve out of the way."""
    with small_disk(tmp_path, 16) as disk:
        s3_run.local = disk.path
        fill(disk.path)
        yield s3_run
        end_flushers(disk.path)


def test_a_full_disk_fails_the_save_unless_told_otherwise(full_run: Run) -> None:
    error = runs.error_of(runs.save, full_run.arguments(), "a", 1)
    assert isinstance(error, UnavailableError)
    assert full_run.keys() == {}


def test_a_save_goes_past_a_full_disk(full_run: Run) -> None:
    arguments = {**full_run.arguments(), "on_local_full": "write_through"}
    with runs.no_flusher(full_run):
        with TieredWriter(**arguments) as writer:
            dcp.save(runs.state_of(1), checkpoint_id="a", storage_writer=writer)
            counted = writer.metrics()
        packs = {key: size for key, size in full_run.keys().items() if "/packs/" in key}
        assert list(packs.values()) == [counted["dcp_tiered_write_through_bytes_total"]]
        assert not runs.shards(full_run, "a")
        # Nothing but a commit makes it a checkpoint.
        assert isinstance(runs.error_of(runs.load, full_run.durable_only()), IncompleteError)
    runs.wait(arguments, "a")
    (commit,) = Eyes(full_run).check().commits["a"]
    assert {f"a/{pack['name']}" for pack in commit["packs"]} == packs.keys()
    assert runs.load(full_run.arguments()) == 1
    # The next one has room again, and is a local one.
    (full_run.local / "ballast").unlink()
    runs.save(arguments, "b", 2)
    assert len(runs.shards(full_run, "b")) == 1
    runs.wait(arguments, "b")
    assert runs.load(full_run.durable_only()) == 2


def test_only_the_node_that_is_full_writes_through(full_run: Run, tmp_path: Path) -> None:
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    nodes = [str(roomy), str(full_run.local)]
    try:
        run_ranks(2, save_and_wait, nodes, full_run.arguments())
        (commit,) = Eyes(full_run).check().commits["a"]
        assert len(commit["packs"]) == 2
        assert len(list(roomy.glob("*/a/*.shard"))) == 1
        assert not list(full_run.local.glob("*/a/*.shard"))
    finally:
        end_flushers(roomy)


def save_and_wait(rank: int, nodes: list[str], arguments: dict[str, Any]) -> None:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    mine = {**arguments, "local": nodes[rank], "on_local_full": "write_through"}
    state = {f"of-{rank}": torch.arange(150_000) + rank}
    with TieredWriter(**mine) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
        writer.wait("local", "a", timeout_s=60)
        writer.wait("durable", "a", timeout_s=60)


def test_the_policy_holds_for_what_is_written_through(full_run: Run) -> None:
    assert full_run.server is not None
    forbidden = {"provider": "s3compat", "endpoint": full_run.server.endpoint}
    policy = {"version": 1, "allow": [forbidden]}
    arguments = {**full_run.arguments(), "on_local_full": "write_through", "residency": policy}
    with runs.no_flusher(full_run):
        error = runs.error_of(runs.save, arguments, "a", 1)
    assert isinstance(error, ResidencyError), error
    assert full_run.keys() == {}
    assert storage_check.published(runs.run_path(full_run)) == {}


def test_a_store_that_is_down_fails_the_save_and_leaves_nothing(
    tmp_path: Path, full_run: Run
) -> None:
    with SeaweedS3(tmp_path / "weed") as server:
        options = server.storage_options()
    arguments = runs.with_limits(
        {**full_run.arguments(), "s3": options, "on_local_full": "write_through"},
        request_retry_s=0.5,
    )
    with runs.no_flusher(full_run):
        error = runs.error_of(runs.save, arguments, "a", 1)
    assert isinstance(error, UnavailableError)
    assert error.tier == "durable"
    assert storage_check.published(runs.run_path(full_run)) == {}


def test_writing_through_needs_a_durable_tier(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="without a durable tier"):
        TieredWriter(f"tiered://{tmp_path}", on_local_full="write_through")
