"""The flusher's process: one per node and run, bound to no trainer, gone when there is no work."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_tiered import Limits, TieredWriter
from dcp_tiered.services.lock import FlusherLock
from tests.conftest import QUICK, Run, flusher_pids
from tests.integration.test_cli import NEEDS_NO_TORCH
from tests.support import runs, workers
from tests.support.fault_proxy import FaultProxy
from tests.support.nodes import make_nodes, publish
from tests.support.storage_check import Eyes
from tests.support.workers import await_that


def processes_of(run: Run) -> list[int]:
    """Return the flusher processes of a run, by their log, whether they have the lock or not."""
    log, found = str(runs.run_path(run) / "flusher.log"), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            mine = b"flusher_process" in (entry / "cmdline").read_bytes()
            if mine and str((entry / "fd" / "2").readlink()) == log:
                found.append(int(entry.name))
    return found


def save_and_stay(arguments: dict[str, Any], checkpoint_id: str, gate: Any, path: str) -> int:
    """Save as a trainer that has things of its own open; return how often Python forked."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    with Path(path).open("w") as mine, TieredWriter(**arguments) as writer:
        os.set_inheritable(mine.fileno(), True)
        gate.wait(60)
        dcp.save(runs.state_of(1), checkpoint_id=checkpoint_id, storage_writer=writer)
        gate.wait(60)
        gate.wait(60)
    return len(forks)


@pytest.mark.slow
def test_eight_trainers_that_start_at_once_have_one_flusher(posix_run: Run, tmp_path: Path) -> None:
    gate = workers.context().Barrier(9)
    arguments = posix_run.arguments()
    started = [
        workers.start(save_and_stay, arguments, f"step-{n}", gate, str(tmp_path / f"open-{n}"))
        for n in range(8)
    ]
    try:
        gate.wait(60)
        gate.wait(60)
        await_that("all durable", lambda: len(Eyes(posix_run).check().commits) == 8)
        await_that("one process", lambda: len(processes_of(posix_run)) == 1)
        assert processes_of(posix_run) == flusher_pids(posix_run.local)
        log = (runs.run_path(posix_run) / "flusher.log").read_text()
        assert log.count("INFO dcp_tiered.flusher: flushing") == 1, log
        gate.wait(60)
        assert [answers.get() for _, answers in started] == [(True, 0)] * 8, "nothing forks"
    finally:
        for process, _ in started:
            process.kill()
            process.join()


@pytest.mark.slow
def test_a_flusher_has_nothing_of_its_trainer_and_outlives_it(
    posix_run: Run, tmp_path: Path
) -> None:
    """O036, O042: own session, no inherited descriptors, and kill -9 of the group spares it."""
    gate = workers.context().Barrier(2)
    opened = tmp_path / "of-the-trainer"
    # A durable tier that is away keeps the flusher at work until the trainer is gone.
    durable = Path(posix_run.url.removeprefix("tiered::file://")).parent
    durable.rename(durable.with_name("away"))
    trainer, _ = workers.start(save_and_stay, posix_run.arguments(), "a", gate, str(opened))
    try:
        gate.wait(60)
        gate.wait(60)
        (pid,) = await_that("a flusher", lambda: flusher_pids(posix_run.local))
        links = [
            str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.exists()
        ]
        directory = str(runs.run_path(posix_run))
        assert [link for link in links if not link.startswith((directory, "/dev/null"))] == []
        assert os.getsid(pid) != os.getsid(trainer.pid or 0)
        assert os.getpgid(pid) != os.getpgid(trainer.pid or 0)
        assert str(Path(f"/proc/{pid}/cwd").readlink()) == "/"
        assert f"PPid:\t{trainer.pid}" not in Path(f"/proc/{pid}/status").read_text()
        assert Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text() == ""
        os.killpg(trainer.pid or 0, signal.SIGKILL)
        trainer.join()
        durable.with_name("away").rename(durable)
        await_that("the commit", lambda: Eyes(posix_run).check().commits)
        assert flusher_pids(posix_run.local) == [pid]
        await_that("its end when idle", lambda: not flusher_pids(posix_run.local))
    finally:
        trainer.kill()
        trainer.join()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_save_at_the_moment_of_the_exit_is_flushed(posix_run: Run) -> None:
    """Nobody waits here, so nothing but the save itself can bring a flusher back."""
    rng = random.Random(7)
    limits = replace(posix_run.limits, idle_exit_s=0.05, poll_s=0.01, linger_s=0.05)
    arguments = {**posix_run.arguments(), "limits": limits}
    eyes, log, rounds = Eyes(posix_run), runs.run_path(posix_run) / "flusher.log", 0
    with TieredWriter(**arguments) as writer:
        # On a busy machine it takes longer until a flusher finds itself idle.
        while rounds < 30 or (log.read_text().count("ending") < 2 and rounds < 200):
            number, rounds = rounds, rounds + 1
            dcp.save(runs.state_of(number), checkpoint_id=f"s-{number}", storage_writer=writer)
            await_that(f"s-{number}", lambda n=number: eyes.commits(f"s-{n}"))
            time.sleep(rng.uniform(0.0, 0.12))
    assert len(eyes.check().commits) == rounds
    assert log.read_text().count("ending") > 1, "the exits were not near the saves"


