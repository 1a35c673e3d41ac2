"""G4: how fast does training go on while a save is written and flushed?

Ours: steps per second of a loop of plain Python, which needs the interpreter all the time, from
the return of `dcp.async_save` to the end of the save; and, with a durable tier in a directory of
the same disk or in a bucket, to the commit there, which the flusher's process makes. Reference: the
same loop for as long, with nothing else going on, before and after. Stock: `dcp.async_save` with
`FileSystemWriter`. 1 would be not to notice. The longest step, and the seconds of training lost
per GB, are in the details. The S3 server is on this machine, and runs only when nobody else wants
a core (SCHED_IDLE): what it takes would be taken on another machine.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.flush_vs_clients import seaweed
from benchmarks.harness import Answer, Options, Pair, Sample, Step
from benchmarks.time_to_durable import OursOnS3

_TURNS = 2000
_IDLE_S_MIN = 0.25
_ASK_S = 0.02
_SAVE_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Loop:
    """How a stretch of training went."""

    steps: int
    seconds: float
    longest_s: float
    """Of one step."""

    @property
    def sample(self) -> Sample:
        """One step, so that speeds are rates."""
        return Sample(self.seconds / self.steps)


def train(ended: Callable[[], bool]) -> Loop:
    """Train, without ever waiting, until `ended` says so, which is asked now and then."""
    weights = list(range(64))
    begun = last = asked = time.perf_counter()
    steps, longest = 0, 0.0
    while True:
        value = 1
        for turn in range(_TURNS):
            value = (value * 1103515245 + weights[turn & 63]) & 0x7FFFFFFF
        weights[value & 63] = value
        steps += 1
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if now - asked > _ASK_S:
            if ended():
                return Loop(steps, now - begun, longest)
            asked = now
            assert now - begun < _SAVE_S_MAX, "the save does not end"


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    with seaweed(options.directory / "server") as server:
        _step_back(server.process.pid)
        return _measure(options, server)


def _step_back(pid: int) -> None:
    """Let a process run only when nobody else wants to; its later threads inherit that."""
    # Its session is a group of its own for the scheduler (autogroup), which has to step back too.
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def _measure(options: Options, server: Any) -> list[Answer]:
    state = harness.make_state(options.bytes)
    backends: dict[str, Backend] = {
        "written": Ours(options.directory / "written"),
        "flushed": Ours(options.directory / "flushed", durable=True),
        "stored": OursOnS3(options.directory / "stored", server),
        "stock": Stock(options.directory / "stock"),
    }
    loops: dict[str, list[Loop]] = {name: [] for name in backends}
    last_s = _IDLE_S_MIN

    def idle() -> Sample:
        end = time.perf_counter() + max(last_s, _IDLE_S_MIN)
        return train(lambda: time.perf_counter() >= end).sample

    def busy(name: str) -> Sample:
        nonlocal last_s
        backend = backends[name]
        future = backend.begin(state)
        flushing = backend if isinstance(backend, Ours) and name != "written" else None
        loop = train(lambda: future.done() and (flushing is None or flushing.is_durable()))
        future.result()
        backend.remove()
        loops[name].append(loop)
        last_s = loop.seconds
        return loop.sample

    steps: dict[str, Step] = {name: partial(busy, name) for name in backends}
    measured = harness.interleave(idle, steps, options.pairs)
    for backend in backends.values():
        backend.close()
    size = harness.bytes_of(state)
    details = {
        name: _details(pairs, loops[name][-options.pairs :], size)
        for name, pairs in measured.items()
    }
    return [
        Answer(
            benchmark="trainer_interference",
            goal="G4",
            metric=f"training rate while a save is {name} / idle",
            unit="1",
            bytes=size,
            seconds=harness.median(pair.sample.seconds for pair in measured[name]),
            reference_seconds=harness.median(pair.reference for pair in measured[name]),
            ratio=harness.median(harness.speeds(measured[name])),
            ratios=harness.speeds(measured[name]),
            stock=harness.median(harness.speeds(measured["stock"])),
            target=0.95,
            bound="min",
            details={**details[name], "stock": details["stock"]},
        )
        for name in ("written", "flushed", "stored")
    ]


def _details(pairs: list[Pair], loops: list[Loop], size: int) -> dict[str, float]:
    speeds = zip(harness.speeds(pairs), loops, strict=True)
    lost = harness.median(max(1 - speed, 0.0) * loop.seconds for speed, loop in speeds)
    return {
        "ran_s": harness.median(loop.seconds for loop in loops),
        "lost_s_per_gb": lost / (size / harness.GB),
        "longest_step_s": max(loop.longest_s for loop in loops),
    }


if __name__ == "__main__":
    sys.exit(harness.main({"trainer_interference": run}, __doc__))
