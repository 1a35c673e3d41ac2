"""Ranks of one node in processes of their own, for benchmarks of more than one."""

import multiprocessing
import os
import socket
from typing import Any

import torch
import torch.distributed as dist


def context() -> Any:
    """Return what starts them: a process that has imported torch and has no threads."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["torch.distributed.checkpoint", "dcp_tiered.writer"])
    return made


def free_port() -> int:
    """Return a port that nobody listens on, for their process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, world_size: int, port: int) -> None:
    """Become a rank, as torchrun would set its environment."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
