"""Small files beside a checkpoint on this node: its flush is given up, or somebody keeps it.

A note counts by its name, which is that of the attempt: a new save under the id is not meant. What
is in it only adds to that, so a damaged one still ends the flush, and frees nothing.
"""

import contextlib
import logging

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    SupersededError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.superseded import (
    NOTE_BYTES_MAX,
    Superseded,
    decode_superseded,
    encode_superseded,
)
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)


def write(local: LocalTier, head: Head, node: str | None, reason: str) -> None:
    """Note that the flush of an attempt is given up on this node; a note that is there stays.

    Args:
        local: The run's directory.
        head: The attempt.
        node: This local root's id.
        reason: Why it is given up.
    """
    here = set(_names(local, head.checkpoint_id))
    shards = tuple(sorted(shard.name for shard in head.shards if shard.name in here))
    note = Superseded(
        checkpoint_id=head.checkpoint_id,
        attempt=head.attempt,
        sequence=head.sequence,
        launch=head.launch,
        # What this node wrote through is not here, and no other node has a part of it either.
        alone=all(shard.name in here or shard.node == node for shard in head.shards),
        shards=shards,
        reason=reason,
    )
    key = layout.key(head.checkpoint_id, layout.superseded_name(head.attempt))
    with contextlib.suppress(AlreadyExistsError):
        local.put(key, encode_superseded(note, __version__))


def attempts(local: LocalTier, checkpoint_id: str) -> list[str]:
    """Return the attempts of an id whose flush is given up on this node."""
    found = (layout.superseded_attempt(name) for name in _names(local, checkpoint_id))
    return sorted(attempt for attempt in found if attempt is not None)


def read(local: LocalTier | None, checkpoint_id: str) -> list[Superseded]:
    """Return the notes of an id on this node that are sound, the newest attempt last."""
    if local is None:
        return []
    notes = []
    for attempt in attempts(local, checkpoint_id):
        key = layout.key(checkpoint_id, layout.superseded_name(attempt))
        try:
            data = local.get(key, NOTE_BYTES_MAX)
            notes.append(decode_superseded(data, checkpoint_id, attempt))
        except (AbsentError, CorruptError, InvalidError) as exc:
            _log.warning("ignoring a damaged note %s: %s", key, exc)
    return sorted(notes, key=lambda note: note.sequence)


def is_given_up(local: LocalTier, checkpoint_id: str, attempt: str) -> bool:
    """Tell whether the flush of an attempt is given up on this node."""
    return _exists(local, layout.key(checkpoint_id, layout.superseded_name(attempt)))


def keep(local: LocalTier, checkpoint_id: str) -> None:
    """Note that somebody wants this node's copy of a checkpoint, and wants it durable."""
    with contextlib.suppress(AlreadyExistsError):
        local.put(layout.key(checkpoint_id, layout.KEEP_NAME), b"")


def error_of(checkpoint_id: str, reason: str) -> SupersededError:
    """Return what whoever waits for such a checkpoint to be durable is told."""
    return SupersededError(
        f"the flush of {checkpoint_id} was given up: {reason}",
        "durable",
        checkpoint_id,
        "Wait for a newer checkpoint instead. This one loads from the local tier until its room is"
        " needed; TieredWriter.keep(id) spares one from this.",
    )


def _names(local: LocalTier, checkpoint_id: str) -> list[str]:
    return [key.partition("/")[2] for key in local.list_keys(checkpoint_id)]


def _exists(local: LocalTier, key: str) -> bool:
    try:
        local.head(key)
    except AbsentError:
        return False
    return True
