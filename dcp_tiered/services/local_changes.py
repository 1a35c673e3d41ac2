"""Which checkpoint directories of the local tier may have changed since they were looked at."""

import time

from dcp_tiered.errors import from_os_error
from dcp_tiered.interfaces import LocalTier

_SETTLED_NS = 2_000_000_000
"""A directory's time is coarse: a change right after a look may carry the same one."""


class LocalChanges:
    """Remembers directories by the time of their last change.

    A flusher looks many times a second, and a run may keep hundreds of checkpoints: a look at those
    that need nothing costs one `stat` each.
    """

    def __init__(self, local: LocalTier) -> None:
        self._local = local
        self._seen: dict[str, tuple[int, int]] = {}

    def is_unchanged(self, checkpoint_id: str) -> bool:
        """Tell whether a directory is for certain as it was when `remember` was called."""
        return checkpoint_id in self._seen and self._seen[checkpoint_id] == self._mark(
            checkpoint_id
        )

    def mark(self, checkpoint_id: str) -> tuple[int, int] | None:
        """Return what `remember` wants after a look that begins now; None if it is too early."""
        mark = self._mark(checkpoint_id)
        old = mark is not None and time.time_ns() - mark[1] > _SETTLED_NS
        return mark if old else None

    def remember(self, checkpoint_id: str, mark: tuple[int, int] | None) -> None:
        """Take note that a directory needs nothing as long as it stays as it was at `mark`."""
        if mark is None:
            self._seen.pop(checkpoint_id, None)
        else:
            self._seen[checkpoint_id] = mark

    def _mark(self, checkpoint_id: str) -> tuple[int, int] | None:
        path = self._local.root / checkpoint_id
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise from_os_error(exc, "local", str(path), "look at a directory") from exc
        return found.st_ino, found.st_mtime_ns
