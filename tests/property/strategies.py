"""What may be saved, drawn at random: shard files as real bytes, manifests, records, plain data."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from awscrt.checksums import crc32c
from hypothesis import strategies as st

from dcp_tiered.format.manifest import Chunk, Entry, Head, Manifest, ShardRef
from dcp_tiered.format.records import Commit, Expired, Fence, PackRef, Placement, Record
from dcp_tiered.format.shardfile import BLOCK_BYTES, DTYPES, Builder, Header, Item, encode_header

# Surrogates included: DCP takes any Python text as a key.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
TOKENS = st.text("0123456789abcdef", min_size=16, max_size=16)
NODES = st.text("0123456789abcdef", min_size=12, max_size=12)
IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,20}", fullmatch=True).filter(
    lambda text: not text.startswith(("run.json", "node.json", "flusher"))
)
ITEMSIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "complex128": 16, "uint8": 1}


@dataclass(frozen=True)
class Thing:
    """One thing to save: what a rank knows before it is placed."""

    fqn: str
    dtype: str | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    data: bytes


@st.composite
def boxes(draw: Callable, dims_max: int = 4, size_max: int = 6) -> tuple[tuple[int, ...], ...]:
    """Draw offsets, sizes and shape of a chunk, 0-d and empty ones included."""
    shape = tuple(draw(st.lists(st.integers(0, size_max), max_size=dims_max)))
    sizes = tuple(draw(st.integers(0, whole)) for whole in shape)
    offsets = tuple(
        draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes, strict=True)
    )
    return offsets, sizes, shape


@st.composite
def things(draw: Callable) -> Thing:
    """Draw a tensor chunk or opaque bytes; now and then one of several blocks."""
    fqn = draw(ANY_TEXT)
    kind = draw(st.sampled_from(["tensor", "bytes", "large"]))
    noise = random.Random(draw(st.integers(0, 1 << 30)))
    if kind == "bytes":
        return Thing(fqn, None, (), (), (), noise.randbytes(draw(st.integers(0, 200))))
    if kind == "large":
        edges = [65535, 65536, 65537, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 600_000]
        size = draw(st.sampled_from(edges))
        return Thing(fqn, "uint8", (3,), (size,), (size + 7,), noise.randbytes(size))
    offsets, sizes, shape = draw(boxes())
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    data = noise.randbytes(math.prod(sizes) * ITEMSIZES[dtype])
    return Thing(fqn, dtype, offsets, sizes, shape, data)


@st.composite
def headers(draw: Callable) -> Header:
    """Draw who wrote a shard file."""
    world_size = draw(st.integers(1, 10_000_000))
    return Header(
        checkpoint_id=draw(IDS),
        rank=draw(st.integers(0, min(world_size, 10_000_000) - 1)),
        world_size=world_size,
        local_world_size=draw(st.none() | st.integers(1, 64)),
        node=draw(NODES),
        token=draw(TOKENS),
        written_by=draw(st.text(max_size=40)),
        policy_sha256=draw(st.none() | st.text("0123456789abcdef", min_size=64, max_size=64)),
    )


@dataclass(frozen=True)
class ShardBytes:
    """A shard file as it lies on a disk, and what the builder said about it."""

    data: bytes
    items: list[Item]
    footer_start: int
    crc: int


def shard_bytes(header: Header, saved: list[Thing]) -> ShardBytes:
    """Write a shard file the way a writer does, into memory."""
    builder = Builder(header)
    data = bytearray(encode_header(header))
    items = []
    for thing in saved:
        start = builder.next_start(len(thing.data))
        blocks = range(0, len(thing.data), BLOCK_BYTES)
        item = Item(
            fqn=thing.fqn,
            dtype=thing.dtype,
            offsets=thing.offsets,
            sizes=thing.sizes,
            shape=thing.shape,
            start=start,
            length=len(thing.data),
            crcs=[crc32c(thing.data[at : at + BLOCK_BYTES]) for at in blocks],
        )
        builder.add(item)
        items.append(item)
        data += bytes(start - len(data)) + thing.data
    footer_start = builder.cursor
    data += builder.finish()
    return ShardBytes(bytes(data), items, footer_start, builder.crc)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=6)
)
_KEYS = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
PLAIN = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def _entries(draw: Callable, fqn: str, shards: int) -> Entry:
    where = st.tuples(st.integers(0, shards - 1), st.integers(0, 2**32 - 1))
    if draw(st.booleans()):
        shard, row = draw(where)
        chunk = Chunk(offsets=(), sizes=(), shard=shard, row=row)
        return Entry(fqn=fqn, dtype=None, chunks=(chunk,))
    shape = draw(
        st.sampled_from([(), (0,), (0, 16), (4, 0, 3), (1 << 40, 1 << 10), (1 << 61, 0, 1 << 61)])
        | st.lists(st.integers(0, 50), max_size=5).map(tuple)
    )
    cuts = [0, shape[0]] if shape else []
    if shape:
        cuts = sorted({*cuts, *draw(st.lists(st.integers(0, shape[0]), max_size=3))})
    spans = list(pairwise(cuts)) if len(cuts) > 1 else [(0, 0)]
    chunks = []
    for start, end in spans:
        shard, row = draw(where)
        rest = tuple(shape[1:])
        sizes = (end - start, *rest) if shape else ()
        offsets = (start, *(0 for _ in rest)) if shape else ()
        chunks.append(Chunk(offsets=offsets, sizes=sizes, shard=shard, row=row))
    return Entry(
        fqn=fqn,
        dtype=draw(st.sampled_from([name for name in DTYPES if name != "complex128"])),
        shape=tuple(shape),
        requires_grad=draw(st.booleans()),
        chunks=tuple(chunks),
    )


@st.composite
def manifests(draw: Callable) -> Manifest:
    """Draw a whole checkpoint."""
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=3, unique=True))
    shards = tuple(
        ShardRef(
            name=f"{rank}-{token}.shard",
            node=draw(NODES),
            length=draw(st.integers(5000, 1 << 61)),
            crc32c=draw(st.integers(0, 2**32 - 1)),
            footer_start=draw(st.integers(4096, 4999)),
        )
        for rank, token in enumerate(tokens)
    )
    fqns = draw(st.lists(ANY_TEXT, max_size=5, unique=True))
    head = Head(
        checkpoint_id=draw(IDS),
        attempt=draw(TOKENS),
        launch=draw(st.text(max_size=30)),
        node=draw(NODES),
        sequence=draw(st.integers(0, (1 << 62) - 1)),
        step=draw(st.none() | st.integers(-5, 1 << 60)),
        metadata=draw(PLAIN),
        supersedes=tuple(draw(st.lists(TOKENS, max_size=2))),
        world_size=draw(st.integers(1, 100_000)),
        written_by={"dcp_tiered": "0.1", "torch": "2.13"},
        shards=shards,
    )
    entries = [draw(_entries(fqn, len(shards))) for fqn in fqns]
    return Manifest(head=head, entries=entries, planner_data=draw(PLAIN))


@st.composite
def records(draw: Callable) -> Record:
    """Draw any kind of record."""
    checkpoint_id = draw(IDS)
    kind = draw(st.sampled_from(["commit", "fence", "expired"]))
    if kind == "expired":
        return Expired(checkpoint_id=checkpoint_id)
    if kind == "fence":
        return Fence(checkpoint_id=checkpoint_id, attempts=tuple(draw(st.lists(TOKENS))))
    packs = tuple(
        PackRef(
            name=f"packs/{draw(NODES)}-{token}.pack",
            length=draw(st.integers(1, (1 << 62) - 1)),
            crc32c=draw(st.integers(0, 2**32 - 1)),
        )
        for token in draw(st.lists(TOKENS, min_size=1, max_size=3, unique=True))
    )
    placements = tuple(
        Placement(
            shard=f"{rank}-{draw(TOKENS)}.shard",
            pack=(pack := draw(st.integers(0, len(packs) - 1))),
            start=draw(st.integers(0, packs[pack].length - 1)),
        )
        for rank in range(draw(st.integers(0, 4)))
    )
    return Commit(
        checkpoint_id=checkpoint_id,
        attempt=draw(TOKENS),
        sequence=draw(st.integers(0, (1 << 62) - 1)),
        step=draw(st.none() | st.integers(-5, 1 << 60)),
        manifest_sha256=draw(TOKENS) * 4,
        manifest_length=draw(st.integers(0, 1 << 40)),
        packs=packs,
        placements=placements,
        bytes_stored=draw(st.integers(0, 1 << 60)),
        committed_by=draw(NODES),
        committed_at=draw(st.text(max_size=40)),
    )
