"""A durable tier on a mounted file system: Lustre, NFS, or a second disk.

Packs are written by an engine, around the page cache where the mount can do that, and copied in the
kernel where the local tier is on the same file system. On Lustre they are striped over several
targets, so that one slow target does not set the speed.
"""

import contextlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import AbsentError, AlreadyExistsError, CorruptError, UnavailableError
from dcp_tiered.format.shardfile import PAGE_BYTES, item_crc
from dcp_tiered.interfaces import Engine, ObjectInfo, Source, StagedFile
from dcp_tiered.syscalls import file_system_type
from dcp_tiered.tiers.posix import PosixTier, StagedPath, sync_directory
from dcp_tiered.tiers.stored_crc import need_ours

_log = logging.getLogger(__name__)
_COPY_BYTES = 8 << 20
_LUSTRE = 0x0BD00BD0
_STRIPE_BYTES = 4 << 20
_BYTES_PER_STRIPE = 128 << 20
_STRIPES_MAX = 8
_LFS_S_MAX = 30.0


def stripes_for(pack_bytes: int) -> int:
    """Return over how many targets a file of that size is spread: one of 1 GiB over eight."""
    return max(1, min(_STRIPES_MAX, pack_bytes // _BYTES_PER_STRIPE))


class MountedTier(PosixTier):
    """Objects are files below a directory of a mounted file system.

    Args:
        root: The directory; made when the first object is created.
        base: A directory at or above `root` that has to be there already.
        engine_for: Returns what writes packs below a directory; asked for `base`, once for each
            upload that goes on at once.
        stripes: Over how many targets packs are spread on Lustre; 0 leaves what is set there.
    """

    def __init__(
        self, root: Path, base: Path, engine_for: Callable[[Path], Engine], stripes: int
    ) -> None:
        super().__init__(root, base, "durable")
        self._engine_for = engine_for
        self._idle: list[Engine] = []
        """One for each upload that went on at once: one that hangs keeps its buffers."""
        self._stripes = stripes
        self._device: int | None = None
        """Of the file system that was mounted when this process first wrote."""

    def __getstate__(self) -> dict[str, object]:
        """Leave behind the engine's buffers, and what is so on this node only."""
        return {**self.__dict__, "_idle": [], "_device": None}

    @contextmanager
    def create(self, key: str) -> Iterator[StagedPath]:
        """Open a staged file on the mount that earlier ones are on; see `LocalTier.create`.

        Raises:
            UnavailableError: Another file system is mounted there now, or none.
        """
        with self._errors(self.base, "look at the mount"):
            device = self.base.stat().st_dev
        if self._device is None:
            self._device = device
        if device != self._device:
            raise UnavailableError(
                "another file system is mounted there than before, so nothing is written to it",
                self.name,
                str(self.base),
                "Mount the one that has the run's packs; the flusher goes on by itself.",
            )
        with super().create(key) as staged:
            yield staged

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object durably; see `DurableTier.upload`."""
        with contextlib.suppress(AbsentError):
            return need_ours(self, self.head(key), source, key)
        with self.create(key) as staged:
            crc = self._copy(staged, source)
            if (self._write(staged, source) if crc is None else crc) != source.crc32c:
                raise CorruptError(
                    "bytes to copy do not have the checksum that they were saved with",
                    "local",
                    key,
                    "The local copy is damaged: look at 'dmesg' for the device and save again.",
                )
            try:
                staged.seal()
            except AlreadyExistsError:
                need_ours(self, self.head(key), source, key)
        return ObjectInfo(key=key, length=source.length)

    def delete(self, key: str) -> None:
        """Remove an object; see `DurableTier.delete`. Its directory stays, for who writes there."""
        path = self.path(key)
        with contextlib.suppress(AbsentError), self._errors(path, "remove a file"):
            # A directory of that name is no object, and neither is what would lie below a file.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
                path.unlink()
            # Also where there was nothing: a mount that is gone has not removed it.
            sync_directory(path.parent if path.parent.is_dir() else self.base)

    def drop_uploads(self, prefix: str) -> None:
        """Do nothing: what was not sealed has no name, and goes away with who wrote it."""

    def _copy(self, staged: StagedFile, source: Source) -> int | None:
        """Copy what lies on this very file system; return the checksum of what was copied.

        None: it lies elsewhere, and nothing has been written.
        """
        at = crc = 0
        with self._errors(staged.path, "copy", source.length):
            while at < source.length:
                left = min(_COPY_BYTES, source.length - at)
                count = source.copy_into(staged.fd, left, at)
                if not count and not at:
                    return None
                if not count:
                    # A gap before the next file, which begins on a page, or the tail.
                    gap = min(left, PAGE_BYTES - at % PAGE_BYTES)
                    count = os.pwrite(staged.fd, source.pread(gap, at), at)
                at += count
            for start in range(0, source.length, _COPY_BYTES):
                crc = crc32c(os.pread(staged.fd, _COPY_BYTES, start), crc)
        return crc

    @contextmanager
    def _lent(self) -> Iterator[Engine]:
        try:
            engine = self._idle.pop()
        except IndexError:
            engine = self._engine_for(self.base)
        try:
            yield engine
        finally:
            self._idle.append(engine)

    def _write(self, staged: StagedFile, source: Source) -> int:
        """Write all bytes; return their checksum."""
        crc = 0
        with (
            self._lent() as engine,
            self._errors(staged.path, "write", source.length),
            engine.writing(staged.fd, source.length) as image,
        ):
            for at in range(0, source.length, _COPY_BYTES):
                data = source.pread(min(_COPY_BYTES, source.length - at), at)
                crcs = image.append(at, memoryview(data))
                crc = combine_crc32c(crc, item_crc(crcs, len(data)), len(data))
            image.finish(source.length)
        return crc

    def _make_parent(self, path: Path) -> None:
        is_new = not path.parent.is_dir()
        super()._make_parent(path)
        if is_new and path.parent.name == "packs" and self._stripes:
            _stripe(path.parent, self._stripes)


def _stripe(directory: Path, stripes: int) -> None:
    """Spread the files of a new directory over several targets, on Lustre; else do nothing.

    Where that fails, the files are as whole as ever, and slower.
    """
    lfs = shutil.which("lfs")
    if file_system_type(directory) != _LUSTRE or lfs is None:
        return
    command = [lfs, "setstripe", "-c", str(stripes), "-S", str(_STRIPE_BYTES), str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_LFS_S_MAX)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as exc:
        _log.warning("packs below %s are not striped: %s", directory, exc)
