"""How far each checkpoint is, read from the local tier; never from the memory of a process.

The saver may be another process than the one that asks (DCP's PROCESS mode), so what counts is what
lies on disk: shard files, published manifests, copies of records, and the flusher's last report.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dcp_tiered import errors
from dcp_tiered.errors import (
    ConflictError,
    InvalidError,
    ResidencyError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format import layout
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.services.catalog import Catalog

_PERMANENT = (ConflictError, InvalidError, ResidencyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the flusher last did about one attempt."""

    checkpoint_id: str
    attempt: str
    state: str
    """`waiting`, `uploading`, `incomplete`, `failed` or `conflict`."""
    bytes_done: int = 0
    tries: int = 0
    at: float = 0.0
    """Wall clock, seconds: to tell a fresh report from an old one."""
    error: dict[str, Any] | None = None
    """Class name and fields of the error of the last try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """One line of `status`."""

    checkpoint_id: str
    state: str
    """`saving`, `local`, `uploading`, `incomplete`, `failed`, `conflict` or `durable`."""
    step: int | None
    bytes_stored: int
    bytes_uploaded: int
    error: str | None


@dataclass(kw_only=True)
class ReportFile:
    """The flusher's reports, replaced as a whole; a hint for people and for `wait`, never a truth."""

    run_path: Path
    reports: dict[str, Report] = field(default_factory=dict)

    def set(self, report: Report) -> None:
        """Keep the newest report about an id and write all of them."""
        self.reports[report.checkpoint_id] = report
        self.write()

    def drop(self, checkpoint_id: str) -> None:
        """Forget an id that needs nothing any more."""
        if self.reports.pop(checkpoint_id, None) is not None:
            self.write()

    def write(self) -> None:
        """Write the reports; a full disk must not stop the flusher that empties it."""
        path = self.run_path / layout.STATUS_FILE
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        data = {"pid": os.getpid(), "reports": [asdict(report) for report in self.reports.values()]}
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.replace(path)


