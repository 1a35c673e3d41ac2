"""The flusher's own process: `python -m dcp_tiered.cli.flusher_process`, an order on stdin."""

import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_tiered.cli.ending import Ending, leave, step_back

if TYPE_CHECKING:
    from dcp_tiered.services.launcher import Order, Stopped
    from dcp_tiered.services.lock import FlusherLock
    from dcp_tiered.services.outgoing import Outgoing
    from dcp_tiered.services.residency import Guard

_LOG_BYTES_MAX = 16 << 20
_TAKEOVER_POLL_S = 0.05
_log = logging.getLogger("dcp_tiered.flusher")


def main() -> int:
    """Detach, read the order, flush until idle; the exit code tells whether that went well."""
    data = sys.stdin.buffer.read()
    if os.fork():
        # The starter's subprocess ends here; what goes on below belongs to init.
        os._exit(0)
    os.setsid()
    return leave(_run(data))


def _run(data: bytes) -> int:
    from dcp_tiered.errors import TieredError
    from dcp_tiered.services import launcher, progress

    order = launcher.order_from_json(data)
    run_path = Path(order.run_path)
    _set_up_process(run_path)
    ending = Ending(order.limits.term_grace_s)
    ending.listen()
    try:
        _flush(order, ending)
    except Exception as exc:  # noqa: BLE001 - the end of the process; logged and reported
        _log.exception("flusher failed")
        error = exc if isinstance(exc, TieredError) else None
        progress.ReportFile(run_path=run_path).fail(
            error or TieredError(f"the flusher ended with {type(exc).__name__}, see flusher.log")
        )
        return 1
    return 0


def _flush(order: "Order", ending: Ending) -> None:
    from dcp_tiered import stack
    from dcp_tiered.services.lock import FlusherLock
    from dcp_tiered.services.metrics_file import MetricsFile

    lock = FlusherLock(Path(order.run_path))
    while _take_over(lock, order, ending):
        with lock.hold(order.starter) as mine:
            if not mine:
                # Somebody was faster since we looked: look again who that is and whom it serves.
                continue
            out = stack.outgoing(order, ending.due)
            # Who is held to a policy that was replaced meanwhile begins anew, with the new one.
            stopped = _either(ending.is_asked, stack.is_outdated(order))
            flusher = stack.flusher(order, lock, stopped, out)
            _log.info("flushing %s to %s", order.run_path, order.url)
            file = MetricsFile(Path(order.run_path), order.url, out, flusher)
            flusher.run(order.limits.idle_exit_s, file.write_sometimes)
            flusher.close()
            asked = lock.asked_to_hand_over()
            if ending.is_asked() and not asked:
                _drain(order, lock, ending, out, flusher.residency)
            file.write()  # under the lock: the next one has a file of its own
        # A save that sealed its files while we still held the lock did not start another flusher:
        # it counted on us. So look once more after the lock is free.
        if ending.is_asked() or asked or not flusher.has_work():
            _log.info("ending")
            return
        order = stack.renewed(order)


def _either(one: "Stopped", other: "Stopped") -> "Stopped":
    return lambda: one() or other()


def _drain(
    order: "Order", lock: "FlusherLock", ending: Ending, out: "Outgoing", residency: "Guard"
) -> None:
    """Finish what can be finished before the grace time is over."""
    from dcp_tiered import stack
    from dcp_tiered.services import drain

    _log.info("asked to end, finishing what can be finished in %g s", order.limits.term_grace_s)
    # The flusher that was stopped stays so: another one begins, with the same lock.
    flusher = stack.flusher(order, lock, ending.is_over, out, residency)
    local, poll_s = stack.local_of(order), order.limits.poll_s
    drain.drain(flusher, local, out, stop=ending.is_over, poll_s=poll_s)


def _take_over(lock: "FlusherLock", order: "Order", ending: Ending) -> bool:
    """Wait until the lock is free; return False when that is not to be waited for.

    That is when another flusher with a living starter has it, which will see all that is here.
    """
    from dcp_tiered.errors import TieredError

    deadline = time.monotonic() + order.limits.takeover_s
    killed, asked = False, None
    while not ending.is_asked() and (holder := lock.holder()) is not None:
        if holder.flusher is not None and not holder.is_orphaned():
            return False
        if holder.flusher != asked:
            asked = holder.flusher
            try:
                lock.ask_to_hand_over()
            except TieredError as exc:
                _log.warning("%s", exc)
        if time.monotonic() > deadline:
            if killed:
                _log.error("cannot take over from the flusher that has the lock: %s", holder)
                return False
            _log.warning("the running flusher does not hand over, killing it")
            lock.kill_holder()
            killed = True
            deadline += order.limits.takeover_s
        time.sleep(_TAKEOVER_POLL_S)
    return not ending.is_asked()


def _set_up_process(run_path: Path) -> None:
    """Log to a bounded file, hold no directory, and leave the cores to the trainer."""
    from dcp_tiered.format import layout

    path = run_path / layout.LOG_FILE
    os.umask(0o077)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("botocore").setLevel(logging.WARNING)
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(errors, 2)
    for descriptor in (null, errors):
        if descriptor > 2:  # noqa: PLR2004 - standard error
            os.close(descriptor)
    os.chdir("/")
    step_back()


if __name__ == "__main__":
    sys.exit(main())
