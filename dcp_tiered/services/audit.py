"""Where did every checkpoint go, and who vouched: reads all records of a run, writes nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from dcp_tiered.errors import AbsentError, CorruptError, InvalidError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.records import (
    RECORD_BYTES_MAX,
    Commit,
    Expired,
    Fence,
    Record,
    decode_record,
)
from dcp_tiered.format.residency import Evidence, read_evidence
from dcp_tiered.interfaces import Tier
from dcp_tiered.policy.residency import Policy
from dcp_tiered.policy.residency_audit import judge_again
from dcp_tiered.services.catalog import parallel
from dcp_tiered.services.residency import refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRecord:
    """One commit record, or one that cannot be read, and what is to be said about it."""

    number: int
    state: str
    """`committed`, `superseded` or `expired`; `unknown` where a damaged record may say so."""
    finding: str
    """`evidence`, `no policy`, `not allowed` or `damaged`."""
    commit: Commit | None = None
    """None for one that cannot be read."""
    evidence: Evidence | None = None
    error: TieredError | None = None
    """Why it is damaged, or not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedCheckpoint:
    """All that lies under one checkpoint id."""

    checkpoint_id: str
    records: tuple[AuditedRecord, ...]
    uncommitted: tuple[str, ...]
    """Objects that no commit names: of attempts that were given up, or that go on."""


def audit(durable: Tier, policy: Policy | None, now: datetime) -> list[AuditedCheckpoint]:
    """Read every record of a run; one request lists the ids, one each what is below them.

    Args:
        durable: Of the run.
        policy: What the evidence is held to, None to only show it.
        now: With a time zone.

    Raises:
        UnavailableError: The store does not answer.
    """
    ids = sorted(durable.list_directories())
    listed = dict(zip(ids, parallel(lambda name: _names(durable, name), ids), strict=True))
    wanted = [(name, number) for name in ids for number in _numbers(name, listed[name])]
    read = parallel(lambda one: _read(durable, *one), wanted)
    records: dict[str, dict[int, Record | TieredError]] = {name: {} for name in ids}
    for (name, number), record in zip(wanted, read, strict=True):
        records[name][number] = record
    return [
        AuditedCheckpoint(
            checkpoint_id=name,
            records=tuple(_audited(records[name], policy, now)),
            uncommitted=tuple(_uncommitted(listed[name], records[name])),
        )
        for name in ids
    ]


def _names(durable: Tier, directory: str) -> list[str]:
    return sorted(key.partition("/")[2] for key in durable.list_keys(directory))


def _numbers(directory: str, names: Iterable[str]) -> list[int]:
    """Return the numbers of records; a directory of another name holds none that would count."""
    if not layout.is_checkpoint_id(directory):
        return []
    return sorted(n for name in names if (n := layout.record_number(name)) is not None)


def _read(durable: Tier, checkpoint_id: str, number: int) -> Record | TieredError:
    """Return a record, or why it cannot be read: that is a finding, a store that is down is not."""
    try:
        data = durable.get(layout.key(checkpoint_id, layout.record_name(number)), RECORD_BYTES_MAX)
    except (AbsentError, CorruptError) as exc:
        return exc
    try:
        return decode_record(data, checkpoint_id)
    except (CorruptError, InvalidError) as exc:
        return exc


def _audited(
    records: Mapping[int, Record | TieredError], policy: Policy | None, now: datetime
) -> Iterable[AuditedRecord]:
    for number, record in sorted(records.items()):
        if isinstance(record, TieredError):
            yield AuditedRecord(number=number, state="unknown", finding="damaged", error=record)
        elif isinstance(record, Commit):
            yield _judged(number, _state(number, records), record, policy, now)


def _judged(
    number: int, state: str, commit: Commit, policy: Policy | None, now: datetime
) -> AuditedRecord:
    finding = "no policy"
    evidence: Evidence | None = None
    error: TieredError | None = None
    if commit.residency is not None:
        try:
            finding, evidence = "evidence", read_evidence(commit.residency)
        except CorruptError as exc:
            finding, error = "damaged", exc
    if policy is not None and evidence is not None:
        decision = judge_again(policy, evidence, now)
        if not decision.allowed:
            finding, error = "not allowed", refusal(decision)
    return AuditedRecord(
        number=number, state=state, finding=finding, commit=commit, evidence=evidence, error=error
    )


def _state(number: int, records: Mapping[int, Record | TieredError]) -> str:
    """Return what became of a commit."""
    above = [records[n] for n in sorted(records) if n > number]
    above = [record for record in above if not isinstance(record, Fence)]
    if any(isinstance(record, TieredError) for record in above):
        return "unknown"
    if not above:
        return "committed"
    return "expired" if isinstance(above[-1], Expired) else "superseded"


def _uncommitted(names: list[str], records: Mapping[int, Record | TieredError]) -> list[str]:
    named = {layout.record_name(number) for number in records}
    for record in records.values():
        if isinstance(record, Commit):
            packs = [pack.name for pack in record.packs]
            named |= {layout.manifest_name(record.attempt), *packs, *map(layout.ok_name, packs)}
    return [name for name in names if name not in named]
