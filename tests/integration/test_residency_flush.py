"""A run under a residency policy, with a flusher process of its own and Amazon played over TLS."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_tiered import InvalidError, ResidencyError, TieredWriter
from dcp_tiered.cli import main
from tests.conftest import Run, end_flushers
from tests.support import runs
from tests.support.amazon import (
    ACCOUNT,
    BLOCKED,
    OPEN,
    Amazon,
    Bucket,
    Fault,
    policy_status,
    replication,
)

pytestmark = pytest.mark.slow
REGION = "eu-central-1"
POLICY = {"allow": [f"aws:{REGION}"], "owner": ACCOUNT, "ttl_s": 1}
HERE = f"ckpt.s3.{REGION}.amazonaws.com"


def save_and_wait(arguments: dict[str, Any], checkpoint_id="step-1", timeout_s=40.0) -> None:
    with TieredWriter(**arguments) as writer:
        dcp.save(runs.state_of(1), checkpoint_id=checkpoint_id, storage_writer=writer)
        writer.wait("durable", checkpoint_id, timeout_s=timeout_s)


def records(bucket: Bucket) -> list[dict[str, Any]]:
    return [json.loads(data) for key, (data, _) in bucket.objects.items() if "/record-" in key]


def only_here(amazon: Amazon) -> bool:
    """Tell whether no byte of a body went to any other host than the bucket's own."""
    return {host for host, count in amazon.body_bytes.items() if count} <= {HERE}


def test_every_commit_says_why_it_may_be_there(amazon, bucket, arguments):
    save_and_wait(arguments)
    (record,) = records(bucket)
    said = record["residency"]
    assert said["target"] == "s3://ckpt"
    assert len(said["policy_sha256"]) == 64
    facts = {fact["name"]: fact for fact in said["facts"]}
    assert facts["location"]["values"] == [f"aws:{REGION}"]
    assert {fact["verdict"] for fact in facts.values()} == {"ALLOW"}
    assert only_here(amazon)
    reading = {name: value for name, value in arguments.items() if name != "residency"}
    assert runs.load(reading, "step-1") == 1


def test_the_flusher_names_the_owner_on_every_write(amazon, bucket, arguments):
    save_and_wait(arguments)
    owners = {
        seen.headers.get("x-amz-expected-bucket-owner")
        for seen in amazon.log
        if seen.method == "PUT"
    }
    assert owners == {ACCOUNT}


def test_the_key_that_the_writer_names_is_held_to_the_policy(amazon, bucket, arguments):
    def named(region: str) -> dict[str, Any]:
        key = {"SSEKMSKeyId": f"arn:aws:kms:{region}:{ACCOUNT}:key/1234"}
        given = {"ServerSideEncryption": "aws:kms"} | key
        return {**arguments, "s3": {**arguments["s3"], "s3_additional_kwargs": given}}

    with pytest.raises(ResidencyError, match="encryption is DENY") as raised:
        save_and_wait(named("us-east-2"))
    assert "us-east-2" in raised.value.message
    assert bucket.objects == {}
    end_flushers(Path(arguments["local"]))  # its options are those of the writer that started it
    save_and_wait(named(REGION), "step-2")
    said = {fact["name"]: fact for fact in records(bucket)[-1]["residency"]["facts"]}
    assert said["encryption"]["values"] == [f"aws:{REGION}/{ACCOUNT}"]


def test_a_bucket_that_is_not_allowed_holds_the_flush_and_not_the_save(
    amazon, bucket, arguments, local
):
    bucket.settings["publicAccessBlock"] = OPEN
    with TieredWriter(**arguments) as writer:
        dcp.save(runs.state_of(1), checkpoint_id="step-1", storage_writer=writer)
        writer.wait("local", "step-1")
        with pytest.raises(ResidencyError) as raised:
            writer.wait("durable", "step-1", timeout_s=40)
        assert "not_public is DENY" in raised.value.message
        (line,) = writer.status()
        assert line.state == "held_residency"
        assert writer.metrics()["dcp_tiered_held_residency_checkpoints"] == 1
        assert bucket.objects == {}
        assert amazon.body_bytes.total() == 0
        bucket.settings["publicAccessBlock"] = BLOCKED
        runs_until_durable(writer, "step-1")
        assert writer.metrics()["dcp_tiered_held_residency_checkpoints"] == 0
    assert len(records(bucket)) == 1


