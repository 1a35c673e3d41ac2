"""What was found out about the place that a run is flushed to, and how a record keeps it.

A tier says what it sees, the policy says what that means; both speak in these values.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.fields import rows, shown, text

FACTS = (
    "location",
    "owner",
    "not_public",
    "replication",
    "encryption",
    "endpoint",
    "tls",
    "mount",
)
STORE_KEY = "key of the store"
"""The value of `encryption` where no key of a customer is used."""
REPLICA_KEY = "key "
"""Begins a value of `replication` that is no bucket's place but that of a key of replicas."""
REDUNDANCY = "redundancy "
"""Begins a value of `replication` that is what Azure calls how often it keeps each byte."""
VAULT = "vault "
"""Begins a value of `encryption` that is the host name of a key vault of Azure."""
_EVIDENCE_CHARS_MAX = 400
_RECORD_KEYS_MAX = 16
_TEXT_CHARS_MAX = 4096
_ROWS_MAX = 256
_PROVIDERS = {"s3": "aws", "https": "s3compat", "http": "s3compat", "file": "posix"}
_PROVIDERS |= {"gs": "gcs", "az": "azure"}
"""By the scheme of a target; a jurisdiction of R2 has hosts of its own."""
_R2 = re.compile(r"https://[0-9a-f]{32}\.[a-z]+\.r2\.cloudflarestorage\.com(/|$)")


class Verdict(StrEnum):
    """What is known about one fact. Unknown is not allowed."""

    ALLOW = "ALLOW"
    DENY = "DENY"
    UNKNOWN = "UNKNOWN"


_WORSE = (Verdict.ALLOW, Verdict.UNKNOWN, Verdict.DENY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact about a target."""

    name: str
    """One of `FACTS`."""
    verdict: Verdict
    evidence: str
    """What the store, the kernel or the client said."""
    values: tuple[str, ...] = ()
    """Places, accounts or names that the policy has to allow, one by one."""
    call: str = ""
    """How it was asked, such as `s3:GetBucketReplication(Bucket=ckpt)`."""
    permission: str = ""
    """What the asker lacks, empty where it lacks none."""
    transient: bool = False
    """Unknown because the store did not answer: it may the next time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that was found out about one target at one time."""

    target: str
    """`s3://bucket`, `https://endpoint/bucket` of a compatible store, `gs://bucket`,
    `az://account/container`, `file:///mount`."""
    provider: str
    """`aws`, `s3compat`, `r2`, `gcs`, `azure` or `posix`."""
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """Who answered for an unknown fact when a checkpoint was committed."""

    fact: str
    by: str
    reason: str
    expires: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a record keeps of why its checkpoint may lie where it does."""

    policy_sha256: str
    rule: str | None
    checked_at: datetime
    """When the target was looked at, UTC."""
    observed: Observed
    """Facts as the policy of that time had judged them; how they were asked is not kept."""
    vouched: tuple[Vouched, ...]

    def values(self, name: str) -> tuple[str, ...]:
        """Return the values of a fact, none where it was not looked at."""
        return next((fact.values for fact in self.observed.facts if fact.name == name), ())


def worst(name: str, facts: Iterable[Fact]) -> Fact:
    """Return several findings about one fact as one: the worst verdict, and what led to it.

    Args:
        name: Of the fact.
        facts: At least one.
    """
    found = list(facts)
    verdict = max((fact.verdict for fact in found), key=_WORSE.index)
    why = [fact for fact in found if fact.verdict is verdict]
    values = [value for fact in found for value in fact.values]
    return Fact(
        name=name,
        verdict=verdict,
        evidence="; ".join(fact.evidence for fact in why),
        values=tuple(dict.fromkeys(values)),
        call="; ".join(dict.fromkeys(fact.call for fact in why if fact.call)),
        permission=", ".join(dict.fromkeys(fact.permission for fact in why if fact.permission)),
        transient=all(fact.transient for fact in why),
    )


def stored_fact(fact: Fact) -> dict[str, Any]:
    """Return a fact as a record keeps it."""
    return {
        "name": fact.name,
        "verdict": fact.verdict.value,
        "values": list(fact.values),
        "evidence": fact.evidence[:_EVIDENCE_CHARS_MAX],
    }


def check_stored(value: object) -> Mapping[str, Any] | None:
    """Return the residency field of a record, None where it has none; for people and audits only.

    Raises:
        CorruptError: It is no JSON object, or a large one.
    """
    if value is None or (isinstance(value, dict) and len(value) <= _RECORD_KEYS_MAX):
        return value
    raise CorruptError("'residency' is not an object")


def read_evidence(stored: Mapping[str, Any]) -> Evidence:
    """Return the residency field of a record as values.

    Raises:
        CorruptError: It is not what `stored_fact` and a decision make.
    """
    target = text(stored, "target", _TEXT_CHARS_MAX)
    provider = "r2" if is_r2(target) else _PROVIDERS.get(target.partition("://")[0])
    if provider is None:
        raise CorruptError(f"target {shown(target)} is of no known kind")
    facts = tuple(_fact(_object(row)) for row in _some(stored, "facts"))
    return Evidence(
        policy_sha256=text(stored, "policy_sha256", 64),
        rule=None if stored.get("rule") is None else text(stored, "rule", _TEXT_CHARS_MAX),
        checked_at=_moment(text(stored, "checked_at", 40)),
        observed=Observed(target=target, provider=provider, facts=facts),
        vouched=tuple(_vouched(_object(row)) for row in _some(stored, "attestations")),
    )


def r2_endpoint(account: str, jurisdiction: str) -> str:
    """Return the only endpoint at which buckets of a jurisdiction of R2 answer."""
    return f"https://{account}.{jurisdiction}.r2.cloudflarestorage.com"


def is_r2(url: str) -> bool:
    """Tell whether that is a jurisdiction's endpoint, or a bucket there."""
    return _R2.match(url) is not None


def _fact(row: Mapping[str, Any]) -> Fact:
    values = _some(row, "values")
    verdict = text(row, "verdict", 10)
    if verdict not in tuple(Verdict) or not all(isinstance(value, str) for value in values):
        raise CorruptError(f"fact {shown(row.get('name'))} is malformed")
    return Fact(
        name=text(row, "name", 40),
        verdict=Verdict(verdict),
        evidence=text(row, "evidence", _EVIDENCE_CHARS_MAX),
        values=tuple(value[:_TEXT_CHARS_MAX] for value in values),
    )


def _vouched(row: Mapping[str, Any]) -> Vouched:
    names = ("fact", "by", "reason", "expires")
    return Vouched(**{name: text(row, name, _TEXT_CHARS_MAX) for name in names})


def _object(row: object) -> Mapping[str, Any]:
    if isinstance(row, dict):
        return row
    raise CorruptError(f"{shown(row)} is not an object")


def _some(fields: Mapping[str, Any], name: str) -> list[Any]:
    found = rows(fields, name)
    if len(found) > _ROWS_MAX:
        raise CorruptError(f"{name!r} has more than {_ROWS_MAX} rows")
    return found


def _moment(value: str) -> datetime:
    try:
        found = datetime.fromisoformat(value)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as exc:
        raise CorruptError(f"{shown(value)} is not a time") from exc
