"""Whether a target is allowed: facts and a policy in, a decision out.

Everything has to be allowed by name, and what is not known is not allowed. An attestation lets a
person answer for one unknown fact of one target for a while; it never overrides what was seen.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from dcp_tiered.format.residency import (
    REDUNDANCY,
    REPLICA_KEY,
    STORE_KEY,
    VAULT,
    Fact,
    Observed,
    Verdict,
    stored_fact,
)

ATTESTATION_DAYS_MAX = 90
_BUCKET = ("location", "owner", "not_public", "replication", "encryption", "endpoint", "tls")
REQUIRED = {
    "r2": ("location", "not_public", "replication", "encryption", "endpoint", "tls"),
    "aws": _BUCKET,
    "gcs": _BUCKET,
    "azure": _BUCKET,
    "s3compat": ("location", "not_public", "replication", "encryption", "endpoint", "tls"),
    "posix": ("mount", "not_public", "replication"),
}
"""The facts that have to be allowed, by provider."""
READING = {
    "aws": ("location", "owner", "endpoint", "tls"),
    "gcs": ("location", "owner", "endpoint", "tls"),
    "azure": ("location", "owner", "endpoint", "tls"),
    "s3compat": ("location", "endpoint", "tls"),
    "r2": ("location", "endpoint", "tls"),
    "posix": ("mount",),
}
"""Those of them that count for who only reads: where it is and whose, not who else reads it."""
_NAMED = ("location", "owner", "endpoint", "mount")
"""Facts that say nothing unless they name what the policy can compare."""
_AZURE = r"https://{}\.blob\.core\.windows\.net"
"""The endpoint of a storage account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of target that is allowed."""

    id: str
    provider: str
    partition: str = "aws"
    """Of AWS."""
    regions: tuple[str, ...] = ()
    owner: str | None = None
    """Account that the bucket belongs to; project number of Google; subscription and resource group
    of Azure, with a slash between."""
    key_regions: tuple[str, ...] = ()
    """Where KMS keys may lie; empty: in `regions`."""
    key_accounts: tuple[str, ...] = ()
    """Whose KMS keys; empty: those of `owner`."""
    require_kms: bool = False
    endpoint: str | None = None
    """Of a compatible store, or another than a provider's own: scheme, host and port."""
    jurisdiction: str | None = None
    """Of R2: what its host names."""
    account: str | None = None
    """Of R2: the other part of its host; of Azure: the storage account, None for any of `owner`."""
    redundancy: tuple[str, ...] = ()
    """Of Azure: what a storage account may be; empty: any, as long as its places are allowed."""
    key_vaults: tuple[str, ...] = ()
    """Of Azure: host names of key vaults that customers' keys may be in."""
    site_id: str | None = None
    """What the marker file of a mount has to say."""
    fstype: str | None = None
    source: str | None = None
    """Device or server of a mount, as in `/proc/self/mountinfo`."""

    def place(self, region: str) -> str:
        """Return a region as facts name it."""
        return f"{self.partition if self.provider == 'aws' else self.provider}:{region}"

    @property
    def locations(self) -> tuple[str, ...]:
        """Return the regions, which Google and Azure call locations."""
        return self.regions

    def places(self) -> frozenset[str]:
        """Return the regions as facts name them."""
        regions = self.regions if self.jurisdiction is None else (self.jurisdiction,)
        return frozenset(self.place(region) for region in regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """A person answers for one unknown fact of one target."""

    target: str
    fact: str
    by: str
    reason: str
    expires: datetime

    def why_not(self, now: datetime) -> str | None:
        """Return why it does not count, None when it does."""
        if self.expires <= now:
            return "has expired"
        if self.expires > now + timedelta(days=ATTESTATION_DAYS_MAX):
            return f"expires more than {ATTESTATION_DAYS_MAX} days from now"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is allowed, and for how long a look is believed."""

    allow: tuple[Rule, ...]
    attestations: tuple[Attestation, ...] = ()
    ttl_s: float = 300.0
    sha256: str = ""
    """Of the policy as canonical JSON."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """The policy as plain data, jurisdictions written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A fact, what the policy makes of it, and who answers for it."""

    fact: Fact
    attestation: Attestation | None = None
    note: str = ""
    """Why an attestation that is there does not count."""

    def is_allowed(self) -> bool:
        """Tell whether this fact keeps nothing from leaving."""
        verdict = self.fact.verdict
        attested = verdict is Verdict.UNKNOWN and self.attestation is not None
        return verdict is Verdict.ALLOW or attested


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a target is allowed, and why."""

    policy_sha256: str
    target: str
    rule: str | None
    """Id of the rule that was applied: of several, the one that the target misses least."""
    judged: tuple[Judged, ...]
    at: datetime

    @property
    def allowed(self) -> bool:
        """Tell whether bytes may go there."""
        return self.rule is not None and all(one.is_allowed() for one in self.judged)

    def against(self) -> list[Judged]:
        """Return what speaks against it."""
        return [one for one in self.judged if not one.is_allowed()]

    def may_pass(self) -> bool:
        """Tell whether all that speaks against it is a store that did not answer."""
        against = self.against()
        return bool(against) and all(
            one.fact.verdict is Verdict.UNKNOWN and one.fact.transient for one in against
        )

    def stored(self) -> dict[str, Any]:
        """Return what a commit record keeps."""
        vouched = [one.attestation for one in self.judged if one.attestation is not None]
        return {
            "policy_sha256": self.policy_sha256,
            "target": self.target,
            "rule": self.rule,
            "checked_at": self.at.isoformat(timespec="seconds"),
            "facts": [stored_fact(one.fact) for one in self.judged],
            "attestations": [
                {"fact": a.fact, "by": a.by, "reason": a.reason, "expires": a.expires.isoformat()}
                for a in vouched
            ],
        }


def decide(
    policy: Policy,
    facts: Observed,
    attestations: Sequence[Attestation],
    now: datetime,
    required: Mapping[str, Sequence[str]] = REQUIRED,
) -> Decision:
    """Decide whether a target is allowed.

    Args:
        policy: What is allowed.
        facts: What was seen.
        attestations: Who answers for what.
        now: With a time zone.
        required: Facts that have to be known, by provider.
    """
    now = now.astimezone(UTC)
    rules: list[Rule | None] = [one for one in policy.allow if one.provider == facts.provider]
    # Without a rule nothing is judged by one: then the facts are shown as they are.
    needed = required.get(facts.provider, ())
    tried = [
        (rule, _apply(policy, rule, needed, facts, attestations, now)) for rule in rules or [None]
    ]
    rule, judged = min(tried, key=lambda pair: sum(not one.is_allowed() for one in pair[1]))
    return Decision(
        policy_sha256=policy.sha256,
        target=facts.target,
        rule=rule.id if rule is not None else None,
        judged=judged,
        at=now,
    )


def _apply(
    policy: Policy,
    rule: Rule | None,
    required: Sequence[str],
    seen: Observed,
    attestations: Sequence[Attestation],
    now: datetime,
) -> tuple[Judged, ...]:
    facts = list(seen.facts)
    have = {fact.name for fact in facts}
    needed = list(required)
    if rule is not None and rule.owner and "owner" not in needed:
        needed.append("owner")
    facts += [
        Fact(name=name, verdict=Verdict.UNKNOWN, evidence="not looked at")
        for name in needed
        if name not in have
    ]
    judged = facts if rule is None else [_judge(policy, rule, fact) for fact in facts]
    return tuple(_attest(fact, seen.target, attestations, now) for fact in judged)


def _judge(policy: Policy, rule: Rule, fact: Fact) -> Fact:
    """Return a fact with what the policy makes of its values."""
    if fact.verdict is Verdict.ALLOW and fact.name in _NAMED and not fact.values:
        return replace(fact, verdict=Verdict.UNKNOWN, evidence=f"{fact.evidence}; names nothing")
    if fact.name == "mount":
        return _judge_mount(rule, fact)
    bad = [value for value in fact.values if not _is_listed(policy, rule, fact, value)]
    if not bad:
        return fact
    evidence = f"not in the policy: {', '.join(bad)}; {fact.evidence}"
    return replace(fact, verdict=Verdict.DENY, evidence=evidence, transient=False)


def _is_listed(policy: Policy, rule: Rule, fact: Fact, value: str) -> bool:
    name = fact.name
    if name == "location":
        # A compatible store that is allowed by its endpoint may have no regions at all.
        return value in rule.places() or (rule.provider == "s3compat" and not rule.regions)
    if name == "owner":
        return rule.owner in (None, value)
    if name == "endpoint":
        return value in rule.places() if rule.provider == "aws" else _is_endpoint(rule, value)
    if name == "replication":
        if value.startswith(REDUNDANCY):
            return not rule.redundancy or value.removeprefix(REDUNDANCY) in rule.redundancy
        return any(_is_replica_listed(other, fact, value) for other in policy.allow)
    if name == "encryption":
        return not rule.require_kms if value == STORE_KEY else _is_key_listed(rule, value)
    return True


def _is_endpoint(rule: Rule, value: str) -> bool:
    """Tell whether a rule means an endpoint: the one that it names, else one of the provider."""
    if rule.endpoint is not None:
        return value == rule.endpoint
    if rule.provider == "azure":
        return re.fullmatch(_AZURE.format(rule.account or "[a-z0-9]+"), value) is not None
    return value in rule.places()


def _is_replica_listed(rule: Rule, fact: Fact, value: str) -> bool:
    """Tell whether a rule allows a copy, or the key of one; whose it is counts as where it is."""
    if value.startswith(REPLICA_KEY):
        return _is_key_listed(rule, value.removeprefix(REPLICA_KEY))
    place, _, account = value.partition("/")
    is_open = rule.owner is None or fact.verdict is Verdict.UNKNOWN  # and stays unknown
    return place in rule.places() and (account == rule.owner if account else is_open)


def _is_key_listed(rule: Rule, value: str) -> bool:
    if value.startswith(VAULT):
        return value.removeprefix(VAULT) in rule.key_vaults
    place, _, account = value.partition("/")
    regions = rule.key_regions or rule.regions
    accounts = rule.key_accounts or ((rule.owner,) if rule.owner else ())
    return place in {rule.place(region) for region in regions} and account in accounts


def _judge_mount(rule: Rule, fact: Fact) -> Fact:
    """Compare what a mount says of itself: each thing that the rule names has to be the same."""
    said = dict(value.split("=", 1) for value in fact.values if "=" in value)
    for name in ("fstype", "source", "site_id"):
        wanted, found = getattr(rule, name), said.get(name)
        if wanted is not None and found is not None and wanted != found:
            evidence = f"{name} is {found!r}, not {wanted!r}; {fact.evidence}"
            return replace(fact, verdict=Verdict.DENY, evidence=evidence)
        if wanted is not None and found is None and fact.verdict is Verdict.ALLOW:
            evidence = f"{name} is not known; {fact.evidence}"
            return replace(fact, verdict=Verdict.UNKNOWN, evidence=evidence)
    return fact


def _attest(fact: Fact, target: str, attestations: Sequence[Attestation], now: datetime) -> Judged:
    """Fill an unknown fact with an attestation that is about exactly it."""
    if fact.verdict is not Verdict.UNKNOWN:
        return Judged(fact=fact)
    note = ""
    for one in attestations:
        if (one.target, one.fact) == (target, fact.name):
            why_not = one.why_not(now)
            if why_not is None:
                return Judged(fact=fact, attestation=one)
            note = f"the attestation by {one.by} {why_not}"
    return Judged(fact=fact, note=note)
