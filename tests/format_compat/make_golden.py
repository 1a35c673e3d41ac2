"""Write the golden files of one format version from fixed values.

    python tests/format_compat/make_golden.py v1|v1-frames DIRECTORY

The files under v1/ and v1-frames/ were made once. They are never made again: that old bytes stay
readable is what they prove. See test_golden.py for how the format changes.
"""

import hashlib
import struct
import sys
from pathlib import Path

from awscrt.checksums import crc32c

from dcp_tiered.format import frames
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.layout import shard_name
from dcp_tiered.format.manifest import Chunk, Entry, Head, Manifest, ShardRef, encode_manifest
from dcp_tiered.format.manifest import sha256 as sha256_of
from dcp_tiered.format.pack import compressed_pack, plan_pack
from dcp_tiered.format.records import (
    Commit,
    Expired,
    Fence,
    PackRef,
    Placement,
    encode_record,
)
from dcp_tiered.format.shardfile import (
    BLOCK_BYTES,
    END_MAGIC,
    Builder,
    Header,
    Item,
    decode_index,
    encode_header,
)

CHECKPOINT_ID = "step-1000"
NODE = "0a1b2c3d4e5f"
TOKEN = "0123456789abcdef"
ATTEMPT = "fedcba9876543210"
DEAD = "00000000deadbeef"
VERSION = "0.1.0"
WEIGHT = struct.pack("<6f", *(number / 4 for number in range(6)))
# The bytes of a tensor of more than one checksum block: byte i is i modulo 251.
LARGE = bytes(range(251)) * (300_000 // 251) + bytes(range(300_000 % 251))
OPAQUE = b"an object, as DCP hands it over"
NAME = "layers.0.weight"
ODD_NAME = "naïve/\ud800 key"  # a lone surrogate, which DCP takes as any other text


def shard_file() -> tuple[bytes, int]:
    """Return a shard file with a large tensor, a chunk, a scalar and an object; and its footer."""
    header = Header(
        checkpoint_id=CHECKPOINT_ID,
        rank=3,
        world_size=8,
        local_world_size=4,
        node=NODE,
        token=TOKEN,
        written_by=VERSION,
    )
    builder = Builder(header)
    data = bytearray(encode_header(header))
    for fqn, dtype, box, raw in (
        ("buffer", "uint8", ((0,), (300_000,), (300_000,)), LARGE),
        (NAME, "float32", ((2, 0), (2, 3), (4, 3)), WEIGHT),
        (ODD_NAME, "int64", ((), (), ()), struct.pack("<q", -7)),
        ("scheduler", None, ((), (), ()), OPAQUE),
    ):
        start = builder.next_start(len(raw))
        crcs = [crc32c(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]
        builder.add(
            Item(
                fqn=fqn,
                dtype=dtype,
                offsets=box[0],
                sizes=box[1],
                shape=box[2],
                start=start,
                length=len(raw),
                crcs=crcs,
            )
        )
        data += bytes(start - len(data)) + raw
    footer_start = builder.cursor
    data += builder.finish()
    return bytes(data), footer_start


def manifest(shard: bytes, footer_start: int) -> Manifest:
    """Return a manifest of the shard file; the other half of one tensor is not shown."""
    head = Head(
        checkpoint_id=CHECKPOINT_ID,
        attempt=ATTEMPT,
        launch="host-7 2026-01-02T03:04:05Z",
        node=NODE,
        sequence=1_767_323_045_000_000_000,
        step=1000,
        metadata={"loss": float("nan"), "tags": ["a", ("b", 2)], 3: None},
        supersedes=(DEAD,),
        world_size=8,
        written_by={"dcp_tiered": VERSION, "torch": "2.13.0"},
        shards=(
            ShardRef(
                name=shard_name(3, TOKEN),
                node=NODE,
                length=len(shard),
                crc32c=crc32c(shard),
                footer_start=footer_start,
            ),
        ),
    )
    place = {"shard": 0}
    entries = [
        Entry(
            fqn="buffer",
            dtype="uint8",
            shape=(300_000,),
            chunks=(Chunk(offsets=(0,), sizes=(300_000,), row=0, **place),),
        ),
        Entry(
            fqn=NAME,
            dtype="float32",
            shape=(4, 3),
            requires_grad=True,
            chunks=(Chunk(offsets=(2, 0), sizes=(2, 3), row=1, **place),),
        ),
        Entry(fqn=ODD_NAME, dtype="int64", chunks=(Chunk(offsets=(), sizes=(), row=2, **place),)),
        Entry(fqn="scheduler", dtype=None, chunks=(Chunk(offsets=(), sizes=(), row=3, **place),)),
    ]
    planner_data = {NAME: ("layers", 0, "weight"), ODD_NAME: (ODD_NAME,), "buffer": ("buffer",)}
    return Manifest(head=head, entries=entries, planner_data=planner_data)


def files() -> dict[str, bytes]:
    """Return every golden file by name."""
    shard, footer_start = shard_file()
    small = bytes(5000)
    rows = [(shard_name(3, TOKEN), len(shard), crc32c(shard)),
            (shard_name(4, TOKEN), len(small), crc32c(small))]  # fmt: skip
    pack = plan_pack(CHECKPOINT_ID, NODE, rows, VERSION)
    whole = shard + bytes(-len(shard) % 4096) + small + pack.tail
    stored = encode_manifest(manifest(shard, footer_start))
    commit = Commit(
        checkpoint_id=CHECKPOINT_ID,
        attempt=ATTEMPT,
        sequence=1_767_323_045_000_000_000,
        step=1000,
        manifest_sha256=sha256_of(stored),
        manifest_length=len(stored),
        packs=(PackRef(name=pack.name, length=pack.length, crc32c=pack.crc32c),),
        placements=(Placement(shard=shard_name(3, TOKEN), pack=0, start=0),),
        bytes_stored=len(shard),
        committed_by=NODE,
        committed_at="2026-01-02T03:05:00Z",
    )
    return {
        "3-0123456789abcdef.shard": shard,
        pack.name.rpartition("/")[2]: whole,
        f"manifest-{ATTEMPT}.json": stored,
        "record-1.json": encode_record(commit, VERSION),
        "record-2.json": encode_record(
            Fence(checkpoint_id=CHECKPOINT_ID, attempts=(DEAD,)), VERSION
        ),
        "record-3.json": encode_record(Expired(checkpoint_id=CHECKPOINT_ID), VERSION),
    }


def tensors() -> dict[str, tuple[str, bytes]]:
    """Return tensors by name, with dtype: of high bytes that repeat, and low bytes that do not."""
    noise = [hashlib.sha256(struct.pack("<I", number)).digest() for number in range(5000)]
    low = b"".join(noise)
    high = bytes(0x3C + (byte & 1) for byte in low)
    halves = bytearray(2 * len(low))
    halves[0::2], halves[1::2] = low, high
    words = bytearray(4 * len(low))
    words[2::4], words[3::4] = low, high
    return {
        "bfloat16": ("bfloat16", bytes(halves)),
        "rounded": ("float32", bytes(words)),
        "whole": ("int64", bytes(halves[:80_000])),
    }


def framed_files() -> dict[str, bytes]:
    """Return the golden files of a compressed pack by name."""
    header = Header(
        checkpoint_id=CHECKPOINT_ID,
        rank=0,
        world_size=1,
        local_world_size=1,
        node=NODE,
        token=TOKEN,
        written_by=VERSION,
    )
    builder, data = Builder(header), bytearray(encode_header(header))
    for fqn, (dtype, raw) in tensors().items():
        size = (len(raw) // {"bfloat16": 2, "float32": 4, "int64": 8}[dtype],)
        start = builder.next_start(len(raw))
        crcs = [crc32c(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]
        box = {"offsets": (0,), "sizes": size, "shape": size}
        builder.add(Item(fqn=fqn, dtype=dtype, start=start, length=len(raw), crcs=crcs, **box))
        data += bytes(start - len(data)) + raw
    footer_start = builder.cursor
    shard = bytes(data) + builder.finish()
    plan = plan_pack(
        CHECKPOINT_ID, NODE, [(shard_name(0, TOKEN), len(shard), crc32c(shard))], VERSION
    )
    trailer = decode_trailer(shard[-TRAILER_BYTES:], len(shard), END_MAGIC)
    index = decode_index(trailer, shard[footer_start : footer_start + trailer.stored_length])
    table, stored = frames.Builder(), b""
    for start, end, codec in frames.stretches(index, len(shard)):
        small = frames.encode_frame(codec, shard[start:end])
        kept = small or shard[start:end]
        table.add(codec if small else frames.AS_IT_IS, end - start, len(kept))
        stored += kept
    pack = compressed_pack(CHECKPOINT_ID, plan, table.finish(), crc32c(stored), VERSION)
    commit = Commit(
        checkpoint_id=CHECKPOINT_ID,
        attempt=ATTEMPT,
        sequence=1_767_323_045_000_000_000,
        step=1000,
        manifest_sha256="0" * 64,
        manifest_length=0,
        packs=(
            PackRef(
                name=pack.name, length=pack.length, crc32c=pack.crc32c, raw_length=pack.raw_length
            ),
        ),
        placements=(Placement(shard=shard_name(0, TOKEN), pack=0, start=0),),
        bytes_stored=len(shard),
        committed_by=NODE,
        committed_at="2026-01-02T03:05:00Z",
    )
    return {
        "compressed.pack": stored + pack.tail,  # its name depends on the version of zstd
        "record-1.json": encode_record(commit, VERSION),
    }


SETS = {"v1": files, "v1-frames": framed_files}

if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True)
    for name, data in SETS[sys.argv[1]]().items():
        (target / name).write_bytes(data)
