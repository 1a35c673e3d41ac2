"""The bytes of a pack, read from the shard files it is made of, without building it anywhere."""

import os
from bisect import bisect_right
from pathlib import Path
from types import TracebackType
from typing import Self

from awscrt.checksums import crc32c

from dcp_tiered.errors import CorruptError, from_os_error
from dcp_tiered.format.pack import Pack

_CHECK_BYTES = 8 << 20
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
        except OSError as exc:
            raise from_os_error(exc, "local", path, "read a shard file") from exc
        if not data:
            raise CorruptError(f"shard file ends at {at} bytes", "local", path, _DAMAGED_HINT)
        return data

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
