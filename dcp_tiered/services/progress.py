"""How far each checkpoint is, read from the local tier; never from the memory of a process.

The saver may be another process than the one that asks (DCP's PROCESS mode), so what counts is what
lies on disk: shard files, published manifests, copies of records, and the flusher's last report.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from dcp_tiered import errors
from dcp_tiered.errors import (
    AbsentError,
    ConflictError,
    CorruptError,
    ExpiredError,
    InvalidError,
    ResidencyError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.records import Commit
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services import identity, lock, superseded_notes, superseding
from dcp_tiered.services.catalog import Catalog, replace
from dcp_tiered.services.identity import ProcessIdentity
from dcp_tiered.services.lock import FlusherLock

_PERMANENT = (ConflictError, InvalidError, ResidencyError)
_UNDER_WAY = ("waiting", "uploading")
_FINAL = ("conflict", "damaged")
"""States that no credentials and no waiting can change."""
_TRIED_ON = ("local", "uploading", "failed", "incomplete")
"""States that say less than `late`."""
_ASK_S = 1.0
"""How often `wait` asks the store itself, where nothing on this node could tell."""
_SKEW_NS = 1_000_000_000
"""How far the clocks of two nodes may be apart when a rank asks for a replaced checkpoint."""
_TICK_NS = 20_000_000
"""How far the time of a file may be behind the clock."""
_NOTE_BYTES_MAX = 64
_PRIVATE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the flusher last did about one attempt."""

    checkpoint_id: str
    attempt: str
    """Empty for shard files whose manifest lies on another node."""
    state: str
    """`waiting`, `uploading`, `incomplete`, `failed`, `held_residency`, `damaged` or `conflict`."""
    bytes_done: int = 0
    tries: int = 0
    at: float = 0.0
    """Wall clock at which the try that met `error` began, seconds."""
    error: dict[str, Any] | None = None
    """Class name and fields of the error of the last try."""
    late: bool = False
    """It is not durable after `flush_deadline_s`, and is tried on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """One line of `status`."""

    checkpoint_id: str
    level: str
    """`staged` (shard files, no manifest known here), `local` or `durable`, as `wait` means it."""
    state: str
    """`saving`, `local`, `durable`, `expired`, `superseded`, `late`, or what the flusher reports:
    what keeps it from the next."""
    step: int | None
    bytes_stored: int
    bytes_uploaded: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The flusher's reports as they lie on disk; empty when they are missing or damaged."""

    flusher: ProcessIdentity | None = None
    """Who wrote them."""
    failure: TieredError | None = None
    """Why that process ended, when it failed as a whole."""
    failed_at: float = 0.0
    by_id: dict[str, Report] = field(default_factory=dict)


@dataclass(kw_only=True)
class ReportFile:
    """The flusher's reports, replaced as a whole: a hint for people and `wait`, never a truth."""

    run_path: Path
    reports: dict[str, Report] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def set(self, report: Report) -> None:
        """Keep the newest report about an id and write all of them."""
        with self._lock:
            self.reports[report.checkpoint_id] = report
            self.write()

    def bytes_of(self, checkpoint_id: str) -> int:
        """Return how many bytes of an id are known to be there already."""
        report = self.reports.get(checkpoint_id)
        return report.bytes_done if report else 0

    def uploaded(self, checkpoint_id: str, attempt: str, bytes_done: int) -> None:
        """Note how far an upload is, as long as its attempt is reported as under way."""
        with self._lock:
            report = self.reports.get(checkpoint_id)
            if report is None or report.attempt != attempt or report.state not in _UNDER_WAY:
                return
            report = changed(report, state="uploading", bytes_done=bytes_done)
            self.set(report)

    def drop(self, checkpoint_id: str) -> None:
        """Forget an id that needs nothing any more."""
        with self._lock:
            if self.reports.pop(checkpoint_id, None) is not None:
                self.write()

    def fail(self, error: TieredError) -> None:
        """Tell why the flusher as a whole cannot work; what it said about each id stays."""
        self.reports = read_reports(self.run_path)
        self.write({"error": describe_error(error), "at": time.time()})

    def write(self, failure: dict[str, Any] | None = None) -> None:
        """Write the reports; a full disk must not stop the flusher that empties it."""
        path = self.run_path / layout.STATUS_FILE
        temporary = path.with_suffix(".tmp")
        data = {
            "pid": os.getpid(),
            "flusher": identity.current().to_json(),
            "failure": failure,
            "reports": [asdict(report) for report in self.reports.values()],
        }
        with self._lock, contextlib.suppress(OSError):
            temporary.touch(mode=_PRIVATE)
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.replace(path)


