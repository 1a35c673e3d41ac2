"""`dcp.async_save` with the writer as its stager: frozen at the call, one buffer, one at a time."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_tiered import BackpressureError, InvalidError, Limits, TieredReader, TieredWriter, cause
from dcp_tiered.engines.staging import StagingArena
from tests.support.ranks import run_ranks


def load(local: Path, checkpoint_id: str, target: dict[str, Any]) -> dict[str, Any]:
    dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=TieredReader(f"tiered://{local}"))
    return target


class SlowWriter(TieredWriter):
    """Holds a save until it is let go, so that the state can be changed under it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.go = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(plan, planner)


def test_the_writer_is_dcps_stager(local: Path) -> None:
    assert isinstance(TieredWriter(f"tiered://{local}"), AsyncStager)


def test_what_changes_after_the_call_is_not_saved(local: Path) -> None:
    """O028, O043: parameters, shared memory, views, tied tensors, lists and objects."""
    shared = torch.arange(6.0).share_memory_()
    base = torch.arange(40.0)
    state = {
        "parameter": torch.nn.Parameter(torch.ones(300, 300)),
        "shared": shared,
        "view": base[::2],
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "tied": shared,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int16),
        "nested": [1, {"inner": torch.full((3,), 2.0)}, (torch.zeros(2), "text")],
    }
    writer = SlowWriter(f"tiered://{local}")
    future = dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer)
    with torch.no_grad():
        state["parameter"].zero_()
    shared.zero_()
    base.zero_()
    state["transposed"].zero_()
    state["scalar"].zero_()
    state["nested"][1]["inner"].zero_()
    state["nested"][0] = 99
    writer.go.set()
    future.result()
    target = {
        "parameter": torch.zeros(300, 300),
        "shared": torch.zeros(6),
        "view": torch.zeros(20),
        "transposed": torch.ones(4, 3),
        "tied": torch.zeros(6),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0, dtype=torch.int16),
        "nested": [0, {"inner": torch.zeros(3)}, (torch.ones(2), "")],
    }
    load(local, "step-1", target)
    assert torch.equal(target["parameter"], torch.ones(300, 300))
    assert torch.equal(target["shared"], torch.arange(6.0))
    assert torch.equal(target["tied"], torch.arange(6.0))
    assert torch.equal(target["view"], torch.arange(40.0)[::2])
    assert torch.equal(target["transposed"], torch.arange(12.0).reshape(3, 4).t())
    assert target["scalar"].item() == 5
    assert target["nested"][0] == 1
    assert torch.equal(target["nested"][1]["inner"], torch.full((3,), 2.0))


def test_each_save_has_its_own_values_in_the_same_buffer(local: Path) -> None:
    """O029, O031: reused memory never carries one save into another."""
    writer = TieredWriter(f"tiered://{local}")
    state = {"w": torch.zeros(1 << 20)}
    writer.prewarm(state)
    before = writer._staging._buffer.data_ptr()
    for step in range(4):
        state["w"] = torch.full((1 << 20,), float(step))  # allocated anew each time
        dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer).result()
        gc.collect()
    assert writer._staging._buffer.data_ptr() == before
    for step in range(4):
        got = load(local, f"step-{step}", {"w": torch.zeros(1 << 20)})
        assert torch.equal(got["w"], torch.full((1 << 20,), float(step)))


def test_tied_tensors_are_staged_once(local: Path) -> None:
    tensor = torch.randn(1 << 18)
    arena = StagingArena(1.0)
    staged = arena.stage({"a": tensor, "b": {"c": tensor}, "part": tensor[10:20]})
    assert staged["a"].data_ptr() == staged["b"]["c"].data_ptr() != tensor.data_ptr()
    assert arena.bytes_held <= (1 << 20) + (1 << 20)
    assert torch.equal(staged["part"], tensor[10:20])


def test_large_tensors_are_staged_on_page_borders() -> None:
    staged = StagingArena(1.0).stage({f"w{n}": torch.randn(40_000 + n) for n in range(5)})
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in staged.values())


