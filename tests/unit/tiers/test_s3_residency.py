"""What each answer of a store says about a bucket, and where requests may go."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from dcp_tiered.errors import InvalidError, ResidencyError, TieredError
from dcp_tiered.format.residency import Fact
from dcp_tiered.policy.residency import decide
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.tiers import s3_pins
from dcp_tiered.tiers.s3_pins import Pin
from dcp_tiered.tiers.s3_requests import S3Requests
from dcp_tiered.tiers.s3_residency import look_public, observe, observe_place
from tests.support.amazon import (
    ACCOUNT,
    ENFORCED,
    OPEN,
    R2_ACCOUNT,
    Amazon,
    Fault,
    access_list,
    encryption,
    policy_status,
    replication,
)

REGION = "eu-central-1"
PIN = Pin(regions=(REGION,), owner=ACCOUNT)
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234"
ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"
GARBLED = Fault(body="<?xml version='1.0'?><Not<Xml")
DENIED = Fault(403, "AccessDenied")
DOWN = Fault(503, "ServiceUnavailable")
SILENT = Fault(silence_s=2.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Amazon]:
    with Amazon(tmp_path_factory.mktemp("amazon")) as amazon:
        yield amazon


@pytest.fixture
def amazon(server: Amazon) -> Amazon:
    server.buckets.clear()
    server.faults.clear()
    server.account_blocks.clear()
    server.refusing.clear()
    server.log.clear()
    server.body_bytes.clear()
    server.add("ckpt", REGION)
    return server


_made: list[S3Requests] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def requests_to(amazon: Amazon, pin: Pin | None = PIN, bucket="ckpt", **options: Any) -> S3Requests:
    made = S3Requests(
        bucket,
        amazon.options(REGION) | options,
        request_timeout_s=1,
        request_retry_s=1,
        connections_max=4,
        pin=pin,
    )
    _made.append(made)
    return made


def look(amazon: Amazon, pin: Pin = PIN, bucket="ckpt", **options: Any) -> dict[str, Fact]:
    seen = observe(requests_to(amazon, pin, bucket, **options), pin, "run/")
    assert len({fact.name for fact in seen.facts}) == len(seen.facts)
    return {fact.name: fact for fact in seen.facts}


def test_a_good_bucket_is_allowed(amazon: Amazon):
    seen = observe(requests_to(amazon), PIN, "run/")
    policy = parse({"allow": [f"aws:{REGION}"], "owner": ACCOUNT})
    decision = decide(policy, seen, (), datetime.now(UTC))
    assert decision.allowed, decision.against()
    assert seen.target == "s3://ckpt"
    assert amazon.body_bytes.total() == 0


SETTINGS = {
    "policyStatus": ("not_public", "s3:GetBucketPolicyStatus"),
    "publicAccessBlock": ("not_public", "s3:GetBucketPublicAccessBlock"),
    "ownershipControls": ("not_public", "s3:GetBucketOwnershipControls"),
    "replication": ("replication", "s3:GetReplicationConfiguration"),
    "encryption": ("encryption", "s3:GetEncryptionConfiguration"),
    "accelerate": ("endpoint", "s3:GetAccelerateConfiguration"),
}


@pytest.mark.parametrize("fault", [DENIED, DOWN, SILENT, GARBLED, Fault(501, "NotImplemented")])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_not_answered_is_unknown(amazon: Amazon, setting: str, fault: Fault):
    """T5: no permission, 5xx, silence, garbled, not implemented."""
    amazon.faults[setting] = fault
    name, permission = SETTINGS[setting]
    facts = look(amazon)
    assert facts[name].verdict == "UNKNOWN"
    assert facts[name].permission == (permission if fault is DENIED else "")
    # botocore takes a reply that it cannot parse for a failure of the server.
    assert facts[name].transient is (fault in (DOWN, SILENT, GARBLED))
    assert "(Bucket=ckpt)" in facts[name].call
    assert {f.verdict.value for n, f in facts.items() if n != name} == {"ALLOW"}


VIOLATING = [
    ("policyStatus", policy_status("true"), "not_public", "DENY"),
    ("policyStatus", policy_status("false"), "not_public", "ALLOW"),
    ("policyStatus", "<PolicyStatus/>", "not_public", "UNKNOWN"),
    ("publicAccessBlock", OPEN, "not_public", "DENY"),
    ("publicAccessBlock", None, "not_public", "DENY"),
    ("ownershipControls", None, "not_public", "ALLOW"),
    (
        "ownershipControls",
        ENFORCED.replace("BucketOwnerEnforced", "Nobody"),
        "not_public",
        "UNKNOWN",
    ),
    ("encryption", None, "encryption", "ALLOW"),
    ("encryption", encryption("aws:kms", KEY), "encryption", "ALLOW"),
    ("encryption", encryption("aws:kms"), "encryption", "ALLOW"),
    ("encryption", encryption("aws:kms", "alias/mine"), "encryption", "UNKNOWN"),
    (
        "encryption",
        encryption("aws:kms", KEY.replace("key/", "alias/")),
        "encryption",
        "UNKNOWN",
    ),
    ("encryption", encryption("aws:kms", KEY.replace("/", "/mrk-")), "encryption", "DENY"),
    ("encryption", encryption("rot13"), "encryption", "UNKNOWN"),
    (
        "accelerate",
        "<AccelerateConfiguration><Status>Enabled</Status></AccelerateConfiguration>",
        "endpoint",
        "DENY",
    ),
    (
        "accelerate",
        "<AccelerateConfiguration><Status>Suspended</Status></AccelerateConfiguration>",
        "endpoint",
        "ALLOW",
    ),
    (
        "accelerate",
        "<AccelerateConfiguration><Status>Odd</Status></AccelerateConfiguration>",
        "endpoint",
        "UNKNOWN",
    ),
    ("replication", replication("there", status="Odd"), "replication", "UNKNOWN"),
    ("replication", replication("there", status="Disabled"), "replication", "ALLOW"),
    ("replication", "<ReplicationConfiguration/>", "replication", "UNKNOWN"),
    ("replication", replication("there", prefix="logs/"), "replication", "ALLOW"),
]


@pytest.mark.parametrize(("setting", "value", "name", "verdict"), VIOLATING)
def test_what_a_setting_says(amazon: Amazon, setting, value, name, verdict):
    settings = amazon.buckets["ckpt"].settings
    settings.pop(setting, None)
    if value is not None:
        settings[setting] = value
    assert look(amazon)[name].verdict == verdict


KMS = {"ServerSideEncryption": "aws:kms"}
CUSTOMER = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
ELSEWHERE_KEY = KEY.replace(REGION, "us-east-2")
REQUESTED = {
    "a key of the policy": (KMS | {"SSEKMSKeyId": KEY}, "ALLOW"),
    "of another region": (KMS | {"SSEKMSKeyId": ELSEWHERE_KEY}, "DENY"),
    "of another account": (KMS | {"SSEKMSKeyId": KEY.replace(ACCOUNT, "9" * 12)}, "DENY"),
    "of several regions": (KMS | {"SSEKMSKeyId": KEY.replace("/", "/mrk-")}, "DENY"),
    "of several regions, by id": (KMS | {"SSEKMSKeyId": "mrk-1234"}, "DENY"),
    "by id": (KMS | {"SSEKMSKeyId": "1234"}, "UNKNOWN"),
    "by alias": (KMS | {"SSEKMSKeyId": "alias/mine"}, "UNKNOWN"),
    "by the ARN of an alias": (KMS | {"SSEKMSKeyId": KEY.replace("key/", "alias/")}, "UNKNOWN"),
    "of AWS": (KMS, "DENY"),
    "of the store": ({"ServerSideEncryption": "AES256"}, "DENY"),
    "of the user": (CUSTOMER, "UNKNOWN"),
    "of the bucket": ({"StorageClass": "STANDARD_IA"}, "ALLOW"),
}


@pytest.mark.parametrize(("given", "verdict"), REQUESTED.values(), ids=REQUESTED)
def test_the_key_that_requests_name_counts(amazon: Amazon, given: dict[str, str], verdict: str):
    """Not the bucket's own, which S3 leaves aside where a request names another or none."""
    amazon.buckets["ckpt"].settings["encryption"] = encryption("aws:kms", KEY)
    seen = observe(requests_to(amazon, s3_additional_kwargs=given), PIN, "run/")
    asked = [fact.call for fact in seen.facts if fact.name == "encryption"]
    assert ("GetBucketEncryption" in asked[0]) == ("StorageClass" in given)
    rule = {"provider": "aws", "regions": [REGION], "owner": ACCOUNT, "require_kms": True}
    judged = {
        one.fact.name: one.fact
        for one in decide(parse({"allow": [rule]}), seen, (), datetime.now(UTC)).judged
    }
    assert judged["encryption"].verdict == verdict
    assert {fact.verdict.value for name, fact in judged.items() if name != "encryption"} == {
        "ALLOW"
    }
    assert "k" * 32 not in repr(seen)


