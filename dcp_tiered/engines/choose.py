"""Which engine writes to a mount: asked of the mount itself, once, and said in one log line.

What writes device memory is asked only when there is some to write: that takes seconds.
"""

import errno
import logging
import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.engines.direct import DirectEngine
from dcp_tiered.engines.gds_probe import probe_gds
from dcp_tiered.errors import InvalidError, from_os_error
from dcp_tiered.interfaces import Engine
from dcp_tiered.syscalls import PAGE_BYTES, direct_alignment, open_direct

if TYPE_CHECKING:
    import torch

    from dcp_tiered.engines.gds import Backend

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a mount can do."""

    direct: bool
    alignment: tuple[int, int] | None
    """Of memory and of file offsets, bytes."""
    reason: str


def probe(directory: Path) -> Probe:
    """Write one page around the page cache into a nameless file, to see whether that works.

    Raises:
        InvalidError: The directory is not there or not writable.
    """
    try:
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise from_os_error(exc, "local", str(directory), "probe the local tier") from exc
        return Probe(direct=False, alignment=None, reason=f"no nameless files: {exc.strerror}")
    try:
        direct = open_direct(fd, os.O_RDWR)
    except OSError as exc:
        os.close(fd)
        return Probe(direct=False, alignment=None, reason=f"no O_DIRECT: {exc.strerror}")
    try:
        with Arena(PAGE_BYTES, 1).borrow() as page:
            full = _is_full(direct, page)
        found = direct_alignment(direct)
    except OSError as exc:
        return Probe(direct=False, alignment=None, reason=f"O_DIRECT write failed: {exc.strerror}")
    finally:
        os.close(direct)
        os.close(fd)
    if found is None:
        return Probe(direct=False, alignment=None, reason="the file system declines O_DIRECT")
    reason = "O_DIRECT works" + (", but the disk is full" if full else "")
    return Probe(direct=True, alignment=found, reason=reason)


def _is_full(fd: int, page: memoryview) -> bool:
    """Write a page; a disk that has no room for it has not said that the way is wrong."""
    try:
        os.pwrite(fd, page, 0)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return True
    return False


def host_engine(directory: Path, arena: Arena) -> Engine:
    """Return what writes host memory to a directory; needs no torch.

    Raises:
        InvalidError: The directory is not there or not writable.
    """
    return _host_engine(directory, arena, probe(directory))


def _host_engine(directory: Path, arena: Arena, found: Probe) -> Engine:
    chosen: Engine = DirectEngine(arena) if found.direct else BufferedEngine()
    _log.info("engine %s for %s: %s", chosen.name, directory, found.reason)
    return chosen


def choose(name: str, directory: Path, arena: Arena) -> Engine:
    """Return the engine for a directory.

    Args:
        name: `auto`, or what has to work here: `direct` or `buffered`, which take device memory
            through the host, or `gds` or `kvikio`.
        directory: On the mount that is written to.
        arena: Buffers for the direct engine.

    Raises:
        InvalidError: The engine was asked for by name and does not work here.
    """
    if name == "buffered":
        return BufferedEngine()
    found = probe(directory)
    if not found.direct and name == "direct":
        raise InvalidError(
            f"engine 'direct' does not work on this mount: {found.reason}",
            "local",
            str(directory),
            "Use engine='auto', or a local tier on ext4 or xfs.",
        )
    chosen = _host_engine(directory, arena, found)
    return chosen if name == "direct" else _with_device_memory(name, directory, chosen)


def _with_device_memory(name: str, directory: Path, host: Engine) -> Engine:
    import torch

    from dcp_tiered.engines.gds import GdsEngine

    if name == "auto":
        return GdsEngine(host, host.name, cache(partial(_best_backend, directory)))
    backend_of = cache(partial(_backend_by_name, name, directory))
    available = torch.cuda.is_available()
    backend_of(torch.device("cuda", torch.cuda.current_device() if available else 0))
    return GdsEngine(host, name, backend_of)


def _best_backend(directory: Path, device: "torch.device") -> "Backend":
    if device.type != "cuda":
        return "host"
    found = probe_gds(directory, device.index)
    _log.info("%s writes tensors on %s to %s: %s", found.what, device, directory, found.reason)
    return found.what


def _backend_by_name(name: str, directory: Path, device: "torch.device") -> "Backend":
    found = probe_gds(directory, device.index)
    # What GPUDirect Storage was proven with, KvikIO's own buffers were proven with, too.
    if found.what == "host" or (name == "gds" and found.what != "gds"):
        raise InvalidError(
            f"engine {name!r} does not work on this mount: {found.reason}",
            "local",
            str(directory),
            "Use engine='auto'; 'dcp-tiered doctor' shows what works here.",
        )
    return "gds" if name == "gds" else "kvikio"