def read_reports(run_path: Path) -> dict[str, Report]:
    """Return the flusher's reports by id; none when they are missing or damaged."""
    return _read(run_path).by_id


def held_by_residency(run_path: Path) -> int:
    """Return how many checkpoints of a run its residency policy keeps on this node."""
    reports = read_reports(run_path).values()
    return sum(report.state == "held_residency" for report in reports)


def late(run_path: Path) -> int:
    """Return how many checkpoints of a run are not durable after `flush_deadline_s`."""
    return sum(report.late for report in read_reports(run_path).values())


def describe_error(error: TieredError) -> dict[str, Any]:
    """Return an error as plain data."""
    return {"class": type(error).__name__, "fields": list(error.args)}


def restore_error(fields: object) -> TieredError | None:
    """Return the error that plain data describes, None for anything else."""
    if not isinstance(fields, dict):
        return None
    cls = getattr(errors, str(fields.get("class")), None)
    if not isinstance(cls, type) or not issubclass(cls, TieredError):
        cls = UnavailableError
    try:
        return cls(*fields.get("fields", ["unknown error"]))
    except TypeError:
        return UnavailableError("unknown error")


def _read(run_path: Path) -> Reports:
    try:
        fields = json.loads((run_path / layout.STATUS_FILE).read_text(encoding="utf-8"))
        reports = [Report(**report) for report in fields["reports"]]
        failure = fields.get("failure") or {}
        return Reports(
            flusher=identity.from_json(fields.get("flusher")),
            failure=restore_error(failure.get("error")),
            failed_at=float(failure.get("at", 0.0)),
            by_id={report.checkpoint_id: report for report in reports if _is_sound(report)},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Reports()


def _is_sound(report: Report) -> bool:
    texts = (report.checkpoint_id, report.attempt, report.state)
    numbers = (report.bytes_done, report.tries, report.at)
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int | float) for number in numbers
    )


def status(catalog: Catalog, local: LocalTier) -> list[CheckpointStatus]:
    """Return how far each checkpoint on this node is, oldest first; damage is a line of its own."""
    reports = read_reports(local.root)
    lines: list[tuple[int, CheckpointStatus]] = []
    for checkpoint_id in catalog.local_ids():
        try:
            line = _line(catalog, checkpoint_id, reports.get(checkpoint_id))
        except TieredError as exc:
            line = 0, _bare(checkpoint_id, "damaged", exc)
        if line is not None:
            lines.append(line)
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _line(
    catalog: Catalog, checkpoint_id: str, report: Report | None
) -> tuple[int, CheckpointStatus] | None:
    """Return one line and its place in the order, None for an id without anything of a save."""
    published, commit = catalog.published(checkpoint_id), catalog.noted(checkpoint_id)
    if published is None and commit is None and not catalog.sealed(checkpoint_id):
        return None
    attempt = published.head.attempt if published is not None else ""
    if report is not None and report.attempt != attempt:
        report = None
    error = restore_error(report.error) if report else None
    if commit is not None and (published is None or commit.sequence >= published.head.sequence):
        # The newest save that this node knows of; an older one that lost against it does not count.
        line = _bare(checkpoint_id, "durable", None, commit.step, commit.bytes_stored)
        return commit.sequence, line
    expired = catalog.noted_expired(checkpoint_id)
    if published is None:
        if expired is not None:
            return 0, _bare(checkpoint_id, "expired", _removed(expired))
        return 0, _bare(checkpoint_id, report.state if report and error else "saving", error)
    head = published.head
    state, uploaded = "local", 0
    if report is not None and report.state != "waiting":
        state, uploaded = report.state, report.bytes_done
    if report is not None and report.late and state in _TRIED_ON:
        state = "late"
    text = str(error) if error else None
    if note := superseding.superseded(catalog, checkpoint_id):
        state, text = "superseded", f"the flush was given up: {note.reason}"
    if expired is not None and expired.attempt == attempt:
        state, text = "expired", str(_removed(expired))
    return head.sequence, CheckpointStatus(
        checkpoint_id=checkpoint_id,
        level="local",
        state=state,
        step=head.step,
        bytes_stored=head.bytes_stored(),
        bytes_uploaded=uploaded,
        error=text,
    )


def _bare(
    checkpoint_id: str,
    state: str,
    error: TieredError | None,
    step: int | None = None,
    bytes_stored: int = 0,
) -> CheckpointStatus:
    return CheckpointStatus(
        checkpoint_id=checkpoint_id,
        level="durable" if state == "durable" else "staged",
        state=state,
        step=layout.step_of(checkpoint_id) if step is None else step,
        bytes_stored=bytes_stored,
        bytes_uploaded=bytes_stored,
        error=str(error) if error else None,
    )


