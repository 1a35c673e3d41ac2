"""`TieredReader`: which checkpoint, which copy, which bytes, and what it never does."""

import logging
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import Shard

from dcp_tiered import (
    AbsentError,
    CorruptError,
    IncompleteError,
    InvalidError,
    Limits,
    NoCheckpointError,
    TieredError,
    TieredReader,
    TieredWriter,
    cause,
)
from dcp_tiered.services import resolve
from dcp_tiered.services.catalog import Catalog
from tests.conftest import QUICK, Run, end_flushers
from tests.support import states
from tests.support.ranks import share_ranks
from tests.support.states import State, filled

MIB = 1 << 20
BLOCK = 256 * 1024


def save(
    run: Run, checkpoint_id: str, state: State, level: str = "durable", **options: Any
) -> None:
    with TieredWriter(**run.arguments(), **options) as writer:
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
        writer.wait(level, checkpoint_id, timeout_s=60)


def load(
    target: State, reader: TieredReader, checkpoint_id: str | None = None
) -> TieredError | None:
    """Load; return the error of ours that it ends in."""
    try:
        dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=reader)
    except BaseException as exc:
        error = cause(exc)
        if error is None:
            raise
        return error
    return None


def shard_file(run: Run, checkpoint_id: str) -> Path:
    (path,) = (run.run_path() / checkpoint_id).glob("*.shard")
    return path


def flip(path: Path, at: int) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def where(path: Path, tensor: torch.Tensor) -> int:
    """Return where the bytes of a tensor lie in a file."""
    return path.read_bytes().index(states.bits(tensor))


# Which copy.


STATE = {"w": filled((300, 1000)), "v": filled((50,), torch.int64), "n": 3}


@pytest.fixture
def committed(posix_run: Run) -> Run:
    save(posix_run, "step-1", STATE)
    return posix_run


def pack(run: Run) -> Path:
    (key,) = (key for key in sorted(run.keys()) if key.endswith(".pack"))
    return Path(run.url.removeprefix("tiered::file://")) / key


def loads_exactly(run: Run) -> TieredReader:
    target = states.zeroed(STATE)
    reader = TieredReader(**run.arguments())
    assert load(target, reader) is None
    assert states.difference(STATE, target) is None
    return reader


def test_sound_local_copy_is_used(committed: Run) -> None:
    pack(committed).unlink()
    assert loads_exactly(committed).bytes_read["durable"] == 0


