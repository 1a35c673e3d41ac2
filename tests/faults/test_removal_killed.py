"""Removals that are killed, that meet each other, or that a save overtakes (O047, I11)."""

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered import AbsentError, ConflictError
from dcp_tiered.cli import main
from dcp_tiered.services.removal import Remover
from tests.conftest import Run
from tests.support import runs, workers
from tests.support.fault_proxy import Fault, FaultProxy, Request
from tests.support.storage_check import Eyes
from tests.support.tiers import mounted_tier

RECORDS = {f"a/record-{number}.json" for number in (1, 2, 3)}
"""Two commits, and the one that withdraws them."""


@pytest.fixture
def saved(request: pytest.FixtureRequest) -> Run:
    """Two checkpoints, of which the older one was saved twice: two packs and two manifests."""
    run: Run = request.getfixturevalue(request.param)
    arguments = run.arguments()
    for number, name in enumerate(("a", "a", "b")):
        with runs.no_flusher(run):
            runs.save(arguments, name, number, overwrite=True)
        assert main(["flush", str(run.local), *credentials(run)]) == 0
    return run


def credentials(run: Run) -> list[str]:
    if run.server is None:
        return []
    return [f"-os3.{name}={run.options['s3'][name]}" for name in ("key", "secret")]


def everything(eyes: Eyes, below: str = "") -> dict[str, bytes]:
    """Return all objects of a run, or of a copy of it that lies below."""
    keys = sorted(key for key in eyes.keys() if key.startswith(below))  # noqa: SIM118 - no dict
    return {key.removeprefix(below): eyes.get(key) for key in keys}


def check_interrupted(
    run: Run, left: dict[str, bytes], before: dict[str, bytes], listed: dict[str, str]
) -> None:
    """Verify what any kill leaves: an id that is either whole or no checkpoint, and no other."""
    assert left.items() >= {k: v for k, v in before.items() if k.startswith("b/")}.items()
    withdrawn = "a/record-3.json" in left
    of_a = {key for key in left if key.startswith("a/")}
    packs = {key for key in of_a if key.endswith(".pack")}
    # Of an attempt without a commit, its manifest alone could tell whose they are.
    assert not packs or len([key for key in of_a if "/manifest-" in key]) == 2
    assert {key.removesuffix(".ok") for key in of_a if key.endswith(".ok")} <= packs
    assert listed == {"a": "expired" if withdrawn else "durable", "b": "durable"}
    assert runs.load(run.durable_only()) == 2
    if withdrawn:
        error = runs.error_of(runs.load, run.durable_only(), "a")
        assert type(error) is AbsentError
    else:
        assert left == before
        assert runs.load(run.durable_only(), "a") == 1


def check_finished(run: Run, left: dict[str, bytes], before: dict[str, bytes]) -> None:
    assert {key for key in left if not key.startswith("b/")} == RECORDS
    assert {key: left[key] for key in before if key in left} == {
        key: data for key, data in before.items() if key.startswith("b/") or key in RECORDS
    }
    assert runs.load(run.durable_only()) == 2


def listing(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, str]:
    capsys.readouterr()
    assert main(["ls", "--json", *command]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["checkpoint_id"]: line["state"] for line in lines}


def is_step(request: Request) -> bool:
    """Tell whether a request changes something, or is the last look for something to change."""
    return request.method in ("PUT", "DELETE") or request.operation == "ListMultipartUploads"


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["s3_run"], indirect=True)
def test_a_removal_from_s3_may_be_killed_anywhere(
    saved: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved.server is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", saved.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", saved.server.secret_key)
    eyes = Eyes(saved)
    before, bucket = everything(eyes), saved.server.buckets[0]
    own = ("-o", f"s3.endpoint_url={saved.server.endpoint}")
    for after in count():
        assert after < 30, "it never completes"
        below = f"copy-{after}/"
        run = replace(saved, url=f"{saved.url}/{below[:-1]}")
        prefix = run.url.removeprefix(f"tiered::s3://{bucket}/")
        for key, data in before.items():
            eyes.client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=data)
        upload = f"{prefix}/a/packs/{'b' * 12}-{'c' * 16}.pack"
        eyes.client.create_multipart_upload(Bucket=bucket, Key=upload)
        is_killed = removal_is_killed(run, after)
        if is_killed:
            listed = listing(capsys, run.url, *own)
            check_interrupted(run, everything(eyes, below), before, listed)
            assert main(["rm", run.url, "a", *own]) == 0
        check_finished(run, everything(eyes, below), before)
        assert eyes.open_uploads() == []
        if not is_killed:
            break
    assert after >= 6, "one record, two packs, two manifests, open uploads"


