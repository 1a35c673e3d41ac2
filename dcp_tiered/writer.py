"""DCP's `StorageWriter`: a save ends on this node's NVMe, the flusher carries it on.

Follow one save: `reset` stores the id, `set_up_storage_writer` takes it for this save,
`prepare_local_plan` checks what can be checked before a byte is written, `prepare_global_plan` asks
whether the id is taken, `write_data` seals one shard file per rank, `finish` proves that nothing is
missing and publishes the manifest. No network is touched but for one bounded question.
"""

import copy
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_tiered import config, metrics, save_items, stack
from dcp_tiered.config import Limits
from dcp_tiered.engines import tensors
from dcp_tiered.engines.staging import StagingArena
from dcp_tiered.errors import (
    InvalidError,
    TieredError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Head, Manifest, ShardRef
from dcp_tiered.format.plain import to_tagged
from dcp_tiered.format.records import Commit, Expired
from dcp_tiered.format.shardfile import DTYPES, Header
from dcp_tiered.metrics import Sample
from dcp_tiered.policy import completeness
from dcp_tiered.save_shard import ShardResult, ShardWriter
from dcp_tiered.services import identity, incidents, progress, run_directory
from dcp_tiered.services.catalog import Published
from dcp_tiered.services.conflicts import taken
from dcp_tiered.services.local_space import LocalSpace
from dcp_tiered.services.progress import CheckpointStatus
from dcp_tiered.services.save_mark import SaveMark
from dcp_tiered.services.store_question import StoreQuestion
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)

_LEVELS = ("local", "durable")


@dataclass(kw_only=True)
class _Save:
    """State of one save: fixed when it begins, never taken from an earlier one."""

    checkpoint_id: str
    rank: int
    world_size: int
    node: str = ""
    is_coordinator: bool
    supersedes: tuple[str, ...] = ()
    begun: float
    mark: SaveMark | None = None
    """Tells the flusher that the save goes on; the coordinator has one."""

    def end(self) -> None:
        """Let the flusher know that this save goes on no longer."""
        if self.mark is not None:
            self.mark.release()


class _ThreadState(threading.local):
    """What DCP's calls tell each other: a save runs in one thread from `reset` to `finish`.

    Two saves that overlap, which `dcp.async_save` does not prevent, would otherwise write one's
    items under the other's id.
    """

    requested: object = None
    save: _Save | None = None


