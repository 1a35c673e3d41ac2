"""Known ways to lose a tensor: element types, shapes, views, sizes."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_tiered import InvalidError, TieredReader, TieredWriter, cause
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Chunk, Entry, Head, Manifest, ShardRef
from dcp_tiered.format.records import Commit, PackRef, Placement
from dcp_tiered.format.shardfile import BLOCK_BYTES, Builder, Header, Item, encode_header
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.tiers.posix import PosixTier
from tests.support import states
from tests.support.ranks import share_ranks
from tests.support.states import State, filled

SCALARS = {
    str(dtype): torch.tensor(value, dtype=dtype)
    for dtype, value in (
        (torch.float32, 3.5),
        (torch.float64, -0.0),
        (torch.bfloat16, float("nan")),
        (torch.int64, -(1 << 63)),
        (torch.uint8, 255),
        (torch.bool, True),
        (torch.complex64, 1 - 2j),
    )
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"tiered://{tmp_path}"


def round_trip(url: str, state: State, target: State | None = None) -> str | None:
    """Save and load; return where the result differs."""
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    into = states.zeroed(state) if target is None else target
    dcp.load(into, checkpoint_id="step-1", storage_reader=TieredReader(url))
    return states.difference(state, into)


def bytes_stored(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/step-1/*.shard"))


def scalars_on_ranks(rank: int, root: str) -> list[str | None]:
    found = []
    state = SCALARS | {"w": states.placed(filled((5, 3)), states.mesh_1d(), [Shard(0)])}
    writer, reader = TieredWriter(f"tiered://{root}"), TieredReader(f"tiered://{root}")
    dcp.save(state, checkpoint_id="sync", storage_writer=writer)
    dcp.async_save(state, checkpoint_id="async", storage_writer=writer).result()
    for name in ("sync", "async"):
        target = states.zeroed(state)
        dcp.load(target, checkpoint_id=name, storage_reader=reader)
        found.append(states.difference(state, target))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_o001_zero_dimensional_next_to_sharded(tmp_path: Path, world: int) -> None:
    assert share_ranks(world, scalars_on_ranks, str(tmp_path)) == [[None, None]] * world


def one_element(rank: int, root: str, save: bool) -> str | None:
    full = filled((1,))
    state = {"w": states.placed(full, states.mesh_1d(), [Shard(0)])}
    if save:
        dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(f"tiered://{root}"))
        return None
    target = states.zeroed(state)
    dcp.load(target, storage_reader=TieredReader(f"tiered://{root}"))
    return states.difference(state, target)


def test_o002_one_element_over_four_ranks(tmp_path: Path) -> None:
    share_ranks(4, one_element, str(tmp_path), True)
    for world in (4, 2, 1):
        assert share_ranks(world, one_element, str(tmp_path), False) == [None] * world


def test_o003_no_elements(url: str) -> None:
    state = {
        "a": torch.zeros(0),
        "b": torch.zeros(0, 16, dtype=torch.bfloat16),
        "c": torch.zeros(4, 0, 3),
        "slice": torch.ones(1 << 20)[5:5],
        "w": torch.ones(1),
    }
    assert round_trip(url, state) is None
    names = TieredReader(url).read_metadata().state_dict_metadata
    assert {name: tuple(names[name].size) for name in names} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }


def test_o004_zero_length_reads(url: str) -> None:
    """Alone and next to others; that they ask the store for nothing is a test of the reader."""
    assert round_trip(url, {"empty": torch.zeros(0, 3), "w": filled((9, 9))}) is None


def test_o005_views_of_one_buffer_store_their_own_bytes(url: str, tmp_path: Path) -> None:
    flat = filled((1000 * 64,))
    state: State = {f"p{i}": flat[i * 64 : (i + 1) * 64].view(8, 8) for i in range(1000)}
    assert round_trip(url, state) is None
    logical = flat.numel() * 4
    assert logical <= bytes_stored(tmp_path) < logical + 100 * 1000


@dataclass
class Box:
    """An object that the planner does not look into."""

    part: torch.Tensor


def test_o006_object_that_drags_a_storage_along_is_told(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = torch.zeros(6 << 20)
    state = {"box": Box(whole[:10])}
    with torch.serialization.safe_globals([Box]):
        dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
        assert any(
            "'box'" in record.getMessage() and "clone" in record.getMessage()
            for record in caplog.records
            if record.levelname == "WARNING"
        )
        caplog.clear()
        state = {"box": Box(whole[:10].clone())}
        dcp.save(state, checkpoint_id="step-2", storage_writer=TieredWriter(url))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


BASE = torch.arange(120.0).reshape(10, 12)
VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": BASE.t,
    "every second": lambda: BASE[::2, ::3],
    "expanded": lambda: BASE[:, :1].expand(10, 7),
    "overlapping": lambda: BASE.flatten().as_strided((6, 5), (4, 1)),
    "unsqueezed": lambda: BASE.t().unsqueeze(1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "flipped": lambda: BASE.flip(0)[2:],
    "last column": lambda: BASE[:, -1],
}


@pytest.mark.parametrize("strided_target", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_o007_logical_values_whatever_the_strides(
    url: str, view: str, strided_target: bool
) -> None:
    source = VIEWS[view]()
    target = torch.zeros(source.shape)
    if strided_target:
        wide = torch.zeros([2 * size for size in source.shape])
        target = wide[tuple(slice(None, None, 2) for _ in source.shape)]
    strides = target.stride()
    assert round_trip(url, {"w": source}, {"w": target}) is None
    assert target.stride() == strides


class Scaled(torch.Tensor):
    """A wrapper subclass: its values lie in inner tensors, its own data pointer is null."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "Scaled":
        return Scaled(inner["inner"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Scaled(first.inner.clone(), first.scale.clone())
        raise NotImplementedError(func)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_o008_wrapper_subclass_is_refused_loudly(url: str, tmp_path: Path, how: str) -> None:
    """Its inner tensors can be saved; the wrapper itself has no bytes, and that is said."""
    wrapper = Scaled(torch.ones(4, dtype=torch.int8), torch.tensor(0.5))
    writer = TieredWriter(url)
    arguments = {"checkpoint_id": "step-1", "storage_writer": writer}
    save = {
        "sync": lambda: dcp.save({"w8": wrapper}, **arguments),
        "async": lambda: dcp.async_save({"w8": wrapper}, **arguments).result(),
    }
    raised = states.failure(save[how])
    error = cause(raised)
    if how == "sync":
        assert isinstance(error, InvalidError)
        assert error.key == "w8"
        assert "Scaled" in error.message
    assert not list(tmp_path.rglob("published-*"))
    assert round_trip(url, {"inner": wrapper.inner, "scale": wrapper.scale}) is None


def test_o009_class_that_the_user_allowed(url: str) -> None:
    """What is not allowed is a test of the reader; here safety stays on for everything else."""
    with torch.serialization.safe_globals([Box]):
        target: State = {"box": None}
        state = {"box": Box(torch.ones(3))}
        dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(url))
        dcp.load(target, storage_reader=TieredReader(url))
        assert torch.equal(target["box"].part, torch.ones(3))
    raised = states.failure(lambda: dcp.load({"box": None}, storage_reader=TieredReader(url)))
    assert "Box" in str(cause(raised))


class Color(Enum):
    """A leaf that torch's safe loader does not know."""

    RED = 1


LEAVES = {name: value for name, value in states.objects().items() if not isinstance(value, dict)}


@pytest.mark.parametrize("value", list(LEAVES.values()), ids=list(LEAVES))
def test_o010_plain_leaf_round_trips(url: str, value: Any) -> None:
    target: State = {"x": None}
    assert round_trip(url, {"x": value}, target) is None
    assert type(target["x"]) is type(value)


@pytest.mark.parametrize(
    "value",
    [Color.RED, np.float64(2.5), io.BytesIO(b"x"), Path("x"), Box(torch.ones(1))],
    ids=lambda value: type(value).__name__,
)
def test_o010_other_leaf_fails_at_save_or_round_trips(url: str, value: Any) -> None:
    """Never a save that works and a resume that does not."""
    target: State = {"x": None}
    try:
        dcp.save({"x": value}, checkpoint_id="step-1", storage_writer=TieredWriter(url))
    except BaseException as exc:  # noqa: BLE001 - CheckpointException is none of Exception
        error = cause(exc)
        assert isinstance(error, InvalidError)
        assert error.key == "x"
    else:
        dcp.load(target, storage_reader=TieredReader(url))
        assert states.difference(value, target["x"]) is None


def load_into_meta(rank: int, root: str) -> list[str | None]:
    sharded = states.placed(filled((7, 3)), states.mesh_1d(), [Shard(0)])
    state: State = {"w": sharded, "v": filled((4,)), "deep": [filled((2,))]}
    dcp.save(state, checkpoint_id="step-1", storage_writer=TieredWriter(f"tiered://{root}"))
    target: State = {
        "w": torch.empty_like(sharded, device="meta"),
        "v": torch.empty(4, device="meta"),
        "deep": [torch.empty(2, device="meta")],
    }
    dcp.load(target, storage_reader=TieredReader(f"tiered://{root}"))
    return [states.difference(state, target)]


@pytest.mark.parametrize("world", [1, 2])
def test_o011_meta_targets(tmp_path: Path, world: int) -> None:
    """DCP itself makes them real, for which it needs a process group."""
    assert share_ranks(world, load_into_meta, str(tmp_path)) == [[None]] * world


HUGE = (1 << 33) + BLOCK_BYTES


def sparse_shard(path: Path, header: Header, tail: torch.Tensor) -> Builder:
    """Write a shard file of more than 8 GiB that takes a few kilobytes: zeros, then a tensor."""
    from awscrt.checksums import crc32c

    builder = Builder(header)
    zero = crc32c(bytes(BLOCK_BYTES))
    crcs = [zero] * (HUGE // BLOCK_BYTES)
    data = states.bits(tail)
    with path.open("xb") as file:
        file.write(encode_header(header))
        start = builder.next_start(HUGE)
        builder.add(
            Item(
                fqn="zeros",
                dtype="uint8",
                offsets=(0,),
                sizes=(HUGE,),
                shape=(HUGE,),
                start=start,
                length=HUGE,
                crcs=crcs,
            )
        )
        start = builder.next_start(len(data))
        file.seek(start)
        file.write(data)
        builder.add(
            Item(
                fqn="w",
                dtype="float32",
                offsets=(0,),
                sizes=tuple(tail.shape),
                shape=tuple(tail.shape),
                start=start,
                length=len(data),
                crcs=[crc32c(data)],
            )
        )
        footer_start = builder.cursor
        file.seek(footer_start)
        file.write(builder.finish())
    return builder


@pytest.mark.parametrize("tier", ["local", "durable"])
def test_o012_offsets_beyond_eight_gibibytes(tmp_path: Path, tier: str) -> None:
    """On the local tier as a shard file, on the durable one at the end of a pack."""
    tail = filled((1000,))
    node, token, attempt = "0123456789ab", "0123456789abcdef", "fedcba9876543210"
    header = Header(
        checkpoint_id="step-1",
        rank=0,
        world_size=1,
        local_world_size=1,
        node=node,
        token=token,
        written_by="test",
    )
    root = f"file://{tmp_path}/durable/run"
    (tmp_path / "durable").mkdir()
    (tmp_path / "nvme").mkdir()
    local_run = tmp_path / "nvme" / layout.run_directory(root)
    durable = PosixTier(tmp_path / "durable" / "run", tmp_path / "durable", "durable")
    catalog = Catalog(PosixTier(local_run, tmp_path / "nvme", "local"), durable)
    name, pack = layout.shard_name(0, token), layout.pack_name(node, token)
    path = local_run / "step-1" / name
    if tier == "durable":
        path = durable.root / "step-1" / pack
    path.parent.mkdir(parents=True)
    builder = sparse_shard(path, header, tail)
    length = path.stat().st_size
    assert length > HUGE
    assert path.stat().st_blocks * 512 < 1 << 22
    with path.open("rb") as file:
        file.seek(-48, os.SEEK_END)
        footer_start = int.from_bytes(file.read(8), "little")
    entries = [
        Entry(
            fqn=fqn,
            dtype=dtype,
            shape=(size,),
            chunks=(Chunk(offsets=(0,), sizes=(size,), shard=0, row=row),),
        )
        for row, (fqn, dtype, size) in enumerate((("zeros", "uint8", HUGE), ("w", "float32", 1000)))
    ]
    head = Head(
        checkpoint_id="step-1",
        attempt=attempt,
        launch="test",
        node=node,
        sequence=1,
        step=1,
        metadata={},
        supersedes=(),
        world_size=1,
        written_by={},
        shards=(
            ShardRef(
                name=name, node=node, length=length, crc32c=builder.crc, footer_start=footer_start
            ),
        ),
    )
    published = catalog.publish(Manifest(head=head, entries=entries, planner_data={}))
    if tier == "durable":
        catalog.put_manifest(published)
        catalog.commit(
            head,
            lambda: Commit(
                checkpoint_id="step-1",
                attempt=attempt,
                sequence=1,
                step=1,
                manifest_sha256=published.sha256,
                manifest_length=len(published.data),
                packs=(PackRef(name=pack, length=length, crc32c=0),),
                placements=(Placement(shard=name, pack=0, start=0),),
                bytes_stored=length,
                committed_by=node,
                committed_at="",
            ),
        )
    target = {"w": torch.zeros(1000)}
    reader = TieredReader(f"tiered::{root}", local=tmp_path / "nvme")
    dcp.load(target, storage_reader=reader)
    assert states.bits(target["w"]) == states.bits(tail)
    assert reader.bytes_read[tier] > 0


def test_o013_short_reads_and_writes_are_carried_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may take or give less than asked; here never more than 64 KiB."""
    write, read, cap = os.pwrite, os.preadv, 64 << 10
    asked: list[int] = []

    def short_write(fd: int, data: memoryview, at: int) -> int:
        asked.append(len(data))
        return write(fd, memoryview(data)[:cap], at)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: read(fd, [to[0][:cap]], at))
    assert round_trip(url, {"w": filled((1 << 18,)), "v": filled((77_777,), torch.int8)}) is None
    assert max(asked) > cap
