"""Kill a training run twice, lose its node, and show that not a bit of the loss changes.

    python examples/demo.py

Trains a 10.7 M parameter GPT with FSDP2 on CPU ranks (`train.py`) against a real S3 server:

    reference   2 ranks, never interrupted
    crash       2 ranks, SIGKILLed in the middle of a step
    local       2 ranks, resumes from the local tier; SIGKILLed again once a save is durable
    durable     the local tier is gone; 3 ranks resume from S3 and finish

Every step's loss is held against the reference: the same bits on the same number of ranks, and
within a tolerance on another number, where sums are taken in another order. What the checks go by
is read without the package: the trainer's metrics, the bucket through plain botocore, and the
server's own count of the bytes it sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seaweed import REGION, SeaweedS3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = Path(__file__).resolve().parent
WORK = EXAMPLES.parent / ".demo"
LOCAL = WORK / "local"
BUCKET = "ckpt"
STEPS = 21
SAVE_EVERY = 3
RANKS = 2
# Measured over these steps: sums in another order (3 ranks, 1 rank) change a loss by up to 5e-6 of
# it; resuming with Adam's step count off by one changes it by 2e-3, with stale weights by 1e-2.
TOLERANCE = 1e-4
PHASE_S_MAX = 300.0
MIB = 1 << 20

# Where there is no terminal, 80 columns are assumed, too few for the tables.
console = Console(width=None if sys.stdout.isatty() else 100)


class DemoError(Exception):
    """Something that the demo promises is not so."""


def check(holds: bool, message: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Stop the demo with a message unless a condition holds."""
    if not holds:
        raise DemoError(message)


