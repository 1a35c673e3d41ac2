"""Run a function on several gloo ranks, each in a process of its own.

`run_ranks` starts fresh processes, which may be killed or changed at will. `share_ranks` uses the
same few processes for all tests of a session, each call with a process group of its own. All of
them are forked from one clean process that has imported torch and runs no thread: that takes
seconds, and once is enough.
"""

import atexit
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "dcp_tiered.reader",
        "dcp_tiered.writer",
        "tests.conftest",
    ]
)
_SHARED_MAX = 4
_LOOK_S = 0.5
_AFTER_FAILURE_S = 15
"""How long the other ranks get once one has failed: they may wait for it in a collective."""


def run_ranks(
    world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 90
) -> list[Any]:
    """Return what `work(rank, *args)` returned on each rank; it has to be a module-level function.

    Raises:
        AssertionError: A rank failed or did not end; its traceback is in the message.
    """
    results = _FORK.Queue()
    port = _free_port()
    processes = [
        _FORK.Process(
            target=_run_one,
            args=(results, dict(os.environ), (rank, world_size, port, timeout_s, work, args)),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(results, processes, timeout_s)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def share_ranks(
    world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 90
) -> list[Any]:
    """Do as `run_ranks`, on processes that other tests use too: `work` leaves them as they were."""
    global _pool  # noqa: PLW0603 - one pool per session, made when it is needed
    if _pool is None:
        _pool = _Pool()
    try:
        return _pool.run(world_size, work, args, timeout_s)
    except BaseException:
        # A rank may still sit in a collective of this job.
        _pool.close()
        _pool = None
        raise


class _Pool:
    def __init__(self) -> None:
        self._results = _FORK.Queue()
        self._jobs = [_FORK.Queue() for _ in range(_SHARED_MAX)]
        self._processes = [
            _FORK.Process(target=_serve, args=(jobs, self._results), daemon=True)
            for jobs in self._jobs
        ]
        for process in self._processes:
            process.start()
        atexit.register(self.close)

    def run(
        self, world_size: int, work: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        port = _free_port()
        for rank, jobs in zip(range(world_size), self._jobs, strict=False):
            jobs.put((rank, world_size, port, timeout_s, work, args))
        return _collect(self._results, self._processes[:world_size], timeout_s)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _collect(results: Any, processes: Sequence[BaseProcess], timeout_s: float) -> list[Any]:
    """Return what ranks answer; one that has died answers no more."""
    world_size = len(processes)
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < world_size:
        missing = [process for rank, process in enumerate(processes) if rank not in answers]
        are_dead = not any(process.is_alive() for process in missing)
        try:
            rank, ok, value = results.get(timeout=_LOOK_S)
        except queue.Empty:
            if are_dead or time.monotonic() >= deadline:
                break
            continue
        answers[rank] = (ok, value)
        if not ok:
            deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
    failed += [f"rank {rank} gave no answer" for rank in range(world_size) if rank not in answers]
    assert not failed, "\n".join(failed)
    return [answers[rank][1] for rank in range(world_size)]


def _run_one(results: Any, environment: dict[str, str], job: Any) -> None:
    os.environ.clear()
    os.environ |= environment
    _one_job(results, job)


def _serve(jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    while True:
        _one_job(results, jobs.get())


def _one_job(
    results: Any, job: tuple[int, int, int, float, Callable[..., Any], tuple[Any, ...]]
) -> None:
    rank, world_size, port, timeout_s, work, args = job
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        value = work(rank, *args)
        results.put((rank, True, value))
    except BaseException:  # noqa: BLE001 - CheckpointException is none of Exception
        results.put((rank, False, traceback.format_exc()))
    finally:
        with suppress(Exception):
            dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_pool: _Pool | None = None
