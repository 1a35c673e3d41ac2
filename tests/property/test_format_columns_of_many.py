"""Many small things at once are stored and read as one by one."""

from typing import Any

from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.format.manifest import Entries, Manifest, decode_manifest, encode_manifest
from dcp_tiered.format.shardfile import Builder, Header, Item, encode_header, join_run
from tests.property.strategies import Thing, headers, manifests, shard_bytes, things


def _small(thing: Thing) -> tuple[Any, ...]:
    return thing.fqn, thing.dtype, thing.data, thing.offsets, thing.sizes, thing.shape


@given(headers(), st.lists(st.lists(things(), max_size=4), max_size=4))
def test_items_in_runs_make_the_same_file_as_one_by_one(
    header: Header, runs: list[list[Thing]]
) -> None:
    runs = [[one for one in run if len(one.data) < 65536] for run in runs]
    one_by_one = shard_bytes(header, [thing for run in runs for thing in run])
    builder = Builder(header)
    data = bytearray(encode_header(header))
    for run in filter(None, runs):
        parts = [thing.data for thing in run]
        joined = join_run(parts)
        data += bytes(builder.next_start(0) - len(data)) + joined
        crcs = [crc32c(part) for part in parts if part]
        builder.add_run([_small(thing) for thing in run], crcs, crc32c(joined))
    data += builder.finish()
    assert bytes(data) == one_by_one.data
    assert builder.crc == one_by_one.crc == crc32c(bytes(data))


@given(headers(), st.lists(things(), max_size=4))
def test_runs_may_stand_between_other_items(header: Header, saved: list[Thing]) -> None:
    builder = Builder(header)
    for thing in saved:
        blocks = [thing.data[at : at + 262144] for at in range(0, len(thing.data), 262144)]
        crcs = [crc32c(block) for block in blocks]
        if len(thing.data) < 65536:
            builder.add_run([_small(thing)], crcs, crc32c(thing.data))
            continue
        builder.add(
            Item(
                fqn=thing.fqn,
                dtype=thing.dtype,
                offsets=thing.offsets,
                sizes=thing.sizes,
                shape=thing.shape,
                start=builder.next_start(len(thing.data)),
                length=len(thing.data),
                crcs=crcs,
            )
        )
    start, tail = builder.cursor, builder.finish()
    expected = shard_bytes(header, saved)
    assert (start, tail, builder.crc) == (
        expected.footer_start,
        expected.data[expected.footer_start :],
        expected.crc,
    )


@given(manifests())
def test_entries_as_columns_are_the_entries(manifest: Manifest) -> None:
    given_entries = list(manifest.entries)
    columns = Entries.of(given_entries)
    assert list(columns) == given_entries
    assert columns == given_entries
    assert len(columns) == len(given_entries)
    assert all(entry in columns for entry in given_entries)
    assert columns != [*given_entries, None]
    backwards = range(len(given_entries))[::-1]
    assert list(columns.chosen(backwards)) == given_entries[::-1]
    assert list(decode_manifest(encode_manifest(manifest)).entries) == given_entries


@given(manifests())
def test_every_chunk_is_found_by_key_and_offsets(manifest: Manifest) -> None:
    expected = {
        (entry.fqn, None if entry.dtype is None else chunk.offsets): (chunk.shard, chunk.row)
        for entry in manifest.entries
        for chunk in entry.chunks
    }
    entries = Entries.of(manifest.entries)
    places = {
        key: (entries.shard.item(number), entries.row.item(number))
        for key, number in entries.numbers().items()
    }
    assert places == expected


@given(manifests())
def test_entries_of_one_sort_differ_in_key_and_place_only(manifest: Manifest) -> None:
    entries = list(manifest.entries)
    numbers, sorts = Entries.of(entries).alike()
    assert len(sorts) == len(entries)
    for entry, sort in zip(entries, sorts, strict=True):
        like = entries[numbers[sort]]
        assert _sort(entry) == _sort(like)
    single = [entry for entry in entries if len(entry.chunks) == 1]
    several = len(entries) - len(single)
    assert len(numbers) == len({_sort(entry) for entry in single}) + several


def _sort(entry: Any) -> Any:
    chunks = tuple(chunk[:2] for chunk in entry.chunks)
    return entry.dtype, entry.shape, entry.requires_grad, chunks
