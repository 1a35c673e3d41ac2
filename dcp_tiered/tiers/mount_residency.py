"""Facts about a mounted file system: what it is, and what the marker of its site says.

Where the disks behind a mount are cannot be found out from here. Who runs the site says so in a
file at the root of the mount that only root can write, and the policy names the site.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_tiered.format.residency import Fact, Observed, Verdict
from dcp_tiered.syscalls import file_system_type

MARKER = ".dcp-tiered-site.json"
_MARKER_BYTES_MAX = 64 << 10
_PASSING = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x794C7630: "overlay"}
"""File systems that lose what is written to them; see statfs(2)."""
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """What is mounted somewhere."""

    point: Path
    fstype: str
    source: str


class MountLook:
    """Looks at the mount behind a directory, and notices when another one takes its place.

    Args:
        directory: Has to be there.
        marker_uid: Who has to own the marker file.
    """

    def __init__(self, directory: Path, marker_uid: int = 0) -> None:
        self._directory = directory
        self._marker_uid = marker_uid
        self._device: int | None = None

    def __call__(self) -> Observed:
        """Return every fact; what cannot be read is unknown."""
        try:
            device = self._directory.stat().st_dev  # first, for automounters
            mount = mount_of(self._directory)
            kind = file_system_type(self._directory)
        except (OSError, ValueError) as exc:
            gone = Fact(name="mount", verdict=Verdict.UNKNOWN, evidence=f"cannot look: {exc}")
            return _observed(f"file://{self._directory}", gone, None)
        marker, why_not = read_marker(mount.point, self._marker_uid)
        fact = self._mount_fact(mount, kind, device, marker, why_not)
        return _observed(f"file://{mount.point}", fact, marker)

    def _mount_fact(
        self, mount: Mount, kind: int, device: int, marker: dict[str, Any] | None, why_not: str
    ) -> Fact:
        values = [f"fstype={mount.fstype}", f"source={mount.source}"]
        evidence = f"{mount.fstype} of {mount.source} at {mount.point}"
        verdict = Verdict.UNKNOWN
        if marker is None:
            evidence += f"; {why_not}"
        elif isinstance(marker.get("site_id"), str):
            verdict = Verdict.ALLOW
            values.append(f"site_id={marker['site_id']}")
        self._device = device if self._device is None else self._device
        if self._device != device:
            verdict, evidence = Verdict.DENY, f"another file system is mounted now: {evidence}"
        elif kind in _PASSING:
            verdict, evidence = Verdict.DENY, f"{_PASSING[kind]} is not durable; {evidence}"
        return Fact(
            name="mount",
            verdict=verdict,
            evidence=evidence,
            values=tuple(values),
            call=f"statfs, mountinfo, {mount.point / MARKER}",
        )


def mount_of(path: Path) -> Mount:
    """Return what is mounted where a path lies.

    Raises:
        OSError: The kernel does not say.
    """
    real, found = Path(os.path.realpath(path)), None
    for line in _MOUNTS.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split()[4]))
        # Of mounts on the same point the last one is seen, and it comes last.
        if real.is_relative_to(point) and (
            found is None or len(point.parts) >= len(found.point.parts)
        ):
            fstype, source, *_ = right.split()
            found = Mount(point=point, fstype=fstype, source=_unescaped(source))
    if found is None:
        raise OSError(f"no mount holds {real}")
    return found


def read_marker(point: Path, uid: int) -> tuple[dict[str, Any] | None, str]:
    """Return what the marker file at a mount's root says, or why it does not count.

    Args:
        point: The mount's root.
        uid: Who has to own it.
    """
    path = point / MARKER
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        return None, f"no marker {path}: {exc.strerror}"
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None, f"marker {path} is no regular file"
        if found.st_uid != uid or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None, f"marker {path} may be written by others than its owner, or is not root's"
        if found.st_dev != point.stat().st_dev:
            return None, f"marker {path} is of another file system"
        try:
            fields = json.loads(file.read(_MARKER_BYTES_MAX))
        except (ValueError, RecursionError):
            return None, f"marker {path} is not JSON"
    return (fields, "") if isinstance(fields, dict) else (None, f"marker {path} is no object")


def _observed(target: str, mount: Fact, marker: dict[str, Any] | None) -> Observed:
    said = marker or {}
    return Observed(
        target=target, provider="posix", facts=(mount, _replication(said), _not_public(said))
    )


def _replication(said: dict[str, Any]) -> Fact:
    copies = said.get("replicated_to")
    if not isinstance(copies, list) or not all(isinstance(copy, str) for copy in copies):
        evidence = "no marker says where it is replicated to"
        return Fact(name="replication", verdict=Verdict.UNKNOWN, evidence=evidence)
    evidence = f"the site says that it is replicated to {', '.join(copies) or 'nowhere'}"
    return Fact(name="replication", verdict=Verdict.ALLOW, evidence=evidence, values=tuple(copies))


def _not_public(said: dict[str, Any]) -> Fact:
    is_public = said.get("public")
    if not isinstance(is_public, bool):
        evidence = "no marker says whether it is exported to the public"
        return Fact(name="not_public", verdict=Verdict.UNKNOWN, evidence=evidence)
    verdict = Verdict.DENY if is_public else Verdict.ALLOW
    evidence = f"the site says that it is {'' if is_public else 'not '}public"
    return Fact(name="not_public", verdict=verdict, evidence=evidence)


def _unescaped(text: str) -> str:
    """Return a field of mountinfo, where blanks and backslashes are octal."""
    return text.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")
