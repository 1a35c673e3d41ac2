"""Known ways in which a save in the background loses data, hangs, or hides its failure.

DCP's own stagers take the snapshot here; that ours bounds memory (O031, O032, O035) is tested
with it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_tiered import (
    AbsentError,
    IncompleteError,
    TieredReader,
    TieredWriter,
    UnavailableError,
    cause,
)
from tests.conftest import Run
from tests.support import states
from tests.support.ranks import run_ranks, share_ranks
from tests.support.states import State, filled

WAIT_S = 60


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"tiered://{tmp_path}"


class Held(DefaultSavePlanner):
    """Stops before the data is looked at until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.go.wait(WAIT_S)
        return super().resolve_data(write_item)


class Failing(DefaultSavePlanner):
    """Fails with an error of ours, on one rank."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if not dist.is_initialized() or dist.get_rank() == self.rank:
            raise UnavailableError("injected", "local", write_item.index.fqn)
        return super().resolve_data(write_item)


def load(url: str, target: State, checkpoint_id: str | None = None) -> State:
    dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=TieredReader(url))
    return target


def begin(url: str, state: State, checkpoint_id: str, planner: Held) -> Future[Any]:
    """Begin an async save and return while it is in the middle of writing."""
    future = dcp.async_save(
        state, checkpoint_id=checkpoint_id, storage_writer=TieredWriter(url), planner=planner
    )
    assert planner.reached.wait(WAIT_S)
    return future


SOURCES = {
    "plain": lambda: torch.ones(1000),
    "shared memory (O043)": lambda: torch.ones(1000).share_memory_(),
    "parameter (O043)": lambda: torch.nn.Parameter(torch.ones(1000)),
    "view": lambda: torch.ones(2000)[::2],
    "with a graph (O043)": lambda: torch.nn.Parameter(torch.ones(1000)) * 1,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_o028_o043_values_are_those_of_the_call(url: str, kind: str) -> None:
    """In-place changes after the call, while the save is held, do not reach the checkpoint."""
    source, planner = SOURCES[kind](), Held()
    future = begin(url, {"w": source}, "step-1", planner)
    with torch.no_grad():
        source.add_(1)
    planner.go.set()
    future.result(WAIT_S)
    assert torch.equal(load(url, {"w": torch.zeros(1000)})["w"], torch.ones(1000))


def test_o029_each_save_has_its_own_values(url: str) -> None:
    writer = TieredWriter(url)
    for number in range(3):
        state = {"w": filled((500,), seed=number), "inplace": torch.full((5,), float(number))}
        dcp.async_save(state, checkpoint_id=f"step-{number}", storage_writer=writer).result(WAIT_S)
        state["inplace"].zero_()
    for number in range(3):
        target = load(url, {"w": torch.zeros(500), "inplace": torch.zeros(5)}, f"step-{number}")
        assert states.bits(target["w"]) == states.bits(filled((500,), seed=number))
        assert target["inplace"].tolist() == [float(number)] * 5


def grow_and_shrink(rank: int, root: str) -> list[str | None]:
    """A key that only one rank has comes and goes, with DCP's plan cache on."""
    for name in (
        "_cached_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
        "_cached_final_save_plan",
    ):
        getattr(DefaultSavePlanner, name).clear()
    writer, found = TieredWriter(f"tiered://{root}"), []
    reader = TieredReader(f"tiered://{root}")
    for number in range(4):
        state: State = {"w": filled((9,), seed=number)}
        if number in (1, 2) and rank == 1:
            state["k"] = filled((4,), seed=number)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.async_save(
            state, checkpoint_id=f"s-{number}", storage_writer=writer, planner=planner
        ).result(WAIT_S)
        target = states.zeroed(state)
        dcp.load(target, checkpoint_id=f"s-{number}", storage_reader=reader)
        found.append(states.difference(state, target))
    return found


def test_o030_key_on_one_rank_only_comes_and_goes(tmp_path: Path) -> None:
    assert share_ranks(2, grow_and_shrink, str(tmp_path)) == [[None] * 4] * 2


