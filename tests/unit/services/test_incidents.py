"""What was written since the target was last allowed, and the file that says so when it is not."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.config import Limits
from dcp_tiered.errors import ResidencyError, UnavailableError
from dcp_tiered.format.residency import Fact, Verdict
from dcp_tiered.policy.residency import READING
from dcp_tiered.services import incidents, run_directory
from dcp_tiered.services.incidents import KEYS_MAX, KeyNotes, violation
from dcp_tiered.services.no_policy import NoPolicy
from dcp_tiered.services.progress import Report, ReportFile, describe_error
from dcp_tiered.services.resident_tier import ReadFromResident, ResidentTier
from dcp_tiered.tiers.posix import PosixTier
from tests.support import nodes
from tests.support.places import Place


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "nvme" / "run-1"
    path.mkdir(parents=True)
    return path


def store(tmp_path: Path) -> PosixTier:
    return PosixTier(tmp_path / "store", tmp_path, "durable")


def told(local: Path) -> list[dict[str, Any]]:
    """Return the incident files, in the order of their numbers."""
    paths = sorted(local.glob("residency-incident-*.json"))
    return [json.loads(path.read_bytes()) for path in paths]


def keys(incident: dict[str, Any]) -> list[str]:
    return [row["key"] for row in incident["keys"]]


def test_what_was_written_since_the_last_good_look_is_listed(place, local, tmp_path, caplog):
    check = place.check(local)
    tier = ResidentTier(store(tmp_path), check)
    tier.put("a/old", b"x")
    place.at += 1
    check.settle()
    place.at += 1
    for key in ("a/manifest", "a/record-1.json"):
        tier.put(key, b"x")
    place.verdicts["not_public"] = "DENY"
    place.at += 1
    check.settle()
    (incident,) = told(local)
    assert keys(incident) == ["a/manifest", "a/record-1.json"]
    assert incident["last_good_at"] == "2026-11-30T12:00:01+00:00"
    assert incident["url"] == "s3://ckpt/run"
    assert "not_public is DENY" in incident["reason"]
    facts = {fact["name"]: fact["verdict"] for fact in incident["evidence"]["facts"]}
    assert facts["not_public"] == "DENY"
    assert [r for r in caplog.records if r.levelno == logging.ERROR and "incident" in r.message]
    assert isinstance(violation(local), ResidencyError)


def test_nothing_follows_an_incident_until_a_look_is_good(place, local, tmp_path):
    check = place.check(local)
    tier = ResidentTier(store(tmp_path), check)
    tier.put("a/x", b"x")
    place.verdicts["not_public"] = "DENY"
    check.settle()
    place.at += 10
    with pytest.raises(ResidencyError):
        tier.put("a/y", b"x")
    assert check.watch()
    assert not (tmp_path / "store/a/y").exists()
    place.verdicts["not_public"] = "ALLOW"
    place.at += 10
    assert not check.watch()
    assert violation(local) is None
    tier.put("a/y", b"x")
    place.verdicts["not_public"] = "DENY"
    check.settle()
    assert [keys(one) for one in told(local)] == [["a/x"], ["a/y"]]


def test_a_good_look_forgets_no_key_of_a_save_that_uploads(place, local):
    """Its bytes may leave after the look."""
    tier = PosixTier(local, local.parent, "local")
    run_directory.open_node(tier, "0" * 12)
    check = place.check(local)
    notes = KeyNotes(tier, "s3://ckpt/run")
    notes.add("a/before")
    check.require()
    with run_directory.uploading(tier):
        notes.add("a/through")
        check.require(fresh=True)
        place.verdicts["not_public"] = "DENY"
        with pytest.raises(ResidencyError):
            check.require(fresh=True)
        (incident,) = told(local)
        assert keys(incident) == ["a/through"]
        place.verdicts["not_public"] = "ALLOW"
        place.at += 10
        check.require()
        assert violation(local) is None


def test_a_good_look_forgets_no_key_of_an_upload_that_goes_on(place, local, tmp_path):
    """Another checkpoint's commit looks meanwhile; the rest of the upload leaves after that."""
    check = place.check(local)
    durable = store(tmp_path)

    class Slow:
        name, url, keeps_writers_apart = durable.name, durable.url, True

        def put(self, key, data):
            check.require(fresh=True)
            durable.put(key, data)

    ResidentTier(durable, check).put("a/before", b"x")
    ResidentTier(Slow(), check).put("a/slow", b"x")
    place.verdicts["not_public"] = "DENY"
    with pytest.raises(ResidencyError):
        place.check(local).require(fresh=True)  # another flusher has only the journal
    with pytest.raises(ResidencyError):
        check.require(fresh=True)
    (incident, same) = told(local)
    assert keys(incident) == keys(same) == ["a/slow"]
    place.verdicts["not_public"] = "ALLOW"
    place.at += 10
    check.require(fresh=True)
    place.verdicts["not_public"] = "DENY"
    with pytest.raises(ResidencyError):
        check.require(fresh=True)
    assert keys(told(local)[-1]) == [], "it was noted as being on its way for ever"


