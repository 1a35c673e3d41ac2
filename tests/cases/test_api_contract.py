"""Known ways in which a storage backend breaks DCP's contract."""

import ast
import io
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem

import dcp_tiered
from dcp_tiered import ConflictError, InvalidError, TieredReader, TieredWriter, cause
from tests.conftest import Run
from tests.support import states
from tests.support.ranks import share_ranks
from tests.support.states import State, filled

PACKAGE = Path(dcp_tiered.__file__).parent


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"tiered://{tmp_path}"


def test_o014_o015_nothing_is_durable_before_the_store_has_confirmed_it(s3_run: Run) -> None:
    """No stream is handed to DCP that could be synced in vain: commits follow verified objects."""
    with TieredWriter(**s3_run.arguments()) as writer:
        dcp.save({"w": filled((999,))}, checkpoint_id="step-1", storage_writer=writer)
        writer.wait("durable", "step-1", timeout_s=60)
    (commit,) = s3_run.commits("step-1")
    found = s3_run.keys()
    assert commit["packs"]
    for pack in commit["packs"]:
        assert found[f"step-1/{pack['name']}"] == pack["length"]


def old_or_new(reader: TieredReader) -> str:
    """Return which of two checkpoints loads whole: `a` or `b`."""
    for name in ("a", "b"):
        target = {name: torch.zeros(4)}
        if states.attempt(lambda: dcp.load(target, storage_reader=reader)) is None:  # noqa: B023
            assert target[name].tolist() == [1.0 if name == "a" else 2.0] * 4
            return name
    raise AssertionError("neither loads")


class Interrupted(DefaultSavePlanner):
    """Fails when it is asked for its data."""

    def resolve_data(self, write_item: Any) -> Any:
        raise OSError("injected")


def test_o016_overwrite_is_explicit_and_whole(url: str) -> None:
    """What a reader sees is the old or the new one, also after an overwrite that failed."""
    reader = TieredReader(url)
    old, new = {"a": torch.ones(4)}, {"b": torch.full((4,), 2.0)}
    dcp.save(old, checkpoint_id="step-1", storage_writer=(plain := TieredWriter(url)))
    raised = states.failure(lambda: dcp.save(new, checkpoint_id="step-1", storage_writer=plain))
    assert isinstance(cause(raised), ConflictError)
    replacing = TieredWriter(url, overwrite=True)
    planner = Interrupted()
    raised = states.failure(
        lambda: dcp.save(new, checkpoint_id="step-1", storage_writer=replacing, planner=planner)
    )
    assert "injected" in str(raised)
    assert old_or_new(reader) == "a"
    dcp.save(new, checkpoint_id="step-1", storage_writer=replacing)
    assert old_or_new(reader) == "b"


def save_for_one(rank: int, root: str) -> None:
    state = states.shards()
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(f"tiered://{root}"))


ALONE = """
import sys, torch, torch.distributed.checkpoint as dcp
from dcp_tiered import TieredReader, TieredWriter
target = {"step": torch.tensor(0.0), "rows (17, 2)": torch.zeros(17, 2)}
dcp.load(target, storage_reader=TieredReader(sys.argv[1]))
assert target["step"] == 3.0
assert target["rows (17, 2)"].any()
dcp.save(target, checkpoint_id="step-2", storage_writer=TieredWriter(sys.argv[1]))
"""


def test_o017_without_process_group_and_launcher(url: str, tmp_path: Path) -> None:
    """A checkpoint of four ranks loads in a plain process whose environment knows no ranks."""
    share_ranks(4, save_for_one, str(tmp_path))
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    command = [sys.executable, "-W", "ignore", "-c", ALONE, url]
    subprocess.run(command, check=True, env=environment, timeout=60)
    assert len(list(tmp_path.glob("*/step-2/*.shard"))) == 1


def in_last_group(rank: int, root: str) -> list[int] | None:
    group = dist.new_group([2, 3])
    if rank < 2:
        return None
    state = {"x": torch.tensor([rank - 1])}
    writer = TieredWriter(f"tiered://{root}")
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer, process_group=group)
    target = {"x": torch.tensor([0])}
    reader = TieredReader(f"tiered://{root}", process_group=group)
    dcp.load(target, storage_reader=reader, process_group=group)
    return target["x"].tolist()


def test_o018_group_without_global_rank_zero(tmp_path: Path) -> None:
    """The other ranks take no part: our code calls no collective on the default group."""
    assert share_ranks(4, in_last_group, str(tmp_path)) == [None, None, [1], [1]]


