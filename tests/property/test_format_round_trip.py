"""Whatever is saved comes back exactly, and checksums are those of the bytes that lie there."""

import numpy as np
from awscrt.checksums import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_tiered.format import columns, layout
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.manifest import decode_head, decode_manifest, encode_manifest
from dcp_tiered.format.pack import Pack, decode_pack, decode_pack_trailer, plan_pack
from dcp_tiered.format.plain import from_tagged, to_tagged
from dcp_tiered.format.records import Record, decode_record, encode_record
from dcp_tiered.format.shardfile import (
    BLOCK_BYTES,
    END_MAGIC,
    Header,
    Index,
    decode_header,
    decode_index,
    file_crc,
)
from tests.property.strategies import (
    ANY_TEXT,
    IDS,
    NODES,
    PLAIN,
    TOKENS,
    ShardBytes,
    Thing,
    headers,
    manifests,
    records,
    shard_bytes,
    things,
)


def _index(shard: ShardBytes) -> Index:
    trailer = decode_trailer(shard.data[-TRAILER_BYTES:], len(shard.data), END_MAGIC)
    assert trailer.start == shard.footer_start
    stored = shard.data[trailer.start : trailer.start + trailer.stored_length]
    return decode_index(trailer, stored)


@given(headers(), st.lists(things(), max_size=6))
def test_shard_file_gives_back_every_item(header: Header, saved: list[Thing]) -> None:
    shard = shard_bytes(header, saved)
    assert decode_header(shard.data[:4096]) == header
    index = _index(shard)
    assert index.fqns == [thing.fqn for thing in saved]
    for row, thing in enumerate(saved):
        start, length = int(index.start[row]), int(index.length[row])
        assert shard.data[start : start + length] == thing.data
        assert index.is_bytes(row) == (thing.dtype is None)
        assert index.box(row) == (thing.offsets, thing.sizes, thing.shape)


@given(headers(), st.lists(things(), max_size=6))
def test_items_are_aligned_apart_and_between_header_and_footer(
    header: Header, saved: list[Thing]
) -> None:
    shard = shard_bytes(header, saved)
    covered = np.zeros(len(shard.data), dtype="u1")
    for item in shard.items:
        assert item.start % (4096 if item.length >= 65536 else 64) == 0
        assert 4096 <= item.start <= item.start + item.length <= shard.footer_start
        covered[item.start : item.start + item.length] += 1
    assert covered.max(initial=0) <= 1
    gaps = np.frombuffer(shard.data, dtype="u1")[4096 : shard.footer_start]
    assert not gaps[covered[4096 : shard.footer_start] == 0].any()


@given(headers(), st.lists(things(), max_size=6))
def test_shard_checksums_are_those_of_the_real_bytes(header: Header, saved: list[Thing]) -> None:
    shard = shard_bytes(header, saved)
    index = _index(shard)
    for row, thing in enumerate(saved):
        blocks = range(0, len(thing.data), BLOCK_BYTES)
        real = [crc32c(thing.data[at : at + BLOCK_BYTES]) for at in blocks]
        assert index.block_crcs(row).tolist() == real
    whole = crc32c(shard.data)
    assert file_crc(index, shard.data[shard.footer_start :]) == whole == shard.crc


@given(IDS, NODES, st.lists(st.tuples(headers(), st.lists(things(), max_size=3)), max_size=4))
def test_pack_checksum_is_that_of_the_bytes_laid_out_by_hand(
    checkpoint_id: str, node: str, made: list[tuple[Header, list[Thing]]]
) -> None:
    shards = [
        (f"{number}-{header.token}.shard", shard_bytes(header, saved).data)
        for number, (header, saved) in enumerate(made)
    ]
    rows = [(name, len(data), crc32c(data)) for name, data in shards]
    pack = plan_pack(checkpoint_id, node, rows, "0.1")
    real = bytearray()
    for (name, data), packed in zip(shards, pack.shards, strict=True):
        real += bytes(-len(real) % 4096)
        assert (packed.name, packed.start) == (name, len(real))
        real += data
    real += pack.tail
    assert (pack.length, pack.crc32c) == (len(real), crc32c(bytes(real)))
    assert _read_pack(pack.name, bytes(real)) == pack


