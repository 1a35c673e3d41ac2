"""Shard file: what one rank writes for one attempt. Placement, footer, checksums, and back.

    0             magic, version u32, header length u32, CRC32C of the rest of the page u32,
                  header JSON, zeros up to one page
    page-aligned  items: one of at least 64 KiB starts on a 4096-byte boundary, smaller ones follow
                  each other at 64-byte alignment; raw row-major bytes of the logical values
    footer        see footer.py; one row per item

Each item carries CRC32C per 256 KiB block, counted from the item's start, so that a part of an item
can be verified. Checksums of items and of the whole file follow by combination.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format import layout
from dcp_tiered.format.boxes import (
    BYTES,
    NDIM_MAX,
    TENSOR,
    byte_counts,
    check_inside,
    exclusive_sum,
    gather,
)
from dcp_tiered.format.columns import (
    Array,
    canonical_json,
    decode,
    encode,
    pack_strings,
    parse_json,
    take,
    unpack_strings,
)
from dcp_tiered.format.fields import (
    CRC_MAX,
    integer,
    must_read_back,
    optional_integer,
    text,
)
from dcp_tiered.format.footer import (
    VERSION,
    Trailer,
    check_features,
    decode_footer,
    encode_footer,
)

PAGE_BYTES = 4096
BLOCK_BYTES = 256 * 1024
LARGE_BYTES = 64 * 1024
SMALL_ALIGNMENT = 64
END_MAGIC = b"DCPTEND1"
_MAGIC = b"DCPTSHR1"
_PREFIX = struct.Struct("<8sIII")
_WORLD_MAX = 10**7  # ranks in names have seven digits

# Position is the code on disk: append only.
_DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "complex32": 4,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
DTYPES = tuple(_DTYPE_BYTES)
ITEMSIZES = np.array(list(_DTYPE_BYTES.values()), dtype="i8")
_CODES = {name: code for code, name in enumerate(DTYPES)}


def dtype_code(name: str) -> int:
    """Return the code on disk of a torch dtype's name, such as `bfloat16`.

    Raises:
        InvalidError: The format has no code for it.
    """
    code = _CODES.get(name)
    if code is None:
        raise InvalidError(
            f"dtype {name} cannot be stored", None, None, f"Use one of {', '.join(DTYPES)}."
        )
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who wrote a shard file."""

    checkpoint_id: str
    rank: int
    world_size: int
    local_world_size: int | None
    """Ranks of the job on this node, where the launcher said so."""
    node: str
    token: str
    written_by: str
    """Version of dcp_tiered."""
    policy_sha256: str | None = None
    """Of the residency policy under which it was saved, None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing in a shard file: a chunk of a tensor, or opaque bytes when `dtype` is None."""

    fqn: str
    dtype: str | None
    offsets: tuple[int, ...] = ()
    """Where the chunk lies in the whole tensor, one number per dimension."""
    sizes: tuple[int, ...] = ()
    """Shape of the chunk."""
    shape: tuple[int, ...] = ()
    """Shape of the whole tensor."""
    start: int
    """First byte in the shard file."""
    length: int
    """Bytes."""
    crcs: Sequence[int]
    """CRC32C of each 256 KiB block, counted from `start`."""


Small = tuple[str, str | None, bytes, Sequence[int], Sequence[int], Sequence[int]]
"""An item of less than 64 KiB with its bytes: key, dtype or None, bytes, offsets, sizes, shape.

A bare tuple: a shard file may have a million, and a named one takes five times as long to make.
"""


def encode_header(header: Header) -> bytes:
    """Return the first page of a shard file, 4096 bytes.

    Raises:
        InvalidError: A field is not what a reader accepts.
    """
    policy = {} if header.policy_sha256 is None else {"policy_sha256": header.policy_sha256}
    fields = canonical_json(
        {
            **policy,
            "checkpoint_id": layout.check_checkpoint_id(header.checkpoint_id),
            "rank": header.rank,
            "world_size": header.world_size,
            "local_world_size": header.local_world_size,
            "node": header.node,
            "token": header.token,
            "written_by": header.written_by,
            "requires": [],
        }
    )
    rest = fields.ljust(PAGE_BYTES - _PREFIX.size, b"\0")
    page = _PREFIX.pack(_MAGIC, VERSION, len(fields), crc32c(rest)) + rest
    with must_read_back("shard file header"):
        if decode_header(page) != header:
            raise CorruptError("it is read as another one")
    return page


