"""The directory of a run on this node: where it flushes to, this node's identity, who uploads."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    TieredError,
    from_os_error,
)
from dcp_tiered.format import layout
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services.catalog import replace

_log = logging.getLogger(__name__)
_FILE_BYTES_MAX = 1 << 20
_TIDY_S_MAX = 15.0


def check_writable(base: Path) -> None:
    """Refuse a local tier that is missing, unreachable, or not ours to write to."""
    doing, code = "save to the local tier", 0
    try:
        mode = base.stat().st_mode
    except OSError as exc:
        raise from_os_error(exc, "local", str(base), doing) from exc
    if not stat.S_ISDIR(mode):
        code = errno.ENOTDIR
    elif not os.access(base, os.W_OK | os.X_OK, effective_ids=True):
        code = errno.EACCES
    if code:
        raise from_os_error(OSError(code, os.strerror(code)), "local", str(base), doing)


def open_node(local: LocalTier, fresh_id: str) -> str:
    """Return this local root's node id, made on first use and again when it was damaged.

    Args:
        local: The run's directory.
        fresh_id: Twelve random hex digits, taken if no rank was faster.
    """
    data = canonical_json({"node": fresh_id, "host": socket.gethostname()})
    try:
        node = node_of(local)
        if node is not None:
            return node
        with contextlib.suppress(AlreadyExistsError):
            local.put(layout.NODE_FILE, data)
    except CorruptError as exc:
        # Shard files are found by name, whichever id they were sealed under: nothing is lost.
        _log.warning("the node's id is damaged, taking a new one: %s", exc)
        replace(local, layout.NODE_FILE, data)
    return node_of(local) or layout.check_node(fresh_id)


def node_of(local: LocalTier) -> str | None:
    """Return this local root's node id, None when nothing was ever saved here."""
    try:
        return layout.check_node(
            parse_json(local.get(layout.NODE_FILE, _FILE_BYTES_MAX)).get("node")
        )
    except AbsentError:
        return None


@contextlib.contextmanager
def uploading(local: LocalTier) -> Iterator[None]:
    """Tell the flusher of this node, for the block, that a save uploads past it.

    Without that it takes what the save has open on the store for what a dead flusher left there.
    """
    with _locking(local) as lock:
        deadline = time.monotonic() + _TIDY_S_MAX
        while not lock(fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield


@contextlib.contextmanager
def no_save_uploads(local: LocalTier) -> Iterator[bool]:
    """Keep saves of this node from uploading past the flusher; the value says whether none does."""
    with _locking(local) as lock:
        yield lock(fcntl.LOCK_EX)


@contextlib.contextmanager
def _locking(local: LocalTier) -> Iterator[Callable[[int], bool]]:
    """Give what tries to lock the node's file; without one, nothing has been saved here."""
    try:
        fd = os.open(local.root / layout.NODE_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda _: True
        return

    def lock(how: int) -> bool:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    try:
        yield lock
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def remember_run(local: LocalTier, url: str, options: dict[str, Any]) -> None:
    """Note the run's URL and its options without secrets, so that `dcp-tiered flush` finds them.

    The newest options count: an endpoint that has moved must not send an operator to the old one.
    """
    data = canonical_json({"url": url, "options": options})
    try:
        if run_of(local) == (url, options):
            return
    except AbsentError:
        with contextlib.suppress(AlreadyExistsError):
            local.put(layout.RUN_FILE, data)
            return
    except CorruptError as exc:
        _log.warning("writing the run's description anew: %s", exc)
    replace(local, layout.RUN_FILE, data)


def run_of(local: LocalTier) -> tuple[str, dict[str, Any]]:
    """Return the run's URL and its options without secrets.

    Raises:
        AbsentError: The directory is not that of a run.
        CorruptError: Its description is damaged.
    """
    try:
        fields = parse_json(local.get(layout.RUN_FILE, _FILE_BYTES_MAX))
    except CorruptError as exc:
        raise _damaged(local) from exc
    url, options = fields.get("url"), fields.get("options")
    if not isinstance(url, str) or not isinstance(options, dict):
        raise _damaged(local)
    return url, options


def _damaged(local: LocalTier) -> TieredError:
    path = str(local.root / layout.RUN_FILE)
    return CorruptError(
        "the run's description is damaged",
        "local",
        path,
        f"Remove {path}; the next save writes it.",
    )
