"""Pack: shard files of one node and checkpoint, end to end, and a footer. One durable object.

Each shard file starts on a 4096-byte boundary; gaps are zeros. The footer names the shard files
with start, length and CRC32C, from which the checksum of the whole pack follows.

A compressed pack holds the same in frames, see frames.py, and its footer the table of them. Starts
and lengths of shard files are those before compression.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import CorruptError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import decode, encode
from dcp_tiered.format.fields import CRC_MAX, integer, is_int, must_read_back, rows
from dcp_tiered.format.footer import (
    TRAILER_BYTES,
    VERSION,
    Trailer,
    check_features,
    decode_footer,
    decode_trailer,
    encode_footer,
)
from dcp_tiered.format.frames import ENCODER, FEATURE, Frames, parse_frames
from dcp_tiered.format.shardfile import PAGE_BYTES

END_MAGIC = b"DCPTPAK1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """A shard file inside a pack."""

    name: str
    start: int
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A pack: what is in it, how long it is and what it sums to."""

    name: str
    """Relative to the checkpoint."""
    shards: tuple[PackedShard, ...]
    tail: bytes
    """Footer and trailer, the last bytes of the pack."""
    length: int
    crc32c: int
    raw_length: int | None = None
    """What the shard files take, end to end, where they are compressed; else None."""

    def shards_end(self) -> int:
        """Return where the last shard file ends, before compression."""
        return max(shard.start + shard.length for shard in self.shards)


def plan_pack(
    checkpoint_id: str, node: str, shards: Sequence[tuple[str, int, int]], written_by: str
) -> Pack:
    """Lay shard files out in one pack.

    Args:
        checkpoint_id: The checkpoint they belong to.
        node: The node they lie on.
        shards: Name, length in bytes and CRC32C of each.
        written_by: Version of dcp_tiered.

    Returns:
        The pack; its bytes are those of the shard files at their starts, zeros between, and `tail`.

    Raises:
        InvalidError: A name, length or checksum cannot be.
    """
    packed, cursor, crc = [], 0, 0
    for name, length, shard_crc in shards:
        gap = -cursor % PAGE_BYTES
        crc = combine_crc32c(combine_crc32c(crc, crc32c(bytes(gap)), gap), shard_crc, length)
        packed.append(PackedShard(name=name, start=cursor + gap, length=length, crc32c=shard_crc))
        cursor += gap + length
    meta = _meta(checkpoint_id, node, packed, written_by)
    tail = encode_footer(encode(meta, {}), cursor, END_MAGIC)
    name = layout.pack_name(node, layout.pack_token([shard.name for shard in packed]))
    return _read_back(
        Pack(
            name=name,
            shards=tuple(packed),
            tail=tail,
            length=cursor + len(tail),
            crc32c=combine_crc32c(crc, crc32c(tail), len(tail)),
        )
    )


def compressed_name(plan: Pack) -> str:
    """Return the name of the pack with the same shard files, compressed by this version.

    A key is only ever uploaded with the same bytes, and another zstd may make other bytes.
    """
    node = layout.pack_node(plan.name) or ""
    return layout.pack_name(node, layout.pack_token([one.name for one in plan.shards], ENCODER))


def compressed_pack(
    checkpoint_id: str, plan: Pack, frames: Frames, crc: int, written_by: str
) -> Pack:
    """Return the pack with the same shard files in frames.

    Args:
        checkpoint_id: The checkpoint they belong to.
        plan: The pack without compression.
        frames: All of them.
        crc: CRC32C of their stored bytes, end to end.
        written_by: Version of dcp_tiered.

    Raises:
        InvalidError: The frames do not cover the shard files.
    """
    meta = _meta(checkpoint_id, layout.pack_node(plan.name) or "", plan.shards, written_by)
    meta |= {"requires": [FEATURE], "crc32c": crc}
    end = int(frames.stored_ends[-1])
    tail = encode_footer(encode(meta, frames.columns()), end, END_MAGIC)
    return _read_back(
        Pack(
            name=compressed_name(plan),
            shards=plan.shards,
            tail=tail,
            length=end + len(tail),
            crc32c=combine_crc32c(crc, crc32c(tail), len(tail)),
            raw_length=plan.shards_end(),
        )
    )


