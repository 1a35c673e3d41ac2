"""Hostile fields behind right checksums end in CorruptError or InvalidError."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format import columns, layout
from dcp_tiered.format.manifest import (
    decode_manifest,
    encode_manifest,
)
from dcp_tiered.format.records import (
    Commit,
    Expired,
    Fence,
    decode_record,
    encode_record,
)
from dcp_tiered.format.shardfile import (
    decode_header,
    parse_index,
)
from tests.unit.format.samples import (
    MANIFEST,
    RECORD,
    REFUSED,
    SHARD,
    STORED,
    TAIL,
    index_blob,
    little_memory,
    manifest_bytes,
    read_record,
    read_tail,
    summed,
)


def test_the_unchanged_index_is_read() -> None:
    assert parse_index(index_blob(lambda *_: None), SHARD.footer_start).fqns == ["w", "b", "0d"]


HUGE = [1 << 62, (1 << 63) - 1]
CELLS = [
    *(("start", 0, value) for value in (-1, 0, 64, 4095, 4097, 1 << 40, *HUGE)),
    ("start", 1, 4096),  # overlaps the first item
    *(("length", 0, value) for value in (-1, 15, 17, 1 << 40, *HUGE)),
    ("length", 1, 1 << 20),
    *(("kind", 0, value) for value in (1, 2, 255)),
    *(("dtype", 0, value) for value in (1, 22, 255)),
    *(("ndim", 0, value) for value in (0, 1, 65, 255)),
    ("ndim", 1, 1),
    *(("dims", 0, value) for value in (-1, 1, *HUGE)),
    *(("dims", 2, value) for value in (-1, 1, 3, *HUGE)),
    *(("dims", 5, value) for value in (-1, 3, -(1 << 63))),
    *(("name_lengths", 0, value) for value in (0, 2, 2**32 - 1)),
    ("names", 0, 0xFF),
]


@pytest.mark.parametrize(("name", "row", "value"), CELLS)
def test_an_index_with_an_impossible_number_is_refused(name: str, row: int, value: int) -> None:
    def change(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name][row] = value

    with little_memory(), pytest.raises(CorruptError):
        parse_index(index_blob(change), SHARD.footer_start)


@pytest.mark.parametrize("name", ["kind", "start", "dims", "crcs", "names", "name_lengths"])
@pytest.mark.parametrize("how", ["missing", "short", "long", "other type"])
def test_an_index_with_a_wrong_column_is_refused(name: str, how: str) -> None:
    def change(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        array = arrays.pop(name)
        if how == "short":
            arrays[name] = array[:-1]
        elif how == "long":
            arrays[name] = np.concatenate((array, array[:1]))
        elif how == "other type":
            arrays[name] = array.astype("<u4" if array.dtype.itemsize != 4 else "<i8")

    with pytest.raises(CorruptError):
        parse_index(index_blob(change), SHARD.footer_start)


@pytest.mark.parametrize("name", ["items", "crc32c", "version", "requires"])
@pytest.mark.parametrize(
    "value", [None, -1, True, 1.5, "3", [], {}, [1], 1 << 80, 10**4000], ids=lambda v: str(v)[:9]
)
def test_an_index_with_a_wrong_header_is_refused(name: str, value: object) -> None:
    if (name, value) == ("requires", []):
        pytest.skip("what it should be")

    def change(meta: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        meta[name] = value

    with pytest.raises(REFUSED):
        parse_index(index_blob(change), SHARD.footer_start)


def test_the_unchanged_manifest_is_read() -> None:
    assert decode_manifest(manifest_bytes(lambda *_: None)) == MANIFEST


MANIFEST_CELLS = [
    *(("shape", 0, value) for value in (-1, 1, *HUGE)),
    *(("boxes", 0, value) for value in (-1, 1, *HUGE)),
    *(("boxes", 2, value) for value in (-1, 3, *HUGE)),
    ("boxes", 7, 3),  # reaches past the tensor
    ("boxes", 3, 4),  # covers the other chunk too
    *(("chunks", 0, value) for value in (0, 1, 3, 2**32 - 1)),
    *(("chunks", 1, value) for value in (0, 2)),
    *(("shard", 0, value) for value in (1, 2**32 - 1)),
    *(("kind", 0, value) for value in (1, 2)),
    ("dtype", 0, 255),
    *(("ndim", 0, value) for value in (0, 1, 3, 65, 255)),
    ("name_lengths", 1, 2),
    ("names", 0, ord("b")),  # the other key's name
    ("planner", 0, ord("[")),
]


@pytest.mark.parametrize(("name", "row", "value"), MANIFEST_CELLS)
def test_a_manifest_with_an_impossible_number_is_refused(name: str, row: int, value: int) -> None:
    def change(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name][row] = value

    with little_memory(), pytest.raises(CorruptError):
        decode_manifest(manifest_bytes(change))


BAD_NAMES = [
    "",
    ".",
    "..",
    "../1-aaaaaaaaaaaaaaaa.shard",
    "/etc/passwd",
    "1-aaaaaaaaaaaaaaaa.shard/",
    "a/1-aaaaaaaaaaaaaaaa.shard",
    "1-AAAAAAAAAAAAAAAA.shard",
    "01-aaaaaaaaaaaaaaaa.shard",
    "-1-aaaaaaaaaaaaaaaa.shard",
    "1-aaaaaaaaaaaaaaaa.shard\n",
    "1-aaaaaaaaaaaaaaaa.shard\0",
    "\u0661-aaaaaaaaaaaaaaaa.shard",
    "packs/../000000000000-eeeeeeeeeeeeeeee.pack",
    "packs/000000000000-eeeeeeeeeeeeeeee.pack/../x",
    "manifest-../../x.json",
    "x" * 10_000,
    None,
    1,
    [],
    {},
    True,
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda v: ascii(v)[:30])
@pytest.mark.parametrize(
    "check",
    [
        layout.check_attempt,
        layout.check_node,
        layout.check_pack_name,
        layout.check_sha256,
        layout.check_shard_name,
        layout.check_stored_id,
    ],
)
def test_an_odd_name_from_storage_is_refused(check: Callable, name: object) -> None:
    if check is layout.check_stored_id and isinstance(name, str) and layout.is_checkpoint_id(name):
        pytest.skip("a checkpoint may be called so")
    with pytest.raises(CorruptError):
        check(name)


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda v: ascii(v)[:30])
def test_an_odd_name_in_a_manifest_or_record_is_refused(name: object) -> None:
    def change(meta: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        meta["shards"][0][0] = name

    with pytest.raises(CorruptError):
        decode_manifest(manifest_bytes(change))
    fields = json.loads(RECORD)
    fields["packs"][0]["name"] = name
    with pytest.raises(CorruptError):
        read_record(summed(fields))


@pytest.mark.parametrize("name", ["run.json", "node.json", "flusher.lock", "flusher.log"])
def test_a_file_beside_the_checkpoints_is_no_checkpoint_id(name: str) -> None:
    with pytest.raises(InvalidError, match="not a plain name"):
        layout.check_checkpoint_id(name)
    with pytest.raises(CorruptError):
        layout.check_stored_id(name)


ODD_VALUES = [None, True, -1, 1.5, "x", [], {}, [[]], {"t": 1}, 1 << 64, "..", [None]]


@pytest.mark.parametrize("field", sorted(columns.decode_meta(
    STORED.partition(b"\n")[2], json.loads(STORED.partition(b"\n")[0])["raw_bytes"]
)))  # fmt: skip
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda v: str(v)[:12])
def test_an_odd_value_in_a_manifest_is_refused_or_harmless(field: str, value: object) -> None:
    def change(meta: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        meta[field] = value

    try:
        found = decode_manifest(manifest_bytes(change))
    except REFUSED:
        return
    assert getattr(found.head, field) in (value, (), {})
    assert field in ("metadata", "supersedes", "step", "launch", "checkpoint_id", "written_by")


@pytest.mark.parametrize("field", sorted(json.loads(RECORD)))
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda v: str(v)[:12])
def test_an_odd_value_in_a_record_is_refused_or_harmless(field: str, value: object) -> None:
    fields = json.loads(RECORD) | {field: value}
    try:
        found = read_record(json.dumps(fields).encode() if field == "crc32c" else summed(fields))
    except REFUSED:
        return
    assert field in ("written_by", "step", "committed_at", "placements", "requires")
    assert isinstance(found, Commit)


def test_a_record_of_another_checkpoint_is_refused() -> None:
    with pytest.raises(CorruptError, match="is about 'step-1'"):
        decode_record(RECORD, "step-2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requires": ["striping"]}, r"written by dcp_tiered '0\.1', needs striping"),
        ({"version": 2}, r"written by dcp_tiered '0\.1', needs format version 2"),
    ],
)
def test_what_needs_a_newer_version_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidError, match=message) as caught:
        decode_manifest(manifest_bytes(lambda *_: None, **change))
    assert "pip install -U" in (caught.value.hint or "")
    with pytest.raises(InvalidError, match=message):
        read_record(summed(json.loads(RECORD) | change))

    def in_footer(meta: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        meta.update(change | {"written_by": "0.1"})

    with pytest.raises(InvalidError, match=message):
        parse_index(index_blob(in_footer), SHARD.footer_start)


def test_a_newer_shard_file_is_refused_whatever_its_header_looks_like() -> None:
    with pytest.raises(InvalidError, match="needs format version 2"):
        decode_header(b"DCPTSHR1" + (2).to_bytes(4, "little") + bytes(4084))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def replaced(value: Any, path: list[int], new: Any) -> Any:
    """Return a copy of a JSON value with one place, found by following `path`, replaced."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    if isinstance(value, dict):
        key = sorted(value)[path[0] % len(value)]
        return value | {key: replaced(value[key], path[1:], new)}
    at = path[0] % len(value)
    return [*value[:at], replaced(value[at], path[1:], new), *value[at + 1 :]]


