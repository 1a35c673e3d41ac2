"""The flusher's own process: `python -m dcp_tiered.cli.flusher_process`, an order on stdin."""

import logging
import logging.handlers
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_tiered.services.launcher import Order
    from dcp_tiered.services.lock import FlusherLock

_LOG_BYTES_MAX = 16 << 20
_NICE = 5


def main() -> int:
    """Detach, read the order, flush until idle; the exit code tells whether that went well."""
    data = sys.stdin.buffer.read()
    if os.fork():
        # The starter's subprocess ends here; what goes on below belongs to init.
        os._exit(0)
    os.setsid()
    return _flush(data)


def _flush(data: bytes) -> int:
    from dcp_tiered import stack
    from dcp_tiered.services import launcher
    from dcp_tiered.services.lock import FlusherLock

    order = launcher.order_from_json(data)
    run_path = Path(order.run_path)
    _set_up_process(run_path)
    log = logging.getLogger("dcp_tiered.flusher")
    stopping = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        stopping.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        lock = FlusherLock(run_path)
        if not _take_over(lock, order, log):
            return 0
        while True:
            with lock.hold(order.starter) as mine:
                if not mine:
                    return 0
                flusher = stack.flusher(order, lock, lambda: bool(stopping))
                log.info("flushing %s to %s", run_path, order.url)
                flusher.run(order.limits.idle_exit_s)
            # A save that sealed its files while we still held the lock did not start another flusher:
            # it counted on us. So look once more after the lock is free.
            if stopping or lock.asked_to_hand_over() or not flusher.has_work():
                log.info("ending")
                return 0
    except Exception:
        log.exception("flusher failed")
        return 1


def _take_over(lock: "FlusherLock", order: "Order", log: logging.Logger) -> bool:
    """Wait until the lock is free; return False when another flusher with a living starter has it."""
    deadline = time.monotonic() + order.limits.takeover_s
    killed = False
    while (holder := lock.holder()) is not None:
        if holder.flusher is not None and not holder.is_orphaned():
            return False
        if holder.flusher is not None:
            lock.ask_to_hand_over()
        if time.monotonic() > deadline:
            if killed:
                log.error("cannot take over from the flusher that has the lock: %s", holder)
                return False
            log.warning("the running flusher does not hand over, killing it")
            lock.kill_holder()
            killed = True
            deadline += order.limits.takeover_s
        time.sleep(0.05)
    return True


def _set_up_process(run_path: Path) -> None:
    """Log to a bounded file, hold no directory, and leave the cores to the trainer."""
    path = run_path / "flusher.log"
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
    os.chdir("/")
    os.nice(_NICE)


if __name__ == "__main__":
    sys.exit(main())
