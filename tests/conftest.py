"""Fixtures that every kind of test shares: a real S3 server, a local tier, flushers that end."""

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dcp_tiered import Limits
from examples.seaweed import SeaweedS3

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile(
    "ci", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

QUICK = Limits(
    request_timeout_s=5.0,
    request_retry_s=3.0,
    flush_retry_s_max=1.0,
    linger_s=1.0,
    idle_exit_s=5.0,
    poll_s=0.05,
    takeover_s=10.0,
)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedS3]:
    """Run one real S3 server for the whole session."""
    with SeaweedS3(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@dataclass
class Run:
    """One run with tiers of its own: the arguments of a writer or reader, and independent eyes."""

    url: str
    local: Path
    options: dict[str, Any] = field(default_factory=dict)
    server: SeaweedS3 | None = None
    """None for a POSIX durable tier."""
    limits: Limits = QUICK

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for TieredWriter and TieredReader."""
        return {"url": self.url, "local": str(self.local), "limits": self.limits, **self.options}

    def durable_only(self) -> dict[str, Any]:
        """Return keyword arguments for a reader that has no local tier."""
        return {"url": self.url, "limits": self.limits, **self.options}

    def keys(self) -> dict[str, int]:
        """Return key and length of every durable object, read without our code."""
        if self.server is None:
            root = Path(self.url.removeprefix("tiered::file://"))
            files = [path for path in root.rglob("*") if path.is_file()]
            return {str(path.relative_to(root)): path.stat().st_size for path in files}
        bucket, _, prefix = self.url.removeprefix("tiered::s3://").partition("/")
        pages = self.server.client().get_paginator("list_objects_v2")
        return {
            entry["Key"].removeprefix(f"{prefix}/"): entry["Size"]
            for page in pages.paginate(Bucket=bucket, Prefix=f"{prefix}/")
            for entry in page.get("Contents", ())
        }

    def get(self, key: str) -> bytes:
        """Return a durable object, read without our code."""
        if self.server is None:
            return (Path(self.url.removeprefix("tiered::file://")) / key).read_bytes()
        bucket, _, prefix = self.url.removeprefix("tiered::s3://").partition("/")
        reply = self.server.client().get_object(Bucket=bucket, Key=f"{prefix}/{key}")
        data: bytes = reply["Body"].read()
        return data

    def commits(self, checkpoint_id: str) -> list[dict[str, Any]]:
        """Return the commit records of an id, read without our code."""
        records = [
            json.loads(self.get(key))
            for key in sorted(self.keys())
            if key.startswith(f"{checkpoint_id}/record-")
        ]
        return [record for record in records if record["kind"] == "commit"]

    def run_path(self) -> Path:
        """Return the run's directory on the local tier."""
        (path,) = (entry for entry in self.local.iterdir() if (entry / "run.json").exists())
        return path


def flusher_pids(local: Path) -> list[int]:
    """Return the flushers that run on a local tier, by what the operating system says."""
    pids = []
    for lock in local.glob("*/flusher.lock"):
        with suppress(OSError, ValueError, KeyError):
            pid = int(json.loads(lock.read_text())["pid"])
            if b"flusher_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
    return pids


def end_flushers(local: Path) -> None:
    """Kill the flushers of a local tier and wait until they are gone."""
    deadline = time.monotonic() + 10
    while (pids := flusher_pids(local)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Path]:
    """Give a local tier whose flushers end with the test."""
    path = tmp_path / "nvme"
    path.mkdir()
    yield path
    end_flushers(path)


@pytest.fixture
def s3_run(s3_server: SeaweedS3, local: Path) -> Run:
    """Give a run that flushes to S3."""
    return Run(
        url=f"tiered::s3://{s3_server.buckets[0]}/test-{uuid.uuid4().hex[:12]}",
        local=local,
        options={"s3": s3_server.storage_options()},
        server=s3_server,
    )


@pytest.fixture
def posix_run(tmp_path: Path, local: Path) -> Run:
    """Give a run that flushes to a mounted file system."""
    (tmp_path / "lustre").mkdir()
    return Run(url=f"tiered::file://{tmp_path}/lustre/run", local=local)
