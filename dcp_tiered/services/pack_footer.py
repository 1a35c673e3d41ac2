"""The end of a pack on the durable tier, which says what is in it: mostly one request."""

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.footer import TRAILER_BYTES
from dcp_tiered.format.frames import Frames
from dcp_tiered.format.pack import Pack, decode_pack_and_frames, decode_pack_trailer
from dcp_tiered.interfaces import Tier

_TAIL_BYTES = 64 << 10
"""Most footers are shorter, so one request reads them with their trailer."""
_TAIL_BYTES_MAX = 1 << 24


def read(tier: Tier, key: str, name: str, length: int) -> tuple[Pack, Frames | None]:
    """Return a pack from its footer, and the table of its frames if it is compressed.

    Args:
        tier: Where it lies.
        key: Its key.
        name: Its name, relative to the checkpoint.
        length: Of the whole object, bytes.

    Raises:
        AbsentError: It is definitely not there.
        CorruptError: It is no pack of that length.
        InvalidError: It needs a newer version.
    """
    end = _end(tier, key, length, min(_TAIL_BYTES, length))
    trailer = decode_pack_trailer(end[-TRAILER_BYTES:], length)
    size = length - trailer.start
    if size > _TAIL_BYTES_MAX:
        raise CorruptError(f"pack footer claims {size} bytes", tier.name, key)
    tail = end[-size:] if size <= len(end) else _end(tier, key, length, size)
    return decode_pack_and_frames(name, trailer, tail)


def _end(tier: Tier, key: str, length: int, size: int) -> bytes:
    data = bytearray(size)
    tier.read_into(key, length - size, memoryview(data))
    return bytes(data)
