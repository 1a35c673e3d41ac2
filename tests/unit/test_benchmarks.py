"""The benchmarks run, count right and tell the truth; the bars that no slow machine excuses.

Nothing here depends on how fast anything is: what is held are counts, orders, and memory.
"""

import json
import math
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks import harness, many_tensors
from benchmarks.__main__ import ALL
from benchmarks.harness import Answer, LineRate, Options, Sample
from dcp_tiered import TieredWriter
from tests.conftest import flusher_pids

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Give a directory of a file system that has O_DIRECT, as all benchmarks need."""
    probe = tmp_path / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as exc:
        pytest.skip(f"{tmp_path} has no O_DIRECT: {exc}")
    probe.unlink()
    return tmp_path


def raw_bytes(state: harness.State) -> bytes:
    return b"".join(
        tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for tensor in harness.tensors_of(state)
    )


# ------------------------------------------------------------------------------ all of them


def check_speed(answer: Answer) -> None:
    assert answer.reference_seconds is not None
    assert answer.ratio == pytest.approx(answer.reference_seconds / answer.seconds)


def check_time(answer: Answer) -> None:
    assert answer.reference_seconds is not None
    assert answer.ratio == pytest.approx(answer.seconds / answer.reference_seconds)


def check_cpu(answer: Answer) -> None:
    """Hold the CPU of a save against stock DCP in the same run: other load slows both."""
    assert answer.unit == "s/GB"
    assert answer.ratio == pytest.approx(answer.seconds / (answer.bytes / 1e9))
    if answer.goal == "G3":
        assert answer.stock is not None
        assert answer.ratio <= max(0.44, 0.7 * answer.stock)


def check_load(answer: Answer) -> None:
    (check_speed if answer.unit == "1" else check_cpu)(answer)


def check_interference(answer: Answer) -> None:
    check_speed(answer)
    assert answer.details["longest_step_s"] >= answer.seconds
    assert answer.details["ran_s"] > 0
    assert answer.details["lost_s_per_gb"] >= 0


def check_tensors(answer: Answer) -> None:
    assert answer.bytes == 200 * 64
    if answer.unit == "us":
        assert answer.ratio == pytest.approx(answer.seconds / 200 * 1e6)
    if answer.unit == "B":
        assert answer.stock is not None
        assert answer.stock > 1000, "stock stores a zip container for each tensor"
        by_file = dict(answer.details["by_file"])
        assert by_file.pop("all") == pytest.approx(sum(by_file.values()))


def check_memory(answer: Answer) -> None:
    """Hold the bars of memory, which are the same on every machine.

    A save takes its buffers, whatever the state: no more than 0.07 of 1 GiB. An async save takes
    one copy and 0.02 of 1 GiB. Nothing stays behind of states of 16 MiB, but for what malloc keeps
    for threads: a new one may get an arena that no thread had before.
    """
    assert answer.stock is not None
    if answer.metric.endswith("async_save"):
        assert min(answer.ratio, answer.stock) > 0.9, "one copy of the state there has to be"
        assert (answer.ratio - 1) * answer.bytes <= 0.02 * (1 << 30)
    elif answer.metric.startswith("peak"):
        assert answer.ratio * answer.bytes <= 0.07 * (1 << 30)
    else:
        assert answer.ratio * answer.bytes <= MIB, answer.details["after"]


def check_flush(answer: Answer) -> None:
    if answer.unit == "s/GB":
        check_cpu(answer)
    others = answer.details["cpu_s_per_gb"]
    assert {"floor", "awscrt", "s3fs"} <= set(others), "installed with the package"
    assert not set(others) & set(answer.details["not_installed"])


def check_objects(answer: Answer) -> None:
    """G8 holds on every machine: a pack, a manifest and a record."""
    assert answer.ratio == (3 if answer.unit == "objects" else 1)


def check_compression(answer: Answer) -> None:
    """What is saved is the same on every machine; what it costs is not."""
    assert answer.met or answer.unit == "s/GB"


CHECKS: dict[str, tuple[int, list[Callable[[Answer], None]]]] = {
    "save_vs_line_rate": (1, [check_speed]),
    "stall_vs_copy": (2, [check_time]),
    "cpu_per_gb": (2, [check_cpu]),
    "trainer_interference": (3, [check_interference]),
    "many_tensors": (4, [check_tensors]),
    "load_vs_line_rate": (2, [check_load]),
    "memory": (3, [check_memory]),
    "flush_vs_clients": (2, [check_flush]),
    "time_to_durable": (2, [check_time]),
    "objects_per_checkpoint": (2, [check_objects]),
    "compression": (9, [check_compression]),
}


SIZES = {"memory": 128 * MIB, "cpu_per_gb": 256 * MIB}
"""So large that what does not depend on the size does not count."""


@pytest.mark.slow
@pytest.mark.timeout(300)  # `memory` imports torch anew and saves 48 times
@pytest.mark.parametrize("name", ALL)
def test_benchmark_answers_and_leaves_nothing_behind(name: str, disk: Path) -> None:
    size = SIZES.get(name, 4 * MIB)
    options = Options(directory=disk, bytes=size, pairs=1, tensors=(50, 200))
    answers = ALL[name](options)
    count, checks = CHECKS[name]
    assert len(answers) == count
    assert len({answer.metric for answer in answers}) == count
    for answer in answers:
        assert answer.benchmark == name
        if name != "many_tensors" and answer.unit != "objects":
            size_of = size // 8 if answer.metric.startswith("growth") else size
            assert answer.bytes == pytest.approx(size_of, rel=0.02)
        assert math.isfinite(answer.ratio)
        assert len(answer.ratios) == 1
        assert answer.ratio == pytest.approx(answer.ratios[0])
        assert answer.met == (
            answer.ratio >= answer.target
            if answer.bound == "min"
            else answer.ratio <= answer.target
        )
        for check in checks:
            check(answer)
    assert list(disk.iterdir()) == []
    assert flusher_pids(disk / "flushed" / "nvme") == []


# ------------------------------------------------------------------------------ how it is told


def answer(**changes: object) -> Answer:
    fields: dict[str, object] = {
        "benchmark": "toy",
        "goal": "G0",
        "metric": "toys",
        "unit": "1",
        "bytes": 7,
        "seconds": 2.0,
        "reference_seconds": 1.0,
        "ratio": 0.5,
        "ratios": [0.5],
        "stock": None,
        "target": 0.5,
        "bound": "min",
    }
    return Answer(**{**fields, **changes})


def test_output_gets_a_line_of_json_per_answer_behind_what_was_there(tmp_path: Path) -> None:
    output, work = tmp_path / "results.jsonl", tmp_path / "work"
    output.write_text('{"old": true}\n')
    toys = {"toy": lambda options: [answer(bytes=options.bytes), answer(metric="more toys")]}
    arguments = ["--bytes", "2MiB", "--dir", str(work), "--output", str(output)]
    assert harness.main(toys, "toys", arguments) == 0
    old, first, second = [json.loads(line) for line in output.read_text().splitlines()]
    assert old == {"old": True}
    assert {**asdict(answer(bytes=2 * MIB)), "met": True}.items() <= first.items()
    assert second["metric"] == "more toys"
    assert set(first) - set(asdict(answer())) == {"commit", "machine", "met"}
    assert first["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert first["machine"]["memory_bytes"] > first["bytes"]
    assert {"cpu", "kernel", "fs", "load", "torch"} < set(first["machine"])
    assert list(work.iterdir()) == []


def test_one_that_fails_does_not_take_the_others_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: Options) -> list[Answer]:
        raise OSError(28, f"no space in {options.directory.name}")

    benchmarks = {"broken": broken, "toy": lambda _: [answer()]}
    assert harness.main(benchmarks, "toys", ["--dir", str(tmp_path / "work")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["benchmark"] == "toy"
    assert "no space in" in err
    assert "toys" in err


@pytest.mark.parametrize(
    ("ratio", "bound", "met"),
    [(0.5, "min", True), (0.4, "min", False), (0.5, "max", True), (0.6, "max", False)],
)
def test_a_target_is_met_from_its_good_side(ratio: float, bound: str, met: bool) -> None:
    assert answer(ratio=ratio, bound=bound).met is met


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", MIB), ("64MiB", 64 * MIB), ("1.5GiB", 3 << 29), ("2KiB", 2048)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert harness.parse_bytes(text) == size


@pytest.mark.parametrize("arguments", [["--bytes", "1MB"], ["--bytes", "1"], ["--pairs", "0"]])
def test_a_size_that_is_none_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        harness.main({"toy": lambda _: []}, "toys", arguments)
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err


# ----------------------------------------------------------------------------- the references


def test_line_rate_writes_and_reads_the_bytes_of_the_state(disk: Path) -> None:
    state = harness.make_state(3 * MIB + 12345)
    expected = raw_bytes(state)
    line = LineRate(state, disk / "line")
    for _ in range(2):
        line.write()
        assert (disk / "line").read_bytes()[: len(expected)] == expected
    for tensor in harness.tensors_of(state):
        tensor.zero_()
    line._image[:] = bytes(len(line._image))
    line.read()
    assert bytes(line._image[: len(expected)]) == expected
    assert (disk / "line").stat().st_size - len(expected) < harness.PAGE_BYTES
    line.close()
    assert list(disk.iterdir()) == []


def test_line_rate_leaves_the_page_cache_alone(disk: Path) -> None:
    line = LineRate(harness.make_state(4 * MIB), disk / "line")
    line.write()
    assert harness.resident_bytes(disk / "line") == 0


def test_a_file_is_cold_after_make_cold_and_warm_after_a_read(disk: Path) -> None:
    path = disk / "file"
    path.write_bytes(os.urandom(MIB + 1))
    assert harness.resident_bytes(path) == MIB + harness.PAGE_BYTES
    harness.make_cold([path])
    assert harness.resident_bytes(path) == 0
    path.read_bytes()
    assert harness.resident_bytes(path) == MIB + harness.PAGE_BYTES


def test_warm_copy_copies_every_tensor() -> None:
    state = harness.make_state(MIB)
    copy = harness.WarmCopy(state)
    copy.run()
    copied = [target for target, _ in copy._pairs]
    assert all(map(torch.equal, copied, harness.tensors_of(state)))
    assert not {t.data_ptr() for t in copied} & {t.data_ptr() for t in harness.tensors_of(state)}


def test_states_differ_until_everything_was_loaded() -> None:
    state = harness.make_state(MIB)
    other = harness.empty_like(state)
    assert not harness.equal(state, other)
    for target, source in zip(harness.tensors_of(other), harness.tensors_of(state), strict=True):
        target.copy_(source)
    assert not harness.equal(state, other)
    other |= {key: state[key] for key in ("optimizer", "step")}
    assert harness.equal(state, other)


# --------------------------------------------------------------------------- how it is measured


def test_every_sample_lies_between_two_references() -> None:
    order: list[str] = []
    seconds = iter(range(1, 100))

    def step(name: str) -> Callable[[], Sample]:
        def run() -> Sample:
            order.append(name)
            return Sample(float(next(seconds)))

        return run

    measured = harness.interleave(step("r"), {"a": step("a"), "b": step("b")}, 2)
    assert "".join(order) == "rab" + "rarbrarbr"
    # The steps took 4, 5, 6 ... seconds; each reference is the mean of its two neighbours.
    assert [(p.sample.seconds, p.reference) for p in measured["a"]] == [(5, 5), (9, 9)]
    assert [(p.sample.seconds, p.reference) for p in measured["b"]] == [(7, 7), (11, 11)]


def test_a_pair_tells_speed_time_and_cpu() -> None:
    pairs = [harness.Pair(Sample(seconds=4.0, cpu_s=3.0), reference=1.0)]
    assert harness.speeds(pairs) == [0.25]
    assert harness.times(pairs) == [4.0]
    assert harness.cpu_per_gb(pairs, 2 * 10**9) == [1.5]


def test_clock_counts_cpu_of_threads_and_of_children() -> None:
    def spin() -> None:
        while time.thread_time() < 0.05:
            pass

    with harness.clock() as sample:
        thread = threading.Thread(target=spin)
        thread.start()
        thread.join()
        code = "import time\nwhile time.process_time() < 0.5: pass"
        subprocess.run([sys.executable, "-c", code], check=True)
    assert sample.cpu_s > 0.54
    assert sample.seconds > 0


def test_timer_leaves_out_the_planner_and_counts_nested_calls_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(many_tensors, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds: float) -> None:
        now[0] += seconds

    planner = SimpleNamespace(resolve=lambda: spend(100.0))
    storage = SimpleNamespace()
    storage.inner = lambda: (spend(1.0), planner.resolve())
    storage.outer = lambda: (spend(2.0), storage.inner(), spend(4.0))
    storage.other = lambda: spend(1000.0)
    timer = many_tensors.Timer()
    timer.watch(storage, ("inner", "outer"))
    timer.exclude(planner, ("resolve",))
    storage.outer()
    storage.other()
    storage.inner()
    assert timer.seconds == 2 + 1 + 4 + 1


def test_memory_sees_a_peak_that_is_over() -> None:
    watched = harness.Memory()
    held = mmap.mmap(-1, 64 * MIB)  # malloc may keep what is given back
    np.frombuffer(held, dtype=np.uint8)[:] = 1
    assert watched.now() > 60 * MIB
    held.close()
    assert watched.now() < 32 * MIB
    assert watched.peak() > 60 * MIB


# ------------------------------------------------------------------------------------ the bars


def test_index_takes_at_most_100_bytes_per_tensor(local: Path) -> None:
    """Names and values that do not compress well; footer, manifest, header and padding counted."""
    count = 10_000
    generator = np.random.default_rng(5)
    names = [f"{generator.bytes(6).hex()}.{number}.weight" for number in range(count)]
    state = {name: torch.from_numpy(generator.standard_normal(16, dtype="f4")) for name in names}
    with TieredWriter(f"tiered://{local}") as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    files = [path for path in local.glob("*/step-1/*") if path.is_file()]
    assert len(files) == 2, "a shard file and a manifest"
    extra = sum(path.stat().st_size for path in files) - count * 64
    assert extra / count <= 100
