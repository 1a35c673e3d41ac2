"""A million items must encode and decode in seconds: counted in bytes and calls, not in time."""

import cProfile
import pstats
from collections.abc import Callable

import pytest

from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.manifest import (
    Chunk,
    Entry,
    Manifest,
    decode_head,
    decode_manifest,
    encode_manifest,
)
from dcp_tiered.format.shardfile import END_MAGIC, Builder, Index, Item, decode_index
from tests.unit.format.samples import HEADER, MANIFEST, little_memory


def _builder(count: int) -> Builder:
    builder = Builder(HEADER)
    for number in range(count):
        builder.add(
            Item(
                fqn=f"layers.{number // 10}.w{number % 10}",
                dtype="float32",
                offsets=(0, 0),
                sizes=(4, 4),
                shape=(8, 4),
                start=builder.next_start(64),
                length=64,
                crcs=(number * 2654435761 % (1 << 32),),
            )
        )
    return builder


def _read(tail: bytes, start: int) -> Index:
    trailer = decode_trailer(tail[-TRAILER_BYTES:], start + len(tail), END_MAGIC)
    return decode_index(trailer, tail[: trailer.stored_length])


def _manifest(count: int) -> Manifest:
    names = [f"layers.{number // 10}.w{number % 10}" for number in range(count)]
    entries = [
        Entry(
            fqn=name,
            dtype="float32",
            shape=(4, 4),
            chunks=(Chunk(offsets=(0, 0), sizes=(4, 4), shard=0, row=number),),
        )
        for number, name in enumerate(names)
    ]
    planner_data = {name: tuple(name.split(".")) for name in names}
    return Manifest(head=MANIFEST.head, entries=entries, planner_data=planner_data)


def test_an_index_of_100k_items_is_small_and_comes_back() -> None:
    count = 100_000
    builder = _builder(count)
    start = builder.cursor
    tail = builder.finish()
    index = _read(tail, start)
    assert len(tail) / count < 100
    assert len(index.fqns) == count
    assert index.fqns[-1] == "layers.9999.w9"
    assert index.box(count - 1) == ((0, 0), (4, 4), (8, 4))
    assert index.block_crcs(count - 1).tolist() == [(count - 1) * 2654435761 % (1 << 32)]


def test_a_manifest_of_100k_items_is_small_and_comes_back() -> None:
    manifest = _manifest(100_000)
    stored = encode_manifest(manifest)
    assert len(stored) / 100_000 < 100
    assert decode_manifest(stored) == manifest


def _calls(work: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return pstats.Stats(profile).total_calls


@pytest.mark.parametrize(
    ("name", "calls_max"),
    [("build", 40), ("finish", 5), ("read", 2), ("encode", 20), ("decode", 20)],
)
def test_calls_grow_with_the_items_and_no_faster(name: str, calls_max: int) -> None:
    def work(count: int) -> Callable[[], object]:
        if name in ("encode", "decode"):
            manifest = _manifest(count)
            stored = encode_manifest(manifest)
            return {
                "encode": lambda: encode_manifest(manifest),
                "decode": lambda: decode_manifest(stored),
            }[name]
        builder = _builder(count)
        if name == "read":
            start = builder.cursor
            tail = builder.finish()
            return lambda: _read(tail, start)
        return {"build": lambda: _builder(count), "finish": builder.finish}[name]

    few, many = _calls(work(1000)), _calls(work(5000))
    assert (many - few) / 4000 < calls_max


def test_reading_the_head_does_not_touch_the_items() -> None:
    few, many = (encode_manifest(_manifest(count)) for count in (10, 20_000))
    assert _calls(lambda: decode_head(many)) <= _calls(lambda: decode_head(few)) + 5
    with little_memory(1 << 20):
        assert decode_head(many) == MANIFEST.head


def test_a_tensor_of_128_gib_of_zeros_fits_into_an_index() -> None:
    """Its checksums are megabytes of one number, which compress beyond belief."""
    blocks = 1 << 19
    length = blocks << 18
    builder = Builder(HEADER)
    builder.add(
        Item(
            fqn="zeros",
            dtype="uint8",
            offsets=(0,),
            sizes=(length,),
            shape=(length,),
            start=4096,
            length=length,
            crcs=[0] * blocks,
        )
    )
    start = builder.cursor
    index = _read(builder.finish(), start)
    assert len(index.block_crcs(0)) == blocks
