"""Local to durable, in the background: manifest, packs, commit, for one run on one node.

Its only state is what lies on the two tiers, so it may be killed at any instant and the next one goes
on (I11). Nothing here decides what a checkpoint is: the catalog does.
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
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.pack import Pack, PackedShard, plan_pack
from dcp_tiered.format.records import Commit, PackRef, Placement
from dcp_tiered.interfaces import LocalTier, Tier
from dcp_tiered.policy.packing import Candidate, group
from dcp_tiered.services.catalog import Catalog, Published
from dcp_tiered.services.other_nodes import UnpublishedShards
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.progress import Report, ReportFile, describe_error
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)
_FIXABLE_PAUSE_S_MAX = 5.0
"""A wrong key or bucket is looked at again this often, so that `wait` gets its answer soon."""


@dataclass(kw_only=True)
class _Open:
    """A checkpoint that is not durable yet."""

    attempt: str
    since: float
    tries: int = 0
    not_before: float = 0.0
    error: TieredError | None = None
    settled: bool = False
    """Durable, or given up for good: not looked at again."""


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
        self._unpublished = UnpublishedShards(self._catalog, self._packs, local, node, limits)
        self._reports = ReportFile(run_path=local.root)

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
        published = self._work()
        for one in published:
            if self._stop():
                return True
            if time.monotonic() < self._open[one.head.checkpoint_id].not_before:
                continue
            if not self._try(one):
                break
        waiting = self._unpublished.step()
        return waiting or any(not self._open[one.head.checkpoint_id].settled for one in published)

    def has_work(self) -> bool:
        """Tell whether something on this node is not durable yet, without asking the store."""
        return bool(self._work()) or self._unpublished.has_work()

    def failures(self) -> dict[str, TieredError]:
        """Return the error of the last try of every checkpoint that is not durable, by id."""
        return {name: state.error for name, state in self._open.items() if state.error is not None}

    def _work(self) -> list[Published]:
        """Return published checkpoints that are neither durable nor given up, oldest first."""
        work = []
        for checkpoint_id in self._catalog.local_ids():
            try:
                published = self._catalog.published(checkpoint_id)
            except TieredError as exc:
                self._give_up_damaged(checkpoint_id, exc)
                continue
            if published is None:
                continue
            state = self._open.get(checkpoint_id)
            if state is None or state.attempt != published.head.attempt:
                state = _Open(attempt=published.head.attempt, since=time.monotonic())
                state.settled = self._is_noted(published)
                self._open[checkpoint_id] = state
            if not state.settled:
                work.append(published)
        return sorted(work, key=lambda one: one.head.sequence)

    def _is_noted(self, published: Published) -> bool:
        try:
            noted = self._catalog.noted(published.head.checkpoint_id)
        except TieredError as exc:
            _log.warning("copy of a record is damaged, asking the store instead: %s", exc)
            return False
        return noted is not None and noted.attempt == published.head.attempt

    def _give_up_damaged(self, checkpoint_id: str, exc: TieredError) -> None:
        state = self._open.get(checkpoint_id)
        if state is None or not state.settled:
            _log.error("skipping a damaged local checkpoint: %s", exc)
            self._open[checkpoint_id] = _Open(attempt="", since=0.0, error=exc, settled=True)

    def _try(self, published: Published) -> bool:
        """Flush one checkpoint; return False when the store is down, so that others may wait too."""
        head = published.head
        state = self._open[head.checkpoint_id]
        state.tries += 1
        try:
            commit = self._flush(published)
        except ConflictError as exc:
            state.settled, state.error = True, exc
            self._report(head, state, "conflict")
            _log.error("checkpoint %s stays local: %s", head.checkpoint_id, exc)
        except IncompleteError as exc:
            late = time.monotonic() - state.since > self._limits.incomplete_after_s
            state.error = exc
            self._pause(state, _FIXABLE_PAUSE_S_MAX if not late else self._limits.flush_retry_s_max)
            self._report(head, state, "incomplete" if late else "waiting")
        except TieredError as exc:
            state.error = exc
            fixable = isinstance(exc, InvalidError)
            self._pause(state, _FIXABLE_PAUSE_S_MAX if fixable else self._limits.flush_retry_s_max)
            self._report(head, state, "failed")
            _log.warning("try %d of %s: %s", state.tries, head.checkpoint_id, exc)
            return not isinstance(exc, UnavailableError)
        else:
            state.settled, state.error = True, None
            self._reports.drop(head.checkpoint_id)
            _log.info(
                "durable: %s, step %s, %d bytes in %d packs",
                head.checkpoint_id,
                head.step,
                commit.bytes_stored,
                len(commit.packs),
            )
        return True

    def _pause(self, state: _Open, longest_s: float) -> None:
        state.not_before = time.monotonic() + min(longest_s, 0.25 * 2 ** min(state.tries, 16))

    def _report(self, head: Head, state: _Open, what: str, bytes_done: int = 0) -> None:
        self._reports.set(
            Report(
                checkpoint_id=head.checkpoint_id,
                attempt=head.attempt,
                state=what,
                bytes_done=bytes_done,
                tries=state.tries,
                at=time.time(),
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
        self._report(head, state, "uploading")
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
            self._report(head, state, "uploading", done)
        return packs

    def _own_candidates(self, head: Head) -> Iterable[Candidate]:
        present = set(self._catalog.sealed(head.checkpoint_id))
        return [
            Candidate(name=shard.name, rank=layout.shard_rank(shard.name) or 0, length=shard.length)
            for shard in head.shards
            if shard.node == self._node and shard.name in present
        ]

    def _claim(self, published: Published, packs: dict[str, Pack]) -> Commit:
        """Return the commit of an attempt after proving that every shard file is in a verified pack."""
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
        missing = sorted({wanted[name].node for name in wanted.keys() - where.keys()})
        if missing:
            raise IncompleteError(
                f"shard files of {len(missing)} nodes are not on the durable tier yet:"
                f" {', '.join(missing)[:200]}",
                "durable",
                head.checkpoint_id,
                "Their flushers may still be at work; 'dcp-tiered status' on those nodes tells.",
            )
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


def _contents(packs: Iterable[Pack]) -> dict[str, tuple[Pack, PackedShard]]:
    """Return in which pack each shard file lies."""
    return {shard.name: (pack, shard) for pack in packs for shard in pack.shards}