def test_the_account_may_block_what_the_bucket_does_not(amazon: Amazon):
    amazon.buckets["ckpt"].settings.pop("publicAccessBlock")
    amazon.account_blocks[ACCOUNT] = OPEN.replace("false", "true")
    assert look(amazon)["not_public"].verdict == "ALLOW"
    amazon.faults["account"] = DENIED
    fact = look(amazon)["not_public"]
    assert fact.verdict == "UNKNOWN"
    assert fact.permission == "s3:GetAccountPublicAccessBlock"


@pytest.mark.parametrize(
    ("uri", "verdict"),
    [
        (ALL_USERS, "DENY"),
        (ALL_USERS.replace("AllUsers", "AuthenticatedUsers"), "DENY"),
        ("http://acs.amazonaws.com/groups/s3/LogDelivery", "ALLOW"),
        ("http://acs.amazonaws.com/groups/s3/Somebody", "UNKNOWN"),
    ],
)
def test_access_lists_count_where_they_are_on(amazon: Amazon, uri: str, verdict: str):
    settings = amazon.buckets["ckpt"].settings
    settings["acl"] = access_list(uri)
    assert look(amazon)["not_public"].verdict == "ALLOW"
    settings.pop("ownershipControls")
    assert look(amazon)["not_public"].verdict == verdict
    amazon.faults["acl"] = DENIED
    assert look(amazon)["not_public"].permission == "s3:GetBucketAcl"


