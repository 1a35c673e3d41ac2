"""`dcp-tiered flush LOCAL`: bring everything on this node to the durable tier, now."""

import argparse
import sys
import time
from typing import Any

from dcp_tiered import config, stack
from dcp_tiered.cli import common
from dcp_tiered.errors import ConflictError, InvalidError, TieredError, UnavailableError
from dcp_tiered.services import identity, progress, run_directory
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.launcher import Order
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.tiers.posix import PosixTier

_HOPELESS = (ConflictError, InvalidError)


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("flush", help="make everything on this node durable, then return")
    parser.add_argument("local", metavar="LOCAL", help="the local tier, or a run's directory in it")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="give up after S seconds (3600)"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="replace a flusher that runs, instead of waiting for it: for other credentials",
    )
    common.add_option_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Drain every run of a local tier; the exit code is that of the first failure."""
    deadline = time.monotonic() + arguments.timeout
    options = common.parse_options(arguments.option)
    code = 0
    for tier in common.run_directories(arguments.local):
        url, noted = run_directory.run_of(tier)
        protocol = config.parse_url(url).protocol
        if protocol is None:
            print(f"{url}: local only, nothing to flush")
            continue
        settings = config.settings(url, None, {protocol: noted | options.get(protocol, {})})
        failures = _drain(tier, settings, deadline, take_over=arguments.take_over)
        for checkpoint_id, error in sorted(failures.items()):
            print(f"dcp-tiered: {checkpoint_id}: {error}", file=sys.stderr)
            code = code or common.exit_code(error)
        print(f"{url}: {'all durable' if not failures else f'{len(failures)} not durable'}")
    return code


def _drain(
    tier: PosixTier, settings: config.Settings, deadline: float, *, take_over: bool
) -> dict[str, TieredError]:
    """Flush one run in this process, or wait for the flusher that runs; return what is left."""
    order = Order(
        run_path=str(tier.root),
        base_path=str(tier.base),
        url=f"tiered::{settings.url.root}",
        options=dict(settings.options),
        limits=settings.limits,
    )
    lock = FlusherLock(tier.root)
    while True:
        with lock.hold(identity.current()) as mine:
            if mine:
                return _flush_here(tier, order, lock, deadline)
        if take_over:
            lock.ask_to_hand_over()
        left = _open_states(tier)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(settings.limits.poll_s)


def _flush_here(
    tier: PosixTier, order: Order, lock: FlusherLock, deadline: float
) -> dict[str, TieredError]:
    flusher = stack.flusher(order, lock, lambda: time.monotonic() > deadline)
    while flusher.step():
        failures = flusher.failures()
        hopeless = failures and all(isinstance(error, _HOPELESS) for error in failures.values())
        if hopeless or time.monotonic() > deadline:
            break
        time.sleep(order.limits.poll_s)
    return flusher.failures() or _open_states(tier)


def _open_states(tier: PosixTier) -> dict[str, TieredError]:
    """Return what is published on this node and not durable, with the reason known so far."""
    reports = progress.read_reports(tier.root)
    left: dict[str, TieredError] = {}
    for line in progress.status(Catalog(tier, None), tier):
        if line.state in ("durable", "saving"):
            continue
        report = reports.get(line.checkpoint_id)
        error = progress.restore_error(report.error) if report else None
        left[line.checkpoint_id] = error or UnavailableError(
            f"not durable yet: {line.state}", "durable", line.checkpoint_id
        )
    return left
