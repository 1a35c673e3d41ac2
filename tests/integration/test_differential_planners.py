"""Plan caching, optimizers and models as users save them: what comes back is what went in."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from dcp_tiered import TieredReader, TieredWriter
from tests.support import states
from tests.support.ranks import share_ranks
from tests.support.states import State, filled

CACHES = (
    "_cached_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
    "_cached_final_save_plan",
)


def forget_plans() -> None:
    """Empty DCP's caches, which belong to the process and not to a planner."""
    for name in CACHES:
        getattr(SavePlanner, name).clear()


def save_over_and_over(rank: int, root: str, caching: bool) -> list[str | None]:
    """Save changing values, then twice with a key more, then without it again."""
    forget_plans()
    writer = TieredWriter(f"tiered://{root}")
    saves: list[State] = []
    for number in range(6):
        state = states.shards() | {"w": filled((50, 7), seed=number), "n": number}
        if number in (3, 4):
            state |= {"grown": filled((3,), seed=number), f"rank {rank}": filled((2,), seed=rank)}
        planner = DefaultSavePlanner(enable_plan_caching=caching)
        dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer, planner=planner)
        saves.append(state)
    forget_plans()
    reader = TieredReader(f"tiered://{root}")
    found = []
    for number, state in enumerate(saves):
        target = states.zeroed(state)
        dcp.load(target, checkpoint_id=f"step-{number}", storage_reader=reader)
        found.append(states.difference(state, target))
        with_key = {"grown": torch.zeros(3)}
        error = states.attempt(
            lambda: dcp.load(with_key, checkpoint_id=f"step-{number}", storage_reader=reader)  # noqa: B023
        )
        assert (error is None) == (number in (3, 4)), error
    return found


@pytest.mark.parametrize("caching", [False, True])
def test_every_save_has_its_own_values_and_structure(tmp_path: Path, caching: bool) -> None:
    """O020, O030: nothing of an earlier save comes back through DCP's cache of plans."""
    for found in share_ranks(2, save_over_and_over, str(tmp_path), caching):
        assert found == [None] * 6


class Net(nn.Module):
    """A model with a frozen and an unused parameter, a buffer and a shape that cannot be halved."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3)
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + self.frozen


def trained(seed: int, steps: int, *, fsdp: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(seed)
    if fsdp:
        fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(state: Any) -> Any:
    """Return a state dict with every DTensor whole."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def save_model(rank: int, root: str) -> Any:
    model, optimizer = trained(1, 3, fsdp=True)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id="step-3", storage_writer=TieredWriter(f"tiered://{root}/ours"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(f"{root}/stock"))
    return full(state)


def load_model(rank: int, root: str, fsdp: bool) -> list[Any]:
    """Load into a fresh model and optimizer, by stock DCP and by us."""
    results = []
    for reader in (FileSystemReader(f"{root}/stock"), TieredReader(f"tiered://{root}/ours")):
        model, optimizer = trained(2, 1, fsdp=fsdp)
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(strict=False),  # one parameter never got a gradient
        )
        loaded = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        results.append(full(loaded))
    return results


@pytest.mark.slow
def test_fsdp_model_and_adamw(tmp_path: Path) -> None:
    """O002, O099: saved by FSDP2 on 2 ranks, loaded on 3 with FSDP2 and on 1 without."""
    (tmp_path / "ours").mkdir()
    saved = share_ranks(2, save_model, str(tmp_path))[0]
    for world, fsdp in ((3, True), (1, False)):
        for stock, ours in share_ranks(world, load_model, str(tmp_path), fsdp):
            assert states.difference(stock, ours) is None
            assert states.difference(saved, ours) is None


def save_what_differs(rank: int, root: str) -> tuple[int, int]:
    state = {"x": torch.tensor([rank]), f"rng.{rank}": torch.tensor([10 + rank])}
    dist.barrier()
    results = []
    for writer, reader in (
        (FileSystemWriter(f"{root}/stock"), FileSystemReader(f"{root}/stock")),
        (TieredWriter(f"tiered://{root}/ours"), TieredReader(f"tiered://{root}/ours")),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = {} if isinstance(writer, FileSystemWriter) else {"checkpoint_id": "step-1"}
            dcp.save(state, storage_writer=writer, **kept)
            target = {"x": torch.tensor([-1]), f"rng.{rank}": torch.tensor([-1])}
            dcp.load(target, storage_reader=reader)
        assert int(target[f"rng.{rank}"]) == 10 + rank
        results.append(int(target["x"]))
    return results[0], results[1]


def test_replicas_that_differ_are_treated_as_stock_treats_them(tmp_path: Path) -> None:
    """O021, O094: one copy wins, the same as in stock DCP; keys per rank keep each rank's own."""
    (tmp_path / "ours").mkdir()
    answers = share_ranks(2, save_what_differs, str(tmp_path))
    assert len({x for answer in answers for x in answer}) == 1