def removal_is_killed(run: Run, after: int) -> bool:
    """Remove in a process that is killed when it sends the next request after so many steps."""
    assert run.server is not None
    seen: list[Request] = []
    started = threading.Event()
    process: Any = None
    lock = threading.Lock()

    def kill_in_time(request: Request) -> None:
        with lock:
            seen.append(request)
            if len(seen) == after + 1:
                started.wait(20)
                os.kill(process.pid, signal.SIGKILL)

    with FaultProxy(run.server.endpoint) as proxy:
        proxy.inject(None, Fault(hook=kill_in_time), when=is_step)
        command = ["rm", run.url, "a", "-o", f"s3.endpoint_url={proxy.endpoint}"]
        process, _ = workers.start(main, [*command, *credentials(run)])
        started.set()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        return bool(process.exitcode)


@pytest.mark.parametrize("saved", ["posix_run"], indirect=True)
def test_a_removal_from_a_mount_may_be_killed_anywhere(
    saved: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    eyes, root = Eyes(saved), tmp_path / "lustre" / "run"
    before = everything(eyes)
    for after in count():
        assert after < 30, "it never completes"
        below = f"copy-{after}/"
        run = replace(saved, url=f"{saved.url}/{below[:-1]}")
        for name in "ab":
            shutil.copytree(root / name, root / below / name)
        process, _ = workers.start(remove_and_die, run.url, after)
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode:
            check_interrupted(run, everything(eyes, below), before, listing(capsys, run.url))
            assert main(["rm", run.url, "a"]) == 0
        check_finished(run, everything(eyes, below), before)
        if not process.exitcode:
            break
    assert after == 7, "one record, two packs, what vouches for them, two manifests"


def remove_and_die(url: str, after: int) -> None:
    """Remove, and die before Python makes the next change to a directory after so many."""
    seen = count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        is_step = event in ("os.link", "os.remove") and "/lustre/" in str(arguments)
        if is_step and next(seen) == after:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    main(["rm", url, "a"])


@pytest.mark.parametrize("saved", ["s3_run"], indirect=True)
def test_removals_at_once_all_succeed(saved: Run) -> None:
    assert saved.server is not None
    eyes = Eyes(saved)
    before = everything(eyes)
    own = ["-o", f"s3.endpoint_url={saved.server.endpoint}", *credentials(saved)]
    calls = [(main, (["rm", saved.url, "a", *own],)) for _ in range(4)]
    assert workers.run_together(calls) == [0] * 4
    check_finished(saved, everything(eyes), before)


@pytest.mark.parametrize("saved", ["posix_run"], indirect=True)
def test_what_was_saved_again_meanwhile_stays(saved: Run, tmp_path: Path) -> None:
    """Between the look and the record, and between the record and the deletion."""
    store = mounted_tier(tmp_path / "lustre" / "run", tmp_path / "lustre")
    remover = Remover(store)
    chosen = remover.choose(["a"])
    arguments, eyes = saved.arguments(), Eyes(saved)
    runs.save(arguments, "a", 5, overwrite=True)
    runs.wait(arguments, "a")
    before = everything(eyes)
    with pytest.raises(ConflictError, match="saved again") as raised:
        remover.withdraw(chosen)
    assert raised.value.hint
    assert everything(eyes) == before
    runs.save(arguments, "c", 6)
    runs.wait(arguments, "c")
    remover.withdraw(remover.choose(["a"]))
    runs.save(arguments, "a", 7, overwrite=True)
    runs.wait(arguments, "a")
    remover.delete(remover.plan("a"))
    assert runs.load(saved.durable_only(), "a") == 7
    assert runs.load(saved.durable_only(), "c") == 6
    assert len(eyes.check().commits["a"]) == 1
    names = [key for key in everything(eyes) if key.startswith("a/") and "record" not in key]
    assert len(names) == 3, "one pack, what vouches for it, one manifest"