def test_the_region_is_told_even_to_who_is_refused(amazon: Amazon):
    amazon.buckets["ckpt"].owner = "999999999999"
    facts = look(amazon, Pin(regions=(REGION,), owner=ACCOUNT))
    assert facts["location"].values == (f"aws:{REGION}",)


def test_a_bucket_elsewhere_is_not_followed(amazon: Amazon):
    amazon.buckets["ckpt"].region = "us-east-2"
    facts = look(amazon)
    assert facts["location"].values == ("aws:us-east-2",)
    assert {seen.host for seen in amazon.log} == {f"ckpt.s3.{REGION}.amazonaws.com"}


def test_another_owner_is_a_denial_and_two_refusals_are_not(amazon: Amazon):
    """T4."""
    amazon.buckets["ckpt"].owner = "999999999999"
    assert look(amazon)["owner"].verdict == "DENY"
    amazon.faults["head"] = DENIED
    facts = look(amazon)
    assert facts["owner"].verdict == "UNKNOWN"
    assert facts["owner"].permission == "s3:ListBucket"
    assert facts["location"].verdict == "UNKNOWN"


def test_a_bucket_that_is_not_there_is_not_made(amazon: Amazon):
    """T8."""
    assert look(amazon, bucket="typo")["location"].verdict == "DENY"
    assert {seen.method for seen in amazon.log} <= {"HEAD", "GET"}


def test_a_silent_store_is_asked_once(amazon: Amazon):
    amazon.faults["head"] = SILENT
    facts = look(amazon)
    assert len(amazon.log) == 1
    asked = ("location", "owner", "not_public", "replication", "encryption")
    assert all(facts[name].transient for name in asked)


def test_replication_is_followed(amazon: Amazon):
    amazon.buckets["ckpt"].settings["replication"] = replication("b2")
    amazon.add("b2", REGION).settings["replication"] = replication("b3", "ckpt")
    amazon.add("b3", "us-east-2")
    fact = look(amazon)["replication"]
    assert set(fact.values) == {f"aws:{REGION}", "aws:us-east-2"}
    assert all(seen.host.endswith(f"s3.{REGION}.amazonaws.com") for seen in amazon.log)


