"""What stock DCP refuses we refuse, with the same kind of error; what it loads we load alike."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from dcp_tiered import TieredReader, TieredWriter
from tests.support import states
from tests.support.ranks import share_ranks
from tests.support.states import State, filled

SAVED: State = {
    "w": filled((6, 4)),
    "half": filled((6,), torch.bfloat16).nan_to_num(),
    "scalar": torch.tensor(2.5),
    "n": 3,
    "deep": {"k": [{"a": torch.ones(2)}, {"b": torch.ones(3)}], "text": "x"},
}

TARGETS: dict[str, Callable[[], State]] = {
    "subset (O096)": lambda: {"w": torch.zeros(6, 4)},
    "superset (O096)": lambda: {"w": torch.zeros(6, 4), "new": torch.zeros(2)},
    "superset with an object": lambda: {"n": 0, "new": "x"},
    "disjoint (O096)": lambda: {"x": torch.zeros(1)},
    "other shape (O097)": lambda: {"w": torch.zeros(4, 6)},
    "smaller (O097)": lambda: {"w": torch.zeros(3, 4)},
    "other number of dimensions (O097)": lambda: {"w": torch.zeros(24)},
    "more dimensions (O097)": lambda: {"scalar": torch.zeros(1)},
    "other dtype (O097)": lambda: {"w": torch.zeros(6, 4, dtype=torch.float64)},
    "wider dtype": lambda: {"half": torch.zeros(6)},
    "narrower dtype": lambda: {"w": torch.zeros(6, 4, dtype=torch.int8)},
    "tensor for an object": lambda: {"n": torch.zeros(1)},
    "object for a tensor": lambda: {"w": 5},
    "empty list for a filled one (O098)": lambda: {"deep": {"k": []}},
    "none for a dict (O098)": lambda: {"deep": None},
    "dict for a leaf": lambda: {"n": {"m": 1}},
    "same structure": lambda: states.zeroed(SAVED),
    "nothing": dict,
    "transposed target (O007)": lambda: {"w": torch.zeros(4, 6).t()},
    "strided target (O007)": lambda: {"w": torch.zeros(12, 8)[::2, ::2]},
    "expanded target": lambda: {"w": torch.zeros(6, 1).expand(6, 4)},
    "target with gradient": lambda: {"w": torch.zeros(6, 4, requires_grad=True)},
    "parameter": lambda: {"w": torch.nn.Parameter(torch.zeros(6, 4))},
    "meta target (O011)": lambda: {"w": torch.empty(6, 4, device="meta")},
    "nested meta target (O011)": lambda: {"deep": {"k": [{"a": torch.empty(2, device="meta")}]}},
}

SAVE_PLANNERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "default": DefaultSavePlanner,
    "unflattened": lambda: DefaultSavePlanner(flatten_state_dict=False),
    "lowest rank": lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True),
}
LOAD_PLANNERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "default": DefaultLoadPlanner,
    "partial": lambda: DefaultLoadPlanner(allow_partial_load=True),
    "unflattened": lambda: DefaultLoadPlanner(flatten_state_dict=False),
}


class Pair:
    """Two checkpoints of one state: one by stock DCP, one by us."""

    def __init__(self, root: Path) -> None:
        (root / "tiered").mkdir(exist_ok=True)
        self._stock = str(root / "stock")
        self._ours = f"tiered://{root}/tiered"

    def save(self, state: State, planner: Callable[[], Any] = lambda: None) -> list[Any]:
        """Save with both; return the kinds of error of each."""
        stock = FileSystemWriter(self._stock)
        ours = {"storage_writer": TieredWriter(self._ours), "checkpoint_id": "step-1"}
        return [
            states.attempt(lambda: dcp.save(state, storage_writer=stock, planner=planner())),
            states.attempt(lambda: dcp.save(state, planner=planner(), **ours)),
        ]

    def load(self, target: State, planner: Callable[[], Any] = lambda: None) -> list[Any]:
        """Load into copies of a target with both; return the kinds of error and results of each."""
        results = []
        for reader in (FileSystemReader(self._stock), TieredReader(self._ours)):
            into = copy.deepcopy(target)
            error = states.attempt(
                lambda: dcp.load(into, storage_reader=reader, planner=planner())  # noqa: B023
            )
            results.append((error, into))
        return results


def check(results: list[tuple[Any, Any]]) -> None:
    (stock_error, stock), (our_error, ours) = results
    assert our_error == stock_error
    if stock_error is None:
        assert states.difference(stock, ours) is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    assert pair.save(SAVED) == [None, None]
    return pair


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_target_that_differs(saved: Pair, name: str, partial: bool) -> None:
    planner = LOAD_PLANNERS["partial" if partial else "default"]
    check(saved.load(TARGETS[name](), planner))


def test_shape_mismatch_writes_to_no_target(saved: Pair) -> None:
    """O097: neither the tensor of another shape nor its neighbours are touched."""
    target = {"w": torch.zeros(4, 6), "scalar": torch.tensor(0.0)}
    for error, into in saved.load(target):
        assert error == ["ValueError"]
        assert not into["w"].any()
        assert not into["scalar"]


OPTIMIZER: State = {
    "state": {
        0: {"step": torch.tensor(5.0), "exp_avg": filled((3,))},
        1: {"step": torch.tensor(5.0)},
    },
    "param_groups": [{"lr": 0.1, "params": [0, 1]}],
}


@pytest.mark.parametrize("load_planner", LOAD_PLANNERS)
@pytest.mark.parametrize("save_planner", SAVE_PLANNERS)
def test_planner_pairing(tmp_path: Path, save_planner: str, load_planner: str) -> None:
    """O027: any planner at save with any planner at load, optimizer state keyed by integers."""
    pair = Pair(tmp_path)
    state = {"w": filled((4, 4)), "optim": OPTIMIZER}
    stock_error, our_error = pair.save(state, SAVE_PLANNERS[save_planner])
    assert stock_error is our_error is None
    check(pair.load(states.zeroed(state), LOAD_PLANNERS[load_planner]))


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        {1: torch.ones(1), "1": torch.ones(1)},
        {"a": {1: 2, "1": 3}},
    ],
    ids=["dotted", "integer", "inner integer"],
)
def test_colliding_names_are_refused_alike(tmp_path: Path, state: State) -> None:
    """O022."""
    stock_error, our_error = Pair(tmp_path).save(state)
    assert stock_error == our_error == ["ValueError"]


def load_mismatches(rank: int, root: str) -> dict[str, str | None]:
    """Save on all ranks, then let one rank ask for something else than the others."""
    pair = Pair(Path(root))
    state = states.shards()
    assert pair.save(state) == [None, None]
    results: dict[str, str | None] = {}
    targets: dict[str, State] = {
        "one rank asks for less": {"step": torch.tensor(0.0)} if rank else states.zeroed(state),
        "one rank asks for what is not there": {"step": torch.tensor(0.0)}
        | ({"new": torch.zeros(1)} if rank else {}),
        "one rank has another shape": {"copy": torch.zeros(5, 5 + rank)},
    }
    for name, target in targets.items():
        (stock_error, stock), (our_error, ours) = pair.load(target)
        if stock_error != our_error:
            results[name] = f"{stock_error} and {our_error}"
        else:
            results[name] = states.difference(stock, ours) if stock_error is None else None
    return results


def test_ranks_that_ask_for_different_things(tmp_path: Path) -> None:
    for results in share_ranks(2, load_mismatches, str(tmp_path)):
        assert not any(results.values()), results
