"""`dcp-tiered status LOCAL`: how far each checkpoint on this node is. Touches no network."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from dcp_tiered.cli import common
from dcp_tiered.format import layout
from dcp_tiered.services import incidents, progress, run_directory
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.tiers.posix import PosixTier


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("status", help="show what is local, on its way, or durable")
    parser.add_argument("local", metavar="LOCAL", help="the local tier, or a run's directory in it")
    parser.add_argument("--json", action="store_true", help="one JSON object per run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show every run of a local tier."""
    out = common.console()
    for tier in common.run_directories(arguments.local):
        shown = _describe(tier)
        if arguments.json:
            print(json.dumps(shown))
            continue
        flusher = (
            "no flusher" if shown["flusher_pid"] is None else f"flusher {shown['flusher_pid']}"
        )
        table = Table(
            "checkpoint",
            "step",
            "level",
            "state",
            "size",
            "uploaded",
            "",
            title=f"{shown['url']} ({flusher})",
        )
        for line in shown["checkpoints"]:
            table.add_row(
                line["checkpoint_id"],
                "" if line["step"] is None else str(line["step"]),
                line["level"],
                line["state"],
                common.size(line["bytes_stored"]),
                common.size(line["bytes_uploaded"]),
                line["error"] or "",
            )
        out.print(table)
        for incident in shown["residency_incidents"]:
            state = "stands" if incident["stands"] else "over"
            print(f"residency incident, {state}: {incident['path']}")
    return 0


def _describe(tier: PosixTier) -> dict[str, Any]:
    holder = FlusherLock(tier.root).holder()
    pid = holder.flusher.pid if holder and holder.flusher else None
    lines = progress.status(Catalog(tier, None), tier)
    return {
        "url": run_directory.run_of(tier)[0],
        "path": str(tier.root),
        "flusher_pid": pid,
        "residency_incidents": _incidents(tier.root),
        "checkpoints": [asdict(line) for line in lines],
    }


def _incidents(run_path: Path) -> list[dict[str, Any]]:
    standing = incidents.read_journal(run_path).incident
    return [
        {"path": str(run_path / layout.incident_name(number)), "stands": number == standing}
        for number in incidents.incident_numbers(run_path)
    ]
