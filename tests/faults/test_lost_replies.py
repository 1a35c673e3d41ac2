"""The store has done it and the answer is lost: that is no rival and no failure (I4)."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredWriter
from tests.conftest import Run
from tests.support import runs
from tests.support.fault_proxy import FaultProxy
from tests.support.storage_check import Eyes


@pytest.fixture
def proxy(s3_run: Run) -> Iterator[FaultProxy]:
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ("PUT", "/record-1"),
        ("PUT", "/manifest-"),
        ("PUT", r"\.pack$"),
        ("PUT", r"partNumber=1\b"),
        ("POST", r"\?uploads"),
        ("POST", r"\?uploadId="),
        ("*", "."),
    ],
    ids=["record", "manifest", "pack", "part", "begin", "complete", "first"],
)
def test_a_lost_reply_is_no_failure(
    method: str, pattern: str, s3_run: Run, proxy: FaultProxy
) -> None:
    arguments = runs.behind(s3_run, proxy.endpoint)
    large = "partNumber" in pattern or "upload" in pattern
    values = torch.arange(5_000_000 if large else 1000, dtype=torch.int32)
    limits = replace(s3_run.limits, part_bytes=16 << 20, request_retry_s=20.0)
    fault = proxy.add("drop_reply", method, pattern)
    with TieredWriter(**{**arguments, "limits": limits}) as writer:
        dcp.save({"v": values}, checkpoint_id="a", storage_writer=writer)
        writer.wait("durable", "a", timeout_s=60)
    assert fault.hits == 1
    eyes = Eyes(s3_run)
    assert len(eyes.check().attempts("a")) == 1
    assert [key for key in sorted(eyes.keys()) if "/record-" in key] == ["a/record-1.json"]
    assert eyes.open_uploads() == []


def test_nothing_but_objects_below_the_run_root_is_ever_created(
    s3_run: Run, proxy: FaultProxy
) -> None:
    """O067: no bucket is created and no directory marker is put."""
    runs.save(runs.behind(s3_run, proxy.endpoint), "a", 1)
    runs.wait(runs.behind(s3_run, proxy.endpoint), "a")
    bucket, _, prefix = s3_run.url.removeprefix("tiered::s3://").partition("/")
    puts = proxy.requests("PUT")
    assert len(puts) == 4, "manifest, pack, once more the manifest to see it refused, record"
    for put in puts:
        assert put.path.startswith(f"/{bucket}/{prefix}/a/")
        assert not put.path.partition("?")[0].endswith("/")
        assert put.length > 0
    assert not proxy.requests("DELETE")
