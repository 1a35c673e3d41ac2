"""G2: how long does `dcp.async_save` hold up training, in copies of the state?

Ours: the time until `dcp.async_save` returns, with one writer over several saves, each awaited
before the next; and the first save of a new writer after `writer.prewarm(state)`. Reference: one
tensor-to-tensor copy of the state into memory that was touched before. Stock: a `DefaultStager`
that is kept between saves; what `dcp.async_save` does without one is in the details. 1 would be
one copy.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.harness import Answer, Options, Pair, Sample, Step, WarmCopy

_TARGETS = {"steady": 1.25, "first": 1.5}


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    state = harness.make_state(options.bytes)
    numbers = itertools.count()
    prewarmed: list[bool] = []

    def stall(backend: Backend) -> Sample:
        with harness.clock() as sample:
            future = backend.begin(state)
        future.result()
        backend.remove()
        return sample

    def first(make: Callable[[], Backend], prewarms: list[bool]) -> Sample:
        backend = make()
        try:
            prewarms.append(backend.prewarm(state))
            return stall(backend)
        finally:
            backend.close()

    kept: dict[str, Backend] = {
        "ours": Ours(options.directory / "ours"),
        "stock": Stock(options.directory / "stock"),
        "stock_default": Stock(options.directory / "stock-default", keep_stager=False),
    }
    steps: dict[str, Step] = {name: partial(stall, backend) for name, backend in kept.items()}
    measured = harness.interleave(
        WarmCopy(state).run,
        {
            **steps,
            "ours_first": lambda: first(
                lambda: Ours(options.directory / f"ours-{next(numbers)}"), prewarmed
            ),
            "stock_first": lambda: first(
                lambda: Stock(options.directory / f"stock-{next(numbers)}"), []
            ),
        },
        options.pairs,
    )
    for backend in kept.values():
        backend.close()
    default = harness.median(harness.times(measured["stock_default"]))
    size = harness.bytes_of(state)
    return [
        _answer("steady", size, measured["ours"], measured["stock"], {"stock_default": default}),
        _answer(
            "first",
            size,
            measured["ours_first"],
            measured["stock_first"],
            {"prewarmed": all(prewarmed)},
        ),
    ]


def _answer(
    which: str, size: int, ours: list[Pair], stock: list[Pair], details: dict[str, float | bool]
) -> Answer:
    return Answer(
        benchmark="stall_vs_copy",
        goal="G2",
        metric=f"stall / warm copy, {which}",
        unit="1",
        bytes=size,
        seconds=harness.median(pair.sample.seconds for pair in ours),
        reference_seconds=harness.median(pair.reference for pair in ours),
        ratio=harness.median(harness.times(ours)),
        ratios=harness.times(ours),
        stock=harness.median(harness.times(stock)),
        target=_TARGETS[which],
        bound="max",
        details=dict(details),
    )


if __name__ == "__main__":
    sys.exit(harness.main({"stall_vs_copy": run}, __doc__))
