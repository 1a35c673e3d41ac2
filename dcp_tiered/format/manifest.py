"""Manifest: plain-data description of a checkpoint, identified by the sha256 of its stored bytes.

    line of JSON    {"format": "dcp_tiered manifest", "version": 1, "requires": [], ...}
    newline         one byte
    zstd            a blob of columns.py

The line can be read by eye and says, before anything is decompressed, whether this version can
read the rest and what its sha256 is. The rest is DCP's metadata and, for every chunk and bytes
entry, the shard file that holds it and its row in that shard file's footer.
"""

import gc
import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcp_tiered.errors import CorruptError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import (
    canonical_json,
    compress,
    decode,
    decode_meta,
    decompress,
    encode,
    parse_json,
    take,
)
from dcp_tiered.format.entries import Chunk, Entries, Entry
from dcp_tiered.format.fields import (
    CRC_MAX,
    NUMBER_MAX,
    integer,
    is_int,
    must_read_back,
    optional_integer,
    rows,
    text,
)
from dcp_tiered.format.footer import VERSION, check_features
from dcp_tiered.format.plain import from_tagged, to_tagged
from dcp_tiered.format.shardfile import PAGE_BYTES

__all__ = [
    "MANIFEST_BYTES_MAX",
    "Chunk",
    "Entries",
    "Entry",
    "Head",
    "Manifest",
    "ShardRef",
    "decode_head",
    "decode_manifest",
    "encode_manifest",
    "sha256",
]

