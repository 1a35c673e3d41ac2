"""Does everything that needs a GPU work on this machine, and how fast (G12)?

    python -m benchmarks.gpu_check [--wheels DIR] [--dir DIR] [--mebibytes 1024] [check ...]
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m benchmarks.gpu_check engine_gds

Stand-alone: it takes the torch that it finds, and KvikIO (and what else is missing) as wheels from
DIR. Each check is on its own: a failure is told and the others go on. A table goes to standard
error, a line of JSON per check to standard output. Takes minutes, under five at the default size.
Exit codes: 0 all is well, 1 something failed, 2 there is no CUDA. `--device cpu` plays what can be
played without one, to test this script itself.
"""

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.harness import State

_ENGINES = ("direct", "kvikio", "gds")
_COUNTED = {"kvikio": "POSIX", "gds": "GDS"}
"""Where KvikIO's monitor counts what an engine writes."""
_PAIRS = 3
_BUDGET_S = 240.0
"""No check begins later than that."""
_LARGE_BYTES = 1 << 20
_HEAD_BYTES = 64

Details = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the checks work."""

    directory: Path
    device: str
    bytes: int


# ------------------------------------------------------------------------------------- checks


def check_probe(place: Place) -> Details:
    """Ask which way device memory takes to this mount."""
    from dcp_tiered.engines import gds_probe

    found = gds_probe.probe_gds(place.directory, 0)
    return {
        "answer": f"{found.what}: {found.reason}",
        "gds_bytes": found.gds_bytes,
        "gds_veto": gds_probe.gds_veto(),
    }


def check_block_crcs(place: Place) -> Details:
    """Compare sums taken on the device with the host's, and time them."""
    import torch
    from awscrt.checksums import crc32c

    from dcp_tiered.engines.device import block_crcs

    block = 256 << 10
    for length in (0, 1, block - 1, block, block + 1, (64 << 20) + 12_345):
        flat = torch.randint(0, 256, (length + 1,), dtype=torch.uint8, device=place.device)[1:]
        data = bytes(flat.cpu().numpy())
        expected = [crc32c(data[at : at + block]) for at in range(0, length, block)]
        assert block_crcs(flat) == expected, f"wrong sums of {length} bytes"
    flat = torch.randint(0, 256, (place.bytes,), dtype=torch.uint8, device=place.device)
    rate = place.bytes / _median_s(lambda: block_crcs(flat)) / 1e9
    return {"answer": f"exact, {rate:.1f} GB/s", "gb_per_s": rate}


def check_staging(place: Place) -> Details:
    """Hold `writer.stage` against a raw page-locked copy."""
    import torch

    from benchmarks import harness
    from dcp_tiered import TieredWriter

    state = _state(place)
    tensors = harness.tensors_of(state)
    locked = place.device != "cpu"
    targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=locked).zero_() for t in tensors]

    def copy() -> harness.Sample:
        with harness.clock() as sample:
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            _synchronize(place)
        return sample

    with TieredWriter(f"tiered://{place.directory}/staging") as writer:
        writer.prewarm(state)

        def stage() -> harness.Sample:
            with harness.clock() as sample:
                staged = writer.stage(state)
            assert harness.equal(staged, _on(state, "cpu")), "staged something else"
            return sample

        pairs = harness.interleave(copy, {"stage": stage}, _PAIRS)["stage"]
    ratio = harness.median(harness.speeds(pairs))
    rate = harness.bytes_of(state) / harness.median(pair.sample.seconds for pair in pairs) / 1e9
    return {
        "answer": f"{ratio:.2f} of a page-locked copy, {rate:.1f} GB/s (G12 wants 0.92)",
        "ratio": ratio,
        "ratios": harness.speeds(pairs),
        "gb_per_s": rate,
    }


