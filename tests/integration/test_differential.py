"""The same states through stock DCP and through us, saved on m ranks and loaded on n: equal."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from dcp_tiered import TieredReader, TieredWriter
from tests.support import states
from tests.support.ranks import share_ranks

WORLDS = (1, 2, 3, 4)
EVERYTHING = states.PLAIN | states.SHARDED


def save_all(rank: int, root: str) -> None:
    """Save every state with both writers."""
    world = dist.get_world_size()
    writer = TieredWriter(f"tiered://{root}/tiered-{world}", trust_bytes=True)
    for name, build in EVERYTHING.items():
        state = build()
        stock = FileSystemWriter(f"{root}/stock-{world}/{name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=stock)
        dcp.save(state, checkpoint_id=name, storage_writer=writer)


def load_all(rank: int, root: str, saved_on: int) -> dict[str, str | None]:
    """Load every state with both readers; return where the results differ."""
    reader = TieredReader(f"tiered://{root}/tiered-{saved_on}", trust_bytes=True)
    result = {}
    for name, build in EVERYTHING.items():
        expected = build()
        stock, ours = states.zeroed(expected), states.zeroed(expected)
        reference = FileSystemReader(f"{root}/stock-{saved_on}/{name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(stock, storage_reader=reference)
        dcp.load(ours, checkpoint_id=name, storage_reader=reader)
        found = states.difference(stock, ours)
        if found is None and name in states.SHARDED:
            found = states.difference(expected, ours)
        result[name] = found
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Save everything on a number of ranks, once."""
    root = tmp_path_factory.mktemp("differential")
    done: set[int] = set()

    def save(world: int) -> Path:
        if world not in done:
            (root / f"tiered-{world}").mkdir()
            share_ranks(world, save_all, str(root))
            done.add(world)
        return root

    return save


@pytest.mark.slow
@pytest.mark.parametrize("loaded_on", WORLDS)
@pytest.mark.parametrize("saved_on", WORLDS)
def test_equal_to_stock(saved: Callable[[int], Path], saved_on: int, loaded_on: int) -> None:
    """Every kind of state, every pair of world sizes (O092)."""
    root = saved(saved_on)
    for differences in share_ranks(loaded_on, load_all, str(root), saved_on):
        assert differences == dict.fromkeys(EVERYTHING)
