"""What happens after a commit: another look, an incident file, and saves that fail if wanted."""

import json
import os
import signal
import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_tiered import ResidencyError, TieredWriter, cause
from dcp_tiered.cli import main
from tests.conftest import QUICK, Run, flusher_pids
from tests.support import runs
from tests.support.amazon import ACCOUNT, policy_status, replication
from tests.support.ranks import share_ranks
from tests.support.workers import await_that

pytestmark = pytest.mark.slow
REGION = "eu-central-1"
POLICY = {"allow": [f"aws:{REGION}"], "owner": ACCOUNT, "ttl_s": 1}


def incidents(local: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in local.glob("*/residency-incident-*.json")]


def save(writer: TieredWriter, checkpoint_id: str) -> None:
    dcp.save(runs.state_of(1), checkpoint_id=checkpoint_id, storage_writer=writer)


CHANGES = {
    "public": ("policyStatus", policy_status("true")),
    "replicated": ("replication", replication("abroad")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_with_the_commit_is_an_incident(amazon, bucket, arguments, local, capsys, change):
    """T7: after the record."""
    setting, value = CHANGES[change]

    def on_put(key: str) -> None:
        if "/record-" in key:
            bucket.settings[setting] = value

    amazon.on_put = on_put
    with TieredWriter(**arguments) as writer:
        save(writer, "step-1")
        writer.wait("durable", "step-1", timeout_s=40)
        await_that("the incident", lambda: stands(local, capsys))
        (incident,) = incidents(local)
        assert [row["key"] for row in incident["keys"]] == ["step-1/record-1.json"]
        facts = {fact["name"]: fact for fact in incident["evidence"]["facts"]}
        assert facts["not_public" if change == "public" else setting]["verdict"] == "DENY"
        assert writer.metrics()["dcp_tiered_residency_incidents"] == 1
        assert main(["status", str(local)]) == 0
        assert "residency incident, stands" in capsys.readouterr().out
    assert len([key for key in bucket.objects if "/record-" in key]) == 1


def test_saves_fail_while_it_stands_if_that_is_wanted(amazon, bucket, arguments, local, capsys):
    with TieredWriter(**arguments, on_violation="fail_save") as writer:
        save(writer, "step-1")
        writer.wait("durable", "step-1", timeout_s=40)
        bucket.settings["policyStatus"] = policy_status("true")
        await_that("the incident", lambda: stands(local, capsys))
        error = runs.error_of(save, writer, "step-2")
        assert isinstance(error, ResidencyError)
        assert "residency-incident-1.json" in error.message
        assert not list(local.glob("*/step-2/*.shard"))
        with TieredWriter(**arguments) as holding:
            save(holding, "step-3")
            with pytest.raises(ResidencyError):
                holding.wait("durable", "step-3", timeout_s=40)
        assert not any("step-3" in key for key in bucket.objects)
        del bucket.settings["policyStatus"]
        await_that("the end of it", lambda: not stands(local, capsys))
        save(writer, "step-4")
        writer.wait("durable", "step-3", timeout_s=40)
        writer.wait("durable", "step-4", timeout_s=40)
    assert len(incidents(local)) == 1
    assert len([key for key in bucket.objects if "/record-" in key]) == 3


def stands(local: Path, capsys) -> bool:
    main(["status", str(local), "--json"])
    shown = json.loads(capsys.readouterr().out)
    states = [line["state"] for line in shown["checkpoints"]]
    standing = any(incident["stands"] for incident in shown["residency_incidents"])
    return standing or "held_residency" in states


def test_a_flusher_killed_before_it_looked_leaves_what_it_wrote(amazon, bucket, arguments, local):
    """Killed between a put and the look after it, while the bucket becomes public."""
    killed = []
    arguments["residency"] = POLICY | {"ttl_s": 300}

    def on_put(key: str) -> None:
        if "/packs/" in key and not killed:
            killed.extend(flusher_pids(local))
            bucket.settings["policyStatus"] = policy_status("true")
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    amazon.on_put = on_put
    with TieredWriter(**arguments) as writer:
        save(writer, "step-1")
        await_that("the kill", lambda: killed and not flusher_pids(local))
        with pytest.raises(ResidencyError):
            writer.wait("durable", "step-1", timeout_s=40)
    (incident,) = incidents(local)
    listed = {row["key"] for row in incident["keys"]}
    prefix = arguments["url"].removeprefix("tiered::s3://ckpt/")
    there = {key.removeprefix(f"{prefix}/") for key in bucket.objects}
    assert there <= listed
    assert any("/packs/" in key for key in listed)
    assert any("/manifest-" in key for key in listed)
    assert not any("/record-" in key for key in there)


def test_an_idle_flusher_sees_what_changes(amazon, bucket, arguments, local):
    arguments = runs.with_limits(arguments, idle_exit_s=60.0)
    with TieredWriter(**arguments) as writer:
        save(writer, "step-1")
        writer.wait("durable", "step-1", timeout_s=40)
    (journal,) = local.glob("*/.residency-journal")
    await_that("the look after it", lambda: b"record-1" not in journal.read_bytes())
    assert incidents(local) == []
    bucket.settings["policyStatus"] = policy_status("true")
    (incident,) = await_that("the incident", lambda: incidents(local))
    assert incident["keys"] == []
    assert incident["last_good_at"] is not None


def test_without_a_policy_a_public_bucket_gets_nothing(amazon, bucket, arguments):
    del arguments["residency"]
    bucket.lists_to_anybody = True
    with TieredWriter(**arguments) as writer:
        save(writer, "step-1")
        with pytest.raises(ResidencyError) as raised:
            writer.wait("durable", "step-1", timeout_s=40)
        assert "public" in raised.value.message
        assert bucket.objects == {}
        bucket.lists_to_anybody = False
        await_that("the next look", lambda: bucket.objects)  # a refusal is believed for a while
        writer.wait("durable", "step-1", timeout_s=40)


def test_a_real_server_that_becomes_public_is_seen(s3_server, local):
    """SeaweedFS, with and without a policy."""
    bucket = f"open-{uuid.uuid4().hex[:8]}"
    s3_server.client().create_bucket(Bucket=bucket)
    policy = {
        "allow": [{"provider": "s3compat", "endpoint": s3_server.endpoint}],
        "ttl_s": 1,
        "attestations": [
            {
                "target": f"{s3_server.endpoint}/{bucket}",
                "fact": fact,
                "by": "alice",
                "reason": "it runs in this test",
                "expires": (datetime.now(UTC) + timedelta(days=30)).isoformat(),
            }
            for fact in ("location", "not_public", "replication")
        ],
    }
    given = {"local": str(local), "limits": QUICK, "s3": s3_server.storage_options()}
    with TieredWriter(f"tiered::s3://{bucket}/a", residency=policy, **given) as writer:
        save(writer, "step-1")
        writer.wait("durable", "step-1", timeout_s=40)
        s3_server.client().put_bucket_acl(Bucket=bucket, ACL="public-read")
        (incident,) = await_that("the incident", lambda: incidents(local))
        assert "not_public is DENY" in incident["reason"]
    with TieredWriter(f"tiered::s3://{bucket}/b", **given) as writer:
        save(writer, "step-1")
        with pytest.raises(ResidencyError, match="public"):
            writer.wait("durable", "step-1", timeout_s=40)
    listed = s3_server.client().list_objects_v2(Bucket=bucket, Prefix="b/")
    assert listed["KeyCount"] == 0


def test_what_was_held_leaves_under_the_policy_that_was_mended(amazon, bucket, arguments):
    """The same process mends it: the flusher that runs begins anew with what was noted."""
    wrong = {"allow": ["aws:eu-west-1"], "owner": ACCOUNT, "ttl_s": 1}
    with TieredWriter(**(arguments | {"residency": wrong})) as writer:
        save(writer, "step-1")
        with pytest.raises(ResidencyError):
            writer.wait("durable", "step-1", timeout_s=40)
    with TieredWriter(**arguments) as writer:
        save(writer, "step-2")
        for _ in range(10):
            with suppress(ResidencyError):
                writer.wait("durable", "step-2", timeout_s=40)
                break
        writer.wait("durable", "step-1", timeout_s=40)
    assert len([key for key in bucket.objects if "/record-" in key]) == 2


def test_a_flusher_without_the_policy_brings_nothing(posix_run: Run):
    """As on a node that never heard of it: the manifest tells."""
    policy = {"allow": [{"provider": "posix", "site_id": "fra"}]}
    with runs.no_flusher(posix_run):
        runs.save(posix_run.arguments(), "step-1", 1, residency=policy)
    (posix_run.run_path() / ".residency.json").unlink()
    error = runs.error_of(runs.wait, posix_run.arguments(), "step-1", timeout_s=40)
    assert isinstance(error, ResidencyError)
    assert "saved under residency policy" in error.message
    assert posix_run.keys() == {}


# --------------------------------------------------------------------------- several ranks


def posix_policy(site_id: str) -> dict[str, Any]:
    return {"allow": [{"provider": "posix", "site_id": site_id}]}


def failing(rank: int, arguments: dict[str, Any]) -> tuple[str, str]:
    with TieredWriter(**arguments) as writer:
        save(writer, "a")
        with pytest.raises(ResidencyError):
            writer.wait("durable", "a", timeout_s=40)
        try:
            save(writer, "b")
        except BaseException as exc:  # noqa: BLE001 - CheckpointException is none of Exception
            error = cause(exc)
            return type(error).__name__, str(error)
    return "", ""


def test_a_save_fails_on_all_ranks_alike(posix_run: Run):
    arguments = posix_run.arguments() | {
        "residency": posix_policy("fra"),
        "on_violation": "fail_save",
    }
    answers = share_ranks(2, failing, arguments)
    assert answers[0] == answers[1]
    assert answers[0][0] == "ResidencyError"
    assert "mount is" in answers[0][1]
    states = {path.name for path in posix_run.run_path().iterdir() if path.is_dir()}
    assert list((posix_run.run_path() / "a").glob("*.shard")), "what is local stays"
    assert "b" not in states or not list((posix_run.run_path() / "b").glob("*.shard"))


def differing(rank: int, arguments: dict[str, Any], policies: list[Any]) -> tuple[str, str]:
    with TieredWriter(**arguments, residency=policies[rank]) as writer:
        try:
            save(writer, "a")
        except BaseException as exc:  # noqa: BLE001 - the same
            error = cause(exc)
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("other", [posix_policy("muc"), None], ids=["another", "none"])
def test_ranks_with_different_policies_fail_together(posix_run: Run, other):
    """T11: nothing was written, and the policy of neither is kept with the run."""
    policies = [posix_policy("fra"), other]
    answers = share_ranks(2, differing, posix_run.arguments(), policies)
    assert answers[0] == answers[1]
    assert answers[0][0] == "ResidencyError"
    assert "on rank 0; " in answers[0][1]
    assert answers[0][1].splitlines()[0].count("on rank ") == 2
    written = {path.name for path in posix_run.local.rglob("*") if path.is_file()}
    assert written <= {"run.json", "node.json"}


def cached(rank: int, arguments: dict[str, Any]) -> list[str]:
    """Save the same state again and again: DCP sends no plans then, so none tells a policy."""
    seen = []
    for number, site in enumerate(("fra", "fra", ("fra", "muc")[rank])):
        with TieredWriter(**arguments, residency=posix_policy(site)) as writer:
            planner = DefaultSavePlanner(enable_plan_caching=True)
            # Each rank has something of its own, so that each writes a shard file.
            state = runs.state_of(1) | {f"of-{rank}": f"{rank}"}
            try:
                dcp.save(state, checkpoint_id=f"c-{number}", storage_writer=writer, planner=planner)
                seen.append("saved")
            except BaseException as exc:  # noqa: BLE001 - the same
                seen.append(type(cause(exc)).__name__)
    for name in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(DefaultSavePlanner, name).clear()
    for name in ("_cached_metadata", "_cached_final_save_plan"):
        getattr(DefaultSavePlanner, name).clear()
    return seen


def test_cached_plans_hide_no_difference(posix_run: Run):
    with runs.no_flusher(posix_run):
        answers = share_ranks(2, cached, posix_run.arguments())
    assert answers == [["saved", "saved", "ResidencyError"]] * 2
    published = {path.parent.name for path in posix_run.local.rglob("published-*.json")}
    assert published == {"c-0", "c-1"}