MANIFEST_BYTES_MAX = 1 << 30
_FORMAT = "dcp_tiered manifest"
_LINE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """A shard file of a checkpoint."""

    name: str
    node: str
    """Node on whose local tier it was written."""
    length: int
    """Bytes."""
    crc32c: int
    """CRC32C of the whole file."""
    footer_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A manifest without its entries: which save this is and which shard files it is made of."""

    checkpoint_id: str
    attempt: str
    launch: str
    """Which start of the job saved it."""
    node: str
    """The coordinator's node."""
    sequence: int
    """Order of saves in a run: the greatest is the newest."""
    step: int | None
    metadata: Any
    """The user's, plain data."""
    supersedes: tuple[str, ...]
    """Attempts that this one replaces."""
    world_size: int
    written_by: dict[str, str]
    """Versions of dcp_tiered and torch."""
    shards: tuple[ShardRef, ...]
    policy_sha256: str | None = None
    """Of the residency policy that it was saved under; None, and not stored, without one."""

    def bytes_stored(self) -> int:
        """Return the length of all shard files together."""
        return sum(shard.length for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint as it was asked for."""

    head: Head
    entries: Collection[Entry] = field(repr=False)
    """Of a manifest that was read: `Entries`."""
    planner_data: Any = field(repr=False)
    """What DCP's planner wants back, plain data."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Make millions of tuples without the collector walking all of them again and again.

    It took more than half of the time, and there is no garbage to find.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def encode_manifest(manifest: Manifest) -> bytes:
    """Return the stored bytes of a manifest, checked as a reader checks them.

    Raises:
        InvalidError: It holds something that is not plain data or that a reader would refuse.
    """
    head = manifest.head
    entries = Entries.of(manifest.entries)
    meta = _meta(head) | {"entries": len(entries)}
    planner = canonical_json({"data": to_tagged(manifest.planner_data, "the planner's data")})
    with must_read_back("manifest"):
        # Compared as JSON: a NaN in the user's metadata differs from itself.
        if canonical_json(_meta(_head(meta))) != canonical_json(_meta(head)):
            raise CorruptError("it is read as another one")
        columns = entries.encode(len(head.shards))
    raw = encode(meta, columns | {"planner": np.frombuffer(planner, dtype="u1")})
    stored = compress(raw)
    line = canonical_json(
        {
            "format": _FORMAT,
            "version": VERSION,
            "requires": [],
            "written_by": head.written_by.get("dcp_tiered", ""),
            "raw_bytes": len(raw),
            "sha256": sha256(stored),
        }
    )
    return line + b"\n" + stored


def sha256(stored: bytes) -> str:
    """Return the identity of a manifest."""
    return hashlib.sha256(stored).hexdigest()


def decode_head(stored: bytes) -> Head:
    """Decode a manifest without its entries, at the cost of one pass over the stored bytes.

    Raises:
        CorruptError: It is not a manifest.
        InvalidError: It needs a newer version.
    """
    return _head(decode_meta(*_open(stored)))


@_collector_paused()
def decode_manifest(stored: bytes) -> Manifest:
    """Decode and check a manifest.

    Raises:
        CorruptError: It is damaged or describes something that cannot be.
        InvalidError: It needs a newer version.
    """
    meta, columns = decode(decompress(*_open(stored)))
    head = _head(meta)
    count = integer(meta, "entries")
    entries = Entries.decode(columns, count, len(head.shards))
    planner = parse_json(take(columns, "planner", "u1").tobytes())
    return Manifest(head=head, entries=entries, planner_data=from_tagged(planner.get("data")))


def _open(stored: bytes) -> tuple[bytes, int]:
    """Return the compressed blob behind the line, with its checksum right, and its raw length."""
    line, separator, _ = stored[: _LINE_BYTES_MAX + 1].partition(b"\n")
    if not separator:
        raise CorruptError("not a manifest: no header line")
    fields = parse_json(line)
    if fields.get("format") != _FORMAT:
        raise CorruptError("not a manifest: wrong format name")
    check_features(fields.get("version"), fields.get("requires"), fields.get("written_by"))
    blob = stored[len(line) + 1 :]
    if sha256(blob) != fields.get("sha256"):
        raise CorruptError("manifest checksum mismatch")
    return blob, integer(fields, "raw_bytes")


def _meta(head: Head) -> dict[str, Any]:
    policy = {} if head.policy_sha256 is None else {"policy_sha256": head.policy_sha256}
    return {
        **policy,
        "checkpoint_id": layout.check_checkpoint_id(head.checkpoint_id),
        "attempt": head.attempt,
        "launch": head.launch,
        "node": head.node,
        "sequence": head.sequence,
        "step": head.step,
        "metadata": to_tagged(head.metadata, "the checkpoint's metadata"),
        "supersedes": list(head.supersedes),
        "world_size": head.world_size,
        "written_by": head.written_by,
        "shards": [
            [shard.name, shard.node, shard.length, shard.crc32c, shard.footer_start]
            for shard in head.shards
        ],
    }


def _head(meta: dict[str, Any]) -> Head:
    versions = meta.get("written_by")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise CorruptError("manifest does not say who wrote it")
    shards = tuple(_shard_ref(row) for row in rows(meta, "shards"))
    if len({shard.name for shard in shards}) != len(shards):
        raise CorruptError("manifest lists a shard file twice")
    return Head(
        checkpoint_id=layout.check_stored_id(meta.get("checkpoint_id")),
        attempt=layout.check_attempt(meta.get("attempt")),
        launch=text(meta, "launch", 200),
        node=layout.check_node(meta.get("node")),
        sequence=integer(meta, "sequence"),
        step=optional_integer(meta, "step", -NUMBER_MAX),
        metadata=from_tagged(meta.get("metadata")),
        supersedes=tuple(layout.check_attempt(attempt) for attempt in rows(meta, "supersedes")),
        world_size=integer(meta, "world_size", 1),
        written_by=versions,
        shards=shards,
        policy_sha256=layout.check_optional_sha256(meta.get("policy_sha256")),
    )


def _shard_ref(row: object) -> ShardRef:
    if not isinstance(row, list) or len(row) != 5:  # noqa: PLR2004 - the fields below
        raise CorruptError("manifest's shard file row is malformed")
    name, node, length, crc, footer_start = row
    if (
        not is_int(length)
        or not is_int(crc, 0, CRC_MAX)
        or not is_int(footer_start, PAGE_BYTES, length - 1)
    ):
        raise CorruptError("manifest's shard file row is out of range")
    return ShardRef(
        name=layout.check_shard_name(name),
        node=layout.check_node(node),
        length=length,
        crc32c=crc,
        footer_start=footer_start,
    )
