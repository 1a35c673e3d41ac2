"""`dcp-tiered residency audit URL`: where every checkpoint went, and who vouched."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from dcp_tiered import config
from dcp_tiered.cli import common
from dcp_tiered.errors import AbsentError, CorruptError, InvalidError, ResidencyError
from dcp_tiered.format.residency import Evidence, Verdict
from dcp_tiered.policy import residency_schema
from dcp_tiered.services.audit import AuditedCheckpoint, AuditedRecord, audit


def register(actions: Any) -> None:
    """Add the command."""
    parser = actions.add_parser("audit", help="show where every checkpoint went, and who vouched")
    parser.add_argument("url", metavar="URL", help="the run, such as tiered::s3://bucket/run42")
    parser.add_argument("--policy", metavar="FILE", help="a policy that the evidence is held to")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    common.add_option_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show every commit of a run with its evidence; writes nothing anywhere.

    Raises:
        AbsentError: There is nothing: a mistyped URL must not pass for a clean run.
        InvalidError: The policy or an option cannot be right, or the run is local only.
        UnavailableError: The store does not answer.
    """
    given = config.residency_source(arguments.policy)
    policy = None if given is None else residency_schema.parse(given)
    built = common.build(arguments.url, None, arguments.option)
    try:
        if built.durable is None:
            raise InvalidError(
                "the run has no durable tier", "durable", arguments.url, "Nothing of it left here."
            )
        found = audit(built.durable, policy, datetime.now(UTC))
    finally:
        built.close()
    if not found:
        raise AbsentError(
            "no checkpoint of this run is there", "durable", arguments.url, "Look at the URL."
        )
    if arguments.json:
        for line in _lines(found):
            print(json.dumps(line))
    else:
        _print(found)
    return _exit_code(found)


def _exit_code(found: list[AuditedCheckpoint]) -> int:
    findings = {record.finding for one in found for record in one.records}
    if findings & {"no policy", "not allowed"}:
        return common.exit_code(ResidencyError(""))
    return common.exit_code(CorruptError("")) if "damaged" in findings else 0


def _lines(found: list[AuditedCheckpoint]) -> Iterator[dict[str, Any]]:
    for one in found:
        for record in one.records:
            yield {"kind": "record", "checkpoint_id": one.checkpoint_id, **_described(record)}
        if one.uncommitted:
            yield {
                "kind": "uncommitted",
                "checkpoint_id": one.checkpoint_id,
                "objects": len(one.uncommitted),
                "names": list(one.uncommitted),
            }


def _described(record: AuditedRecord) -> dict[str, Any]:
    commit, evidence = record.commit, record.evidence
    return {
        "record": record.number,
        "state": record.state,
        "finding": record.finding,
        "why": "" if record.error is None else record.error.message,
        "step": commit.step if commit else None,
        "committed_at": commit.committed_at if commit else None,
        "committed_by": commit.committed_by if commit else None,
        "evidence": None if evidence is None else _evidence(evidence),
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    seen = evidence.observed
    return {
        "policy_sha256": evidence.policy_sha256,
        "rule": evidence.rule,
        "checked_at": evidence.checked_at.isoformat(),
        "target": seen.target,
        "provider": seen.provider,
        "regions": list(evidence.values("location")),
        "owner": next(iter(evidence.values("owner")), None),
        "facts": [
            {
                "name": fact.name,
                "verdict": str(fact.verdict),
                "values": list(fact.values),
                "evidence": fact.evidence,
            }
            for fact in seen.facts
        ],
        "attestations": [asdict(one) for one in evidence.vouched],
    }


def _print(found: list[AuditedCheckpoint]) -> None:
    names = ("checkpoint", "commit", "target", "facts", "who vouched", "finding")
    table = Table(*names, title="commits", show_lines=True)
    left = Table("checkpoint", "object", title="uncommitted: no commit names these objects")
    for one in found:
        for record in one.records:
            cells = (one.checkpoint_id, *_cells(record))
            table.add_row(*map(common.cell, cells))
        for name in one.uncommitted:
            left.add_row(*map(common.cell, (one.checkpoint_id, name)))
    out = common.console()
    out.print(table)
    if left.row_count:
        out.print(left)
    records = [record.finding for one in found for record in one.records]
    counted = ", ".join(f"{records.count(name)} {name}" for name in sorted(set(records)))
    out.print(f"records: {counted or 'none'}; uncommitted objects: {left.row_count}")


def _cells(record: AuditedRecord) -> Iterator[str]:
    commit, evidence = record.commit, record.evidence
    said = f"record {record.number}, {record.state}"
    if commit is not None:
        step = "" if commit.step is None else f"\nstep {commit.step}"
        said += f"{step}\n{commit.committed_at}\nby node {commit.committed_by}"
    yield said
    yield "" if evidence is None else _target(evidence)
    yield "" if evidence is None else _facts(evidence)
    vouched = evidence.vouched if evidence else ()
    yield "\n".join(f"{v.fact}: {v.by}, until {v.expires}: {v.reason}" for v in vouched)
    yield record.finding + ("" if record.error is None else f": {record.error.message}")


def _target(evidence: Evidence) -> str:
    seen = evidence.observed
    places = (*evidence.values("location"), *evidence.values("mount"))
    owner = "".join(f"\nowner {owner}" for owner in evidence.values("owner"))
    where = "\n".join((f"{seen.provider} {seen.target}", *places))
    return f"{where}{owner}\npolicy {evidence.policy_sha256[:12]}, rule {evidence.rule}"


def _facts(evidence: Evidence) -> str:
    """Return the facts by verdict."""
    lines = []
    for verdict in Verdict:
        names = [fact.name for fact in evidence.observed.facts if fact.verdict is verdict]
        if names:
            lines.append(f"{verdict}: {', '.join(names)}")
    return "\n".join(lines)
