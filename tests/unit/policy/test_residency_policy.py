"""Rules, attestations and the schema of a residency policy."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest

from dcp_tiered.errors import InvalidError
from dcp_tiered.format.residency import Fact, Observed, Verdict, read_evidence
from dcp_tiered.policy.residency import decide
from dcp_tiered.policy.residency_audit import judge_again
from dcp_tiered.policy.residency_schema import parse

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
ACCOUNT = "123456789012"
SHORT = {"allow": ["aws:eu-central-1"], "owner": ACCOUNT}
GOOD = {
    "location": ("aws:eu-central-1",),
    "owner": (ACCOUNT,),
    "not_public": (),
    "replication": (),
    "encryption": ("key of the store",),
    "endpoint": ("aws:eu-central-1",),
    "tls": (),
}


def seen(target="s3://ckpt", provider="aws", verdicts=None, **values):
    verdicts = verdicts or {}
    facts = (GOOD if provider == "aws" else {}) | values
    return Observed(
        target=target,
        provider=provider,
        facts=tuple(
            Fact(
                name=name,
                verdict=Verdict(verdicts.get(name, "ALLOW")),
                evidence="seen",
                values=tuple(found),
            )
            for name, found in facts.items()
        ),
    )


def allowed(policy, observed, now=NOW):
    parsed = parse(policy)
    return decide(parsed, observed, parsed.attestations, now).allowed


def test_what_is_named_is_allowed_and_nothing_else():
    assert allowed(SHORT, seen())
    for name, value in {
        "location": "aws:eu-west-1",
        "owner": "999999999999",
        "replication": "aws:us-east-1",
        "encryption": "aws:us-east-1/123456789012",
        "endpoint": "aws:us-east-2",
    }.items():
        assert not allowed(SHORT, seen(**{name: (value,)})), name


@pytest.mark.parametrize("region", ["eu-west-2", "eu-central-2", "eu-new-1", "us-east-1"])
def test_eu_is_a_list_and_no_prefix(region):
    """T10: London and Zurich are not in it."""
    policy = {"allow": ["aws:EU"], "owner": ACCOUNT}
    place = (f"aws:{region}",)
    assert not allowed(policy, seen(location=place, endpoint=place))


@pytest.mark.parametrize("region", ["eu-central-1", "eu-west-1", "eu-west-3", "eu-north-1"])
def test_eu_has_its_regions(region):
    place = (f"aws:{region}",)
    assert allowed({"allow": ["aws:EU"], "owner": ACCOUNT}, seen(location=place, endpoint=place))


def test_keys_of_other_accounts_and_regions_have_to_be_named():
    rule = {"provider": "aws", "regions": ["eu-central-1"], "owner": ACCOUNT}
    theirs = seen(encryption=("aws:eu-west-1/999999999999",))
    assert not allowed({"allow": [rule]}, theirs)
    named = rule | {"key_regions": ["eu-west-1"], "key_accounts": ["999999999999"]}
    assert allowed({"allow": [named]}, theirs)
    assert allowed({"allow": [rule]}, seen())
    assert not allowed({"allow": [rule | {"require_kms": True}]}, seen())


def test_a_replica_may_lie_where_another_rule_allows():
    other = {"provider": "aws", "regions": ["eu-west-1"], "owner": "999999999999"}
    rule = {"provider": "aws", "regions": ["eu-central-1"], "owner": ACCOUNT}
    replicated = seen(replication=("aws:eu-west-1/999999999999",))
    assert allowed({"allow": [rule, other]}, replicated)
    assert not allowed({"allow": [rule]}, replicated)


@pytest.mark.parametrize(
    ("value", "good"),
    [
        (f"aws:eu-central-1/{ACCOUNT}", True),
        ("aws:eu-central-1/999999999999", False),
        ("aws:eu-central-1", False),
        (f"aws:us-east-2/{ACCOUNT}", False),
        (f"key aws:eu-central-1/{ACCOUNT}", True),
        ("key aws:eu-central-1/999999999999", False),
        (f"key aws:us-east-2/{ACCOUNT}", False),
    ],
)
def test_a_replica_counts_by_region_and_account_and_so_does_its_key(value, good):
    assert allowed(SHORT, seen(replication=(value,))) is good


def test_a_replica_of_an_unknown_account_is_answered_for_but_not_its_region():
    for value, good in (("aws:eu-central-1", True), ("aws:us-east-2", False)):
        unknown = seen(verdicts={"replication": "UNKNOWN"}, replication=(value,))
        assert not allowed(SHORT, unknown)
        assert allowed(with_attestation(), unknown) is good


R2_ACCOUNT = "0123456789abcdef0123456789abcdef"
R2 = {"allow": [{"provider": "r2", "jurisdiction": "eu", "account": R2_ACCOUNT}]}
R2_HOST = f"https://{R2_ACCOUNT}.eu.r2.cloudflarestorage.com"


def r2_bucket(verdicts=None, **values):
    facts = {
        "location": ("r2:eu",),
        "not_public": (),
        "replication": (),
        "encryption": ("key of the store",),
        "endpoint": (R2_HOST,),
        "tls": (),
    }
    return seen(f"{R2_HOST}/ckpt", "r2", verdicts, **(facts | values))


def test_r2_is_allowed_by_the_host_of_its_jurisdiction():
    assert parse(R2).allow[0].endpoint == R2_HOST
    assert allowed(R2, r2_bucket())
    assert not allowed(R2, r2_bucket(location=("r2:fedramp",)))
    assert not allowed(R2, r2_bucket({"location": "UNKNOWN"}, location=()))
    for host in (R2_HOST.replace(".eu.", "."), R2_HOST.replace("0123", "9999")):
        assert not allowed(R2, r2_bucket(endpoint=(host,)))


def test_what_a_commit_keeps_of_r2_is_held_to_rules_for_r2_again():
    policy = parse(R2)
    decision = decide(policy, r2_bucket(), (), NOW)
    evidence = read_evidence({**decision.stored(), "checked_at": NOW.isoformat()})
    assert evidence.observed.provider == "r2"
    assert judge_again(policy, evidence, NOW).allowed
    assert not judge_again(parse(SHORT), evidence, NOW).allowed
    elsewhere = r2_bucket(endpoint=("https://minio",))
    assert not judge_again(policy, replace(evidence, observed=elsewhere), NOW).allowed


def test_a_jurisdiction_of_r2_is_no_compatible_store():
    rule = {"provider": "s3compat", "endpoint": R2_HOST, "regions": ["auto"], "owner": ACCOUNT}
    with pytest.raises(InvalidError, match="provider is 'r2'"):
        parse({"allow": [rule]})
    for endpoint in (R2_HOST.replace(".eu.", "."), f"{R2_HOST}.example.org"):
        assert parse({"allow": [{**rule, "endpoint": endpoint}]}).allow[0].endpoint == endpoint


@pytest.mark.parametrize(
    "change",
    [
        {"jurisdiction": "default"},
        {"jurisdiction": None},
        {"account": "acct"},
        {"account": None},
        {"endpoint": R2_HOST},
    ],
    ids=str,
)
def test_r2_without_jurisdiction_or_account_is_no_rule(change):
    rule = {**R2["allow"][0], **change}
    with pytest.raises(InvalidError):
        parse({"allow": [{key: value for key, value in rule.items() if value is not None}]})


ATTESTED = {
    "target": "s3://ckpt",
    "fact": "replication",
    "by": "alice@example.org",
    "reason": "looked at the console",
    "expires": "2027-01-31",
}


def with_attestation(**changes):
    return SHORT | {"attestations": [ATTESTED | changes]}


def test_an_attestation_fills_one_unknown_of_one_target():
    unknown = seen(verdicts={"replication": "UNKNOWN"})
    assert not allowed(SHORT, unknown)
    assert allowed(with_attestation(), unknown)
    assert not allowed(with_attestation(), seen(verdicts={"owner": "UNKNOWN"}))
    assert not allowed(
        with_attestation(), seen(target="s3://ckpt2", verdicts={"replication": "UNKNOWN"})
    )


def test_an_attestation_never_overrides_what_was_seen():
    """T9."""
    assert not allowed(with_attestation(), seen(verdicts={"replication": "DENY"}))
    contradicted = seen(verdicts={"replication": "UNKNOWN"}, replication=("aws:us-east-1",))
    assert not allowed(with_attestation(), contradicted)


@pytest.mark.parametrize(
    ("days", "counts"), [(-1, False), (0, False), (1, True), (90, True), (91, False), (900, False)]
)
def test_an_attestation_counts_for_90_days_at_most(days, counts):
    unknown = seen(verdicts={"replication": "UNKNOWN"})
    expires = NOW + timedelta(days=days)
    parsed = parse(with_attestation(expires=expires.isoformat()))
    decision = decide(parsed, unknown, parsed.attestations, NOW)
    assert decision.allowed is counts
    if not counts:
        assert "alice@example.org" in decision.against()[0].note


def test_a_mount_is_known_by_its_site():
    rule = {"provider": "posix", "site_id": "fra-lus-1", "fstype": "lustre"}
    mount = ("site_id=fra-lus-1", "fstype=lustre", "source=10.0.0.1@o2ib:/fs1")
    rest = {"not_public": (), "replication": ()}
    assert allowed({"allow": [rule]}, seen("file:///l", "posix", mount=mount, **rest))
    for bad in (("site_id=muc", "fstype=lustre"), ("site_id=fra-lus-1", "fstype=ext4")):
        assert not allowed({"allow": [rule]}, seen("file:///l", "posix", mount=bad, **rest))
    copied = seen("file:///l", "posix", mount=("fstype=lustre",), **rest)
    assert not allowed({"allow": [rule]}, copied)


def test_a_provider_without_a_rule_is_refused():
    decision = decide(parse(SHORT), seen(provider="s3compat"), (), NOW)
    assert not decision.allowed
    assert decision.rule is None


def test_the_hash_is_that_of_what_is_meant():
    long = {
        "allow": [
            {"provider": "aws", "regions": ["eu-central-1"], "owner": ACCOUNT, "id": "aws-aws"}
        ]
    }
    assert parse(SHORT).sha256 == parse(long).sha256
    assert parse(SHORT).sha256 != parse({"allow": ["aws:eu-west-1"], "owner": ACCOUNT}).sha256
    again = parse(parse(with_attestation()).plain)
    assert again == parse(with_attestation())
    as_date = with_attestation(expires=date(2027, 1, 31))
    assert parse(as_date).sha256 == parse(with_attestation()).sha256


TOML = """\
ttl_s = 60

