"""Known ways to load the wrong thing on another number of ranks or into another structure.

O092 (every cut on every world size), O094 and O096 to O098 are in
tests/integration/test_differential*.py.
"""

import dataclasses
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import Shard

from dcp_tiered import TieredReader, TieredWriter
from tests.support import states
from tests.support.ranks import share_ranks
from tests.support.states import State, filled


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"tiered://{tmp_path}"


class Pieces(torch.Tensor):
    """A tensor of which a rank holds any boxes, told to DCP by its own protocol."""

    @staticmethod
    def __new__(cls, full: torch.Tensor, boxes: list[tuple[int, int]]) -> Self:
        return torch.Tensor._make_subclass(cls, full)

    def __init__(self, full: torch.Tensor, boxes: list[tuple[int, int]]) -> None:
        self.parts = {start: full[start:end].clone() for start, end in boxes}

    def _chunk(self, start: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([start]), self.parts[start].shape)

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([start])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(start),
                    properties=TensorProperties(dtype=part.dtype),
                    size=self.shape,
                ),
            )
            for start, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(start) for start in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


CUTS: dict[str, list[list[tuple[int, int]]]] = {
    "uneven": [[(0, 3), (7, 8)], [(3, 7)]],
    "other": [[(0, 1)], [(1, 2), (2, 6), (6, 8)]],
    "one": [[(0, 8)], []],
}


def in_pieces(rank: int, root: str) -> list[str]:
    full = filled((8,), torch.int64)
    writer, reader = TieredWriter(f"tiered://{root}"), TieredReader(f"tiered://{root}")
    wrong = []
    for saved, cut in CUTS.items():
        state = {"w": Pieces(full, cut[rank])}
        dcp.save(state, checkpoint_id=saved, storage_writer=writer)
        for loaded, other in CUTS.items():
            target = {"w": Pieces(torch.zeros_like(full), other[rank])}
            dcp.load(target, checkpoint_id=saved, storage_reader=reader)
            for start, end in other[rank]:
                if not torch.equal(target["w"].parts[start], full[start:end]):
                    wrong.append(f"{saved} to {loaded}: {start}")
    return wrong


def test_o093_any_boxes_over_any_ranks(tmp_path: Path) -> None:
    assert share_ranks(2, in_pieces, str(tmp_path)) == [[], []]


def save_per_rank(rank: int, root: str) -> None:
    state = {f"loader.{rank}": {"epoch": rank, "seen": [rank] * 3}, "w": torch.ones(2)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(f"tiered://{root}"))


def load_per_rank(rank: int, root: str, partial: bool) -> tuple[list[str] | None, Any]:
    target: State = {f"loader.{rank}": {"epoch": -1, "seen": []}, "w": torch.zeros(2)}
    reader = TieredReader(f"tiered://{root}")
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    error = states.attempt(lambda: dcp.load(target, storage_reader=reader, planner=planner))
    return error, target[f"loader.{rank}"]["epoch"]


def test_o095_state_per_rank_on_fewer_and_on_more_ranks(tmp_path: Path) -> None:
    """Fewer ranks load their own; more get an error that all see, unless partial is asked."""
    share_ranks(2, save_per_rank, str(tmp_path))
    root = str(tmp_path)
    assert share_ranks(1, load_per_rank, root, False) == [(None, 0)]
    assert share_ranks(3, load_per_rank, root, False) == [
        (["RuntimeError"], -1),
        (["RuntimeError"], -1),
        (["RuntimeError"], -1),
    ]
    assert share_ranks(3, load_per_rank, root, True) == [(None, 0), (None, 1), (None, -1)]


def adam_with_unused(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        model["used"](torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_o099_parameter_that_never_got_a_gradient(url: str) -> None:
    """Saved without its state; a target that asks for it is told which key is missing."""
    state = {"optim": get_optimizer_state_dict(*adam_with_unused(0, 2))}
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    target = states.zeroed(state)
    dcp.load(target, storage_reader=TieredReader(url))
    assert states.difference(state, target) is None
    everything = {"optim": get_optimizer_state_dict(*adam_with_unused(1, 0))}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(everything, storage_reader=TieredReader(url))
    assert "optim.state.unused" in str(caught.value)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(everything, storage_reader=TieredReader(url), planner=planner)
    assert everything["optim"]["state"]["used.weight"]["step"] == 2


def again_and_again(rank: int, root: str) -> list[str | None]:
    writer = TieredWriter(f"tiered://{root}", overwrite=True)
    reader = TieredReader(f"tiered://{root}")
    found = []
    for number, name in enumerate(("a", "b", "a", "a")):
        state = {"w": states.placed(filled((5, number + 1)), states.mesh_1d(), [Shard(0)])}
        dcp.save(state, checkpoint_id=name, storage_writer=writer)
        target = states.zeroed(state)
        dcp.load(target, checkpoint_id=name if number % 2 else None, storage_reader=reader)
        found.append(states.difference(state, target))
    return found


def test_o100_save_and_load_with_the_same_objects(tmp_path: Path) -> None:
    """To a new id and to the same one, in one process, on two ranks."""
    assert share_ranks(2, again_and_again, str(tmp_path)) == [[None] * 4] * 2


class Moved(DefaultLoadPlanner):
    """Reads three boxes of one chunk into other places of one target."""

    MOVES = (((2, 3), (0, 0), (4, 5)), ((10, 0), (5, 5), (1, 1)), ((0, 0), (6, 2), (2, 7)))

    def create_local_plan(self) -> LoadPlan:
        (item,) = super().create_local_plan().items
        return LoadPlan(
            [
                dataclasses.replace(
                    item,
                    storage_offsets=torch.Size(source),
                    dest_offsets=torch.Size(to),
                    lengths=torch.Size(size),
                )
                for source, to, size in self.MOVES
            ]
        )


def test_o101_offsets_of_the_planner_are_followed_to_the_letter(url: str) -> None:
    full = filled((12, 9), torch.int16)
    dcp.save({"w": full}, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    target = {"w": torch.zeros_like(full)}
    dcp.load(target, storage_reader=TieredReader(url), planner=Moved())
    expected = torch.zeros_like(full)
    for (r, c), (tr, tc), (h, w) in Moved.MOVES:
        expected[tr : tr + h, tc : tc + w] = full[r : r + h, c : c + w]
    assert torch.equal(target["w"], expected)


def save_nested(rank: int, root: str) -> State:
    state = {
        "model": {"w": states.placed(filled((7, 3)), states.mesh_1d(), [Shard(0)])},
        "list": [{"a": filled((2,))}, {"b": 3}],
        "step": 4,
    }
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(f"tiered://{root}"))
    state["model"] = {"w": filled((7, 3))}
    return state


def test_o102_reader_serves_the_recipe_that_makes_a_torch_save(tmp_path: Path) -> None:
    """DCP's own conversion, with our reader, restores the nested state without a target."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

    expected = share_ranks(2, save_nested, str(tmp_path))[0]
    state: State = {}
    _load_state_dict(
        state,
        storage_reader=TieredReader(f"tiered://{tmp_path}", no_dist=True),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    torch.save(state, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert states.difference(expected, loaded) is None
