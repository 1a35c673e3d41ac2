"""Records: the log of small create-only objects that says what a checkpoint id is.

The highest record that is not a fence is the state of the id.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dcp_tiered.errors import CorruptError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import canonical_json, parse_json
from dcp_tiered.format.footer import VERSION, check_features

RECORD_BYTES_MAX = 1 << 28
_FORMAT = "dcp_tiered record"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRef:
    """A verified pack."""

    name: str
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a shard file lies on the durable tier."""

    shard: str
    pack: int
    """Position in `Commit.packs`."""
    start: int
    """First byte in that pack."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """These attempts are dead: whoever still works on one of them stops."""

    checkpoint_id: str
    attempts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """The id is no longer a checkpoint; its data may go after the grace time."""

    checkpoint_id: str


Record = Commit | Fence | Expired
_KINDS: dict[str, type[Record]] = {"commit": Commit, "fence": Fence, "expired": Expired}


def encode_record(record: Record, written_by: str) -> bytes:
    """Return the stored bytes of a record: JSON."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(record, cls))
    return canonical_json(
        {
            "format": _FORMAT,
            "version": VERSION,
            "requires": [],
            "written_by": written_by,
            "kind": kind,
            **asdict(record),
        }
    )


def decode_record(data: bytes, checkpoint_id: str) -> Record:
    """Decode and check a record.

    Args:
        data: The stored bytes.
        checkpoint_id: The directory it was found in, which it must be about.

    Raises:
        CorruptError: It is not a record of that checkpoint.
        InvalidError: It needs a newer version.
    """
    fields = parse_json(data)
    if fields.get("format") != _FORMAT:
        raise CorruptError("not a record: wrong format name")
    check_features(fields.get("version"), fields.get("requires"), fields.get("written_by"))
    kind = fields.get("kind")
    if kind == "commit":
        return _commit(fields, checkpoint_id)
    if kind == "fence":
        attempts = fields.get("attempts")
        if not isinstance(attempts, list):
            raise CorruptError("fence lists no attempts")
        return Fence(
            checkpoint_id=_same_id(fields, checkpoint_id),
            attempts=tuple(layout.check_attempt(attempt) for attempt in attempts),
        )
    if kind == "expired":
        return Expired(checkpoint_id=_same_id(fields, checkpoint_id))
    raise CorruptError(f"record has the unknown kind {str(kind)[:40]!r}")


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


def _commit(fields: dict[str, Any], checkpoint_id: str) -> Commit:
    packs, placements = fields.get("packs"), fields.get("placements")
    if not isinstance(packs, list) or not isinstance(placements, list):
        raise CorruptError("commit lists no packs")
    refs = tuple(_pack_ref(pack) for pack in packs)
    placed = tuple(_placement(placement, refs) for placement in placements)
    if len({placement.shard for placement in placed}) != len(placed):
        raise CorruptError("commit places a shard file twice")
    step, digest = fields.get("step"), fields.get("manifest_sha256")
    if step is not None and not _in_range(step, -(1 << 62)):
        raise CorruptError("commit has no valid step")
    if not isinstance(digest, str) or len(digest) != 64:  # noqa: PLR2004 - hex of sha256
        raise CorruptError("commit does not say which manifest")
    numbers = {name: fields.get(name) for name in ("sequence", "manifest_length", "bytes_stored")}
    if not all(_in_range(value) for value in numbers.values()):
        raise CorruptError("commit has a number that is out of range")
    return Commit(
        checkpoint_id=_same_id(fields, checkpoint_id),
        attempt=layout.check_attempt(fields.get("attempt")),
        step=step,
        manifest_sha256=digest,
        packs=refs,
        placements=placed,
        committed_by=layout.check_node(fields.get("committed_by")),
        committed_at=str(fields.get("committed_at"))[:40],
        **{name: int(str(value)) for name, value in numbers.items()},
    )


def _pack_ref(value: Any) -> PackRef:
    if not isinstance(value, dict):
        raise CorruptError("commit's pack row is malformed")
    length, crc = value.get("length"), value.get("crc32c")
    if not _in_range(length) or not _in_range(crc) or crc >= 1 << 32:
        raise CorruptError("commit's pack row is out of range")
    return PackRef(name=layout.check_pack_name(value.get("name")), length=length, crc32c=crc)


def _placement(value: Any, packs: tuple[PackRef, ...]) -> Placement:
    if not isinstance(value, dict):
        raise CorruptError("commit's shard row is malformed")
    pack, start = value.get("pack"), value.get("start")
    if not _in_range(pack) or pack >= len(packs) or not _in_range(start):
        raise CorruptError("commit's shard row is out of range")
    if start >= packs[pack].length:
        raise CorruptError("commit places a shard file outside its pack")
    return Placement(shard=layout.check_shard_name(value.get("shard")), pack=pack, start=start)


def _same_id(fields: dict[str, Any], checkpoint_id: str) -> str:
    found = layout.check_stored_id(fields.get("checkpoint_id"))
    if found != checkpoint_id:
        raise CorruptError(f"record is about {found!r}, not about {checkpoint_id!r}")
    return found


def _in_range(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 62