@given(st.lists(st.integers(0, 20), max_size=4), JSON)
def test_any_change_of_a_record_is_refused_or_still_a_record(path: list[int], new: object) -> None:
    changed = replaced(json.loads(RECORD), path, new)
    try:
        found = read_record(summed(changed) if isinstance(changed, dict) else b"[]")
    except REFUSED:
        return
    assert isinstance(found, (Commit, Fence, Expired))
    assert found.checkpoint_id == "step-1"
    assert decode_record(encode_record(found, "0.1"), "step-1") == found


@given(st.lists(st.integers(0, 20), max_size=4), JSON)
def test_any_change_of_a_manifest_is_refused_or_still_a_manifest(
    path: list[int], new: object
) -> None:
    def change(meta: dict[str, Any], _: dict[str, np.ndarray]) -> None:
        changed = replaced(dict(meta), path, new)
        meta.clear()
        meta.update(changed if isinstance(changed, dict) else {})

    try:
        found = decode_manifest(manifest_bytes(change))
    except REFUSED:
        return
    assert repr(decode_manifest(encode_manifest(found))) == repr(found)


@pytest.mark.parametrize(
    ("row", "fqn", "offsets"),
    [
        (-1, "0d", ()),
        (3, "w", (0, 2)),
        (1 << 32, "w", (0, 2)),
        (0, "other", (0, 2)),
        (0, "w", (0, 0)),
        (0, "w", None),
        (1, "b", ()),
    ],
)
def test_a_row_that_is_not_what_a_manifest_says_is_refused(
    row: int, fqn: str, offsets: tuple[int, ...] | None
) -> None:
    index = read_tail(TAIL)
    for right in ((0, "w", (0, 2)), (1, "b", None), (2, "0d", ())):
        index.require(*right)
    with pytest.raises(CorruptError, match=f"row {row} of a shard file"):
        index.require(row, fqn, offsets)