def read_reports(run_path: Path) -> dict[str, Report]:
    """Return the flusher's reports by id; none when they are missing or damaged."""
    try:
        fields = json.loads((run_path / layout.STATUS_FILE).read_text(encoding="utf-8"))
        reports = [Report(**report) for report in fields["reports"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {report.checkpoint_id: report for report in reports}


def describe_error(error: TieredError) -> dict[str, Any]:
    """Return an error as plain data."""
    return {"class": type(error).__name__, "fields": list(error.args)}


def restore_error(fields: dict[str, Any] | None) -> TieredError | None:
    """Return the error that plain data describes."""
    if fields is None:
        return None
    cls = getattr(errors, str(fields.get("class")), None)
    if not isinstance(cls, type) or not issubclass(cls, TieredError):
        cls = UnavailableError
    return cls(*fields.get("fields", ["unknown error"]))


def status(catalog: Catalog, local: LocalTier) -> list[CheckpointStatus]:
    """Return how far each checkpoint on this node is, oldest first."""
    reports = read_reports(local.root)
    lines = []
    for checkpoint_id in catalog.local_ids():
        published = catalog.published(checkpoint_id)
        if published is None:
            if catalog.sealed(checkpoint_id):
                lines.append((0, _unpublished(checkpoint_id)))
            continue
        head = published.head
        commit = catalog.noted(checkpoint_id)
        report = reports.get(checkpoint_id)
        if report is not None and report.attempt != head.attempt:
            report = None
        error = restore_error(report.error) if report else None
        if commit is not None and commit.attempt == head.attempt:
            state, uploaded = "durable", head.bytes_stored()
        elif report is not None and report.state != "waiting":
            state, uploaded = report.state, report.bytes_done
        else:
            state, uploaded = "local", 0
        line = CheckpointStatus(
            checkpoint_id=checkpoint_id,
            state=state,
            step=head.step,
            bytes_stored=head.bytes_stored(),
            bytes_uploaded=uploaded,
            error=str(error) if error and state != "durable" else None,
        )
        lines.append((head.sequence, line))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def wait(
    catalog: Catalog,
    local: LocalTier,
    level: str,
    checkpoint_id: str,
    rank: int,
    *,
    timeout_s: float,
    poll_s: float,
    keep_flusher: Callable[[], None],
) -> None:
    """Block until a checkpoint of this node is `local` or `durable`.

    What has to be in it is this rank's newest sealed shard file of that id, so that the answer is not
    about an older save under the same id.

    Args:
        catalog: The run's catalog.
        local: This node's tier.
        level: `local` or `durable`.
        checkpoint_id: The id.
        rank: Global rank of the caller.
        timeout_s: Longest wait.
        poll_s: How often to look.
        keep_flusher: Called on every look while `durable` is awaited, starts a flusher if none runs.

    Raises:
        ConflictError: Another attempt owns the id.
        InvalidError: The flusher cannot succeed before something is fixed.
        UnavailableError: The time is over; the last error of the flusher is in the message.
    """
    begun, deadline = time.time(), time.monotonic() + timeout_s
    while True:
        if level == "durable":
            keep_flusher()
            if _is_durable(catalog, local, checkpoint_id, rank):
                return
        elif _is_local(catalog, local, checkpoint_id, rank):
            return
        error = _fresh_error(catalog, local, checkpoint_id, begun)
        if level == "durable" and isinstance(error, _PERMANENT):
            raise error
        if time.monotonic() >= deadline:
            raise _late(level, checkpoint_id, timeout_s, error)
        time.sleep(poll_s)


def _is_durable(catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int) -> bool:
    commit = catalog.noted(checkpoint_id)
    if commit is None:
        return False
    mine = _newest_shard(catalog, local, checkpoint_id, rank)
    if mine is not None:
        return mine in {placement.shard for placement in commit.placements}
    published = catalog.published(checkpoint_id)
    return published is None or published.head.attempt == commit.attempt


def _is_local(catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int) -> bool:
    published = catalog.published(checkpoint_id)
    if published is None:
        return False
    mine = _newest_shard(catalog, local, checkpoint_id, rank)
    return mine is None or mine in {shard.name for shard in published.head.shards}


def _newest_shard(catalog: Catalog, local: LocalTier, checkpoint_id: str, rank: int) -> str | None:
    newest, newest_at = None, -1
    for name in catalog.sealed(checkpoint_id):
        if layout.shard_rank(name) == rank:
            with contextlib.suppress(FileNotFoundError):
                at = (local.root / checkpoint_id / name).stat().st_mtime_ns
                if at > newest_at:
                    newest, newest_at = name, at
    return newest


def _fresh_error(
    catalog: Catalog, local: LocalTier, checkpoint_id: str, since: float
) -> TieredError | None:
    """Return the flusher's error about the published attempt, if it is no older than the question.

    A conflict stays one; anything else may have been fixed since an older report.
    """
    report = read_reports(local.root).get(checkpoint_id)
    published = catalog.published(checkpoint_id)
    if report is None or published is None or report.attempt != published.head.attempt:
        return None
    error = restore_error(report.error)
    return error if isinstance(error, ConflictError) or report.at >= since else None


def _late(
    level: str, checkpoint_id: str, timeout_s: float, error: TieredError | None
) -> TieredError:
    message = f"checkpoint is not {level} after {timeout_s:g} s"
    hint = "Look at 'dcp-tiered status LOCAL' and at flusher.log in the run's local directory."
    if error is not None:
        message += f": {error.message}"
        hint = error.hint or hint
        return UnavailableError(message, error.tier, error.key, hint, error.errno)
    return UnavailableError(
        message, "local" if level == "local" else "durable", checkpoint_id, hint
    )


def _unpublished(checkpoint_id: str) -> CheckpointStatus:
    return CheckpointStatus(
        checkpoint_id=checkpoint_id,
        state="saving",
        step=layout.step_of(checkpoint_id),
        bytes_stored=0,
        bytes_uploaded=0,
        error=None,
    )
