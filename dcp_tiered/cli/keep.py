"""`dcp-tiered keep LOCAL ID`: spare a checkpoint on this node from being superseded or evicted."""

import argparse
from typing import Any

from dcp_tiered.cli import common
from dcp_tiered.config import Limits
from dcp_tiered.errors import AbsentError
from dcp_tiered.format import layout
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_space import LocalSpace


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("keep", help="never supersede or evict a checkpoint of this node")
    parser.add_argument("local", metavar="LOCAL", help="the local tier, or a run's directory in it")
    parser.add_argument("checkpoint_id", metavar="ID", help="the checkpoint")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Mark the checkpoint in every run that has it."""
    name = layout.check_checkpoint_id(arguments.checkpoint_id)
    tiers = common.run_directories(arguments.local)
    found = [tier for tier in tiers if (tier.root / name).is_dir()]
    if not found:
        raise AbsentError(
            f"no run here has {name}",
            "local",
            arguments.local,
            "'dcp-tiered status LOCAL' lists what there is.",
        )
    for tier in found:
        LocalSpace(Catalog(tier, None), tier, Limits()).keep(name)
        print(f"{tier.root.name}: {name}: kept")
    return 0
