"""The bytes of a pack, read from the shard files it is made of, without building it anywhere."""

import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import CorruptError, InvalidError, from_os_error
from dcp_tiered.format.columns import Array
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.pack import Pack, PackedShard
from dcp_tiered.format.shardfile import (
    BLOCK_BYTES,
    END_MAGIC,
    LARGE_BYTES,
    Index,
    decode_index,
)

_CHECK_BYTES = 8 << 20
_AHEAD_BYTES = 4 << 20
_DAMAGED_HINT = (
    "This save cannot become durable: look at 'dmesg' for the device, and save again under another"
    " checkpoint_id."
)


class PackSource:
    """A `Source` over open shard files; a context manager that closes them."""

    def __init__(self, directory: Path, pack: Pack) -> None:
        self.length = pack.length
        self.crc32c = pack.crc32c
        self._tail = pack.tail
        self._starts = [shard.start for shard in pack.shards]
        self._shards = pack.shards
        self._directory = directory
        self._fds: list[int] = []
        self._blocks: _Blocks | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        try:
            for shard in self._shards:
                path = self._directory / shard.name
                try:
                    self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                except OSError as exc:
                    raise from_os_error(exc, "local", str(path), "open a shard file") from exc
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def pread(self, length: int, start: int) -> bytes:
        """Return exactly `length` bytes of the pack from `start`."""
        parts = []
        while length:
            part = self._piece(length, start)
            parts.append(part)
            start += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def copy_into(self, fd: int, length: int, start: int) -> int:
        """Copy a range within a file system; see `Source.copy_into`."""
        number = bisect_right(self._starts, start) - 1
        shard = self._shards[number]
        at = start - shard.start
        if at >= shard.length:
            return 0  # the gap behind it, or the tail
        return copy_within(self._fds[number], at, fd, start, min(length, shard.length - at))

    def _piece(self, length: int, start: int) -> bytes:
        """Return bytes up to the next border between shard file, gap and tail."""
        tail_start = self.length - len(self._tail)
        if start >= tail_start:
            return self._tail[start - tail_start : start - tail_start + length]
        number = bisect_right(self._starts, start) - 1
        shard = self._shards[number]
        at = start - shard.start
        if at < shard.length:
            return self._read(number, min(length, shard.length - at), at)
        border = self._starts[number + 1] if number + 1 < len(self._starts) else tail_start
        return bytes(min(length, border - start))

    def _read(self, number: int, length: int, at: int) -> bytes:
        path = str(self._directory / self._shards[number].name)
        try:
            data = os.pread(self._fds[number], length, at)
            if at % _AHEAD_BYTES < len(data):
                # Several parts are read at once through one descriptor, which makes the kernel give
                # up reading ahead by itself. It is asked once for each stretch: being asked for
                # what it has costs more than the bytes do.
                ahead = at + len(data)
                os.posix_fadvise(self._fds[number], ahead, 2 * _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError as exc:
            raise from_os_error(exc, "local", path, "read a shard file") from exc
        if not data:
            raise CorruptError(f"shard file ends at {at} bytes", "local", path, _DAMAGED_HINT)
        return data

    def checksum(self, length: int, start: int) -> int:
        """Return the CRC32C of a range of the pack.

        The shard files' footers know the checksums of most blocks; what lies between is read.
        """
        blocks = self._known()
        crc, at, end = 0, start, start + length
        first, last = np.searchsorted(blocks.ends, (start, end), side="right")
        for number in range(int(first), int(last)):
            begin, block_end = int(blocks.starts[number]), int(blocks.ends[number])
            if begin < at:
                continue  # begins before the range
            crc = combine_crc32c(
                self._sum(crc, at, begin), int(blocks.crcs[number]), block_end - begin
            )
            at = block_end
        return self._sum(crc, at, end)

    def _sum(self, crc: int, at: int, end: int) -> int:
        while at < end:
            data = self.pread(min(_CHECK_BYTES, end - at), at)
            crc = crc32c(data, crc)
            at += len(data)
        return crc

    def _known(self) -> "_Blocks":
        with self._lock:
            if self._blocks is None:
                self._blocks = _Blocks.join([self._blocks_of(shard) for shard in self._shards])
            return self._blocks

    def indexes(self) -> list[Index] | None:
        """Return the footers of the shard files, None when one cannot be read."""
        try:
            return [self._index(shard) for shard in self._shards]
        except (CorruptError, InvalidError):
            return None

    def _blocks_of(self, shard: PackedShard) -> "_Blocks":
        try:
            return _Blocks.of(shard, self._index(shard))
        except (CorruptError, InvalidError):
            # Then nothing is known and all is read; whoever sums it up finds what is wrong.
            return _Blocks.join([])

    def _index(self, shard: PackedShard) -> Index:
        size = min(TRAILER_BYTES, shard.length)
        end = self.pread(size, shard.start + shard.length - size)
        trailer = decode_trailer(end, shard.length, END_MAGIC)
        return decode_index(trailer, self.pread(trailer.stored_length, shard.start + trailer.start))

    def check(self) -> None:
        """Read every shard file and name the first one that is not what was saved.

        Raises:
            CorruptError: With the path of that file.
        """
        for number, shard in enumerate(self._shards):
            crc = done = 0
            while done < shard.length:
                data = self._read(number, min(_CHECK_BYTES, shard.length - done), done)
                crc = crc32c(data, crc)
                done += len(data)
            if crc != shard.crc32c:
                raise CorruptError(
                    "shard file does not have the checksum that it was saved with",
                    "local",
                    str(self._directory / shard.name),
                    _DAMAGED_HINT,
                )

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def copy_within(source: int, at: int, target: int, start: int, length: int) -> int:
    """Copy between two files in the kernel, which a file system may do without moving a byte.

    Returns:
        Bytes copied; 0 where they are not on one file system, or that does not do it. What is wrong
        with either file comes up when it is read or written.
    """
    try:
        if os.fstat(source).st_dev != os.fstat(target).st_dev:
            return 0
        return os.copy_file_range(source, target, length, at, start)
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where in a pack blocks of known checksum lie, in order of their place."""

    starts: Array
    ends: Array
    crcs: Array

    @classmethod
    def of(cls, shard: PackedShard, index: Index) -> Self:
        """Return the blocks of the large items of a shard file."""
        rows = np.flatnonzero(index.length >= LARGE_BYTES)
        rows = rows[np.argsort(index.start[rows], kind="stable")]
        counts = -(-index.length[rows] // BLOCK_BYTES)
        firsts = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        starts = np.repeat(index.start[rows], counts) + within * BLOCK_BYTES
        item_ends = np.repeat(index.start[rows] + index.length[rows], counts)
        ends = np.minimum(starts + BLOCK_BYTES, item_ends)
        crcs = index.crcs[np.repeat(index.crcs_start[rows], counts) + within]
        return cls(starts + shard.start, ends + shard.start, crcs)

    @classmethod
    def join(cls, parts: Sequence["_Blocks"]) -> Self:
        """Return the blocks of shard files that follow each other."""
        empty = np.zeros(0, dtype="i8")
        names = ("starts", "ends", "crcs")
        return cls(*(np.concatenate([empty, *(getattr(p, name) for p in parts)]) for name in names))