def wait(  # noqa: PLR0913 - the writer's one caller names them all
    catalog: Catalog,
    local: LocalTier,
    level: str,
    checkpoint_id: str,
    rank: int,
    *,
    timeout_s: float,
    poll_s: float,
    keep_flusher: Callable[[], None],
    launch: str | None = None,
) -> None:
    """Block until a checkpoint of this node is `local` or `durable`.

    What has to be in it is this rank's newest sealed shard file of that id, and it has to be newer
    than the last save that this rank began in order to replace it: the answer is not about an older
    save under the same id. After `dcp.async_save` the save has begun for certain when its future is
    done.

    Args:
        catalog: The run's catalog.
        local: This node's tier.
        level: `local` or `durable`.
        checkpoint_id: The id.
        rank: Global rank of the caller.
        timeout_s: Longest wait; where this node has nothing of the checkpoint and the store has to
            be asked, one request to it may come on top.
        poll_s: How often to look.
        keep_flusher: Called on every look for `durable`, starts a flusher if none runs.
        launch: The caller's job, if it saves an id only once: what it published is then what it
            asks for, even where another job on this node left a newer shard file under the id.

    Raises:
        ConflictError: Another attempt owns the id.
        ExpiredError: It was durable, and was removed from the durable tier.
        CorruptError: A shard file on this node is damaged, so this save cannot become durable.
        InvalidError: The flusher cannot succeed before something is fixed.
        ResidencyError: The residency policy does not allow the durable tier.
        SupersededError: Its flush was given up.
        UnavailableError: The time is over; the last error of the flusher is in the message.
    """
    begun, deadline, ask_at = time.time(), time.monotonic() + timeout_s, 0.0
    while True:
        since = _asked_at(local, checkpoint_id, rank) - _SKEW_NS
        if level == "local":
            if _is_local(catalog, local, checkpoint_id, rank, since):
                return
        elif _is_durable(catalog, local, checkpoint_id, rank, launch, since):
            return
        elif ended := _expired(catalog, local, checkpoint_id, rank, since) or _superseded(
            catalog, local, checkpoint_id, rank, since
        ):
            raise ended
        if _has_work(catalog, checkpoint_id):
            keep_flusher()  # on other nodes than the coordinator's it brings the manifest too
        elif catalog.durable is not None and time.monotonic() >= ask_at:
            # Nothing of it lies on this node, so no flusher here will ever note its commit.
            if _is_committed(catalog, checkpoint_id, since):
                return
            ask_at = time.monotonic() + _ASK_S
        error, final = _error(catalog, local, checkpoint_id, begun)
        if error is not None and level == "durable" and final:
            raise error
        if time.monotonic() >= deadline:
            raise _late(level, local, checkpoint_id, timeout_s, error)
        time.sleep(poll_s)


def note_asked(local: LocalTier, checkpoint_id: str, rank: int) -> None:
    """Note for `wait` that a rank begins to replace a checkpoint now: the old one does not count.

    A node may have no shard file of the new save that would tell the two apart.
    """
    key = layout.key(checkpoint_id, layout.asked_name(rank))
    replace(local, key, str(time.time_ns()).encode())


def _asked_at(local: LocalTier, checkpoint_id: str, rank: int) -> int:
    """Return when a rank last began to replace a checkpoint, nanoseconds; 0 if it never did."""
    key = layout.key(checkpoint_id, layout.asked_name(rank))
    try:
        return int(local.get(key, _NOTE_BYTES_MAX))
    except (AbsentError, CorruptError, ValueError):
        return 0


def _has_work(catalog: Catalog, checkpoint_id: str) -> bool:
    """Tell whether the flusher of this node is going to learn of a commit that is not known yet."""
    if catalog.unnamed(checkpoint_id):
        return True
    published, commit = catalog.published(checkpoint_id), catalog.noted(checkpoint_id)
    if published is None:
        return False
    return commit is None or commit.attempt != published.head.attempt


def _is_durable(
    catalog: Catalog,
    local: LocalTier,
    checkpoint_id: str,
    rank: int,
    launch: str | None,
    since: int,
) -> bool:
    commit = catalog.noted(checkpoint_id)
    if commit is None or commit.sequence < since:
        return False
    mine = _newest_shard(catalog, local, checkpoint_id, rank, since)
    if mine is not None and _names(commit, mine):
        return True
    published = catalog.published(checkpoint_id)
    if mine is not None:
        return (
            published is not None
            and published.head.launch == launch
            and published.head.attempt == commit.attempt
        )
    return published is None or published.head.attempt == commit.attempt