def decode_header(page: bytes) -> Header:
    """Decode the first page of a shard file.

    Raises:
        CorruptError: It is not the start of one, or damaged.
        InvalidError: It needs a newer version.
    """
    if len(page) < PAGE_BYTES:
        raise CorruptError("shard file is shorter than its header")
    magic, version, length, crc = _PREFIX.unpack_from(page)
    if magic != _MAGIC:
        raise CorruptError("not a shard file: wrong magic")
    if length > PAGE_BYTES - _PREFIX.size:
        raise CorruptError("shard file header exceeds one page")
    # A newer version may sum otherwise, so it is refused by its number first.
    check_features(version, [], "a newer version")
    if crc32c(page[_PREFIX.size : PAGE_BYTES]) != crc:
        raise CorruptError("shard file header checksum mismatch")
    fields = parse_json(page[_PREFIX.size : _PREFIX.size + length])
    check_features(version, fields.get("requires"), fields.get("written_by"))
    world_size = integer(fields, "world_size", 1, _WORLD_MAX)
    rank, token = integer(fields, "rank", 0, world_size - 1), text(fields, "token", 16)
    layout.check_shard_name(f"{rank}-{token}.shard")
    return Header(
        checkpoint_id=layout.check_stored_id(fields.get("checkpoint_id")),
        rank=rank,
        world_size=world_size,
        local_world_size=optional_integer(fields, "local_world_size", 1, _WORLD_MAX),
        node=layout.check_node(fields.get("node")),
        token=token,
        written_by=text(fields, "written_by", 40),
        policy_sha256=layout.check_optional_sha256(fields.get("policy_sha256")),
    )


def place(cursor: int, length: int) -> int:
    """Return where an item of `length` bytes starts when the file ends at `cursor` so far."""
    alignment = PAGE_BYTES if length >= LARGE_BYTES else SMALL_ALIGNMENT
    return cursor + -cursor % alignment


