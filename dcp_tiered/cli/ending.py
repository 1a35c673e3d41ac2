"""How a process that flushes behaves towards others: it steps back, and ends in time when asked."""

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from dcp_tiered import syscalls
from dcp_tiered.services import lanes

_NICE = 15
_AUTOGROUP = Path("/proc/self/autogroup")


class Ending:
    """When this process has to end: SIGTERM or SIGINT gives it a grace time, a second one none.

    Args:
        grace_s: Of the first signal.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._due = math.inf

    def listen(self) -> None:
        """Take the signals, also where whoever started this process had them blocked."""
        signal.signal(signal.SIGTERM, self._take)
        signal.signal(signal.SIGINT, self._take)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def due(self) -> float:
        """Return when work has to be over, by the monotonic clock; infinite before a signal."""
        return self._due

    def is_asked(self) -> bool:
        """Tell whether a signal came."""
        return self._due < math.inf

    def is_over(self) -> bool:
        """Tell whether the grace time is over."""
        return time.monotonic() >= self._due

    def _take(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        now = time.monotonic()
        self._due = now if self.is_asked() else now + self._grace_s


def leave(code: int) -> int:
    """Return an exit code, or end the process with it where an upload hangs.

    Python would wait for the threads that such an upload writes with.
    """
    if lanes.are_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def step_back() -> None:
    """Let a trainer have the cores and the disk first; call it before any thread starts."""
    os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        # Where sessions are scheduled as groups (sched(7), autogroup), a nice value counts within a
        # session only: ours, which has no trainer in it, would get as much as the trainer's.
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(str(_NICE), encoding="ascii")
    with contextlib.suppress(OSError):  # some containers forbid it
        # Batch work wakes up without preempting whoever is running.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    syscalls.lower_io_priority()
