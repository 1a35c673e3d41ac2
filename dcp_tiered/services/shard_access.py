"""Read verified blocks of a checkpoint from the nearest copy: the local shard file, else the pack.

What does not pass its checksum never leaves here (I9). A local shard file that fails once is not
asked again by this reader: the durable copy serves instead, and the log says so.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from awscrt.checksums import crc32c

from dcp_tiered.errors import (
    AbsentError,
    CorruptError,
    IncompleteError,
    TieredError,
)
from dcp_tiered.format import layout
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.manifest import Head
from dcp_tiered.format.records import Commit
from dcp_tiered.format.shardfile import BLOCK_BYTES, END_MAGIC, Index, decode_index
from dcp_tiered.interfaces import LocalTier, Tier
from dcp_tiered.services.unpacked import Unpacked
from dcp_tiered.syscalls import PAGE_BYTES, address, copy_memory

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Readable(Protocol):
    """What a copy of a shard file is read from; see `Tier`."""

    name: str

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; no fewer bytes than asked."""
        ...

    def read_alignment(self, key: str) -> int:
        """Return which border memory has to lie on to be filled without one more copy."""
        ...


@dataclass(slots=True)
class Part:
    """Bytes of one item that are read at once, with the whole blocks around them."""

    row: int
    """Position of the item in its shard file."""
    item_start: int
    """Where the item starts in the shard file."""
    first: int
    """First byte that is wanted, counted from the item's start."""
    last: int
    """One past the last byte that is wanted."""
    start: int
    """First byte of the shard file that is read."""
    end: int
    """One past the last byte that is read."""
    address: int | None
    """Where in memory the wanted bytes are copied to; None when they are only verified."""

    @property
    def is_whole_blocks(self) -> bool:
        """Tell whether no byte is read that is not wanted."""
        return self.end - self.start == self.last - self.first


def whole_blocks(item_start: int, item_length: int, first: int, last: int) -> tuple[int, int]:
    """Return the range of a shard file that has the blocks around a part of an item."""
    start = item_start + first - first % BLOCK_BYTES
    return start, item_start + min(item_length, last + -last % BLOCK_BYTES)


