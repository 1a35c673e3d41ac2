"""`dcp-tiered flush LOCAL --follow`: be the flusher of a local tier until SIGTERM, as a sidecar."""

import argparse
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

from dcp_tiered import config, stack
from dcp_tiered.cli import local_runs
from dcp_tiered.cli.ending import Ending, step_back
from dcp_tiered.errors import InvalidError
from dcp_tiered.services import doorbell, drain, identity
from dcp_tiered.services.flusher import Flusher
from dcp_tiered.services.launcher import Order, Stopped
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.services.metrics_file import MetricsFile
from dcp_tiered.services.outgoing import Outgoing
from dcp_tiered.services.save_mark import is_saving
from dcp_tiered.tiers.posix import PosixTier

_LOOK_S = 2.0
"""How often to look for runs that are new, or whose flusher has ended."""
_log = logging.getLogger("dcp_tiered.flusher")


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose lock this process has."""

    tier: PosixTier
    order: Order
    lock: FlusherLock
    outgoing: Outgoing
    flusher: Flusher
    held: ExitStack
    is_outdated: Stopped
    metrics: MetricsFile


def follow(arguments: argparse.Namespace) -> int:
    """Flush all runs that there are and that will come; exit code 4 when something stays here."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("botocore").setLevel(logging.WARNING)
    step_back()
    # Limits come from fsspec's configuration, where no run has its own.
    limits = config.settings("tiered::file:///none").limits
    ending = Ending(limits.term_grace_s)
    ending.listen()
    _log.info("flushing what comes to %s", arguments.local)
    runs: dict[str, _Run] = {}
    try:
        look_at = 0.0
        while not ending.is_asked():
            if time.monotonic() >= look_at:
                _take_up(arguments, runs, ending)
                look_at = time.monotonic() + _LOOK_S
            here = [run.tier.root for run in runs.values()]
            heard = doorbell.heard(here)
            _step(runs, ending)
            doorbell.wait(here, heard, limits.poll_s)
        return _finish(arguments, runs, ending, limits.poll_s)
    finally:
        for run in runs.values():
            run.held.close()


def _take_up(arguments: argparse.Namespace, runs: dict[str, _Run], ending: Ending) -> None:
    """Become the flusher of every run that has none."""
    try:
        found = [(tier, order) for tier, order in local_runs.orders(arguments) if order]
    except InvalidError:
        return  # no run was ever saved here
    for tier, order in found:
        if order.run_path not in runs and (run := _take(tier, order, ending)) is not None:
            _log.info("flushing %s to %s", order.run_path, order.url)
            runs[order.run_path] = run


def _take(tier: PosixTier, order: Order, ending: Ending) -> _Run | None:
    """Take a run's lock, None when another flusher has it."""
    lock = FlusherLock(tier.root)
    with ExitStack() as held:
        if not held.enter_context(lock.hold(identity.current())):
            return None
        is_outdated = stack.is_outdated(order)
        outgoing = stack.outgoing(order, ending.due)
        flusher = stack.flusher(order, lock, ending.is_asked, outgoing)
        file = MetricsFile(tier.root, order.url, outgoing, flusher)
        return _Run(tier, order, lock, outgoing, flusher, held.pop_all(), is_outdated, file)
    return None


def _step(runs: dict[str, _Run], ending: Ending) -> None:
    for path, run in list(runs.items()):
        if ending.is_asked():
            return
        run.flusher.turn()
        run.metrics.write_sometimes()
        # Under another policy that was noted meanwhile it is taken up again.
        if run.lock.asked_to_hand_over() or run.is_outdated():
            _log.info("handing over %s", path)
            run.flusher.close()
            run.held.close()
            del runs[path]


def _finish(
    arguments: argparse.Namespace, runs: dict[str, _Run], ending: Ending, poll_s: float
) -> int:
    """Finish what can be finished in the grace time, also what other flushers leave behind."""
    drained: set[str] = set()
    while True:
        _take_up(arguments, runs, ending)
        # A save that goes on is waited for, which must not take the time of other runs.
        for path in sorted(runs.keys() - drained, key=lambda path: is_saving(runs[path].tier)):
            _drain(runs[path], ending)
            drained.add(path)
        left = [path for path, tier in _tiers(arguments) if local_runs.open_lines(tier)]
        if ending.is_over() or drained.issuperset(left):
            return 4 if left else 0
        time.sleep(poll_s)


def _tiers(arguments: argparse.Namespace) -> list[tuple[str, PosixTier]]:
    try:
        return [(o.run_path, tier) for tier, o in local_runs.orders(arguments) if o]
    except InvalidError:
        return []


def _drain(run: _Run, ending: Ending) -> None:
    # A flusher that was told to stop does not go on: a second one has the same lock.
    run.flusher.close()
    flusher = stack.flusher(
        run.order, run.lock, ending.is_over, run.outgoing, run.flusher.residency
    )
    poll_s = run.order.limits.poll_s
    drain.drain(flusher, run.tier, run.outgoing, stop=ending.is_over, poll_s=poll_s)
    MetricsFile(run.tier.root, run.order.url, run.outgoing, flusher).write()
