"""G5: what does a tensor cost, however small it is?

Ours: tensors of 64 bytes; the time inside the storage layer, per tensor: `prepare_local_plan`,
`prepare_global_plan`, `write_data` and `finish` of the writer, `read_metadata`,
`set_up_storage_reader`, the two `prepare_` and `read_data` of the reader, each wrapped with a
timer, less the time inside the planner that they call back. DCP's own planning is not ours and
does not count. Bytes per tensor: all files of the checkpoint, less the tensors, by number of
tensors. Growth: time for the larger number by time for the smaller, against 1.1 times the ratio
of the numbers. Reference and stock: `FileSystemWriter` and `FileSystemReader` on the smaller
number, timed in the same way.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.harness import Answer, Options, Sample

TENSOR_BYTES = 64
_WRITER = ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")
_READER = (
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)
_SAVE_PLANNER = ("resolve_data",)
_LOAD_PLANNER = ("resolve_tensor", "resolve_bytes", "commit_tensor", "load_bytes")


class Timer:
    """Seconds in chosen methods of a storage object, without those of the planner it calls."""

    def __init__(self) -> None:
        self._outer = 0.0
        self._inner = 0.0
        self._depth = 0

    @property
    def seconds(self) -> float:
        """What the storage object took itself."""
        return self._outer - self._inner

    def watch(self, storage: object, names: tuple[str, ...]) -> None:
        """Time methods of a storage object, which call each other at will."""
        for name in names:
            setattr(storage, name, self._outermost(getattr(storage, name)))

    def exclude(self, planner: object, names: tuple[str, ...]) -> None:
        """Take off what a storage object's calls to the planner take."""
        for name in names:
            setattr(planner, name, self._less(getattr(planner, name)))

    def _outermost(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._outer += time.perf_counter() - begun

        return timed

    def _less(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._inner += time.perf_counter() - begun

        return timed


def make_tiny(count: int) -> dict[str, torch.Tensor]:
    """Return a state of `count` tensors of 64 bytes, each in memory of its own."""
    return {
        f"model.layers.{number // 10}.block.{number % 10}.weight": torch.full((16,), float(number))
        for number in range(count)
    }


def timed_save(backend: Backend, state: dict[str, torch.Tensor]) -> Sample:
    """Save; return the seconds inside the storage layer."""
    timer, planner = Timer(), DefaultSavePlanner()
    timer.exclude(planner, _SAVE_PLANNER)
    writer = backend.next_writer()
    timer.watch(writer, _WRITER)
    gc.collect()
    try:
        with harness.clock() as sample:
            backend.save(state, writer=writer, planner=planner)
    finally:
        for name in _WRITER:
            delattr(writer, name)
    return Sample(timer.seconds, sample.cpu_s)


def timed_load(backend: Backend, state: dict[str, torch.Tensor]) -> Sample:
    """Load; return the seconds inside the storage layer."""
    timer, planner = Timer(), DefaultLoadPlanner()
    timer.exclude(planner, _LOAD_PLANNER)
    reader = backend.reader()
    timer.watch(reader, _READER)
    gc.collect()
    with harness.clock() as sample:
        backend.load(state, reader=reader, planner=planner)
    return Sample(timer.seconds, sample.cpu_s)


def _per_tensor(samples: list[Sample], count: int) -> list[float]:
    return [sample.seconds / count * 1e6 for sample in samples]


def index_bytes(backend: Backend, count: int) -> dict[str, float]:
    """Return bytes per tensor that are not the tensor, by kind of file, and their sum as `all`."""
    sizes: dict[str, int] = {}
    for path in backend.files():
        kind = path.suffix or path.name
        sizes[kind] = sizes.get(kind, 0) + path.stat().st_size
    data = max(sizes, key=sizes.__getitem__)
    sizes[data] -= TENSOR_BYTES * count
    return {kind: size / count for kind, size in sizes.items()} | {
        "all": sum(sizes.values()) / count
    }


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    small, large = options.tensors[0], options.tensors[-1]
    backends: dict[str, Backend] = {
        "ours": Ours(options.directory / "ours"),
        "stock": Stock(options.directory / "stock"),
    }
    saves: dict[tuple[str, int], list[Sample]] = {}
    loads: dict[tuple[str, int], list[Sample]] = {}
    index: dict[tuple[str, int], dict[str, float]] = {}
    states = {count: make_tiny(count) for count in (small, large)}
    plan = [("stock", small), ("ours", small), ("ours", large)]
    backends["ours"].save(states[small])
    backends["ours"].remove()
    for _ in range(options.pairs):
        for which in dict.fromkeys(plan):
            backend, count = backends[which[0]], which[1]
            saves.setdefault(which, []).append(timed_save(backend, states[count]))
            target = {name: torch.zeros(16) for name in states[count]}
            loads.setdefault(which, []).append(timed_load(backend, target))
            wrong = [name for name in target if not torch.equal(target[name], states[count][name])]
            assert not wrong, f"{which[0]} loads something else than was saved: {wrong[:3]}"
            index[which] = index_bytes(backend, count)
            backend.remove()
    for backend in backends.values():
        backend.close()
    return [
        _time("save", saves, small, large),
        _time("load", loads, small, large),
        _growth(saves, loads, small, large),
        _index(index, small, large),
    ]


def _time(
    what: str, samples: dict[tuple[str, int], list[Sample]], small: int, large: int
) -> Answer:
    ours = _per_tensor(samples["ours", large], large)
    stock = samples["stock", small]
    return Answer(
        benchmark="many_tensors",
        goal="G5",
        metric=f"storage layer, {what}, of {large} tensors",
        unit="us",
        bytes=large * TENSOR_BYTES,
        seconds=harness.median(sample.seconds for sample in samples["ours", large]),
        reference_seconds=harness.median(sample.seconds for sample in stock),
        ratio=harness.median(ours),
        ratios=ours,
        stock=harness.median(_per_tensor(stock, small)),
        target=15.0,
        bound="max",
        details={
            "tensors": large,
            "small": harness.median(_per_tensor(samples["ours", small], small)),
            "stock_tensors": small,
        },
    )


def _growth(
    saves: dict[tuple[str, int], list[Sample]],
    loads: dict[tuple[str, int], list[Sample]],
    small: int,
    large: int,
) -> Answer:
    def both(count: int) -> list[float]:
        pairs = zip(saves["ours", count], loads["ours", count], strict=True)
        return [save.seconds + load.seconds for save, load in pairs]

    ratios = [more / less for more, less in zip(both(large), both(small), strict=True)]
    return Answer(
        benchmark="many_tensors",
        goal="G5",
        metric=f"time of {large} / time of {small} tensors",
        unit="1",
        bytes=large * TENSOR_BYTES,
        seconds=harness.median(both(large)),
        reference_seconds=harness.median(both(small)),
        ratio=harness.median(ratios),
        ratios=ratios,
        stock=None,
        target=1.1 * large / small,
        bound="max",
    )


def _index(index: dict[tuple[str, int], dict[str, float]], small: int, large: int) -> Answer:
    ours = index["ours", large]
    return Answer(
        benchmark="many_tensors",
        goal="G5",
        metric="index per tensor",
        unit="B",
        bytes=large * TENSOR_BYTES,
        seconds=0.0,
        reference_seconds=None,
        ratio=ours["all"],
        ratios=[ours["all"]],
        stock=index["stock", small]["all"],
        target=100.0,
        bound="max",
        details={"by_file": ours, "small": index["ours", small]["all"]},
    )


if __name__ == "__main__":
    sys.exit(harness.main({"many_tensors": run}, __doc__))
