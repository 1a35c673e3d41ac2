"""G3: how much of the processor does a save take, in seconds per GB?

Ours: user and system time of the whole process, all threads, over a `dcp.save`, and over a
`dcp.async_save` until its future is done: plan, stage, checksums, write, publish. Without a
durable tier there is no flusher. Reference: the raw O_DIRECT writer; with one copy and one checksum
of the same bytes, in the same run and in the details, it is what a save cannot go below. Stock:
`FileSystemWriter` with a thread per core. What the kernel's own threads do later for a page cache
is charged to nobody, which favours those that write through it.
"""

import sys
from functools import partial

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.harness import Answer, LineRate, Options, Sample, Step

TARGET = 0.22


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    state = harness.make_state(options.bytes)
    size = harness.bytes_of(state)
    line = LineRate(state, options.directory / "line-rate")
    floor = harness.Floor(state)
    raw: list[float] = []
    backends: dict[str, Backend] = {
        "ours": Ours(options.directory / "ours"),
        "stock": Stock(options.directory / "stock"),
    }

    def reference() -> Sample:
        sample = line.write()
        raw.append(sample.cpu_s / (size / harness.GB))
        floor.run()
        return sample

    def save(backend: Backend) -> Sample:
        with harness.clock() as sample:
            backend.save(state)
        backend.remove()
        return sample

    def async_save(backend: Backend) -> Sample:
        with harness.clock() as sample:
            backend.begin(state).result()
        backend.remove()
        return sample

    steps: dict[str, Step] = {
        f"{name} {how.__name__}": partial(how, backend)
        for name, backend in backends.items()
        for how in (save, async_save)
    }
    measured = harness.interleave(reference, steps, options.pairs)
    line.close()
    for backend in backends.values():
        backend.close()
    answers = []
    for how in ("save", "async_save"):
        pairs = measured[f"ours {how}"]
        ours = harness.cpu_per_gb(pairs, size)
        answers.append(
            Answer(
                benchmark="cpu_per_gb",
                goal="G3",
                metric=f"CPU of {how}",
                unit="s/GB",
                bytes=size,
                seconds=harness.median(pair.sample.cpu_s for pair in pairs),
                reference_seconds=harness.median(raw) * size / harness.GB,
                ratio=harness.median(ours),
                ratios=ours,
                stock=harness.median(harness.cpu_per_gb(measured[f"stock {how}"], size)),
                target=TARGET,
                bound="max",
                details={"raw_cpu_s_per_gb": harness.median(raw), **floor.details()},
            )
        )
    return answers


if __name__ == "__main__":
    sys.exit(harness.main({"cpu_per_gb": run}, __doc__))
