"""What sealed shard files of this node say of themselves, without a manifest."""

from collections.abc import Collection

from dcp_tiered.format import layout
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.shardfile import (
    END_MAGIC,
    PAGE_BYTES,
    Header,
    decode_header,
    decode_index,
    file_crc,
)
from dcp_tiered.interfaces import LocalTier

Row = tuple[str, int, int]
"""Name, length in bytes and CRC32C of a shard file."""


def header(local: LocalTier, checkpoint_id: str, name: str) -> Header:
    """Return who wrote a shard file.

    Raises:
        CorruptError: Its first page is damaged.
    """
    page = bytearray(PAGE_BYTES)
    local.read_into(layout.key(checkpoint_id, name), 0, memoryview(page))
    return decode_header(bytes(page))


def row(local: LocalTier, checkpoint_id: str, name: str) -> Row:
    """Return name, length and checksum of a shard file from its own footer.

    Raises:
        CorruptError: Its footer is damaged.
    """
    key = layout.key(checkpoint_id, name)
    length = local.head(key).length
    end = bytearray(TRAILER_BYTES)
    local.read_into(key, length - TRAILER_BYTES, memoryview(end))
    trailer = decode_trailer(bytes(end), length, END_MAGIC)
    tail = bytearray(length - trailer.start)
    local.read_into(key, trailer.start, memoryview(tail))
    index = decode_index(trailer, bytes(tail[: trailer.stored_length]))
    return name, length, file_crc(index, bytes(tail))


def all_ranks_are_here(headers: Collection[Header]) -> bool:
    """Tell whether every rank of the node has sealed a shard file, as far as the launcher said."""
    expected = [header.local_world_size for header in headers]
    known = [number for number in expected if number is not None]
    ranks = {header.rank for header in headers}
    return len(known) == len(expected) and len(ranks) >= max(known, default=1)


def is_of_one_node(header: Header) -> bool:
    """Tell whether all ranks of a save are on this node, as far as the launcher said."""
    return header.world_size in (header.local_world_size, 1)


def appeared_at(local: LocalTier, checkpoint_id: str, name: str) -> int:
    """Return when a shard file got its name, nanoseconds; 0 when it is not there.

    That may be long after its last byte was written: a sync lies in between.
    """
    try:
        return (local.root / checkpoint_id / name).stat().st_ctime_ns
    except OSError:
        return 0


def sealed_at(local: LocalTier, checkpoint_id: str, name: str) -> int:
    """Return when a shard file was last written to, nanoseconds; 0 when it is not there."""
    try:
        return (local.root / checkpoint_id / name).stat().st_mtime_ns
    except OSError:
        return 0