def runs_until_durable(writer: TieredWriter, checkpoint_id: str) -> None:
    """Wait through refusals that were met before something was mended."""
    for _ in range(20):
        try:
            writer.wait("durable", checkpoint_id, timeout_s=30)
        except ResidencyError:
            continue
        return
    pytest.fail("still held")


CHANGES = {
    "public": ("policyStatus", policy_status("true")),
    "replicated": ("replication", replication("abroad")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_during_the_flush_holds_the_commit(amazon, bucket, arguments, change):
    """T7: after the packs, before the record."""
    setting, value = CHANGES[change]

    def on_put(key: str) -> None:
        if "/packs/" in key:
            bucket.settings[setting] = value

    amazon.on_put = on_put
    with pytest.raises(ResidencyError):
        save_and_wait(arguments)
    assert any("/packs/" in key for key in bucket.objects)
    assert records(bucket) == []
    amazon.on_put = None
    del bucket.settings[setting]
    with TieredWriter(**arguments) as writer:
        runs_until_durable(writer, "step-1")
    assert len(records(bucket)) == 1


def test_a_bucket_that_moves_during_the_flush_is_not_followed(amazon, bucket, arguments):
    """T6."""

    def on_put(key: str) -> None:
        if "/packs/" in key:
            bucket.region = "us-east-2"

    amazon.on_put = on_put
    with pytest.raises(ResidencyError):
        save_and_wait(arguments)
    assert records(bucket) == []
    assert only_here(amazon)


def test_a_store_that_is_down_is_no_violation(amazon, bucket, arguments):
    amazon.faults["replication"] = Fault(503, "ServiceUnavailable")
    with TieredWriter(**arguments) as writer:
        dcp.save(runs.state_of(1), checkpoint_id="step-1", storage_writer=writer)
        error = runs.error_of(writer.wait, "durable", "step-1", timeout_s=5)
        assert not isinstance(error, ResidencyError)
        assert bucket.objects == {}
        amazon.faults.clear()
        writer.wait("durable", "step-1", timeout_s=40)


def operator(amazon: Amazon, monkeypatch) -> None:
    """Set up the environment of somebody who has nothing of the trainer's options."""
    for name, value in amazon.environment(REGION).items():
        monkeypatch.setenv(name, value)


def test_who_flushes_by_hand_is_held_to_the_policy_too(
    amazon, bucket, arguments, local, monkeypatch, capsys
):
    bucket.settings["policyStatus"] = policy_status("true")
    with pytest.raises(ResidencyError):
        save_and_wait(arguments)
    end_flushers(local)
    operator(amazon, monkeypatch)
    assert main(["flush", str(local), "--timeout", "20"]) == 9
    assert bucket.objects == {}
    del bucket.settings["policyStatus"]
    assert main(["flush", str(local), "--timeout", "30"]) == 0
    assert records(bucket)[0]["residency"]["rule"] == "aws-aws"


def test_a_writer_without_a_policy_does_not_lift_it(amazon, bucket, arguments, local):
    bucket.settings["policyStatus"] = policy_status("true")
    with pytest.raises(ResidencyError):
        save_and_wait(arguments)
    end_flushers(local)
    del arguments["residency"]
    with pytest.raises(ResidencyError):
        save_and_wait(arguments, "step-2")
    assert bucket.objects == {}


POLICY_FILE = f"""\
[[allow]]
provider = "aws"
regions = ["{REGION}"]
owner = "{ACCOUNT}"
"""


def test_check_tells_what_it_saw(amazon, bucket, tmp_path, monkeypatch, capsys):
    operator(amazon, monkeypatch)
    file = tmp_path / "policy.toml"
    file.write_text(POLICY_FILE)
    command = ["residency", "check", "tiered::s3://ckpt/run", "--policy", str(file)]
    assert main(command) == 0
    assert "s3://ckpt: allowed" in capsys.readouterr().out
    amazon.faults["replication"] = Fault(403, "AccessDenied")
    assert main(command) == 9
    said = capsys.readouterr().out
    for text in ("UNKNOWN", "s3:GetReplicationConfiguration", "s3:GetBucketReplication"):
        assert text in said
    amazon.faults["head"] = Fault(503, "ServiceUnavailable")
    assert main([*command, "--json"]) == 4
    said = json.loads(capsys.readouterr().out)
    assert said["allowed"] is False
    assert {fact["name"] for fact in said["facts"]} >= {"location", "owner", "tls"}
    file.write_text(POLICY_FILE.replace("owner", "ownr"))
    assert main(command) == 3
    assert "line 4" in capsys.readouterr().err
    assert bucket.objects == {}
    assert amazon.body_bytes.total() == 0


def test_a_policy_file_serves_a_writer(amazon, bucket, arguments, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(POLICY_FILE)
    save_and_wait(arguments | {"residency": file})
    assert records(bucket)[0]["residency"]["rule"] == "aws-0"
    del arguments["residency"]
    save_and_wait(arguments | {"tiered": {"residency": str(file)}}, "step-2")
    assert records(bucket)[1]["residency"]["rule"] == "aws-0"


@pytest.mark.parametrize(
    ("policy", "more", "error"),
    [
        ({"allow": []}, {}, InvalidError),
        ("/nowhere/policy.toml", {}, InvalidError),
        (POLICY, {"s3": {"endpoint_url": "https://s3.example.org"}}, ResidencyError),
        (POLICY, {"url": "tiered::file:///tmp/run"}, ResidencyError),
        (POLICY, {"s3": {"anon": True}}, InvalidError),
    ],
    ids=str,
)
def test_what_can_never_be_allowed_is_said_at_once(local, policy, more, error):
    given = {"url": "tiered::s3://ckpt/run", "local": local, "residency": policy} | more
    with pytest.raises(error):
        TieredWriter(**given)


def test_a_mount_without_a_marker_is_not_written_to(posix_run: Run, tmp_path):
    policy = {"allow": [{"provider": "posix", "site_id": "fra"}]}
    with pytest.raises(ResidencyError) as raised:
        save_and_wait(posix_run.arguments() | {"residency": policy})
    assert "mount is" in raised.value.message
    assert list((tmp_path / "lustre").iterdir()) == []


def test_without_a_policy_the_first_region_is_kept(s3_run: Run):
    save_and_wait(s3_run.arguments())
    assert "residency" not in s3_run.commits("step-1")[0]
    end_flushers(s3_run.local)
    elsewhere = s3_run.arguments()
    client = {"client_kwargs": {"region_name": "eu-west-9"}}
    elsewhere["s3"] = elsewhere["s3"] | client
    with pytest.raises(ResidencyError) as raised:
        save_and_wait(elsewhere, "step-2")
    assert "eu-west-9" in raised.value.message
    assert s3_run.commits("step-2") == []


def test_a_compatible_store_is_answered_for(s3_run: Run, capsys, tmp_path):
    """SeaweedFS names no region and implements no block of public access."""
    assert s3_run.server is not None
    endpoint, bucket = s3_run.server.endpoint, s3_run.server.buckets[0]
    policy = {"allow": [{"provider": "s3compat", "endpoint": endpoint}]}
    with pytest.raises(ResidencyError) as raised:
        save_and_wait(s3_run.arguments() | {"residency": policy})
    assert "location is UNKNOWN" in raised.value.message
    assert s3_run.keys() == {}
    end_flushers(s3_run.local)
    policy["attestations"] = [
        {
            "target": f"{endpoint}/{bucket}",
            "fact": fact,
            "by": "alice",
            "reason": "it runs in this test",
            "expires": (datetime.now(UTC) + timedelta(days=30)).isoformat(),
        }
        for fact in ("location", "not_public", "replication")
    ]
    save_and_wait(s3_run.arguments() | {"residency": policy}, "step-2")
    (record,) = s3_run.commits("step-2")
    vouched = record["residency"]["attestations"]
    assert {one["fact"] for one in vouched} == {"location", "not_public", "replication"}
    assert {one["by"] for one in vouched} == {"alice"}
