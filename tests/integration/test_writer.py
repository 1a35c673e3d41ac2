"""`TieredWriter`: what it refuses, what it leaves behind, what survives a failure."""

import io
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from botocore.session import Session
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_tiered import (
    ConflictError,
    InvalidError,
    TieredError,
    TieredReader,
    TieredWriter,
    UnavailableError,
    cause,
)
from examples.seaweed import SeaweedS3
from tests.conftest import Run
from tests.support import runs, states
from tests.support.fault_proxy import RESET, STALL, Fault, FaultProxy
from tests.support.ranks import share_ranks
from tests.support.states import filled


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Return every file below a directory with its size and modification time."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def refusal(state: dict[str, Any], writer: TieredWriter, **arguments: Any) -> TieredError:
    """Return the error of ours that a save ends in."""
    raised = states.failure(lambda: dcp.save(state, storage_writer=writer, **arguments))
    error = cause(raised)
    assert error is not None, raised
    return error


def loaded(url: str, checkpoint_id: str | None, like: torch.Tensor, key: str = "w") -> torch.Tensor:
    target = {key: torch.zeros_like(like)}
    dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=TieredReader(url))
    return target[key]


class FailingPlanner(DefaultSavePlanner):
    """Fails while data is written, on one rank, once something is in the file."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.resolved = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.resolved += 1
        if dist.is_initialized() and dist.get_rank() == self.rank and self.resolved == 2:
            raise UnavailableError("injected", "local", write_item.index.fqn)
        return super().resolve_data(write_item)


# Refusals, with and without a process group.


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"tiered://{tmp_path}"


def test_no_checkpoint_id_is_refused(url: str, tmp_path: Path) -> None:
    writer = TieredWriter(url)
    assert isinstance(refusal({"w": torch.ones(1)}, writer), InvalidError)
    assert not files(tmp_path)


def test_id_of_an_earlier_save_is_not_used_again(url: str) -> None:
    writer = TieredWriter(url)
    dcp.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer)
    assert isinstance(refusal({"w": torch.ones(1)}, writer), InvalidError)


@pytest.mark.parametrize(
    "bad", ["", ".", "..", "a/b", "/abs", "s3://b/p", "-x", "x" * 129, "ü", "a b", "a\n", Path("x")]
)
def test_bad_id_is_refused(url: str, tmp_path: Path, bad: Any) -> None:
    error = refusal({"w": torch.ones(1)}, TieredWriter(url), checkpoint_id=bad)
    assert isinstance(error, InvalidError)
    assert error.hint is not None
    assert not files(tmp_path)


def refuse_on_ranks(rank: int, root: str) -> list[str]:
    """Ask for what is not supported; return the class of error of each, on this rank."""
    writer = TieredWriter(f"tiered://{root}")
    state = states.shards()
    return [
        type(refusal(state, writer, checkpoint_id="step-1", use_collectives=False)).__name__,
        type(refusal(state, writer)).__name__,
        type(refusal(state, writer, checkpoint_id="no/good")).__name__,
        type(refusal(state, writer, checkpoint_id="x" if rank else "no/good")).__name__,
        type(
            refusal(
                state | ({"s": torch.eye(2).to_sparse()} if rank else {}), writer, checkpoint_id="x"
            )
        ).__name__,
    ]


def test_refusals_reach_all_ranks_alike(tmp_path: Path) -> None:
    answers = share_ranks(2, refuse_on_ranks, str(tmp_path))
    assert answers == [["InvalidError"] * 5] * 2
    assert not [name for name in files(tmp_path) if name.endswith((".shard", ".tmp"))]


def test_writer_without_local_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSSPEC_TIERED_LOCAL", raising=False)
    with pytest.raises(InvalidError, match="no local tier"):
        TieredWriter("tiered::file:///nowhere/run")


def test_missing_local_directory_is_refused_with_path_and_hint(tmp_path: Path) -> None:
    writer = TieredWriter(f"tiered://{tmp_path}/missing")
    error = refusal({"w": torch.ones(1)}, writer, checkpoint_id="step-1")
    assert isinstance(error, InvalidError)
    assert (error.tier, error.key) == ("local", f"{tmp_path}/missing")
    assert error.hint is not None
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "dtype"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: Path("a class that is not plain"), "safely"),
    ],
    ids=["sparse", "quantized", "meta", "object"],
)
@pytest.mark.filterwarnings("ignore")
def test_value_that_cannot_be_stored_is_refused_with_its_key(
    url: str, tmp_path: Path, make: Any, word: str
) -> None:
    state = {"fine": torch.ones(2), "odd one": make()}
    error = refusal(state, TieredWriter(url), checkpoint_id="step-1")
    assert isinstance(error, InvalidError)
    assert error.key == "odd one"
    assert word in error.message
    assert not [name for name in files(tmp_path) if not name.endswith(("run.json", "node.json"))]


# Failures in the middle.


def fail_and_go_on(rank: int, root: str) -> tuple[str, str, bool]:
    writer = TieredWriter(f"tiered://{root}")
    state = states.shards()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(
            state, checkpoint_id="step-1", storage_writer=writer, planner=FailingPlanner(rank=1)
        )
    error = cause(caught.value)
    dist.barrier()
    left = ",".join(sorted(path.name for path in Path(root).rglob("*") if path.is_file()))
    dist.barrier()
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    target = states.zeroed(state)
    dcp.load(target, checkpoint_id="step-1", storage_reader=TieredReader(f"tiered://{root}"))
    return f"{type(error).__name__} {error.message}", left, states.difference(state, target) is None


def test_error_of_one_rank_reaches_all_and_the_next_save_works(tmp_path: Path) -> None:
    """A rank that fails leaves no file at all; what the others sealed is never loadable."""
    for error, left, good in share_ranks(3, fail_and_go_on, str(tmp_path)):
        assert error == "UnavailableError injected"
        names = left.split(",")
        assert {name.split("-")[0] for name in names if name.endswith(".shard")} == {"0", "2"}
        assert {name for name in names if not name.endswith(".shard")} == {"run.json", "node.json"}
        assert good


def test_disk_that_is_full_is_told_with_path_and_sizes(
    tmp_path: Path, small_disk: Path | None
) -> None:
    """O055: a real full disk; nothing is left on it, and a smaller save works."""
    if small_disk is None:
        pytest.skip("mounting a small tmpfs needs root")
    writer = TieredWriter(f"tiered://{small_disk}")
    error = refusal({"w": torch.ones(4 << 20)}, writer, checkpoint_id="step-1")
    assert isinstance(error, UnavailableError)
    assert error.errno == 28
    assert "bytes asked" in str(error)
    assert "bytes free" in str(error)
    assert not [name for name in files(small_disk) if name.endswith((".shard", ".tmp"))]
    dcp.save({"w": torch.ones(100)}, checkpoint_id="step-1", storage_writer=writer)
    assert torch.equal(loaded(f"tiered://{small_disk}", "step-1", torch.ones(100)), torch.ones(100))


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    import os
    import subprocess

    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


# Saving an id again.


def save_twice(rank: int, root: str) -> tuple[str, bool, bool]:
    url = f"tiered://{root}"
    state = states.shards()
    with TieredWriter(url) as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
        dist.barrier()
        before = files(Path(root))
        error = refusal(states.zeroed(state), writer, checkpoint_id="step-1")
        dist.barrier()
        unchanged = files(Path(root)) == before
    dist.barrier()
    with TieredWriter(url, overwrite=True) as writer:
        writer._launch = "another launch of this job"
        other = {"w": torch.full((3,), 5.0)}
        dcp.save(other, checkpoint_id="step-1", storage_writer=writer)
    return (
        type(error).__name__,
        unchanged,
        torch.equal(loaded(url, "step-1", other["w"]), other["w"]),
    )


def test_second_save_of_a_published_id_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """O016: not a byte is written; overwrite=True replaces it."""
    assert share_ranks(2, save_twice, str(tmp_path)) == [("ConflictError", True, True)] * 2


def save_on_two_disks(rank: int, arguments: dict[str, Any], disks: list[str]) -> str:
    with TieredWriter(**{**arguments, "local": disks[rank]}) as writer:
        state = {f"of-{rank}": torch.arange(1000)}
        error = runs.error_of(dcp.save, state, checkpoint_id="a", storage_writer=writer)
    assert isinstance(error, InvalidError)
    return str(error)


def test_ranks_of_a_machine_with_several_local_tiers_are_told(
    posix_run: Run, tmp_path: Path
) -> None:
    """It would stay local for ever: each flusher would wait for a manifest of its own."""
    other = tmp_path / "nvme-1"
    other.mkdir()
    disks = [str(posix_run.local), str(other)]
    texts = share_ranks(2, save_on_two_disks, posix_run.arguments(), disks)
    assert len(set(texts)) == 1
    assert "rank 1 has another local tier than rank 0" in texts[0]
    assert "LOCAL_WORLD_SIZE=1" in texts[0]
    assert posix_run.keys() == {}
    assert not [path for disk in disks for path in Path(disk).rglob("*.shard")], "before a byte"


def test_second_save_of_a_committed_id_is_refused(posix_run: Run) -> None:
    """By a later launch and from another node, which sees the commit on the durable tier only."""
    with TieredWriter(**posix_run.arguments()) as writer:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer)
        writer.wait("durable", "step-1", timeout_s=60)
    elsewhere = posix_run.local.parent / "other-node"
    elsewhere.mkdir()
    before = posix_run.keys()
    for local in (posix_run.local, elsewhere):
        with TieredWriter(**posix_run.arguments() | {"local": str(local)}) as writer:
            writer._launch = "another launch of this job"
            error = refusal({"w": torch.zeros(3)}, writer, checkpoint_id="step-1")
            assert isinstance(error, ConflictError)
            assert "overwrite=True" in str(error.hint)
    assert posix_run.keys() == before
    assert not [name for name in files(elsewhere) if name.endswith(".shard")]


def test_overwrite_replaces_a_committed_id(posix_run: Run) -> None:
    for value in (1.0, 2.0):
        with TieredWriter(**posix_run.arguments(), overwrite=True) as writer:
            state = {"w": torch.full((3,), value)}
            dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
            writer.wait("durable", "step-1", timeout_s=60)
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=TieredReader(**posix_run.durable_only()))
    assert target["w"].tolist() == [2.0] * 3
    first, second = posix_run.commits("step-1")
    assert first["attempt"] != second["attempt"]


def test_leftover_of_another_launch_does_not_stop_a_save(url: str) -> None:
    """O050: a checkpoint that was published by a launch that died and was never committed."""
    first = TieredWriter(url)
    first._launch = "a launch that was killed"
    planner = FailingPlanner(rank=-1)
    dcp.save(
        {"a": torch.ones(9), "w": torch.ones(2)},
        checkpoint_id="step-1",
        storage_writer=first,
        planner=planner,
    )
    second = TieredWriter(url)
    dcp.save({"w": torch.zeros(2)}, checkpoint_id="step-1", storage_writer=second)
    assert torch.equal(loaded(url, "step-1", torch.ones(2)), torch.zeros(2))
    with pytest.raises(dcp.CheckpointException):
        loaded(url, "step-1", torch.ones(9), key="a")


# The object itself.


def test_pickled_writer_keeps_nothing_of_a_save(url: str) -> None:
    writer = TieredWriter(url, step=3)
    dcp.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer)
    writer.reset("step-2")
    clone = pickle.loads(pickle.dumps(writer))
    assert clone.checkpoint_id is None
    assert isinstance(refusal({"w": torch.ones(1)}, clone), InvalidError)
    dcp.save({"w": torch.ones(1)}, checkpoint_id="step-3", storage_writer=clone)
    assert [line.step for line in clone.status()] == [3, 3]


def test_pickled_writer_is_of_the_same_launch(url: str) -> None:
    writer = TieredWriter(url)
    dcp.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer)
    clone = pickle.loads(pickle.dumps(writer))
    error = refusal({"w": torch.ones(1)}, clone, checkpoint_id="step-1")
    assert isinstance(error, ConflictError)


def test_repr_and_local_files_hold_no_secret(s3_run: Run) -> None:
    """O124."""
    secret = s3_run.options["s3"]["secret"]
    writer = TieredWriter(**s3_run.arguments())
    reader = TieredReader(**s3_run.arguments())
    dcp.save({"w": torch.ones(1)}, checkpoint_id="step-1", storage_writer=writer)
    writer.wait("durable", "step-1", timeout_s=60)
    shown = repr(writer) + repr(reader) + repr(writer.status()) + repr(writer._settings)
    assert secret not in shown
    for path in s3_run.local.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert not [key for key in sorted(s3_run.keys()) if secret.encode() in s3_run.get(key)]


def test_step_and_metadata_are_those_of_the_manifest(url: str) -> None:
    writer = TieredWriter(url, metadata={"tokens": 5, "tags": ("a", 1.5)})
    dcp.save({"w": torch.ones(1)}, checkpoint_id="run2-step-0042", storage_writer=writer)
    (line,) = writer.status()
    assert (line.checkpoint_id, line.step, line.state) == ("run2-step-0042", 42, "local")


def test_metadata_that_is_not_plain_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidError, match="plain data"):
        TieredWriter(url, metadata={"f": print})


def test_wait_and_status(posix_run: Run) -> None:
    with TieredWriter(**posix_run.arguments()) as writer:
        with pytest.raises(InvalidError, match="level"):
            writer.wait("remote", "step-1")
        with pytest.raises(UnavailableError, match="not local after 0 s"):
            writer.wait("local", "step-1", timeout_s=0)
        assert writer.status() == []
        for number in (1, 2):
            state = {"w": torch.ones(number)}
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
            writer.wait("local", f"step-{number}", timeout_s=0)
        for number in (2, 1):
            writer.wait("durable", f"step-{number}", timeout_s=60)
        lines = writer.status()
    assert [(line.checkpoint_id, line.state, line.step) for line in lines] == [
        ("step-1", "durable", 1),
        ("step-2", "durable", 2),
    ]
    assert all(line.bytes_uploaded == line.bytes_stored > 0 for line in lines)


def test_local_run_has_nothing_durable_to_wait_for(url: str) -> None:
    with pytest.raises(InvalidError, match="no durable tier"):
        TieredWriter(url).wait("durable", "step-1")


def test_store_that_does_not_answer_delays_a_save_by_its_limit_only(
    tmp_path: Path, local: Path
) -> None:
    """The save ends on the local tier whether the durable one is there or not."""
    url = f"tiered::file://{tmp_path}/not-mounted/run"
    with TieredWriter(url, local=local) as writer:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer)
        assert [line.state for line in writer.status()] in (["local"], ["failed"])
    assert not (tmp_path / "not-mounted").exists()


def sockets() -> set[str]:
    """Return the sockets of this process."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return {name for name in found if name.startswith("socket:")}


