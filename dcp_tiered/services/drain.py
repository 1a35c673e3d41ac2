"""Make durable what can be made so before this node goes away, and leave the rest where it is."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from dcp_tiered.errors import ConflictError, InvalidError, ResidencyError, TieredError
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy import draining
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.flusher import Flusher
from dcp_tiered.services.outgoing import STAYS_HINT, Outgoing, TooLateError

_log = logging.getLogger(__name__)
HOPELESS = (ConflictError, InvalidError, ResidencyError)
"""Errors that another try does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How a drain ended."""

    errors: dict[str, TieredError]
    """Of what is not durable, as far as any is known, by checkpoint id."""
    is_complete: bool
    """Nothing is left that a flusher would go on with."""


def drain(
    flusher: Flusher,
    local: LocalTier,
    outgoing: Outgoing,
    *,
    stop: Callable[[], bool],
    poll_s: float,
) -> Drained:
    """Flush until all is durable, or nothing more can become so, or `stop`.

    Args:
        flusher: Writes to `outgoing`, which knows when uploads have to be over.
        local: The run's directory.
        outgoing: Where to.
        stop: Asked between steps.
        poll_s: Pause between them.
    """
    catalog = Catalog(local, None)

    def ranked(ids: list[str]) -> list[str]:
        pending = (_pending(catalog, one, number, outgoing) for number, one in enumerate(ids))
        return draining.order(pending)

    # A save that goes on may yet end in time.
    while not stop() and (flusher.step(ranked) or flusher.unpublished_ids()):
        failures = flusher.failures()
        is_hopeless = failures and all(
            isinstance(exc, (TooLateError, *HOPELESS)) for exc in failures.values()
        )
        if is_hopeless and not flusher.unpublished_ids() - failures.keys():
            break
        time.sleep(poll_s)
    not_begun = TooLateError("not begun: the time is over", "durable", None, STAYS_HINT)
    not_over = TooLateError(
        "its save is not over, or its manifest is not known here", "local", None, STAYS_HINT
    )
    left: dict[str, TieredError] = dict.fromkeys(flusher.unpublished_ids(), not_over)
    left |= dict.fromkeys(flusher.open_ids(), not_begun) | flusher.failures()
    for checkpoint_id, error in sorted(left.items()):
        _log.warning("stays on this node: %s: %s", checkpoint_id, error)
    return Drained(errors=left, is_complete=not left and not flusher.has_work())


def _pending(
    catalog: Catalog, checkpoint_id: str, sequence: int, outgoing: Outgoing
) -> draining.Pending:
    """Return what is known of a checkpoint on this node; damage is found by the flusher."""
    size = 0
    try:
        published = catalog.published(checkpoint_id)
        if published is not None:
            here = set(catalog.sealed(checkpoint_id))
            size = sum(shard.length for shard in published.head.shards if shard.name in here)
    except TieredError:
        pass
    left = max(0, size - outgoing.sent.get(checkpoint_id, 0))
    return draining.Pending(checkpoint_id=checkpoint_id, bytes_left=left, sequence=sequence)
