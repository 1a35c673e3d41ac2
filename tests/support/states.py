"""State dicts of every kind, the same on every world size, and a comparison that knows no mercy."""

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dcp_tiered.format import shardfile

State = dict[str, Any]

DTYPES = tuple(getattr(torch, name) for name in shardfile.DTYPES if hasattr(torch, name))


def filled(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Return a tensor of random bits, NaNs and all, that depends on its arguments only."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    elements = int(torch.Size(shape).numel())
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(
        0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor, row by row, as bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def difference(  # noqa: PLR0911 - a table of returns
    left: Any, right: Any, path: str = ""
) -> str | None:
    """Return where two state dicts differ in type, shape, dtype or a bit; None if nowhere."""
    if isinstance(left, io.BytesIO) and isinstance(right, io.BytesIO):
        left, right = left.getvalue(), right.getvalue()
    if type(left) is not type(right):
        return f"{path}: {type(left).__name__} and {type(right).__name__}"
    if isinstance(left, DTensor):
        return difference(left.to_local(), right.to_local(), f"{path} (local shard)")
    if isinstance(left, torch.Tensor):
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            return f"{path}: {left.dtype} {left.shape} and {right.dtype} {right.shape}"
        return None if bits(left) == bits(right) else f"{path}: values differ"
    if isinstance(left, dict):
        if list(left) != list(right):
            return f"{path}: keys {list(left)} and {list(right)}"
        pairs = ((f"{path}.{key}", left[key], right[key]) for key in left)
        return next((d for p, a, b in pairs if (d := difference(a, b, p))), None)
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{path}: {len(left)} and {len(right)} items"
        pairs = ((f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((d for p, a, b in pairs if (d := difference(a, b, p))), None)
    return None if left == right else f"{path}: {left!r} and {right!r}"


def kinds(exc: BaseException) -> list[str]:
    """Return the types of what went wrong, below DCP's wrapping."""
    if isinstance(exc, CheckpointException):
        return sorted({kind for inner, _ in exc.failures.values() for kind in kinds(inner)})
    return [type(exc).__name__]


def failure(work: Callable[[], Any]) -> BaseException:
    """Run something that must fail; return what it raised, `CheckpointException` included."""
    try:
        work()
    except BaseException as exc:  # noqa: BLE001 - CheckpointException is none of Exception
        return exc
    raise AssertionError("it did not fail")


def attempt(work: Callable[[], Any]) -> list[str] | None:
    """Run something; return the kinds of its errors, None when there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except BaseException as exc:  # noqa: BLE001 - CheckpointException is none of Exception
        return kinds(exc)
    return None


def zeroed(state: Any) -> Any:
    """Return a state dict of the same structure for loading into, with other values."""
    if isinstance(state, DTensor):
        return torch.zeros_like(state)
    if isinstance(state, torch.Tensor):
        empty = torch.zeros(state.shape, dtype=torch.uint8).to(torch.bool)
        return empty if state.dtype is torch.bool else _zeros(state)
    if isinstance(state, dict):
        return type(state)((key, zeroed(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(zeroed, state))
    return type(state)() if type(state) in (int, float, str, bytes, set, complex) else None


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    raw = torch.zeros(tensor.numel() * tensor.dtype.itemsize, dtype=torch.uint8)
    return raw.view(tensor.dtype).reshape(tensor.shape)


def nested() -> State:
    return {
        "model": {"layers": [{"w": filled((7, 5))}, {"w": filled((5, 3), seed=1)}]},
        "step": 7,
        "lr": 0.1,
        "name": "run\0x",
        "none": None,
        "flags": [True, False],
        "pair": (1, "two"),
        "betas": {"a": [0.9, 0.95], "empty": [], "void": {}},
        "list of tensors": [filled((3,)), filled((), seed=2)],
    }


def dtypes() -> State:
    return {str(dtype): filled((33, 6), dtype, seed=i) for i, dtype in enumerate(DTYPES)}


def small_shapes() -> State:
    shapes = [(), (0,), (0, 16), (4, 0, 3), (1,), (1, 1, 1)]
    return {
        f"{dtype} {shape}": filled(shape, dtype)
        for shape in shapes
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    }


def strides() -> State:
    base = filled((12, 10), torch.int64)
    return {
        "transposed": base.t(),
        "every second": base[::2, 1::3],
        "expanded": base[:, :1].expand(12, 9),
        "channels last": filled((2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "slice": base[3:4, 2:5],
        "permuted": filled((2, 3, 4)).permute(2, 0, 1),
        "conjugate": filled((4, 4), torch.complex64).conj().nan_to_num(),
        "overlapping": base.reshape(-1).as_strided((8, 4), (3, 1)),
    }


def objects() -> State:
    return {
        "bytes": b"a\0b",
        "bytearray": bytearray(b"xyz"),
        "big": 1 << 80,
        "complex": 1 - 2j,
        "ordered": OrderedDict(b=1, a=[2]),
        "set": {1, 2},
        "none": None,
        "bool": True,
        "text": "ünï\0 \U0001f600",
        "torch size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }


def names() -> State:
    odd = [
        "a/b",
        "../up",
        " ",
        "",
        "ü\U0001f600",
        "x" * 300,
        "a\nb",
        "tiered::s3://x",
        "100%",
        "a.b.c",
    ]
    state: State = {name: filled((3,), seed=i) for i, name in enumerate(odd)}
    return state | {"inner": {0: filled((2,)), (1, 2): filled((2,), seed=1), None: 5}}


def large() -> State:
    return {"w": filled((1024, 700)), "v": filled((3, 500_000), torch.bfloat16)}


def empty() -> State:
    return {}


PLAIN: dict[str, Callable[[], State]] = {
    builder.__name__: builder
    for builder in (nested, dtypes, small_shapes, strides, objects, names, large, empty)
}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def mesh_2d() -> DeviceMesh:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (2, 2) if world == 4 else (1, world))


def placed(full: torch.Tensor, mesh: DeviceMesh, how: list[Placement]) -> DTensor:
    """Cut a tensor that every rank has; no communication, so that every dtype can be cut."""
    return distribute_tensor(full, mesh, how, src_data_rank=None)


def shards() -> State:
    mesh = mesh_1d()
    sizes = [(1,), (2,), (6,), (7, 3), (17, 2), (0, 4), (3, 0), (20, 5)]
    state: State = {f"rows {shape}": placed(filled(shape), mesh, [Shard(0)]) for shape in sizes}
    state |= {
        f"columns {shape}": placed(filled(shape, seed=1), mesh, [Shard(1)])
        for shape in sizes
        if len(shape) > 1
    }
    state["copy"] = placed(filled((5, 5)), mesh, [Replicate()])
    state["step"] = torch.tensor(3.0)
    state["large"] = placed(filled((1023, 300)), mesh, [Shard(0)])
    state["wide"] = placed(filled((300, 1023)), mesh, [Shard(1)])
    return state


def grids() -> State:
    mesh = mesh_2d()
    placements = {
        "rows, columns": [Shard(0), Shard(1)],
        "columns, rows": [Shard(1), Shard(0)],
        "rows, rows": [Shard(0), Shard(0)],
        "copies of rows": [Replicate(), Shard(0)],
        "rows of copies": [Shard(0), Replicate()],
        "copies": [Replicate(), Replicate()],
    }
    return {
        f"{name} {shape}": placed(filled(shape, torch.int32), mesh, how)
        for name, how in placements.items()
        for shape in ((1, 1), (2, 3), (3, 2), (5, 9), (17, 4))
    }


def random_layouts() -> State:
    """Shapes and placements that depend on the world size: each saves and loads other cuts."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 + world)
    state: State = {}
    for number in range(16):
        shape_of = torch.Generator().manual_seed(number)
        ndim = int(torch.randint(1, 4, (1,), generator=shape_of))
        shape = tuple(torch.randint(0, 21, (ndim,), generator=shape_of).tolist())
        cut = [
            Replicate() if dim == ndim else Shard(dim)
            for dim in torch.randint(0, ndim + 1, (2,), generator=generator).tolist()
        ]
        mesh = mesh_1d() if number % 2 else mesh_2d()
        state[str(number)] = placed(filled(shape, torch.int16, number), mesh, cut[: mesh.ndim])
    return state


SHARDED: dict[str, Callable[[], State]] = {
    builder.__name__: builder for builder in (shards, grids, random_layouts)
}