def test_saves_share_a_client_and_keep_no_connection(
    s3_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make one takes long, and garbage of it the collector longer; idle connections break."""
    made: list[str] = []
    make = Session.create_client

    def counted(self: Session, service_name: str, *args: Any, **more: Any) -> Any:
        made.append(service_name)
        return make(self, service_name, *args, **more)

    monkeypatch.setattr(Session, "create_client", counted)
    before = sockets()
    with runs.no_flusher(s3_run), TieredWriter(**s3_run.arguments()) as writer:
        for number in range(3):
            state = {"w": torch.full((3,), number)}
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
            assert sockets() <= before
    assert made == ["s3"]


@pytest.mark.parametrize(("fault", "patience_s"), [(STALL, 5.0), (RESET, 30.0)])
def test_store_is_asked_again_after_it_did_not_answer(
    s3_run: Run,
    s3_server: SeaweedS3,
    fault: Fault,
    patience_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A save without an answer goes on, and the next one does get its conflict."""
    with TieredWriter(**s3_run.arguments()) as elsewhere:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="taken", storage_writer=elsewhere)
        elsewhere.wait("durable", "taken", timeout_s=60)
    node = s3_run.local.parent / "other-node"
    node.mkdir()
    with FaultProxy(s3_server.endpoint) as proxy:
        arguments = runs.with_limits(runs.behind(s3_run, proxy.endpoint), store_check_s=patience_s)
        mine = arguments | {"local": str(node), "flusher": "external"}
        with TieredWriter(**mine) as writer:
            dcp.save({"w": torch.ones(3)}, checkpoint_id="a", storage_writer=writer)
            assert "without knowing" not in caplog.text
            proxy.inject(None, fault)
            dcp.save({"w": torch.ones(3)}, checkpoint_id="b", storage_writer=writer)
            assert "saving b without knowing" in caplog.text
            proxy.clear()
            assert isinstance(
                refusal({"w": torch.ones(3)}, writer, checkpoint_id="taken"), ConflictError
            )
            assert [line.checkpoint_id for line in writer.status()] == ["a", "b"]