def test_local_copy_with_a_flipped_bit_is_replaced_by_the_durable_one(
    committed: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """O057: right values, one line in the log, and the bad copy stays for people to look at."""
    path = shard_file(committed, "step-1")
    flip(path, where(path, STATE["w"]) + 600_000)
    with caplog.at_level(logging.ERROR):
        reader = loads_exactly(committed)
    assert reader.bytes_read["durable"] > 0
    (record,) = (one for one in caplog.records if "local copy is bad" in one.getMessage())
    assert str(path.name) in record.getMessage()
    assert path.exists()


@pytest.mark.parametrize("damage", ["delete", "truncate", "cut the footer", "flip the footer"])
def test_local_copy_that_is_gone_or_cut_is_replaced(committed: Run, damage: str) -> None:
    """O058, O059."""
    path = shard_file(committed, "step-1")
    size = path.stat().st_size
    path.chmod(0o600)
    if damage == "delete":
        path.unlink()
    elif damage == "flip the footer":
        flip(path, size - 60)
    else:
        os.truncate(path, size // 2 if damage == "truncate" else size - 10)
    assert loads_exactly(committed).bytes_read["durable"] > 0


def test_local_disk_that_fails_is_replaced(committed: Run) -> None:
    """A directory in place of the file: a real read fails with an errno that is not 'missing'."""
    path = shard_file(committed, "step-1")
    path.unlink()
    path.mkdir()
    assert loads_exactly(committed).bytes_read["durable"] > 0


def test_damaged_local_manifest_is_replaced(committed: Run) -> None:
    """O057: the local index counts as little as local data once it is damaged."""
    (manifest,) = committed.run_path().glob("step-1/published-*.json")
    flip(manifest, manifest.stat().st_size - 20)
    loads_exactly(committed)


def test_a_copy_that_is_evicted_while_it_is_chosen_is_read_where_it_went(
    committed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flusher of the job before may still be at work when the next one resumes."""
    seen = resolve.choose

    def choose_then_evict(catalog: Catalog, offers: Any) -> Any:
        choice = seen(catalog, offers)
        for path in committed.run_path().glob("*/*"):
            if path.name.startswith("published-") or path.suffix == ".shard":
                path.unlink()
        return replace(choice, commit=None)  # as of one that was not committed then

    monkeypatch.setattr(resolve, "choose", choose_then_evict)
    loads_exactly(committed)


def test_both_copies_bad_names_the_item(committed: Run) -> None:
    local, durable = shard_file(committed, "step-1"), pack(committed)
    flip(local, where(local, STATE["w"]) + 5)
    flip(durable, where(durable, STATE["w"]) + 300_000)
    target = states.zeroed(STATE)
    error = load(target, TieredReader(**committed.arguments()))
    assert isinstance(error, CorruptError)
    assert "'w'" in error.message
    assert error.tier == "durable"
    assert error.hint is not None


def test_bad_bytes_never_reach_a_target(posix_run: Run) -> None:
    """A checkpoint without another copy: the damaged tensor keeps what it had."""
    save(posix_run, "step-1", STATE, level="local")
    run = Run(url=f"tiered://{posix_run.local}/alone", local=posix_run.local / "alone")
    run.local.mkdir()
    with TieredWriter(run.url) as writer:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    path = shard_file(run, "step-1")
    flip(path, where(path, STATE["w"]) + 5)
    target = states.zeroed(STATE)
    error = load(target, TieredReader(run.url))
    assert isinstance(error, CorruptError)
    assert error.tier == "local"
    assert not target["w"].any()


def on_page_borders(state: State) -> State:
    """Return targets for tensors in memory that O_DIRECT can read into."""
    return {key: torch.zeros_like(value).share_memory_() for key, value in state.items()}


STRAIGHT = {"w": filled((3_200_007,)), "b": filled((700, 999)).to(torch.bfloat16)}


def test_aligned_targets_are_read_into_without_a_buffer(tmp_path: Path) -> None:
    run = Run(url=f"tiered://{tmp_path}", local=tmp_path)
    save(run, "step-1", STRAIGHT, level="local")
    target, reader = on_page_borders(STRAIGHT), TieredReader(run.url)
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in target.values())
    assert load(target, reader) is None
    assert states.difference(STRAIGHT, target) is None
    buffers = reader.metrics()['dcp_tiered_arena_bytes{use="read"}']
    assert buffers <= 8 * MIB + 64 * 1024, "one, for the last parts"


@pytest.mark.parametrize("both", [False, True], ids=["local bad", "both bad"])
def test_aligned_targets_take_no_bad_bytes(posix_run: Run, both: bool) -> None:
    save(posix_run, "step-1", STRAIGHT)
    at = where(shard_file(posix_run, "step-1"), STRAIGHT["w"]) + 300_000
    flip(shard_file(posix_run, "step-1"), at)
    if both:
        flip(pack(posix_run), where(pack(posix_run), STRAIGHT["w"]) + 300_000)
    target = on_page_borders(STRAIGHT)
    error = load(target, TieredReader(**posix_run.arguments()))
    if both:
        assert isinstance(error, CorruptError)
        assert not target["w"][: 8 * MIB // 4].any(), "what was read with the bad block is gone"
    else:
        assert error is None
        assert states.difference(STRAIGHT, target) is None


def test_metrics_of_a_load(committed: Run) -> None:
    reader = loads_exactly(committed)
    values = reader.metrics()
    assert values['dcp_tiered_read_bytes_total{tier="local"}'] >= STATE["w"].nbytes
    assert values['dcp_tiered_read_bytes_total{tier="durable"}'] == 0
    assert values["dcp_tiered_read_seconds_total"] > 0
    held = values['dcp_tiered_arena_bytes{use="read"}']
    assert 0 < held <= values['dcp_tiered_arena_bytes_max{use="read"}'] <= 128 * MIB


def test_item_of_a_sound_part_loads_from_a_damaged_file(tmp_path: Path) -> None:
    """Checksums are per block: what nobody asks for does no harm."""
    run = Run(url=f"tiered://{tmp_path}", local=tmp_path)
    with TieredWriter(run.url) as writer:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    path = shard_file(run, "step-1")
    flip(path, where(path, STATE["w"]) + 5)
    target: State = {"v": torch.zeros(50, dtype=torch.int64)}
    assert load(target, TieredReader(run.url)) is None
    assert torch.equal(target["v"], STATE["v"])


# Which bytes.


class BoxPlanner(DefaultLoadPlanner):
    """Asks for one box of one tensor, as resharding would."""

    def __init__(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.offsets, self.lengths = torch.Size(offsets), torch.Size(lengths)

    def create_local_plan(self) -> LoadPlan:
        (item,) = super().create_local_plan().items
        import dataclasses

        return LoadPlan(
            [
                dataclasses.replace(
                    item,
                    storage_offsets=self.offsets,
                    dest_offsets=self.offsets,
                    lengths=self.lengths,
                )
            ]
        )


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.Tensor]:
    root = tmp_path_factory.mktemp("big")
    tensor = filled((4096, 1024))  # 16 MiB, 4 KiB a row
    with TieredWriter(f"tiered://{root}") as writer:
        dcp.save({"w": tensor}, checkpoint_id="step-1", storage_writer=writer)
    return f"tiered://{root}", tensor


def read_box(
    big: tuple[str, torch.Tensor], offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> int:
    """Read a box; check it and that nothing else changed; return the bytes of data read."""
    url, tensor = big
    target = {"w": torch.zeros_like(tensor)}
    reader = TieredReader(url)
    dcp.load(target, storage_reader=reader, planner=BoxPlanner(offsets, lengths))
    box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    expected = torch.zeros_like(tensor)
    expected[box] = tensor[box]
    assert states.bits(target["w"]) == states.bits(expected)
    (path,) = Path(url.removeprefix("tiered://")).glob("*/step-1/*.shard")
    footer = path.stat().st_size - int.from_bytes(path.read_bytes()[-48:-40], "little")
    return reader.bytes_read["local"] - footer


def test_row_range_reads_its_blocks_only(big: tuple[str, torch.Tensor]) -> None:
    assert read_box(big, (64, 0), (64, 1024)) == BLOCK
    assert read_box(big, (100, 0), (64, 1024)) == 2 * BLOCK
    assert read_box(big, (0, 0), (1, 1024)) == BLOCK
    assert read_box(big, (4095, 0), (1, 1024)) == BLOCK
    assert read_box(big, (0, 0), (4096, 1024)) == 16 * MIB


def test_single_element_reads_one_block(big: tuple[str, torch.Tensor]) -> None:
    assert read_box(big, (2000, 512), (1, 1)) == BLOCK


def test_column_range_of_near_rows_reads_the_span(big: tuple[str, torch.Tensor]) -> None:
    assert read_box(big, (0, 3), (4096, 2)) == 16 * MIB
    assert read_box(big, (64, 3), (64, 2)) == BLOCK


def test_column_range_of_far_rows_reads_its_blocks_only(tmp_path: Path) -> None:
    """Rows of 2 MiB: one block of each row, not the megabytes between."""
    tensor = filled((8, 512 * 1024))
    with TieredWriter(f"tiered://{tmp_path}") as writer:
        dcp.save({"w": tensor}, checkpoint_id="step-1", storage_writer=writer)
    assert read_box((f"tiered://{tmp_path}", tensor), (0, 70_000), (8, 100)) == 8 * BLOCK


def test_zero_length_reads_ask_for_nothing(posix_run: Run) -> None:
    """O004: alone and among others; an empty tensor needs no block at all."""
    state = {"empty": torch.zeros(0, 16), "also": torch.zeros(4, 0, 3), "w": filled((10,))}
    save(posix_run, "step-1", state)
    pack(posix_run)
    reader = TieredReader(**posix_run.durable_only())
    assert load({"empty": torch.zeros(0, 16), "also": torch.zeros(4, 0, 3)}, reader) is None
    assert reader.bytes_read["durable"] == 0
    assert load({"w": torch.zeros(10)}, reader) is None
    footer_and_w = reader.bytes_read["durable"]
    target = states.zeroed(state)
    assert load(target, reader) is None
    assert states.difference(state, target) is None
    assert reader.bytes_read["durable"] == footer_and_w


def test_durable_reads_are_as_sparse_as_local_ones(s3_run: Run) -> None:
    tensor = filled((4096, 256))
    save(s3_run, "step-1", {"w": tensor, "other": filled((1000, 1000))})
    reader = TieredReader(**s3_run.durable_only())
    target = {"w": torch.zeros_like(tensor)}
    dcp.load(target, storage_reader=reader, planner=BoxPlanner((0, 0), (10, 256)))
    assert states.bits(target["w"][:10]) == states.bits(tensor[:10])
    assert BLOCK <= reader.bytes_read["durable"] < BLOCK + 10_000


# Which checkpoint.


def test_newest_and_explicit(committed: Run) -> None:
    other = {"w": filled((300, 1000), seed=9), "v": STATE["v"], "n": 4}
    save(committed, "a-name-that-sorts-first", other)
    for arguments in (committed.arguments(), committed.durable_only()):
        reader = TieredReader(**arguments)
        for checkpoint_id, expected in ((None, other), ("step-1", STATE), (None, other)):
            target = states.zeroed(STATE)
            assert load(target, reader, checkpoint_id) is None
            assert states.difference(expected, target) is None


def test_none_at_all_and_none_of_that_id(committed: Run, tmp_path: Path) -> None:
    """O048: a run without checkpoints is told apart from everything else."""
    (tmp_path / "fresh").mkdir()
    for url in (f"tiered://{tmp_path}/fresh", f"tiered::file://{tmp_path}/lustre/other-run"):
        error = load({"w": torch.zeros(1)}, TieredReader(url))
        assert isinstance(error, NoCheckpointError), url
    error = load({"w": torch.zeros(1)}, TieredReader(**committed.arguments()), "step-2")
    assert isinstance(error, AbsentError)
    assert not isinstance(error, NoCheckpointError)


def test_durable_mount_that_is_missing_is_no_fresh_start(tmp_path: Path) -> None:
    """I8: a mount that is not there says nothing about what is on it."""
    reader = TieredReader(f"tiered::file://{tmp_path}/not-mounted/run")
    error = load({"w": torch.zeros(1)}, reader)
    assert error is not None
    assert not isinstance(error, AbsentError)


def forget(path: Path, pattern: str) -> None:
    for entry in path.glob(pattern):
        entry.unlink()


def test_only_incomplete_ones(tmp_path: Path) -> None:
    """O045, O048: a save that was cut off never loads, by no name, and is not 'nothing'."""
    run = Run(url=f"tiered://{tmp_path}", local=tmp_path)
    with TieredWriter(run.url) as writer:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    forget(run.run_path(), "step-1/published-*.json")
    for checkpoint_id in (None, "step-1"):
        error = load(states.zeroed(STATE), TieredReader(run.url), checkpoint_id)
        assert isinstance(error, IncompleteError)
        assert "step-1" in error.message


def test_newer_incomplete_one_is_passed_over_with_a_reason(
    committed: Run, caplog: pytest.LogCaptureFixture
) -> None:
    other = states.zeroed(STATE)
    with TieredWriter(**committed.arguments()) as writer:
        dcp.save(other, checkpoint_id="step-2", storage_writer=writer)
        writer.wait("durable", "step-2", timeout_s=60)
    end_flushers(committed.local)  # it would commit it again
    durable = Path(committed.url.removeprefix("tiered::file://"))
    forget(durable, "step-2/record-*.json")
    forget(committed.run_path(), "step-2/record-*.json")
    shard_file(committed, "step-2").unlink()
    with caplog.at_level(logging.WARNING):
        loads_exactly(committed)
    assert any(
        "passing over step-2" in one.getMessage() and "1 shard files missing" in one.getMessage()
        for one in caplog.records
    )


def test_pending_upload_of_another_node_is_incomplete_not_absent(committed: Run) -> None:
    """O062."""
    end_flushers(committed.local)
    forget(Path(committed.url.removeprefix("tiered::file://")), "step-1/record-*.json")
    error = load(states.zeroed(STATE), TieredReader(**committed.durable_only()), "step-1")
    assert isinstance(error, IncompleteError)


def test_explicit_id_loads_with_the_store_down(posix_run: Run, tmp_path: Path) -> None:
    """Whole on this node, never committed, and nobody answers at the durable tier."""
    save(posix_run, "step-1", STATE, level="local")
    down = Run(
        url="tiered::s3://nobody-home/run",
        local=posix_run.local,
        options={"s3": {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}},
    )
    with TieredWriter(**down.arguments()) as writer:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    target = states.zeroed(STATE)
    assert load(target, TieredReader(**down.arguments()), "step-1") is None
    assert states.difference(STATE, target) is None
    error = load(states.zeroed(STATE), TieredReader(**down.arguments()))
    assert error is not None
    assert not isinstance(error, AbsentError)
    assert "'step-1'" in str(error.hint)


def test_reader_holds_nothing_of_an_earlier_load(committed: Run) -> None:
    """O100: save, load, change, save, load with the same objects."""
    writer, reader = TieredWriter(**committed.arguments()), TieredReader(**committed.arguments())
    for number in range(3):
        state = {"w": filled((20, number + 1)), "n": number}
        dcp.save(state, checkpoint_id=f"again-{number}", storage_writer=writer)
        writer.wait("durable", f"again-{number}", timeout_s=60)
        target = states.zeroed(state)
        assert load(target, reader) is None
        assert states.difference(state, target) is None


# Agreement across ranks.


def roots(base: str, rank: int) -> dict[str, Any]:
    """Give each rank a local tier and a launcher of its own, as on two nodes."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    local = Path(base) / f"node-{rank}"
    local.mkdir(exist_ok=True)
    return {"url": f"tiered::file://{base}/durable/run", "local": str(local), "limits": QUICK}


def two_nodes(rank: int, base: str) -> dict[str, str]:
    (Path(base) / "durable").mkdir(exist_ok=True)
    arguments = roots(base, rank)
    state = states.shards()
    result: dict[str, str] = {}

    def attempt(name: str, checkpoint_id: str | None, arguments: dict[str, Any]) -> TieredReader:
        target = states.zeroed(state)
        reader = TieredReader(**arguments)
        error = load(target, reader, checkpoint_id)
        found = states.difference(state, target) if error is None else None
        result[name] = type(error).__name__ if error else str(found)
        dist.barrier()
        return reader

    attempt("nothing yet", None, arguments)
    with TieredWriter(**arguments) as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
        writer.wait("durable", "step-1", timeout_s=60)
        dist.barrier()
        reader = attempt("own nodes", None, arguments)
        result["local bytes"] = str(reader.bytes_read["local"] > 0)
        attempt("swapped nodes", None, roots(base, 1 - rank))
        attempt("one node is new", None, roots(base, rank * 7))
        attempt("only one rank asks by name", "step-1" if rank else None, arguments)
        attempt("different names", f"step-{rank}", arguments)
        attempt("one asks for what cannot be", "step-1" if rank else "../x", arguments)
        attempt("none of that name", "step-9", arguments)
        dcp.save(state, checkpoint_id="step-2", storage_writer=writer)
        writer.wait("durable", "step-2", timeout_s=60)
        end_flushers(Path(arguments["local"]))  # they would commit it again
        dist.barrier()
        if rank == 0:
            forget(Path(base), "*/*/step-2/record-*.json")
        dist.barrier()
        reader = attempt("newest is not committed and spread over nodes", None, arguments)
        result["which"] = str(reader.checkpoint_id)
        attempt("the same by name", "step-2", arguments)
    return result


@pytest.mark.slow
def test_ranks_agree_across_nodes(tmp_path: Path) -> None:
    """O058, O062: all ranks load the same checkpoint or get the same error."""
    try:
        answers = share_ranks(2, two_nodes, str(tmp_path))
    finally:
        for node in tmp_path.glob("node-*"):
            end_flushers(node)
    expected = {
        "nothing yet": "NoCheckpointError",
        "own nodes": "None",
        "local bytes": "True",
        "swapped nodes": "None",
        "one node is new": "None",
        "only one rank asks by name": "InvalidError",
        "different names": "InvalidError",
        "one asks for what cannot be": "InvalidError",
        "none of that name": "AbsentError",
        "newest is not committed and spread over nodes": "None",
        "which": "step-1",
        "the same by name": "IncompleteError",
    }
    assert answers == [expected] * 2


def unlike_groups(rank: int, root: str) -> list[str]:
    """Ranks whose readers do not talk to each other and see different checkpoints."""
    writer = TieredWriter(f"tiered://{root}/{rank}")
    dcp.save(
        {"w": torch.ones(2)}, checkpoint_id=f"step-{rank}", storage_writer=writer, no_dist=True
    )
    dist.barrier()
    reader = TieredReader(f"tiered://{root}/{rank}", no_dist=True)
    error = load({"w": torch.zeros(2)}, reader)
    return [type(error).__name__, str(error)]


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_would_load_different_checkpoints_all_stop(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for kind, text in share_ranks(2, unlike_groups, str(tmp_path)):
        assert kind == "ConflictError"
        assert "step-0" in text
        assert "step-1" in text


# Nothing that is read is executed.


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (open, (self.path, "w"))


class Settings:
    """A class that torch does not know."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and other.value == self.value

    __hash__ = None


def test_object_of_an_unknown_class(tmp_path: Path) -> None:
    """O009, O010: refused at save with its key; allowed by class; or trusted on both sides."""
    url, state = f"tiered://{tmp_path}", {"settings": Settings(5)}
    error = None
    try:
        dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    except BaseException as exc:  # noqa: BLE001 - CheckpointException is none of Exception
        error = cause(exc)
    assert isinstance(error, InvalidError)
    assert error.key == "settings"
    assert "Settings" in error.message
    assert "add_safe_globals" in str(error.hint)
    assert not list(tmp_path.rglob("*.shard"))

    trusting = TieredWriter(url, trust_bytes=True)
    dcp.save(state, checkpoint_id="step-1", storage_writer=trusting)
    error = load({"settings": None}, TieredReader(url))
    assert isinstance(error, InvalidError)
    assert error.key == "settings"
    assert "Settings" in error.message

    for reader in (TieredReader(url, trust_bytes=True), TieredReader(url)):
        target: State = {"settings": None}
        with torch.serialization.safe_globals([Settings]):
            assert load(target, reader) is None
        assert target["settings"] == Settings(5)
    with torch.serialization.safe_globals([Settings]):
        dcp.save(state, checkpoint_id="step-2", storage_writer=TieredWriter(url))


def test_malicious_pickle_never_runs(tmp_path: Path) -> None:
    """O123: neither as an object nor as planner data nor as the reader's metadata."""
    (tmp_path / "run").mkdir()
    url, trap = f"tiered://{tmp_path}/run", tmp_path / "trap"
    writer = TieredWriter(url, trust_bytes=True)
    dcp.save({"evil": Evil(str(trap))}, checkpoint_id="step-1", storage_writer=writer)
    assert not trap.exists()
    error = load({"evil": None}, TieredReader(url))
    assert isinstance(error, InvalidError)
    assert not trap.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"evil": None}, TieredReader(url, trust_bytes=True))
    assert trap.exists(), "the trap works, so that the test above means something"


def test_pickle_in_place_of_a_manifest_never_runs(tmp_path: Path) -> None:
    """O123: a manifest is plain data, whatever lies there."""
    (tmp_path / "run").mkdir()
    run = Run(url=f"tiered://{tmp_path}/run", local=tmp_path / "run")
    trap = tmp_path / "trap"
    with TieredWriter(run.url) as writer:
        dcp.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer)
    (manifest,) = run.run_path().glob("step-1/published-*.json")
    manifest.chmod(0o600)
    manifest.write_bytes(pickle.dumps(Evil(str(trap))))
    error = load({"w": torch.zeros(1)}, TieredReader(run.url))
    assert isinstance(error, IncompleteError)
    assert not trap.exists()


def test_metadata_is_what_stock_dcp_describes(tmp_path: Path) -> None:
    """The reader's metadata equals that of the save, but for where things lie."""
    with TieredWriter(f"tiered://{tmp_path}") as writer:
        saved = dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    found = TieredReader(f"tiered://{tmp_path}").read_metadata()
    assert isinstance(saved, Metadata)
    assert found.planner_data == saved.planner_data
    assert list(found.state_dict_metadata) == list(saved.state_dict_metadata)
    for name, described in saved.state_dict_metadata.items():
        other = found.state_dict_metadata[name]
        assert type(other) is type(described)
        for field in ("size", "chunks"):
            assert getattr(other, field, None) == getattr(described, field, None)


def shard_of(rank: int, root: str) -> tuple[int, int]:
    """Load one's rows of a tensor that one rank saved; return bytes read and bytes of the rows."""
    full = filled((4096, 512))
    if rank == 0:
        writer = TieredWriter(f"tiered://{root}")
        dcp.save({"w": full}, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    dist.barrier()
    target = {"w": torch.zeros_like(states.placed(full, states.mesh_1d(), [Shard(0)]))}
    reader = TieredReader(f"tiered://{root}")
    dcp.load(target, storage_reader=reader)
    rows = target["w"].to_local()
    assert torch.equal(
        rows.view(torch.int32), full.view(torch.int32)[rank * 1024 : rank * 1024 + 1024]
    )
    return reader.bytes_read["local"], rows.numel() * 4


@pytest.mark.filterwarnings("ignore")
def test_each_rank_reads_its_own_rows(tmp_path: Path) -> None:
    for read, needed in share_ranks(4, shard_of, str(tmp_path)):
        assert needed <= read < needed + 10_000


def test_memory_in_flight_is_bounded_by_what_was_given(tmp_path: Path) -> None:
    limit = 16 * MIB
    reader = TieredReader(f"tiered://{tmp_path}", limits=Limits(inflight_bytes_max=limit))
    assert 0 < reader.metrics()['dcp_tiered_arena_bytes_max{use="read"}'] <= limit
    with pytest.raises(InvalidError, match=f"inflight_bytes_max is {limit - 1} where at least"):
        TieredReader(f"tiered://{tmp_path}", limits=Limits(inflight_bytes_max=limit - 1))