OTHER = "999999999999"
PIN_OF_TWO = Pin(
    regions=(REGION,),
    owner=ACCOUNT,
    replica_accounts=(ACCOUNT, OTHER),
    replica_regions=(REGION, "us-east-2"),
)


@pytest.mark.parametrize(
    ("region", "owner", "verdict", "value"),
    [
        (REGION, ACCOUNT, "ALLOW", f"aws:{REGION}/{ACCOUNT}"),
        ("us-east-2", OTHER, "ALLOW", f"aws:us-east-2/{OTHER}"),
        (REGION, "000000000000", "DENY", f"aws:{REGION}"),
        ("eu-west-1", ACCOUNT, "UNKNOWN", "aws:eu-west-1"),  # not even asked there
    ],
)
def test_a_replica_is_told_by_region_and_account(amazon, region, owner, verdict, value):
    amazon.buckets["ckpt"].settings["replication"] = replication("b2")
    amazon.add("b2", region, owner)
    fact = look(amazon, PIN_OF_TWO)["replication"]
    assert (fact.verdict, fact.values) == (verdict, (value,))
    assert {seen.method for seen in amazon.log} <= {"HEAD", "GET"}
    assert amazon.body_bytes.total() == 0


def test_the_owner_of_a_replica_that_refuses_to_say_is_unknown(amazon: Amazon):
    amazon.buckets["ckpt"].settings["replication"] = replication("b2")
    amazon.add("b2", REGION)
    amazon.refusing.add("b2")
    fact = look(amazon, PIN_OF_TWO)["replication"]
    assert (fact.verdict, fact.permission) == ("UNKNOWN", "s3:ListBucket")


def test_the_key_of_a_replica_is_told_too(amazon: Amazon):
    settings = amazon.buckets["ckpt"].settings
    amazon.add("b2", REGION)
    settings["replication"] = replication("b2", key=KEY)
    fact = look(amazon, PIN_OF_TWO)["replication"]
    assert set(fact.values) == {f"aws:{REGION}/{ACCOUNT}", f"key aws:{REGION}/{ACCOUNT}"}
    settings["replication"] = replication("b2", key="alias/mine")
    assert look(amazon, PIN_OF_TWO)["replication"].verdict == "UNKNOWN"


# ------------------------------------------------------------------------ less than all


def test_who_reads_asks_where_and_whose_only(amazon: Amazon):
    seen = observe_place(requests_to(amazon), PIN)
    verdicts = {fact.name: fact.verdict.value for fact in seen.facts}
    assert verdicts == dict.fromkeys(("endpoint", "tls", "location", "owner"), "ALLOW")
    assert [one.method for one in amazon.log] == ["HEAD", "HEAD"]
    amazon.buckets["ckpt"].owner = OTHER
    facts = {fact.name: fact for fact in observe_place(requests_to(amazon), PIN).facts}
    assert facts["owner"].verdict == "DENY"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ("policy", "DENY"),
        ("access list", "DENY"),
        ("listing", "DENY"),
        ("nothing", "ALLOW"),
        ("silence", "UNKNOWN"),
    ],
)
def test_signs_of_a_public_bucket_need_no_policy(amazon: Amazon, change: str, verdict: str):
    bucket = amazon.buckets["ckpt"]
    if change == "policy":
        bucket.settings["policyStatus"] = policy_status("true")
    elif change == "access list":
        bucket.settings["acl"] = access_list(ALL_USERS)
    elif change == "listing":
        bucket.lists_to_anybody = True
    elif change == "silence":
        amazon.faults["policyStatus"] = DOWN
    fact = look_public(requests_to(amazon, pin=None), "run/")
    assert fact.verdict == verdict
    assert len(amazon.log) <= 3
    assert amazon.body_bytes.total() == 0


@pytest.mark.parametrize(
    ("host", "verdict", "values"),
    [("eu.", "ALLOW", ("r2:eu",)), ("", "UNKNOWN", ("s3compat:auto",))],
)
def test_the_host_of_r2_says_where_it_is(amazon: Amazon, host: str, verdict: str, values):
    endpoint = f"https://{R2_ACCOUNT}.{host}r2.cloudflarestorage.com"
    amazon.add("r2", "eu" if host else "auto")
    pin = Pin(endpoint=endpoint, jurisdiction="eu" if host else None)
    requests = requests_to(amazon, pin, "r2", endpoint_url=endpoint)
    seen = observe(requests, pin, "run/")
    facts = {fact.name: fact for fact in seen.facts}
    assert seen.provider == ("r2" if host else "s3compat")
    assert (facts["location"].verdict, facts["location"].values) == (verdict, values)
    assert facts["endpoint"].values == (endpoint,)
    assert facts["not_public"].verdict == "UNKNOWN"
    assert facts["replication"].verdict == "UNKNOWN"


