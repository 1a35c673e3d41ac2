"""Fixtures of runs under a residency policy, and of a target that can hang."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUICK, end_flushers
from tests.support.amazon import ACCOUNT, Amazon, Bucket
from tests.support.disks import Disk, small_disk

REGION = "eu-central-1"
POLICY = {"allow": [f"aws:{REGION}"], "owner": ACCOUNT, "ttl_s": 1}


@pytest.fixture(scope="module")
def amazon_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Amazon]:
    """Play Amazon over TLS."""
    with Amazon(tmp_path_factory.mktemp("amazon")) as played:
        yield played


@pytest.fixture
def amazon(amazon_server: Amazon) -> Iterator[Amazon]:
    """Give a fresh Amazon with one bucket here and one abroad."""
    server = amazon_server
    server.buckets.clear()
    server.faults.clear()
    server.log.clear()
    server.body_bytes.clear()
    server.on_put = None
    server.add("ckpt", REGION)
    server.add("abroad", "us-east-2")
    yield server
    server.on_put = None


@pytest.fixture
def bucket(amazon: Amazon) -> Bucket:
    """Give the bucket here."""
    return amazon.buckets["ckpt"]


@pytest.fixture
def arguments(amazon: Amazon, local: Path) -> Iterator[dict[str, Any]]:
    """Give a writer's arguments under a policy that allows that bucket."""
    yield {
        "url": f"tiered::s3://ckpt/run-{uuid.uuid4().hex[:8]}",
        "local": str(local),
        "limits": QUICK,
        "s3": amazon.options(REGION),
        "residency": POLICY,
    }
    end_flushers(local)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Disk]:
    """Give a target of its own for the packs of the first checkpoint, as a slow one of Lustre."""
    packs = tmp_path / "lustre/run/step-1/packs"
    packs.parent.mkdir(parents=True)
    with small_disk(tmp_path, 16) as disk:
        packs.symlink_to(disk.path)
        yield disk
