"""Which engine writes to a mount: asked of the mount itself, once, and said in one log line."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.engines.direct import DirectEngine, alignment, reopen
from dcp_tiered.errors import InvalidError, from_os_error
from dcp_tiered.interfaces import PAGE_BYTES, Engine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a mount can do."""

    direct: bool
    alignment: tuple[int, int] | None
    """Of memory and of file offsets, bytes."""
    reason: str


def probe(directory: Path) -> Probe:
    """Write one page around the page cache into a nameless file.

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
        direct = reopen(fd, os.O_RDWR)
    except OSError as exc:
        os.close(fd)
        return Probe(direct=False, alignment=None, reason=f"no O_DIRECT: {exc.strerror}")
    try:
        with Arena(PAGE_BYTES, 1).borrow() as page:
            os.pwrite(direct, page, 0)
        found = alignment(direct)
    except OSError as exc:
        return Probe(direct=False, alignment=None, reason=f"O_DIRECT write failed: {exc.strerror}")
    finally:
        os.close(direct)
        os.close(fd)
    if found is None:
        return Probe(direct=False, alignment=None, reason="the file system declines O_DIRECT")
    return Probe(direct=True, alignment=found, reason="O_DIRECT works")


def choose(name: str, directory: Path, arena: Arena) -> Engine:
    """Return the engine for a directory.

    Args:
        name: `auto`, or `direct` or `buffered`, which then has to work here.
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
    chosen: Engine = DirectEngine(arena) if found.direct else BufferedEngine()
    _log.info("engine %s for %s: %s", chosen.name, directory, found.reason)
    return chosen
