"""Run a function on several gloo ranks, each in a process of its own."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 90) -> list[Any]:
    """Return what `work(rank, *args)` returned on each rank; it has to be a module-level function.

    Raises:
        AssertionError: A rank failed or did not end; its traceback is in the message.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, results, work, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    answers: dict[int, tuple[bool, Any]] = {}
    try:
        for _ in processes:
            rank, ok, value = results.get(timeout=timeout_s)
            answers[rank] = (ok, value)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
    assert not failed, "\n".join(failed)
    return [answers[rank][1] for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, port: int, results: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
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