def save_and_die(arguments: dict[str, Any], checkpoint_id: str) -> None:
    runs.save(arguments, checkpoint_id, 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_new_trainer_takes_over_from_an_orphan_with_bad_credentials(s3_run: Run) -> None:
    """The whole backlog gets durable, and `wait` does not tell of the old credentials."""
    secret = "a-secret-that-was-revoked"
    bad = {**s3_run.arguments(), "s3": {**s3_run.options["s3"], "secret": secret}}
    trainer, _ = workers.start(save_and_die, bad, "old")
    trainer.join()
    (orphan,) = await_that("an orphan", lambda: flusher_pids(s3_run.local))
    log = runs.run_path(s3_run) / "flusher.log"
    await_that("a refusal", lambda: "access denied" in log.read_text())
    runs.save(s3_run.arguments(), "new", 2)
    runs.wait(s3_run.arguments(), "new")
    runs.wait(s3_run.arguments(), "old")
    assert sorted(Eyes(s3_run).check().commits) == ["new", "old"]
    assert flusher_pids(s3_run.local) != [orphan]
    assert "killing it" not in log.read_text(), "it handed over by itself"


@pytest.mark.slow
def test_a_flusher_that_hangs_is_replaced(posix_run: Run) -> None:
    arguments = runs.with_limits(posix_run.arguments(), takeover_s=1.0)
    runs.save(arguments, "a", 1)
    runs.wait(arguments, "a")
    (hung,) = flusher_pids(posix_run.local)
    os.kill(hung, signal.SIGSTOP)
    runs.save(arguments, "b", 2)
    runs.wait(arguments, "b")
    assert sorted(Eyes(posix_run).check().commits) == ["a", "b"]
    await_that("one", lambda: processes_of(posix_run) == flusher_pids(posix_run.local))
    assert hung not in processes_of(posix_run)


def test_secrets_never_reach_the_disk_or_the_process_table(s3_run: Run) -> None:
    """O124, O125: looked for in every file of the local tier and in what `ps` shows."""
    secret = s3_run.options["s3"]["secret"]
    token = "a-session-token-of-nobody"
    wrong = {**s3_run.options["s3"], "token": token}
    runs.save(s3_run.arguments(), "a", 1)
    runs.wait(s3_run.arguments(), "a")
    (pid,) = flusher_pids(s3_run.local)
    shown = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    refused = {**s3_run.arguments(), "s3": {**wrong, "secret": "w" * 40}}
    other = {**refused, "url": f"{s3_run.url}-other"}
    runs.save(other, "b", 2)
    error = runs.error_of(runs.wait, other, "b", 20)
    files = [path for path in s3_run.local.rglob("*") if path.is_file()]
    shown += [path.read_bytes() for path in files]
    with TieredWriter(**other) as writer:
        shown += [repr(writer).encode(), repr(writer.status()).encode()]
    shown += [str(error).encode(), repr(error).encode()]
    for text in shown:
        for hidden in (secret, token, "w" * 40):
            assert hidden.encode() not in text
    for path in s3_run.local.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, f"others can read {path}"
    assert len(Eyes(s3_run).check().commits) == 1


@pytest.mark.slow
def test_a_flusher_leaves_its_metrics(s3_run: Run) -> None:
    """What it says that it sent is what the store has."""
    arguments = runs.with_limits(s3_run.arguments(), idle_exit_s=60.0)
    for number, name in enumerate("ab"):
        runs.save(arguments, name, number)
        runs.wait(arguments, name)
    (pid,) = flusher_pids(s3_run.local)
    os.kill(pid, signal.SIGTERM)
    await_that("the end of the flusher", lambda: not flusher_pids(s3_run.local))
    text = (s3_run.run_path() / "flusher-metrics.prom").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    run = f'run="{s3_run.url}"'
    assert all(run in line for line in lines)
    said = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    keys = s3_run.keys()
    packs = [size for key, size in keys.items() if "/packs/" in key]
    put = said[f'dcp_tiered_requests_total{{{run},operation="put_object",outcome="ok"}}']
    assert put == len(keys) == 6, "manifest, pack and record of each, one request for each"
    assert said[f"dcp_tiered_objects_total{{{run}}}"] == len(keys)
    assert said[f"dcp_tiered_upload_bytes_total{{{run}}}"] == sum(packs)
    assert said[f"dcp_tiered_commits_total{{{run}}}"] == 2
    assert said[f"dcp_tiered_pending_checkpoints{{{run}}}"] == 0


@pytest.mark.slow
def test_a_killed_flusher_is_replaced_while_the_trainer_trains(s3_run: Run) -> None:
    """Nothing calls the writer after the save."""
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy:
        proxy.add("stall", "PUT", "/packs/")
        arguments = runs.with_limits(runs.behind(s3_run, proxy.endpoint), idle_exit_s=60.0)
        with TieredWriter(**arguments) as writer:
            writer.close()  # and is used again
            dcp.save(runs.state_of(1), checkpoint_id="a", storage_writer=writer)
            await_that("a pack on its way", lambda: proxy.requests("PUT", "/packs/"))
            (pid,) = flusher_pids(s3_run.local)
            os.kill(pid, signal.SIGKILL)
            await_that("the commit", lambda: s3_run.commits("a"))
            (other,) = flusher_pids(s3_run.local)
            assert other != pid
            # One that ends by itself is not missed.
            os.kill(other, signal.SIGTERM)
            await_that("the end of the flusher", lambda: not flusher_pids(s3_run.local))
            lock = FlusherLock(s3_run.run_path())
            await_that("the lock", lambda: lock.holder() is None)
            assert not lock.was_killed()


@pytest.mark.slow
@pytest.mark.parametrize("sidecar", [False, True])
def test_a_save_wakes_a_flusher_that_looks_seldom(
    posix_run: Run, tmp_path: Path, sidecar: bool
) -> None:
    """Ours and a sidecar alike: the second save would else wait for an hour."""
    limits = {**asdict(posix_run.limits), "poll_s": 3600.0, "idle_exit_s": 7200.0}
    eyes = Eyes(posix_run)
    with ExitStack() as cleaning:
        arguments = {**posix_run.arguments(), "limits": Limits(**limits)}
        if sidecar:
            arguments["flusher"] = "external"
        writer = cleaning.enter_context(TieredWriter(**arguments))
        dcp.save(runs.state_of(1), checkpoint_id="a", storage_writer=writer)
        if sidecar:
            configured = tmp_path / "fsspec"
            configured.mkdir()
            (configured / "tiered.json").write_text(json.dumps({"tiered": {"limits": limits}}))
            command = [
                sys.executable,
                "-c",
                NEEDS_NO_TORCH,
                "flush",
                str(posix_run.local),
                "--follow",
            ]
            process = subprocess.Popen(
                command,
                env={**os.environ, "FSSPEC_CONFIG_DIR": str(configured)},
            )
            cleaning.callback(process.wait)
            cleaning.callback(process.kill)
        await_that("the first commit", lambda: eyes.commits("a"))
        (lock,) = posix_run.local.glob("*/flusher.lock")
        pid = json.loads(lock.read_text())["pid"]
        dcp.save(runs.state_of(2), checkpoint_id="b", storage_writer=writer)
        await_that("the second commit", lambda: eyes.commits("b"))
        assert json.loads(lock.read_text())["pid"] == pid


def test_a_flusher_is_idle_since_its_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saves more often than that keeps one flusher, and its connections."""
    (node,) = make_nodes(1, tmp_path, tmp_path / "run", replace(QUICK, poll_s=0.001))
    clock = [1000.0]
    its_time = SimpleNamespace(time=time.time, time_ns=time.time_ns, monotonic=lambda: clock[0])
    monkeypatch.setattr("dcp_tiered.services.flusher.time", its_time)
    eyes = Eyes(Run(url=f"tiered::file://{tmp_path / 'run'}", local=node.local.root))
    seen: list[tuple[float, int]] = []

    def after_step() -> None:
        clock[0] += 1.0
        seen.append((clock[0], len(eyes.check().commits)))
        if clock[0] == 1009.0:
            node.seal("a", 1, "0" * 16)
            publish([node], "a")

    node.flusher.run(10.0, after_step)
    assert seen[8:10] == [(1009.0, 0), (1010.0, 1)]
    assert clock[0] == 1019.0
