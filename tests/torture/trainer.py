"""A trainer that saves in a loop until it is killed. Every value follows from the step."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import IncompleteError, NoCheckpointError, TieredReader, TieredWriter, cause

BACKLOG = 3
"""Saves between two waits: a trainer that outruns the store for minutes is not what is tested."""


def state_of(step: int) -> dict[str, Any]:
    """Return the state after a step: several megabytes, odd shapes, views, bytes."""
    generator = torch.Generator().manual_seed(step)
    wide = torch.randn(300, 1000, generator=generator)
    return {
        "wide": wide,
        "slice": wide[7:90, ::3],
        "half": torch.randn(1_500_000, generator=generator).to(torch.bfloat16),
        "counts": torch.arange(1000, dtype=torch.int64) * step,
        "scalar": torch.tensor(step, dtype=torch.int32),
        "nested": {"step": step, "text": f"after step {step}"},
    }


def blank() -> dict[str, Any]:
    """Return a target to load into, which differs from every state."""
    state = state_of(0)
    tensors = {key: torch.full_like(v, -1) for key, v in state.items() if torch.is_tensor(v)}
    return {**state, **tensors, "nested": {"step": -1, "text": ""}}


def assert_is_state_of(step: int, loaded: dict[str, Any]) -> None:
    """Raise unless every bit is that of the step."""
    expected = state_of(step)
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(loaded[key], value) if torch.is_tensor(value) else loaded[key] == value
        assert same, f"{key} is not that of step {step}"


def load_newest(arguments: dict[str, Any]) -> int | None:
    """Load the newest complete checkpoint, prove all of it, and return its step.

    None when there is none, which is also so when the very first save was cut off.
    """
    target = blank()
    reader = TieredReader(**arguments)
    try:
        dcp.load(target, storage_reader=reader)
    except BaseException as exc:
        if isinstance(cause(exc), NoCheckpointError | IncompleteError):
            return None
        raise
    finally:
        reader.close()
    assert reader.checkpoint_id is not None
    step = int(reader.checkpoint_id.removeprefix("step-"))
    assert_is_state_of(step, target)
    return step


def train(arguments: dict[str, Any], journal: Path, steps: int, note: str) -> None:
    """Resume, then save step after step; the journal has what `dcp.save` returned from."""
    step = load_newest(arguments) or 0
    with TieredWriter(**arguments) as writer, journal.open("a") as file:
        print(json.dumps({"start": step, "note": note}), file=file, flush=True)
        for number in range(step + 1, step + 1 + steps):
            dcp.save(state_of(number), checkpoint_id=f"step-{number}", storage_writer=writer)
            print(json.dumps({"saved": number}), file=file, flush=True)
            if not number % BACKLOG:
                writer.wait("durable", f"step-{number}", timeout_s=60)
