"""G8: how many objects does a checkpoint of eight ranks on one node leave in the bucket?

Ours: eight processes save 5 MB each under one id, and the bucket is listed when that is durable.
Three is the least: manifest, pack, record. With the state of the command line, an eighth per rank
and packs of a quarter of it: objects against as few as its bytes allow, which are as many packs as
the bytes fill, manifest and record. Stock DCP leaves a file per rank and one for the metadata, or
more where it writes by several threads.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import harness, ranks
from benchmarks.flush_vs_clients import seaweed
from benchmarks.harness import Answer, Options
from benchmarks.time_to_durable import OursOnS3
from dcp_tiered import TieredWriter

RANKS = 8
SMALL_BYTES = 5_000_000
OBJECTS, RATIO = 3, 1.05
_PACKS = 4
_AROUND = 2
"""Manifest and record."""
_SAVE_S_MAX = 300.0


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    large = options.bytes // RANKS
    # A shard file is its state and an index; a quarter of all is meant to hold those of two ranks.
    pack_bytes = options.bytes // _PACKS + RANKS * (64 << 10)
    ideal = _PACKS + _AROUND
    with seaweed(options.directory / "server") as server:
        ours = OursOnS3(options.directory / "flushed", server)
        limits = replace(ours.arguments["limits"], pack_bytes_target=pack_bytes)
        small_seen = [_objects(ours, f"small-{n}", SMALL_BYTES) for n in range(options.pairs)]
        packed = OursOnS3(options.directory / "packed", server)
        packed.arguments["limits"] = limits
        large_seen = [_objects(packed, f"large-{n}", large) for n in range(options.pairs)]
        for backend in (ours, packed):
            backend.close()
    return [
        _answer("objects of 8 ranks x 5 MB", "objects", RANKS * SMALL_BYTES, small_seen, OBJECTS),
        _answer(
            "objects / fewest that hold the bytes",
            "1",
            options.bytes,
            [count / ideal for count in large_seen],
            RATIO,
        ),
    ]


def _answer(metric: str, unit: str, size: int, seen: list[float], target: float) -> Answer:
    return Answer(
        benchmark="objects_per_checkpoint",
        goal="G8",
        metric=metric,
        unit=unit,
        bytes=size,
        seconds=0.0,
        reference_seconds=None,
        ratio=harness.median(seen),
        ratios=seen,
        stock=None,
        target=target,
        bound="max",
    )


def _objects(ours: OursOnS3, checkpoint_id: str, rank_bytes: int) -> float:
    """Save on all ranks, and return how many objects that has left."""
    context = ranks.context()
    job = (ranks.free_port(), ours.arguments, checkpoint_id, rank_bytes)
    processes = [context.Process(target=_rank, args=(rank, *job)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SAVE_S_MAX)
        process.kill()
        assert process.exitcode == 0, "a rank failed"
    return float(len(ours.keys(f"{checkpoint_id}/")))


def _rank(
    rank: int, port: int, arguments: Mapping[str, Any], checkpoint_id: str, size: int
) -> None:
    ranks.join(rank, RANKS, port)
    state = {f"rank-{rank}": torch.empty(size, dtype=torch.uint8).random_()}
    with TieredWriter(**arguments) as writer:
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        writer.wait("durable", checkpoint_id, timeout_s=_SAVE_S_MAX)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(harness.main({"objects_per_checkpoint": run}, __doc__))
