"""What `tiers.s3_residency` says of a bucket, held against moto's model of S3's control plane.

moto answers behind Amazon's own host names and TLS. It knows neither expected owners nor redirects
nor transfer acceleration of a bucket; those are played in tests/unit/tiers/test_s3_residency.py.
"""

import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest

from dcp_tiered.format.residency import Fact, Observed, Verdict
from dcp_tiered.policy.residency import decide
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.tiers.s3 import S3Tier
from dcp_tiered.tiers.s3_pins import Pin
from dcp_tiered.tiers.s3_requests import S3Requests
from dcp_tiered.tiers.s3_residency import observe
from tests.support.amazon import ACCOUNT, Amazon
from tests.support.sources import BytesSource, pattern

REGION = "eu-central-1"
PIN = Pin(regions=(REGION,), replica_accounts=(ACCOUNT,), owner=ACCOUNT)
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234"
BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


@pytest.fixture(scope="module")
def moto(tmp_path_factory) -> Iterator[str]:
    """moto in a process of its own: imported here, it would hook itself into every client."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    log = tmp_path_factory.mktemp("moto") / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:
            for _ in range(600):
                assert server.poll() is None, log.read_text()
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()


class Owner:
    """The owner of all buckets, with clients that talk to moto itself."""

    def __init__(self, moto: str) -> None:
        self._moto = moto
        self._clients: dict[str, Any] = {}

    def __getattr__(self, operation: str) -> Any:
        return getattr(self.client(REGION), operation)

    def client(self, region: str) -> Any:
        if region not in self._clients:
            self._clients[region] = botocore.session.get_session().create_client(
                "s3",
                region_name=region,
                endpoint_url=f"http://{self._moto}",
                aws_access_key_id="k",
                aws_secret_access_key="s",
            )
        return self._clients[region]

    def make(self, region: str = REGION) -> str:
        name = f"ckpt-{uuid.uuid4().hex[:8]}"
        where = {"LocationConstraint": region}
        self.client(region).create_bucket(Bucket=name, CreateBucketConfiguration=where)
        return name

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@pytest.fixture(scope="module")
def owner(moto: str) -> Iterator[Owner]:
    made = Owner(moto)
    yield made
    made.close()


@pytest.fixture(scope="module")
def amazon(moto: str, tmp_path_factory) -> Iterator[Amazon]:
    with Amazon(tmp_path_factory.mktemp("amazon"), upstream=moto) as server:
        yield server


@pytest.fixture
def bucket(owner: Owner) -> str:
    """A bucket as the documentation recommends it."""
    name = owner.make()
    owner.put_public_access_block(
        Bucket=name, PublicAccessBlockConfiguration=dict.fromkeys(BLOCKS, True)
    )
    rules = [{"ObjectOwnership": "BucketOwnerEnforced"}]
    owner.put_bucket_ownership_controls(Bucket=name, OwnershipControls={"Rules": rules})
    return name


@pytest.fixture
def look(amazon: Amazon, bucket: str) -> Iterator[Any]:
    requests = S3Requests(
        bucket,
        amazon.options(REGION),
        request_timeout_s=10,
        request_retry_s=1,
        connections_max=4,
        pin=PIN,
    )

    def facts() -> dict[str, Fact]:
        return {fact.name: fact for fact in observe(requests, PIN, "run/").facts}

    yield facts
    requests.close()


def test_a_good_bucket_is_allowed(amazon: Amazon, bucket: str, look):
    facts = look()
    assert {fact.verdict for fact in facts.values()} == {Verdict.ALLOW}, facts
    assert facts["location"].values == (f"aws:{REGION}",)
    hosts = {seen.host for seen in amazon.log}
    assert f"{bucket}.s3.{REGION}.amazonaws.com" in hosts


def test_a_bucket_as_it_is_made_is_not_allowed(owner: Owner, bucket: str, look):
    owner.delete_public_access_block(Bucket=bucket)
    assert look()["not_public"].verdict is Verdict.DENY
    blocks = dict.fromkeys(BLOCKS, True) | {"IgnorePublicAcls": False}
    owner.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=blocks)
    fact = look()["not_public"]
    assert fact.verdict is Verdict.DENY
    assert "['IgnorePublicAcls']" in fact.evidence


def test_a_policy_for_everybody_is_public(owner: Owner, bucket: str, look):
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::{bucket}/*",
    }
    document = {"Version": "2012-10-17", "Statement": [statement]}
    owner.delete_public_access_block(Bucket=bucket)
    owner.put_bucket_policy(Bucket=bucket, Policy=json.dumps(document))
    fact = look()["not_public"]
    assert fact.verdict is Verdict.DENY
    assert "policy makes it public" in fact.evidence


def test_an_access_list_for_everybody_is_public(owner: Owner, bucket: str, look):
    owner.delete_public_access_block(Bucket=bucket)
    owner.delete_bucket_ownership_controls(Bucket=bucket)
    owner.put_bucket_acl(Bucket=bucket, ACL="public-read")
    fact = look()["not_public"]
    assert fact.verdict is Verdict.DENY
    assert "AllUsers" in fact.evidence


def replicate(owner: Owner, source: str, target: str) -> None:
    for name in (source, target):
        owner.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    owner.put_bucket_replication(
        Bucket=source,
        ReplicationConfiguration={
            "Role": f"arn:aws:iam::{ACCOUNT}:role/replication",
            "Rules": [
                {
                    "ID": "all",
                    "Priority": 1,
                    "Status": "Enabled",
                    "Filter": {"Prefix": ""},
                    "DeleteMarkerReplication": {"Status": "Disabled"},
                    "Destination": {"Bucket": f"arn:aws:s3:::{target}"},
                }
            ],
        },
    )


@pytest.mark.parametrize(("region", "allowed"), [(REGION, True), ("us-east-2", False)])
def test_replication_is_followed_to_where_it_ends(owner, amazon, bucket, look, region, allowed):
    replicate(owner, bucket, owner.make(region))
    fact = look()["replication"]
    assert fact.values == (f"aws:{region}/{ACCOUNT}",)
    policy = parse({"allow": [f"aws:{REGION}"], "owner": ACCOUNT})
    seen = Observed(target=f"s3://{bucket}", provider="aws", facts=(fact,))
    (judged, *_) = decide(policy, seen, (), datetime.now(UTC)).judged
    assert judged.is_allowed() is allowed


@pytest.mark.parametrize(
    ("key", "verdict", "values"),
    [
        (KEY, Verdict.ALLOW, (f"aws:{REGION}/{ACCOUNT}",)),
        (KEY.replace("1234", "mrk-1234"), Verdict.DENY, ()),
        ("1234", Verdict.UNKNOWN, ()),
    ],
)
def test_the_key_of_a_bucket_is_named(owner: Owner, bucket: str, look, key, verdict, values):
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
    owner.put_bucket_encryption(
        Bucket=bucket,
        ServerSideEncryptionConfiguration={
            "Rules": [{"ApplyServerSideEncryptionByDefault": default}]
        },
    )
    fact = look()["encryption"]
    assert (fact.verdict, fact.values) == (verdict, values)


def stores(amazon: Amazon, bucket: str, given: dict[str, Any]) -> S3Tier:
    return S3Tier(
        f"{bucket}/run",
        amazon.options(REGION) | {"s3_additional_kwargs": given},
        request_timeout_s=10,
        request_retry_s=5,
        part_bytes=5 << 20,
    )


def test_what_users_set_is_on_the_objects(owner: Owner, amazon: Amazon, bucket: str):
    """moto encrypts nothing, and its checksum of an upload in parts is not that of the object."""
    pack = pattern(70_001)
    given = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": KEY,
        "BucketKeyEnabled": True,
        "StorageClass": "STANDARD_IA",
        "Tagging": "team=llm&run=42",
    }
    with closing(stores(amazon, bucket, given)) as tier:
        tier.put("step-1/a.json", b"{}")
        tier.upload("step-1/a.pack", BytesSource(pack))
    for name, data in (("a.json", b"{}"), ("a.pack", pack)):
        where = {"Bucket": bucket, "Key": f"run/step-1/{name}"}
        head = owner.head_object(**where)
        assert head["StorageClass"] == "STANDARD_IA"
        assert head["ServerSideEncryption"] == "aws:kms"
        assert head["SSEKMSKeyId"] == KEY
        assert head["BucketKeyEnabled"] is True
        tags = {tag["Key"]: tag["Value"] for tag in owner.get_object_tagging(**where)["TagSet"]}
        assert tags == {"team": "llm", "run": "42"}
        assert owner.get_object(**where)["Body"].read() == data


def test_a_bucket_that_is_gone_is_denied(owner: Owner, bucket: str, look):
    owner.delete_bucket(Bucket=bucket)
    assert look()["location"].verdict is Verdict.DENY