def test_the_next_save_waits_for_the_one_before(local: Path) -> None:
    """O034: never two staged copies, never mixed; the stall is counted."""
    writer = SlowWriter(f"tiered://{local}")
    first = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="a", storage_writer=writer)
    threading.Timer(0.3, writer.go.set).start()
    second = dcp.async_save({"w": torch.zeros(9)}, checkpoint_id="b", storage_writer=writer)
    assert first.done()
    second.result()
    assert writer.metrics()["dcp_tiered_stall_seconds_total"] > 0.1
    assert torch.equal(load(local, "a", {"w": torch.zeros(9)})["w"], torch.ones(9))
    assert torch.equal(load(local, "b", {"w": torch.ones(9)})["w"], torch.zeros(9))


def test_the_wait_is_bounded(local: Path) -> None:
    writer = SlowWriter(f"tiered://{local}", limits=Limits(stage_wait_s=0.2))
    first = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="a", storage_writer=writer)
    with pytest.raises(BackpressureError, match="did not end") as caught:
        dcp.async_save({"w": torch.ones(9)}, checkpoint_id="b", storage_writer=writer)
    assert caught.value.hint is not None
    writer.go.set()
    first.result()
    dcp.async_save({"w": torch.ones(9)}, checkpoint_id="c", storage_writer=writer).result()


def test_a_failed_save_does_not_hold_the_next_one_up(local: Path) -> None:
    """O036, O038: the failed future keeps its traceback, and with it the staged state."""
    writer = TieredWriter(f"tiered://{local}", limits=Limits(stage_wait_s=5.0))
    failed = dcp.async_save({"w": torch.ones(9)}, checkpoint_id="not an id", storage_writer=writer)
    with pytest.raises(BaseException, match="not a plain name") as caught:
        failed.result()
    assert cause(caught.value) is not None
    dcp.async_save({"w": torch.ones(9)}, checkpoint_id="good", storage_writer=writer).result()
    assert torch.equal(load(local, "good", {"w": torch.zeros(9)})["w"], torch.ones(9))


def test_what_cannot_be_copied_is_refused_with_a_way_out(local: Path) -> None:
    writer = TieredWriter(f"tiered://{local}")
    with pytest.raises(InvalidError, match="cannot be copied") as caught:
        dcp.async_save({"a": threading.Lock()}, checkpoint_id="a", storage_writer=writer)
    assert "async_stager" in str(caught.value.hint)


def test_a_stager_of_the_users_is_used_instead(local: Path) -> None:
    writer = TieredWriter(f"tiered://{local}")
    stager = DefaultStager(StagingOptions(False, False, False, False))
    dcp.async_save(
        {"w": torch.ones(9)}, checkpoint_id="a", storage_writer=writer, async_stager=stager
    ).result()
    stager.close()
    assert writer._staging.bytes_held == 0
    assert torch.equal(load(local, "a", {"w": torch.zeros(9)})["w"], torch.ones(9))


def test_fifty_saves_grow_nothing(local: Path) -> None:
    """O031, O035: no threads, descriptors or buffers are left behind."""
    writer = TieredWriter(f"tiered://{local}")
    state = {f"w{n}": torch.randn(1000) for n in range(200)}
    counts, before = [], threading.active_count()
    for step in range(50):
        dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer).result()
        gc.collect()
        deadline = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.001)
        counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
    assert counts[-1] <= max(counts[5:10])
    assert writer._staging.bytes_held <= 2 << 20


def _sharded(rank: int, local: str, kind: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(7 * 5.0).reshape(7, 5)
    state: dict[str, Any] = {
        "shard": distribute_tensor(full, mesh, [Shard(0)]),
        "replica": distribute_tensor(full.clone(), mesh, [Replicate()]),
        "plain": torch.ones(3),
        "step": 4,
    }
    writer = TieredWriter(f"tiered://{local}")
    mode = AsyncCheckpointerType[kind]
    future = dcp.async_save(
        state, checkpoint_id="step-4", storage_writer=writer, async_checkpointer_type=mode
    )
    state["shard"].to_local().zero_()
    state["replica"].to_local().zero_()
    future.result()
    target = {
        "shard": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
        "replica": torch.zeros(7, 5),
        "plain": torch.zeros(3),
        "step": 0,
    }
    dcp.load(target, storage_reader=TieredReader(f"tiered://{local}"))
    dist.barrier()
    return (
        torch.equal(target["shard"].full_tensor(), full)
        and torch.equal(target["replica"], full)
        and target["step"] == 4
    )


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_shards_and_replicas_in_both_executors(kind: str, local: Path) -> None:
    assert run_ranks(2, _sharded, str(local), kind) == [True, True]