def test_a_target_that_was_never_allowed_is_no_incident(place, local):
    place.verdicts["not_public"] = "DENY"
    with pytest.raises(ResidencyError):
        place.check(local).require()
    assert told(local) == []
    assert violation(local) is None


def test_what_changes_long_after_the_commit_is_one_too(place, local):
    check = place.check(local)
    check.require()
    assert not check.watch()
    place.verdicts["replication"] = "DENY"
    place.at += 59
    assert not check.watch()
    place.at += 1
    assert check.watch()
    (incident,) = told(local)
    assert incident["keys"] == []
    assert place.looks == 2


def test_a_missing_permission_says_nothing_of_what_is_there(place, local, tmp_path):
    """It holds the flush; an incident it is only where something was written meanwhile."""
    check = place.check(local)
    check.require()
    place.verdicts["not_public"] = "UNKNOWN"
    place.at += 60
    check.watch()
    assert told(local) == []
    place.verdicts["not_public"] = "ALLOW"
    place.at += 10
    ResidentTier(store(tmp_path), check).put("a/x", b"x")
    place.verdicts["not_public"] = "UNKNOWN"
    check.settle()
    assert [keys(one) for one in told(local)] == [["a/x"]]


def test_a_store_that_is_down_leaves_the_question_open(place, local, tmp_path):
    check = place.check(local)
    ResidentTier(store(tmp_path), check).put("a/x", b"x")
    place.transient = True
    place.verdicts["not_public"] = "UNKNOWN"
    check.settle()
    assert told(local) == []
    looks = place.looks
    check.settle()
    assert place.looks == looks
    place.transient = False
    place.verdicts["not_public"] = "DENY"
    place.at += 10
    check.settle()
    assert [keys(one) for one in told(local)] == [["a/x"]]


def test_a_key_that_two_threads_send_is_kept_until_the_last_has_sent_it(place, local):
    check = place.check(local)
    check.require()
    for _ in range(2):
        check.note("a/pack")
    check.sent("a/pack")
    place.at += 1
    check.require(fresh=True)
    place.verdicts["not_public"] = "DENY"
    place.at += 1
    check.settle()
    assert [set(keys(one)) for one in told(local)] == [{"a/pack"}]


def test_nothing_is_written_between_an_incident_and_a_look_that_was_good_before_it(
    place, local, tmp_path
):
    """Two threads: one is allowed to write, and another finds that it is not, before it writes."""
    check = place.check(local)
    tier = ResidentTier(store(tmp_path), check)
    tier.put("a/x", b"x")

    class Between(type(check)):
        def require(self, *, fresh=False):
            said = super().require(fresh=fresh)
            place.verdicts["not_public"] = "DENY"
            place.at += 10
            check.settle()
            return said

    check.__class__ = Between
    with pytest.raises(ResidencyError, match="not_public is DENY"):
        tier.put("a/y", b"y")
    assert not (tmp_path / "store/a/y").exists()
    assert [keys(one) for one in told(local)] == [["a/x"]]


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.support.places import Place
from dcp_tiered.services.resident_tier import ResidentTier
from dcp_tiered.tiers.posix import PosixTier

class Dies(PosixTier):
    def put(self, key, data):
        if key == "a/record-1.json":
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(key, data)

base = Path(sys.argv[1])
tier = ResidentTier(Dies(base / "store", base, "durable"), Place().check(base / "nvme/run-1"))
for key in ("a/manifest", "a/record-1.json"):
    tier.put(key, b"x")