class TieredWriter(StorageWriter, AsyncStager):
    """Write DCP checkpoints to NVMe and, in the background, to a durable tier.

    One writer serves many saves, `dcp.save` as well as `dcp.async_save`. It can be pickled.
    `dcp.async_save` returns after one copy of the state into a buffer that is kept and reused; the
    next one waits until the save before it has ended, since DCP's collectives of two saves that
    overlap wait for each other.

    Args:
        url: The run: `tiered::s3://bucket/run42`, `tiered::file:///mnt/lustre/run42`, or
            `tiered:///nvme/run42` for a run that stays local.
        local: Directory on this node's NVMe; it has to exist. Default: `FSSPEC_TIERED_LOCAL`.
        overwrite: Replace a checkpoint of the same id; a reader sees the old or the new one.
        step: Training step for display and retention; default: the last integer in the id.
        metadata: Plain data of yours to keep with each checkpoint.
        trust_bytes: Save objects that `torch.load(weights_only=True)` would refuse at resume.
        engine: What writes to the local tier: `auto` (default), or `direct` (O_DIRECT) or
            `buffered`, which then has to work there.
        on_full: What a save does when too much waits for the flusher or the local tier is full of
            it: `block` (default) waits up to `backpressure_wait_s`, `fail` raises at once,
            `supersede` gives up the flush of older checkpoints, see docs/operations.md.
        on_local_full: What a save does when the disk is full and nothing on it may be evicted:
            `fail` (default), or `write_through`, which uploads this rank's part before the save
            ends. Such a checkpoint can be loaded once it is durable.
        limits: Bounds that differ from the defaults.
        residency: Where the flusher may bring checkpoints to: a policy such as
            `{"allow": ["aws:eu-central-1"], "owner": "123456789012"}`, or the path of its TOML
            file, see docs/residency.md. What it forbids stays on this node. All ranks have to give
            the same one.
        on_violation: What a save does while the flusher of this node finds that the policy does
            not allow the target: `hold` (default) saves, and nothing leaves; `fail_save` raises
            `ResidencyError` on all ranks until a look at the target is good again.
        compression: Of packs: `off` (default), `zstd`, or `auto`, which is for slow links only.
        flusher: `start` (default) starts this node's flusher with this writer's options;
            `external` leaves it to `dcp-tiered flush LOCAL --follow`, which has its own.
        **options: fsspec options by protocol, such as `s3={"endpoint_url": ...}`.

    Raises:
        InvalidError: The URL, the policy or an option cannot be right.
        ResidencyError: The policy has no rule for such a durable tier.
    """

    def __init__(  # noqa: PLR0913 - settings, all but two of them by keyword
        self,
        url: str | os.PathLike[str],
        local: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        trust_bytes: bool = False,
        engine: str | None = None,
        on_full: str | None = None,
        on_local_full: str | None = None,
        limits: Limits | None = None,
        residency: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        on_violation: str | None = None,
        compression: str | None = None,
        flusher: str | None = None,
        **options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._synchronize_after_execute = False
        self._settings = config.settings(
            url,
            local,
            options,
            limits,
            engine=engine,
            on_full=on_full,
            on_local_full=on_local_full,
            residency=residency,
            on_violation=on_violation,
            compression=compression,
            flusher=flusher,
        )
        self._overwrite = overwrite
        self._step = step
        self._metadata = copy.deepcopy(dict(metadata)) if metadata else {}
        to_tagged(self._metadata, "metadata")
        self._trust_bytes = trust_bytes
        self._launch = identity.current().text()
        self._last_sequence = 0
        self._start()

    def __repr__(self) -> str:
        return f"TieredWriter({self._settings.url.root!r}, local={str(self._settings.local)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to one save or one process."""
        mine = dict.fromkeys(("_thread", "_staging", "_shards", "_stack", "_space", "_question"))
        return {**self.__dict__, **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _start(self) -> None:
        """Make what belongs to one process."""
        self._thread = _ThreadState()
        self._stack = stack.build(self._settings)
        store_check_s = self._settings.limits.store_check_s
        quick = Limits(request_timeout_s=store_check_s, request_retry_s=0.0)
        self._question = StoreQuestion(
            partial(stack.durable_tier, self._settings, quick), store_check_s
        )
        self._space = LocalSpace(
            self._stack.catalog,
            self._stack.need_local(),
            self._settings.limits,
            write_through=self._settings.on_local_full == "write_through",
        )
        self._make_buffers()

    def _make_buffers(self) -> None:
        self._staging = StagingArena(self._settings.limits.stage_wait_s)
        self._shards = ShardWriter(self._stack, self._space, trust_bytes=self._trust_bytes)
        self._written_s = 0.0
        self._written_bytes = 0
        self._planned_bytes = 0

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the save that is going on or was asked for last; DCP logs it."""
        state = self._thread
        if state.requested is not None:
            return str(state.requested)
        return None if state.save is None else state.save.checkpoint_id

    # What DCP calls, in this order; the first two from `dcp.async_save` only.

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state that no later change of it reaches; training may go on.

        Raises:
            BackpressureError: The save before this one did not end within `stage_wait_s`.
        """
        return self._staging.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copy is complete."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Store the id of the next save. DCP may call this twice, or in the middle of a save."""
        self._thread.requested = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Begin a save: take the id that `reset` stored, once."""
        del args
        state = self._thread
        self._end_save()
        requested, state.requested, state.save = state.requested, None, None
        if kwargs.get("use_collectives") is False:
            raise InvalidError(
                "use_collectives=False is not supported: every rank would finish a checkpoint of"
                " its own",
                None,
                None,
                "Call dcp.save without use_collectives=False.",
            )
        if requested is None:
            raise InvalidError(
                "no checkpoint_id was given for this save",
                None,
                None,
                "Pass one, as in dcp.save(state, checkpoint_id='step-1', storage_writer=writer).",
            )
        rank, world_size = _rank_and_world()
        state.save = _Save(
            checkpoint_id=layout.check_checkpoint_id(requested),
            rank=rank,
            world_size=world_size,
            is_coordinator=is_coordinator,
            begun=time.monotonic(),
        )

    def storage_meta(self) -> None:
        """Return nothing: what DCP would put there is in the manifest."""
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse on this rank what could not be written, before a byte is."""
        save = self._current()
        local = self._stack.need_local()
        run_directory.check_writable(local.base)
        save.node = self._stack.node()
        self._refuse_violation()
        for item in plan.items:
            tensors.check_item(item, DTYPES)
        if self._overwrite:
            progress.note_asked(local, save.checkpoint_id, save.rank)
        if plan.items:  # the plan of an unchanged state may be cached by DCP, and comes empty
            self._planned_bytes = save_items.bytes_of(plan.items)
        if save.is_coordinator:
            if self._settings.on_full == "supersede":
                # The ranks of other nodes wait here for what this one gives up.
                self._refuse_published(save)
                self._make_room(save)
        elif config.launch_environment()[0] in (None, 0):
            self._make_room(save)
        said = save_items.Said(save.checkpoint_id, self._stack.policy_sha256(), save.node)
        return save_items.saying(plan, said)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide, for all ranks, whether this id may be saved."""
        save = self._current()
        said = save_items.said_by(plans, save.checkpoint_id)
        self._require_one(
            save,
            {rank: one.policy_sha256 for rank, one in said.items()},
            {rank: one.node for rank, one in said.items()},
        )
        catalog = self._stack.catalog
        published = self._refuse_published(save)
        supersedes: set[str] = set()
        if published is not None:
            supersedes |= {published.head.attempt, *published.head.supersedes}
        noted = catalog.noted(save.checkpoint_id)
        state, last = self._question.ask(save.checkpoint_id, self._last_sequence)
        if isinstance(state, Expired):
            noted = None  # it was removed since this node last looked
        for commit in (noted, state):
            if isinstance(commit, Commit):
                if not self._overwrite:
                    raise taken(save.checkpoint_id, "durable", "committed", commit.attempt)
                supersedes.add(commit.attempt)
        save.supersedes = tuple(sorted(supersedes))
        self._last_sequence = max(self._last_sequence, last, catalog.last_sequence())
        if self._settings.on_full != "supersede":
            self._make_room(save)
        if self._stack.durable is not None and save.world_size > 1:
            save.mark = SaveMark(self._stack.need_local(), save.checkpoint_id)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Seal this rank's shard file; a rank without items writes none."""
        save = self._current()
        try:
            results = self._write(save, plan, planner)
        except BaseException:
            save.end()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Prove that every chunk and bytes entry is there exactly once; publish the manifest."""
        save = self._current()
        try:
            self._publish(save, metadata, results)
        finally:
            save.end()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether DCP may use this text as a checkpoint id with this writer."""
        return isinstance(checkpoint_id, str) and layout.is_checkpoint_id(checkpoint_id)

    # What users call.

    def prewarm(self, state_dict: dict[str, Any]) -> None:
        """Make the staging buffer that a state will need, so that the first save does not."""
        self._staging.prewarm(state_dict)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this writer in this process, see `dcp_tiered.metrics`."""
        yield metrics.STALL, {}, self._staging.stalled_s
        yield metrics.STAGE, {}, self._staging.staged_s
        yield metrics.STAGE_BYTES, {}, self._staging.bytes_held
        yield metrics.WRITE, {}, self._written_s
        yield metrics.WRITE_BYTES, {}, self._written_bytes
        yield from self._space.samples()
        path = self._stack.need_local().root
        yield metrics.HELD_RESIDENCY, {}, progress.held_by_residency(path)
        yield metrics.INCIDENTS, {}, len(incidents.incident_numbers(path))
        yield metrics.LATE, {}, progress.late(path)
        yield from self._shards.samples()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this writer in this process, by name."""
        return metrics.flat(self.samples())

    def wait(self, level: str, checkpoint_id: str, *, timeout_s: float = 600.0) -> None:
        """Block until a checkpoint is `local` (on this node's tier) or `durable` (committed).

        Args:
            level: `local` or `durable`.
            checkpoint_id: The id given to `dcp.save` or `dcp.async_save`.
            timeout_s: Longest wait, seconds.

        Raises:
            ConflictError: Another job committed this id first.
            ExpiredError: It was durable, and was removed from the durable tier since then.
            InvalidError: The durable tier refuses: a wrong bucket or key, say.
            ResidencyError: The residency policy does not allow the durable tier.
            SupersededError: Its flush was given up for newer ones (`on_full="supersede"`).
            UnavailableError: The time is over; the message holds what the flusher last met.
        """
        if level not in _LEVELS:
            raise InvalidError(f"level {level!r} is not one of {', '.join(_LEVELS)}")
        if level == "durable" and self._stack.durable is None:
            raise InvalidError(
                "this run has no durable tier",
                "durable",
                None,
                "Use a URL as 'tiered::s3://bucket/run'.",
            )
        progress.wait(
            self._stack.catalog,
            self._stack.need_local(),
            level,
            layout.check_checkpoint_id(checkpoint_id),
            _rank_and_world()[0],
            timeout_s=timeout_s,
            poll_s=self._settings.limits.poll_s,
            launch=None if self._overwrite else self._launch,
            keep_flusher=self._stack.keep_flusher,
        )

    def status(self) -> list[CheckpointStatus]:
        """Return how far each checkpoint on this node is, oldest first."""
        return progress.status(self._stack.catalog, self._stack.need_local())

    def keep(self, checkpoint_id: str) -> None:
        """Spare a checkpoint: it is flushed whatever waits, and its copy here is not evicted.

        Call it after its save, on a rank of each node. The mark is a file `keep` beside the copy.

        Raises:
            AbsentError: Nothing of it is on this node.
            SupersededError: Its flush was given up before.
        """
        self._space.keep(layout.check_checkpoint_id(checkpoint_id))

    def close(self) -> None:
        """Give connections and buffers back. The flusher goes on by itself."""
        self._end_save()
        self._staging.close()
        self._make_buffers()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # How.

    def _end_save(self) -> None:
        """End the last save of this thread: it may have failed on another rank."""
        if self._thread.save is not None:
            self._thread.save.end()

    def _write(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self._stack.note_policy()
        results = []
        if plan.items:
            begun = time.monotonic()
            shard = self._shards.write(self._header(save), plan, planner)
            self._written_s += time.monotonic() - begun
            self._written_bytes += shard.length
            results.append(
                WriteResult(
                    index=MetadataIndex(shard.name), size_in_bytes=shard.length, storage_data=shard
                )
            )
            self._keep_flusher()
        return results

    def _publish(self, save: _Save, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shards = [cast("ShardResult", result.storage_data) for rank in results for result in rank]
        mine = self._stack.policy_sha256()
        by_rank = {layout.shard_rank(shard.name) or 0: shard for shard in shards}
        self._require_one(
            save,
            {save.rank: mine} | {rank: one.policy_sha256 for rank, one in by_rank.items()},
            {save.rank: save.node} | {rank: one.node for rank, one in by_rank.items()},
        )
        sequence = max(time.time_ns(), self._last_sequence + 1)
        head = Head(
            checkpoint_id=save.checkpoint_id,
            attempt=secrets.token_hex(8),
            launch=self._launch,
            node=save.node,
            sequence=sequence,
            step=self._step if self._step is not None else layout.step_of(save.checkpoint_id),
            metadata=self._metadata,
            supersedes=save.supersedes,
            world_size=save.world_size,
            written_by={"dcp_tiered": __version__, "torch": torch.__version__},
            policy_sha256=mine,
            shards=tuple(
                ShardRef(
                    name=shard.name,
                    node=shard.node,
                    length=shard.length,
                    crc32c=shard.crc32c,
                    footer_start=shard.footer_start,
                )
                for shard in shards
            ),
        )
        entries = completeness.match(
            save_items.planned(metadata), [shard.index() for shard in shards]
        )
        published = self._stack.catalog.publish(
            Manifest(head=head, entries=entries, planner_data=metadata.planner_data)
        )
        self._last_sequence = sequence
        self._keep_flusher()
        _log.info(
            "local: %s, step %s, %d bytes in %d shard files, %.2f s",
            save.checkpoint_id,
            head.step,
            published.head.bytes_stored(),
            len(shards),
            time.monotonic() - save.begun,
        )

    def _require_one(
        self, save: _Save, policies: Mapping[int, str | None], nodes: Mapping[int, str]
    ) -> None:
        """Refuse a save whose ranks do not belong together."""
        save_items.require_one_policy(policies)
        if self._stack.durable is not None:
            local_world_size = config.launch_environment()[1]
            save_items.require_one_tier(nodes, save.world_size, local_world_size)

    def _refuse_published(self, save: _Save) -> Published | None:
        """Return what a crash, or a save that is to be replaced, left on this node under the id.

        Raises:
            ConflictError: A job that is alive published it.
        """
        published = self._stack.catalog.published(save.checkpoint_id)
        if published is not None and not self._overwrite:
            launch = published.head.launch
            if launch == self._launch or identity.is_running(launch):
                raise taken(save.checkpoint_id, "local", "published", published.head.attempt)
        return published

    def _current(self) -> _Save:
        save = self._thread.save
        if save is None:
            raise InvalidError("no save is going on: DCP did not call set_up_storage_writer")
        return save

    def _keep_flusher(self) -> None:
        """See that a flusher runs; a save that is safe on NVMe does not fail without one."""
        try:
            self._stack.keep_flusher()
        except TieredError as exc:
            _log.error("the checkpoint is local and nobody uploads it: %s", exc)

    def _refuse_violation(self) -> None:
        """Fail the save on all ranks while this node's flusher finds the target not allowed."""
        if self._settings.on_violation == "hold" or self._stack.durable is None:
            return
        error = incidents.violation(self._stack.need_local().root)
        if error is not None:
            self._keep_flusher()  # who else would see that it was mended
            raise error

    def _header(self, save: _Save) -> Header:
        return Header(
            checkpoint_id=save.checkpoint_id,
            rank=save.rank,
            world_size=save.world_size,
            local_world_size=config.launch_environment()[1],
            node=save.node,
            token=secrets.token_hex(8),
            written_by=__version__,
            policy_sha256=self._stack.policy_sha256(),
        )

    def _make_room(self, save: _Save) -> None:
        """See that this node has room for the save; one rank of each node asks, before any writes.

        A run without a durable tier has nothing that could be evicted or waited for.
        """
        if self._stack.durable is None:
            return
        local_world = config.launch_environment()[1] or save.world_size
        needed = self._planned_bytes
        if save.world_size > 1:
            needed = self._space.expected_bytes(needed * local_world)
        self._space.admit(save.checkpoint_id, needed, self._settings.on_full, self._keep_flusher)


def _rank_and_world() -> tuple[int, int]:
    """Return global rank and world size; a failed look-up raises rather than passing for rank 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
