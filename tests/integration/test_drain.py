"""Preemption: what becomes durable before a deadline or after SIGTERM; the rest is safe."""

import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter, UnavailableError
from examples.seaweed import SeaweedS3
from tests.conftest import Run, flusher_pids
from tests.integration.test_cli import NEEDS_NO_TORCH, cli, credentials
from tests.support import runs
from tests.support.fault_proxy import STALL, Fault, FaultProxy, Request
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

pytestmark = pytest.mark.slow
MIB = 1 << 20
_SLOW = {"FSSPEC_TIERED_LIMITS": json.dumps({"bytes_per_second_max": MIB, "term_grace_s": 60})}


def packs(proxy: FaultProxy) -> list[str]:
    """Return the checkpoints whose packs were sent, in that order."""
    sent = [r.path.split("/") for r in proxy.log if r.method == "PUT" and "/packs/" in r.path]
    return [parts[parts.index("packs") - 1] for parts in sent]


def is_pack_of(checkpoint_id: str) -> Callable[[Request], bool]:
    return lambda request: (
        request.method in ("PUT", "POST") and f"/{checkpoint_id}/packs/" in request.path
    )


def big(mib: int) -> dict[str, Any]:
    return {"w": torch.arange(mib * MIB // 8, dtype=torch.int64)}


def save_big(arguments: dict[str, Any], checkpoint_id: str, mib: int) -> None:
    with TieredWriter(**arguments) as writer:
        dcp.save(big(mib), checkpoint_id=checkpoint_id, storage_writer=writer)


def env_of(run: Run) -> dict[str, str]:
    assert run.server is not None
    return credentials(run.server)


def test_the_quickest_go_first_and_the_rest_waits_for_the_next_start(
    s3_run: Run, s3_server: SeaweedS3
) -> None:
    """A store that hangs on the large one: the drain ends all the same, and says what it kept."""
    with FaultProxy(s3_server.endpoint) as proxy:
        arguments = runs.behind(s3_run, proxy.endpoint)
        with runs.no_flusher(s3_run):
            save_big(arguments, "large-0", 4)
            runs.save(arguments, "small-1", 1)
            runs.save(arguments, "small-2", 2)
        stalled = proxy.inject(None, STALL, when=is_pack_of("large-0"))
        done = cli("drain", str(s3_run.local), "--deadline", "12s", env=env_of(s3_run))
        assert done.returncode == 4, done.stdout + done.stderr
        assert stalled.hits > 0
        # The two differ by a few bytes of index, so either may be the first.
        assert sorted(packs(proxy)[:2]) == ["small-1", "small-2"]
        assert set(packs(proxy)[2:]) == {"large-0"}
        assert sorted(Eyes(s3_run).check().commits) == ["small-1", "small-2"]
        told = dict(line.rsplit(": ", 2)[1:] for line in done.stdout.splitlines()[:2])
        assert told == {"small-1": "durable", "small-2": "durable"}
        assert "large-0: stays on this node, 4.2 MB" in done.stdout
        proxy.clear()
        again = cli("drain", str(s3_run.local), "--deadline", "1m", env=env_of(s3_run))
        assert again.returncode == 0, again.stdout + again.stderr
        assert "large-0: durable" in again.stdout
    assert len(Eyes(s3_run).check().commits) == 3


def test_a_drain_takes_over_the_flusher_that_uploads(s3_run: Run, s3_server: SeaweedS3) -> None:
    """The pack on its way is not lost: every pack is sent once."""
    ids = [f"step-{number}" for number in range(5)]
    with FaultProxy(s3_server.endpoint) as proxy:
        arguments = runs.behind(s3_run, proxy.endpoint)
        proxy.inject(None, Fault(delay_s=0.5), when=lambda request: "/packs/" in request.path)
        for number, checkpoint_id in enumerate(ids):
            runs.save(arguments, checkpoint_id, number)
        (pid,) = flusher_pids(s3_run.local)
        await_that("a pack on its way", lambda: packs(proxy))
        done = cli("drain", str(s3_run.local), "--deadline", "60s", env=env_of(s3_run))
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(packs(proxy)) == ids
    assert sorted(Eyes(s3_run).check().commits) == ids
    assert flusher_pids(s3_run.local) == []
    assert not Path(f"/proc/{pid}").exists()
    assert "killing" not in (runs.run_path(s3_run) / "flusher.log").read_text()


def test_a_pack_that_cannot_end_in_time_is_not_begun(s3_run: Run, s3_server: SeaweedS3) -> None:
    """Once the small ones have shown the rate: 96 MiB at 1 MiB/s are no use to begin with."""
    with FaultProxy(s3_server.endpoint) as proxy:
        arguments = runs.behind(s3_run, proxy.endpoint)
        with runs.no_flusher(s3_run):
            save_big(arguments, "large", 96)
            save_big(arguments, "small", 3)
        done = cli(
            "drain", str(s3_run.local), "--deadline", "0.5m", env={**env_of(s3_run), **_SLOW}
        )
        assert done.returncode == 4, done.stdout + done.stderr
        assert packs(proxy) == ["small"]
    assert "large: stays on this node" in done.stdout
    assert "not begun" in done.stdout
    assert sorted(Eyes(s3_run).check().commits) == ["small"]


def test_sigterm_in_the_middle_of_a_pack_finishes_it(s3_run: Run, s3_server: SeaweedS3) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        del request
        arrived.set()
        go_on.wait(60)

    with FaultProxy(s3_server.endpoint) as proxy:
        # However long the second save takes, the first pack is not given up for it.
        arguments = runs.with_limits(
            runs.behind(s3_run, proxy.endpoint), request_timeout_s=60.0, term_grace_s=60.0
        )
        proxy.inject(None, Fault(hook=hold), times=1, when=is_pack_of("a"))
        runs.save(arguments, "a", 1)
        assert arrived.wait(60)
        runs.save(arguments, "b", 2)
        (pid,) = flusher_pids(s3_run.local)
        os.kill(pid, signal.SIGTERM)
        go_on.set()
        await_that("its end", lambda: not Path(f"/proc/{pid}").exists())
        assert packs(proxy) == ["a", "b"]
    assert sorted(Eyes(s3_run).check().commits) == ["a", "b"]


def test_sigterm_cuts_off_what_does_not_end_in_time(s3_run: Run) -> None:
    """Nothing half-sent stays in the bucket, and the next flusher sends all of it."""
    limits = {"bytes_per_second_max": MIB, "part_bytes": 16 * MIB}
    slow = runs.with_limits(s3_run.arguments(), term_grace_s=1.0, **limits)
    save_big(slow, "a", 64)
    eyes = Eyes(s3_run)
    await_that("parts on their way", eyes.open_uploads)
    (pid,) = flusher_pids(s3_run.local)
    os.kill(pid, signal.SIGTERM)
    await_that("its end", lambda: not Path(f"/proc/{pid}").exists())
    assert not [key for key in eyes.keys() if "/packs/" in key]  # noqa: SIM118 - no mapping
    assert eyes.open_uploads() == []
    log = (runs.run_path(s3_run) / "flusher.log").read_text()
    assert "stays on this node: a:" in log
    quick = runs.with_limits(s3_run.arguments(), part_bytes=16 * MIB)
    runs.wait(quick, "a")
    assert list(eyes.check().commits) == ["a"]
    target = {"w": torch.zeros_like(big(64)["w"])}
    reader = TieredReader(**s3_run.durable_only())
    dcp.load(target, checkpoint_id="a", storage_reader=reader)
    reader.close()
    assert torch.equal(target["w"], big(64)["w"])


def io_priority(pid: int) -> int:
    """Return what ioprio_get(2) says of a thread."""
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    if number is None:
        pytest.skip("number of ioprio_get is not known here")
    return int(ctypes.CDLL(None).syscall(number, 1, pid))


def test_every_thread_of_a_flusher_steps_back(s3_run: Run) -> None:
    """O089: hashing and uploading cost a trainer nothing of its own interpreter."""
    # A slow upload in parts, so that there are threads to look at.
    limits = {"bytes_per_second_max": MIB, "part_bytes": 16 * MIB}
    save_big(runs.with_limits(s3_run.arguments(), **limits), "a", 64)
    await_that("parts on their way", Eyes(s3_run).open_uploads)
    (pid,) = flusher_pids(s3_run.local)
    threads = await_that(
        "part threads",
        lambda: (found := [int(t.name) for t in Path(f"/proc/{pid}/task").iterdir()])[1:] and found,
    )
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for thread in threads:
        assert os.getpriority(os.PRIO_PROCESS, thread) == min(19, mine + 15)
        assert os.sched_getscheduler(thread) == os.SCHED_BATCH
        assert io_priority(thread) == 2 << 13 | 7, "best effort, the lowest level"
    # A session of its own is a group of its own for the scheduler, and then that is what counts.
    autogroup = Path(f"/proc/{pid}/autogroup")
    assert not autogroup.exists() or autogroup.read_text().endswith(" nice 15\n")


def test_a_sidecar_flushes_what_comes_until_sigterm(s3_run: Run) -> None:
    """It starts before there is a run, serves later saves, and ends with code 0."""
    environment = {**os.environ, **env_of(s3_run), "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, "-c", NEEDS_NO_TORCH, "flush", str(s3_run.local), "--follow"]
    with ExitStack() as cleaning:
        sidecar = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        cleaning.callback(sidecar.kill)
        with runs.no_flusher(s3_run):
            runs.save(s3_run.arguments(), "a", 1)
        eyes = Eyes(s3_run)
        lock = runs.run_path(s3_run) / "flusher.lock"
        await_that("the commit", lambda: eyes.commits("a"))
        assert json.loads(lock.read_text())["pid"] == sidecar.pid
        runs.save(s3_run.arguments(), "b", 2)
        await_that("the next commit", lambda: eyes.commits("b"))
        assert json.loads(lock.read_text())["pid"] == sidecar.pid, "the save started no other"
        runs.save(s3_run.arguments(), "c", 3)
        sidecar.send_signal(signal.SIGTERM)
        said = sidecar.communicate(timeout=60)[0]
        assert sidecar.returncode == 0, said
    assert sorted(eyes.check().commits) == ["a", "b", "c"]
    text = (runs.run_path(s3_run) / "flusher-metrics.prom").read_text()
    (objects,) = [one for one in text.splitlines() if one.startswith("dcp_tiered_objects_total{")]
    assert float(objects.rpartition(" ")[2]) == len(s3_run.keys())
    assert runs.load(s3_run.durable_only(), "c") == 3


def test_a_trainer_without_rights_leaves_all_flushing_to_a_sidecar(
    s3_run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no credentials at all, starts no flusher, and says while nobody flushes."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("FSSPEC_TIERED_FLUSHER", "external")
    bare = {name: value for name, value in s3_run.options["s3"].items() if name == "endpoint_url"}
    trainer = {**s3_run.arguments(), "s3": bare}
    command = [sys.executable, "-c", NEEDS_NO_TORCH, "flush", str(s3_run.local), "--follow"]
    with ExitStack() as cleaning:
        writer = cleaning.enter_context(TieredWriter(**trainer))

        def save(number: int) -> None:
            name = f"step-{number}"
            dcp.save(runs.state_of(number), checkpoint_id=name, storage_writer=writer)

        save(1)
        with pytest.raises(UnavailableError, match="no flusher runs on this node"):
            writer.wait("durable", "step-1", timeout_s=3)
        assert flusher_pids(s3_run.local) == []
        (warning,) = [r.getMessage() for r in caplog.records if "no flusher" in r.getMessage()]
        assert f"dcp-tiered flush {s3_run.local} --follow" in warning
        sidecar = subprocess.Popen(command, env={**os.environ, **env_of(s3_run)})
        cleaning.callback(sidecar.wait)
        cleaning.callback(sidecar.kill)
        writer.wait("durable", "step-1", timeout_s=60)
        save(2)
        writer.wait("durable", "step-2", timeout_s=60)
        assert flusher_pids(s3_run.local) == []
    assert sorted(Eyes(s3_run).check().commits) == ["step-1", "step-2"]


@pytest.mark.parametrize("text", ["", "110", "1h", "-5s", "0s", "2 m", "soon"])
def test_what_is_a_deadline(text: str, tmp_path: Path) -> None:
    done = cli("drain", str(tmp_path), "--deadline", text)
    if text == "110":
        assert done.returncode == 3, "no run there"
    else:
        assert done.returncode == 2, done.stderr