def check_engine(place: Place, engine: str) -> Details:
    """Save and load through one engine; compare the files and what was loaded, by sha256."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from benchmarks import harness
    from dcp_tiered import InvalidError, TieredReader, TieredWriter

    state = _state(place)
    on_host = _on(state, "cpu")
    line = harness.LineRate(on_host, place.directory / "line-rate")
    url = f"tiered://{place.directory}/{engine}"
    Path(place.directory, engine).mkdir()
    runs = Path(place.directory, engine)
    with TieredWriter(url, engine=engine) as writer:

        def save() -> harness.Sample:
            for old in runs.glob("*/step-1"):
                shutil.rmtree(old)
            harness.settle(runs)
            with harness.clock() as sample:
                dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
            return sample

        with _monitored() as counted:
            try:
                save()
            except (InvalidError, CheckpointException) as exc:
                return _unless_unavailable(exc)
        pairs = harness.interleave(line.write, {engine: save}, _PAIRS)[engine]
    line.close()
    if engine in _COUNTED and not _is_expandable():
        assert counted.get(_COUNTED[engine]), f"nothing was written that way: {counted}"
    _compare_files(list(runs.glob("*/step-1/*.shard")), on_host)
    target = _on(harness.empty_like(state), place.device)
    with harness.clock() as load:
        dcp.load(target, checkpoint_id="step-1", storage_reader=TieredReader(url))
        _synchronize(place)
    assert _sums(target) == _sums(state), "loaded something else"
    ratio = harness.median(harness.speeds(pairs))
    return {
        "answer": f"save at {ratio:.2f} of raw O_DIRECT, {counted.get('GDS', 0)} bytes by cuFile;"
        f" load {harness.bytes_of(state) / load.seconds / 1e9:.1f} GB/s, warm",
        "ratio": ratio,
        "ratios": harness.speeds(pairs),
        "cpu_s_per_gb": harness.median(harness.cpu_per_gb(pairs, harness.bytes_of(state))),
        "kvikio_bytes": counted,
        "load_s": load.seconds,
    }


def check_async(place: Place) -> Details:
    """Change tensors on the device right after `dcp.async_save`: what was asked for is saved."""
    import torch.distributed.checkpoint as dcp

    from benchmarks import harness
    from dcp_tiered import TieredReader, TieredWriter

    state = _state(place)
    stalls: list[float] = []
    Path(place.directory, "async").mkdir()
    url = f"tiered://{place.directory}/async"
    with TieredWriter(url) as writer:
        for number in range(3):
            expected = _sums(state)
            begun = time.perf_counter()
            saved: Any = dcp.async_save(
                state, checkpoint_id=f"step-{number}", storage_writer=writer
            )
            stalls.append(time.perf_counter() - begun)
            for tensor in harness.tensors_of(state):
                tensor.neg_().mul_(2)
            getattr(saved, "upload_completion", saved).result()
            target = _on(harness.empty_like(state), place.device)
            reader = TieredReader(url)
            dcp.load(target, checkpoint_id=f"step-{number}", storage_reader=reader)
            assert _sums(target) == expected, f"save {number} holds what came after it"
    return {"answer": f"3 saves, each as asked for; stall {stalls[-1]:.2f} s", "stalls_s": stalls}


# ------------------------------------------------------------------------------------- helpers


def _state(place: Place) -> "State":
    from benchmarks import harness

    return _on(harness.make_state(place.bytes), place.device)


def _on(state: "State", device: str) -> "State":
    """Return a copy of a state on a device."""
    model = {name: tensor.to(device, copy=True) for name, tensor in state["model"].items()}
    return {**state, "model": model}


def _synchronize(place: Place) -> None:
    import torch

    if place.device != "cpu":
        torch.cuda.synchronize()


def _median_s(work: Callable[[], object]) -> float:
    from benchmarks import harness

    work()
    samples = []
    for _ in range(_PAIRS):
        with harness.clock() as sample:
            work()
        samples.append(sample.seconds)
    return harness.median(samples)


def _bytes(tensor: "torch.Tensor") -> bytes:
    import torch

    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _sums(state: "State") -> dict[str, str]:
    model = state["model"].items()
    return {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in model}


def _compare_files(files: list[Path], state: "State") -> None:
    """Find every large tensor in the files, on a page border, by its first bytes and its sum."""
    import numpy as np

    assert files, "no shard file was written"
    wholes = [np.fromfile(path, dtype=np.uint8) for path in files]
    for name, tensor in state["model"].items():
        data = np.frombuffer(_bytes(tensor), dtype=np.uint8)
        if len(data) < _LARGE_BYTES:
            continue
        found = any(_holds(whole, data) for whole in wholes)
        assert found, f"{name} is not in the files as it was"


def _holds(whole: Any, data: Any) -> bool:
    """Tell whether `data` begins on a page border of `whole` and goes on to its end."""
    pages = whole[: len(whole) - len(whole) % 4096].reshape(-1, 4096)[:, :_HEAD_BYTES]
    starts = (pages == data[:_HEAD_BYTES]).all(axis=1).nonzero()[0] * 4096
    return any(
        hashlib.sha256(whole[at : at + len(data)]).digest() == hashlib.sha256(data).digest()
        for at in starts
    )


@contextmanager
def _monitored() -> Iterator[dict[str, int]]:
    """Count the bytes that KvikIO writes in the block, by what it writes them with."""
    counted: dict[str, int] = {}
    try:
        from dcp_tiered.engines.gds import load

        monitor = load().kvikio.SummaryMonitor()
    except (ImportError, RuntimeError):
        yield counted
        return
    with monitor:
        yield counted
        totals = monitor.get().by_backend
    counted.update({name: int(total["bytes_transferred"]) for name, total in totals.items()})


def _is_expandable() -> bool:
    """Tell whether tensors lie where cuFile cannot take them; the host writes those."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)