def _expired(
    catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int, since: int
) -> TieredError | None:
    """Return the error for a save that was durable and is known to be removed."""
    commit = catalog.noted_expired(checkpoint_id)
    if commit is None or commit.sequence < since:
        return None
    mine = _newest_shard(catalog, local, checkpoint_id, rank, since)
    return _removed(commit) if mine is None or _names(commit, mine) else None


def _removed(commit: Commit) -> ExpiredError:
    return ExpiredError(
        f"checkpoint {commit.checkpoint_id!r} was removed from the durable tier",
        "durable",
        commit.checkpoint_id,
        "Use another one; 'dcp-tiered ls URL' lists them.",
    )


def _superseded(
    catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int, since: int
) -> TieredError | None:
    """Return the error for a save whose flush was given up, None for any other."""
    note = superseding.superseded(catalog, checkpoint_id)
    if note is None or note.sequence < since:
        return None
    mine = _newest_shard(catalog, local, checkpoint_id, rank, since)
    if mine is not None and mine not in note.shards:
        return None  # a newer save goes on
    return superseded_notes.error_of(checkpoint_id, note.reason)


def _is_local(
    catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int, since: int
) -> bool:
    mine = _newest_shard(catalog, local, checkpoint_id, rank, since)
    published = catalog.published(checkpoint_id)
    if published is not None and published.head.sequence >= since:
        return mine is None or mine in {shard.name for shard in published.head.shards}
    commit = catalog.noted(checkpoint_id)
    if commit is None or commit.sequence < since:
        return False
    return mine is not None and _names(commit, mine)


def _is_committed(catalog: Catalog, checkpoint_id: str, since: int) -> bool:
    try:
        state = catalog.state(checkpoint_id)
    except UnavailableError:
        return False
    return isinstance(state, Commit) and state.sequence >= since


def _names(commit: Commit, shard: str) -> bool:
    return shard in {placement.shard for placement in commit.placements}


def _newest_shard(
    catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int, since: int
) -> str | None:
    """Return a rank's newest shard file, None where the save that is asked for left none here.

    That may have written through, or had no item of this rank.
    """
    newest, newest_at = None, since + _SKEW_NS - _TICK_NS
    for name in catalog.sealed(checkpoint_id):
        if layout.shard_rank(name) == rank:
            with contextlib.suppress(FileNotFoundError):
                at = (local.root / checkpoint_id / name).stat().st_mtime_ns
                if at > newest_at:
                    newest, newest_at = name, at
    return newest


def _error(
    catalog: Catalog, local: LocalTier, checkpoint_id: str, since: float
) -> tuple[TieredError | None, bool]:
    """Return what the flusher last met with this save, and whether waiting on is of no use.

    A refusal counts only when it is no older than the question and comes from a flusher that serves
    this job: an orphan's credentials say nothing about those of the one that replaces it.
    """
    reports = _read(local.root)
    report = reports.by_id.get(checkpoint_id)
    error = restore_error(report.error) if report else None
    if report is not None and error is not None:
        published = catalog.published(checkpoint_id)
        if report.attempt == (published.head.attempt if published is not None else ""):
            if report.state in _FINAL and report.attempt:
                return error, True
            final = isinstance(error, _PERMANENT) and report.at >= since
            return error, final and _serves(local, reports.flusher)
    fresh = reports.failure is not None and reports.failed_at >= since
    return (reports.failure, False) if fresh else (None, False)


def _serves(local: LocalTier, flusher: ProcessIdentity | None) -> bool:
    """Tell whether a flusher is the one that has the lock, for a process that is alive."""
    holder = FlusherLock(local.root).holder()
    return holder is not None and holder.flusher == flusher and not holder.is_orphaned()


def _late(
    level: str, local: LocalTier, checkpoint_id: str, timeout_s: float, error: TieredError | None
) -> TieredError:
    message = f"checkpoint is not {level} after {timeout_s:g} s"
    hint = "Look at 'dcp-tiered status LOCAL' and at flusher.log in the run's local directory."
    if level == "durable" and FlusherLock(local.root).holder() is None:
        message, hint = f"{message}: {lock.MISSING}", lock.MISSING_HINT
    if error is not None:
        message += f": {error.message}"
        hint = error.hint or hint
        return UnavailableError(message, error.tier, error.key, hint, error.errno)
    return UnavailableError(
        message, "local" if level == "local" else "durable", checkpoint_id, hint
    )
