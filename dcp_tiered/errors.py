"""Every error of dcp_tiered, classed by what the catcher does about it.

    TieredError
    ├── InvalidError          fix the call, the settings or the credentials
    ├── UnavailableError      retry later: a store, a disk or a network is down or full
    ├── CorruptError          this copy is bad: use another one
    ├── IncompleteError       not all parts are reachable
    ├── AbsentError           it is definitely not there
    │   └── NoCheckpointError     a run without any checkpoint: the only reason to start fresh
    ├── ConflictError         another attempt owns this name
    │   ├── AlreadyExistsError    a create-only object is there already
    │   └── ExpiredError          it was removed from the durable tier
    ├── ResidencyError        not allowed in that place
    └── BackpressureError     a bounded queue is full
        └── SupersededError       its flush was given up for newer ones: wait for one of those

Errors cross ranks by pickle, so they hold plain data and are built from positional arguments only.
"""

import errno as errno_codes
import os

__all__ = [
    "AbsentError",
    "AlreadyExistsError",
    "BackpressureError",
    "ConflictError",
    "CorruptError",
    "ExpiredError",
    "IncompleteError",
    "InvalidError",
    "NoCheckpointError",
    "ResidencyError",
    "SupersededError",
    "TieredError",
    "UnavailableError",
    "cause",
    "from_os_error",
]


class TieredError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened, lower-case and without a full stop.
        tier: `local` or `durable`, where it happened.
        key: The object, path or item it happened to.
        hint: A sentence that says what to do next.
        errno: The operating system's error number, where there is one.
    """

    def __init__(
        self,
        message: str,
        tier: str | None = None,
        key: str | None = None,
        hint: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, tier, key, hint, errno)
        self.message = message
        self.tier = tier
        self.key = key
        self.hint = hint
        self.errno = errno

    def __str__(self) -> str:
        text = self.message
        if self.tier is not None:
            text += f" [tier={self.tier}]"
        if self.key is not None:
            text += f" [key={self.key}]"
        if self.errno is not None:
            text += f" [errno={errno_codes.errorcode.get(self.errno, self.errno)}]"
        if self.hint is not None:
            text += f"\nHINT: {self.hint}"
        return text


class InvalidError(TieredError):
    """Report a call, setting or credential that has to be fixed."""


class UnavailableError(TieredError):
    """Report a store, disk or network that is down or full: retry later."""


class CorruptError(TieredError):
    """Report a copy whose bytes are not what was written."""


class IncompleteError(TieredError):
    """Report a checkpoint of which not all parts can be reached."""


class AbsentError(TieredError):
    """Report something that is definitely not there; never used when that is not certain."""


class NoCheckpointError(AbsentError):
    """Report a run that holds no checkpoint at all, complete or not."""


class ConflictError(TieredError):
    """Report a name that another attempt owns."""


class AlreadyExistsError(ConflictError):
    """Report a create-only object that is there already, perhaps by a lost reply of ours."""


class ExpiredError(ConflictError):
    """Report a checkpoint that was committed, and was removed from the durable tier since then."""


class ResidencyError(TieredError):
    """Report a place that the residency policy does not allow."""


class BackpressureError(TieredError):
    """Report a bounded queue that stayed full for longer than its limit."""


class SupersededError(BackpressureError):
    """Report a checkpoint that will not be durable: its flush was given up for newer ones."""


def cause(exc: BaseException | None) -> TieredError | None:
    """Find our error inside what DCP raises.

    DCP wraps what a rank raised into a `CheckpointException`, which derives from `BaseException`
    and keeps the originals, by rank, in `failures`.

    Args:
        exc: What `dcp.save`, `dcp.load` or a future of `dcp.async_save` raised.

    Returns:
        The first error of this package in it, lowest rank first, or None.
    """
    seen: set[int] = set()
    todo = [exc]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        if isinstance(current, TieredError):
            return current
        seen.add(id(current))
        inside: list[BaseException | None] = []
        failures = getattr(current, "failures", None)
        if isinstance(failures, dict):
            inside += [failures[rank][0] for rank in sorted(failures)]
        inside += [current.__cause__, current.__context__]
        todo += reversed(inside)
    return None


_FULL = (errno_codes.ENOSPC, errno_codes.EDQUOT)
_DENIED = (errno_codes.EACCES, errno_codes.EPERM, errno_codes.EROFS)
_MISSING = (errno_codes.ENOENT, errno_codes.ENOTDIR)


def from_os_error(
    exc: OSError, tier: str, path: str, doing: str, *, bytes_asked: int | None = None
) -> TieredError:
    """Turn an `OSError` into an error of ours that keeps errno, path, bytes asked and bytes free.

    Args:
        exc: The error to translate.
        tier: `local` or `durable`.
        path: The path that was worked on.
        doing: The verb phrase for the message, such as `write a shard file`.
        bytes_asked: How many bytes were to be written, if that is what failed.

    Returns:
        `InvalidError` for a missing or forbidden path, else `UnavailableError`.
    """
    message = f"cannot {doing}: {exc.strerror or exc}"
    if bytes_asked is not None:
        message += f", {bytes_asked} bytes asked"
    free = _bytes_free(path)
    if free is not None:
        message += f", {free} bytes free"
    code = exc.errno
    if code in _FULL:
        hint = f"Free space on the file system of {path}, for instance with 'df -h {path}' at hand."
        return UnavailableError(message, tier, path, hint, code)
    if code in _DENIED:
        hint = (
            f"Make {path} writable for this user; 'ls -ld {path}' and 'mount' show why it is not."
        )
        return InvalidError(message, tier, path, hint, code)
    if code in _MISSING:
        hint = f"Mount what belongs there, or create the directory: 'mkdir -p {path}'."
        return InvalidError(message, tier, path, hint, code)
    hint = (
        "Look at 'dmesg' for the device; the data is not there, so save again or use another disk."
    )
    return UnavailableError(message, tier, path, hint, code)


def _bytes_free(path: str) -> int | None:
    while True:
        try:
            stat = os.statvfs(path)
        except OSError:
            parent = os.path.dirname(path)  # noqa: PTH120 - a string in, a string out
            if parent == path:
                return None
            path = parent
        else:
            return stat.f_bavail * stat.f_frsize
