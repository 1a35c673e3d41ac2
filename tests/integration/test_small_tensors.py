"""Many small tensors: gathered into few writes, and each of them where the format wants it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import InvalidError, TieredReader, TieredWriter, stack
from dcp_tiered.format.shardfile import DTYPES
from dcp_tiered.interfaces import DeviceBytes, Engine, Image
from tests.format_compat import own_decoder
from tests.support import states
from tests.support.runs import error_of
from tests.support.states import filled

KIB = 1 << 10


class Counted:
    """An engine that notes how much each `append` of its images brings."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.lengths: list[int] = []
        self._engine = engine

    @contextmanager
    def writing(self, fd: int, length_estimate: int) -> Iterator["CountedImage"]:
        with self._engine.writing(fd, length_estimate) as image:
            yield CountedImage(image, self.lengths)


class CountedImage:
    def __init__(self, image: Image, lengths: list[int]) -> None:
        self._image = image
        self._lengths = lengths

    def append(self, start: int, data: memoryview | DeviceBytes) -> list[int]:
        self._lengths.append(data.nbytes)
        return self._image.append(start, data)

    def finish(self, length: int) -> None:
        self._image.finish(length)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    """Have every engine that a writer builds counted."""
    made: list[Counted] = []
    build = stack.engine

    def engine(*args: Any) -> Counted:
        made.append(Counted(build(*args)))
        return made[-1]

    monkeypatch.setattr(stack, "engine", engine)
    return made


def mix() -> dict[str, Any]:
    """Return tensors around every border, and the odd ones among small tensors."""
    sizes = (1, 63, 64, 65, 16 * KIB - 1, 16 * KIB, 64 * KIB - 1, 64 * KIB, 256 * KIB + 1)
    state: dict[str, Any] = {f"uint8 {size}": filled((size,), torch.uint8, size) for size in sizes}
    state |= {
        f"{name} {shape}": filled(shape, getattr(torch, name))
        for name in DTYPES
        if hasattr(torch, name)
        for shape in ((), (3,), (2, 1, 5))
    }
    odd = filled((6, 4), seed=1)
    state |= {
        "empty": torch.empty(0),
        "empty 2": torch.empty(3, 0, 2),
        "transposed": odd.t(),
        "slice": odd[1:5:2, 1:3],
        "row": odd[2],
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "needs gradient": torch.arange(7.0, requires_grad=True),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "object": {"lr": 0.5, "names": ["a", "b"]},
    }
    return state


def shard_items(local: Path, checkpoint_id: str) -> dict[str, dict[str, Any]]:
    """Return what lies in the only shard file, read by a decoder that checks every checksum."""
    (path,) = local.glob(f"*/{checkpoint_id}/*.shard")
    data = path.read_bytes()
    _, items = own_decoder.shard_file(data)
    covered = bytearray(len(data))
    for item in items:
        size = len(item["bytes"])
        assert item["start"] % (4096 if size >= 64 * KIB else 64) == 0
        assert not any(covered[item["start"] : item["start"] + size])
        covered[item["start"] : item["start"] + size] = b"\1" * size
    return {item["name"]: item for item in items}


@pytest.mark.parametrize("engine", ["buffered", "direct"])
def test_a_mix_of_tensors_lies_in_the_file_as_it_is(tmp_path: Path, engine: str) -> None:
    state = mix()
    url = f"tiered://{tmp_path}"
    with TieredWriter(url, engine=engine) as writer:
        dcp.save({"all": state}, checkpoint_id="step-1", storage_writer=writer)
    items = shard_items(tmp_path, "step-1")
    flat = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, tensor in flat.items():
        item = items[f"all.{name}"]
        assert item["bytes"] == states.bits(tensor.resolve_conj().resolve_neg()), name
        assert DTYPES[item["dtype"]] == str(tensor.dtype).removeprefix("torch."), name
        shape = tuple(tensor.shape)
        assert item["box"] == [(0,) * tensor.dim(), shape, shape], name
    assert any(item["dtype"] is None for item in items.values())


def test_a_mix_of_tensors_comes_back(tmp_path: Path) -> None:
    state = mix()
    url = f"tiered://{tmp_path}"
    with TieredWriter(url) as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    plain = {
        name: value.detach().resolve_conj().resolve_neg()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }
    target = states.zeroed(plain)
    dcp.load(target, checkpoint_id="step-1", storage_reader=TieredReader(url))
    assert states.difference(target, plain) is None


def test_thousands_of_tensors_are_few_writes(tmp_path: Path, counted: list[Counted]) -> None:
    state = {f"layers.{number}.w": torch.full((16,), float(number)) for number in range(20_000)}
    with TieredWriter(f"tiered://{tmp_path}") as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    (engine,) = counted
    assert len(engine.lengths) <= 10
    assert sum(engine.lengths) >= 64 * len(state)
    data = next(tmp_path.glob("*/step-1/*.shard")).read_bytes()
    _, _, arrays = own_decoder.footer(data, b"DCPTEND1")
    assert len(arrays["start"]) == len(state)
    for name, start in zip(own_decoder.names(arrays), arrays["start"], strict=True):
        assert data[start : start + 64] == states.bits(state[name])


def test_thousands_of_empty_tensors_are_few_writes_too(
    tmp_path: Path, counted: list[Counted]
) -> None:
    state = {str(number): torch.empty(0) for number in range(5000)}
    with TieredWriter(f"tiered://{tmp_path}") as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    assert len(counted[0].lengths) <= 5
    target = {name: torch.ones(0) for name in state}
    dcp.load(target, checkpoint_id="step-1", storage_reader=TieredReader(f"tiered://{tmp_path}"))


def test_what_is_gathered_does_not_grow_with_the_state(
    tmp_path: Path, counted: list[Counted]
) -> None:
    state = {str(number): filled((1000,), seed=number) for number in range(1000)}
    with TieredWriter(f"tiered://{tmp_path}") as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    assert max(counted[0].lengths) < 512 * KIB


@pytest.mark.parametrize("size", [100, 100_000])
@pytest.mark.parametrize("first", [0, 10])
def test_tensors_whose_memory_was_freed_are_refused(tmp_path: Path, size: int, first: int) -> None:
    """As FSDP frees it: the tensor keeps its shape, and its storage has no byte."""
    freed = torch.ones(size)[first:]
    freed.untyped_storage().resize_(0)
    error = error_of(
        dcp.save,
        {"w": freed},
        checkpoint_id="a",
        storage_writer=TieredWriter(f"tiered://{tmp_path}"),
    )
    assert isinstance(error, InvalidError)
    assert error.key == "w"
    assert list(tmp_path.rglob("*.shard")) == []