def test_a_bucket_of_a_jurisdiction_is_nowhere_else(amazon: Amazon):
    amazon.add("r2", "auto")
    endpoint = f"https://{R2_ACCOUNT}.eu.r2.cloudflarestorage.com"
    pin = Pin(endpoint=endpoint, jurisdiction="eu")
    seen = observe(requests_to(amazon, pin, "r2", endpoint_url=endpoint), pin, "run/")
    assert {fact.name: fact.verdict for fact in seen.facts}["location"] == "DENY"


def test_a_replica_that_cannot_be_located_is_unknown(amazon: Amazon):
    amazon.buckets["ckpt"].settings["replication"] = replication("gone")
    assert look(amazon)["replication"].verdict == "UNKNOWN"


def test_replication_without_end_is_unknown(amazon: Amazon):
    amazon.buckets["ckpt"].settings["replication"] = replication("c0")
    for n in range(6):
        amazon.add(f"c{n}", REGION).settings["replication"] = replication(f"c{n + 1}")
    assert look(amazon)["replication"].verdict == "UNKNOWN"


def test_a_client_in_another_region_asks_nothing(amazon: Amazon):
    facts = look(amazon, Pin(regions=("eu-west-1",), owner=ACCOUNT))
    assert facts["endpoint"].verdict == "DENY"
    assert amazon.log == []


# ---------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("host", "region", "good"),
    [
        ("ckpt.s3.eu-central-1.amazonaws.com", "eu-central-1", True),
        ("s3.eu-central-1.amazonaws.com", "eu-central-1", True),
        ("ckpt.s3-fips.dualstack.eu-central-1.amazonaws.com", "eu-central-1", True),
        ("ckpt.bucket.vpce-1a-2b.s3.eu-central-1.vpce.amazonaws.com", "eu-central-1", True),
        ("123456789012.s3-control.eu-central-1.amazonaws.com", "eu-central-1", True),
        ("ckpt.s3.us-east-2.amazonaws.com", "us-east-2", False),
        ("ckpt.s3.us-east-2.amazonaws.com", "eu-central-1", False),
        ("ckpt.s3.eu-central-1.amazonaws.com", "us-east-2", False),
        ("ckpt.s3.eu-central-1.amazonaws.com", "", False),
        ("ckpt.s3-accelerate.amazonaws.com", "eu-central-1", False),
        ("ckpt.s3.amazonaws.com", "eu-central-1", False),
        ("s3.eu-central-1.amazonaws.com.evil.example", "eu-central-1", False),
        ("evil.example", "eu-central-1", False),
        ("x.mrap.accesspoint.s3-global.amazonaws.com", "eu-central-1", False),
    ],
)
def test_hosts_of_a_region(host: str, region: str, good: bool):
    assert (PIN.why_not(f"https://{host}/key", region, "ckpt") is None) is good
    assert PIN.why_not(f"http://{host}/key", region, "ckpt") is not None


def test_a_compatible_store_is_its_endpoint():
    pin = Pin(endpoint="https://s3.dc1.example:9000")
    assert pin.why_not("https://s3.dc1.example:9000/ckpt/k", "us-east-1", "ckpt") is None
    assert pin.why_not("https://ckpt.s3.dc1.example:9000/k", "us-east-1", "ckpt") is None
    for url in (
        "https://s3.dc1.example/k",
        "https://s3.dc2.example:9000/k",
        "https://evil.example",
    ):
        assert pin.why_not(url, "us-east-1", "ckpt") is not None
    plain = Pin(endpoint="http://s3.dc1.example")
    assert plain.why_not("http://s3.dc1.example/k", "us-east-1", "ckpt") is not None
    loopback = Pin(endpoint="http://127.0.0.1:9000")
    assert loopback.why_not("http://127.0.0.1:9000/k", "us-east-1", "ckpt") is None


