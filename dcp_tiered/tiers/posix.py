"""A tier that is a directory: NVMe, or a mount. Temporary, fsync, link, fsync of the directory.

An object appears by `link`, which fails when the name is taken: that makes creation exclusive on
any POSIX file system, and no reader ever sees a part of one. Rename would replace silently.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    from_os_error,
)
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.syscalls import PAGE_BYTES, address, direct_alignment, is_cached, open_direct

_COPY_BYTES = 8 << 20
_DIRECT_BYTES_MIN = 1 << 20
_TEMPORARY = ".tmp-"
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_FLAGS = os.O_RDWR | os.O_CLOEXEC
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class PosixTier:
    """Objects are files below a directory; keys are relative paths.

    Args:
        root: The directory; made when the first object is created.
        base: A directory at or above `root` that has to be there already. A mount that is missing
            is an error: it must neither pass for an empty tier nor be filled on the disk below it.
        name: `local` or `durable`.
    """

    keeps_writers_apart = True

    def __init__(self, root: Path, base: Path, name: str) -> None:
        self.root = root
        self.base = base
        self.name = name
        self.url = f"file://{root}"

    def __repr__(self) -> str:
        return f"PosixTier({self.name}, {self.root})"

    def path(self, key: str) -> Path:
        """Return the path of a key."""
        return self.root / key

    def make_directory(self, prefix: str) -> None:
        """Create a directory durably, unless it is there; see `LocalTier.make_directory`."""
        path = self.path(prefix)
        with self._errors(path, "create a directory"):
            _make_directory(path, self.base)

    @contextmanager
    def create(self, key: str) -> Iterator["StagedPath"]:
        """Open a staged file; leaving the context without `seal` leaves nothing behind."""
        path = self.path(key)
        with self._errors(path, "create a file"):
            self._make_parent(path)
            staged = StagedPath(path, self.name)
        try:
            yield staged
        finally:
            with self._errors(path, "close a file"):
                staged.discard()

    def put(self, key: str, data: bytes) -> None:
        """Create a small object durably; see `Tier.put`."""
        with self.create(key) as staged:
            with self._errors(staged.path, "write", len(data)):
                _write_all(staged.fd, data)
            staged.seal()

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; see `Tier.get`."""
        with self._open(key) as fd:
            length = os.fstat(fd).st_size
            if length > bytes_max:
                raise CorruptError(f"object of {length} bytes exceeds {bytes_max}", self.name, key)
            data = bytearray(length)
            self._fill(key, fd, 0, memoryview(data))
            return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`."""
        with self._open(key) as fd:
            done = _read_around_cache(fd, start, buffer)
            self._fill(key, fd, start + done, buffer[done:])

    def read_alignment(self, key: str) -> int:
        """Return the border of memory for O_DIRECT; see `Tier.read_alignment`."""
        with self._open(key) as fd:
            aligned = direct_alignment(fd)
        return aligned[0] if aligned else 1

    def head(self, key: str) -> ObjectInfo:
        """Return the length; a file system keeps no checksum."""
        with self._errors(self.path(key), "look at"):
            found = self.path(key).stat()
        self._need_file(key, found.st_mode)
        return ObjectInfo(key=key, length=found.st_size)

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield every key below a directory; see `Tier.list_keys`."""
        top = self.path(prefix)
        with self._errors(top, "list"):
            os.stat(self.base)
            for directory, _, files in os.walk(top, onerror=_raise_unless_missing):
                for file in files:
                    if not file.startswith(_TEMPORARY):
                        yield str((Path(directory) / file).relative_to(self.root))

    def list_directories(self) -> Iterator[str]:
        """Yield the directories right below the root; a root that is not there has none."""
        with self._errors(self.root, "list"):
            os.stat(self.base)
            try:
                entries = list(os.scandir(self.root))
            except FileNotFoundError:
                return
            yield from (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def sweep(self, prefix: str) -> None:
        """Remove temporaries that no living process holds."""
        for path in self.path(prefix).glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def close(self) -> None:
        """Nothing to give back."""

    def _make_parent(self, path: Path) -> None:
        _make_directory(path.parent, self.base)

    @contextmanager
    def _open(self, key: str) -> Iterator[int]:
        with self._errors(self.path(key), "open"):
            fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._need_file(key, os.fstat(fd).st_mode)
            yield fd
        finally:
            os.close(fd)

    def _need_file(self, key: str, mode: int) -> None:
        if not stat.S_ISREG(mode):
            raise AbsentError("no such object: not a file", self.name, str(self.path(key)))

    def _fill(self, key: str, fd: int, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            with self._errors(self.path(key), "read"):
                count = os.preadv(fd, [buffer[done:]], start + done)
            if not count:
                raise CorruptError(f"object ends at {start + done}", self.name, key)
            done += count

    @contextmanager
    def _errors(self, path: Path, doing: str, bytes_asked: int | None = None) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            if self.base.is_dir():
                raise AbsentError("no such object", self.name, str(path)) from exc
            raise from_os_error(exc, self.name, str(self.base), doing) from exc
        except OSError as exc:
            raise from_os_error(exc, self.name, str(path), doing, bytes_asked=bytes_asked) from exc


class StagedPath:
    """A file without a name, or under a locked temporary one where O_TMPFILE is not known."""

    def __init__(self, path: Path, tier: str) -> None:
        self.path = path
        self._tier = tier
        self._temporary: Path | None = None
        try:
            self.fd = os.open(path.parent, _FLAGS | os.O_TMPFILE, _FILE_MODE)
        except OSError as exc:
            if exc.errno not in _NO_TMPFILE:
                raise
            self.fd, self._temporary = _open_locked(path.parent)

    def seal(self) -> None:
        """Make the file durable under its name; see `StagedFile.seal`."""
        try:
            # A failed fsync is never tried again: the kernel has dropped the pages and would lie.
            os.fsync(self.fd)
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Naming a directory makes Python call linkat, the only way to follow /proc's link.
                source = self._temporary or f"/proc/self/fd/{self.fd}"
                os.link(source, self.path, src_dir_fd=directory, follow_symlinks=True)
                os.fsync(directory)
            finally:
                os.close(directory)
        except FileExistsError as exc:
            raise AlreadyExistsError("object is there already", self._tier, str(self.path)) from exc
        except OSError as exc:
            if exc.errno in _NO_LINKS and os.access(self.path.parent, os.W_OK):
                raise InvalidError(
                    f"file system has no hard links, which make creation exclusive: {exc.strerror}",
                    self._tier,
                    str(self.path),
                    "Where it is an object store behind FUSE, give the store's own URL, such as"
                    " s3://bucket/run; else use another mount.",
                ) from exc
            # Space may run out this late: file systems allocate behind the back of a write.
            asked = os.fstat(self.fd).st_size
            raise from_os_error(
                exc, self._tier, str(self.path), "seal a file", bytes_asked=asked
            ) from exc

    def discard(self) -> None:
        """Drop what was not sealed; a sealed file keeps its name."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
        os.close(self.fd)


def _open_locked(directory: Path) -> tuple[int, Path]:
    """Create a temporary whose lock tells a sweeper that its owner lives."""
    while True:
        temporary = directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
        fd = os.open(temporary, _FLAGS | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        # Where a file system has no locks a sweeper cannot take one either, and leaves it alone.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        # A sweeper may have come between the two and taken the name away.
        if os.fstat(fd).st_nlink:
            return fd, temporary
        os.close(fd)


def _read_around_cache(fd: int, start: int, buffer: memoryview) -> int:
    """Read whole pages by O_DIRECT where that pays, and return how many bytes were read.

    It pays for a large range, in aligned memory, that is not in the page cache already. Whatever
    does not work here is left to an ordinary read, which tells what is wrong.
    """
    length = len(buffer) - len(buffer) % PAGE_BYTES
    if length < _DIRECT_BYTES_MIN or start % PAGE_BYTES:
        return 0
    aligned = direct_alignment(fd)
    if aligned is None or address(buffer) % aligned[0] or is_cached(fd, start, length):
        return 0
    try:
        direct = open_direct(fd, os.O_RDONLY)
    except OSError:
        return 0
    done = 0
    try:
        while done < length:
            count = os.preadv(direct, [buffer[done:length]], start + done)
            done += count - count % PAGE_BYTES
            if count < PAGE_BYTES:
                break
    except OSError:
        return 0
    finally:
        os.close(direct)
    return done


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _make_directory(path: Path, base: Path) -> None:
    """Create a directory below `base` and sync each new one into its parent."""
    if path == base:
        os.stat(base)
        return
    if path.is_dir():
        return
    _make_directory(path.parent, base)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=_DIRECTORY_MODE)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names that were added to a directory, or taken out of it, survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _raise_unless_missing(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):
        raise exc
