"""G6: how much of the disk's speed does a resume from the local tier get, and at what price?

Ours: `dcp.load` of files that are not in the page cache (posix_fadvise, and mincore says so) into
tensors that exist, from the call to its return, checksums verified. Reference: the same bytes
read with O_DIRECT by two threads in requests of 16 MiB into memory that was touched before.
Stock: `FileSystemReader` on files of `FileSystemWriter`, as cold. 1 would be the speed of the
disk. The CPU is that of the whole process; the details have that of the raw read, of one copy and
of one checksum, below which a load cannot go.
"""

import sys
from functools import partial

from benchmarks import harness
from benchmarks.backends import Backend, Ours, Stock
from benchmarks.harness import Answer, LineRate, Options, Sample, Step


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    state = harness.make_state(options.bytes)
    target = harness.empty_like(state)
    size = harness.bytes_of(state)
    line = LineRate(state, options.directory / "line-rate")
    line.write()
    floor, raw = harness.Floor(state), list[float]()
    backends: dict[str, Backend] = {
        "ours": Ours(options.directory / "ours"),
        "stock": Stock(options.directory / "stock"),
    }
    for name, backend in backends.items():
        backend.save(state)
        backend.load(target)
        assert harness.equal(state, target), f"{name} loads something else than was saved"
        target = harness.empty_like(state)

    def load(backend: Backend) -> Sample:
        harness.make_cold(backend.files())
        with harness.clock() as sample:
            backend.load(target)
        return sample

    def reference() -> Sample:
        sample = line.read()
        raw.append(sample.cpu_s / (size / harness.GB))
        floor.run()
        return sample

    steps: dict[str, Step] = {name: partial(load, backend) for name, backend in backends.items()}
    measured = harness.interleave(reference, steps, options.pairs)
    line.close()
    for backend in backends.values():
        backend.close()
    ours, stock = measured["ours"], measured["stock"]
    cpu = harness.cpu_per_gb(ours, size)
    return [
        Answer(
            benchmark="load_vs_line_rate",
            goal="G6",
            metric="cold load / raw O_DIRECT read, speed",
            unit="1",
            bytes=size,
            seconds=harness.median(pair.sample.seconds for pair in ours),
            reference_seconds=harness.median(pair.reference for pair in ours),
            ratio=harness.median(harness.speeds(ours)),
            ratios=harness.speeds(ours),
            stock=harness.median(harness.speeds(stock)),
            target=0.80,
            bound="min",
        ),
        Answer(
            benchmark="load_vs_line_rate",
            goal="G6",
            metric="CPU of cold load",
            unit="s/GB",
            bytes=size,
            seconds=harness.median(pair.sample.cpu_s for pair in ours),
            reference_seconds=None,
            ratio=harness.median(cpu),
            ratios=cpu,
            stock=harness.median(harness.cpu_per_gb(stock, size)),
            target=0.25,
            bound="max",
            details={"raw_cpu_s_per_gb": harness.median(raw), **floor.details()},
        ),
    ]


if __name__ == "__main__":
    sys.exit(harness.main({"load_vs_line_rate": run}, __doc__))
