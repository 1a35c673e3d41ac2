"""SIGKILL of the flusher at any moment: the next one sends what is missing, and nothing twice."""

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredWriter, config, stack
from tests.conftest import Run, flusher_pids
from tests.support import runs
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

RANKS = 3
VALUES = 2_200_000
PART_BYTES = 16 << 20


def save(rank: int, arguments: dict[str, Any]) -> None:
    state = {f"of-{rank}": torch.arange(VALUES, dtype=torch.int64) * (rank + 3)}
    with TieredWriter(**arguments) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)


def kill_flusher(run: Run) -> None:
    for pid in flusher_pids(run.local):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await_that("its end", lambda: not flusher_pids(run.local))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_only_what_is_missing_is_sent_again(s3_run: Run) -> None:
    rng = random.Random(3)
    limits = {"pack_bytes_target": 4 << 20, "part_bytes": PART_BYTES, "poll_s": 0.02}
    arguments = runs.with_limits(s3_run.arguments(), **limits)
    with runs.no_flusher(s3_run):
        run_ranks(RANKS, save, arguments)
    eyes, kills = Eyes(s3_run), 0
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy:
        proxy.inject("UploadPart", Fault(delay_s=0.05))
        options = {"s3": {**s3_run.options["s3"], "endpoint_url": proxy.endpoint}}
        settings = config.settings(
            s3_run.url, str(s3_run.local), options, limits=arguments["limits"]
        )
        while not eyes.commits("a"):
            goal = len(proxy.log) + 3 + rng.randint(1, 20)  # it begins with three questions
            keeper = stack.build(settings)

            def reached(goal: int = goal, keeper: stack.Stack = keeper) -> bool:
                keeper.keep_flusher()  # not at once: a process that was killed takes time to end
                return len(proxy.log) >= goal or bool(eyes.commits("a"))

            await_that("requests", reached)
            kill_flusher(s3_run)
            kills += 1
            eyes.check()
        log = list(proxy.log)
    (commit,) = eyes.check().commits["a"]
    assert len(commit["packs"]) == RANKS
    assert eyes.open_uploads() == [], "a part that nobody will ever ask for costs money"
    sent: Counter[str] = Counter()
    whole: set[str] = set()
    for request in log:
        if request.operation == "UploadPart":
            assert request.key not in whole, "sent although it was there"
            sent[request.key] += request.length
        elif request.operation == "CompleteMultipartUpload" and request.status == 200:
            whole.add(request.key)
    lengths = {pack["name"].rpartition("/")[2]: pack["length"] for pack in commit["packs"]}
    assert sent.keys() == lengths.keys()
    assert kills > 1
    assert sum(sent.values()) <= sum(lengths.values()) + kills * max(lengths.values())


def test_uploads_of_a_dead_flusher_are_aborted_however_it_grouped(s3_run: Run) -> None:
    """What it had begun may have another name than anything that is uploaded now."""
    assert s3_run.server is not None
    with runs.no_flusher(s3_run):
        runs.save(s3_run.arguments(), "a", 1)
    settings = config.settings(s3_run.url, str(s3_run.local), s3_run.options)
    node, other = stack.build(settings).node(), "0" * 12
    bucket, _, prefix = s3_run.url.removeprefix("tiered::s3://").partition("/")
    eyes = Eyes(s3_run)
    for owner in (node, node, other):
        key = f"{prefix}/a/packs/{owner}-{'5' * 16}.pack"
        begun = eyes.client.create_multipart_upload(Bucket=bucket, Key=key)
        eyes.client.upload_part(
            Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x"
        )
    assert len(eyes.open_uploads()) == 3
    runs.wait(s3_run.arguments(), "a")
    (left,) = eyes.open_uploads()
    assert f"packs/{other}-" in left, "of a node that is alive, for all we know"
    assert list(eyes.check().commits) == ["a"]
