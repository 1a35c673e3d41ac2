"""`dcp-tiered flush LOCAL`: bring everything on this node to the durable tier, now."""

import argparse
import sys
import time
from collections import Counter
from typing import Any

from dcp_tiered import stack
from dcp_tiered.cli import common, follow, local_runs
from dcp_tiered.errors import TieredError
from dcp_tiered.services import identity
from dcp_tiered.services.drain import HOPELESS
from dcp_tiered.services.launcher import Order
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.tiers.posix import PosixTier


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("flush", help="make everything on this node durable, then return")
    local_runs.add_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="give up after S seconds (3600)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--take-over",
        action="store_true",
        help="replace a flusher that runs, instead of waiting for it: for other credentials",
    )
    how.add_argument(
        "--follow",
        action="store_true",
        help="keep flushing what comes, until SIGTERM: for a sidecar container",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Flush every run of a local tier; the exit code is that of the first failure."""
    if arguments.follow:
        return follow.follow(arguments)
    deadline = time.monotonic() + arguments.timeout
    code = 0
    for tier, order in local_runs.orders(arguments):
        if order is None:
            print(f"{tier.root.name}: local only, nothing to flush")
            continue
        failures = _flush(tier, order, deadline, take_over=arguments.take_over)
        for checkpoint_id, error in sorted(failures.items()):
            print(f"dcp-tiered: {checkpoint_id}: {error}", file=sys.stderr)
            code = code or common.exit_code(error)
        states = Counter(line.state for line in local_runs.given_up(tier).values())
        but = "".join(f", but {number} {state}" for state, number in sorted(states.items()))
        print(f"{order.url}: {f'{len(failures)} not' if failures else 'all'} durable{but}")
    return code


def _flush(
    tier: PosixTier, order: Order, deadline: float, *, take_over: bool
) -> dict[str, TieredError]:
    """Flush one run in this process, or wait for the flusher that runs; return what is left."""
    lock = FlusherLock(tier.root)
    while True:
        with lock.hold(identity.current()) as mine:
            if mine:
                return _flush_here(tier, order, lock, deadline)
        if take_over:
            lock.ask_to_hand_over()
        left = local_runs.open_states(tier)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(order.limits.poll_s)


def _flush_here(
    tier: PosixTier, order: Order, lock: FlusherLock, deadline: float
) -> dict[str, TieredError]:
    flusher = stack.flusher(order, lock, lambda: time.monotonic() > deadline)
    while flusher.step():
        failures = flusher.failures()
        hopeless = failures and all(isinstance(error, HOPELESS) for error in failures.values())
        if hopeless or time.monotonic() > deadline:
            break
        time.sleep(order.limits.poll_s)
    return flusher.failures() or local_runs.open_states(tier)
