"""Give up flushes for good: what this node has noted becomes a fence on the durable tier.

A trainer that needs room leaves a note and writes to no store. The flusher that finds the note does
not commit the attempt any more, whatever happens; the fence, which follows as soon as the store
answers, has the flushers of other nodes stop too. Until it was read back, an attempt of which other
nodes hold a part goes on counting as one that waits. A commit that came first wins.
"""

import logging
import time
from dataclasses import dataclass

from dcp_tiered.config import Limits
from dcp_tiered.errors import CorruptError, TieredError, UnavailableError
from dcp_tiered.format.superseded import Superseded
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services import superseded_notes
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.local_changes import LocalChanges

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Open:
    """A note whose fence has not been read back yet."""

    tries: int = 0
    not_before: float = 0.0


class Superseding:
    """Writes the fences of one run on this node.

    Args:
        catalog: The run's catalog.
        local: The run's directory.
        limits: Bounds.
    """

    def __init__(self, catalog: Catalog, local: LocalTier, limits: Limits) -> None:
        self._catalog = catalog
        self._local = local
        self._limits = limits
        self._changes = LocalChanges(local)
        self._open: dict[tuple[str, str], _Open] = {}
        """By id and attempt."""

    def has_work(self) -> bool:
        """Tell whether a fence is still to be written."""
        self._look()
        return bool(self._open)

    def step(self) -> bool:
        """Write the fences whose time has come; return whether one is still to be written."""
        self._look()
        for (checkpoint_id, attempt), state in list(self._open.items()):
            if time.monotonic() < state.not_before:
                continue
            try:
                self._fence(checkpoint_id, attempt)
            except TieredError as exc:
                state.tries += 1
                pause_s = min(self._limits.flush_retry_s_max, 0.25 * 2 ** min(state.tries, 16))
                state.not_before = time.monotonic() + pause_s
                _log.warning("cannot say yet that %s is superseded: %s", checkpoint_id, exc)
                if isinstance(exc, UnavailableError):
                    break
            else:
                del self._open[checkpoint_id, attempt]
        return bool(self._open)

    def _look(self) -> None:
        ids = self._catalog.local_ids()
        for gone in {key for key in self._open if key[0] not in set(ids)}:
            del self._open[gone]
        for checkpoint_id in ids:
            if self._changes.is_unchanged(checkpoint_id):
                continue
            mark = self._changes.mark(checkpoint_id)
            for attempt in superseded_notes.attempts(self._local, checkpoint_id):
                if not self._is_settled(checkpoint_id, attempt):
                    self._open.setdefault((checkpoint_id, attempt), _Open())
            self._changes.remember(checkpoint_id, mark)

    def _is_settled(self, checkpoint_id: str, attempt: str) -> bool:
        commit = self._catalog.noted(checkpoint_id)
        is_durable = commit is not None and commit.attempt == attempt
        return is_durable or self._catalog.is_noted_dead(checkpoint_id, attempt)

    def _fence(self, checkpoint_id: str, attempt: str) -> None:
        commit = self._catalog.fence(
            checkpoint_id, attempt, lambda: self._show_manifest(checkpoint_id, attempt)
        )
        if commit is not None:
            _log.info("durable: %s, committed before its flush could be given up", checkpoint_id)
            return
        _log.info("superseded: %s, attempt %s, is declared dead", checkpoint_id, attempt)

    def _show_manifest(self, checkpoint_id: str, attempt: str) -> None:
        """Tell other nodes which of their shard files the fence is about."""
        try:
            published = self._catalog.published(checkpoint_id)
        except CorruptError as exc:
            _log.warning("other nodes will not learn what is superseded: %s", exc)
            return
        if published is None or published.head.attempt != attempt:
            return
        if {shard.name for shard in published.head.shards} - set(
            self._catalog.sealed(checkpoint_id)
        ):
            self._catalog.put_manifest(published)


def superseded(catalog: Catalog, checkpoint_id: str) -> Superseded | None:
    """Return the note on the newest attempt of an id known here, if its flush is given up for good.

    Nobody can commit it any more: no other node has a part of it, or its fence was read back.
    """
    notes = superseded_notes.read(catalog.local, checkpoint_id)
    if not notes:
        return None
    note, commit = notes[-1], catalog.noted(checkpoint_id)
    published = catalog.published(checkpoint_id)
    if commit is not None and commit.sequence >= note.sequence:
        return None
    if published is not None and published.head.sequence > note.sequence:
        return None
    dead = note.alone or catalog.is_noted_dead(checkpoint_id, note.attempt)
    return note if dead else None