# Process groups.


def save_in_groups(rank: int, root: str) -> tuple[list[int], list[int]]:
    """Save in two groups at once, then in one whose first member is not global rank 0."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    odd = (
        dist.new_group([3, 1], sort_ranks=False)
        if "sort_ranks" in _new_group()
        else (dist.new_group([1, 3]))
    )
    writer = TieredWriter(f"tiered://{root}")
    name = f"half-{rank // 2}"
    state = {f"rank {rank}": torch.tensor([rank]), "shared": torch.tensor([rank // 2])}
    dcp.save(state, checkpoint_id=name, storage_writer=writer, process_group=mine)
    target = {f"rank {rank}": torch.tensor([-1]), "shared": torch.tensor([-1])}
    reader = TieredReader(f"tiered://{root}", process_group=mine)
    dcp.load(target, checkpoint_id=name, storage_reader=reader, process_group=mine)
    first = [int(value) for value in target.values()]
    second = [-1]
    if rank in (1, 3):
        dcp.save(state, checkpoint_id="odd", storage_writer=writer, process_group=odd)
        target = {f"rank {rank}": torch.tensor([-1])}
        reader = TieredReader(f"tiered://{root}", process_group=odd)
        dcp.load(target, storage_reader=reader, process_group=odd)
        assert reader.checkpoint_id == "odd"
        second = [int(value) for value in target.values()]
    return first, second


def _new_group() -> Any:
    import inspect

    return inspect.signature(dist.new_group).parameters


def test_groups_that_do_not_hold_rank_zero(tmp_path: Path) -> None:
    """O018: the coordinator is the group's first member, and files of groups never collide."""
    answers = share_ranks(4, save_in_groups, str(tmp_path))
    assert answers == [([0, 0], [-1]), ([1, 0], [1]), ([2, 1], [-1]), ([3, 1], [3])]
    for name, ranks in (("half-0", {"0", "1"}), ("half-1", {"2", "3"}), ("odd", {"1", "3"})):
        shards = [path.name for path in tmp_path.glob(f"*/{name}/*.shard")]
        assert {shard.split("-")[0] for shard in shards} == ranks


