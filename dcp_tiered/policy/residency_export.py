"""A residency policy as documents that AWS enforces: text for review, applied by nobody here.

What is generated uses these keys of conditions only: `aws:RequestedRegion`, `aws:ResourceAccount`,
`aws:SecureTransport` and `s3:LocationConstraint`. A key that a request does not have makes
`StringNotEquals` true, so an unknown account is refused. `s3:LocationConstraint` is missing from
good requests too, those for us-east-1: what it lacks is left to `aws:RequestedRegion`, by `Null`,
since `...IfExists` is true without the key.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcp_tiered.errors import InvalidError
from dcp_tiered.policy.permissions import (
    ACCOUNT_SETTINGS,
    ACL_WRITES,
    ROLES,
    SETTINGS,
    WRITES,
    Permissions,
)
from dcp_tiered.policy.residency import Policy, Rule

FORMS = ("iam", "scp", "vpce", "gcp-org", "azure")
_SCP_BYTES_MAX = 5120
_IAM_CHARS_MAX = 6144
"""Without white space."""
_VERSION = "2012-10-17"
_CREATE = ("s3:CreateBucket",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run is flushed to, by a policy's rules for AWS."""

    partition: str
    bucket: str
    prefix: str
    regions: tuple[str, ...]
    owners: tuple[str, ...]
    keys: tuple[str, ...]
    """ARNs of KMS keys that the policy speaks of."""

    def bucket_arn(self) -> str:
        """Return the ARN of the bucket."""
        return f"arn:{self.partition}:s3:::{self.bucket}"

    def objects_arn(self) -> str:
        """Return the ARN of the objects of the run."""
        return f"{self.bucket_arn()}/{self.prefix}/*"


def export(policy: Policy, root: str, form: str, role: str | None) -> str:
    """Return a document as text, the same for the same policy.

    Args:
        policy: What is allowed.
        root: Of the run, such as `s3://bucket/run42`.
        form: One of `FORMS`.
        role: For `iam`: what this role needs; None for what no role of a run may do.

    Raises:
        InvalidError: There is no such document for this policy, or it is larger than AWS takes.
    """
    if form in ("gcp-org", "azure"):
        raise _wrong(
            f"nothing to export for {form!r}: no document is made for Google Cloud or Azure",
            "docs/residency.md says what to set up there; --for iam, scp and vpce are for AWS.",
        )
    place = _place(policy, root)
    if form == "vpce":
        return _text(_endpoint(place))
    if form == "scp":
        text = _text(_organization(place))
        _bound(len(text.encode()), _SCP_BYTES_MAX, "bytes")
        return text
    document = _guard(place) if role is None else _grant(place, ROLES[role])
    text = _text(document)
    _bound(len("".join(text.split())), _IAM_CHARS_MAX, "characters")
    return text


def _place(policy: Policy, root: str) -> Place:
    scheme, _, path = root.partition("://")
    bucket, _, prefix = path.partition("/")
    rules = [rule for rule in policy.allow if rule.provider == "aws"]
    partitions = {rule.partition for rule in rules}
    if scheme != "s3" or not rules:
        raise _wrong(
            "these documents are for AWS: give an s3 URL and a policy with a rule for AWS",
            "What a compatible store or a mount enforces is set up with its own means.",
        )
    if set(path) & set("*?$"):
        raise _wrong(
            f"{root!r} has a character that means something else in an ARN",
            "Documents would be about other objects than the run's.",
        )
    if len(partitions) > 1:
        raise _wrong(
            f"the policy allows several partitions: {', '.join(sorted(partitions))}",
            "Each has its own organization; export from one policy for each.",
        )
    return Place(
        partition=partitions.pop(),
        bucket=bucket,
        prefix=prefix,
        regions=_once(region for rule in rules for region in rule.regions),
        owners=_once(rule.owner for rule in rules if rule.owner is not None),
        keys=_once(key for rule in rules for key in _keys(rule)),
    )


