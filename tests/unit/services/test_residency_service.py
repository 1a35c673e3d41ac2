"""When a target is looked at, how long that is believed, and what is kept with a run."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dcp_tiered.errors import ResidencyError, UnavailableError
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.services.no_policy import RegionKept
from dcp_tiered.services.residency import PolicyCheck
from dcp_tiered.services.residency_note import (
    NOTE_FILE,
    known_policies,
    note_policy,
    noted_policy,
    read_note,
)
from dcp_tiered.services.resident_tier import ResidentTier
from dcp_tiered.tiers.posix import PosixTier
from tests.support.places import POLICY, Place
from tests.support.sources import BytesSource


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_look_is_believed_for_its_time(place: Place):
    check = place.check()
    for _ in range(3):
        check.require()
    assert place.looks == 1
    place.at += 59
    check.require()
    assert place.looks == 1
    place.at += 1
    check.require()
    assert place.looks == 2
    check.require(fresh=True)
    assert place.looks == 3


def test_what_a_commit_says(place: Place):
    said = place.check().require(fresh=True)
    assert said["policy_sha256"] == parse(POLICY).sha256
    assert said["target"] == "file:///m"
    assert said["checked_at"] == "2026-11-30T12:00:00+00:00"
    assert {fact["name"]: fact["verdict"] for fact in said["facts"]} == place.verdicts
    assert said["attestations"][0]["by"] == "alice"


def test_a_change_is_seen_at_the_commit(place: Place):
    check = place.check()
    check.require()
    place.verdicts["not_public"] = "DENY"
    check.require()
    with pytest.raises(ResidencyError) as raised:
        check.require(fresh=True)
    assert "not_public is DENY" in raised.value.message
    with pytest.raises(ResidencyError):
        check.require()


def test_what_was_mended_is_seen_soon(place: Place):
    check = place.check()
    place.verdicts["not_public"] = "DENY"
    for _ in range(5):
        with pytest.raises(ResidencyError):
            check.require()
    assert place.looks == 1
    place.verdicts["not_public"] = "ALLOW"
    place.at += 3
    check.require()


def test_an_attestation_ends_within_the_time_of_a_look(place: Place):
    check = PolicyCheck(
        parse(POLICY),
        place.observe,
        now=lambda: datetime(2026, 11, 30, 23, 59, 30, tzinfo=UTC) + timedelta(seconds=place.at),
        clock=lambda: 0.0,
    )
    place.at = 0
    check.require()
    place.at = 31
    with pytest.raises(ResidencyError) as raised:
        check.require()
    assert "has expired" in raised.value.message
    assert place.looks == 1


def test_a_store_that_does_not_answer_is_no_violation(place: Place):
    place.transient = True
    place.verdicts["not_public"] = "UNKNOWN"
    with pytest.raises(UnavailableError):
        place.check().require()
    place.verdicts["mount"] = "DENY"
    with pytest.raises(ResidencyError):
        place.check().require()


def test_nothing_is_written_where_nothing_may_be(place: Place, tmp_path: Path):
    tier = ResidentTier(PosixTier(tmp_path / "run", tmp_path, "durable"), place.check())
    tier.put("a/b", b"x")
    assert (tmp_path / "run/a/b").read_bytes() == b"x"
    place.verdicts["mount"] = "DENY"
    place.at += 60
    with pytest.raises(ResidencyError):
        tier.put("a/c", b"x")
    with pytest.raises(ResidencyError):
        tier.upload("a/d", BytesSource(b"x"))
    assert sorted(path.name for path in (tmp_path / "run/a").iterdir()) == ["b"]
    assert tier.get("a/b", 9) == b"x"


def test_a_policy_is_kept_with_the_run(tmp_path: Path):
    local = PosixTier(tmp_path / "run", tmp_path, "local")
    assert read_note(local) == {}
    policy = parse(POLICY)
    for _ in range(2):
        note_policy(local, policy)
    assert parse(read_note(local)["policy"]) == policy
    other = parse({"allow": ["aws:eu-central-1"], "owner": "123456789012"})
    note_policy(local, other)
    assert parse(read_note(local)["policy"]) == other
    assert list(local.list_directories()) == []


def test_a_policy_that_was_replaced_is_remembered(tmp_path: Path):
    local = PosixTier(tmp_path / "run", tmp_path, "local")
    policies = [parse(POLICY | {"ttl_s": ttl}) for ttl in (1, 2, 1, 3)]
    for policy in policies:
        note_policy(local, policy)
    assert known_policies(local) == [policies[n].sha256 for n in (3, 2, 1)]
    assert noted_policy(local) == policies[3].plain
    (tmp_path / "run" / NOTE_FILE).write_text("{")
    assert known_policies(local) == []
    assert noted_policy(local) is None


def test_a_damaged_note_is_no_missing_one(tmp_path: Path):
    local = PosixTier(tmp_path / "run", tmp_path, "local")
    note_policy(local, parse(POLICY))
    (tmp_path / "run" / NOTE_FILE).write_text("{")
    with pytest.raises(ResidencyError):
        read_note(local)
    note_policy(local, parse(POLICY))
    assert "policy" in read_note(local)


def test_the_region_of_the_first_flush_is_kept(tmp_path: Path):
    local = PosixTier(tmp_path / "run", tmp_path, "local")
    RegionKept(local, lambda: "eu-central-1").require()
    RegionKept(local, lambda: "eu-central-1").require()
    with pytest.raises(ResidencyError) as raised:
        RegionKept(local, lambda: "us-east-1").require()
    assert "eu-central-1" in raised.value.message


class FullTier(PosixTier):
    """A local tier on a disk without a free byte."""

    def put(self, key: str, data: bytes) -> None:
        raise UnavailableError("no space left on device", "local", key)


def test_a_full_disk_does_not_stop_the_flusher_that_empties_it(tmp_path: Path):
    RegionKept(FullTier(tmp_path / "run", tmp_path, "local"), lambda: "eu-central-1").require()
