"""What each answer of Google and Azure says about a bucket, and where requests may go."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError

from dcp_tiered import config, stack
from dcp_tiered.errors import InvalidError, ResidencyError, TieredError
from dcp_tiered.format.residency import Fact
from dcp_tiered.policy.residency import decide
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.support import clouds as played
from tests.support.amazon import Fault
from tests.support.clouds import AZURE, DENIED, DOWN, GARBLED, GOOGLE, SILENT, Clouds

GCS = {"provider": "gcs", "locations": ["EUROPE-WEST3"], "owner": played.PROJECT}
AZ = {"provider": "azure", "locations": ["Germany West Central"], "owner": played.OWNER}
RULES = {"gs": GCS, "az": AZ}
FAULTS = [DENIED, DOWN, SILENT, GARBLED, Fault(501, body="{}")]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Clouds]:
    with Clouds(tmp_path_factory.mktemp("clouds")) as clouds:
        yield clouds


@pytest.fixture
def clouds(server: Clouds, monkeypatch) -> Clouds:
    server.forget()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


_made: list[ObjectStoreTier] = []
_kept: dict[tuple[str, str | None], ObjectStoreTier] = {}
"""Who looks most often logs in once."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


@pytest.fixture(scope="module", autouse=True)
def _closed_at_last() -> Iterator[None]:
    yield
    while _kept:
        _kept.popitem()[1].close()


def tier(
    protocol: str, rule: dict[str, Any] | None = None, *, is_held: bool = True, **options: Any
) -> ObjectStoreTier:
    given = played.google_options() if protocol == "gs" else played.azure_options()
    limits = config.Limits(request_timeout_s=1, request_retry_s=1)
    run = config.settings(
        f"tiered::{protocol}://{played.BUCKET}/run",
        options={protocol: given | options},
        residency={"allow": [rule or RULES[protocol]]} if is_held else None,
        limits=limits,
    )
    made = stack.durable_tier(run)
    assert isinstance(made, ObjectStoreTier)
    _made.append(made)
    return made


def look(protocol: str, rule: dict[str, Any] | None = None) -> dict[str, Fact]:
    """Return every fact as the policy judges it, by name."""
    policy = parse({"allow": [rule or RULES[protocol]]})
    key = (protocol, rule and rule.get("endpoint"))
    if key not in _kept:
        _kept[key] = tier(protocol, rule)
        _made.remove(_kept[key])
    seen = _kept[key].observe()
    assert len({fact.name for fact in seen.facts}) == len(seen.facts)
    decision = decide(policy, seen, (), datetime.now(UTC))
    return {one.fact.name: one.fact for one in decision.judged}


def bad(facts: dict[str, Fact]) -> dict[str, str]:
    return {n: f.verdict.value for n, f in facts.items() if f.verdict.value != "ALLOW"}


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_what_is_as_it_should_be_is_allowed(clouds: Clouds, protocol: str):
    tier(protocol).observe()
    facts = look(protocol)
    assert bad(facts) == {}
    assert set(facts) == {
        *("location", "owner", "not_public", "replication", "encryption", "endpoint", "tls")
    }
    hosts = {GOOGLE} if protocol == "gs" else {played.ARM, played.LOGIN}
    assert {seen.host for seen in clouds.log} == hosts
    assert not any(clouds.body_bytes[host] for host in (GOOGLE, AZURE, played.ARM))


