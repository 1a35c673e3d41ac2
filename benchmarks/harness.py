"""What the benchmarks share: states, references, clocks, and how an answer is told.

Absolute figures of a shared machine swing by a factor of two within an hour. So every answer is a
ratio to a reference in the same run: reference, ours, reference, stock, reference, and so on. Each
sample is held against the mean of the references right before and right after it, and the answer is
the median over the pairs. Everything runs once, unmeasured, before the first pair.
"""

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from awscrt.checksums import crc32c
from rich.console import Console
from rich.table import Table

from dcp_tiered.cli.doctor import file_system

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9
PAGE_BYTES = mmap.PAGESIZE
_BLOCK_BYTES = 256 << 10
_REQUEST_BYTES = 16 << 20
_THREADS = 2
_LAYERS = 16
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_COLD = 0.01
"""A file of which less than this part is in the page cache is cold."""

State = dict[str, Any]


# ------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How large and how often."""

    directory: Path
    """Where to work: on the disk in question, with O_DIRECT. Left empty."""
    bytes: int = 1 << 30
    pairs: int = 5
    tensors: tuple[int, ...] = (10_000, 100_000)
    """Counts of tiny tensors, from small to large."""


Run = Callable[[Options], list["Answer"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line of a benchmark's result."""

    benchmark: str
    goal: str
    metric: str
    unit: str
    """Of `ratio`, `stock` and `target`: `1` for a plain ratio, else `s/GB`, `us`, `B`."""
    bytes: int
    """Of state, per sample."""
    seconds: float
    """Median of our samples, in the benchmark's own terms."""
    reference_seconds: float | None
    """Median of the references, None where the unit is no ratio to one."""
    ratio: float
    """The answer: the median over the pairs."""
    ratios: list[float]
    """Every pair."""
    stock: float | None
    """The same for stock DCP, where that was measured."""
    target: float
    bound: str
    """`min` or `max`: which side of the target is good."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the target was met in this run."""
        return self.ratio >= self.target if self.bound == "min" else self.ratio <= self.target


def parse_bytes(text: str) -> int:
    """Return bytes behind `1073741824`, `64MiB` or `1.5GiB`."""
    digits = text.rstrip("KMGiB")
    try:
        return int(float(digits) * _UNITS[text.removeprefix(digits)])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64MiB") from None


def main(benchmarks: Mapping[str, Run], text: str, arguments: list[str] | None = None) -> int:
    """Run benchmarks as the command line asks; the exit code tells whether each gave an answer.

    A missed target is an answer: what a shared machine measures fails no build.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30, help="of state, as 512MiB")
    parser.add_argument("--pairs", type=int, default=5, help="how often each is measured")
    parser.add_argument("--dir", type=Path, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--tensors", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--output", type=Path, help="append the lines of JSON to this file")
    if len(benchmarks) > 1:
        parser.add_argument("names", nargs="*", metavar="name", help=", ".join(benchmarks))
    given = parser.parse_args(arguments)
    names = getattr(given, "names", None) or list(benchmarks)
    unknown = sorted(set(names) - set(benchmarks))
    if unknown or given.pairs < 1 or given.bytes < 1 << 20:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "at least 1 pair and 1 MiB")
    return _run_all({name: benchmarks[name] for name in names}, given)


def _run_all(benchmarks: Mapping[str, Run], given: argparse.Namespace) -> int:
    # Where there is no terminal, 80 columns are assumed, too few for the table.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    failed, answers = 0, []
    with workspace(given.dir) as directory:
        options = Options(
            directory=directory,
            bytes=given.bytes,
            pairs=given.pairs,
            tensors=tuple(sorted(given.tensors)),
        )
        where = {"commit": commit(), "machine": machine(directory)}
        for name, run in benchmarks.items():
            begun = time.monotonic()
            try:
                with console.status(f"{name} ..."):
                    new = run(options)
            except Exception:  # noqa: BLE001 - the others still have answers to give
                console.print_exception()
                failed += 1
                continue
            console.print(f"{name}: {time.monotonic() - begun:.0f} s")
            answers += new
            lines = [to_json(answer, where) for answer in new]
            if given.output is None:
                print("\n".join(lines), flush=True)
            else:
                with given.output.open("a", encoding="utf-8") as file:
                    file.write("\n".join(lines) + "\n")
    console.print(table(answers))
    return 1 if failed else 0


@contextmanager
def workspace(parent: Path | None) -> Iterator[Path]:
    """Give a directory that is gone afterwards."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="dcp-tiered-bench-", dir=parent))
    try:
        with warnings.catch_warnings():
            # Said by every dcp.save and dcp.load without a process group.
            warnings.filterwarnings(
                "ignore", message=r"torch\.distributed is ", category=UserWarning
            )
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# ------------------------------------------------------------------------------ how it is told


def to_json(answer: Answer, where: Mapping[str, Any]) -> str:
    """Return one line of JSON: the answer, and on what it was measured."""
    return json.dumps({**where, **asdict(answer), "met": answer.met})


def table(answers: Iterable[Answer]) -> Table:
    """Return answers for people."""
    columns = ("goal", "metric", "ours", "stock DCP", "target", "met", "pairs")
    result = Table(*columns, title="dcp_tiered, each against a reference in the same run")
    for answer in answers:
        unit = "" if answer.unit == "1" else f" {answer.unit}"
        spread = f"{min(answer.ratios):.3g} - {max(answer.ratios):.3g}"
        result.add_row(
            answer.goal,
            answer.metric,
            f"{answer.ratio:.3g}{unit}",
            "" if answer.stock is None else f"{answer.stock:.3g}{unit}",
            f"{'>=' if answer.bound == 'min' else '<='} {answer.target:g}{unit}",
            "[green]yes[/]" if answer.met else "[red]no[/]",
            spread,
        )
    return result


def commit() -> str:
    """Return the commit that is measured, with a mark where files differ from it."""
    try:
        text = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.strip()


def machine(directory: Path) -> dict[str, Any]:
    """Return what the figures depend on."""
    processors = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    models = [
        line.partition(":")[2].strip() for line in processors.splitlines() if "model name" in line
    ]
    return {
        "cpu": models[0] if models else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES,
        "kernel": os.uname().release,
        "fs": file_system(directory),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
    }


# --------------------------------------------------------------------------- how it is measured


@dataclass(slots=True)
class Sample:
    """One measured step."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of all threads of this process and of children that have ended."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A sample and the mean of the references around it, seconds."""

    sample: Sample
    reference: float


Step = Callable[[], Sample]


@contextmanager
def clock() -> Iterator[Sample]:
    """Measure what runs in the block."""
    sample = Sample()
    cpu, begun = _cpu_s(), time.perf_counter()
    yield sample
    sample.seconds = time.perf_counter() - begun
    sample.cpu_s = _cpu_s() - cpu


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def interleave(reference: Step, steps: Mapping[str, Step], pairs: int) -> dict[str, list[Pair]]:
    """Measure each step between two references, `pairs` times, after one warm-up of everything."""
    for step in (reference, *steps.values()):
        step()
    measured: dict[str, list[Pair]] = {name: [] for name in steps}
    before = reference().seconds
    for _ in range(pairs):
        for name, step in steps.items():
            sample = step()
            after = reference().seconds
            measured[name].append(Pair(sample, (before + after) / 2))
            before = after
    return measured


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def speeds(pairs: list[Pair]) -> list[float]:
    """Return our speed as a part of the reference's; 1 is as fast."""
    return [pair.reference / pair.sample.seconds for pair in pairs]


def times(pairs: list[Pair]) -> list[float]:
    """Return our time as a multiple of the reference's; 1 is as long."""
    return [pair.sample.seconds / pair.reference for pair in pairs]


def cpu_per_gb(pairs: list[Pair], size: int) -> list[float]:
    """Return CPU seconds per GB."""
    return [pair.sample.cpu_s / (size / GB) for pair in pairs]


# ------------------------------------------------------------------------------------- states


def make_state(size: int) -> State:
    """Return a state of about `size` bytes.

    Large matrices in float32 and bfloat16 with small vectors between them, as in a transformer, and
    some things that are no tensors.
    """
    per_layer = max(size // _LAYERS, 1 << 12)
    layers = {}
    for layer in range(_LAYERS):
        dtype = torch.bfloat16 if layer % 2 else torch.float32
        columns = 256
        rows = max(per_layer // (columns * dtype.itemsize), 1)
        layers[f"layers.{layer}.weight"] = _random(rows, columns).to(dtype)
        layers[f"layers.{layer}.norm"] = _random(columns)
    return {"model": layers, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "step": 7}


def _random(*shape: int) -> torch.Tensor:
    return torch.empty(shape).uniform_()


def empty_like(state: State) -> State:
    """Return a state to load into: other values, memory that was touched already."""
    model = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    return {"model": model, "optimizer": {"lr": 0.0, "betas": [0.0, 0.0]}, "step": 0}


def tensors_of(state: State) -> list[torch.Tensor]:
    """Return the tensors of a state of `make_state`."""
    return list(state["model"].values())


def bytes_of(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


def equal(left: State, right: State) -> bool:
    """Tell whether two states hold the same."""
    pairs = zip(tensors_of(left), tensors_of(right), strict=True)
    rest = [{key: state[key] for key in ("optimizer", "step")} for state in (left, right)]
    return rest[0] == rest[1] and all(torch.equal(a, b) for a, b in pairs)


# --------------------------------------------------------------------------------- references


class LineRate:
    """The line rate of a disk: the bytes of a state, O_DIRECT, two threads, requests of 16 MiB.

    The bytes lie ready in one page-aligned buffer that was touched before. The file's space is
    reserved first, which is the fastest way there is on ext4 and xfs, and a write ends with fsync.
    """

    def __init__(self, state: State, path: Path) -> None:
        self.path = path
        self.bytes = bytes_of(state)
        self._length = self.bytes + -self.bytes % PAGE_BYTES
        self._image = memoryview(mmap.mmap(-1, self._length))
        whole = np.frombuffer(self._image, dtype=np.uint8)
        at = 0
        for tensor in tensors_of(state):
            flat = tensor.reshape(-1).view(torch.uint8).numpy()
            whole[at : at + len(flat)] = flat
            at += len(flat)
        self._pool = ThreadPoolExecutor(_THREADS, "line-rate")

    def write(self) -> Sample:
        """Write a new file; the old one is removed first, unmeasured."""
        self.path.unlink(missing_ok=True)
        settle(self.path.parent)
        with clock() as sample:
            fd = self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.posix_fallocate(fd, 0, self._length)
                self._each_request(lambda part, at: _write(fd, part, at))
                os.fsync(fd)
            finally:
                os.close(fd)
        return sample

    def read(self) -> Sample:
        """Read the file that `write` left, cold, into the buffer."""
        make_cold([self.path])
        with clock() as sample:
            fd = self._open(os.O_RDONLY)
            try:
                self._each_request(lambda part, at: _read(fd, part, at))
            finally:
                os.close(fd)
        return sample

    def close(self) -> None:
        """Remove the file."""
        self._pool.shutdown()
        self.path.unlink(missing_ok=True)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            exc.add_note(f"{self.path.parent} has no O_DIRECT: give --dir on the disk to measure")
            raise

    def _each_request(self, work: Callable[[memoryview, int], None]) -> None:
        starts = range(0, self._length, _REQUEST_BYTES)
        list(self._pool.map(lambda at: work(self._image[at : at + _REQUEST_BYTES], at), starts))


def _write(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], start + done)


def _read(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(fd, [data[done:]], start + done)
        assert count, "the file ends early"
        done += count


class WarmCopy:
    """One tensor-to-tensor copy of a state into memory that was touched before."""

    def __init__(self, state: State) -> None:
        self._pairs = [(torch.zeros_like(tensor), tensor) for tensor in tensors_of(state)]

    def run(self) -> Sample:
        """Copy every tensor."""
        with clock() as sample:
            for target, source in self._pairs:
                target.copy_(source)
        return sample


class Floor:
    """What a copy and a checksum of a state take by themselves, in seconds of CPU per GB.

    The copy is one thread's, to warm memory; CRC32C is taken block by block from memory that is not
    in the cache, as that of a file that was read.
    """

    def __init__(self, state: State) -> None:
        self._parts = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors_of(state)]
        self._target = np.zeros(max(map(len, self._parts)), dtype=np.uint8)
        self._size = bytes_of(state)
        self.copies: list[float] = []
        self.checksums: list[float] = []

    def run(self) -> None:
        """Measure once more."""
        with clock() as sample:
            for part in self._parts:
                np.copyto(self._target[: len(part)], part)
        self.copies.append(sample.cpu_s / (self._size / GB))
        with clock() as sample:
            for part in self._parts:
                data = part.data
                for at in range(0, len(data), _BLOCK_BYTES):
                    crc32c(data[at : at + _BLOCK_BYTES])
        self.checksums.append(sample.cpu_s / (self._size / GB))

    def details(self) -> dict[str, float]:
        """Return the medians."""
        return {
            "copy_cpu_s_per_gb": median(self.copies),
            "crc32c_cpu_s_per_gb": median(self.checksums),
        }


def settle(directory: Path) -> None:
    """Let the file system finish what removed files left to do, which the next sample would pay."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------- cold files


def make_cold(paths: Iterable[Path]) -> None:
    """Push files out of the page cache, and see that they are."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        size = path.stat().st_size
        resident = resident_bytes(path)
        assert resident <= max(_COLD * size, PAGE_BYTES), f"{path}: {resident} of {size} are cached"


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache, by mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as area:
        pages = np.zeros(-(-size // PAGE_BYTES), dtype=np.uint8)
        whole = np.frombuffer(area, dtype=np.uint8)
        address = ctypes.c_void_p(whole.ctypes.data)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        del whole
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return int((pages & 1).sum()) * PAGE_BYTES


# ------------------------------------------------------------------------------------- memory


class Memory:
    """Resident memory of this process, from the state it is in when this is made."""

    def __init__(self) -> None:
        # What malloc keeps free would take what is measured, and hide it.
        ctypes.CDLL(None).malloc_trim(0)
        self._before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM

    def peak(self) -> int:
        """Return the highest number of bytes above the start, shared memory counted."""
        return max(_status("VmHWM") - self._before, 0)

    def now(self) -> int:
        """Return the number of bytes above the start."""
        return _status("VmRSS") - self._before


def memory_kinds() -> dict[str, int]:
    """Return bytes by kind, from smaps_rollup."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = {line.partition(":")[0]: line.split() for line in lines[1:]}
    names = ("Rss", "Pss_Anon", "Pss_Shmem", "Pss_File")
    return {name: int(fields[name][1]) << 10 for name in names if name in fields}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name} in /proc/self/status")
