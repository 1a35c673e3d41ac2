"""Records: the log of small create-only objects that says what a checkpoint id is.

The highest record that is not a fence is the state of the id. A record is one JSON object; its
`crc32c` is that of the same object without it, so that what a disk garbled says nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from awscrt.checksums import crc32c

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.format.fields import (
    CRC_MAX,
    NUMBER_MAX,
    integer,
    must_read_back,
    optional_integer,
    rows,
    shown,
    text,
)
from dcp_tiered.format.footer import VERSION, check_features
from dcp_tiered.format.frames import FEATURE
from dcp_tiered.format.residency import check_stored

RECORD_BYTES_MAX = 1 << 28
_FORMAT = "dcp_tiered record"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRef:
    """A verified pack."""

    name: str
    length: int
    crc32c: int
    raw_length: int | None = None
    """What its shard files take, end to end, where they are compressed; None, and not stored, where
    they lie there as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a shard file lies on the durable tier."""

    shard: str
    pack: int
    """Position in `Commit.packs`."""
    start: int
    """First byte in that pack, before compression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The checkpoint id is this attempt, and all of it is durable and verified."""

    checkpoint_id: str
    attempt: str
    sequence: int
    step: int | None
    manifest_sha256: str
    manifest_length: int
    packs: tuple[PackRef, ...]
    placements: tuple[Placement, ...]
    bytes_stored: int
    """Length of all shard files together."""
    committed_by: str
    """Node."""
    committed_at: str
    """UTC, for people; order is in `sequence`."""
    residency: Mapping[str, Any] | None = None
    """What allowed it to be there: policy hash, evidence and attestations, for audits; None, and
    not stored, without a policy."""
    exclusive: bool = True
    """Whether the store lets only one of two writers of a record in; stored only where it does
    not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """These attempts are dead: whoever still works on one of them stops."""

    checkpoint_id: str
    attempts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """The id is no longer a checkpoint: what was committed before is withdrawn, its data may go."""

    checkpoint_id: str


Record = Commit | Fence | Expired
_KINDS: dict[str, type[Record]] = {"commit": Commit, "fence": Fence, "expired": Expired}


def encode_record(record: Record, written_by: str) -> bytes:
    """Return the stored bytes of a record: JSON.

    Raises:
        InvalidError: It says something that a reader would refuse.
    """
    fields = {
        "format": _FORMAT,
        "version": VERSION,
        "requires": [],
        "written_by": written_by,
        "kind": next(name for name, cls in _KINDS.items() if isinstance(record, cls)),
        **asdict(record),
    }
    if fields.get("residency") is None:
        fields.pop("residency", None)
    if fields.get("exclusive") is True:
        del fields["exclusive"]
    for pack in fields.get("packs", ()):
        if pack["raw_length"] is None:
            del pack["raw_length"]
        else:
            fields["requires"] = [FEATURE]
    data = with_sum(fields)
    with must_read_back("record"):
        if decode_record(data, record.checkpoint_id) != record:
            raise CorruptError("it is read as another one")
    return data


def decode_record(data: bytes, checkpoint_id: str) -> Record:
    """Decode and check a record.

    Args:
        data: The stored bytes.
        checkpoint_id: The directory it was found in, which it must be about.

    Raises:
        CorruptError: It is not a record of that checkpoint.
        InvalidError: It needs a newer version.
    """
    fields = checked_sum(data, _FORMAT, [FEATURE])
    kind = fields.get("kind")
    if kind == "commit":
        return _commit(fields, checkpoint_id)
    if kind == "fence":
        return Fence(
            checkpoint_id=_same_id(fields, checkpoint_id),
            attempts=tuple(layout.check_attempt(attempt) for attempt in rows(fields, "attempts")),
        )
    if kind == "expired":
        return Expired(checkpoint_id=_same_id(fields, checkpoint_id))
    raise CorruptError(f"record has the unknown kind {shown(kind, 40)}")


def state_of(records: Mapping[int, Record]) -> tuple[int, Commit | Expired | None]:
    """Return the highest number in a log and what the id is, None when nothing says so."""
    state = next(
        (records[n] for n in sorted(records, reverse=True) if not isinstance(records[n], Fence)),
        None,
    )
    return max(records, default=0), state if not isinstance(state, Fence) else None


def is_fenced(records: Iterable[Record], attempt: str) -> bool:
    """Tell whether a log declares an attempt dead."""
    return any(isinstance(record, Fence) and attempt in record.attempts for record in records)


