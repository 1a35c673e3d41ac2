"""A pack, compressed into a temporary file on this node, from which it is then uploaded.

Its length and checksum have to be known before the first byte leaves. The file has no name, so
nothing is left of it when the process is killed. What is read is compared with the checksum of the
save: what is compressed is what was saved.
"""

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.config import Limits
from dcp_tiered.errors import CorruptError, TieredError, UnavailableError, from_os_error
from dcp_tiered.format import layout
from dcp_tiered.format.frames import AS_IT_IS, FRAME_BYTES, Builder, encode_frame, stretches
from dcp_tiered.format.pack import Pack, PackedShard, compressed_name, compressed_pack
from dcp_tiered.format.shardfile import Index
from dcp_tiered.interfaces import LocalTier, StagedFile
from dcp_tiered.services.local_space import disk_of
from dcp_tiered.services.pack_source import PackSource, copy_within
from dcp_tiered.syscalls import reserve
from dcp_tiered.version import __version__

_log = logging.getLogger(__name__)
_THREADS = 2
_AHEAD = 6
"""Frames in memory besides those that threads work on."""
_SAVED_MIN = 1 / 32
"""Of the bytes: what saves less is uploaded as it is, and read without decoding."""
_Encoded = tuple[int, int, int, bytes]
"""Codec, raw length, CRC32C of the raw bytes, stored bytes."""


class Spool:
    """A compressed pack in an open file: a `Source`."""

    def __init__(self, fd: int, pack: Pack) -> None:
        self.pack = pack
        self.length, self.crc32c = pack.length, pack.crc32c
        self._fd = fd

    def pread(self, length: int, start: int) -> bytes:
        """Return exactly `length` bytes from `start`."""
        parts, doing = [], "read a compressed pack back"
        while length:
            try:
                data = os.pread(self._fd, length, start)
            except OSError as exc:
                raise from_os_error(exc, "local", self.pack.name, doing) from exc
            if not data:
                raise UnavailableError(f"cannot {doing}: it is short", "local", self.pack.name)
            parts.append(data)
            start, length = start + len(data), length - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def copy_into(self, fd: int, length: int, start: int) -> int:
        """Copy a range within a file system; see `Source.copy_into`."""
        return copy_within(self._fd, start, fd, start, length)

    def checksum(self, length: int, start: int) -> int:
        """Return the CRC32C of a range."""
        crc = 0
        for at in range(start, start + length, FRAME_BYTES):
            crc = crc32c(self.pread(min(FRAME_BYTES, start + length - at), at), crc)
        return crc


@contextmanager
def compressed(
    local: LocalTier, checkpoint_id: str, plan: Pack, limits: Limits, stop: Callable[[], bool]
) -> Iterator[Spool | None]:
    """Compress a pack; None where that saves too little, or this node has no room for it.

    Args:
        local: The run's directory.
        checkpoint_id: The checkpoint.
        plan: The pack without compression.
        limits: Bounds.
        stop: Asked between frames; True ends the work with an error.

    Raises:
        CorruptError: A shard file is not what was saved.
        UnavailableError: It was asked to end.
    """
    with ExitStack() as open_files:
        source = open_files.enter_context(PackSource(local.root / checkpoint_id, plan))
        indexes = source.indexes()
        spool = None
        if indexes and _can_shrink(plan, indexes) and _has_room(local, plan, limits):
            work = _Compression(source, plan, indexes, stop)
            try:
                # The name is for messages: the file never gets it.
                key = layout.key(checkpoint_id, compressed_name(plan).rpartition("/")[2])
                staged = open_files.enter_context(_staged(local, key))
                # What a save finds free now stays free while this file grows.
                reserve(staged.fd, plan.length)
                spool = work.write(staged.fd, checkpoint_id)
            except OSError as exc:
                # As it is, the pack needs no room.
                _log.warning("not compressing %s of %s: %s", plan.name, checkpoint_id, exc)
        yield spool


