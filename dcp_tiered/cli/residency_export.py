"""`dcp-tiered residency export URL`: a policy as documents that AWS enforces, for review."""

import argparse
import sys
from typing import Any

from dcp_tiered import config
from dcp_tiered.errors import InvalidError
from dcp_tiered.policy import residency_schema
from dcp_tiered.policy.permissions import ROLES
from dcp_tiered.policy.residency_export import FORMS, export
from dcp_tiered.run_url import parse_url

_NOTES = {
    "iam": "attach it to every role of the run, beside what --role prints; it only denies",
    "scp": "attach it to the accounts of the run once the bucket is set up: its settings, and the"
    " account's block of public access, can then not be changed from inside these accounts",
    "vpce": "for the S3 endpoint of the nodes; what else goes through it is refused",
}


def register(actions: Any) -> None:
    """Add the command."""
    parser = actions.add_parser("export", help="print documents for AWS that enforce a policy")
    parser.add_argument("url", metavar="URL", help="the run, such as tiered::s3://bucket/run42")
    parser.add_argument("--policy", required=True, metavar="FILE", help="the policy, TOML")
    parser.add_argument("--for", required=True, choices=FORMS, dest="form", help="what for")
    parser.add_argument(
        "--role", choices=tuple(ROLES), help="with --for iam: what this role needs, and no more"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one document on standard output; nothing is asked and nothing is changed.

    Raises:
        InvalidError: The policy cannot be right, or there is no such document for it.
    """
    if arguments.role is not None and arguments.form != "iam":
        raise InvalidError("--role is for --for iam", None, None, "Leave one of them out.")
    given = config.residency_source(arguments.policy)
    assert given is not None, "--policy is required"
    policy = residency_schema.parse(given)
    root = parse_url(arguments.url).root
    print(export(policy, root, arguments.form, arguments.role), end="")
    if arguments.role is None:
        print(f"dcp-tiered: {_NOTES[arguments.form]}", file=sys.stderr)
    return 0
