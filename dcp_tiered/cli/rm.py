"""`dcp-tiered rm URL ID...`: remove checkpoints from the durable tier."""

import argparse
import json
from typing import Any

from dcp_tiered.cli import common
from dcp_tiered.errors import InvalidError
from dcp_tiered.format import layout
from dcp_tiered.format.records import Commit
from dcp_tiered.services.removal import Removal, Remover


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("rm", help="remove checkpoints from the durable tier")
    parser.add_argument("url", metavar="URL", help="the run, such as tiered::s3://bucket/run42")
    parser.add_argument("ids", metavar="ID", nargs="+", help="a checkpoint, such as step-1000")
    parser.add_argument("--dry-run", action="store_true", help="show what would go; change nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object per checkpoint")
    common.add_option_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Withdraw all of them, then delete what is theirs; the same call finishes what was cut off.

    Raises:
        AbsentError: One of them is not there; then, as below, nothing is changed.
        IncompleteError: One was never committed.
        InvalidError: One is the newest complete checkpoint, or the run is local only.
    """
    ids = [layout.check_checkpoint_id(name) for name in dict.fromkeys(arguments.ids)]
    built = common.build_removing(arguments.url, arguments.option)
    try:
        if built.durable is None:
            raise InvalidError(
                "the run has no durable tier",
                "durable",
                arguments.url,
                "Give the URL of one; local copies are evicted as room is needed.",
            )
        remover = Remover(built.durable)
        chosen = remover.choose(ids)
        if not arguments.dry_run:
            remover.withdraw(chosen)
        for name, state in chosen.items():
            pretend = state if arguments.dry_run and isinstance(state, Commit) else None
            removal = remover.plan(name, pretend)
            if not arguments.dry_run:
                remover.delete(removal)
            _tell(removal, arguments)
    finally:
        built.close()
    return 0


def _tell(removal: Removal, arguments: argparse.Namespace) -> None:
    """Say what went, or would go."""
    objects = removal.objects()
    total = sum(info.length for info in objects)
    if arguments.json:
        fields = {
            "checkpoint_id": removal.checkpoint_id,
            "removed": not arguments.dry_run,
            "bytes": total,
            "objects": [{"key": info.key, "bytes": info.length} for info in objects],
            "stay": list(removal.stay),
        }
        print(json.dumps(fields), flush=True)
        return
    done = "would be removed" if arguments.dry_run else "removed"
    print(f"{removal.checkpoint_id}: {done}: {len(objects)} objects, {common.size(total)}")
    if arguments.dry_run:
        for info in objects:
            print(f"  {info.key}  {common.size(info.length)}")
    if removal.stay:
        print(f"  {len(removal.stay)} objects stay, a save may still bring what belongs to them:")
        for key in removal.stay:
            print(f"  {common.cell(key)}")
