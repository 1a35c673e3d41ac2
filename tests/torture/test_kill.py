"""Kill -9 of trainer, flusher and both, at moments found by looking at the storage (I11, O046)."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUICK, Run, end_flushers, flusher_pids
from tests.support import storage_check, workers
from tests.support.workers import await_that
from tests.torture import trainer

LIMITS = replace(QUICK, linger_s=0.5, idle_exit_s=1.0, poll_s=0.02, part_bytes=5 << 20)
MOMENTS = ("temporary", "sealed", "published", "manifest", "pack", "record", "any")
VICTIMS = ("trainer", "flusher", "both", "group")


@dataclass
class Torture:
    """A run, its trainer, and a random source that makes a failure repeatable."""

    run: Run
    rng: random.Random
    journal: Path
    process: BaseProcess | None = None

    def __post_init__(self) -> None:
        self.eyes = storage_check.Eyes(self.run)
        self._committed: set[str] = set()
        self._answers: Any = None  # dropped while the process starts, it would not start

    def start(self, note: str, steps: int = 10_000) -> None:
        arguments = {**self.run.arguments(), "limits": LIMITS}
        self.process, self._answers = workers.start(
            trainer.train, arguments, self.journal, steps, note
        )

    def lines(self) -> list[dict[str, Any]]:
        """Return the journal; its last line may be cut off by the kill."""
        found = []
        for line in self.journal.read_text().splitlines() if self.journal.exists() else []:
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def saved(self) -> int:
        return max((line["saved"] for line in self.lines() if "saved" in line), default=0)

    def published(self) -> dict[str, Any]:
        with suppress(ValueError, FileNotFoundError):
            return storage_check.published(self.run.run_path())
        return {}

    def is_now(self, moment: str, known: frozenset[str]) -> bool:
        """Tell whether something new of a kind is to be seen on the storage."""
        if moment == "temporary":
            return self._writes_a_temporary()
        return bool(self._names(moment) - known)

    def _writes_a_temporary(self) -> bool:
        assert self.process is not None
        with suppress(OSError):
            for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith(str(self.run.local)) and "(deleted)" in target:
                        return True
        return False

    def names(self, moment: str) -> frozenset[str]:
        return frozenset() if moment in ("temporary", "any") else frozenset(self._names(moment))

    def _names(self, moment: str) -> set[str]:
        if moment in ("sealed", "published"):
            pattern = "*/step-*/*.shard" if moment == "sealed" else "*/step-*/published-*.json"
            return {str(path) for path in self.run.local.glob(pattern)}
        part = {"manifest": "/manifest-", "pack": "/packs/", "record": "/record-"}[moment]
        return {key for key in sorted(self.eyes.keys()) if part in key}

    def kill(self, victim: str) -> None:
        assert self.process is not None
        if victim == "group":
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        elif victim != "flusher":
            os.kill(self.process.pid or 0, signal.SIGKILL)
        if victim in ("flusher", "both"):
            for pid in flusher_pids(self.run.local):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end_trainer(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def undurable(self) -> list[str]:
        """Return the ids whose published attempt has no commit, by what the storage says."""
        found = []
        for name, meta in self.published().items():
            if meta["attempt"] not in self._committed:
                self._committed |= {commit["attempt"] for commit in self.eyes.commits(name)}
            if meta["attempt"] not in self._committed:
                found.append(name)
        return found


@pytest.fixture
def torture(
    request: pytest.FixtureRequest, tmp_path: Path, local: Path
) -> Iterator[Callable[[str, int], Torture]]:
    started: list[Torture] = []

    def make(kind: str, seed: int) -> Torture:
        run: Run = request.getfixturevalue(kind)
        started.append(Torture(run, random.Random(seed), tmp_path / "journal"))
        return started[-1]

    yield make
    for one in started:
        one.end_trainer()


def run_rounds(torture: Torture, plan: list[tuple[str, str]]) -> None:
    """Kill once per round, check the storage after each, and let the next start go on."""
    for number, (moment, victim) in enumerate(plan):
        note = f"round {number}: {victim} at {moment}"
        torture.start(note)
        await_that(f"{note}: start", lambda note=note: is_started(torture, note))
        # What earlier rounds published is finished by this start, before the next kill.
        before = torture.undurable()
        await_that(note, lambda before=before: not set(torture.undurable()) & set(before))
        known = torture.names(moment)
        await_that(note, lambda moment=moment, known=known: is_due(torture, moment, known))
        time.sleep(torture.rng.choice((0.0, torture.rng.uniform(0, 0.05), torture.rng.random())))
        torture.kill(victim)
        check(torture)
        if victim == "flusher":
            saved = torture.saved()
            await_that(note, lambda saved=saved: torture.saved() > saved)
        torture.end_trainer()


def is_started(torture: Torture, note: str) -> bool:
    assert torture.process is not None
    assert torture.process.exitcode is None, f"{note}: the trainer ended by itself"
    return any(line.get("note") == note for line in torture.lines())


def is_due(torture: Torture, moment: str, known: frozenset[str]) -> bool:
    return moment == "any" or torture.is_now(moment, known)


def check(torture: Torture) -> None:
    """Verify what any kill must leave: true commits, and a newest checkpoint that is whole."""
    saved, run = torture.saved(), torture.run
    committed = torture.eyes.check_new().commits
    newest = trainer.load_newest({**run.arguments(), "limits": LIMITS})
    assert (newest or 0) >= saved, "a finished save is not loadable on its node"
    durable = trainer.load_newest(run.durable_only())
    steps = [int(name.removeprefix("step-")) for name in committed]
    assert (durable or 0) >= max(steps, default=0)


def finish(torture: Torture) -> None:
    """Let a last start finish everything, then lose the node and resume from the durable tier."""
    torture.start("last", steps=2)
    assert torture.process is not None
    torture.process.join(100)
    assert torture.process.exitcode == 0
    await_that("all durable", lambda: not torture.undurable())
    last = torture.saved()
    checked = torture.eyes.check()
    assert {name: meta["attempt"] for name, meta in torture.published().items()} == {
        name: checked.attempts(name)[-1] for name in checked.commits
    }
    end_flushers(torture.run.local)
    for path in sorted(torture.run.local.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert trainer.load_newest({**torture.run.arguments(), "limits": LIMITS}) == last


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_survives_kills(kind: str, torture: Callable[[str, int], Torture]) -> None:
    """O044, O046, O050, O052."""
    one = torture(kind, 20240607)
    run_rounds(
        one,
        [
            ("temporary", "trainer"),
            ("pack", "both"),
            ("published", "group"),
            ("manifest", "flusher"),
            ("sealed", "both"),
        ],
    )
    finish(one)


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_survives_many_kills(kind: str, torture: Callable[[str, int], Torture]) -> None:
    """O044, O046; set TORTURE_SEED to repeat a failure."""
    seed = int(os.environ.get("TORTURE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"TORTURE_SEED={seed}")
    one = torture(kind, seed)
    plan = [(one.rng.choice(MOMENTS), one.rng.choice(VICTIMS)) for _ in range(30)]
    run_rounds(one, plan)
    finish(one)
