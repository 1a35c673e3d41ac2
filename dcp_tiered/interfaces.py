"""The seams: what services may rely on, whatever stands behind them.

Every method may be called from several threads at once. Errors are those of `errors.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a tier knows of one object."""

    key: str
    length: int
    """Bytes."""
    crc32c: int | None = None
    """Checksum of the whole object that the store computed itself, None where it keeps none."""
    is_as_asked: bool = True
    """False: it is not stored as the options ask, such as without encryption."""


class Source(Protocol):
    """Bytes of known length and checksum that can be read again as often as a retry needs them."""

    length: int
    """Bytes."""
    crc32c: int
    """CRC32C of all bytes, known before they are read."""

    def pread(self, length: int, start: int) -> bytes:
        """Return exactly `length` bytes from `start`, or raise."""
        ...

    def copy_into(self, fd: int, length: int, start: int) -> int:
        """Copy a range into a file of the same file system, at the same place, without reading it.

        Returns:
            How many bytes from `start` on were copied; 0 where that cannot be done.
        """
        ...

    def checksum(self, length: int, start: int) -> int:
        """Return the CRC32C of a range; what is known of it already is not read again."""
        ...


class Tier(Protocol):
    """A flat store of immutable objects named by keys that are relative to the run root.

    A tier can be pickled and used after a fork. It carries its credentials along.
    """

    name: str
    """`local` or `durable`."""
    url: str
    """For messages; holds no secret."""
    keeps_writers_apart: bool
    """Whether of those that put a key at one instant one wins, as far as a client can tell."""

    def put(self, key: str, data: bytes) -> None:
        """Create a small object: when this returns it survives a crash and is visible whole.

        Raises:
            AlreadyExistsError: The key is taken, perhaps by an earlier try whose reply was lost.
        """
        ...

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole.

        Raises:
            AbsentError: It is definitely not there.
            CorruptError: It is larger than `bytes_max`.
        """
        ...

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; no fewer bytes than asked.

        Raises:
            AbsentError: It is definitely not there.
            CorruptError: The object ends before the buffer is full.
        """
        ...

    def read_alignment(self, key: str) -> int:
        """Return which border memory has to lie on to be filled without one more copy; 1 is any.

        Raises:
            AbsentError: It is definitely not there.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return length and checksum. A directory is not an object.

        Raises:
            AbsentError: It is definitely not there.
        """
        ...

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield every key below the directory `prefix`, fresh from the store, in any order."""
        ...

    def list_directories(self) -> Iterator[str]:
        """Yield the names of the directories right below the run root, in any order."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


class DurableTier(Tier, Protocol):
    """A tier that packs are brought to."""

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object: when this returns it survives a crash and is visible whole.

        A key is only ever uploaded with the same bytes, so an object that is there already and has
        the right length and checksum is a success.

        Returns:
            What the store says of the object, as `head` would.

        Raises:
            CorruptError: The bytes of the source do not have the checksum they should have, and
                then nothing is visible; or the key is there with other bytes.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object: when this returns it is gone, also after a crash.

        What is not there is a success: an earlier try whose reply was lost may have removed it.

        Raises:
            InvalidError: It may not be removed by this user.
        """
        ...

    def drop_uploads(self, prefix: str) -> None:
        """Let go of unfinished uploads whose keys begin with a prefix, whoever began them.

        A courtesy: what cannot be dropped now is left to the store, and no error is raised.
        """
        ...


class StagedFile(Protocol):
    """A file that nobody sees before it is sealed."""

    path: Path
    """The name it gets."""
    fd: int

    def seal(self) -> None:
        """Give it its name: when this returns the file survives a crash, whole, under that name."""
        ...


class LocalTier(Tier, Protocol):
    """A tier that is a directory on this node."""

    root: Path

    def make_directory(self, prefix: str) -> None:
        """Create a directory durably, unless it is there."""
        ...

    def create(self, key: str) -> AbstractContextManager[StagedFile]:
        """Open a staged file; leaving the context without `seal` leaves nothing behind."""
        ...


class DeviceBytes(Protocol):
    """Bytes in the memory of an accelerator."""

    nbytes: int

    def copy_to(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on; the copy is complete when this returns."""
        ...


class Image(Protocol):
    """A file that grows from front to back."""

    def append(self, start: int, data: memoryview | DeviceBytes) -> list[int]:
        """Write `data` at `start`, at or behind all that was appended before.

        `data` has to stay as it is until `finish` returns.

        Args:
            start: Byte in the file; what lies between reads as zeros.
            data: Flat bytes, in host memory or on an accelerator.

        Returns:
            CRC32C of each 256 KiB block of `data`.

        Raises:
            OSError: What a write met, perhaps an earlier one, with errno.
        """
        ...

    def finish(self, length: int) -> None:
        """Hand everything to the device and give the file its length; the file is not synced.

        Raises:
            OSError: The first error of any write.
        """
        ...


class Engine(Protocol):
    """Moves bytes between memory and files of this node."""

    name: str

    def writing(self, fd: int, length_estimate: int) -> AbstractContextManager[Image]:
        """Write one file; when the block ends, no thread works on it any more.

        Args:
            fd: Open for reading and writing, empty.
            length_estimate: Bytes to reserve; the file may become longer or shorter.

        Raises:
            OSError: There is not that much space, with errno.
        """
        ...