def _meta(
    checkpoint_id: str, node: str, shards: Sequence[PackedShard], written_by: str
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "requires": [],
        "written_by": written_by,
        "checkpoint_id": layout.check_checkpoint_id(checkpoint_id),
        "node": node,
        "shards": [[shard.name, shard.start, shard.length, shard.crc32c] for shard in shards],
    }


def _read_back(pack: Pack) -> Pack:
    """Return a pack that a reader takes for the same one."""
    with must_read_back("pack footer"):
        trailer = decode_pack_trailer(pack.tail[-TRAILER_BYTES:], pack.length)
        if decode_pack(pack.name, trailer, pack.tail) != pack:
            raise CorruptError("pack footer is read as another one")
    return pack


def decode_pack_trailer(data: bytes, file_length: int) -> Trailer:
    """Decode the last 48 bytes of a pack; see `footer.decode_trailer`."""
    return decode_trailer(data, file_length, END_MAGIC)


def decode_pack(name: str, trailer: Trailer, tail: bytes) -> Pack:
    """Decode footer and trailer of a pack.

    Args:
        name: Its name, relative to the checkpoint.
        trailer: Its checked trailer.
        tail: All bytes from the footer's start to the end.

    Raises:
        CorruptError: They are damaged or describe something that cannot be.
        InvalidError: The pack needs a newer version.
    """
    return decode_pack_and_frames(name, trailer, tail)[0]


def decode_pack_and_frames(name: str, trailer: Trailer, tail: bytes) -> tuple[Pack, Frames | None]:
    """Decode a pack's end; return its frames too, None where it is not compressed."""
    meta, columns = decode(decode_footer(trailer, tail[: trailer.stored_length]))
    requires = meta.get("requires")
    check_features(meta.get("version"), requires, meta.get("written_by"), [FEATURE])
    if meta.get("node") != layout.pack_node(name):
        raise CorruptError("pack footer names another node than the pack")
    layout.check_stored_id(meta.get("checkpoint_id"))
    shards, end, crc = _shards(meta)
    frames = None
    if requires:
        frames = parse_frames(columns, end, trailer.start)
        crc = integer(meta, "crc32c", 0, CRC_MAX)
    elif end != trailer.start:
        raise CorruptError("pack footer does not cover the pack")
    pack = Pack(
        name=name,
        shards=shards,
        tail=tail,
        length=trailer.start + len(tail),
        crc32c=combine_crc32c(crc, crc32c(tail), len(tail)),
        raw_length=None if frames is None else end,
    )
    return pack, frames


def _shards(meta: Mapping[str, Any]) -> tuple[tuple[PackedShard, ...], int, int]:
    """Return a footer's shard files, where the last one ends, and what they sum to, end to end."""
    shards, cursor, crc = [], 0, 0
    for row in rows(meta, "shards"):
        shard = _shard(row)
        gap = shard.start - cursor
        if not 0 <= gap < PAGE_BYTES or shard.start % PAGE_BYTES:
            raise CorruptError("pack footer lists shard files that overlap or leave holes")
        crc = combine_crc32c(
            combine_crc32c(crc, crc32c(bytes(gap)), gap), shard.crc32c, shard.length
        )
        cursor = shard.start + shard.length
        shards.append(shard)
    if len({shard.name for shard in shards}) != len(shards):
        raise CorruptError("pack footer lists a shard file twice")
    return tuple(shards), cursor, crc


def _shard(row: object) -> PackedShard:
    if not isinstance(row, list) or len(row) != 4:  # noqa: PLR2004 - name, start, length, crc
        raise CorruptError("pack footer row is malformed")
    name, start, length, crc = row
    if not is_int(start) or not is_int(length, 1) or not is_int(crc, 0, CRC_MAX):
        raise CorruptError("pack footer row is out of range")
    return PackedShard(name=layout.check_shard_name(name), start=start, length=length, crc32c=crc)
