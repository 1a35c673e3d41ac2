"""Local to durable, in the background: manifest, packs, commit, for one run on one node.

Its only state is what lies on the two tiers, so it may be killed at any instant and the next one
goes on (I11). Nothing here decides what a checkpoint is: the catalog does.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from dcp_tiered.config import Limits
from dcp_tiered.errors import (
    ConflictError,
    CorruptError,
    IncompleteError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Head, ShardRef
from dcp_tiered.format.pack import Pack, PackedShard, plan_pack
from dcp_tiered.format.records import Commit, PackRef, Placement
from dcp_tiered.interfaces import LocalTier, Tier
from dcp_tiered.policy.packing import Candidate, group
from dcp_tiered.services.catalog import Catalog, Published
from dcp_tiered.services.local_changes import LocalChanges
from dcp_tiered.services.other_nodes import UnpublishedShards
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.progress import Report, ReportFile, describe_error
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)
_FIXABLE_PAUSE_S_MAX = 5.0
"""A wrong key or bucket is looked at again this often, so that `wait` gets its answer soon."""
_BAD_TRIES_MAX = 3
"""Bytes that are wrong in memory once may be right the next time; on disk they stay wrong."""


@dataclass(kw_only=True)
class _Open:
    """A checkpoint that is not durable yet."""

    attempt: str
    sequence: int
    since: float
    tries: int = 0
    bad_tries: int = 0
    """Tries in a row that met something that another try hardly changes."""
    tried_at: float = 0.0
    """Wall clock at the begin of the last try."""
    failed_at: float = 0.0
    """The same of the try that met `error`: `wait` believes it only if that try began later."""
    not_before: float = 0.0
    error: TieredError | None = None
    settled: bool = False
    """Durable, or given up for good: not looked at again."""
    late: bool = False
    """Waits for other nodes for too long already: tried on, but no reason to stay for."""

    def keeps_us(self) -> bool:
        """Tell whether the flusher may not end as long as this is so."""
        return not self.settled and not self.late


class Flusher:
    """Brings every checkpoint of one run directory to the durable tier.

    Args:
        local: The run's directory.
        durable: Where to.
        node: This local root's id.
        limits: Bounds.
        stop: Asked between requests; True makes the flusher end soon.
    """

    def __init__(
        self,
        local: LocalTier,
        durable: Tier,
        node: str,
        limits: Limits,
        stop: Callable[[], bool],
    ) -> None:
        self._catalog = Catalog(local, durable)
        self._packs = PackStore(local, durable)
        self._local = local
        self._node = node
        self._limits = limits
        self._stop = stop
        self._open: dict[str, _Open] = {}
        self._changes = LocalChanges(local)
        self._reports = ReportFile(run_path=local.root)
        self._unpublished = UnpublishedShards(
            self._catalog, self._packs, local, node, limits, self._reports
        )

    def run(self, idle_exit_s: float) -> None:
        """Flush until there has been nothing to do for `idle_exit_s` seconds, or `stop`."""
        self._reports.write()
        idle_since = time.monotonic()
        while not self._stop():
            if self.step():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since >= idle_exit_s:
                return
            time.sleep(self._limits.poll_s)

    def step(self) -> bool:
        """Try every checkpoint whose time has come; return whether any is still open."""
        work = self._work()
        for checkpoint_id in work:
            if self._stop():
                return True
            if time.monotonic() < self._open[checkpoint_id].not_before:
                continue
            if not self._try(checkpoint_id):
                break
        waiting = self._unpublished.step()
        return waiting or any(self._open[name].keeps_us() for name in work)

    def has_work(self) -> bool:
        """Tell whether something on this node is not durable yet, without asking the store."""
        mine = any(self._open[name].keeps_us() for name in self._work())
        return mine or self._unpublished.has_work()

    def failures(self) -> dict[str, TieredError]:
        """Return the error of the last try of every checkpoint that is not durable, by id."""
        own = {name: state.error for name, state in self._open.items() if state.error is not None}
        return self._unpublished.failures() | own

    def _work(self) -> list[str]:
        """Return ids that are published and neither durable nor given up, oldest first."""
        ids = self._catalog.local_ids()
        for gone in self._open.keys() - set(ids):
            del self._open[gone]
            self._reports.drop(gone)
        for checkpoint_id in ids:
            if not self._changes.is_unchanged(checkpoint_id):
                self._look(checkpoint_id)
        work = [name for name, state in self._open.items() if not state.settled]
        return sorted(work, key=lambda name: self._open[name].sequence)

    def _look(self, checkpoint_id: str) -> None:
        """Find out what has been published under an id since the last look."""
        mark = self._changes.mark(checkpoint_id)
        try:
            published = self._catalog.published(checkpoint_id)
            if published is None:
                self._open.pop(checkpoint_id, None)
            else:
                self._take_up(published)
        except TieredError as exc:
            self._give_up_damaged(checkpoint_id, exc)
            if not isinstance(exc, CorruptError):
                return  # a disk that fails to read may read the next time
        self._changes.remember(checkpoint_id, mark)

    def _take_up(self, published: Published) -> None:
        head = published.head
        known = self._open.get(head.checkpoint_id)
        if known is None or known.attempt != head.attempt:
            self._open[head.checkpoint_id] = _Open(
                attempt=head.attempt,
                sequence=head.sequence,
                since=time.monotonic(),
                settled=self._is_noted(published),
            )

    def _is_noted(self, published: Published) -> bool:
        noted = self._catalog.noted(published.head.checkpoint_id)
        return noted is not None and noted.attempt == published.head.attempt

    def _give_up_damaged(self, checkpoint_id: str, exc: TieredError) -> None:
        state = self._open.get(checkpoint_id)
        if state is None or not state.settled:
            _log.error("skipping a damaged local checkpoint: %s", exc)
            state = _Open(attempt="", sequence=0, since=0.0, error=exc, settled=True)
            self._open[checkpoint_id] = state
            self._report(checkpoint_id, state, "damaged")

    def _try(self, checkpoint_id: str) -> bool:
        """Flush one checkpoint; return False when the store is down: then others may wait too."""
        state = self._open[checkpoint_id]
        state.tries += 1
        state.tried_at = time.time()
        try:
            published = self._catalog.published(checkpoint_id)
            if published is None or published.head.attempt != state.attempt:
                return True  # replaced or removed since we looked
            commit = self._flush(published)
        except ConflictError as exc:
            self._settle(checkpoint_id, state, exc, "conflict")
        except IncompleteError as exc:
            state.late = time.monotonic() - state.since > self._limits.incomplete_after_s
            what = "incomplete" if state.late else "waiting"
            self._retry(checkpoint_id, state, exc, what, fixable=not state.late)
        except CorruptError as exc:
            self._retry_few(checkpoint_id, state, exc, "damaged")
        except TieredError as exc:
            self._retry(checkpoint_id, state, exc, "failed", fixable=isinstance(exc, InvalidError))
            return not isinstance(exc, UnavailableError)
        except Exception as exc:  # noqa: BLE001 - logged and reported
            # One checkpoint that trips over a mistake of ours must not hold up all the others.
            _log.exception("cannot flush %s", checkpoint_id)
            text = f"{type(exc).__name__}: {str(exc)[:200]}"
            error = TieredError(text, "durable", checkpoint_id, "Look at flusher.log.")
            self._retry_few(checkpoint_id, state, error, "failed")
        else:
            state.settled, state.error = True, None
            self._reports.drop(checkpoint_id)
            _log.info(
                "durable: %s, step %s, %d bytes in %d packs",
                checkpoint_id,
                commit.step,
                commit.bytes_stored,
                len(commit.packs),
            )
        return True

    def _settle(self, checkpoint_id: str, state: _Open, error: TieredError, what: str) -> None:
        """Give a checkpoint up: it stays on this node, and the report says why."""
        state.settled, state.error, state.failed_at = True, error, state.tried_at
        self._report(checkpoint_id, state, what)
        _log.error("checkpoint %s stays local: %s", checkpoint_id, error)

    def _retry_few(self, checkpoint_id: str, state: _Open, error: TieredError, what: str) -> None:
        """Try again a few times what is probably as bad the next time, then give it up."""
        state.bad_tries += 1
        if state.bad_tries >= _BAD_TRIES_MAX:
            self._settle(checkpoint_id, state, error, what)
        else:
            self._retry(checkpoint_id, state, error, "failed")

    def _retry(
        self,
        checkpoint_id: str,
        state: _Open,
        error: TieredError,
        what: str,
        *,
        fixable: bool = False,
    ) -> None:
        """Come back to a checkpoint later; soon, if it waits for something that may change soon."""
        state.error, state.failed_at = error, state.tried_at
        self._pause(state, _FIXABLE_PAUSE_S_MAX if fixable else self._limits.flush_retry_s_max)
        self._report(checkpoint_id, state, what)
        _log.warning("try %d of %s: %s", state.tries, checkpoint_id, error)

    def _pause(self, state: _Open, longest_s: float) -> None:
        state.not_before = time.monotonic() + min(longest_s, 0.25 * 2 ** min(state.tries, 16))

    def _report(self, checkpoint_id: str, state: _Open, what: str, bytes_done: int = 0) -> None:
        self._reports.set(
            Report(
                checkpoint_id=checkpoint_id,
                attempt=state.attempt,
                state=what,
                bytes_done=bytes_done,
                tries=state.tries,
                at=state.failed_at,
                error=describe_error(state.error) if state.error else None,
            )
        )

    def _flush(self, published: Published) -> Commit:
        """Bring one checkpoint to the durable tier: manifest, then packs, then the record."""
        head = published.head
        highest, mine = self._catalog.may_commit(head)
        if mine is not None:
            self._catalog.note(mine, highest)
            return mine
        state = self._open[head.checkpoint_id]
        self._report(head.checkpoint_id, state, "uploading")
        self._catalog.put_manifest(published)
        packs = self._upload_own(head, state)
        return self._catalog.commit(head, lambda: self._claim(published, packs))

    def _upload_own(self, head: Head, state: _Open) -> dict[str, Pack]:
        """Upload and verify this node's packs of a checkpoint; return all packs known so far."""
        packs: dict[str, Pack] = {}
        done = 0
        for chosen in group(self._own_candidates(head), self._limits.pack_bytes_target):
            crcs = {shard.name: shard.crc32c for shard in head.shards}
            rows = [(one.name, one.length, crcs[one.name]) for one in chosen]
            pack = plan_pack(head.checkpoint_id, self._node, rows, __version__)
            if self._stop():
                raise UnavailableError("flusher was asked to end", "durable", head.checkpoint_id)
            self._packs.upload(head.checkpoint_id, pack)
            packs[pack.name] = pack
            done += pack.length
            self._report(head.checkpoint_id, state, "uploading", done)
        return packs

    def _own_candidates(self, head: Head) -> list[Candidate]:
        """Return the shard files that lie here, whichever id this node had when it sealed them."""
        present = set(self._catalog.sealed(head.checkpoint_id))
        return [
            Candidate(name=shard.name, rank=layout.shard_rank(shard.name) or 0, length=shard.length)
            for shard in head.shards
            if shard.name in present
        ]

    def _claim(self, published: Published, packs: dict[str, Pack]) -> Commit:
        """Return an attempt's commit, having proved that every shard file is in a verified pack."""
        head = published.head
        wanted = {shard.name: shard for shard in head.shards}
        if wanted.keys() - _contents(packs.values()).keys():
            self._packs.find(head.checkpoint_id, packs)
        for pack in packs.values():
            if not self._packs.is_verified(head.checkpoint_id, pack):
                raise UnavailableError(
                    "a pack is gone from the store", "durable", pack.name, "It is uploaded again."
                )
        where = _contents(packs.values())
        missing = [wanted[name] for name in sorted(wanted.keys() - where.keys())]
        if missing:
            raise _incomplete(head.checkpoint_id, missing)
        used = sorted({where[name][0].name for name in wanted})
        for name, shard in wanted.items():
            packed = where[name][1]
            if (packed.length, packed.crc32c) != (shard.length, shard.crc32c):
                raise CorruptError(
                    "a pack holds another shard file than was saved", "durable", name
                )
        return Commit(
            checkpoint_id=head.checkpoint_id,
            attempt=head.attempt,
            sequence=head.sequence,
            step=head.step,
            manifest_sha256=published.sha256,
            manifest_length=len(published.data),
            packs=tuple(
                PackRef(name=name, length=packs[name].length, crc32c=packs[name].crc32c)
                for name in used
            ),
            placements=tuple(
                Placement(
                    shard=name, pack=used.index(where[name][0].name), start=where[name][1].start
                )
                for name in sorted(wanted)
            ),
            bytes_stored=head.bytes_stored(),
            committed_by=self._node,
            committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _incomplete(checkpoint_id: str, missing: list[ShardRef]) -> IncompleteError:
    """Return the error that names the nodes and ranks whose shard files are not there."""
    ranks: dict[str, list[int]] = {}
    for shard in missing:
        ranks.setdefault(shard.node, []).append(layout.shard_rank(shard.name) or 0)
    parts = [
        f"node {node} (ranks {', '.join(map(str, sorted(numbers)))[:80]})"
        for node, numbers in sorted(ranks.items())
    ]
    return IncompleteError(
        f"shard files of {len(parts)} nodes are not on the durable tier yet:"
        f" {'; '.join(parts)[:400]}",
        "durable",
        checkpoint_id,
        "Their flushers may still be at work; 'dcp-tiered status' on those nodes tells.",
    )


def _contents(packs: Iterable[Pack]) -> dict[str, tuple[Pack, PackedShard]]:
    """Return in which pack each shard file lies."""
    return {shard.name: (pack, shard) for pack in packs for shard in pack.shards}
