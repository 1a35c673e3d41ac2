"""One small shard file, pack, manifest and record, and tools that damage them."""

import hashlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zstandard
from awscrt.checksums import crc32c

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format import columns, footer
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.manifest import (
    Chunk,
    Entry,
    Head,
    Manifest,
    ShardRef,
    decode_head,
    decode_manifest,
    encode_manifest,
)
from dcp_tiered.format.pack import Pack, decode_pack, decode_pack_trailer, plan_pack
from dcp_tiered.format.records import (
    Commit,
    PackRef,
    Placement,
    decode_record,
    encode_record,
)
from dcp_tiered.format.shardfile import (
    END_MAGIC,
    Header,
    decode_header,
    decode_index,
)
from tests.property.strategies import Thing, shard_bytes

REFUSED = (CorruptError, InvalidError)
PEAK_BYTES_MAX = 64 << 20
HEADER = Header(
    checkpoint_id="step-1",
    rank=1,
    world_size=2,
    local_world_size=2,
    node="0" * 12,
    token="a" * 16,
    written_by="0.1",
)
THINGS = [
    Thing("w", "float32", (0, 2), (2, 2), (2, 4), bytes(range(16))),
    Thing("b", None, (), (), (), b"opaque"),
    Thing("0d", "int64", (), (), (), bytes(8)),
]
SHARD = shard_bytes(HEADER, THINGS)
TAIL = SHARD.data[SHARD.footer_start :]
PACK = plan_pack("step-1", "0" * 12, [("1-" + "a" * 16 + ".shard", len(SHARD.data), 7)], "0.1")
MANIFEST = Manifest(
    head=Head(
        checkpoint_id="step-1",
        attempt="b" * 16,
        launch="host:1",
        node="0" * 12,
        sequence=5,
        step=1,
        metadata={"loss": 0.5},
        supersedes=("c" * 16,),
        world_size=2,
        written_by={"dcp_tiered": "0.1", "torch": "2.13"},
        shards=(
            ShardRef(
                name="1-" + "a" * 16 + ".shard",
                node="0" * 12,
                length=len(SHARD.data),
                crc32c=SHARD.crc,
                footer_start=SHARD.footer_start,
            ),
        ),
    ),
    entries=[
        Entry(
            fqn="w",
            dtype="float32",
            shape=(2, 4),
            chunks=(
                Chunk(offsets=(0, 0), sizes=(2, 2), shard=0, row=0),
                Chunk(offsets=(0, 2), sizes=(2, 2), shard=0, row=1),
            ),
        ),
        Entry(fqn="b", dtype=None, chunks=(Chunk(offsets=(), sizes=(), shard=0, row=2),)),
    ],
    planner_data={"w": ("w",), "b": ("b", 0)},
)
STORED = encode_manifest(MANIFEST)
COMMIT = Commit(
    checkpoint_id="step-1",
    attempt="b" * 16,
    sequence=5,
    step=1,
    manifest_sha256="d" * 64,
    manifest_length=100,
    packs=(PackRef(name="packs/" + "0" * 12 + "-" + "e" * 16 + ".pack", length=9000, crc32c=1),),
    placements=(Placement(shard="1-" + "a" * 16 + ".shard", pack=0, start=0),),
    bytes_stored=9000,
    committed_by="0" * 12,
    committed_at="2026-01-01T00:00:00Z",
)
RECORD = encode_record(COMMIT, "0.1")


def read_tail(tail: bytes, start: int = SHARD.footer_start) -> Any:
    """Decode a shard file's end as a reader does that knows the length of the file."""
    trailer = decode_trailer(tail[-TRAILER_BYTES:], start + len(tail), END_MAGIC)
    return decode_index(trailer, tail[: trailer.stored_length])


def read_pack(tail: bytes) -> Pack:
    start = PACK.length - len(PACK.tail)
    trailer = decode_pack_trailer(tail[-TRAILER_BYTES:], start + len(tail))
    return decode_pack(PACK.name, trailer, tail)


def read_record(data: bytes) -> Any:
    return decode_record(data, "step-1")


READERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "header": (decode_header, SHARD.data[:4096]),
    "footer": (read_tail, TAIL),
    "pack": (read_pack, PACK.tail),
    "manifest": (decode_manifest, STORED),
    "manifest head": (decode_head, STORED),
    "record": (read_record, RECORD),
}


@contextmanager
def little_memory(peak_bytes_max: int = PEAK_BYTES_MAX) -> Iterator[None]:
    """Fail when the code inside allocates much: what comes in is tiny."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < peak_bytes_max
    finally:
        tracemalloc.stop()


def index_blob(change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> bytes:
    """Return the raw index of the sample after a change to its header or columns."""
    trailer = decode_trailer(TAIL[-TRAILER_BYTES:], len(SHARD.data), END_MAGIC)
    meta, found = columns.decode(footer.decode_footer(trailer, TAIL[: trailer.stored_length]))
    arrays = {name: array.copy() for name, array in found.items()}
    change(meta, arrays)
    return columns.encode(meta, arrays)


def manifest_bytes(
    change: Callable[[dict[str, Any], dict[str, np.ndarray]], None], **line: object
) -> bytes:
    """Return the stored bytes of the sample after a change, with all checksums right."""
    first, _, blob = STORED.partition(b"\n")
    fields = json.loads(first)
    meta, found = columns.decode(columns.decompress(blob, fields["raw_bytes"]))
    arrays = {name: array.copy() for name, array in found.items()}
    change(meta, arrays)
    raw = columns.encode(meta, arrays)
    return sealed(raw, fields | line)


def sealed(raw: bytes, line: dict[str, Any]) -> bytes:
    stored = zstandard.compress(raw)
    sums = {"raw_bytes": len(raw), "sha256": hashlib.sha256(stored).hexdigest()}
    return json.dumps({**line, **{k: v for k, v in sums.items() if k != line.get("keep")}}).encode(
    ) + b"\n" + stored  # fmt: skip


def summed(fields: dict[str, Any]) -> bytes:
    """Return a record whose checksum is right, whatever it says."""
    rest = {name: value for name, value in fields.items() if name != "crc32c"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return json.dumps(rest | {"crc32c": crc32c(text)}).encode()