[[allow]]
provider = "aws"
jurisdictions = ["EU"]
owner = "123456789012"

[[allow]]
provider = "s3compat"
endpoint = "https://s3.dc1.example/"

[[attestations]]
target = "https://s3.dc1.example/ckpt"
fact = "location"
by = "alice"
reason = "it is in the room next door"
expires = 2027-01-31
"""


def test_a_toml_file():
    policy = parse(TOML)
    assert policy.ttl_s == 60
    assert "eu-west-1" in policy.allow[0].regions
    assert policy.allow[1].endpoint == "https://s3.dc1.example"
    assert policy.attestations[0].expires == datetime(2027, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("old", "new", "key", "line"),
    [
        ('owner = "123456789012"', 'owner = "12345"', "allow[0].owner", 6),
        ("ttl_s = 60", "ttl_s = 0", "ttl_s", 1),
        ('endpoint = "https://s3.dc1.example/"', 'endpoint = "s3.dc1"', "allow[1].endpoint", 10),
        ('fact = "location"', 'fact = "weather"', "attestations[0].fact", 14),
        ("expires = 2027-01-31", 'expires = "soon"', "attestations[0].expires", 17),
        ('jurisdictions = ["EU"]', 'jurisdictions = ["DE"]', "'DE'", 3),
        ('jurisdictions = ["EU"]', 'regions = ["eu-*"]', "allow[0].regions", 5),
        ('by = "alice"\n', "", "attestations[0].by", 12),
        ("[[attestations]]", "[[attestation]]", "attestation", 1),
        ('provider = "aws"', 'provider = "gdrive"', "allow[0].provider", 4),
        ("ttl_s = 60", "ttl_s =", "line 1", 1),
    ],
)
def test_a_mistake_is_named_with_its_line(old, new, key, line):
    with pytest.raises(InvalidError) as raised:
        parse(TOML.replace(old, new))
    assert key in raised.value.message
    assert f"line {line}" in raised.value.message


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"allow": []},
        {"allow": ["aws:eu-central-1"]},
        {"allow": ["eu-central-1"], "owner": ACCOUNT},
        {"allow": ["s3compat:x"], "owner": ACCOUNT},
        {"allow": ["aws:*"], "owner": ACCOUNT},
        {"allow": ["aws:"], "owner": ACCOUNT},
        SHORT | {"allow_unknown": True},
        SHORT | {"version": 2},
        {"allow": [{"provider": "posix"}]},
        {"allow": [{"provider": "s3compat"}]},
        {
            "allow": [
                "aws:eu-central-1",
                {"provider": "aws", "regions": ["eu-central-1"], "owner": "999999999999"},
            ],
            "owner": ACCOUNT,
        },
    ],
    ids=str,
)
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(InvalidError):
        parse(policy)
