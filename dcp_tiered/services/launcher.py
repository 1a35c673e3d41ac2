"""Start the flusher of a run: detached, once per node, with options and secrets over its stdin.

A flusher outlives the trainer that started it. When the trainer is gone and a new one comes, the
new one's flusher takes over with its own options, since credentials may have changed in between.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dcp_tiered.config import Limits
from dcp_tiered.errors import InvalidError, TieredError, UnavailableError
from dcp_tiered.format import layout
from dcp_tiered.services import identity
from dcp_tiered.services.identity import ProcessIdentity
from dcp_tiered.services.lock import FlusherLock

_log = logging.getLogger(__name__)
_SPAWN_S_MAX = 60.0
_START_S = 3.0
"""A flusher that was just started has the lock after this at the latest; no second one before."""

_WATCH_S, _WATCH_S_MAX = 2.0, 60.0
"""How often to look for one that was killed, and how seldom where each one is."""

Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a flusher is told: which run, with which options. Never written to disk."""

    run_path: str
    base_path: str
    url: str
    options: dict[str, Any] = field(repr=False)
    limits: Limits
    residency: dict[str, Any] | None = None
    """The residency policy as plain data; None leaves it to what was noted with the run."""
    compression: str = "off"
    """Of packs, one of `config.COMPRESSIONS`."""
    starter: ProcessIdentity | None = None

    def to_json(self) -> bytes:
        """Return the order as the flusher reads it.

        Raises:
            InvalidError: An option is not plain data; its value is not in the message.
        """
        for name, value in self.options.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise InvalidError(
                    f"option {name!r} of the durable tier is a {type(value).__name__}, which cannot"
                    " be handed to the flusher's process",
                    "durable",
                    self.url,
                    "Give options as plain data: text, numbers, lists and mappings.",
                ) from None
        return json.dumps(asdict(self)).encode()


def order_from_json(data: bytes) -> Order:
    """Return the order behind what the starter sent."""
    fields = json.loads(data)
    fields["limits"] = Limits(**fields["limits"])
    fields["starter"] = identity.from_json(fields["starter"])
    return Order(**fields)


class Keeper:
    """Sees that a run on this node has a flusher.

    Once it has been asked to, it also starts another one in place of one that was killed. Without
    that a checkpoint would wait for the next save, and a save that waits for room on another node
    would wait for a checkpoint whose flusher is gone on this one.

    Args:
        lock: The run's flusher lock.
        order: What to flush and how.
        may_take_over: Whether this process may replace a flusher whose starter is gone; one rank of
            a node does.
        environment: Of the new process.
    """

    def __init__(
        self,
        lock: FlusherLock,
        order: Order,
        *,
        may_take_over: bool,
        environment: Mapping[str, str],
    ) -> None:
        self._lock = lock
        self._order = order
        self._may_take_over = may_take_over
        self._environment = environment
        self._started_at: float | None = None
        self._watch: threading.Thread | None = None
        self._closing = threading.Event()

    def close(self) -> None:
        """Watch no longer, until the next `keep`; a flusher that runs goes on."""
        self._closing.set()
        self._watch, self._closing = None, threading.Event()

    def keep(self) -> None:
        """Start a flusher unless one runs that was started by a process that is still alive.

        Raises:
            UnavailableError: The process cannot be started.
        """
        if self._watch is None and self._may_take_over:
            # The thread must not keep alive a writer that nobody has closed.
            mine = (weakref.ref(self), self._closing)
            self._watch = threading.Thread(
                target=_watch, args=mine, name="dcp-tiered-watch", daemon=True
            )
            self._watch.start()
        self._start_unless_one_runs()

    def _start_unless_one_runs(self) -> None:
        now = time.monotonic()
        start_s = min(_START_S, self._order.limits.idle_exit_s)
        if self._started_at is not None and now - self._started_at < start_s:
            return
        holder = self._lock.holder()
        if holder is not None and not (self._may_take_over and holder.is_orphaned()):
            return
        self._started_at = now
        self._start()

    def replace_killed(self) -> bool:
        """Start another flusher if the last one was killed; tell whether it was."""
        if not self._lock.was_killed():
            return False
        _log.warning("the flusher of %s was killed or failed, starting another", self._order.url)
        try:
            self._start_unless_one_runs()
        except TieredError as exc:
            _log.error("%s", exc)
        return True

    def _start(self) -> None:
        mine = replace(self._order, starter=identity.current())
        command = [sys.executable, "-P", "-m", "dcp_tiered.cli.flusher_process"]
        try:
            # The process detaches itself and its parent ends at once: there is no child to reap,
            # and nothing of the trainer's (descriptors, session, process group) stays with it.
            with _log_file(Path(self._order.run_path)) as errors:
                subprocess.run(  # noqa: S603 - our own module, no shell
                    command,
                    input=mine.to_json(),
                    env=dict(self._environment),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    check=True,
                    timeout=_SPAWN_S_MAX,
                    close_fds=True,
                    start_new_session=True,
                )
        except (OSError, subprocess.SubprocessError) as exc:
            path = self._order.run_path
            raise UnavailableError(
                f"cannot start the flusher: {type(exc).__name__}",
                "local",
                path,
                f"Look at flusher.log in {path}; 'dcp-tiered flush' does its work by hand.",
            ) from exc
        _log.info("started a flusher for %s", self._order.url)


class External:
    """Sees that people are told where a run has no flusher, which others have to start.

    Args:
        lock: The run's flusher lock.
        local: The local tier, for the message.
    """

    def __init__(self, lock: FlusherLock, local: Path) -> None:
        self._lock, self._local = lock, local
        self._said = False

    def keep(self) -> None:
        """Warn once when there is no flusher, and again when there is none any more."""
        missing = self._lock.holder() is None
        if missing and not self._said:
            _log.warning(
                "no flusher runs on this node, and flusher='external' starts none: what is saved"
                " stays local until 'dcp-tiered flush %s --follow' runs",
                self._local,
            )
        self._said = missing

    def close(self) -> None:
        """Do nothing."""


def _watch(ref: weakref.ref[Keeper], closing: threading.Event) -> None:
    """Replace flushers that are killed, ever more slowly where one after the other is."""
    pause_s = _WATCH_S
    while not closing.wait(pause_s):
        keeper = ref()
        if keeper is None:
            return
        longer = keeper.replace_killed()
        pause_s = min(2 * pause_s, _WATCH_S_MAX) if longer else max(0.8 * pause_s, _WATCH_S)
        del keeper


@contextmanager
def _log_file(run_path: Path) -> Iterator[int]:
    """Open the log for what a flusher says before it has set up its own."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        file = os.open(run_path / layout.LOG_FILE, flags, 0o600)
    except OSError:
        yield subprocess.DEVNULL
        return
    try:
        yield file
    finally:
        os.close(file)
