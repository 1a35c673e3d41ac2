"""Manifest: plain-data description of a checkpoint. Identified by the sha256 of its stored bytes.

    one line of JSON {"format": "dcp_tiered manifest", "version": 1, "requires": [], ...} | \\n | zstd

The line can be read by eye and says, before anything is decompressed, whether this version can read
the rest. The rest is a blob of `columns.py`: DCP's metadata and, for every chunk and bytes entry, the
shard file that holds it and its row in that shard file's footer.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcp_tiered.errors import CorruptError
from dcp_tiered.format import layout
from dcp_tiered.format.columns import (
    Array,
    canonical_json,
    compress,
    decode,
    decompress,
    encode,
    pack_strings,
    parse_json,
    take,
    unpack_strings,
)
from dcp_tiered.format.footer import VERSION, check_features
from dcp_tiered.format.plain import from_tagged, to_tagged
from dcp_tiered.format.shardfile import DTYPES, dtype_code

MANIFEST_BYTES_MAX = 1 << 30
_FORMAT = "dcp_tiered manifest"
_LINE_BYTES_MAX = 4096
_NDIM_MAX = 64
_TENSOR, _BYTES = 0, 1


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
class Chunk:
    """Where a chunk of a tensor, or the bytes of an entry, are stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard: int
    """Position in `Manifest.shards`."""
    row: int
    """Row in that shard file's footer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of the state dict; opaque bytes when `dtype` is None."""

    fqn: str
    dtype: str | None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    chunks: tuple[Chunk, ...]
    """In DCP's order; exactly one for opaque bytes."""


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
    planner_data: Any = field(repr=False)
    """What DCP's planner wants back, plain data."""
    shards: tuple[ShardRef, ...]

    def bytes_stored(self) -> int:
        """Return the length of all shard files together."""
        return sum(shard.length for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint as it was asked for."""

    head: Head
    entries: Sequence[Entry] = field(repr=False)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the stored bytes of a manifest.

    Raises:
        InvalidError: It holds something that is not plain data.
    """
    head = manifest.head
    meta = {
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
        "planner_data": to_tagged(head.planner_data, "the planner's data"),
        "entries": len(manifest.entries),
        "shards": [
            [shard.name, shard.node, shard.length, shard.crc32c, shard.footer_start]
            for shard in head.shards
        ],
    }
    raw = encode(meta, _encode_entries(manifest.entries))
    line = canonical_json(
        {
            "format": _FORMAT,
            "version": VERSION,
            "requires": [],
            "written_by": head.written_by.get("dcp_tiered", ""),
            "raw_bytes": len(raw),
        }
    )
    return line + b"\n" + compress(raw)


def sha256(stored: bytes) -> str:
    """Return the identity of a manifest."""
    return hashlib.sha256(stored).hexdigest()


def decode_head(stored: bytes) -> Head:
    """Decode a manifest without its entries.

    Raises:
        CorruptError: It is not a manifest.
        InvalidError: It needs a newer version.
    """
    return _head(_open(stored)[0])


def decode_manifest(stored: bytes) -> Manifest:
    """Decode and check a manifest.

    Raises:
        CorruptError: It is damaged or describes something that cannot be.
        InvalidError: It needs a newer version.
    """
    meta, columns = _open(stored)
    head = _head(meta)
    count = meta.get("entries")
    if not _is_int(count) or count < 0:
        raise CorruptError("manifest has no valid entry count")
    return Manifest(head=head, entries=_decode_entries(columns, count, len(head.shards)))


def _open(stored: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    line, separator, _ = stored[: _LINE_BYTES_MAX + 1].partition(b"\n")
    if not separator:
        raise CorruptError("not a manifest: no header line")
    fields = parse_json(line)
    if fields.get("format") != _FORMAT:
        raise CorruptError("not a manifest: wrong format name")
    check_features(fields.get("version"), fields.get("requires"), fields.get("written_by"))
    raw_bytes = fields.get("raw_bytes")
    if not _is_int(raw_bytes) or raw_bytes < 0:
        raise CorruptError("manifest does not say its size")
    return decode(decompress(stored[len(line) + 1 :], raw_bytes))


def _head(meta: dict[str, Any]) -> Head:
    step, sequence, world = meta.get("step"), meta.get("sequence"), meta.get("world_size")
    supersedes, shards, versions = (
        meta.get("supersedes"),
        meta.get("shards"),
        meta.get("written_by"),
    )
    if not _is_int(sequence) or sequence < 0 or not _is_int(world) or world < 1:
        raise CorruptError("manifest has no valid sequence or world size")
    if step is not None and not _is_int(step):
        raise CorruptError("manifest has no valid step")
    if not isinstance(supersedes, list) or not isinstance(shards, list):
        raise CorruptError("manifest lists no shard files")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise CorruptError("manifest does not say who wrote it")
    refs = tuple(_shard_ref(row) for row in shards)
    if len({ref.name for ref in refs}) != len(refs):
        raise CorruptError("manifest lists a shard file twice")
    return Head(
        checkpoint_id=layout.check_stored_id(meta.get("checkpoint_id")),
        attempt=layout.check_attempt(meta.get("attempt")),
        launch=str(meta.get("launch"))[:200],
        node=layout.check_node(meta.get("node")),
        sequence=sequence,
        step=step,
        metadata=from_tagged(meta.get("metadata")),
        supersedes=tuple(layout.check_attempt(attempt) for attempt in supersedes),
        world_size=world,
        written_by=versions,
        planner_data=from_tagged(meta.get("planner_data")),
        shards=refs,
    )


def _shard_ref(row: Any) -> ShardRef:
    if not isinstance(row, list) or len(row) != 5:  # noqa: PLR2004 - the fields below
        raise CorruptError("manifest's shard file row is malformed")
    name, node, length, crc, footer_start = row
    if not all(_is_int(value) for value in (length, crc, footer_start)):
        raise CorruptError("manifest's shard file row is malformed")
    if not 0 < footer_start < length < 1 << 62 or not 0 <= crc < 1 << 32:
        raise CorruptError("manifest's shard file row is out of range")
    return ShardRef(
        name=layout.check_shard_name(name),
        node=layout.check_node(node),
        length=length,
        crc32c=crc,
        footer_start=footer_start,
    )


def _encode_entries(entries: Sequence[Entry]) -> dict[str, Array]:
    names, name_lengths = pack_strings([entry.fqn for entry in entries])
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    shape = [number for entry in entries for number in entry.shape]
    boxes = [number for chunk in chunks for number in (*chunk.offsets, *chunk.sizes)]
    codes = [0 if entry.dtype is None else dtype_code(entry.dtype) for entry in entries]
    return {
        "kind": _u1([_BYTES if entry.dtype is None else _TENSOR for entry in entries]),
        "dtype": _u1(codes),
        "requires_grad": _u1([entry.requires_grad for entry in entries]),
        "ndim": _u1([len(entry.shape) for entry in entries]),
        "shape": np.array(shape, dtype="<i8"),
        "chunks": np.array([len(entry.chunks) for entry in entries], dtype="<u4"),
        "boxes": np.array(boxes, dtype="<i8"),
        "shard": np.array([chunk.shard for chunk in chunks], dtype="<u4"),
        "row": np.array([chunk.row for chunk in chunks], dtype="<u4"),
        "name_lengths": name_lengths,
        "names": names,
    }


def _decode_entries(columns: dict[str, Array], count: int, shards: int) -> list[Entry]:
    flat = {name: take(columns, name, "u1") for name in ("kind", "dtype", "requires_grad", "ndim")}
    counts = take(columns, "chunks", "u4").astype("i8")
    if any(len(array) != count for array in (*flat.values(), counts)):
        raise CorruptError("manifest columns differ in length")
    kind, ndim = flat["kind"], flat["ndim"].astype("i8")
    shape, boxes = take(columns, "shape", "i8"), take(columns, "boxes", "i8")
    shard, row = take(columns, "shard", "u4"), take(columns, "row", "u4")
    _check_counts(flat, counts, shards, shape, boxes, shard, row)
    fqns = unpack_strings(take(columns, "names", "u1"), take(columns, "name_lengths", "u4"), count)
    if len(set(fqns)) != count:
        raise CorruptError("manifest names a key twice")
    shape_list, box_list = shape.tolist(), boxes.tolist()
    shard_list, row_list = shard.tolist(), row.tolist()
    entries, at_shape, at_box, at_chunk = [], 0, 0, 0
    for i, dims in enumerate(ndim.tolist()):
        whole = tuple(shape_list[at_shape : at_shape + dims])
        at_shape += dims
        chunks = []
        for _ in range(int(counts[i])):
            box = box_list[at_box : at_box + 2 * dims]
            chunks.append(
                Chunk(
                    offsets=tuple(box[:dims]),
                    sizes=tuple(box[dims:]),
                    shard=shard_list[at_chunk],
                    row=row_list[at_chunk],
                )
            )
            at_box += 2 * dims
            at_chunk += 1
        entries.append(
            Entry(
                fqn=fqns[i],
                dtype=DTYPES[flat["dtype"][i]] if kind[i] == _TENSOR else None,
                shape=whole,
                requires_grad=bool(flat["requires_grad"][i]),
                chunks=tuple(chunks),
            )
        )
    for entry in entries:
        _check_entry(entry)
    return entries


def _check_counts(
    flat: dict[str, Array],
    counts: Array,
    shards: int,
    shape: Array,
    boxes: Array,
    shard: Array,
    row: Array,
) -> None:
    kind, ndim = flat["kind"], flat["ndim"].astype("i8")
    if np.any(kind > _BYTES) or np.any(flat["dtype"] >= len(DTYPES)):
        raise CorruptError("manifest has a kind or dtype that this format does not know")
    opaque = kind == _BYTES
    if np.any(ndim > _NDIM_MAX) or np.any(ndim[opaque]) or np.any(counts[opaque] != 1):
        raise CorruptError("manifest has an entry with impossible dimensions or chunks")
    if int(ndim.sum()) != len(shape) or int((2 * ndim * counts).sum()) != len(boxes):
        raise CorruptError("manifest's dimensions do not add up")
    total = int(counts.sum())
    if len(shard) != total or len(row) != total or (total and int(shard.max()) >= shards):
        raise CorruptError(
            "manifest's chunks do not add up or name a shard file that is not listed"
        )
    if np.any(shape < 0) or np.any(boxes < 0):
        raise CorruptError("manifest has a negative dimension")


def _check_entry(entry: Entry) -> None:
    """Refuse chunks outside their tensor; together they may not claim more than the tensor."""
    for chunk in entry.chunks:
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True):
            if offset + size > whole:
                raise CorruptError(f"a chunk of {entry.fqn!r} lies outside its tensor")
    if sum(math.prod(chunk.sizes) for chunk in entry.chunks) > math.prod(entry.shape):
        raise CorruptError(f"chunks of {entry.fqn!r} overlap")


def _u1(values: Sequence[int]) -> Array:
    return np.array(values, dtype="u1")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
