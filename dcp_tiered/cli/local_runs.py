"""What `flush` and `drain` share: the runs of a local tier, and what of them is not durable."""

import argparse
from collections.abc import Iterator

from dcp_tiered import config
from dcp_tiered.cli import common
from dcp_tiered.errors import TieredError, UnavailableError
from dcp_tiered.run_url import parse_url
from dcp_tiered.services import progress, run_directory
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.launcher import Order
from dcp_tiered.services.progress import CheckpointStatus
from dcp_tiered.tiers.posix import PosixTier

_GIVEN_UP = ("superseded", "expired")
_ENDED = ("durable", "saving", *_GIVEN_UP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the local tier and the options of the durable one."""
    parser.add_argument("local", metavar="LOCAL", help="the local tier, or a run's directory in it")
    common.add_option_argument(parser)


def orders(arguments: argparse.Namespace) -> Iterator[tuple[PosixTier, Order | None]]:
    """Yield the runs of a local tier and how to flush each, None for one without a durable tier.

    Raises:
        InvalidError: There is no run.
    """
    options = common.parse_options(arguments.option)
    for tier in common.run_directories(arguments.local):
        url, noted = run_directory.run_of(tier)
        protocol = parse_url(url).protocol
        if protocol is None:
            yield tier, None
            continue
        mine = {protocol: options.get(protocol, {})}
        settings = config.settings(url, None, mine, noted=noted)
        yield (
            tier,
            Order(
                run_path=str(tier.root),
                base_path=str(tier.base),
                url=f"tiered::{settings.url.root}",
                options=dict(settings.options),
                limits=settings.limits,
                compression=settings.compression,
            ),
        )


def open_lines(tier: PosixTier) -> list[CheckpointStatus]:
    """Return what is on this node and to become durable.

    Neither a save that was never published is meant nor one whose flush was given up, nor what was
    removed from the durable tier.
    """
    lines = progress.status(Catalog(tier, None), tier)
    return [line for line in lines if line.state not in _ENDED]


def given_up(tier: PosixTier) -> dict[str, CheckpointStatus]:
    """Return what is on this node and will not be durable, superseded or removed, by id."""
    lines = progress.status(Catalog(tier, None), tier)
    return {line.checkpoint_id: line for line in lines if line.state in _GIVEN_UP}


def open_states(tier: PosixTier) -> dict[str, TieredError]:
    """Return what is published on this node and not durable, with the reason known so far."""
    reports = progress.read_reports(tier.root)
    left: dict[str, TieredError] = {}
    for line in open_lines(tier):
        report = reports.get(line.checkpoint_id)
        error = progress.restore_error(report.error) if report else None
        left[line.checkpoint_id] = error or UnavailableError(
            f"not durable yet: {line.state}", "durable", line.checkpoint_id
        )
    return left