@pytest.mark.parametrize(
    ("bucket", "options"),
    [
        ("ckpt", {"anon": True}),
        ("ckpt-a1b2-s3alias", {}),
        ("ckpt--use1-az4--x-s3", {}),
        ("ckpt--ol-s3", {}),
        ("mfzwi23gnjvgw.mrap", {}),
        ("ckpt", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}),
        ("ckpt", {"config_kwargs": {"s3": {"use_arn_region": True}}}),
        ("ckpt", {"config_kwargs": {"ignore_configured_endpoint_urls": False}}),
        ("ckpt", {"client_kwargs": {"verify": False}}),
    ],
    ids=str,
)
def test_ways_around_are_refused(bucket: str, options: dict[str, Any]):
    """T3."""
    with pytest.raises(InvalidError):
        PIN.check_options(bucket, options)


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_S3_CONTROL"]
)
def test_endpoints_of_the_environment_are_ignored(amazon: Amazon, monkeypatch, name: str):
    """T2."""
    monkeypatch.setenv(name, "https://evil.example")
    facts = look(amazon)
    assert facts["endpoint"].values == (f"aws:{REGION}",)
    requests_to(amazon).call("put_object", "run/a", Body=b"secret")
    assert amazon.buckets["ckpt"].objects["run/a"][0] == b"secret"
    assert all(".amazonaws.com" in seen.host for seen in amazon.log)


def test_the_endpoint_of_a_profile_is_ignored(amazon: Amazon, monkeypatch, tmp_path):
    """T2."""
    file = tmp_path / "config"
    file.write_text("[profile p]\nendpoint_url = https://evil.example\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    assert look(amazon, profile="p")["endpoint"].values == (f"aws:{REGION}",)


def test_a_redirect_delivers_no_byte(amazon: Amazon):
    """T1: the server of the other region counts what it is sent."""
    amazon.buckets["ckpt"].region = "us-east-2"
    for pin in (PIN, Pin(regions=(REGION, "us-east-2"), owner=ACCOUNT)):
        requests = requests_to(amazon, pin)
        for _ in range(2):
            with pytest.raises(ResidencyError):
                requests.call("put_object", "run/a", Body=b"secret")
    assert {seen.host for seen in amazon.log} == {f"ckpt.s3.{REGION}.amazonaws.com"}
    assert amazon.body_bytes["ckpt.s3.us-east-2.amazonaws.com"] == 0
    assert amazon.buckets["ckpt"].objects == {}


def test_without_the_guard_the_bytes_are_gone(amazon: Amazon, monkeypatch):
    """Negative control: the test above sees it when the guard does nothing."""
    monkeypatch.setattr(s3_pins.Anchor, "__call__", lambda *_, **__: None)
    amazon.buckets["ckpt"].region = "us-east-2"
    requests_to(amazon).call("put_object", "run/a", Body=b"secret")
    assert amazon.body_bytes["ckpt.s3.us-east-2.amazonaws.com"] == len(b"secret")


def test_every_request_names_the_owner(amazon: Amazon):
    requests = requests_to(amazon)
    calls: dict[str, dict[str, Any]] = {
        "put_object": {"Body": b"x"},
        "get_object": {},
        "head_object": {},
        "create_multipart_upload": {},
        "upload_part": {"UploadId": "u", "PartNumber": 1, "Body": b"x"},
        "complete_multipart_upload": {"UploadId": "u", "MultipartUpload": {"Parts": []}},
        "abort_multipart_upload": {"UploadId": "u"},
    }
    for operation, arguments in calls.items():
        with suppress(TieredError):  # the server does not know all of them
            requests.call(operation, "run/a", retry_s=0, **arguments)
    for operation in ("list_objects_v2", "list_multipart_uploads"):
        requests.call(operation, None, Prefix="run/")
    assert len(amazon.log) == len(calls) + 2
    assert {seen.headers.get("x-amz-expected-bucket-owner") for seen in amazon.log} == {ACCOUNT}


def test_a_request_to_the_bucket_of_another_is_refused_by_the_store(amazon: Amazon):
    amazon.buckets["ckpt"].owner = "999999999999"
    with pytest.raises(InvalidError):
        requests_to(amazon).call("put_object", "run/a", Body=b"secret")
    assert amazon.buckets["ckpt"].objects == {}
