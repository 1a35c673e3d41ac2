"""`dcp-tiered ls URL`: the checkpoints of a run, newest last."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from dcp_tiered.cli import common
from dcp_tiered.errors import TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.records import Commit, Expired
from dcp_tiered.services.catalog import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One checkpoint."""

    checkpoint_id: str
    step: int | None
    state: str
    """`durable`, `local`, `incomplete` or `expired`."""
    attempt: str | None
    sequence: int
    bytes_stored: int
    objects: int
    reason: str


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("ls", help="list the checkpoints of a run, newest last")
    parser.add_argument("url", metavar="URL", help="the run, such as tiered::s3://bucket/run42")
    parser.add_argument("--local", help="this node's local tier, to list what is only there too")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    common.add_option_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the run on both tiers."""
    built = common.build(arguments.url, arguments.local, arguments.option)
    try:
        lines = sorted(_lines(built.catalog), key=lambda line: line.sequence)
    finally:
        built.close()
    if not lines:
        print(f"dcp-tiered: no checkpoint under {arguments.url}: is it spelt so?", file=sys.stderr)
    if arguments.json:
        for line in lines:
            print(json.dumps(asdict(line)))
        return 0
    table = Table("checkpoint", "step", "state", "size", "packs", "saved (UTC)", "")
    newest = max((line for line in lines if line.state == "durable"), key=_sequence, default=None)
    for line in lines:
        table.add_row(
            line.checkpoint_id,
            "" if line.step is None else str(line.step),
            line.state,
            common.size(line.bytes_stored) if line.bytes_stored else "",
            str(line.objects) if line.objects else "",
            common.moment(line.sequence) if line.sequence else "",
            "newest durable" if line is newest else line.reason,
        )
    common.console().print(table)
    return 0


def _sequence(line: Line) -> int:
    return line.sequence


def _lines(catalog: Catalog) -> list[Line]:
    states = catalog.states() if catalog.durable is not None else {}
    ids = sorted({*states, *catalog.local_ids()})
    return [_line(catalog, name, states.get(name)) for name in ids]


def _line(catalog: Catalog, checkpoint_id: str, state: Commit | Expired | None) -> Line:
    if isinstance(state, Commit):
        return Line(
            checkpoint_id=checkpoint_id,
            step=state.step,
            state="durable",
            attempt=state.attempt,
            sequence=state.sequence,
            bytes_stored=state.bytes_stored,
            objects=len(state.packs),
            reason="",
        )
    try:
        published = catalog.published(checkpoint_id)
    except TieredError as exc:
        return _empty(checkpoint_id, "incomplete", exc.message)
    if isinstance(state, Expired) and (published is None or catalog.is_expired(published.head)):
        return _empty(checkpoint_id, "expired", _left(catalog, checkpoint_id))
    if published is None:
        reason = "no commit: still being written, or its save was cut off"
        return _empty(checkpoint_id, "incomplete", reason)
    return Line(
        checkpoint_id=checkpoint_id,
        step=published.head.step,
        state="local",
        attempt=published.head.attempt,
        sequence=published.head.sequence,
        bytes_stored=published.head.bytes_stored(),
        objects=0,
        reason="",
    )


def _left(catalog: Catalog, checkpoint_id: str) -> str:
    """Return what is to be said of a checkpoint that was removed."""
    assert catalog.durable is not None, "who else would say that it was"
    names = (key.partition("/")[2] for key in catalog.durable.list_keys(checkpoint_id))
    left = sum(layout.record_number(name) is None for name in names)
    if not left:
        return "removed"
    return f"{left} objects are left: 'dcp-tiered rm URL {checkpoint_id}' goes on with them"


def _empty(checkpoint_id: str, state: str, reason: str) -> Line:
    return Line(
        checkpoint_id=checkpoint_id,
        step=None,
        state=state,
        attempt=None,
        sequence=0,
        bytes_stored=0,
        objects=0,
        reason=reason,
    )