def save_beside_collectives(rank: int, root: str) -> tuple[bool, str | None]:
    """Loop over all_reduce on the default group while a save runs on a group of its own."""
    group = dist.new_group(backend="gloo")
    state = states.shards()
    future = dcp.async_save(
        state,
        checkpoint_id="step-1",
        storage_writer=TieredWriter(f"tiered://{root}"),
        process_group=group,
    )
    right = True
    for number in range(50):
        value = torch.tensor([number + rank])
        dist.all_reduce(value)
        right = right and int(value) == 2 * number + 1
    future.result(WAIT_S)
    target = states.zeroed(state)
    dcp.load(target, storage_reader=TieredReader(f"tiered://{root}"))
    return right, states.difference(state, target)


def test_o033_training_goes_on_with_collectives_of_its_own(tmp_path: Path) -> None:
    assert share_ranks(2, save_beside_collectives, str(tmp_path)) == [(True, None)] * 2


def test_o034_saves_of_two_writers_are_never_mixed(url: str) -> None:
    """Without a process group nothing keeps them apart: each is written under its own id."""
    writers = TieredWriter(url), TieredWriter(url)
    planners = Held(), Held()
    futures = []
    for number, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        state = {f"w{number}": torch.full((100,), float(number))}
        futures.append(
            dcp.async_save(
                state, checkpoint_id=f"step-{number}", storage_writer=writer, planner=planner
            )
        )
        assert planner.reached.wait(WAIT_S)
    for planner, future in reversed(list(zip(planners, futures, strict=True))):
        planner.go.set()
        future.result(WAIT_S)
    for number in range(2):
        target = load(url, {f"w{number}": torch.zeros(100)}, f"step-{number}")
        assert target[f"w{number}"].tolist() == [float(number)] * 100


def fail_on_one_rank(rank: int, root: str) -> tuple[str, bool]:
    writer = TieredWriter(f"tiered://{root}")
    future = dcp.async_save(
        states.shards(), checkpoint_id="step-1", storage_writer=writer, planner=Failing(rank=1)
    )
    raised = states.failure(lambda: future.result(WAIT_S))
    dist.barrier()
    dcp.async_save(states.shards(), checkpoint_id="step-2", storage_writer=writer).result(WAIT_S)
    reader = TieredReader(f"tiered://{root}")
    dcp.load(states.zeroed(states.shards()), storage_reader=reader)
    return str(cause(raised)), reader.checkpoint_id == "step-2"


def test_o037_failure_of_one_rank_is_known_to_all(tmp_path: Path) -> None:
    for error, good in share_ranks(3, fail_on_one_rank, str(tmp_path)):
        assert "injected" in error
        assert good


def test_o038_failed_save_is_no_checkpoint_and_does_not_hurt_the_next(url: str) -> None:
    writer = TieredWriter(url)
    for name, planner in (("step-1", None), ("step-2", Failing()), ("step-3", None)):
        future = dcp.async_save(
            {"w": torch.ones(3)}, checkpoint_id=name, storage_writer=writer, planner=planner
        )
        if planner is None:
            future.result(WAIT_S)
            continue
        raised = states.failure(partial(future.result, WAIT_S))
        assert isinstance(cause(raised), UnavailableError)
        reader = TieredReader(url)
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
        assert reader.checkpoint_id == "step-1"
    assert [line.checkpoint_id for line in writer.status()] == ["step-1", "step-3"]


