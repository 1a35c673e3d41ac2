"""G10: how much memory does a save take, in states?

Ours: the highest resident set over a `dcp.save`, and over three `dcp.async_save`s from before
`writer.prewarm` on, less the resident set before, in a process each that has saved nothing but one
state of 1 MiB, in the same way, so that libraries are there. Shared memory counts, the page cache
does not. Growth: ten saves in both ways in turn, then twenty more, of an eighth of the state; the
least resident set after any of the last five, less that after the first five of the twenty. There
the I/O buffers, up to 24 MiB, are taken off, which are made when a save happens to need one more.
Reference: the bytes of the state. Stock: `FileSystemWriter` with a `DefaultStager` that is kept.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.harness import Answer, Memory, Options, State

_METRICS = {
    "save": ("peak memory / state, save", 0.07),
    "async_save": ("peak memory / state, async_save", 1.02),
    "growth": ("growth over 20 saves / state", 0.01),
}
_SAVES = {"save": 1, "async_save": 3, "growth": 30}
_FEW = 5
_KINDS: dict[str, Callable[[Path], Backend]] = {"ours": Ours, "stock": Stock}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process saw; all in bytes."""

    state: int
    peak: int
    after: list[int]
    """After each save."""
    kinds: dict[str, int]
    """At the end, by kind."""
    prewarmed: bool


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    jobs = [(mode, kind) for mode in _METRICS for kind in _KINDS]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.backends", "dcp_tiered.writer"])
    # Nothing here is timed, so the processes may run at once as far as there are cores for them.
    workers = min(len(os.sched_getaffinity(0)), len(jobs))
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = {job: pool.submit(_measure, options, *job) for job in jobs}
        usages = {job: future.result() for job, future in futures.items()}
    return [_answer(mode, usages[mode, "ours"], usages[mode, "stock"]) for mode in _METRICS]


def _measure(options: Options, mode: str, kind: str) -> Usage:
    # Thirty saves are thirty times the work, and growth shows in a smaller state as well.
    size = options.bytes // 8 if mode == "growth" else options.bytes
    state = harness.make_state(size)
    with harness.workspace(options.directory) as directory:
        backend = _KINDS[kind](directory / "run")
        _save(backend, harness.make_state(1 << 20), is_async=mode != "save")
        gc.collect()
        memory = Memory()
        prewarmed, after = mode != "save" and backend.prewarm(state), []
        for number in range(_SAVES[mode]):
            is_async = mode == "async_save" or (mode == "growth" and not number % 2)
            _save(backend, state, is_async=is_async)
            gc.collect()
            after.append(memory.now() - backend.buffer_bytes())
        peak, kinds = memory.peak(), harness.memory_kinds()
        backend.close()
    return Usage(
        state=harness.bytes_of(state), peak=peak, after=after, kinds=kinds, prewarmed=prewarmed
    )


def _save(backend: Backend, state: State, *, is_async: bool) -> None:
    if is_async:
        backend.begin(state).result()
    else:
        backend.save(state)
    backend.remove()


def _extra_bytes(mode: str, usage: Usage) -> int:
    """Return what the metric counts.

    A thread of DCP may let go of a staged state a moment after the future is done. So growth
    compares the least of five saves each: what is lost for good is in all of them.
    """
    if mode != "growth":
        return usage.peak
    return min(usage.after[-_FEW:]) - min(usage.after[2 * _FEW : 3 * _FEW])


def _answer(mode: str, ours: Usage, stock: Usage) -> Answer:
    metric, target = _METRICS[mode]
    ratio = _extra_bytes(mode, ours) / ours.state
    return Answer(
        benchmark="memory",
        goal="G10",
        metric=metric,
        unit="1",
        bytes=ours.state,
        seconds=0.0,
        reference_seconds=None,
        ratio=ratio,
        ratios=[ratio],
        stock=_extra_bytes(mode, stock) / stock.state,
        target=target,
        bound="max",
        details=asdict(ours),
    )


if __name__ == "__main__":
    sys.exit(harness.main({"memory": run}, __doc__))