class Spy(TieredWriter):
    """Notes which methods DCP calls."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "reset",
            "set_up_storage_writer",
            "prepare_local_plan",
            "prepare_global_plan",
            "write_data",
            "finish",
        ):
            self.calls.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("resets", [1, 2, 3])
def test_o019_reset_may_come_more_than_once(url: str, resets: int) -> None:
    writer = Spy(url)
    for _ in range(resets - 1):
        writer.reset("step-1")
    dcp.async_save({"w": filled((5,))}, checkpoint_id="step-1", storage_writer=writer).result()
    called = [name for name, _ in groupby(writer.calls)]  # DCP looks at a signature before it calls
    assert called == [
        "reset",
        "set_up_storage_writer",
        "prepare_local_plan",
        "prepare_global_plan",
        "write_data",
        "finish",
    ]
    target = {"w": torch.zeros(5)}
    dcp.load(target, checkpoint_id="step-1", storage_reader=TieredReader(url))
    assert states.bits(target["w"]) == states.bits(filled((5,)))


@pytest.mark.parametrize(
    "state", [{"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, {"a": [torch.ones(1)], "a.0": 1}]
)
def test_o022_colliding_names_are_refused(url: str, tmp_path: Path, state: State) -> None:
    with pytest.raises(BaseException, match="duplicated flatten key"):
        dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    assert not list(tmp_path.rglob("published-*"))


def test_o022_odd_names_are_data(url: str, tmp_path: Path) -> None:
    """No key is ever a file name."""
    state = {name: value for name, value in states.names().items() if name != "inner"}
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    target = states.zeroed(state)
    dcp.load(target, storage_reader=TieredReader(url))
    assert states.difference(state, target) is None
    (directory,) = tmp_path.glob("*/step-1")
    assert {path.suffix for path in directory.iterdir()} == {".shard", ".json"}


def test_o022_key_that_is_no_string_is_refused_with_its_name(url: str) -> None:
    """Unflattened, DCP hands keys on as they are; ours are strings."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    raised = states.failure(
        lambda: dcp.save(
            {5: torch.ones(1)},
            checkpoint_id="step-1",
            storage_writer=TieredWriter(url),
            planner=planner,
        )
    )
    error = cause(raised)
    assert isinstance(error, InvalidError)
    assert error.key == "5"


def test_o023_no_private_module_of_torch_is_imported() -> None:
    private = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            private += [
                f"{path.name}: {name}"
                for name in names
                if name.startswith("torch") and any(p.startswith("_") for p in name.split("."))
            ]
    assert not private


def without_rank(rank: int, root: str) -> str:
    """Ask for the rank as if its look-up failed."""
    real = dist.get_rank

    def broken(*args: Any) -> int:
        raise RuntimeError("no rank")

    writer = TieredWriter(f"tiered://{root}")
    torch.distributed.get_rank = broken if rank else real
    try:
        dcp.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    except BaseException as exc:  # noqa: BLE001 - CheckpointException is none of Exception
        return str(exc)
    finally:
        torch.distributed.get_rank = real
    return "saved"


@pytest.mark.filterwarnings("ignore")
def test_o024_failed_look_up_of_the_rank_is_no_rank_zero(tmp_path: Path) -> None:
    good, bad = share_ranks(2, without_rank, str(tmp_path))
    assert good == "saved"
    assert "no rank" in bad
    assert len(list(tmp_path.rglob("*.shard"))) == 1


def test_o024_two_processes_never_have_the_same_file_name(tmp_path: Path) -> None:
    for number in range(3):
        state = {"w": torch.ones(1)}
        dcp.save(
            state, checkpoint_id=f"s-{number}", storage_writer=TieredWriter(f"tiered://{tmp_path}")
        )
    names = [path.name for path in tmp_path.rglob("*.shard")]
    assert len(names) == len(set(names)) == 3
    assert {name.split("-")[0] for name in names} == {"0"}


class StreamCheck(DefaultLoadPlanner):
    """Looks at the stream that objects come in."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert value.readable()
        assert value.seekable()
        assert value.tell() == 0
        first = bytearray(2)
        assert value.readinto(first) == 2
        assert bytes(first) == b"PK"
        value.seek(0)
        super().load_bytes(read_item, value)


@pytest.mark.parametrize("trust", [False, True])
def test_o026_streams_keep_the_contract_of_io(url: str, trust: bool) -> None:
    dcp.save({"n": [1, 2]}, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    target = {"n": None}
    reader = TieredReader(url, trust_bytes=trust)
    dcp.load(target, storage_reader=reader, planner=StreamCheck())
    assert target == {"n": [1, 2]}