@dataclass(slots=True)
class Phase:
    """One run of the trainer, and what it left in the metrics."""

    name: str
    ranks: int
    seconds: float = 0.0
    bytes_from_s3: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> Path:
        """The file to which rank 0 appends."""
        return WORK / f"{self.name}.jsonl"

    @property
    def log(self) -> Path:
        """What torchrun and the ranks have printed."""
        return WORK / f"{self.name}.log"

    @property
    def resumed(self) -> str | None:
        """The checkpoint that the run started from."""
        checkpoint: str | None = self.lines[0]["resumed"]
        return checkpoint

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {line["step"]: line["loss"] for line in self.lines if "loss" in line}

    @property
    def stalls_s(self) -> list[float]:
        """How long each save kept training waiting."""
        return [line["stall_s"] for line in self.lines if "stall_s" in line]

    @property
    def saves(self) -> list[str]:
        """Ids of the checkpoints that were saved, in order."""
        return [f"step-{line['step']}" for line in self.lines if "stall_s" in line]

    def read_metrics(self) -> None:
        """Take in the whole lines written so far."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        whole, _, _ = text.rpartition("\n")
        self.lines = [json.loads(line) for line in whole.splitlines()]


class Trainer:
    """torchrun with `train.py` under it."""

    def __init__(self, phase: Phase, store: SeaweedS3, run: str, *, save_every: int) -> None:
        self.phase = phase
        self._began = time.monotonic()
        self._line_seen = self._began
        self._step_s = PHASE_S_MAX  # the shortest so far
        threads = max(1, len(os.sched_getaffinity(0)) // phase.ranks)
        environment = {
            "AWS_ACCESS_KEY_ID": store.access_key,
            "AWS_SECRET_ACCESS_KEY": store.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(threads),
        }
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(phase.ranks)),
            str(EXAMPLES / "train.py"),
            *("--url", f"tiered::s3://{BUCKET}/{run}"),
            *("--local-dir", str(LOCAL)),
            *("--endpoint", store.endpoint),
            *("--steps", str(STEPS)),
            *("--save-every", str(save_every)),
            *("--metrics", str(phase.metrics)),
        ]
        with phase.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def follow(self, progress: Progress, until: Callable[[], bool]) -> None:
        """Show the steps until a condition holds.

        Raises:
            DemoError: the trainer ended, or hung, before that.
        """
        phase = self.phase
        task = progress.add_task(f"{phase.name}, {phase.ranks} ranks", total=STEPS, loss="")
        while True:
            ended = self._process.poll() is not None  # before the look at what it has written
            seen = len(phase.lines)
            phase.read_metrics()
            if len(phase.lines) > seen:
                now = time.monotonic()
                self._step_s = min(self._step_s, now - self._line_seen)
                self._line_seen = now
                last = phase.lines[-1]
                loss = f"loss {last['loss']:.4f}" if "loss" in last else f"from {phase.resumed}"
                progress.update(task, completed=last["step"], loss=loss)
            phase.seconds = time.monotonic() - self._began
            if until():
                progress.stop_task(task)
                return
            check(not ended, f"the trainer ended early (exit code {self._process.returncode})")
            check(phase.seconds < PHASE_S_MAX, f"the trainer is not done in {PHASE_S_MAX:.0f} s")
            time.sleep(0.02)

    def ended(self) -> bool:
        """Return whether all ranks have finished and succeeded."""
        return self._process.poll() == 0

    def kill_within_step(self, progress: Progress) -> None:
        """SIGKILL torchrun and every rank at a random instant of the step that has just begun."""
        phase = self.phase
        time.sleep(random.uniform(0.1, 0.9) * self._step_s)
        self.kill()
        phase.read_metrics()
        last = max(phase.losses)
        progress.console.print(
            f"[bold]{phase.name}[/]: killed {phase.ranks} ranks in step {last + 1};"
            f" last save {phase.saves[-1]}"
        )

    def kill(self) -> None:
        """SIGKILL torchrun and every rank, if they still run.

        torchrun gives each rank a process group of its own. The flusher is in none of these
        groups: it has a session of its own and lives on.
        """
        if self._process.poll() is not None:
            return
        groups = [self._process.pid, *children(self._process.pid)]
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait()
        wait_gone(groups)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that are still its own."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def wait_gone(pids: list[int], *, timeout_s: float = 10.0) -> None:
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + timeout_s
    while running := [pid for pid in pids if is_running(pid)]:
        check(time.monotonic() < deadline, f"processes {running} outlive SIGKILL")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process is there and not just waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def flushers() -> Iterator[int]:
    """Yield the flushers at work on the local tier."""
    for path in LOCAL.glob("*/flusher.lock"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pid = int(json.loads(path.read_text())["pid"])
            # The number may have been given to another process since.
            if b"dcp_tiered" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


def kill_flushers() -> None:
    """SIGKILL the flushers, as the loss of the node would."""
    pids = list(flushers())
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_gone(pids)


class Bucket:
    """What lies in the bucket under a run, seen without the package."""

    def __init__(self, store: SeaweedS3, run: str) -> None:
        self._client = store.client()
        self._prefix = f"{run}/"

    def objects(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the objects: by checkpoint, by name within it."""
        found: dict[str, dict[str, int]] = {}
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=BUCKET, Prefix=self._prefix):
            for item in page.get("Contents", []):
                checkpoint, _, name = item["Key"].removeprefix(self._prefix).partition("/")
                found.setdefault(checkpoint, {})[name] = item["Size"]
        return found

    def durable(self) -> list[str]:
        """Return the ids of the committed checkpoints, oldest first."""
        committed = [
            checkpoint
            for checkpoint, names in self.objects().items()
            if any(re.fullmatch(r"record-\d+\.json", name) for name in names)
        ]
        return sorted(committed, key=step_of)


def step_of(checkpoint: str) -> int:
    """Return the step in a checkpoint id, -1 if it is none of ours."""
    found = re.fullmatch(r"step-(\d+)", checkpoint)
    return int(found[1]) if found else -1


