"""G1: how much of the disk's speed does a save to the local tier get?

Ours: `dcp.save` from CPU tensors to a run without durable tier, from the call to its return:
plan, copy, checksums, write, fsync, link, manifest. Reference: the same bytes, page-aligned in
memory that was touched before, written with O_DIRECT by two threads in requests of 16 MiB to a
reserved file, and fsync. Stock: `FileSystemWriter` with a thread per core and fsync. 1 would be
the speed of the disk.
"""

import sys
from functools import partial

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.harness import Answer, LineRate, Options, Sample, Step


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    state = harness.make_state(options.bytes)
    size = harness.bytes_of(state)
    line = LineRate(state, options.directory / "line-rate")
    backends: dict[str, Backend] = {
        "ours": Ours(options.directory / "ours"),
        "stock": Stock(options.directory / "stock"),
    }

    def save(backend: Backend) -> Sample:
        with harness.clock() as sample:
            backend.save(state)
        backend.remove()
        return sample

    steps: dict[str, Step] = {name: partial(save, backend) for name, backend in backends.items()}
    measured = harness.interleave(line.write, steps, options.pairs)
    line.close()
    for backend in backends.values():
        backend.close()
    ours, stock = measured["ours"], measured["stock"]
    return [
        Answer(
            benchmark="save_vs_line_rate",
            goal="G1",
            metric="save / raw O_DIRECT write, speed",
            unit="1",
            bytes=size,
            seconds=harness.median(pair.sample.seconds for pair in ours),
            reference_seconds=harness.median(pair.reference for pair in ours),
            ratio=harness.median(harness.speeds(ours)),
            ratios=harness.speeds(ours),
            stock=harness.median(harness.speeds(stock)),
            target=0.90,
            bound="min",
        )
    ]


if __name__ == "__main__":
    sys.exit(harness.main({"save_vs_line_rate": run}, __doc__))
