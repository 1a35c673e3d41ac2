"""`dcp-tiered doctor LOCAL`: what a local tier's mount can do, and which engine that means."""

import argparse
import errno
import json
import os
from pathlib import Path
from typing import Any

from rich.table import Table

from dcp_tiered.cli import common
from dcp_tiered.engines.choose import probe
from dcp_tiered.engines.gds_probe import probe_gds
from dcp_tiered.errors import from_os_error

_SHM = Path("/dev/shm")  # noqa: S108 - a mount point, not a temporary file


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="probe a local tier: mount, engine, GPU path")
    parser.add_argument("local", metavar="LOCAL", help="the directory that TieredWriter gets")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Probe the mount and say what was found; leaves nothing behind.

    Raises:
        InvalidError: The local tier is not there or not writable.
        UnavailableError: It is full.
    """
    found = _examine(Path(arguments.local).expanduser().absolute())
    if arguments.json:
        print(json.dumps(found))
        return 0
    table = Table("question", "answer", title=found["path"])
    aligned = found["alignment"]
    rows = {
        "file system": found["file_system"],
        "free": common.size(found["bytes_free"]),
        "free in /dev/shm, for async saves": _shm_text(found["shm_bytes_free"]),
        "O_DIRECT": found["direct_reason"],
        "alignment of memory, of offsets": f"{aligned[0]}, {aligned[1]} bytes" if aligned else "",
        "engine='auto' writes host memory with": found["engine"],
        "engine='auto' writes CUDA tensors with": found["device_engine"],
        "because": found["device_reason"],
    }
    for row in rows.items():
        table.add_row(*row)
    common.console().print(table)
    return 0


def _examine(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        code = errno.ENOTDIR if path.exists() else errno.ENOENT
        error = OSError(code, os.strerror(code))
        raise from_os_error(error, "local", str(path), "probe the local tier")
    mount = probe(path)
    free = _bytes_free(path)
    if not free:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise from_os_error(full, "local", str(path), "use the local tier")
    engine = "direct" if mount.direct else "buffered"
    device = probe_gds(path)
    return {
        "path": str(path),
        "file_system": file_system(path),
        "bytes_free": free,
        "shm_bytes_free": _bytes_free(_SHM) if _SHM.is_dir() else None,
        "direct": mount.direct,
        "direct_reason": mount.reason,
        "alignment": mount.alignment,
        "engine": engine,
        "device_engine": f"{engine}, through host memory" if device.what == "host" else device.what,
        "device_reason": device.reason,
        "gds_bytes": device.gds_bytes,
    }


def _bytes_free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _shm_text(free: int | None) -> str:
    return "there is none" if free is None else common.size(free)


def file_system(path: Path) -> str:
    """Return type and source of the mount, from proc(5): mountinfo."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return " ".join(source.split()[:2])
    return "unknown"