def save_without_talking(rank: int, root: str) -> bool:
    """One rank saves and loads alone while others do not take part."""
    if rank == 1:
        writer = TieredWriter(f"tiered://{root}")
        state = {"w": torch.tensor([7.0])}
        dcp.save(state, checkpoint_id="alone", storage_writer=writer, no_dist=True)
        target = {"w": torch.zeros(1)}
        reader = TieredReader(f"tiered://{root}", no_dist=True)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert target["w"].tolist() == [7.0]
    dist.barrier()
    return True


@pytest.mark.filterwarnings("ignore")
def test_one_rank_may_save_and_load_alone(tmp_path: Path) -> None:
    assert share_ranks(2, save_without_talking, str(tmp_path)) == [True, True]
    assert [path.name.split("-")[0] for path in tmp_path.glob("*/alone/*.shard")] == ["1"]


def test_save_order_survives_a_clock_that_goes_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is what was saved last, whatever the clock says; also for a new writer."""
    now = time.time_ns()
    for number, at in ((1, now), (2, now - 10**12), (3, now - 2 * 10**12)):
        monkeypatch.setattr(time, "time_ns", lambda at=at: at)
        state = {"w": filled((3,), seed=number)}
        dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=TieredWriter(url))
        reader = TieredReader(url)
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
        assert reader.checkpoint_id == f"step-{number}"


def test_metrics_of_a_save(local: Path) -> None:
    writer = TieredWriter(f"tiered://{local}")
    dcp.save({"w": torch.ones(3_000_000)}, checkpoint_id="a", storage_writer=writer)
    values = writer.metrics()
    (shard,) = local.rglob("*.shard")
    assert values["dcp_tiered_write_bytes_total"] == shard.stat().st_size
    assert values["dcp_tiered_write_seconds_total"] > 0
    assert values["dcp_tiered_stage_buffer_bytes"] == 0
    assert 0 < values['dcp_tiered_arena_bytes{use="write"}'] <= 24 << 20
    dcp.async_save({"w": torch.ones(3_000_000)}, checkpoint_id="b", storage_writer=writer).result()
    after = writer.metrics()
    assert after["dcp_tiered_stage_buffer_bytes"] >= 12_000_000
    assert after["dcp_tiered_stage_seconds_total"] > 0
    assert (
        after["dcp_tiered_write_bytes_total"] >= 2 * values["dcp_tiered_write_bytes_total"] - 4096
    )
