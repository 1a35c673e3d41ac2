"""Real processes that start in milliseconds: forked by a server that has imported torch already."""

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

_PR_SET_PDEATHSIG = 1
PRELOAD = ["tests.torture.trainer"]


def context() -> Any:
    """Return the multiprocessing context that all of them come from."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    return made


def start(work: Callable[..., Any], *args: Any) -> tuple[BaseProcess, Any]:
    """Start `work(*args)`, a module-level function, and return process and result queue."""
    made = context()
    answers = made.SimpleQueue()
    process = made.Process(target=_run, args=(answers, work, args))
    process.start()
    return process, answers


def run_together(calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Run several functions at once, each in a process of its own; return what they returned."""
    started = [start(work, *args) for work, args in calls]
    results = []
    try:
        for process, answers in started:
            process.join(100)
            assert process.exitcode == 0, f"a worker hangs or died: {process.exitcode}"
            ok, value = answers.get()
            assert ok, value
            results.append(value)
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    return results


def await_that(what: str, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still waiting after {timeout_s:.0f} s: {what}"
        time.sleep(0.003)
    return value


def _run(answers: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # A test run that is killed must not leave trainers behind that save for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    try:
        answers.put((True, work(*args)))
    except BaseException:  # noqa: BLE001 - CheckpointException is none of Exception
        answers.put((False, traceback.format_exc()))
