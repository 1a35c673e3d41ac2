"""Writes a shard file, item after item, and notes the checksums that the engine takes.

Small items are gathered, so that a thousand of them are one call and no call of the system.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from awscrt.checksums import crc32c

from dcp_tiered.errors import from_os_error
from dcp_tiered.format.shardfile import (
    Builder,
    Header,
    Item,
    Small,
    encode_header,
    item_crc,
    join_run,
)
from dcp_tiered.interfaces import DeviceBytes, Engine, Image, StagedFile

GATHERED_BYTES_MAX = 16 << 10
"""Smaller items are gathered and written together: for these, calls cost more than a copy."""
_RUN_BYTES = 256 << 10
_RUN_ITEMS_MAX = 4096


class ShardSink:
    """A shard file that is being written."""

    def __init__(self, image: Image, path: str, header: Header) -> None:
        self.builder = Builder(header)
        self._image = image
        self._path = path
        self._run: list[Small] = []
        self._run_bytes = 0
        self._append(memoryview(encode_header(header)), 0)

    def add(
        self,
        data: memoryview | DeviceBytes,
        fqn: str,
        dtype: str | None,
        offsets: Sequence[int] = (),
        sizes: Sequence[int] = (),
        shape: Sequence[int] = (),
    ) -> None:
        """Write one item; `data` is flat bytes that stay as they are until the file is whole."""
        length = data.nbytes
        if isinstance(data, memoryview) and length < GATHERED_BYTES_MAX:
            self.add_small((fqn, dtype, bytes(data), offsets, sizes, shape))
            return
        self._write_run()
        start = self.builder.next_start(length)
        self.builder.add(
            Item(
                fqn=fqn,
                dtype=dtype,
                offsets=tuple(offsets),
                sizes=tuple(sizes),
                shape=tuple(shape),
                start=start,
                length=length,
                crcs=self._append(data, start),
            )
        )

    def add_small(self, item: Small) -> None:
        """Take one item of less than `GATHERED_BYTES_MAX`, to be written together with others."""
        self._run.append(item)
        self._run_bytes += len(item[2])
        if self._run_bytes >= _RUN_BYTES or len(self._run) == _RUN_ITEMS_MAX:
            self._write_run()

    def finish(self) -> tuple[int, bytes]:
        """Write the footer; return where it starts and its bytes."""
        self._write_run()
        footer_start = self.builder.cursor
        tail = self.builder.finish()
        self._append(memoryview(tail), footer_start)
        with _os_errors(self._path, self.builder.cursor):
            self._image.finish(self.builder.cursor)
        return footer_start, tail

    def _write_run(self) -> None:
        """Write the items that were gathered as the one piece of the file that they are."""
        run, self._run, self._run_bytes = self._run, [], 0
        if run:
            parts = [item[2] for item in run]
            data = join_run(parts)
            blocks = self._append(memoryview(data), self.builder.next_start(0))
            crcs = [crc32c(part) for part in parts if part]
            self.builder.add_run(run, crcs, item_crc(blocks, len(data)))

    def _append(self, data: memoryview | DeviceBytes, start: int) -> list[int]:
        with _os_errors(self._path, start + data.nbytes):
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
