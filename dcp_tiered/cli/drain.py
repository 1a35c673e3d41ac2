"""`dcp-tiered drain LOCAL --deadline 110s`: what can be durable before this node goes away."""

import argparse
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dcp_tiered import stack
from dcp_tiered.cli import common, local_runs
from dcp_tiered.config import Limits
from dcp_tiered.errors import TieredError
from dcp_tiered.services import identity, progress
from dcp_tiered.services.drain import Drained, drain
from dcp_tiered.services.launcher import Order
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.services.save_mark import is_saving
from dcp_tiered.tiers.posix import PosixTier

_STAYS = 4
"""Exit code: something stays on this node; that of `UnavailableError`, since nothing is lost."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m)?")
_TIDY_SHARE, _TIDY_S_MAX = 0.1, 3.0
"""Uploads end this much before the deadline: what is cut off then is aborted on the store."""
_UNKNOWN = Drained(errors={}, is_complete=False)
_REQUEST_SHARE = 0.25
"""Of the time: a request that hangs must not take all of it."""


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "drain", help="make durable what can be before a deadline; for preemption"
    )
    local_runs.add_arguments(parser)
    parser.add_argument(
        "--deadline",
        type=duration,
        required=True,
        metavar="TIME",
        help="time until this node goes away, such as 110s or 2m",
    )
    parser.set_defaults(run=run)


def duration(text: str) -> float:
    """Return seconds.

    Raises:
        argparse.ArgumentTypeError: It is no time.
    """
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * (60 if match[2] == "m" else 1) if match else 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 110s or 2m")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Drain every run of a local tier; exit code 4 when something stays on this node."""
    # What is logged is printed below, once.
    logging.getLogger("dcp_tiered").addHandler(logging.NullHandler())
    begun = time.monotonic()
    code, workers = 0, []
    # A save that goes on is waited for, which must not take the time of other runs.
    for tier, order in sorted(local_runs.orders(arguments), key=lambda run: is_saving(run[0])):
        if order is None:
            print(f"{tier.root.name}: local only, nothing to drain")
            continue
        left_s = begun + arguments.deadline - time.monotonic()
        its_code, worker = _drain_run(tier, order, max(0.0, left_s))
        code = max(code, its_code)
        workers.append(worker)
    if any(worker.is_alive() for worker in workers):
        # A request to a store that does not answer: whatever a flusher is in, it may end there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _drain_run(tier: PosixTier, order: Order, left_s: float) -> tuple[int, threading.Thread]:
    """Drain one run until the deadline; return the exit code, and who may hang still."""
    end = time.monotonic() + left_s
    until = end - min(_TIDY_S_MAX, _TIDY_SHARE * left_s)
    before = [line.checkpoint_id for line in local_runs.open_lines(tier)]
    ended: list[Drained] = []

    def work() -> None:
        try:
            ended.append(_drain(tier, _in_time(order, left_s), until))
        except TieredError as exc:
            print(f"dcp-tiered: {exc}", file=sys.stderr)

    worker = threading.Thread(target=work, name="dcp-tiered-drain", daemon=True)
    worker.start()
    worker.join(max(0.0, end - time.monotonic()))
    return _tell(tier, order, before, ended[0] if ended else _UNKNOWN), worker


def _in_time(order: Order, left_s: float) -> Order:
    """Return the order with requests that give up soon enough to try others."""
    bound, limits = max(1.0, _REQUEST_SHARE * left_s), order.limits
    changed: Limits = replace(
        limits,
        request_timeout_s=min(limits.request_timeout_s, bound),
        request_retry_s=min(limits.request_retry_s, bound),
        takeover_s=min(limits.takeover_s, bound),
        flush_retry_s_max=min(limits.flush_retry_s_max, 1.0),
    )
    return replace(order, limits=changed)


def _drain(tier: PosixTier, order: Order, until: float) -> Drained:
    """Take the lock from whoever has it, and drain."""
    reports = progress.read_reports(tier.root)
    sent = {name: int(report.bytes_done) for name, report in reports.items()}
    out = stack.outgoing(order, lambda: until, sent)
    lock = FlusherLock(tier.root)

    def is_over() -> bool:
        return time.monotonic() >= until

    while not is_over():
        with lock.hold(identity.current()) as mine:
            if mine:
                flusher = stack.flusher(order, lock, is_over, out)
                poll_s = order.limits.poll_s
                return drain(flusher, tier, out, stop=is_over, poll_s=poll_s)
        _take_over(lock, order.limits, is_over)
    return _UNKNOWN


def _take_over(lock: FlusherLock, limits: Limits, is_over: Callable[[], bool]) -> None:
    """Have the flusher that runs end, after the pack that it sends or before."""
    lock.ask_to_hand_over()
    kill_at = time.monotonic() + limits.takeover_s
    while lock.holder() is not None and not is_over():
        if time.monotonic() >= kill_at:
            lock.kill_holder()
        time.sleep(limits.poll_s)


def _tell(tier: PosixTier, order: Order, before: list[str], ended: Drained) -> int:
    """Print what became durable and what did not; return the exit code."""
    left = {line.checkpoint_id: line for line in local_runs.open_lines(tier)}
    kept = {name: str(error) for name, error in ended.errors.items()}
    given_up = local_runs.given_up(tier)
    for checkpoint_id, line in given_up.items():
        print(f"{order.url}: {checkpoint_id}: {line.state}: {line.error}")
    for checkpoint_id in before:
        if checkpoint_id not in left and checkpoint_id not in given_up:
            print(f"{order.url}: {checkpoint_id}: durable")
    for checkpoint_id, line in left.items():
        reason = kept.pop(checkpoint_id, None) or line.error or "the time is over"
        size = common.size(line.bytes_stored)
        print(f"{order.url}: {checkpoint_id}: stays on this node, {size}: {reason}")
    for checkpoint_id, reason in kept.items():
        print(f"{order.url}: {checkpoint_id}: stays on this node: {reason}")
    is_all = ended.is_complete and not left
    print(f"{order.url}: {'all durable' if is_all else 'not all durable'}")
    return 0 if is_all else _STAYS
