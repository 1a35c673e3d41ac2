"""A compressed pack read as if it were none: ranges of its shard files, decoded on the way.

Nothing here believes what it decodes: whoever asked compares the checksums of the blocks (I9).
"""

import threading

import numpy as np

from dcp_tiered.errors import CorruptError, TieredError
from dcp_tiered.format.frames import AS_IT_IS, Cut, Frames, decode_frame
from dcp_tiered.format.records import PackRef
from dcp_tiered.interfaces import Tier
from dcp_tiered.policy import ranges
from dcp_tiered.services import pack_footer

_READ_BYTES_MAX = 8 << 20
"""Stored bytes that are read at once: with one frame decoded, what a thread has in memory."""


class Unpacked:
    """Reads one compressed pack; safe for threads.

    Args:
        tier: Where it lies.
        pack: What the commit says of it.
    """

    def __init__(self, tier: Tier, pack: PackRef) -> None:
        self.name = tier.name
        self._tier = tier
        self._pack = pack
        self._frames: Frames | None = None
        self._lock = threading.Lock()

    def read_alignment(self, key: str) -> int:
        """Return 1: what is decoded goes to any memory; see `Tier.read_alignment`."""
        del key
        return 1

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the shard files, as they lie end to end, from `start`.

        Raises:
            AbsentError: The pack is definitely not there.
            CorruptError: It is not the pack of the commit, or a frame does not decode.
            InvalidError: It needs a newer version.
        """
        if not buffer:
            return
        cuts = self._table(key).cuts(start, start + len(buffer))
        for first, last, inside in ranges.coalesce(cuts, 0, _READ_BYTES_MAX):
            if len(inside) == 1 and inside[0].codec == AS_IT_IS:
                self._tier.read_into(key, first, _place(inside[0], start, buffer))
                continue
            stored = np.empty(last - first, "u1").data
            self._tier.read_into(key, first, stored)
            for cut in inside:
                data = stored[cut.start - first : cut.end - first]
                try:
                    _decode(cut, data, start, buffer)
                except CorruptError as exc:
                    raise CorruptError(exc.message, self.name, key) from exc

    def _table(self, key: str) -> Frames:
        with self._lock:
            if self._frames is None:
                try:
                    self._frames = self._read_table(key)
                except TieredError as exc:
                    tier, where = exc.tier or self.name, exc.key or key
                    raise type(exc)(exc.message, tier, where, exc.hint, exc.errno) from exc
            return self._frames

    def _read_table(self, key: str) -> Frames:
        """Return the frames, having checked that the footer is the one that was committed."""
        wanted = self._pack
        pack, frames = pack_footer.read(self._tier, key, wanted.name, wanted.length)
        if frames is None or (pack.crc32c, pack.raw_length) != (wanted.crc32c, wanted.raw_length):
            raise CorruptError("pack is another one than was committed")
        return frames


def _decode(cut: Cut, stored: memoryview, start: int, buffer: memoryview) -> None:
    """Put what is wanted of a frame into `buffer`, which begins at `start`."""
    if cut.codec == AS_IT_IS:
        _place(cut, start, buffer)[:] = stored
        return
    whole = start <= cut.raw_start and cut.raw_end <= start + len(buffer)
    if whole:
        decode_frame(cut.codec, stored, _place(cut, start, buffer))
        return
    raw = np.empty(cut.raw_end - cut.raw_start, "u1").data
    decode_frame(cut.codec, stored, raw)
    first, last = max(start, cut.raw_start), min(start + len(buffer), cut.raw_end)
    wanted = raw[first - cut.raw_start : last - cut.raw_start]
    buffer[first - start : last - start] = wanted


def _place(cut: Cut, start: int, buffer: memoryview) -> memoryview:
    return buffer[cut.raw_start - start : cut.raw_end - start]
