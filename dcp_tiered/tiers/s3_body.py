"""The body of an upload: a window on a source that never lies in memory as a whole.

Each read is handed to the socket and forgotten. A retry makes a new window and reads again.
"""

import os
import threading
from collections.abc import Iterator
from io import RawIOBase
from typing import Any

from awscrt.checksums import crc32c

from dcp_tiered.errors import CorruptError
from dcp_tiered.interfaces import Source

BLOCK_BYTES = 256 << 10
"""Large enough for few turns of Python per byte, small enough to stay in the processor's cache."""


class Window(RawIOBase):
    """A seekable view of a part of a source, so that a part never lies in memory as a whole.

    It takes the checksum as it goes and does not hand out its last bytes when that is wrong: the
    request breaks off, and damaged bytes become visible not even on a store that checks nothing.
    """

    def __init__(
        self,
        key: str,
        source: Source,
        start: int,
        length: int,
        crc: int,
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self._key, self._source, self._start, self._length = key, source, start, length
        self._expected, self._stop = crc, stop
        self._at = self._summed = self._crc = 0

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: a signed request is measured before it is sent."""
        return True

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, and return it."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = origin + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes.

        Raises:
            CorruptError: With these the window is complete, and its checksum is wrong.
        """
        left = self._length - self._at
        count = left if size is None or size < 0 else min(size, left)
        if count <= 0:
            return b""
        go_on(self._stop)
        data = self._source.pread(count, self._start + self._at)
        if self._at == 0:
            self._summed = self._crc = 0
        if self._at == self._summed:
            self._crc = crc32c(data, self._crc)
            self._summed += len(data)
        self._at += len(data)
        if self._summed == self._length and self._crc != self._expected:
            raise damaged(self._key)
        return data


class _Blocks:
    """A window that is sent in blocks of our size.

    A body that can be read is asked for 128 KiB at a time by the HTTP library, whose turns then
    cost as much as the bytes do.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.seek = window.seek

    def __iter__(self) -> Iterator[bytes]:
        while block := self._window.read(BLOCK_BYTES):
            yield block


def send_in_blocks(request: Any, **_: Any) -> None:
    """Let botocore send the body of a request in blocks, where a header tells its length."""
    if isinstance(request.body, Window) and "Content-Length" in request.headers:
        request.body = _Blocks(request.body)


def go_on(stop: threading.Event | None) -> None:
    """Raise when somebody has called the upload off."""
    if stop is not None and stop.is_set():
        raise InterruptedError("another part of the upload failed")


def damaged(key: str) -> CorruptError:
    """Return the error for local bytes that are not what was saved."""
    return CorruptError(
        "bytes to upload do not have the checksum that they were saved with",
        "local",
        key,
        "The local copy is damaged: look at 'dmesg' for the device and save again.",
    )


def filling(stream: Any, buffer: memoryview) -> Iterator[int]:
    """Fill a buffer from a reply and yield the size of each step; end early when the reply does."""
    done = 0
    while done < len(buffer):
        data = stream.read(min(BLOCK_BYTES, len(buffer) - done))
        if not data:
            return
        buffer[done : done + len(data)] = data
        done += len(data)
        yield len(data)
