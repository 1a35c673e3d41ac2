"""The note on the local tier that gives up the flush of one attempt, so that others have room."""

from dataclasses import asdict, dataclass

from dcp_tiered.errors import CorruptError
from dcp_tiered.format import layout
from dcp_tiered.format.fields import integer, must_read_back, rows, text
from dcp_tiered.format.footer import VERSION
from dcp_tiered.format.records import checked_sum, with_sum

NOTE_BYTES_MAX = 1 << 24
_FORMAT = "dcp_tiered superseded"
_REASON_CHARS_MAX = 1000
_LAUNCH_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """No flusher of this node commits the attempt; it loads here until its room is needed."""

    checkpoint_id: str
    attempt: str
    sequence: int
    launch: str
    alone: bool
    """All shard files were of this node, so that no other one can ever commit it."""
    shards: tuple[str, ...]
    """Those that are on this node: an eviction that was cut off goes on with them."""
    reason: str


def encode_superseded(note: Superseded, written_by: str) -> bytes:
    """Return the stored bytes of a note.

    Raises:
        InvalidError: It says something that a reader would refuse.
    """
    fields = {"format": _FORMAT, "version": VERSION, "requires": [], "written_by": written_by}
    data = with_sum(fields | asdict(note))
    with must_read_back("note"):
        if decode_superseded(data, note.checkpoint_id, note.attempt) != note:
            raise CorruptError("it is read as another one")
    return data


def decode_superseded(data: bytes, checkpoint_id: str, attempt: str) -> Superseded:
    """Decode and check a note.

    Args:
        data: The stored bytes.
        checkpoint_id: The directory it was found in, which it must be about.
        attempt: The attempt in its name.

    Raises:
        CorruptError: It is not a note about that attempt.
        InvalidError: It needs a newer version.
    """
    fields = checked_sum(data, _FORMAT)
    if (fields.get("checkpoint_id"), fields.get("attempt")) != (checkpoint_id, attempt):
        raise CorruptError("note is about another attempt than its name says")
    alone = fields.get("alone")
    if not isinstance(alone, bool):
        raise CorruptError("'alone' is neither true nor false")
    return Superseded(
        checkpoint_id=checkpoint_id,
        attempt=attempt,
        sequence=integer(fields, "sequence"),
        launch=text(fields, "launch", _LAUNCH_CHARS_MAX),
        alone=alone,
        shards=tuple(layout.check_shard_name(name) for name in rows(fields, "shards")),
        reason=text(fields, "reason", _REASON_CHARS_MAX),
    )
