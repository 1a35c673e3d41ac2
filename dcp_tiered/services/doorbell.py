"""How a save wakes the flusher at once: it touches the directory of the run, whose time is watched.

A look at all checkpoints costs too much to be done all the time, a look at this one time does not.
A ring that is missed is made up for by the next look, so nothing depends on it.
"""

import os
import time
from collections.abc import Collection
from pathlib import Path

_LISTEN_S = 0.01


def ring(run_path: Path) -> None:
    """Wake the flusher of a run, if there is one."""
    try:
        os.utime(run_path)
    except OSError:
        return  # it looks by itself soon


def heard(run_paths: Collection[Path]) -> tuple[int, ...]:
    """Return what `wait` wants after a look that begins now."""
    return tuple(_rung_at(path) for path in run_paths)


def wait(run_paths: Collection[Path], before: tuple[int, ...], longest_s: float) -> None:
    """Return when one of the runs was rung for since `before` was heard, or when time is up.

    Args:
        run_paths: The runs' directories.
        before: What `heard` returned for them.
        longest_s: Seconds.
    """
    end = time.monotonic() + longest_s
    while (left_s := end - time.monotonic()) > 0 and heard(run_paths) == before:
        time.sleep(min(_LISTEN_S, left_s))


def _rung_at(run_path: Path) -> int:
    try:
        return run_path.stat().st_mtime_ns
    except OSError:
        return 0
