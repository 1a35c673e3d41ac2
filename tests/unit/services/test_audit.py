"""What an audit says of every commit of a run, whatever lies there."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.records import Commit, Expired, Fence, PackRef, encode_record
from dcp_tiered.format.residency import Fact, Observed, Verdict, read_evidence
from dcp_tiered.policy.residency import decide
from dcp_tiered.policy.residency_schema import parse
from dcp_tiered.services.audit import AuditedCheckpoint, audit
from dcp_tiered.tiers.posix import PosixTier

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
THEN = NOW - timedelta(days=60)
ACCOUNT = "123456789012"
POLICY = {"allow": ["aws:eu-central-1"], "owner": ACCOUNT}
FACTS = {
    "location": ("aws:eu-central-1",),
    "owner": (ACCOUNT,),
    "not_public": (),
    "replication": (),
    "encryption": ("key of the store",),
    "endpoint": ("aws:eu-central-1",),
    "tls": (),
}


def stored(policy: Any = None, at: datetime = NOW, unknown: str = "", **values: Any) -> Any:
    """Return what a commit keeps, as the flusher makes it."""
    facts = tuple(
        Fact(
            name=name,
            verdict=Verdict.UNKNOWN if name == unknown else Verdict.ALLOW,
            evidence="seen",
            values=found,
        )
        for name, found in (FACTS | values).items()
    )
    parsed = parse(policy or POLICY)
    seen = Observed(target="s3://ckpt", provider="aws", facts=facts)
    decision = decide(parsed, seen, parsed.attestations, at)
    assert decision.allowed, decision.against()
    return decision.stored()


def attested(expires: datetime) -> dict[str, Any]:
    row = {"target": "s3://ckpt", "fact": "tls", "by": "alice", "reason": "a wire"}
    return POLICY | {"attestations": [{**row, "expires": expires.isoformat()}]}


def commit(checkpoint_id="step-1", attempt="a" * 16, **changes: Any) -> Commit:
    return Commit(
        **{
            "checkpoint_id": checkpoint_id,
            "attempt": attempt,
            "sequence": 1,
            "step": 1,
            "manifest_sha256": "0" * 64,
            "manifest_length": 1,
            "packs": (PackRef(name=f"packs/{'b' * 12}-{attempt}.pack", length=1, crc32c=0),),
            "placements": (),
            "bytes_stored": 1,
            "committed_by": "b" * 12,
            "committed_at": "2026-11-30T12:00:00+00:00",
        }
        | changes
    )


class Store:
    """A run root that a test fills by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tier = PosixTier(root, root.parent, "durable")

    def put(self, key: str, data: bytes = b"x") -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def log(self, checkpoint_id: str, *records: Any) -> None:
        for number, record in enumerate(records, 1):
            data = record if isinstance(record, bytes) else encode_record(record, "0")
            self.put(f"{checkpoint_id}/record-{number}.json", data)

    def audit(self, policy: Any = None) -> dict[str, AuditedCheckpoint]:
        found = audit(self.tier, None if policy is None else parse(policy), NOW)
        return {one.checkpoint_id: one for one in found}

    def findings(self, policy: Any = None) -> list[tuple[str, str]]:
        """Return state and finding of the records of step-1."""
        return [(one.state, one.finding) for one in self.audit(policy)["step-1"].records]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "run").mkdir()
    return Store(tmp_path / "run")


def test_superseded_commits_are_shown_too(store: Store):
    old = commit(residency=stored())
    fence = Fence(checkpoint_id="step-1", attempts=("c" * 16,))
    store.log("step-1", old, fence, commit(attempt="d" * 16))
    store.log("step-2", commit("step-2"), Expired(checkpoint_id="step-2"))
    assert store.findings() == [("superseded", "evidence"), ("committed", "no policy")]
    (expired,) = store.audit()["step-2"].records
    assert expired.state == "expired"
    evidence = store.audit()["step-1"].records[0].evidence
    assert evidence is not None
    assert evidence.observed.target == "s3://ckpt"
    assert evidence.values("owner") == (ACCOUNT,)


def test_another_policy_judges_what_was_seen(store: Store):
    store.log("step-1", commit(residency=stored()))
    assert store.findings(POLICY) == [("committed", "evidence")]
    elsewhere = {
        "region": {"allow": ["aws:eu-west-1"], "owner": ACCOUNT},
        "account": {"allow": ["aws:eu-central-1"], "owner": "999999999999"},
        "key": {
            "allow": [
                {
                    "provider": "aws",
                    "regions": ["eu-central-1"],
                    "owner": ACCOUNT,
                    "require_kms": True,
                }
            ]
        },
        "provider": {"allow": [{"provider": "posix", "site_id": "fra"}]},
    }
    for name, policy in elsewhere.items():
        assert store.findings(policy) == [("committed", "not allowed")], name
    error = store.audit(elsewhere["region"])["step-1"].records[0].error
    assert error is not None
    assert "not in the policy: aws:eu-central-1" in error.message