@contextmanager
def _staged(local: LocalTier, key: str) -> Iterator[StagedFile]:
    """Open a staged file; what the file system says against it is an `OSError` here."""
    with ExitStack() as opened:
        try:
            staged = opened.enter_context(local.create(key))
        except TieredError as exc:
            raise OSError(exc.errno or errno.EIO, exc.message) from exc
        yield staged


def _can_shrink(plan: Pack, indexes: list[Index]) -> bool:
    """Tell whether enough of a pack is of a kind that shrinks, before all of it is read."""
    shards = zip(plan.shards, indexes, strict=True)
    cuts = (cut for shard, index in shards for cut in stretches(index, shard.length))
    kinds = sum(end - start for start, end, codec in cuts if codec != AS_IT_IS)
    return kinds > plan.length * _SAVED_MIN


def _has_room(local: LocalTier, plan: Pack, limits: Limits) -> bool:
    """Tell whether a pack that does not shrink leaves the next save its reserve."""
    disk = disk_of(local, limits)
    if disk.free - plan.length >= disk.reserve:
        return True
    _log.warning("not compressing %s: %d bytes are free on this node", plan.name, disk.free)
    return False


class _Compression:
    """One pass over the shard files of a pack."""

    def __init__(
        self, source: PackSource, plan: Pack, indexes: list[Index], stop: Callable[[], bool]
    ) -> None:
        self._source = source
        self._plan = plan
        self._indexes = indexes
        self._stop = stop
        self._frames = Builder()
        self._crc = 0
        """Of the stored bytes so far."""
        self._written = 0

    def write(self, fd: int, checkpoint_id: str) -> Spool | None:
        """Write the whole pack; None where it saves too little."""
        at = 0
        with ThreadPoolExecutor(_THREADS, "dcp-tiered-frame") as pool:
            try:
                for shard, index in zip(self._plan.shards, self._indexes, strict=True):
                    self._add(fd, (AS_IT_IS, shard.start - at, 0, bytes(shard.start - at)))
                    self._write_shard(fd, pool, shard, index)
                    at = shard.start + shard.length
            finally:
                pool.shutdown(cancel_futures=True)
        if self._written > at * (1 - _SAVED_MIN):
            return None
        frames = self._frames.finish()
        pack = compressed_pack(checkpoint_id, self._plan, frames, self._crc, __version__)
        _write_all(fd, pack.tail)
        os.ftruncate(fd, pack.length)
        return Spool(fd, pack)

    def _write_shard(
        self, fd: int, pool: ThreadPoolExecutor, shard: PackedShard, index: Index
    ) -> None:
        waiting: deque[Future[_Encoded]] = deque()
        crc = 0
        for start, end, codec in stretches(index, shard.length):
            if self._stop():
                raise UnavailableError("flusher was asked to end", "durable", self._plan.name)
            waiting.append(pool.submit(self._encode, shard.start + start, end - start, codec))
            while len(waiting) >= _THREADS + _AHEAD:
                crc = self._take(fd, waiting, crc)
        while waiting:
            crc = self._take(fd, waiting, crc)
        if crc != shard.crc32c:
            self._source.check()  # says which file it is, if it is the file
            raise CorruptError(
                "shard file was read with other bytes than it has", "local", shard.name
            )

    def _take(self, fd: int, waiting: deque[Future[_Encoded]], crc: int) -> int:
        """Write the next frame; return the checksum of the shard file so far."""
        encoded = waiting.popleft().result()
        self._add(fd, encoded)
        return int(combine_crc32c(crc, encoded[2], encoded[1]))

    def _encode(self, start: int, length: int, codec: int) -> _Encoded:
        raw = self._source.pread(length, start)
        stored = encode_frame(codec, raw)
        return (
            (codec, length, crc32c(raw), stored) if stored else (AS_IT_IS, length, crc32c(raw), raw)
        )

    def _add(self, fd: int, encoded: _Encoded) -> None:
        codec, raw_length, _, stored = encoded
        if raw_length:
            _write_all(fd, stored)
            self._frames.add(codec, raw_length, len(stored))
            self._crc = crc32c(stored, self._crc)
            self._written += len(stored)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