def block_count(length: int) -> int:
    """Return how many checksummed blocks an item of `length` bytes has."""
    return -(-length // BLOCK_BYTES)


def join_run(parts: Sequence[bytes]) -> bytes:
    """Return small items as they lie in a file from some aligned byte on, with the gaps."""
    padded = [part + bytes(-len(part) % SMALL_ALIGNMENT) for part in parts[:-1]]
    return b"".join((*padded, *parts[-1:]))


def item_crc(crcs: Sequence[int], length: int) -> int:
    """Combine block checksums into the checksum of the item."""
    total = 0
    for number, crc in enumerate(crcs):
        total = combine_crc32c(total, crc, min(BLOCK_BYTES, length - number * BLOCK_BYTES))
    return total


class Builder:
    """Collects the items of one shard file in the order in which they are written.

    The caller writes `encode_header`'s page at 0, each item at the start that `next_start` returns,
    and the bytes of `finish` at `cursor`. Gaps between items read as zeros.
    """

    def __init__(self, header: Header) -> None:
        page = encode_header(header)
        self.cursor = len(page)
        """Bytes so far."""
        self.crc = crc32c(page)
        """CRC32C of these bytes."""
        # Flat columns, not items: a shard file may have a million of them.
        self._fqns: list[str] = []
        self._small = {name: bytearray() for name in ("kind", "dtype", "ndim")}
        self._large = {name: array("q") for name in ("start", "length", "dims")}
        self._crcs = array("I")

    def next_start(self, length: int) -> int:
        """Return where the next item goes if it has `length` bytes."""
        return place(self.cursor, length)

    def add(self, item: Item) -> None:
        """Take note of an item that lies where `next_start` said.

        Raises:
            InvalidError: It lies elsewhere, its checksums do not cover it, or it is no tensor chunk
                and no opaque bytes either.
        """
        if item.start != place(self.cursor, item.length):
            raise InvalidError(f"item {item.fqn!r} is out of place")
        if len(item.crcs) != block_count(item.length):
            raise InvalidError(f"item {item.fqn!r} has {len(item.crcs)} block checksums")
        ndim = len(item.sizes)
        if not len(item.offsets) == ndim == len(item.shape) <= NDIM_MAX:
            raise InvalidError(f"item {item.fqn!r} has dimensions that do not match")
        self._small["kind"].append(BYTES if item.dtype is None else TENSOR)
        self._small["dtype"].append(0 if item.dtype is None else dtype_code(item.dtype))
        self._small["ndim"].append(ndim)
        self._large["start"].append(item.start)
        self._large["length"].append(item.length)
        for part in (item.offsets, item.sizes, item.shape):
            self._large["dims"].extend(part)
        self._crcs.extend(item.crcs)
        self._fqns.append(item.fqn)
        self._grow(item.start, item_crc(item.crcs, item.length), item.length)

    def add_run(self, run: Sequence[Small], crcs: Sequence[int], crc: int) -> None:
        """Take note of small items that lie one behind the other from `next_start(0)` on.

        Args:
            run: The items.
            crcs: CRC32C of each item that is not empty.
            crc: CRC32C of what `join_run` returns for the items.

        Raises:
            InvalidError: One is not small, the checksums do not cover them, or one is no tensor
                chunk and no opaque bytes either.
        """
        fqns, dtypes, parts, offsets, sizes, shapes = zip(*run, strict=True)
        lengths = np.fromiter(map(len, parts), dtype="i8", count=len(parts))
        if int(lengths.max()) >= LARGE_BYTES or np.count_nonzero(lengths) != len(crcs):
            raise InvalidError(f"items from {fqns[0]!r} on are not small or not all summed")
        ndim = [len(one) for one in sizes]
        if [len(one) for one in offsets] != ndim or [len(one) for one in shapes] != ndim:
            raise InvalidError(f"items from {fqns[0]!r} on have dimensions that do not match")
        codes = {name: 0 if name is None else dtype_code(name) for name in set(dtypes)}
        self._small["kind"] += bytes([BYTES if name is None else TENSOR for name in dtypes])
        self._small["dtype"] += bytes([codes[name] for name in dtypes])
        self._small["ndim"] += bytes(ndim)
        start = self.next_start(0)
        starts = start + exclusive_sum(lengths + -lengths % SMALL_ALIGNMENT)
        self._large["start"].frombytes(starts.tobytes())
        self._large["length"].frombytes(lengths.tobytes())
        boxes = chain.from_iterable(zip(offsets, sizes, shapes, strict=True))
        self._large["dims"].extend(chain.from_iterable(boxes))
        self._crcs.extend(crcs)
        self._fqns += fqns
        self._grow(start, crc, int(starts[-1] + lengths[-1]) - start)

    def _grow(self, start: int, crc: int, length: int) -> None:
        """Move the end of the file behind bytes of a checksum; a gap before them is of zeros."""
        gap = start - self.cursor
        if gap:
            self.crc = combine_crc32c(self.crc, crc32c(bytes(gap)), gap)
        self.crc = combine_crc32c(self.crc, crc, length)
        self.cursor = start + length

    def finish(self) -> bytes:
        """Return footer and trailer, parsed back before they are handed out.

        Raises:
            InvalidError: An item's extent does not have the size of its shape, or the like.
        """
        raw = self._encode_index()
        with must_read_back("footer"):
            if parse_index(raw, self.cursor).fqns != self._fqns:
                raise CorruptError("it is read as another one")
        tail = encode_footer(raw, self.cursor, END_MAGIC)
        self.crc = combine_crc32c(self.crc, crc32c(tail), len(tail))
        self.cursor += len(tail)
        return tail

    def _encode_index(self) -> bytes:
        names, name_lengths = pack_strings(self._fqns)
        columns = {name: np.frombuffer(data, dtype="u1") for name, data in self._small.items()}
        columns |= {name: np.array(data, dtype="<i8") for name, data in self._large.items()}
        columns |= {
            "crcs": np.array(self._crcs, dtype="<u4"),
            "name_lengths": name_lengths,
            "names": names,
        }
        meta = {"version": VERSION, "requires": [], "items": len(self._fqns), "crc32c": self.crc}
        return encode(meta, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The checked footer of a shard file; row i of every array is about item i."""

    fqns: list[str]
    kind: Array
    """0 tensor, 1 bytes; shape (n,), u1."""
    dtype: Array
    """Code; shape (n,), u1."""
    start: Array
    """Shape (n,), i8."""
    length: Array
    """Shape (n,), i8."""
    ndim: Array
    """Shape (n,), u1."""
    dims: Array
    """Offsets, sizes and global shape of every item, end to end; i8."""
    crcs: Array
    """Block checksums of all items, end to end; u4."""
    crc: int
    """CRC32C of all bytes before the footer."""
    dims_start: Array = field(repr=False)
    crcs_start: Array = field(repr=False)

    def require(
        self, row: int, fqn: str, offsets: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """Check what another object said of a row, before anything uses the row.

        Args:
            row: Position in this footer.
            fqn: The key it should hold.
            offsets: Where the chunk should lie in its tensor, None for opaque bytes.

        Returns:
            The shape of the chunk, None for opaque bytes.

        Raises:
            CorruptError: There is no such row, or it holds something else.
        """
        if not 0 <= row < len(self.fqns) or self.fqns[row] != fqn:
            raise CorruptError(f"row {row} of a shard file is not {fqn!r}")
        found: tuple[int, ...] | None = None
        sizes: tuple[int, ...] | None = None
        if not self.is_bytes(row):
            ndim, start = self.ndim.item(row), self.dims_start.item(row)
            flat = self.dims[start : start + 2 * ndim].tolist()
            found, sizes = tuple(flat[:ndim]), tuple(flat[ndim:])
        if found != offsets:
            raise CorruptError(f"row {row} of a shard file is another part of {fqn!r}")
        return sizes

    def is_bytes(self, row: int) -> bool:
        """Tell whether an item is opaque bytes."""
        return bool(self.kind.item(row) == BYTES)

    def box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return offsets, sizes and global shape of a tensor item."""
        ndim, start = self.ndim.item(row), self.dims_start.item(row)
        flat = self.dims[start : start + 3 * ndim].tolist()
        return tuple(flat[:ndim]), tuple(flat[ndim : 2 * ndim]), tuple(flat[2 * ndim :])

    def block_crcs(self, row: int) -> Array:
        """Return the block checksums of an item."""
        start = int(self.crcs_start[row])
        return self.crcs[start : start + block_count(int(self.length[row]))]


def decode_index(trailer: Trailer, stored: bytes) -> Index:
    """Decode and check the footer of a shard file.

    Raises:
        CorruptError: It is damaged or describes something that cannot be.
        InvalidError: It needs a newer version.
    """
    return parse_index(decode_footer(trailer, stored), trailer.start)


def file_crc(index: Index, tail: bytes) -> int:
    """Return the checksum of a whole shard file from its index and its footer and trailer bytes."""
    return int(combine_crc32c(index.crc, crc32c(tail), len(tail)))


def parse_index(raw: bytes, footer_start: int) -> Index:
    """Check a raw index against the file it belongs to; see `decode_index` for the errors."""
    meta, columns = decode(raw)
    check_features(meta.get("version"), meta.get("requires"), meta.get("written_by"))
    count, crc = integer(meta, "items"), integer(meta, "crc32c", 0, CRC_MAX)
    rows = {
        name: take(columns, name, dtype)
        for name, dtype in (
            ("kind", "u1"),
            ("dtype", "u1"),
            ("start", "i8"),
            ("length", "i8"),
            ("ndim", "u1"),
        )
    }
    if any(len(array) != count for array in rows.values()):
        raise CorruptError("footer columns differ in length")
    dims, crcs = take(columns, "dims", "i8"), take(columns, "crcs", "u4")
    _check_extents(rows["start"], rows["length"], footer_start)
    _check_boxes(rows, dims)
    blocks = -(-rows["length"] // BLOCK_BYTES)
    if int(blocks.sum()) != len(crcs):
        raise CorruptError("block checksums do not cover the items")
    fqns = unpack_strings(take(columns, "names", "u1"), take(columns, "name_lengths", "u4"), count)
    return Index(
        fqns=fqns,
        dims=dims,
        crcs=crcs,
        crc=crc,
        dims_start=exclusive_sum(3 * rows["ndim"].astype("i8")),
        crcs_start=exclusive_sum(blocks),
        **rows,
    )


def _check_extents(start: Array, length: Array, footer_start: int) -> None:
    """Refuse extents that are negative, out of alignment, outside the item area, or overlap."""
    if not len(start):
        return
    if int(start.min()) < PAGE_BYTES or int(length.min()) < 0:
        raise CorruptError("an item starts before the item area or has a negative length")
    if int(start.max()) > footer_start or int(length.max()) > footer_start:
        raise CorruptError("an item reaches past the item area")
    end = start + length  # no overflow: both are at most footer_start, which a trailer bounds
    if int(end.max()) > footer_start:
        raise CorruptError("an item reaches past the item area")
    alignment = np.where(length >= LARGE_BYTES, PAGE_BYTES, SMALL_ALIGNMENT)
    if np.any(start % alignment):
        raise CorruptError("an item is not aligned")
    filled = length > 0
    order = np.argsort(start[filled], kind="stable")
    if np.any(start[filled][order][1:] < end[filled][order][:-1]):
        raise CorruptError("items overlap")


def _check_boxes(rows: dict[str, Array], dims: Array) -> None:
    """Refuse chunks that do not lie in their tensor or whose size is not that of their extent."""
    kind, ndim = rows["kind"], rows["ndim"]
    if np.any(kind > BYTES) or np.any(rows["dtype"] >= len(DTYPES)):
        raise CorruptError("an item has a kind or dtype that this format does not know")
    if np.any(ndim > NDIM_MAX) or np.any(ndim[kind == BYTES]):
        raise CorruptError("an item has an impossible number of dimensions")
    if int(ndim.sum(dtype="i8")) * 3 != len(dims):
        raise CorruptError("dimensions in the footer do not add up")
    begin = exclusive_sum(3 * ndim.astype("i8"))
    for value in np.unique(ndim[kind == TENSOR]).tolist():
        chosen = np.flatnonzero((kind == TENSOR) & (ndim == value))
        boxes = gather(dims, begin[chosen], 3 * value).reshape(len(chosen), 3, value)
        check_inside(boxes[:, 0], boxes[:, 1], boxes[:, 2])
        lengths = byte_counts(boxes[:, 1], ITEMSIZES[rows["dtype"][chosen]])
        if np.any(lengths != rows["length"][chosen]):
            raise CorruptError("a chunk's extent does not have the size of its shape")
