"""Writes a shard file, item after item, and takes its checksums while the bytes are at hand."""

from typing import Any

from awscrt.checksums import crc32c

from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.errors import from_os_error
from dcp_tiered.format.shardfile import BLOCK_BYTES, Builder, Header, Item, encode_header
from dcp_tiered.interfaces import StagedFile


class ShardSink:
    """A shard file that is being written.

    Args:
        staged: The file; the caller seals it.
        header: Who writes it.

    Raises:
        UnavailableError: The disk is full or fails.
    """

    def __init__(self, staged: StagedFile, header: Header) -> None:
        self.builder = Builder(header)
        self._staged = staged
        self._engine = BufferedEngine()
        self._write(memoryview(encode_header(header)), 0)

    def add(self, data: memoryview, **description: Any) -> None:
        """Write one item; `data` is flat bytes."""
        start = self.builder.next_start(len(data))
        crcs = [
            crc32c(data[block : block + BLOCK_BYTES]) for block in range(0, len(data), BLOCK_BYTES)
        ]
        self._write(data, start)
        self.builder.add(Item(start=start, length=len(data), crcs=crcs, **description))

    def finish(self) -> tuple[int, bytes]:
        """Write the footer; return where it starts and its bytes."""
        footer_start = self.builder.cursor
        tail = self.builder.finish()
        self._write(memoryview(tail), footer_start)
        return footer_start, tail

    def _write(self, data: memoryview, start: int) -> None:
        path = str(self._staged.path)
        try:
            self._engine.write(self._staged.fd, start, data)
        except OSError as exc:
            raise from_os_error(
                exc, "local", path, "write a shard file", bytes_asked=start + len(data)
            ) from exc