QUESTIONS = {
    "layout": ("gs", {"location", "replication"}, "storage.objects.list"),
    "bucket": ("gs", {"owner", "not_public", "encryption"}, "storage.buckets.get"),
    "account": (
        "az",
        {"location", "owner", "not_public", "replication", "encryption", "tls"},
        "Microsoft.Storage/storageAccounts/read",
    ),
    "replicas": (
        "az",
        {"replication"},
        "Microsoft.Storage/storageAccounts/objectReplicationPolicies/read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=["denied", "down", "silent", "garbled", "unknown"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_not_answered_is_unknown(clouds: Clouds, question: str, fault: Fault):
    protocol, names, permission = QUESTIONS[question]
    clouds.faults[question] = fault
    facts = look(protocol)
    is_transient = fault in (DOWN, SILENT)
    if question == "layout" and is_transient:  # a store that is down is asked no more
        names = {"location", "owner", "not_public", "replication", "encryption"}
    if question == "account" and not is_transient:
        assert facts["replication"].verdict == "UNKNOWN"
    assert bad(facts) == dict.fromkeys(names, "UNKNOWN")
    for name in names:
        assert (permission in facts[name].permission) is (fault is DENIED), name
        assert f"({played.BUCKET if protocol == 'gs' else played.ACCOUNT})" in facts[name].call
        assert facts[name].transient is is_transient, name


def test_a_policy_of_the_bucket_that_nobody_may_read_is_unknown(clouds: Clouds):
    clouds.says["bucket"]["iamConfiguration"]["publicAccessPrevention"] = "inherited"
    clouds.faults["iam"] = DENIED
    fact = look("gs")["not_public"]
    assert (fact.verdict, fact.permission) == ("UNKNOWN", "storage.buckets.getIamPolicy")


def change(clouds: Clouds, question: str, path: str, value: Any) -> None:
    said = clouds.accounts[played.ACCOUNT] if question == "account" else clouds.says[question]
    *inner, last = path.split(".")
    for name in inner:
        said = said.setdefault(name, {})
    if value is None:
        said.pop(last, None)
    else:
        said[last] = value


KEY = "projects/mine/locations/{}/keyRings/r/cryptoKeys/k"
CHANGES = [
    ("gs", "layout", "location", "EUROPE-WEST2", {"location": "DENY"}),
    ("gs", "layout", "location", 7, {"location": "UNKNOWN", "replication": "UNKNOWN"}),
    ("gs", "layout", "locationType", None, {"location": "UNKNOWN"}),
    ("gs", "bucket", "projectNumber", "4712", {"owner": "DENY"}),
    ("gs", "bucket", "projectNumber", None, {"owner": "UNKNOWN"}),
    ("gs", "bucket", "encryption.defaultKmsKeyName", KEY.format("us"), {"encryption": "DENY"}),
    ("gs", "bucket", "encryption.defaultKmsKeyName", "key", {"encryption": "UNKNOWN"}),
    ("gs", "bucket", "iamConfiguration", None, {"not_public": "UNKNOWN"}),
    ("az", "account", "properties.primaryLocation", "uksouth", {"location": "DENY"}),
    ("az", "account", "properties.failoverInProgress", True, {"location": "UNKNOWN"}),
    ("az", "account", "properties.allowBlobPublicAccess", True, {"not_public": "DENY"}),
    ("az", "account", "properties.allowBlobPublicAccess", None, {"not_public": "UNKNOWN"}),
    ("az", "account", "properties.minimumTlsVersion", "TLS1_0", {"tls": "DENY"}),
    ("az", "account", "properties.minimumTlsVersion", None, {"tls": "UNKNOWN"}),
    ("az", "account", "properties.supportsHttpsTrafficOnly", False, {"tls": "DENY"}),
    ("az", "account", "properties.secondaryLocation", "germanynorth", {"replication": "DENY"}),
    ("az", "account", "sku.name", "Standard_NEW", {"replication": "UNKNOWN"}),
    ("az", "account", "properties.encryption.keySource", "Else", {"encryption": "UNKNOWN"}),
    ("az", "replicas", "value", None, {"replication": "UNKNOWN"}),
    ("az", "replicas", "nextLink", "https://x", {"replication": "UNKNOWN"}),
]


@pytest.mark.parametrize(("protocol", "question", "path", "value", "expected"), CHANGES)
def test_what_differs_is_seen(clouds: Clouds, protocol, question, path, value, expected):
    change(clouds, question, path, value)
    assert bad(look(protocol)) == expected


@pytest.mark.parametrize(
    ("prevention", "uniform", "member", "verdict"),
    [
        ("enforced", False, "allUsers", "ALLOW"),
        ("inherited", True, "user:a@example.org", "ALLOW"),
        ("inherited", True, "allUsers", "DENY"),
        ("inherited", True, "allAuthenticatedUsers", "DENY"),
        ("inherited", False, "user:a@example.org", "UNKNOWN"),
        ("inherited", False, "allUsers", "DENY"),
        ("new word", True, "allUsers", "DENY"),
    ],
)
def test_google_is_public_by_what_prevents_it_and_who_is_named(
    clouds: Clouds, prevention, uniform, member, verdict
):
    clouds.says["bucket"]["iamConfiguration"] = {
        "publicAccessPrevention": prevention,
        "uniformBucketLevelAccess": {"enabled": uniform},
    }
    clouds.says["iam"]["bindings"][0]["members"].append(member)
    assert look("gs")["not_public"].verdict == verdict


def test_a_location_of_several_regions_needs_its_name_and_all_of_them(clouds: Clouds):
    both = ["europe-west3", "europe-west4"]
    clouds.says["layout"] = {
        "location": "EU",
        "locationType": "dual-region",
        "customPlacementConfig": {"dataLocations": [name.upper() for name in both]},
    }
    rule = GCS | {"endpoint": f"https://{GOOGLE}"}
    for named, expected in (
        (["eu", *both], {}),
        (["eu", both[0]], {"location": "DENY"}),
        (both, {"location": "DENY"}),
    ):
        assert bad(look("gs", rule | {"locations": named})) == expected
    clouds.says["layout"] = {"location": "EU", "locationType": "multi-region"}
    assert bad(look("gs", rule | {"locations": ["eu"]})) == {"location": "UNKNOWN"}
    assert bad(look("gs", rule | {"locations": both})) == {"location": "DENY"}


def test_a_key_of_google_counts_by_location_and_project(clouds: Clouds):
    change(clouds, "bucket", "encryption.defaultKmsKeyName", KEY.format("europe-west3"))
    assert bad(look("gs")) == {"encryption": "DENY"}
    assert bad(look("gs", GCS | {"key_accounts": ["mine"], "require_kms": True})) == {}
    change(clouds, "bucket", "encryption", None)
    assert bad(look("gs", GCS | {"require_kms": True})) == {"encryption": "DENY"}


def test_a_vault_of_azure_counts_by_its_name(clouds: Clouds):
    change(clouds, "account", "properties.encryption.keySource", "Microsoft.Keyvault")
    uri = {"keyvaulturi": "https://mine.vault.azure.net/"}
    change(clouds, "account", "properties.encryption.keyvaultproperties", uri)
    assert bad(look("az")) == {"encryption": "DENY"}
    assert bad(look("az", AZ | {"key_vaults": ["mine.vault.azure.net"]})) == {}
    assert bad(look("az", AZ | {"key_vaults": ["other.vault.azure.net"]})) == {"encryption": "DENY"}


def test_redundancy_in_two_places_needs_both_and_its_name(clouds: Clouds):
    change(clouds, "account", "sku.name", "Standard_GRS")
    change(clouds, "account", "properties.secondaryLocation", "germanynorth")
    both = AZ | {"locations": ["germanywestcentral", "germanynorth"]}
    assert bad(look("az")) == {"replication": "DENY"}
    assert bad(look("az", both)) == {}
    assert bad(look("az", both | {"redundancy": ["Standard_ZRS"]})) == {"replication": "DENY"}
    assert bad(look("az", both | {"redundancy": ["Standard_GRS"]})) == {}
    assert bad(look("az", AZ | {"redundancy": ["Standard_GRS"]})) == {"replication": "DENY"}


def test_replicas_of_azure_are_followed(clouds: Clouds):
    clouds.accounts["copy"] = played.account("copy")
    clouds.says["replicas"] = played.replicas(played.account_id("copy"))
    assert bad(look("az")) == {}
    clouds.accounts["copy"] = played.account("copy", "eastus")
    assert bad(look("az")) == {"replication": "DENY"}
    clouds.says["replicas"] = played.replicas(played.account_id("copy"), container="other")
    assert bad(look("az")) == {}
    clouds.says["replicas"] = played.replicas(played.account_id("copy"))
    clouds.faults["copy"] = DENIED
    fact = look("az")["replication"]
    assert (fact.verdict, fact.permission) == ("UNKNOWN", "Microsoft.Storage/storageAccounts/read")
    del clouds.faults["copy"]
    clouds.says["replicas"] = played.replicas("copy")  # a name alone may be of any tenant
    assert bad(look("az")) == {"replication": "UNKNOWN"}
    clouds.says["replicas"] = played.replicas(played.account_id("copy"), source="another")
    assert bad(look("az")) == {}
    clouds.accounts["copy"] = played.account("copy") | {"id": played.account_id("copy", "theirs")}
    clouds.says["replicas"] = played.replicas(clouds.accounts["copy"]["id"])
    assert bad(look("az")) == {"replication": "DENY"}


def test_an_account_or_bucket_that_is_not_there_is_no_place(clouds: Clouds):
    del clouds.accounts[played.ACCOUNT]
    assert bad(look("az"))["location"] == "DENY"
    clouds.faults["layout"] = Fault(404, body="{}")
    assert bad(look("gs"))["location"] == "DENY"


def test_with_a_key_alone_azure_is_unknown_and_says_what_to_give(clouds: Clouds):
    clouds.faults["token"] = Fault(401, body='{"error": "invalid_client"}')
    fact = next(f for f in tier("az").observe().facts if f.name == "location")
    assert fact.verdict == "UNKNOWN"
    assert "client_secret" in fact.evidence
    assert not any(seen.host == played.ARM for seen in clouds.log)


class Login:
    """A credential that a user hands over, as azure.identity has them."""

    is_down = False

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        assert scopes == ("https://management.azure.com/.default",)
        if self.is_down:
            raise ClientAuthenticationError("down")
        return AccessToken("t", 2**40)


@pytest.mark.parametrize("began_well", [True, False])
def test_a_login_that_fails_later_is_an_outage_and_no_violation(clouds: Clouds, began_well: bool):
    login = Login()
    asking = tier("az", credential=login)
    if began_well:
        assert {f.verdict.value for f in asking.observe_place().facts} == {"ALLOW"}
    login.is_down = True
    fact = next(f for f in asking.observe().facts if f.name == "location")
    assert (fact.verdict, fact.transient) == ("UNKNOWN", began_well)


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_reader_looks_at_the_place_only(clouds: Clouds, protocol: str):
    seen = tier(protocol).observe_place()
    assert {fact.name for fact in seen.facts} == {"location", "owner", "endpoint", "tls"}
    assert {fact.verdict.value for fact in seen.facts} == {"ALLOW"}


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_without_a_policy_who_may_not_ask_learns_nothing_and_goes_on(clouds: Clouds, protocol: str):
    clouds.says["bucket"]["iamConfiguration"] = {}
    clouds.faults["iam"] = DENIED
    clouds.redirect_to = played.ELSEWHERE  # what Azure is asked is answered with no answer
    options = {"endpoint_url": f"https://{GOOGLE}"} if protocol == "gs" else {}
    fact = tier(protocol, None, is_held=False, **options).look_public()
    assert fact.verdict == "UNKNOWN"


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_redirect_delivers_no_byte(clouds: Clouds, protocol: str):
    clouds.redirect_to = "storage.googleapis.com"
    with pytest.raises(ResidencyError):
        tier(protocol).put("step-1/x", b"secret" * 1000)
    assert clouds.body_bytes["storage.googleapis.com"] == 0
    assert {seen.host for seen in clouds.log} == {GOOGLE if protocol == "gs" else AZURE}


@pytest.mark.parametrize(
    ("protocol", "rule", "options", "error"),
    [
        ("gs", GCS, {"endpoint_url": "https://storage.googleapis.com"}, ResidencyError),
        ("gs", GCS, {"endpoint_url": "http://127.0.0.1:1"}, ResidencyError),
        ("gs", GCS | {"locations": ["europe-west3", "europe-west4"]}, {}, ResidencyError),
        ("gs", AZ, {}, ResidencyError),
        ("gs", GCS, {"token": "anon"}, InvalidError),
        ("az", GCS, {}, ResidencyError),
        ("az", AZ, {"account_host": "elsewhere.example"}, ResidencyError),
        ("az", AZ, {"connection_string": "AccountName=tieredaccount;AccountKey=a2V5;"
                    "BlobEndpoint=http://127.0.0.1:1/tieredaccount"}, ResidencyError),
        ("az", AZ | {"account": "another"}, {}, ResidencyError),
        ("az", AZ, {"account_key": None, "anon": True}, InvalidError),
    ],
)  # fmt: skip
def test_ways_around_are_refused(protocol, rule, options, error):
    with pytest.raises(error):
        tier(protocol, rule, **options)


@pytest.mark.parametrize(
    "text",
    [
        "AccountName=tieredaccount;AccountKey=a2V5",
        "AccountName=tieredaccount;AccountKey=a2V5;EndpointSuffix=core.windows.net",
        f"BlobEndpoint=https://{AZURE}/;SharedAccessSignature=sv=1&sig=x",
    ],
)
def test_a_connection_string_names_account_and_host(clouds: Clouds, text: str):
    seen = tier("az", connection_string=text, account_name=None, account_key=None).observe()
    assert seen.target == f"az://{played.ACCOUNT}/{played.BUCKET}"
    assert {fact.verdict.value for fact in seen.facts} == {"ALLOW"}


def test_an_endpoint_may_be_named(clouds: Clouds):
    """That of several locations, or an emulator's."""
    for rule, options in (
        (GCS | {"locations": ["europe-west3", "eu"]}, {"endpoint_url": f"https://{GOOGLE}"}),
        (GCS | {"endpoint": "http://127.0.0.1:1"}, {}),
        (GCS | {"endpoint": "https://storage.googleapis.com"}, {}),
    ):
        tier("gs", rule, **options)
    text = "AccountName=a;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/a"
    tier("az", AZ | {"endpoint": "http://127.0.0.1:1"}, connection_string=text)


def test_nothing_is_sent_elsewhere_whatever_a_client_is_told(clouds: Clouds):
    """The pin is asked right before each request, so a wrong URL in a client sends nothing."""
    google = tier("gs")._requests._connect()
    google._objects = f"https://{played.ELSEWHERE}/storage/v1/b/{played.BUCKET}/o"
    azure = tier("az")._requests._connect()
    azure._container._client._config.url = f"https://{played.ELSEWHERE}/{played.BUCKET}"
    for client in (google, azure):
        with pytest.raises(TieredError, match="a request was not sent"):
            client.page("run/", "", None)
    assert clouds.log == []