"""


def test_a_flusher_that_is_killed_leaves_the_keys_to_the_next(place, local, tmp_path):
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "store/a/manifest").exists()
    place.verdicts["not_public"] = "DENY"
    place.check(local).settle()
    (incident,) = told(local)
    assert keys(incident) == ["a/manifest", "a/record-1.json"]
    assert incident["last_good_at"] is not None


def test_an_incident_stands_for_the_next_flusher_too(place, local, tmp_path):
    check = place.check(local)
    ResidentTier(store(tmp_path), check).put("a/x", b"x")
    place.verdicts["not_public"] = "DENY"
    check.settle()
    assert place.check(local).watch()
    assert len(told(local)) == 1
    place.verdicts["not_public"] = "ALLOW"
    assert not place.check(local).watch()


def test_a_torn_line_costs_no_other(place, local, tmp_path):
    ResidentTier(store(tmp_path), place.check(local)).put("a/x", b"x")
    with (local / ".residency-journal").open("ab") as file:
        file.write(b'\n{"key": "a/torn')
    journal = incidents.KeyJournal(PosixTier(local, local.parent, "local"), "s3://ckpt/run")
    journal.add("a/y")
    found = [row["key"] for row in incidents.read_journal(local).keys]
    assert found == ["a/x", "a/y"]


def test_a_journal_that_cannot_be_written_stops_nothing(place, local, tmp_path):
    (local / ".residency-journal").mkdir()
    check = place.check(local)
    ResidentTier(store(tmp_path), check).put("a/x", b"x")
    place.verdicts["not_public"] = "DENY"
    check.settle()
    assert [keys(one) for one in told(local)] == [["a/x"]]


def test_the_keys_are_bounded_by_one_more_look(place, local, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    check = place.check(local)
    for number in range(KEYS_MAX + 1):
        check.require()
        check.note(f"a/{number}")
        check.sent(f"a/{number}")
    assert place.looks == 2
    assert [row["key"] for row in incidents.read_journal(local).keys] == [f"a/{KEYS_MAX}"]


def test_a_held_checkpoint_is_a_violation_until_it_is_not(local):
    reports = ReportFile(run_path=local)
    error = describe_error(ResidencyError("not there", "durable"))
    reports.set(Report(checkpoint_id="a", attempt="1", state="held_residency", error=error))
    found = violation(local)
    assert found is not None
    assert found.message == "not there"
    reports.set(Report(checkpoint_id="a", attempt="1", state="failed", error=error))
    assert violation(local) is None


# ------------------------------------------------------------------------- whose checkpoint


def test_a_checkpoint_of_another_policy_is_held(place):
    check = place.check(earlier=["b" * 64])
    for sha in (None, check.require()["policy_sha256"], "b" * 64):
        check.admit(sha)
    with pytest.raises(ResidencyError, match="saved under"):
        check.admit("c" * 64)
    NoPolicy().admit(None)
    with pytest.raises(ResidencyError):
        NoPolicy().admit("c" * 64)


def test_a_flusher_brings_nothing_of_another_policy(tmp_path):
    limits = Limits()
    (node,) = nodes.make_nodes(1, tmp_path / "nodes", tmp_path / "store" / "run", limits)
    node.seal("a", 1, "0" * 16)
    nodes.publish([node], "a", policy_sha256="c" * 64)
    node.flusher.step()
    assert isinstance(node.flusher.failures()["a"], ResidencyError)
    assert not list((tmp_path / "store").rglob("*.*"))
    status = json.loads((node.local.root / "flusher-status.json").read_text())
    assert status["reports"][0]["state"] == "held_residency"


# ------------------------------------------------------------------------- without a policy


def about(verdict: str) -> Fact:
    return Fact(name="not_public", verdict=Verdict(verdict), evidence="as told")


def test_without_a_policy_what_is_known_to_be_public_is_refused():
    said, now = ["DENY"], [0.0]
    asked = []

    def public() -> Fact:
        asked.append(now[0])
        return about(said[0])

    check = NoPolicy(public, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(ResidencyError, match="public"):
            check.require()
    assert len(asked) == 1
    said[0], now[0] = "ALLOW", 3.0
    for _ in range(3):
        check.require()
    assert len(asked) == 2


def test_without_a_policy_what_is_not_known_passes_with_one_warning(caplog):
    check = NoPolicy(lambda: about("UNKNOWN"))
    for _ in range(3):
        check.require()
    assert len([r for r in caplog.records if "no residency policy" in r.message]) == 1


# ------------------------------------------------------------------------- who only reads


def test_who_reads_asks_where_it_is_and_not_who_else_reads(place, tmp_path):
    store(tmp_path).put("a/x", b"x")
    place.verdicts = {"mount": "ALLOW"}
    tier = ReadFromResident(store(tmp_path), place.check(required=READING))
    assert tier.get("a/x", 9) == b"x"
    place.verdicts["mount"] = "DENY"
    place.at += 60
    buffer = memoryview(bytearray(1))
    for read in (
        lambda: tier.get("a/x", 9),
        lambda: tier.head("a/x"),
        lambda: tier.read_into("a/x", 0, buffer),
        lambda: tier.list_keys("a"),
        tier.list_directories,
    ):
        with pytest.raises(ResidencyError):
            read()
    place.verdicts["mount"], place.transient = "UNKNOWN", True
    place.at += 60
    with pytest.raises(UnavailableError):
        tier.get("a/x", 9)
