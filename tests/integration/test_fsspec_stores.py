"""A run through a store that only a third party's fsspec package knows, in real processes."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import ResidencyError, TieredReader, TieredWriter
from examples.seaweed import SeaweedS3
from tests.conformance.test_s3_tier import S3Store
from tests.conftest import QUICK, end_flushers, flusher_pids
from tests.support import runs, shelves
from tests.support.round_trip import round_trip
from tests.support.workers import await_that

_CLI = "import sys; sys.modules['torch'] = None; from dcp_tiered.cli import main; sys.exit(main())"
POLICY = {"allow": ["aws:eu-central-1"], "owner": "1" * 12}


class Shelf:
    """A fresh run root in the bucket, and the arguments to reach it by another name than S3."""

    def __init__(self, server: SeaweedS3, protocol: str, local: Path) -> None:
        self.prefix, self.protocol, self.local = f"run-{uuid.uuid4().hex[:8]}", protocol, local
        self.url = f"tiered::{protocol}://{server.buckets[0]}/{self.prefix}"
        self.options = {protocol: server.storage_options()}
        self.client = server.client()
        self.store = S3Store(self.client, server.buckets[0], self.prefix)
        self.login = {
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
        }

    def arguments(self, **limits: Any) -> dict[str, Any]:
        chosen = replace(QUICK, part_bytes=5 << 20, **limits)
        return {"url": self.url, "local": str(self.local), "limits": chosen, **self.options}

    def record(self, checkpoint_id: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.store.read(f"{checkpoint_id}/record-1.json"))
        return said

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _CLI, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, **self.login},
            timeout=100,
        )


@pytest.fixture(params=["shelf", "plainshelf"])
def shelf(
    request: pytest.FixtureRequest,
    s3_server: SeaweedS3,
    local: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shelf]:
    shelves.install(monkeypatch)
    made = Shelf(s3_server, request.param, local)
    yield made
    made.client.close()


only_shelf = pytest.mark.parametrize("shelf", ["shelf"], indirect=True)


def large(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(3_000_000, dtype=torch.int64) * 1_000_003 + number}


@pytest.mark.slow
def test_a_run_goes_through_the_store_and_back(shelf: Shelf) -> None:
    round_trip(shelf.url, shelf.local, shelf.options, **shelf.login)
    keys = shelf.store.keys()
    packs = {key for key in keys if key.endswith(".pack")}
    assert len(packs) == 2
    assert {f"{key}.ok" for key in packs} <= keys  # read back: nothing is said of a checksum
    assert [shelf.record(f"step-{n}")["exclusive"] for n in (1, 2)] == [False, False]
    assert shelf.store.leftovers() == []


@pytest.mark.slow
def test_a_pack_of_many_parts_comes_back(shelf: Shelf) -> None:
    arguments = shelf.arguments()
    with TieredWriter(**arguments) as writer:
        dcp.save(large(1), checkpoint_id="a", storage_writer=writer)
        writer.wait("durable", "a", timeout_s=60)
    assert _load(shelf) == 1
    assert shelf.store.leftovers() == []


@only_shelf
@pytest.mark.slow
def test_a_flusher_killed_within_an_upload_is_followed_by_one_that_ends_it(shelf: Shelf) -> None:
    with TieredWriter(**shelf.arguments(bytes_per_second_max=8 << 20)) as writer:
        dcp.save(large(2), checkpoint_id="a", storage_writer=writer)
    (pid,) = await_that("a flusher", lambda: flusher_pids(shelf.local))
    await_that("parts of a pack", shelf.store.leftovers)
    os.kill(pid, signal.SIGKILL)
    there = shelf.store.keys()
    assert not [key for key in there if key.endswith((".pack", "record-1.json"))]
    with TieredWriter(**shelf.arguments()) as writer:
        writer.wait("durable", "a", timeout_s=60)
    assert _load(shelf) == 2
    assert len(shelf.store.leftovers()) == 1  # for a rule of the bucket: docs/operations.md


@only_shelf
@pytest.mark.slow
def test_the_commands_know_the_store(shelf: Shelf, tmp_path: Path) -> None:
    runs.save(shelf.arguments(), "step-1", 1)
    end_flushers(shelf.local)
    flushed = shelf.cli("flush", str(shelf.local))
    assert flushed.returncode == 0, flushed.stderr
    status = shelf.cli("status", str(shelf.local), "--json")
    (line,) = json.loads(status.stdout)["checkpoints"]
    assert line["level"] == "durable"
    there = ("-o", f"shelf.endpoint_url={shelf.options['shelf']['endpoint_url']}")
    inspected = shelf.cli("inspect", shelf.url, "step-1", *there, "--json")
    assert inspected.returncode == 0, inspected.stderr
    assert shelf.record("step-1")["attempt"] in inspected.stdout
    audited = shelf.cli("residency", "audit", shelf.url, *there)
    assert audited.returncode == 9, audited.stderr  # a commit without evidence
    policy = tmp_path / "policy.toml"
    policy.write_text('allow = ["aws:eu-central-1"]\nowner = "111111111111"\n')
    checked = shelf.cli("residency", "check", shelf.url, *there, "--policy", str(policy))
    assert checked.returncode == 9
    assert "fsspec does not say where a bucket is" in checked.stderr
    export = ("residency", "export", shelf.url, "--policy", str(policy), "--for", "iam")
    assert shelf.cli(*export).returncode == 3


@only_shelf
def test_under_a_policy_nothing_is_sent(shelf: Shelf) -> None:
    error = runs.error_of(runs.save, shelf.arguments(), "a", 1, residency=POLICY)
    assert isinstance(error, ResidencyError)
    assert shelf.store.keys() == set()
    assert not list(shelf.local.rglob("*.shard"))


def _load(shelf: Shelf) -> int:
    """Load without the local tier; return which state it is, all of it."""
    target = {"w": torch.zeros(3_000_000, dtype=torch.int64)}
    reader = TieredReader(shelf.url, limits=QUICK, **shelf.options)
    try:
        dcp.load(target, storage_reader=reader)
    finally:
        reader.close()
    number = int(target["w"][0])
    assert torch.equal(target["w"], large(number)["w"])
    return number