class ShardAccess:
    """The shard files of one checkpoint, wherever they lie.

    Args:
        head: The checkpoint's manifest.
        commit: Where its shard files lie on the durable tier, None when it is not committed.
        local: This node's tier, None when there is none.
        durable: None for a run that is local only.
    """

    def __init__(
        self, head: Head, commit: Commit | None, local: LocalTier | None, durable: Tier | None
    ) -> None:
        self._head = head
        self._local = local
        self._durable = durable
        self._placed = {place.shard: place for place in commit.placements} if commit else {}
        self._packs = commit.packs if commit else ()
        self._unpacked: dict[int, Unpacked] = {}
        """Compressed packs that have been asked for, by position in the commit."""
        self._bad: dict[int, TieredError] = {}
        """What was wrong with the local copy of a shard file."""
        self._indexes: dict[int, Index] = {}
        self._alignments: dict[int, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = {"local": 0, "durable": 0}
        """Bytes of shard files read from each tier; of a compressed pack, those that came out."""

    def index(self, shard: int) -> Index:
        """Return the footer of a shard file, by position in the manifest."""
        with self._lock:
            index = self._indexes.get(shard)
        if index is None:
            ref = self._head.shards[shard]
            buffer = memoryview(bytearray(ref.length - ref.footer_start))
            index = self._from_nearest(shard, ref.footer_start, ref.length, self._decode, buffer)
            with self._lock:
                self._indexes[shard] = index
        return index

    def alignment(self, shard: int) -> int:
        """Return which border memory has to lie on to be filled without one more copy."""
        if shard not in self._alignments:
            self._alignments[shard] = self._ask_alignment(shard)
        return self._alignments[shard]

    def _ask_alignment(self, shard: int) -> int:
        for tier, key, _ in self._copies(shard):
            try:
                return tier.read_alignment(key)
            except TieredError:
                continue  # reading from it will tell what is wrong
        return PAGE_BYTES

    def read(
        self, shard: int, start: int, end: int, parts: Sequence["Part"], buffer: memoryview
    ) -> memoryview:
        """Read bytes of a shard file, verify the blocks that are wanted, and copy what has a place.

        Args:
            shard: Position in the manifest.
            start: First byte in the shard file.
            end: One past the last byte.
            parts: Parts of items inside the range.
            buffer: Memory for it, zeros after an error; with two pages to spare and on a page
                border, a local file is read around the page cache.

        Returns:
            The bytes, in `buffer`.
        """
        index = self.index(shard)

        def use(_: int, data: memoryview) -> memoryview:
            where = address(data) if data else 0
            for part in parts:
                _use_blocks(index, part, data, start, where)
            return data

        try:
            return self._from_nearest(shard, start, end, use, buffer)
        except TieredError:
            # The memory may be a target itself: no byte stays there that has not passed (I9).
            buffer[:] = bytes(len(buffer))
            raise

    def _decode(self, shard: int, data: memoryview) -> Index:
        ref = self._head.shards[shard]
        trailer = decode_trailer(bytes(data[-TRAILER_BYTES:]), ref.length, END_MAGIC)
        if trailer.start != ref.footer_start:
            raise CorruptError("footer is not where the manifest says")
        return decode_index(trailer, bytes(data[: trailer.stored_length]))

    def _from_nearest(
        self,
        shard: int,
        start: int,
        end: int,
        use: Callable[[int, memoryview], T],
        buffer: memoryview,
    ) -> T:
        """Read a range from the nearest copy that has it sound; raise what the last copy raised."""
        ref = self._head.shards[shard]
        with self._lock:
            failures = [self._bad[shard]] if shard in self._bad else []
        for tier, key, offset in self._copies(shard):
            first, last = start, end
            if tier.name == "local":
                first, last = _whole_pages(start, end, ref.length, len(buffer))
            try:
                data = buffer[: last - first]
                wanted = data[start - first : end - first]
                result = _read_sound(tier, key, offset + first, data, partial(use, shard, wanted))
            except TieredError as exc:
                # A local disk that fails is one more reason to ask the durable tier; that tier's
                # silence proves nothing about its copy and goes to the caller as it is (I8).
                if tier.name != "local" and not isinstance(exc, (AbsentError, CorruptError)):
                    raise
                failure = type(exc)(exc.message, tier.name, exc.key or key, exc.hint, exc.errno)
                failures.append(failure)
                if tier.name == "local":
                    self._distrust(shard, failure)
                continue
            with self._lock:
                self.bytes_read[tier.name] += last - first
            return result
        bad = [failure for failure in failures if not isinstance(failure, AbsentError)]
        if bad:
            worst = bad[-1]
            raise type(worst)(
                f"no sound copy of shard file {ref.name}: {worst.message}",
                worst.tier,
                worst.key,
                "Load an older checkpoint by its checkpoint_id; 'dcp-tiered ls URL' lists them.",
                worst.errno,
            )
        if self._durable is not None and ref.name in self._placed:
            raise IncompleteError(
                f"shard file {ref.name} of {self._head.checkpoint_id} is gone from the durable"
                " tier: the checkpoint was removed since this load began",
                "durable",
                layout.key(self._head.checkpoint_id, self._packs[self._placed[ref.name].pack].name),
                "Load another checkpoint; 'dcp-tiered ls URL' lists them.",
            )
        raise IncompleteError(
            f"shard file {ref.name} of {self._head.checkpoint_id} cannot be reached: it lies on"
            f" node {ref.node} and is not on the durable tier",
            "local",
            ref.name,
            "Start on that node, or load an older checkpoint by its checkpoint_id.",
        )

    def _copies(self, shard: int) -> list[tuple[Readable, str, int]]:
        ref = self._head.shards[shard]
        copies: list[tuple[Readable, str, int]] = []
        with self._lock:
            trusted = shard not in self._bad
        if self._local is not None and trusted:
            copies.append((self._local, layout.key(self._head.checkpoint_id, ref.name), 0))
        place = self._placed.get(ref.name)
        if self._durable is not None and place is not None:
            pack = self._packs[place.pack]
            key = layout.key(self._head.checkpoint_id, pack.name)
            if place.start + ref.length > (pack.raw_length or pack.length):
                raise CorruptError("commit places a shard file outside its pack", "durable", key)
            copies.append((self._readable(self._durable, place.pack), key, place.start))
        return copies

    def _readable(self, durable: Tier, number: int) -> Readable:
        """Return what reads the shard files in a pack."""
        pack = self._packs[number]
        if pack.raw_length is None:
            return durable
        with self._lock:
            return self._unpacked.setdefault(number, Unpacked(durable, pack))

    def _distrust(self, shard: int, error: TieredError) -> None:
        with self._lock:
            if shard in self._bad:
                return
            self._bad[shard] = error
        if not isinstance(error, AbsentError):
            _log.error(
                "local copy is bad, reading the durable one: %s (remove the file to get rid of it)",
                error,
            )


def _read_sound(tier: Readable, key: str, start: int, data: memoryview, use: Callable[[], T]) -> T:
    """Read, and once more where what came is not sound.

    When another thread forks while the disk writes into our memory, an older kernel leaves the
    bytes to the child. What is wrong on disk is wrong twice.
    """
    try:
        tier.read_into(key, start, data)
        return use()
    except CorruptError:
        tier.read_into(key, start, data)
        return use()


def _whole_pages(start: int, end: int, length: int, room: int) -> tuple[int, int]:
    """Widen a range to whole pages of its file, if there is room for them."""
    first = start - start % PAGE_BYTES
    last = min(end + -end % PAGE_BYTES, length)
    return (first, last) if last - first <= room else (start, end)


def _use_blocks(index: Index, part: Part, data: memoryview, start: int, where: int) -> None:
    """Check each block, and copy what is wanted of it while the processor has it in its cache.

    Args:
        index: Of the shard file.
        part: What is wanted; all its blocks are in `data`.
        data: Bytes of the shard file.
        start: Where they begin there.
        where: Their address.
    """
    first, last = part.item_start + part.first, part.item_start + part.last
    number = index.crcs_start.item(part.row) + part.first // BLOCK_BYTES
    for begin in range(part.start, part.end, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, part.end)
        if crc32c(data[begin - start : end - start]) != index.crcs.item(number):
            raise CorruptError(
                f"checksum mismatch in {index.fqns[part.row]!r},"
                f" block {(begin - part.item_start) // BLOCK_BYTES}"
            )
        number += 1
        if part.address is not None:
            low, high = max(begin, first), min(end, last)
            copy_memory(part.address + low - first, where + low - start, high - low)
