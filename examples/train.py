"""Train a GPT with FSDP2 and two-tier checkpoints: a template to copy.

    torchrun --standalone --nproc-per-node 2 examples/train.py \
        --url tiered::s3://bucket/run42 --local-dir /mnt/nvme/dcp --steps 1000 --save-every 100

Run the same line again after a crash, on as many ranks as there are: training goes on from the
newest complete checkpoint, wherever it is nearest.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from dcp_tiered import NoCheckpointError, TieredReader, TieredWriter, cause
from gpt import GPT, Corpus, Shape

SEED = 20
GLOBAL_BATCH = 6  # sequences per step, over all ranks


class AppState(Stateful):
    """All that a run needs to go on: model, optimizer, step and random number generator."""

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as DCP saves it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what DCP has loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
        torch.set_rng_state(state["rng"])


def resume(app: AppState, reader: TieredReader) -> str | None:
    """Load the newest complete checkpoint and return its id; None if the run has none yet.

    Any other failure stops the job: to start afresh over a store that is only unreachable would
    throw the run away.
    """
    try:
        dcp.load({"app": app}, storage_reader=reader)
    except CheckpointException as error:
        if not isinstance(cause(error), NoCheckpointError):
            raise
        # To have something to load into, `get_state_dict` made the optimizer take a step of zero.
        app.optimizer.state.clear()
        return None
    return reader.checkpoint_id


def train(options: argparse.Namespace) -> None:
    """Train up to ``options.steps``, saving as we go."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    shape = Shape()
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    corpus = Corpus(SEED, shape.context)
    app = AppState(model, optimizer)

    place = {"local": options.local_dir, **storage_options(options.endpoint)}
    resumed = resume(app, TieredReader(options.url, **place))
    writer = TieredWriter(options.url, **place)
    log(options.metrics, {"resumed": resumed, "step": app.step, "world": world})

    share = GLOBAL_BATCH // world
    mine = range(rank * share, (rank + 1) * share)
    while app.step < options.steps:
        app.step += 1
        loss = model(corpus.sequences(app.step, mine))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach() / world
        dist.all_reduce(mean)
        line = {"step": app.step, "loss": mean.item(), "world": world}
        if app.step % options.save_every == 0 or app.step == options.steps:
            began = time.perf_counter()
            dcp.save({"app": app}, checkpoint_id=f"step-{app.step}", storage_writer=writer)
            line["stall_s"] = time.perf_counter() - began
        log(options.metrics, line)

    # A save ends on local storage and the upload goes on behind it. Let the node go only when the
    # last checkpoint is where it outlives the node.
    writer.wait("durable", f"step-{app.step}", timeout_s=options.durable_timeout)


def log(path: Path, line: dict[str, Any]) -> None:
    """Append a line to the metrics, on rank 0."""
    if dist.get_rank() == 0:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def storage_options(endpoint: str | None) -> dict[str, Any]:
    """Return what fsspec needs to reach the store; nothing where its own defaults do."""
    if endpoint is None:
        return {}
    return {
        "s3": {
            "endpoint_url": endpoint,
            "key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
            "client_kwargs": {"region_name": os.environ.get("AWS_DEFAULT_REGION", "us-east-1")},
        }
    }


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="run root, such as tiered::s3://bucket/run42")
    parser.add_argument("--local-dir", required=True, help="directory on this node's NVMe")
    parser.add_argument("--endpoint", help="S3 endpoint, keys in AWS_ACCESS_KEY_ID and so on")
    parser.add_argument("--steps", type=int, default=1000, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--metrics", type=Path, default=Path("metrics.jsonl"))
    parser.add_argument("--durable-timeout", type=float, default=600.0, metavar="SECONDS")
    return parser.parse_args()


def main() -> None:
    """Run one rank."""
    options = parse_options()
    dist.init_process_group("gloo")
    if GLOBAL_BATCH % dist.get_world_size():
        raise SystemExit(f"the number of ranks must divide the global batch of {GLOBAL_BATCH}")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