def _keys(rule: Rule) -> list[str]:
    if not (rule.require_kms or rule.key_regions or rule.key_accounts):
        return []
    accounts = rule.key_accounts or ((rule.owner,) if rule.owner else ())
    return [
        f"arn:{rule.partition}:kms:{region}:{account}:key/*"
        for region in rule.key_regions or rule.regions
        for account in accounts
    ]


def _grant(place: Place, role: Permissions) -> dict[str, Any]:
    """Return what a role needs, and nothing else, in the accounts of the policy only."""
    here = {"StringEquals": {"aws:ResourceAccount": _one_or_all(place.owners)}}
    parts = [
        ("Objects", role.objects, place.objects_arn()),
        ("Bucket", role.bucket, place.bucket_arn()),
        ("Replication", role.buckets, f"arn:{place.partition}:s3:::*"),
    ]
    statements = [
        _statement(sid, "Allow", actions, on, here) for sid, actions, on in parts if actions
    ]
    if role.account:
        statements.append(_statement("Account", "Allow", role.account, "*"))
    if role.keys and place.keys:
        statements.append(_statement("Keys", "Allow", role.keys, _one_or_all(place.keys)))
    return _document(statements)


def _guard(place: Place) -> dict[str, Any]:
    """Return what no role of a run may do, whatever else it is allowed: for each of its roles."""
    elsewhere = _statement("OnlyThisRun", "Deny", WRITES, place.objects_arn())
    elsewhere["NotResource"] = elsewhere.pop("Resource")
    settings = sorted({*SETTINGS, *ACCOUNT_SETTINGS, *ACL_WRITES, *_CREATE})
    stay = _statement("SettingsStay", "Deny", settings, "*")
    return _document([elsewhere, *_limits(place), stay])


def _organization(place: Place) -> dict[str, Any]:
    """Return what no principal of an account may do: data elsewhere, other settings here."""
    located = {
        **_unless("s3:LocationConstraint", place.regions),
        "Null": {"s3:LocationConstraint": "false"},
    }
    return _document(
        [
            *_limits(place, *_CREATE),
            _statement("BucketsLocated", "Deny", _CREATE, "*", located),
            _statement("SettingsStay", "Deny", SETTINGS, place.bucket_arn()),
            _statement("ObjectsStayPrivate", "Deny", ACL_WRITES, f"{place.bucket_arn()}/*"),
            _statement("AccountStaysPrivate", "Deny", ACCOUNT_SETTINGS, "*"),
        ]
    )


def _limits(place: Place, *more: str) -> list[dict[str, Any]]:
    """Deny writes, and what else is bound to regions, in other places than the policy's."""
    region = _unless("aws:RequestedRegion", place.regions)
    owner = _unless("aws:ResourceAccount", place.owners)
    plain = {"Bool": {"aws:SecureTransport": "false"}}
    return [
        _statement("Region", "Deny", (*more, *WRITES), "*", region),
        _statement("Owner", "Deny", WRITES, "*", owner),
        _statement("Encrypted", "Deny", ("s3:*",), "*", plain),
    ]


def _endpoint(place: Place) -> dict[str, Any]:
    """Return what passes a VPC endpoint: what a flusher does, which is all; else is refused."""
    document = _grant(place, replace(ROLES["flusher"], keys=()))
    return _document([{**statement, "Principal": "*"} for statement in document["Statement"]])


def _statement(
    sid: str, effect: str, actions: Sequence[str], on: Any, condition: Any = None
) -> dict[str, Any]:
    found = {"Sid": sid, "Effect": effect, "Action": list(actions), "Resource": on}
    return found if condition is None else {**found, "Condition": condition}


def _unless(key: str, values: Sequence[str]) -> dict[str, Any]:
    return {"StringNotEquals": {key: _one_or_all(values)}}


def _one_or_all(values: Sequence[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else list(values)


def _once(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _document(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": _VERSION, "Statement": statements}


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _bound(found: int, most: int, what: str) -> None:
    if found > most:
        raise _wrong(
            f"document has {found} {what}, more than the {most} that AWS takes",
            "Export from a policy with fewer regions, accounts and keys.",
        )


def _wrong(what: str, hint: str) -> InvalidError:
    return InvalidError(f"residency export: {what}", None, None, hint)
