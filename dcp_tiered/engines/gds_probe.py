"""What can write device memory to a mount: proven in a process of its own, or not used.

cuFile can spin for ever at full load where `/proc/modules` is missing, and a mount may be refused
only when it is written to. So a child process writes, reads back and compares, first with KvikIO's
own page-locked buffers, then with GPUDirect Storage. A child that takes too long is killed; what it
had proven by then counts.
"""

import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_tiered import config

if TYPE_CHECKING:
    from dcp_tiered.engines.device import TensorBytes
    from dcp_tiered.engines.gds import Backend

_LIMIT_S = 30.0
_BYTES = (4 << 20) + 777
"""A request of KvikIO's usual size and the beginning of one more."""
_OLDEST = (26, 10)  # before, a failed request did not wait for the others, which read freed memory
_UDEV = "/run/udev"
_MODULES = "/proc/modules"
_SITE_CONFIG = "/etc/cufile.json"
_COMPAT = re.compile(r'("allow_compat_mode"\s*:\s*)true')


@dataclass(frozen=True, slots=True, kw_only=True)
class GdsProbe:
    """What can write device memory to a mount."""

    what: "Backend"
    """`gds`: GPUDirect Storage; `kvikio`: KvikIO's page-locked buffers; `host`: neither."""
    reason: str
    """How it was proven, or why it is nothing better."""
    gds_bytes: int = 0
    """Bytes that KvikIO's monitor saw cuFile write in the probe."""


def probe_gds(directory: Path, device: int = 0) -> GdsProbe:
    """Find out what can write device memory there, once for each mount and CUDA device.

    Takes seconds the first time, at most half a minute; leaves nothing in the directory.
    """
    known = _known()
    key = (directory.stat().st_dev, device)
    if key not in known:
        known[key] = _probe(directory, device)
    return known[key]


def veto() -> str | None:
    """Return why KvikIO cannot be used at all on this machine; costs next to nothing."""
    for package, hint in (("kvikio", " (the 'gds' extra has it)"), ("torch", "")):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed{hint}"
    import torch

    if not torch.cuda.is_available():
        return "CUDA not available to torch"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        return f"no CUDA driver: {exc}"
    return None


def gds_veto() -> str | None:
    """Return why cuFile must not even be tried on this machine."""
    if not os.path.isdir(_UDEV):
        return f"no {_UDEV}: cuFile cannot see the disks (a container has to mount it)"
    if not os.path.exists(_MODULES):
        return f"no {_MODULES}: cuFile would spin for ever"
    return None


@cache
def _known() -> dict[tuple[int, int], GdsProbe]:
    return {}


def _probe(directory: Path, device: int) -> GdsProbe:
    reason = veto()
    if reason is not None:
        return GdsProbe(what="host", reason=reason)
    no_gds = gds_veto()
    steps, failure = run_child(directory, device, ["kvikio"] if no_gds else ["kvikio", "gds"])
    kvikio, gds = (steps.get(step, {"error": failure}) for step in ("kvikio", "gds"))
    if kvikio["error"]:
        return GdsProbe(what="host", reason=f"KvikIO failed: {kvikio['error']}")
    no_gds = no_gds or gds["error"]
    if not no_gds:
        return GdsProbe(what="gds", reason="written and read back", gds_bytes=gds["gds_bytes"])
    return GdsProbe(what="kvikio", reason=f"no GPUDirect Storage: {no_gds}")


# ---------------------------------------------------------------------------------- the parent


def run_child(
    directory: Path, device: int, steps: list[str]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Prove steps in a process of its own.

    Returns:
        What each step that ended had to say, and what became of the child.
    """
    command = [sys.executable, "-m", "dcp_tiered.engines.gds_probe", str(directory), str(device)]
    with tempfile.TemporaryDirectory(prefix="dcp-tiered-gds-") as scratch:
        child = subprocess.Popen(  # noqa: S603 - this module
            [*command, *steps],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=config.child_environment() | {"CUFILE_ENV_PATH_JSON": _honest_config(scratch)},
            start_new_session=True,
        )
        try:
            output, errors = child.communicate(timeout=_LIMIT_S)
            last = (errors.strip().splitlines() or ["no message"])[-1]
            failure = f"the probe ended with status {child.returncode}: {last}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, _ = child.communicate()
            failure = f"the probe did not end within {_LIMIT_S:g} s and was killed"
    return _parse(output), failure


def _honest_config(scratch: str) -> str:
    """Write the site's cuFile configuration, but for cuFile's own detour through host memory.

    With it cuFile "works" everywhere, slower than what replaces it here.
    """
    site = Path(os.environ.get("CUFILE_ENV_PATH_JSON", _SITE_CONFIG))
    text = site.read_text(encoding="utf-8") if site.is_file() else ""
    strict, count = _COMPAT.subn(r"\1false", text)
    if not count and "allow_compat_mode" not in text:
        strict = json.dumps({"properties": {"allow_compat_mode": False}})
    path = Path(scratch, "cufile.json")
    path.write_text(strict, encoding="utf-8")
    return str(path)


def _parse(output: str) -> dict[str, dict[str, Any]]:
    """Read the child's lines; libraries may print others."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return {line["step"]: line for line in lines}


# ----------------------------------------------------------------------------------- the child


def prove(directory: Path, step: "Backend", data: "TensorBytes") -> int:
    """Write a nameless file with KvikIO, read it back without, compare.

    Returns:
        The bytes that cuFile wrote.

    Raises:
        OSError: It cannot be written.
        ValueError: What was read is not what was written, or not written by what was asked for.
    """
    from dcp_tiered.engines import gds

    kvikio = gds.load().kvikio
    with tempfile.TemporaryFile(dir=directory) as scratch, kvikio.SummaryMonitor() as monitor:
        file = gds.open_file(scratch.fileno(), step)
        try:
            data.synchronize()
            with gds.os_errors():
                file.pwrite(data, size=data.nbytes).get()
        finally:
            file.close()
        os.fsync(scratch.fileno())
        found = os.pread(scratch.fileno(), data.nbytes + 1, 0)
        counted = monitor.get().by_backend
    expected = bytearray(data.nbytes)
    data.copy_to(0, memoryview(expected))
    if found != expected:
        raise ValueError("what was read back is not what was written")
    written = int(counted.get("GDS", {}).get("bytes_transferred", 0))
    if step == "gds" and not written:
        raise ValueError("KvikIO wrote without cuFile")
    return written


def _main(directory: str, device: int, steps: list[Any]) -> None:
    # torch first: it loads the cuFile library that it was built for.
    import torch

    from dcp_tiered.engines import gds
    from dcp_tiered.engines.device import TensorBytes

    version = gds.load().kvikio.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise SystemExit(f"kvikio {version} is too old, 26.10 is needed")
    with torch.cuda.device(device):
        data = TensorBytes(torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device="cuda"))
        for step in steps:
            line = {"step": step, "error": None, "gds_bytes": 0}
            try:
                line["gds_bytes"] = prove(Path(directory), step, data)
            except (OSError, ValueError) as exc:
                line["error"] = str(exc)
            print(json.dumps(line), flush=True)  # noqa: T201 - read by the parent


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
