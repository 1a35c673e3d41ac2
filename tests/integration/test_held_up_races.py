"""What becomes of an upload that is held up when its checkpoint is not wanted any more."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered import UnavailableError
from dcp_tiered.services import lanes
from examples.seaweed import SeaweedS3
from tests.conftest import Run, flusher_pids
from tests.support import runs
from tests.support.disks import Disk
from tests.support.fault_proxy import STALL, FaultProxy, Request
from tests.support.workers import await_that

QUICK_IDLE = {"request_timeout_s": 1.0, "idle_exit_s": 1.0}


@pytest.fixture
def run(tmp_path: Path, local: Path) -> Run:
    return Run(f"tiered::file://{tmp_path}/lustre/run", local)


def reports(run: Run) -> dict[str, dict[str, Any]]:
    path = runs.run_path(run) / "flusher-status.json"
    if not path.exists():
        return {}
    return {one["checkpoint_id"]: one for one in json.loads(path.read_bytes())["reports"]}


def await_held_up(run: Run, checkpoint_id: str) -> None:
    def said() -> bool:
        return "others begin beside it" in str(reports(run).get(checkpoint_id, {}).get("error"))

    await_that("an upload that is held up", said)


def test_a_newer_save_of_an_id_does_not_wait_for_an_upload_that_hangs(
    run: Run, target: Disk, tmp_path: Path
) -> None:
    arguments = runs.with_limits(run.arguments(), **QUICK_IDLE)
    packs = tmp_path / "lustre/run/step-1/packs"
    with target.frozen():
        runs.save(arguments, "step-1", 1)
        await_held_up(run, "step-1")
        # The next attempt at it comes to lie on another target.
        packs.unlink()
        packs.mkdir()
        runs.save(arguments, "step-1", 2, overwrite=True)
        await_that("the second save", lambda: run.commits("step-1"), 20)
        assert len(run.commits("step-1")) == 1
    await_that("the end of the flusher", lambda: flusher_pids(run.local) == [])
    assert reports(run) == {}
    assert runs.load(run.durable_only(), "step-1") == 2


def test_nothing_is_said_any_more_of_what_was_removed_by_hand(run: Run, target: Disk) -> None:
    arguments = runs.with_limits(run.arguments(), **QUICK_IDLE)
    with target.frozen():
        runs.save(arguments, "step-1", 1)
        await_held_up(run, "step-1")
        shutil.rmtree(runs.run_path(run) / "step-1")
        await_that("its report to go", lambda: reports(run) == {})
    runs.save(arguments, "step-2", 2)
    runs.wait(arguments, "step-2")
    await_that("the end of the flusher", lambda: flusher_pids(run.local) == [])
    assert reports(run) == {}
    assert run.commits("step-1") == []


def test_what_cannot_begin_asks_the_store_nothing_meanwhile(
    s3_run: Run, s3_server: SeaweedS3
) -> None:
    with FaultProxy(s3_server.endpoint) as proxy:
        arguments = runs.with_limits(
            runs.behind(s3_run, proxy.endpoint), request_timeout_s=30.0, flush_deadline_s=0.5
        )

        def is_pack(request: Request) -> bool:
            return request.method == "PUT" and "/packs/" in request.path

        stalled = proxy.inject(None, STALL, when=is_pack)
        with runs.no_flusher(s3_run):
            for number in range(6):
                runs.save(arguments, f"step-{number}", number)
        runs.save(arguments, "step-6", 6)
        await_that("four uploads", lambda: stalled.hits == 4)
        left = {"step-4", "step-5", "step-6"}
        await_that("the others' turn", lambda: left <= reports(s3_run).keys())
        asked = len(proxy.log)
        with pytest.raises(UnavailableError, match="not durable after 4 s"):
            runs.wait(arguments, "step-6", 4.0)
        more = Counter(request.path.split("?")[0] for request in proxy.log[asked:])
        assert more.total() < 10, more
        assert stalled.hits == 4
        proxy.clear()
        for number in range(7):
            runs.wait(arguments, f"step-{number}")


HANGS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from dcp_tiered.cli.ending import leave
from dcp_tiered.services.lanes import HeldUpError, Lanes

def upload(moved):
    with ThreadPoolExecutor() as pool:
        pool.submit(threading.Event().wait).result()

try:
    Lanes(0.1).run("a", "1", upload)
except HeldUpError:
    print("left alone")
sys.exit(leave(4))
"""


def test_a_process_ends_although_an_upload_hangs() -> None:
    """Python waits at its end for the threads of every pool."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (4, "left alone\n"), done.stderr
    assert not lanes.are_left()