def expired_commits(records: Mapping[int, Record]) -> list[Commit]:
    """Return the commits in a log that were withdrawn, the last one last."""
    last = max((n for n, record in records.items() if isinstance(record, Expired)), default=0)
    below = (record for number, record in sorted(records.items()) if number < last)
    return [record for record in below if isinstance(record, Commit)]


def is_withdrawn(
    records: Mapping[int, Record], attempt: str, sequence: int, supersedes: Collection[str]
) -> bool:
    """Tell whether a log lets an attempt be committed no more because the id was removed.

    That is so for what was committed before the removal, and for what lost against it: a removal
    is no reason for an older save to come back under the id. A newer one may.
    """
    return any(
        commit.attempt == attempt
        or (commit.sequence >= sequence and commit.attempt not in supersedes)
        for commit in expired_commits(records)
    )


def with_sum(fields: dict[str, Any]) -> bytes:
    """Return plain data as JSON that tells when a disk has garbled it."""
    return canonical_json(fields | {"crc32c": crc32c(canonical_json(fields))})


def checked_sum(data: bytes, format_name: str, known: Collection[str] = ()) -> dict[str, Any]:
    """Return what `with_sum` encoded, once format name, version and checksum are right.

    Args:
        data: The stored bytes.
        format_name: What it says that it is.
        known: Features that it may require.

    Raises:
        CorruptError: It is something else, or garbled.
        InvalidError: It needs a newer version.
    """
    what = format_name.partition(" ")[2]
    fields = parse_json(data)
    if fields.get("format") != format_name:
        raise CorruptError(f"not a {what}: wrong format name")
    check_features(fields.get("version"), fields.get("requires"), fields.get("written_by"), known)
    stated = integer(fields, "crc32c", 0, CRC_MAX)
    try:
        summed = canonical_json({name: fields[name] for name in fields if name != "crc32c"})
    except InvalidError as exc:  # nested too deep to be written again
        raise CorruptError(f"{what} is malformed") from exc
    if crc32c(summed) != stated:
        raise CorruptError(f"{what} checksum mismatch")
    return fields


def _commit(fields: dict[str, Any], checkpoint_id: str) -> Commit:
    packs = tuple(_pack_ref(pack) for pack in rows(fields, "packs"))
    placements = tuple(_placement(row, packs) for row in rows(fields, "placements"))
    if len({placement.shard for placement in placements}) != len(placements):
        raise CorruptError("commit places a shard file twice")
    return Commit(
        checkpoint_id=_same_id(fields, checkpoint_id),
        attempt=layout.check_attempt(fields.get("attempt")),
        sequence=integer(fields, "sequence"),
        step=optional_integer(fields, "step", -NUMBER_MAX),
        manifest_sha256=layout.check_sha256(fields.get("manifest_sha256")),
        manifest_length=integer(fields, "manifest_length"),
        packs=packs,
        placements=placements,
        bytes_stored=integer(fields, "bytes_stored"),
        committed_by=layout.check_node(fields.get("committed_by")),
        committed_at=text(fields, "committed_at", 40),
        residency=check_stored(fields.get("residency")),
        exclusive=_exclusive(fields),
    )


def _exclusive(fields: dict[str, Any]) -> bool:
    value = fields.get("exclusive", True)
    if not isinstance(value, bool):
        raise CorruptError("commit's exclusive is malformed")
    return value


def _pack_ref(row: object) -> PackRef:
    if not isinstance(row, dict):
        raise CorruptError("commit's pack row is malformed")
    return PackRef(
        name=layout.check_pack_name(row.get("name")),
        length=integer(row, "length"),
        crc32c=integer(row, "crc32c", 0, CRC_MAX),
        raw_length=optional_integer(row, "raw_length", 1),
    )


def _placement(row: object, packs: tuple[PackRef, ...]) -> Placement:
    if not isinstance(row, dict):
        raise CorruptError("commit's shard row is malformed")
    pack = integer(row, "pack", 0, len(packs) - 1)
    return Placement(
        shard=layout.check_shard_name(row.get("shard")),
        pack=pack,
        start=integer(row, "start", 0, (packs[pack].raw_length or packs[pack].length) - 1),
    )


def _same_id(fields: dict[str, Any], checkpoint_id: str) -> str:
    found = layout.check_stored_id(fields.get("checkpoint_id"))
    if found != checkpoint_id:
        raise CorruptError(f"record is about {found!r}, not about {checkpoint_id!r}")
    return found
