"""`dcp-tiered residency check URL`: every fact about a run's target, and whether it is allowed.

The other actions are in files of their own.
"""

import argparse
import json
from typing import Any

from rich.table import Table

from dcp_tiered import stack
from dcp_tiered.cli import common, residency_audit, residency_export
from dcp_tiered.policy.residency import Decision, Judged
from dcp_tiered.services.residency import refusal


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("residency", help="where a run may be flushed to, and went")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="look at a target and hold it to a policy")
    check.add_argument("url", metavar="URL", help="the run, such as tiered::s3://bucket/run42")
    check.add_argument("--policy", required=True, metavar="FILE", help="the policy, TOML")
    check.add_argument("--json", action="store_true", help="one JSON object")
    common.add_option_argument(check)
    check.set_defaults(run=run)
    residency_audit.register(actions)
    residency_export.register(actions)


def run(arguments: argparse.Namespace) -> int:
    """Show every fact; writes nothing anywhere.

    Raises:
        InvalidError: The policy or an option cannot be right.
    """
    options = common.parse_options(arguments.option)
    options.setdefault("tiered", {})["residency"] = arguments.policy
    decision = stack.look(arguments.url, options)
    if arguments.json:
        print(json.dumps(_described(decision)))
    else:
        _print(decision)
    return 0 if decision.allowed else common.exit_code(refusal(decision))


def _print(decision: Decision) -> None:
    verdict = "allowed" if decision.allowed else "not allowed"
    title = f"{decision.target}: {verdict} (policy {decision.policy_sha256[:12]})"
    table = Table("fact", "verdict", "evidence", "missing permission", "call", title=title)
    for one in decision.judged:
        fact = one.fact
        cells = (fact.name, _verdict(one), fact.evidence, fact.permission, fact.call)
        table.add_row(*map(common.cell, cells))
    common.console().print(table)
    if decision.rule is None:
        print("the policy has no rule for such a target")


def _verdict(one: Judged) -> str:
    if one.attestation is not None:
        return f"{one.fact.verdict}, attested by {one.attestation.by}"
    return f"{one.fact.verdict}, {one.note}" if one.note else str(one.fact.verdict)


def _described(decision: Decision) -> dict[str, Any]:
    facts = [
        {
            "name": one.fact.name,
            "verdict": str(one.fact.verdict),
            "allowed": one.is_allowed(),
            "values": list(one.fact.values),
            "evidence": one.fact.evidence,
            "permission": one.fact.permission,
            "call": one.fact.call,
            "note": one.note,
        }
        for one in decision.judged
    ]
    return {**decision.stored(), "allowed": decision.allowed, "facts": facts}