@pytest.mark.parametrize(
    ("target", "facts", "good", "bad"),
    [
        (
            "file:///lustre",
            {"mount": ["site_id=fra", "fstype=lustre"], "not_public": [], "replication": []},
            {"provider": "posix", "site_id": "fra"},
            {"provider": "posix", "site_id": "par"},
        ),
        (
            "https://s3.dc1.example/ckpt",
            {
                "location": ["s3compat:dc1"],
                "not_public": [],
                "replication": [],
                "encryption": ["key of the store"],
                "endpoint": ["https://s3.dc1.example"],
                "tls": [],
            },
            {"provider": "s3compat", "endpoint": "https://s3.dc1.example"},
            {"provider": "s3compat", "endpoint": "https://s3.dc2.example"},
        ),
    ],
)
def test_targets_of_other_kinds_are_told_by_their_scheme(store, target, facts, good, bad):
    rows = [
        {"name": name, "verdict": "ALLOW", "values": values, "evidence": "seen"}
        for name, values in facts.items()
    ]
    store.log("step-1", commit(residency=stored() | {"target": target, "facts": rows}))
    assert store.findings({"allow": [good]}) == [("committed", "evidence")]
    assert store.findings({"allow": [bad]}) == [("committed", "not allowed")]


def test_what_was_not_looked_at_is_not_allowed(store: Store):
    said = stored()
    said["facts"] = [fact for fact in said["facts"] if fact["name"] != "replication"]
    store.log("step-1", commit(residency=said))
    assert store.findings() == [("committed", "evidence")]
    assert store.findings(POLICY) == [("committed", "not allowed")]


def test_an_attestation_counts_for_what_was_committed_while_it_did(store: Store):
    then = attested(THEN + timedelta(days=30))
    store.log("step-1", commit(residency=stored(then, THEN, unknown="tls")))
    (record,) = store.audit()["step-1"].records
    assert record.evidence is not None
    assert [(one.fact, one.by) for one in record.evidence.vouched] == [("tls", "alice")]
    # It has run out since; renewed it counts as well; without one nobody answers by this policy.
    assert store.findings(then) == [("committed", "evidence")]
    assert store.findings(attested(NOW + timedelta(days=80))) == [("committed", "evidence")]
    assert store.findings(POLICY) == [("committed", "not allowed")]
    before = attested(THEN - timedelta(days=1))
    assert store.findings(before) == [("committed", "not allowed")]


def test_damage_is_a_row_of_its_own_and_makes_what_is_below_unknown(store: Store):
    store.log("step-1", commit(residency=stored()), b"{", commit(attempt="d" * 16))
    assert store.findings() == [
        ("unknown", "evidence"),
        ("unknown", "damaged"),
        ("committed", "no policy"),
    ]
    store.log("step-1", commit(residency=stored() | {"facts": 3}), b"{")
    assert store.findings(POLICY)[0] == ("unknown", "damaged")


def test_what_no_commit_names_is_listed(store: Store):
    pack = f"packs/{'b' * 12}-{'a' * 16}.pack"
    named = [f"manifest-{'a' * 16}.json", pack, f"{pack}.ok"]
    lost = [f"manifest-{'e' * 16}.json", f"packs/{'b' * 12}-{'e' * 16}.pack", "what.bin"]
    for name in (*named, *lost):
        store.put(f"step-1/{name}")
    store.log("step-1", commit(), commit(attempt="d" * 16))
    store.put(f"step-2/manifest-{'f' * 16}.json")
    found = store.audit()
    assert list(found["step-1"].uncommitted) == sorted(lost)
    assert found["step-2"].records == ()
    assert len(found["step-2"].uncommitted) == 1


def test_a_directory_of_another_name_holds_no_commits(store: Store):
    store.put("-odd/record-1.json", encode_record(commit(), "0"))
    found = store.audit()["-odd"]
    assert (found.records, found.uncommitted) == ((), ("record-1.json",))


def test_nothing_is_written(store: Store):
    store.log("step-1", commit(residency=stored()))
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    store.audit(POLICY)
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


def spoilt(value: Any) -> list[Any]:
    """Return a value with each of its parts replaced by something else."""
    others: list[Any] = [None, 3, "", [], {}, [None], [3] * 300, "x" * 5000]
    if isinstance(value, dict):
        others += [{**value, key: other} for key in value for other in spoilt(value[key])]
    if isinstance(value, list) and value:
        others += [[other, *value[1:]] for other in spoilt(value[0])]
    return others


def test_hostile_evidence_is_damage_and_nothing_else():
    good = stored(attested(NOW + timedelta(days=9)), unknown="tls")
    refused = 0
    for other in spoilt(good):
        if not isinstance(other, dict):
            continue
        try:
            read_evidence(other)
        except CorruptError:
            refused += 1
    assert refused > 60
    assert read_evidence(good).vouched[0].by == "alice"
