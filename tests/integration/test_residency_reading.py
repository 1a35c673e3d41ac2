"""Who reads is held to the policy too, and no record leads out of the run's own root."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from dcp_tiered import CorruptError, InvalidError, ResidencyError, TieredReader
from tests.conftest import QUICK, Run, end_flushers
from tests.support import runs
from tests.support.amazon import ACCOUNT, OPEN, Amazon, Bucket

pytestmark = pytest.mark.slow
REGION = "eu-central-1"
POLICY = {"allow": [f"aws:{REGION}"], "owner": ACCOUNT}
HERE = f"ckpt.s3.{REGION}.amazonaws.com"


@pytest.fixture(scope="module")
def amazon(tmp_path_factory) -> Iterator[Amazon]:
    with Amazon(tmp_path_factory.mktemp("amazon")) as amazon:
        yield amazon


@pytest.fixture(scope="module")
def saved(amazon: Amazon, tmp_path_factory) -> dict[str, Any]:
    """Give the arguments of a reader whose only tier is the durable one."""
    local = tmp_path_factory.mktemp("nvme")
    amazon.add("ckpt", REGION)
    arguments = {
        "url": f"tiered::s3://ckpt/run-{uuid.uuid4().hex[:8]}",
        "limits": QUICK,
        "s3": amazon.options(REGION),
    }
    runs.save(arguments, "step-1", 7, local=str(local))
    runs.wait(arguments | {"local": str(local)}, "step-1")
    end_flushers(local)
    return arguments


@pytest.fixture
def bucket(amazon: Amazon) -> Iterator[Bucket]:
    bucket = amazon.buckets["ckpt"]
    before = dict(bucket.settings), dict(bucket.objects)
    amazon.log.clear()
    yield bucket
    bucket.settings, bucket.objects = before
    bucket.region, bucket.owner = REGION, ACCOUNT


def test_every_request_of_a_reader_is_held_to_place_and_owner(amazon, bucket, saved):
    bucket.settings["publicAccessBlock"] = OPEN  # no concern of who reads
    assert runs.load(saved | {"residency": POLICY}, "step-1") == 7
    assert {seen.host for seen in amazon.log} == {HERE}
    unnamed = [seen for seen in amazon.log if "x-amz-expected-bucket-owner" not in seen.headers]
    assert [seen.method for seen in unnamed] == ["HEAD"], "the question where it is, alone"
    asked = {seen.path.partition("?")[2].partition("=")[0] for seen in amazon.log}
    assert not asked & {"policyStatus", "replication", "encryption", "acl"}


@pytest.mark.parametrize("change", ["moved", "of another"])
@pytest.mark.parametrize("checkpoint_id", ["step-1", None])
def test_a_bucket_that_the_policy_denies_is_not_read(amazon, bucket, saved, change, checkpoint_id):
    if change == "moved":
        bucket.region = "us-east-2"
    else:
        bucket.owner = "999999999999"
    error = runs.error_of(runs.load, saved | {"residency": POLICY}, checkpoint_id)
    assert isinstance(error, ResidencyError), error
    assert {seen.host for seen in amazon.log} == {HERE}
    assert {seen.method for seen in amazon.log} == {"HEAD"}


@pytest.mark.parametrize(
    ("policy", "more", "error"),
    [
        ({"allow": []}, {}, InvalidError),
        (POLICY, {"s3": {"endpoint_url": "https://s3.example.org"}}, ResidencyError),
        (POLICY, {"url": "tiered::file:///tmp/run"}, ResidencyError),
        (POLICY, {"s3": {"anon": True}}, InvalidError),
    ],
    ids=str,
)
def test_what_can_never_be_allowed_is_said_at_once(policy, more, error):
    with pytest.raises(error):
        TieredReader(**({"url": "tiered::s3://ckpt/run", "residency": policy} | more))


def test_a_mount_without_its_marker_is_not_read(posix_run: Run):
    runs.save(posix_run.arguments(), "step-1", 3)
    runs.wait(posix_run.arguments(), "step-1")
    policy = {"allow": [{"provider": "posix", "site_id": "fra"}]}
    error = runs.error_of(runs.load, posix_run.durable_only() | {"residency": policy}, "step-1")
    assert isinstance(error, ResidencyError)
    assert runs.load(posix_run.durable_only(), "step-1") == 3


# -------------------------------------------------------------------------- hostile records

ELSEWHERE = [
    "/etc/passwd",
    "../../other/packs/{name}",
    "packs/../../../other/{name}",
    "s3://other/{name}",
    "https://evil.example/{name}",
    "//evil.example/{name}",
    "packs/{name}?versionId=1",
    "packs/%2e%2e/{name}",
    "packs\\\\..\\\\{name}",
    "file:///etc/passwd",
]


def rewrite(root: Path, change: Any) -> None:
    """Change a record behind a right checksum, as who may write there can."""
    (path,) = root.rglob("record-1.json")
    record = json.loads(path.read_bytes())
    change(record)
    del record["crc32c"]
    plain = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.unlink()
    path.write_text(json.dumps({**record, "crc32c": crc32c(plain.encode())}))


def hostile(record: dict[str, Any], field: str, value: str) -> None:
    if field == "pack":
        record["packs"][0]["name"] = value.format(name=record["packs"][0]["name"][6:])
    elif field == "shard":
        record["placements"][0]["shard"] = value.format(name="x")
    else:
        record[field] = value.format(name="x")


def test_no_record_names_anything_outside_of_the_run(posix_run: Run, tmp_path):
    runs.save(posix_run.arguments(), "step-1", 3)
    runs.wait(posix_run.arguments(), "step-1")
    end_flushers(posix_run.local)
    root = tmp_path / "lustre" / "run"
    (path,) = root.rglob("record-1.json")
    good = path.read_bytes()
    for field in ("pack", "shard", "attempt", "checkpoint_id", "committed_by"):
        for value in ELSEWHERE:
            rewrite(root, lambda record, f=field, v=value: hostile(record, f, v))
            error = runs.error_of(runs.load, posix_run.durable_only(), "step-1")
            assert isinstance(error, CorruptError), (field, value, error)
            path.unlink()
            path.write_bytes(good)
    assert runs.load(posix_run.durable_only(), "step-1") == 3
