"""What was written since the target of a run was last seen to be allowed, and what is told of it.

The flusher notes each key before its first byte leaves, and forgets them when a look at the target
finds it allowed. A look that finds it otherwise makes an incident file of what was noted, also by a
flusher that was killed in between. Nothing is deleted: who reads the file decides.
"""

import contextlib
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcp_tiered.errors import AlreadyExistsError, ResidencyError, TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.residency import Verdict
from dcp_tiered.interfaces import LocalTier
from dcp_tiered.policy.residency import Decision
from dcp_tiered.services import run_directory
from dcp_tiered.services.progress import read_reports, restore_error

_log = logging.getLogger(__name__)
KEYS_MAX = 10_000
"""So many keys without a look at the target are one look too few."""
_INCIDENTS_MAX = 1000
_JOURNAL_BYTES_MAX = 64 << 20
_PRIVATE = 0o600


@dataclass(kw_only=True)
class Journal:
    """The journal of a run as it lies on disk."""

    good_at: str | None = None
    """When the target was last seen to be allowed, UTC; None: never."""
    keys: list[dict[str, str]] = field(default_factory=list)
    """Key and time of what was written since, or was about to be."""
    incident: int | None = None
    """Number of the incident that stands: no look since then was good."""


class KeyJournal:
    """Notes what is written to the durable tier; one flusher at a time, by its lock.

    Args:
        local: The run's directory.
        url: The run root on the durable tier.
    """

    def __init__(self, local: LocalTier, url: str) -> None:
        self._local, self._url = local, url
        self._path = local.root / layout.JOURNAL_FILE
        self._now = read_journal(local.root)
        self._sending: Counter[str] = Counter()
        """By how many threads each is being sent; several may at once, after a hang."""

    @property
    def is_full(self) -> bool:
        """Tell whether the target has to be looked at before more is written."""
        return len(self._now.keys) >= KEYS_MAX

    @property
    def is_open(self) -> bool:
        """Tell whether anything was written since the target was last seen to be allowed."""
        return bool(self._now.keys)

    @property
    def stands(self) -> bool:
        """Tell whether the last look that said anything was an incident."""
        return self._now.incident is not None

    def add(self, key: str) -> None:
        """Note a key, before its first byte leaves."""
        self._sending[key] += 1
        row = {"key": key, "at": _utc()}
        self._now.keys.append(row)
        self._append(row)

    def sent(self, key: str) -> None:
        """Note that nothing more of it leaves."""
        self._sending[key] -= 1
        if not self._sending[key]:
            del self._sending[key]

    def good(self, at: str) -> None:
        """Forget the keys: the target is allowed, at a time after they were written.

        What is being written still may go on when the target has changed again: its keys stay.
        """
        if self.stands:
            _log.warning("residency: the target of %s is allowed again", self._url)
        keys = [row for row in self._now.keys if row["key"] in self._sending]
        self._now = Journal(good_at=at, keys=keys)
        with run_directory.no_save_uploads(self._local) as alone:
            if alone:
                self._begin_anew(at)
            else:
                # What a save is writing through now may leave after this look, too.
                self._append({"good": at})

    def _begin_anew(self, at: str) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.touch(mode=_PRIVATE)
            lines = [_line({"good": at}), *map(_line, self._now.keys)]
            temporary.write_text("".join(lines), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as exc:
            # What stays in the file is listed once too often.
            _log.warning("cannot begin the journal of keys anew: %s", exc)

    def violated(self, decision: Decision, reason: str) -> None:
        """Make an incident of what was noted, unless one stands or there is nothing to tell.

        Args:
            decision: Against the target.
            reason: The same in words.
        """
        denied = any(one.fact.verdict is Verdict.DENY for one in decision.against())
        before = self._now.good_at is not None and denied
        if self.stands or not (self._now.keys or before):
            return
        try:
            number = self._put(decision, reason)
        except TieredError as exc:
            _log.error("residency: %s; no incident file: %s", reason, exc)
            return
        self._now.incident = number
        self._append({"incident": number})
        _log.error(
            "residency incident, %d objects were written since the last good look, see %s: %s",
            len(self._now.keys),
            self._local.root / layout.incident_name(number),
            reason,
        )

    def _put(self, decision: Decision, reason: str) -> int:
        """Write the incident file under the next free number."""
        number = max(incident_numbers(self._local.root), default=0) + 1
        noted = read_journal(self._local.root).keys  # by saves that wrote through, too
        keys = [*self._now.keys, *(row for row in noted if row not in self._now.keys)]
        while number <= _INCIDENTS_MAX:
            said = {
                "format": "dcp_tiered residency incident",
                "number": number,
                "found_at": _utc(),
                "last_good_at": self._now.good_at,
                "url": self._url,
                "reason": reason,
                "evidence": decision.stored(),
                "keys": keys,
            }
            data = json.dumps(said, indent=1, sort_keys=True).encode()
            with contextlib.suppress(AlreadyExistsError):
                self._local.put(layout.incident_name(number), data)
                return number
            number += 1
        raise ResidencyError(f"there are {_INCIDENTS_MAX} incident files already", "local")

    def _append(self, row: dict[str, Any]) -> None:
        _append(self._path, row)


class KeyNotes:
    """What a save that writes through adds to the journal, which is the flusher's.

    Args:
        local: The run's directory.
        url: The run root on the durable tier.
    """

    is_full = is_open = stands = False

    def __init__(self, local: LocalTier, url: str) -> None:
        del url
        self._path = local.root / layout.JOURNAL_FILE

    def add(self, key: str) -> None:
        """Note a key, before its first byte leaves."""
        _append(self._path, {"key": key, "at": _utc()})

    def sent(self, key: str) -> None:
        """Note nothing: the flusher knows what a save writes by the save's lock."""

    def good(self, at: str) -> None:
        """Leave the journal as it is: the flusher may have noted what is on its way."""

    def violated(self, decision: Decision, reason: str) -> None:
        """Leave the incident to the flusher; the save fails with the reason."""


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(path, flags, _PRIVATE)
        try:
            os.write(fd, _line(row).encode())
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        # A full disk must not stop the flusher that empties it: then only this process knows.
        _log.warning("cannot note what is written in the journal of keys: %s", exc)


def read_journal(run_path: Path) -> Journal:
    """Return the journal of a run; a line that is torn was of a write that never began."""
    found = Journal()
    try:
        with (run_path / layout.JOURNAL_FILE).open("rb") as file:
            data = file.read(_JOURNAL_BYTES_MAX)
    except OSError:
        return found
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if not isinstance(row, dict):
                continue
            if isinstance(row.get("key"), str):
                found.keys.append({"key": row["key"], "at": str(row.get("at", ""))})
            elif isinstance(row.get("good"), str):
                found.good_at, found.incident = row["good"], None
            elif isinstance(row.get("incident"), int):
                found.incident = row["incident"]
    return found


def incident_numbers(run_path: Path) -> list[int]:
    """Return the numbers of a run's incident files."""
    try:
        names = [path.name for path in run_path.iterdir()]
    except OSError:
        return []
    return sorted(n for name in names if (n := layout.incident_number(name)) is not None)


def violation(run_path: Path) -> ResidencyError | None:
    """Return what the flusher of this node found against the target, None when nothing stands."""
    number = read_journal(run_path).incident
    if number is not None:
        path = run_path / layout.incident_name(number)
        return ResidencyError(
            f"the durable tier is not where the residency policy allows it to be, see {path}",
            "durable",
            str(path),
            "Mend the target or the policy; the flusher looks again and says so in flusher.log.",
        )
    for report in read_reports(run_path).values():
        error = restore_error(report.error) if report.state == "held_residency" else None
        if isinstance(error, ResidencyError):
            return error
    return None


def _line(row: dict[str, Any]) -> str:
    return "\n" + json.dumps(row)  # behind a line that a cut of the power may have torn


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