def _read_pack(name: str, data: bytes) -> Pack:
    trailer = decode_pack_trailer(data[-TRAILER_BYTES:], len(data))
    return decode_pack(name, trailer, data[trailer.start :])


@given(manifests())
def test_manifest_comes_back(manifest) -> None:
    stored = encode_manifest(manifest)
    # As text, because a NaN differs from itself and -0.0 equals 0.0.
    assert repr(decode_manifest(stored)) == repr(manifest)
    assert repr(decode_manifest(stored).planner_data) == repr(manifest.planner_data)
    assert decode_manifest(stored).entries == manifest.entries
    assert repr(decode_head(stored)) == repr(manifest.head)


@given(records())
def test_record_comes_back(record: Record) -> None:
    assert decode_record(encode_record(record, "0.1"), record.checkpoint_id) == record


@given(PLAIN)
@example("\ud83d\ude00")  # two lone surrogates, which JSON's escapes would join into one
def test_plain_data_comes_back_with_its_types(value: object) -> None:
    stored = columns.canonical_json({"value": to_tagged(value, "test")})
    assert repr(from_tagged(columns.parse_json(stored)["value"])) == repr(value)


@given(st.lists(ANY_TEXT, max_size=10))
def test_strings_come_back(strings: list[str]) -> None:
    blob, lengths = columns.pack_strings(strings)
    assert columns.unpack_strings(blob, lengths, len(strings)) == strings


_ARRAYS = st.tuples(st.sampled_from(["u1", "<u4", "<i8"]), st.lists(st.integers(0, 255)))


@given(st.dictionaries(st.text(max_size=5), _ARRAYS, max_size=5))
def test_columns_come_back(described: dict[str, tuple[str, list[int]]]) -> None:
    arrays = {name: np.array(values, dtype=dtype) for name, (dtype, values) in described.items()}
    raw = columns.encode({"n": 1}, arrays)
    stored = columns.compress(raw)
    assert columns.decompress(stored, len(raw)) == raw
    meta, back = columns.decode(raw)
    assert meta == columns.decode_meta(stored, len(raw)) == {"n": 1}
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].tolist() == array.tolist()


@given(st.integers(0, 1 << 23), st.integers(0, 255), st.integers(0, 2000))
def test_what_compresses_too_well_to_be_believed_is_still_read(
    length: int, filling: int, noise: int
) -> None:
    """The block checksums of a terabyte of zeros are megabytes that repeat one number."""
    raw = bytes(range(256)) * (noise // 256) + bytes([filling]) * length
    assert columns.decompress(columns.compress(raw), len(raw)) == raw


@given(st.integers(0, 9_999_999), TOKENS, NODES, st.integers(1, 999_999_999))
def test_names_are_taken_apart_as_they_were_made(
    rank: int, token: str, node: str, number: int
) -> None:
    assert layout.shard_rank(layout.shard_name(rank, token)) == rank
    assert layout.published_number(layout.published_name(number)) == number
    assert layout.record_number(layout.record_name(number)) == number
    assert layout.pack_node(layout.pack_name(node, token)) == node
    assert layout.ok_name(layout.pack_name(node, token)).endswith(".pack.ok")


@given(st.lists(TOKENS, min_size=1, max_size=5, unique=True))
def test_pack_token_depends_on_the_names_and_their_order_only(tokens: list[str]) -> None:
    names = [f"{rank}-{token}.shard" for rank, token in enumerate(tokens)]
    assert layout.pack_token(names) == layout.pack_token(list(names))
    assert layout.pack_token([*names, "9-0123456789abcdef.shard"]) != layout.pack_token(names)
    if len(names) > 1:
        assert layout.pack_token(names[::-1]) != layout.pack_token(names)
    assert layout.pack_name("0" * 12, layout.pack_token(names))
