"""I10: nothing that is denied, or unknown and not answered for, is ever allowed."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.format.residency import FACTS, Fact, Observed, Verdict
from dcp_tiered.policy.residency import REQUIRED, Attestation, Policy, Rule, decide

NOW = datetime(2026, 11, 30, tzinfo=UTC)
TARGETS = ["s3://ckpt", "s3://other"]
ACCOUNTS = ["123456789012", "999999999999"]
PLACES = ["eu-central-1", "eu-west-2", "us-east-2"]
LOCATED = ["gcs", "azure"]
REDUNDANCIES = ["Standard_ZRS", "Standard_GRS"]
VALUES = st.sampled_from(
    [f"{kind}:{place}" for kind in ("aws", "s3compat", *LOCATED) for place in PLACES]
    + [f"{key}aws:{place}/{a}" for key in ("", "key ") for place in PLACES for a in ACCOUNTS]
    + [f"{kind}:{place}/{a}" for kind in LOCATED for place in PLACES for a in ACCOUNTS]
    + [f"redundancy {kind}" for kind in REDUNDANCIES]
    + ["vault mine.vault.azure.net", "vault theirs.vault.azure.net"]
    + [f"https://{name}.blob.core.windows.net" for name in ("mine", "theirs")]
    + ["https://mine.blob.core.windows.net.example", "r2:eu", "r2:fedramp"]
    + [*ACCOUNTS, "key of the store", "https://s3.example", "site_id=fra", "site_id=muc"]
)
FACT = st.builds(
    Fact,
    name=st.sampled_from(FACTS),
    verdict=st.sampled_from(list(Verdict)),
    evidence=st.just("seen"),
    values=st.lists(VALUES, max_size=2).map(tuple),
    transient=st.booleans(),
)
OBSERVED = st.builds(
    Observed,
    target=st.sampled_from(TARGETS),
    provider=st.sampled_from([*REQUIRED, "gdrive"]),
    facts=st.lists(FACT, max_size=10).map(tuple),
)
RULE = st.builds(
    Rule,
    id=st.just("r"),
    provider=st.sampled_from(list(REQUIRED)),
    regions=st.lists(st.sampled_from(PLACES), max_size=2).map(tuple),
    owner=st.none() | st.sampled_from(ACCOUNTS),
    key_accounts=st.lists(st.sampled_from(ACCOUNTS), max_size=1).map(tuple),
    require_kms=st.booleans(),
    endpoint=st.none() | st.just("https://s3.example"),
    jurisdiction=st.none() | st.just("eu"),
    site_id=st.none() | st.just("fra"),
    account=st.none() | st.just("mine"),
    redundancy=st.lists(st.sampled_from(REDUNDANCIES), max_size=1).map(tuple),
    key_vaults=st.lists(st.just("mine.vault.azure.net"), max_size=1).map(tuple),
)
ATTESTATION = st.builds(
    Attestation,
    target=st.sampled_from(TARGETS),
    fact=st.sampled_from(FACTS),
    by=st.just("alice"),
    reason=st.just("seen it"),
    expires=st.integers(-100, 200).map(lambda days: NOW + timedelta(days=days)),
)
POLICY = st.builds(Policy, allow=st.lists(RULE, min_size=1, max_size=3).map(tuple))


def counts(attestation: Attestation, target: str, fact: str) -> bool:
    """Say in other words than the code when an attestation counts."""
    days = (attestation.expires - NOW).days
    return (attestation.target, attestation.fact) == (target, fact) and 0 < days <= 90


def places_of(rule: Rule) -> tuple[str, ...]:
    return (rule.jurisdiction,) if rule.jurisdiction else rule.regions


def may_hold_a_replica(policy: Policy, value: str, verdict: Verdict) -> bool:
    """Say in other words than the code where a replica, or its key, may be and whose."""
    is_key, value = value.startswith("key "), value.removeprefix("key ")
    where, _, account = value.partition("/")
    for rule in policy.allow:
        prefix = "aws" if rule.provider == "aws" else rule.provider
        regions = (rule.key_regions or rule.regions) if is_key else places_of(rule)
        accounts = set(rule.key_accounts if is_key else ()) or {rule.owner}
        whose = account in accounts if account else verdict is Verdict.UNKNOWN
        whose = whose or (not is_key and not account and rule.owner is None)
        if where in {f"{prefix}:{region}" for region in regions} and whose:
            return True
    return False


def may_be_in_a_cloud(rules: list[Rule], fact: Fact, value: str) -> bool:
    """Say in other words than the code what a value of Google or Azure has to be."""
    kind, _, said = value.partition(" ")
    if fact.name == "location":
        return value in {f"{rule.provider}:{place}" for rule in rules for place in rule.regions}
    if fact.name == "endpoint" and rules[0].provider == "azure":
        owned = [f"https://{rule.account or 'theirs'}." for rule in rules]
        named = value in {rule.endpoint for rule in rules}
        return named or (value.startswith(("https://mine.", *owned)) and value.endswith(".net"))
    if fact.name == "replication" and kind == "redundancy":
        return any(said in (rule.redundancy or REDUNDANCIES) for rule in rules)
    if fact.name == "encryption" and kind == "vault":
        return any(said in rule.key_vaults for rule in rules)
    return True


@given(st.sampled_from(["", "key "]), st.sampled_from(PLACES), st.sampled_from(ACCOUNTS))
def test_a_replica_is_allowed_where_and_with_whom_a_rule_says(kind, place, account):
    rule = Rule(id="r", provider="aws", regions=("eu-central-1",), owner=ACCOUNTS[0])
    facts = tuple(
        Fact(
            name=name,
            verdict=Verdict.ALLOW,
            evidence="seen",
            values=(f"{kind}aws:{place}/{account}",) if name == "replication" else values,
        )
        for name, values in GOOD.items()
    )
    seen = Observed(target="s3://ckpt", provider="aws", facts=facts)
    expected = (place, account) == ("eu-central-1", ACCOUNTS[0])
    assert decide(Policy(allow=(rule,)), seen, (), NOW).allowed is expected


@given(POLICY, OBSERVED, st.lists(ATTESTATION, max_size=6))
def test_nothing_denied_or_unknown_is_allowed(policy, seen, attestations):
    if not decide(policy, seen, attestations, NOW).allowed:
        return
    vouched = {name for name in FACTS for a in attestations if counts(a, seen.target, name)}
    assert all(fact.verdict is not Verdict.DENY for fact in seen.facts)
    for fact in seen.facts:
        assert fact.verdict is Verdict.ALLOW or fact.name in vouched
    for name in REQUIRED[seen.provider]:
        assert name in vouched or any(fact.name == name for fact in seen.facts)
    rules = [rule for rule in policy.allow if rule.provider == seen.provider]
    assert rules
    for fact in seen.facts:
        for value in fact.values:
            if fact.name == "location" and seen.provider == "aws":
                assert value.removeprefix("aws:") in {r for rule in rules for r in rule.regions}
            if fact.name == "location" and seen.provider == "r2":
                assert value in {f"r2:{place}" for rule in rules for place in places_of(rule)}
            if seen.provider in LOCATED:
                assert may_be_in_a_cloud(rules, fact, value)
            if fact.name == "replication" and not value.startswith("redundancy "):
                assert may_hold_a_replica(policy, value, fact.verdict)
            if fact.name == "owner" and seen.provider == "aws" and all(r.owner for r in rules):
                assert value in {rule.owner for rule in rules}


@given(POLICY, OBSERVED, st.lists(ATTESTATION, max_size=6), FACT)
def test_one_more_bad_fact_never_helps(policy, seen, attestations, fact):
    more = Observed(target=seen.target, provider=seen.provider, facts=(*seen.facts, fact))
    have = {one.name for one in seen.facts}
    if fact.name in have and decide(policy, more, attestations, NOW).allowed:
        assert decide(policy, seen, attestations, NOW).allowed


MINE, OURS = "https://mine.blob.core.windows.net", ("azure:eu-central-1", "azure:eu-west-2")


@given(
    st.lists(st.sampled_from(PLACES), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(REDUNDANCIES), max_size=2, unique=True),
    st.sampled_from(REDUNDANCIES),
    st.booleans(),
)
def test_a_second_place_of_azure_needs_a_name_as_well(places, redundancy, kind, has_second):
    rule = Rule(
        id="r",
        provider="azure",
        regions=tuple(places),
        owner=ACCOUNTS[0],
        redundancy=tuple(redundancy),
    )
    copies = (f"redundancy {kind}", *([f"{OURS[1]}/{ACCOUNTS[0]}"] if has_second else ()))
    facts = {"location": OURS[:1], "owner": ACCOUNTS[:1], "not_public": (), "replication": copies}
    facts |= {"encryption": ("key of the store",), "endpoint": (MINE,), "tls": ()}
    seen = Observed(
        target="az://mine/ckpt",
        provider="azure",
        facts=tuple(
            Fact(name=name, verdict=Verdict.ALLOW, evidence="seen", values=tuple(values))
            for name, values in facts.items()
        ),
    )
    expected = PLACES[0] in places and kind in (redundancy or REDUNDANCIES)
    expected = expected and (PLACES[1] in places or not has_second)
    assert decide(Policy(allow=(rule,)), seen, (), NOW).allowed is expected


GOOD = {
    "location": ("aws:eu-central-1",),
    "owner": (ACCOUNTS[0],),
    "not_public": (),
    "replication": (),
    "encryption": ("key of the store",),
    "endpoint": ("aws:eu-central-1",),
    "tls": (),
}


@given(
    st.fixed_dictionaries({name: st.sampled_from(list(Verdict)) for name in GOOD})
    | st.just(dict.fromkeys(GOOD, Verdict.ALLOW)),
    st.lists(ATTESTATION, max_size=8),
)
def test_it_is_allowed_when_every_fact_is_or_is_answered_for(verdicts, attestations):
    """The other half: the rule refuses nothing that it should allow, so the first is not empty."""
    rule = Rule(id="r", provider="aws", regions=("eu-central-1",), owner=ACCOUNTS[0])
    facts = tuple(
        Fact(name=name, verdict=verdict, evidence="seen", values=GOOD[name])
        for name, verdict in verdicts.items()
    )
    seen = Observed(target="s3://ckpt", provider="aws", facts=facts)
    vouched = {name for name in FACTS for a in attestations if counts(a, "s3://ckpt", name)}
    expected = all(
        verdict is Verdict.ALLOW or (verdict is Verdict.UNKNOWN and name in vouched)
        for name, verdict in verdicts.items()
    )
    assert decide(Policy(allow=(rule,)), seen, attestations, NOW).allowed is expected
