"""Writes a shard file, item after item, and notes the checksums that the engine takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dcp_tiered.errors import from_os_error
from dcp_tiered.format.shardfile import Builder, Header, Item, encode_header
from dcp_tiered.interfaces import Engine, Image, StagedFile


class ShardSink:
    """A shard file that is being written."""

    def __init__(self, image: Image, path: str, header: Header) -> None:
        self.builder = Builder(header)
        self._image = image
        self._path = path
        self._append(memoryview(encode_header(header)), 0)

    def add(self, data: memoryview, **description: Any) -> None:
        """Write one item; `data` is flat bytes that stay as they are until the file is whole."""
        start = self.builder.next_start(len(data))
        crcs = self._append(data, start)
        self.builder.add(Item(start=start, length=len(data), crcs=crcs, **description))

    def finish(self) -> tuple[int, bytes]:
        """Write the footer; return where it starts and its bytes."""
        footer_start = self.builder.cursor
        tail = self.builder.finish()
        self._append(memoryview(tail), footer_start)
        with _os_errors(self._path, self.builder.cursor):
            self._image.finish(self.builder.cursor)
        return footer_start, tail

    def _append(self, data: memoryview, start: int) -> list[int]:
        with _os_errors(self._path, start + len(data)):
            return self._image.append(start, data)


@contextmanager
def writing(
    staged: StagedFile, engine: Engine, header: Header, length_estimate: int
) -> Iterator[ShardSink]:
    """Write a shard file with an engine; the caller seals it after the block.

    Args:
        staged: The file.
        engine: What writes it.
        header: Who writes it.
        length_estimate: Bytes to reserve, as far as they are known.

    Raises:
        UnavailableError: The disk is full or fails; bytes asked and free are in the message.
    """
    path = str(staged.path)
    with _os_errors(path, length_estimate), engine.writing(staged.fd, length_estimate) as image:
        yield ShardSink(image, path, header)


@contextmanager
def _os_errors(path: str, bytes_asked: int) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise from_os_error(
            exc, "local", path, "write a shard file", bytes_asked=bytes_asked
        ) from exc