def _unless_unavailable(exc: BaseException) -> Details:
    """Tell that an engine is not there, which is no failure; any other error is one."""
    from dcp_tiered import InvalidError, cause

    found = cause(exc)
    if isinstance(found, InvalidError) and "does not work on this mount" in found.message:
        return {"answer": f"not here: {found.message}", "skipped": True}
    raise exc


# ---------------------------------------------------------------------------------------- main


def _install(wheels: Path, target: Path) -> None:
    """Put wheels on the import path, without what they depend on: torch brings the rest."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    files = [str(wheel) for wheel in sorted(wheels.glob("*.whl"))]
    subprocess.run([*command, "--target", str(target), *files], check=True)
    sys.path.insert(0, str(target))
    # KvikIO looks for cuFile in the interpreter's own packages, in what is loaded, and where the
    # loader looks. torch's CUDA build has loaded its own already.
    for library in target.glob("nvidia/*/lib/libcufile.so.0"):
        paths = [str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
        if "libcufile.so" not in Path("/proc/self/maps").read_text(encoding="utf-8"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _run_checks(place: Place, names: Sequence[str] = ()) -> list[Details]:
    from torch.distributed.checkpoint.api import CheckpointException

    checks: dict[str, Callable[[Place], Details]] = {
        "probe": check_probe,
        "block_crcs": check_block_crcs,
        "staging": check_staging,
        "async": check_async,
        **{f"engine_{name}": partial(check_engine, engine=name) for name in _ENGINES},
    }
    begun, results = time.monotonic(), []
    for name, check in checks.items():
        if names and name not in names:
            continue
        result: Details = {"check": name, "ok": False, "answer": "not begun: out of time"}
        started = time.monotonic()
        if started - begun < _BUDGET_S:
            try:
                result |= {"ok": True, **check(place)}
            except (Exception, CheckpointException) as exc:  # noqa: BLE001 - the others go on
                traceback.print_exc()
                result["answer"] = f"{type(exc).__name__}: {exc}"
        results.append(result | {"seconds": round(time.monotonic() - started, 1)})
    return results


def _tell(results: list[Details], where: Details, output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    lines = "".join(json.dumps({**where, **result}) + "\n" for result in results)
    print(lines, end="", flush=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(lines)
    machine = where["machine"]
    table = Table("check", "ok", "s", "answer", title=f"{machine['gpu']} in {machine['host']}")
    for result in results:
        ok = "[green]yes[/]" if result["ok"] else "[red]no[/]"
        ok = "-" if result.get("skipped") else ok
        table.add_row(result["check"], ok, str(result["seconds"]), result["answer"])
    Console(stderr=True, width=None if sys.stderr.isatty() else 160).print(table)


def main() -> int:
    """Run every check; see the module."""
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--wheels", type=Path, help="wheels to put on the import path")
    parser.add_argument("--dir", type=Path, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--mebibytes", type=int, default=1024, help="of state")
    parser.add_argument("--output", type=Path, help="append the lines of JSON to this file")
    parser.add_argument("names", nargs="*", metavar="check", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA: torch {torch.__version__} sees no device", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="dcp-tiered-wheels-") as target:
        if given.wheels is not None:
            _install(given.wheels, Path(target))
        from benchmarks import harness

        with harness.workspace(given.dir) as directory:
            gpu = torch.cuda.get_device_name(0) if given.device == "cuda" else "no GPU"
            machine = {"gpu": gpu, "host": os.uname().nodename, **harness.machine(directory)}
            results = _run_checks(
                Place(directory, given.device, given.mebibytes << 20), given.names
            )
            _tell(results, {"commit": harness.commit(), "machine": machine}, given.output)
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
