"""`dcp-tiered`: look at runs, drain them, remove checkpoints, probe a node; without torch."""

import argparse
import sys
from collections.abc import Sequence

from dcp_tiered.cli import doctor, drain, flush, inspect, keep, ls, residency, rm, status
from dcp_tiered.cli.common import exit_code
from dcp_tiered.cli.ending import leave
from dcp_tiered.errors import TieredError
from dcp_tiered.version import __version__

_COMMANDS = (ls, inspect, status, flush, drain, keep, rm, doctor, residency)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code tells what kind of error ended it."""
    parser = argparse.ArgumentParser(
        prog="dcp-tiered",
        description="Look at the checkpoints of a run on both tiers, remove some, drain a node,"
        " probe its disk.",
        epilog="exit codes: 0 done, 2 usage, 3 invalid, 4 unavailable, 5 corrupt, 6 incomplete,"
        " 7 absent, 8 conflict, 9 residency, 10 back-pressure",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    chosen = parser.parse_args(arguments)
    try:
        code = int(chosen.run(chosen))
    except TieredError as exc:
        print(f"dcp-tiered: {exc}", file=sys.stderr)
        code = exit_code(exc)
    except KeyboardInterrupt:
        code = 130
    return leave(code)