def test_o039_load_while_a_save_runs(url: str) -> None:
    """By name: it is not complete. Newest: the one before. Never a part of it."""
    dcp.save({"w": torch.zeros(3)}, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    planner = Held()
    future = begin(url, {"w": torch.ones(3)}, "step-2", planner)
    raised = states.failure(lambda: load(url, {"w": torch.zeros(3)}, "step-2"))
    assert isinstance(cause(raised), (AbsentError, IncompleteError))
    assert load(url, {"w": torch.ones(3)})["w"].tolist() == [0.0] * 3
    planner.go.set()
    future.result(WAIT_S)
    assert load(url, {"w": torch.zeros(3)})["w"].tolist() == [1.0] * 3


FORK = """
import os, sys, torch, torch.distributed.checkpoint as dcp
from dcp_tiered import TieredReader, TieredWriter
import json
arguments = json.loads(sys.argv[1])
torch.set_num_threads(1)
with TieredWriter(**arguments) as writer:
    dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer)
    writer.wait("durable", "step-1", timeout_s=60)
arguments.pop("local")
reader = TieredReader(**arguments)
dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
child = os.fork()
target = {"w": torch.zeros(3)}
dcp.load(target, storage_reader=reader)
good = target["w"].tolist() == [1.0] * 3
if child == 0:
    os._exit(0 if good else 9)
_, status = os.waitpid(child, 0)
sys.exit(0 if good and status == 0 else 1)
"""


def test_o040_o041_fork_with_an_open_reader_and_a_flusher(s3_run: Run) -> None:
    """The child uses the parent's reader: its connections are made anew, and it ends by itself."""
    import json

    arguments = json.dumps({"url": s3_run.url, "local": str(s3_run.local), **s3_run.options})
    command = [sys.executable, "-W", "ignore", "-c", FORK, arguments]
    subprocess.run(command, check=True, timeout=90)


def test_o040_we_never_fork_by_ourselves() -> None:
    import dcp_tiered

    sources = [path.read_text() for path in Path(dcp_tiered.__file__).parent.rglob("*.py")]
    assert not any("multiprocessing" in source for source in sources)


# PROCESS: DCP saves in a process of its own.


def save_in_process(rank: int, arguments: dict[str, Any]) -> list[str | None]:
    """Save three times through DCP's saver process; a failure in between is told and survived."""
    writer, found = TieredWriter(**arguments), []
    for number in range(3):
        state = states.shards() | {"n": number, "w": filled((30,), seed=number)}
        future = dcp.async_save(
            state,
            checkpoint_id=f"step-{number}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            planner=Failing(rank=1) if number == 1 else None,
        )
        state["w"].zero_()
        if number == 1:
            raised = states.failure(partial(future.result, WAIT_S))
            found.append(str(cause(raised)))
            continue
        future.result(WAIT_S)
        writer.wait("local", f"step-{number}", timeout_s=WAIT_S)
        expected = states.shards() | {"n": number, "w": filled((30,), seed=number)}
        target = states.zeroed(expected)
        dcp.load(target, storage_reader=TieredReader(**arguments))
        found.append(states.difference(expected, target))
    writer.wait("durable", "step-2", timeout_s=WAIT_S)
    return found


@pytest.mark.slow
def test_process_saves_like_thread(posix_run: Run) -> None:
    """O019, O037: values of the call, own state per save, and errors that cross two processes."""
    for first, error, last in run_ranks(2, save_in_process, posix_run.arguments()):
        assert first is last is None
        assert "injected" in str(error)
    assert len(posix_run.commits("step-2")) == 1
    assert not posix_run.commits("step-1")


class Suicidal(DefaultSavePlanner):
    """Ends the saver process in the middle of a write, as an out-of-memory killer would."""

    def resolve_data(self, write_item: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(WAIT_S)


def lose_the_saver(rank: int, root: str) -> tuple[str, list[str], str | None]:
    writer = TieredWriter(f"tiered://{root}")
    state = states.shards()
    future = dcp.async_save(
        state,
        checkpoint_id="step-1",
        storage_writer=writer,
        planner=Suicidal(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    raised = states.failure(lambda: future.result(WAIT_S))
    left = [path.suffix for path in Path(root).rglob("*") if path.is_file()]
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    target = states.zeroed(state)
    dcp.load(target, storage_reader=TieredReader(f"tiered://{root}"))
    return str(raised), left, states.difference(state, target)


@pytest.mark.slow
def test_o036_saver_that_is_killed_ends_the_wait_and_the_next_save_works(tmp_path: Path) -> None:
    ((error, left, found),) = run_ranks(1, lose_the_saver, str(tmp_path))
    assert "dead" in error
    assert set(left) <= {".json"}
    assert found is None
