"""What was found out about the place that a run is flushed to, and how a record keeps it.

A tier says what it sees, the policy says what that means; both speak in these values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dcp_tiered.errors import CorruptError

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
_EVIDENCE_CHARS_MAX = 400
_RECORD_KEYS_MAX = 16


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
    """`s3://bucket`, `https://endpoint/bucket` of a compatible store, `file:///mount`."""
    provider: str
    """`aws`, `s3compat`, `r2` or `posix`."""
    facts: tuple[Fact, ...]


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