class Demo:
    """The four phases, in order, each with its checks."""

    def __init__(self, store: SeaweedS3, progress: Progress) -> None:
        self.store = store
        self.progress = progress
        self.bucket = Bucket(store, "run")
        self.phases: list[Phase] = []

    def reference(self) -> None:
        """Train to the end without a crash; one save, at the end."""
        with self.trainer("reference", RANKS, run="reference", save_every=STEPS) as trainer:
            trainer.follow(self.progress, trainer.ended)
        kill_flushers()

    def crash(self) -> None:
        """Kill a fresh run in the middle of a step, after its second save."""
        with self.trainer("crash", RANKS) as trainer:
            phase = trainer.phase
            trainer.follow(self.progress, lambda: len(phase.saves) > 1 and between_saves(phase))
            trainer.kill_within_step(self.progress)
        check(phase.resumed is None, f"a fresh run resumed from {phase.resumed}")
        check(any(flushers()), "the flusher has died with the trainer")

    def resume_from_local(self) -> None:
        """Go on from the last save; kill again once a save of this phase is durable.

        Whether the second save gets there before the node is lost is a race, as in real life.
        """
        with self.trainer("local", RANKS) as trainer:
            phase = trainer.phase
            trainer.follow(
                self.progress,
                lambda: (
                    len(phase.saves) > 1
                    and between_saves(phase)
                    and not set(phase.saves).isdisjoint(self.bucket.durable())
                ),
            )
            trainer.kill_within_step(self.progress)
        self.check_resumed(self.phases[1].saves[-1])
        megabytes = phase.bytes_from_s3 / MIB
        check(megabytes < 1, f"a resume from the local tier read {megabytes:.1f} MiB from S3")

    def lose_node(self) -> None:
        """Lose the local tier and the flusher; what is durable by then is what there is."""
        kill_flushers()
        shutil.rmtree(LOCAL)
        LOCAL.mkdir()
        durable = self.bucket.durable()
        lost = [id_ for id_ in self.phases[-1].saves if id_ not in durable]
        self.progress.console.print(
            f"[bold]node lost[/]: durable {', '.join(durable)};"
            f" lost with the node {', '.join(lost) or 'nothing'}"
        )

    def resume_from_s3(self, ranks: int) -> None:
        """Go on from the newest durable checkpoint, resharded, to the end."""
        newest = self.bucket.durable()[-1]
        with self.trainer("durable", ranks) as trainer:
            trainer.follow(self.progress, trainer.ended)
        self.check_resumed(newest)
        phase = trainer.phase
        packs = [size for name, size in self.bucket.objects()[newest].items() if "packs/" in name]
        check(
            phase.bytes_from_s3 >= sum(packs) // 2,
            f"a resume from S3 read {phase.bytes_from_s3} bytes of {sum(packs)} from it",
        )
        final = f"step-{STEPS}"
        check(final in self.bucket.durable(), f"the run ended, but {final} is not durable")

    @contextlib.contextmanager
    def trainer(
        self, name: str, ranks: int, *, run: str = "run", save_every: int = SAVE_EVERY
    ) -> Iterator[Trainer]:
        """Start the trainer; leave none of its processes behind, and gather what it has done."""
        phase = Phase(name=name, ranks=ranks)
        self.phases.append(phase)
        before = self.store.bytes_sent(BUCKET)
        trainer = Trainer(phase, self.store, run, save_every=save_every)
        try:
            yield trainer
        finally:
            trainer.kill()
        phase.read_metrics()
        phase.bytes_from_s3 = self.store.bytes_sent(BUCKET) - before

    def check_resumed(self, expected: str) -> None:
        """Check that the newest phase went on from the expected checkpoint, at the step after."""
        phase = self.phases[-1]
        check(phase.resumed == expected, f"resumed from {phase.resumed}, expected {expected}")
        first = min(phase.losses)
        check(first == step_of(expected) + 1, f"{expected} was followed by step {first}")

    def agreement(self, phase: Phase) -> tuple[bool, str]:
        """Return whether a phase's losses agree with the reference, and how well."""
        reference = self.phases[0]
        pairs = [(loss, reference.losses[step]) for step, loss in phase.losses.items()]
        equal = sum(a.hex() == b.hex() for a, b in pairs)
        off = max(abs(a - b) / abs(b) for a, b in pairs)
        if phase.ranks == reference.ranks:
            return equal == len(pairs), f"{equal} of {len(pairs)}: same bits"
        return off <= TOLERANCE, f"off {off:.0e} of {TOLERANCE:.0e}"

    def phase_table(self) -> Table:
        """Return what each phase did."""
        table = Table(title="Phases", title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("phase", "ranks", "steps", "resumed from"):
            table.add_column(heading)
        for heading in ("S3 read", "save stall", "time"):
            table.add_column(heading, justify="right")
        table.add_column("loss and reference")
        for phase in self.phases:
            stalls = phase.stalls_s
            tier = "S3" if phase.bytes_from_s3 > MIB else "local"
            table.add_row(
                phase.name,
                str(phase.ranks),
                f"{min(phase.losses)}-{max(phase.losses)}",
                f"{phase.resumed}, {tier}" if phase.resumed else "-",
                mebibytes(phase.bytes_from_s3),
                f"{len(stalls)} x {statistics.median(stalls):.2f} s",
                f"{phase.seconds:.0f} s",
                "" if phase is self.phases[0] else self.agreement(phase)[1],
            )
        return table

    def bucket_table(self) -> Table:
        """Return what lies in the bucket."""
        table = Table(title=f"s3://{BUCKET}/run", title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("checkpoint", "objects", "size", "state"):
            table.add_column(heading, justify="left" if heading == "checkpoint" else "right")
        durable = self.bucket.durable()
        found = self.bucket.objects()
        for checkpoint in sorted(found, key=step_of):
            sizes = found[checkpoint].values()
            state = "durable" if checkpoint in durable else "incomplete, lost with the node"
            table.add_row(checkpoint, str(len(sizes)), mebibytes(sum(sizes)), state)
        total = [size for sizes in found.values() for size in sizes.values()]
        table.add_section()
        table.add_row("total", str(len(total)), mebibytes(sum(total)), "")
        return table


def between_saves(phase: Phase) -> bool:
    """Return whether neither the running step nor the last one ends in a save."""
    return phase.lines[-1]["step"] % SAVE_EVERY not in {0, SAVE_EVERY - 1}


def end_of(log: Path) -> str:
    """Return the last lines of a log, for a message; what ranks say before what torchrun says."""
    lines = log.read_text(errors="replace").splitlines()
    from_ranks = [line for line in lines if line.startswith("[rank")]
    return "\n".join([f"--- end of {log}", *(from_ranks or lines)[-20:]])


def mebibytes(size: int) -> str:
    """Return a size for people."""
    return f"{size / MIB:.1f} MiB"


def run(resume_ranks: int) -> None:
    """Run the phases and print what came out.

    Raises:
        DemoError: a check failed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with SeaweedS3(WORK / "store", buckets=(BUCKET,)) as store:
        console.print(f"SeaweedFS serves S3 on {store.endpoint}")
        with Progress(*columns, console=console) as progress:
            demo = Demo(store, progress)
            try:
                demo.reference()
                demo.crash()
                demo.resume_from_local()
                demo.lose_node()
                demo.resume_from_s3(resume_ranks)
            except (DemoError, BotoCoreError, OSError) as error:
                logs = [demo.phases[-1].log, *LOCAL.glob("*/flusher.log")]
                message = f"phase {demo.phases[-1].name}: {error}"
                raise DemoError("\n".join([message, *map(end_of, logs)])) from error
        console.print(demo.phase_table(), demo.bucket_table())
        for phase in demo.phases[1:]:
            agrees, how = demo.agreement(phase)
            check(agrees, f"{phase.name}: the losses are not those of the reference: {how}")


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume-ranks", type=int, choices=(1, 2, 3), default=3)
    options = parser.parse_args()
    # As with Ctrl-C, what was started is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    kill_flushers()  # of a demo that was killed
    shutil.rmtree(WORK, ignore_errors=True)
    LOCAL.mkdir(parents=True)
    began = time.monotonic()
    try:
        run(options.resume_ranks)
    except DemoError as error:
        console.print(f"FAILED: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        kill_flushers()
    for directory in (LOCAL, WORK / "store"):  # logs and metrics stay
        shutil.rmtree(directory)
    console.print(f"[green]all checks passed[/] in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
