"""The errors for a checkpoint id that somebody else owns, or that was removed."""

from collections.abc import Sequence

from dcp_tiered.errors import ConflictError, ExpiredError
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.records import Commit


def too_many_rivals(checkpoint_id: str) -> ConflictError:
    """Return the error for a log that others append to without end."""
    return ConflictError("others keep appending records to this id", "durable", checkpoint_id)


def taken(checkpoint_id: str, tier: str, how: str, attempt: str) -> ConflictError:
    """Return the error for an id that another attempt owns."""
    return ConflictError(
        f"checkpoint {checkpoint_id!r} is {how} already, by attempt {attempt}",
        tier,
        checkpoint_id,
        "Save under another checkpoint_id, or pass overwrite=True to TieredWriter to replace it.",
    )


def withdrawn(head: Head, commits: Sequence[Commit]) -> ConflictError:
    """Return the error for an attempt that a removal keeps from being committed."""
    was = head.attempt in {commit.attempt for commit in commits}
    error = ExpiredError if was else ConflictError
    return error(
        f"checkpoint {head.checkpoint_id!r} was removed from the durable tier"
        + ("" if was else ", and a newer attempt had been committed before that"),
        "durable",
        head.checkpoint_id,
        "It is not brought there again; a new save under this id is.",
    )
