"""What a reader would refuse is not written in the first place."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcp_tiered.errors import InvalidError
from dcp_tiered.format.manifest import (
    Chunk,
    Entry,
    encode_manifest,
)
from dcp_tiered.format.pack import plan_pack
from dcp_tiered.format.plain import from_tagged, to_tagged
from dcp_tiered.format.records import (
    encode_record,
)
from dcp_tiered.format.shardfile import (
    Builder,
    Item,
)
from tests.unit.format.samples import (
    COMMIT,
    HEADER,
    MANIFEST,
)


def test_dimensions_that_overflow_are_refused_without_a_warning() -> None:
    huge = (1 << 62,) * 63 + (0,)
    item = Item(
        fqn="x", dtype="int8", offsets=(0,) * 64, sizes=huge, shape=huge, start=4096, length=0,
        crcs=(),
    )  # fmt: skip
    builder = Builder(HEADER)
    builder.add(item)
    assert builder.finish()  # no bytes: harmless, and numpy's overflow is no warning
    claims = replace(item, sizes=(1 << 62,) * 64, shape=(1 << 62,) * 64)
    builder = Builder(HEADER)
    builder.add(claims)
    with pytest.raises(InvalidError, match="impossible size"):
        builder.finish()


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"rank": 2},
        {"rank": True},
        {"world_size": 0},
        {"local_world_size": 0},
        {"node": "x"},
        {"token": "../x"},
        {"written_by": "x" * 41},
        {"checkpoint_id": "a/b"},
        {"checkpoint_id": "run.json"},
    ],
    ids=str,
)
def test_a_header_that_would_not_read_back_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        Builder(replace(HEADER, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "x"},
        {"sequence": -1},
        {"sequence": 1 << 63},
        {"step": 1.5},
        {"world_size": 0},
        {"supersedes": ("x",)},
        {"launch": "x" * 201},
        {"metadata": {"x": object()}},
        {"metadata": {"x": np.int64(3)}},
        {"shards": (*MANIFEST.head.shards, *MANIFEST.head.shards)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_manifest_that_would_not_read_back_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        encode_manifest(replace(MANIFEST, head=replace(MANIFEST.head, **change)))


def test_chunks_that_overlap_or_name_no_shard_file_are_not_written() -> None:
    whole = Chunk(offsets=(0,), sizes=(4,), shard=0, row=0)
    for chunks in ((whole, whole), (whole._replace(shard=1),), (whole._replace(offsets=(1,)),)):
        entry = Entry(fqn="x", dtype="int8", shape=(4,), chunks=chunks)
        with pytest.raises(InvalidError):
            encode_manifest(replace(MANIFEST, entries=[entry]))


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": -1},
        {"manifest_sha256": "x" * 64},
        {"packs": ()},
        {"placements": COMMIT.placements * 2},
        {"placements": (replace(COMMIT.placements[0], start=9000),)},
        {"committed_by": "../x"},
        {"attempt": ""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_record_that_would_not_read_back_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        encode_record(replace(COMMIT, **change), "0.1")


def test_a_pack_of_the_same_shard_file_twice_is_not_written() -> None:
    row = ("0-" + "a" * 16 + ".shard", 5000, 1)
    with pytest.raises(InvalidError):
        plan_pack("step-1", "0" * 12, [row, row], "0.1")


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"x", 1j, np.float32(1), type],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_data_is_refused_by_type(value: object) -> None:
    with pytest.raises(InvalidError, match=f"holds a {type(value).__name__}"):
        to_tagged({"deep": [(value,)]}, "metadata")


def test_plain_data_nested_too_deep_is_refused_when_written() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    assert from_tagged(to_tagged(value, "metadata")) == value
    with pytest.raises(InvalidError, match="64 levels"):
        to_tagged([value], "metadata")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"start": 4097}, "out of place"),
        ({"crcs": ()}, "0 block checksums"),
        ({"sizes": (5,)}, "dimensions"),
        ({"dtype": "float7"}, "float7 cannot be stored"),
    ],
)
def test_an_item_that_does_not_fit_is_refused(items: dict[str, Any], message: str) -> None:
    item = Item(
        fqn="x", dtype="int8", offsets=(0, 0), sizes=(2, 2), shape=(2, 2), start=4096, length=4,
        crcs=(1,),
    )  # fmt: skip
    with pytest.raises(InvalidError, match=message):
        Builder(HEADER).add(replace(item, **items))


def test_an_extent_of_another_size_than_the_shape_is_refused() -> None:
    builder = Builder(HEADER)
    builder.add(
        Item(fqn="x", dtype="int16", offsets=(0,), sizes=(2,), shape=(2,), start=4096, length=3,
             crcs=(1,))
    )  # fmt: skip
    with pytest.raises(InvalidError, match="size of its shape"):
        builder.finish()
