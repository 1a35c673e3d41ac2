"""Bytes that an earlier version wrote stay readable, by the package and by a second decoder.

A change of the format is made so: a decision record in docs/adr/ says why; `footer.VERSION` or a
name in `requires` tells old readers; docs/format.md and own_decoder.py follow; make_golden.py
writes a new directory (v2/) beside the old one, which stays, with tests that read both; CHANGELOG
tells users. A golden file that no longer decodes is a broken promise, never a file to make again.
"""

import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_tiered.errors import InvalidError
from dcp_tiered.format import frames
from dcp_tiered.format import pack as package_pack
from dcp_tiered.format.footer import TRAILER_BYTES, check_features, decode_trailer
from dcp_tiered.format.manifest import decode_manifest
from dcp_tiered.format.records import Commit, Expired, Fence, decode_record
from dcp_tiered.format.shardfile import (
    DTYPES,
    END_MAGIC,
    decode_header,
    decode_index,
    file_crc,
)
from tests.format_compat import make_golden as golden
from tests.format_compat import own_decoder

V1 = Path(__file__).parent / "v1"
FRAMES = Path(__file__).parent / "v1-frames"
COMPRESSED = (FRAMES / "compressed.pack").read_bytes()
SHARD = (V1 / "3-0123456789abcdef.shard").read_bytes()
PACK_NAME = "0a1b2c3d4e5f-f5d7082ac711623d.pack"
PACK = (V1 / PACK_NAME).read_bytes()
MANIFEST = (V1 / "manifest-fedcba9876543210.json").read_bytes()
RECORDS = [(V1 / f"record-{n}.json").read_bytes() for n in (1, 2, 3)]
EXPECTED_ITEMS = [
    ("buffer", 8, ((0,), (300_000,), (300_000,)), 4096, golden.LARGE),
    ("layers.0.weight", 0, ((2, 0), (2, 3), (4, 3)), 304128, golden.WEIGHT),
    ("naïve/\ud800 key", 4, ((), (), ()), 304192, struct.pack("<q", -7)),
    ("scheduler", None, ((), (), ()), 304256, golden.OPAQUE),
]
EXPECTED_ENTRIES = [
    ("buffer", 8, (300_000,), False, ((0,), (300_000,), 0, 0)),
    ("layers.0.weight", 0, (4, 3), True, ((2, 0), (2, 3), 0, 1)),
    ("naïve/\ud800 key", 4, (), False, ((), (), 0, 2)),
    ("scheduler", None, (), False, ((), (), 0, 3)),
]
EXPECTED_PLANNER = {
    "layers.0.weight": ("layers", 0, "weight"),
    "naïve/\ud800 key": ("naïve/\ud800 key",),
    "buffer": ("buffer",),
}


def test_the_second_decoder_sums_as_the_standard_says() -> None:
    assert own_decoder.crc32c(b"123456789") == 0xE3069283


def test_codes_of_dtypes_never_move() -> None:
    assert " ".join(DTYPES) == (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
        " complex32 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
        " float8_e8m0fnu float4_e2m1fn_x2"
    )


def test_shard_file_by_the_package() -> None:
    header = decode_header(SHARD[:4096])
    assert (header.checkpoint_id, header.rank, header.world_size) == ("step-1000", 3, 8)
    assert (header.local_world_size, header.node) == (4, "0a1b2c3d4e5f")
    assert (header.token, header.written_by) == ("0123456789abcdef", "0.1.0")
    trailer = decode_trailer(SHARD[-TRAILER_BYTES:], len(SHARD), END_MAGIC)
    tail = SHARD[trailer.start :]
    index = decode_index(trailer, tail[: trailer.stored_length])
    found = [
        (
            fqn,
            None if index.is_bytes(row) else int(index.dtype[row]),
            index.box(row),
            int(index.start[row]),
            SHARD[index.start[row] : index.start[row] + index.length[row]],
        )
        for row, fqn in enumerate(index.fqns)
    ]
    assert found == EXPECTED_ITEMS
    assert index.block_crcs(0).tolist() == [
        own_decoder.crc32c(golden.LARGE[:262144]),
        own_decoder.crc32c(golden.LARGE[262144:]),
    ]
    assert file_crc(index, tail) == own_decoder.crc32c(SHARD)


def test_shard_file_by_the_second_decoder() -> None:
    header, items = own_decoder.shard_file(SHARD)
    assert header == {
        "checkpoint_id": "step-1000",
        "rank": 3,
        "world_size": 8,
        "local_world_size": 4,
        "node": "0a1b2c3d4e5f",
        "token": "0123456789abcdef",
        "written_by": "0.1.0",
        "requires": [],
    }
    found = [
        (item["name"], item["dtype"], tuple(item["box"]), item["start"], item["bytes"])
        for item in items
    ]
    assert found == EXPECTED_ITEMS


def test_pack_by_both() -> None:
    trailer = package_pack.decode_pack_trailer(PACK[-TRAILER_BYTES:], len(PACK))
    pack = package_pack.decode_pack(f"packs/{PACK_NAME}", trailer, PACK[trailer.start :])
    starts = [(shard.name, shard.start, shard.length) for shard in pack.shards]
    assert starts == [
        ("3-0123456789abcdef.shard", 0, len(SHARD)),
        ("4-0123456789abcdef.shard", -(-len(SHARD) // 4096) * 4096, 5000),
    ]
    assert pack.crc32c == own_decoder.crc32c(PACK)
    assert own_decoder.pack(PACK) == {
        "3-0123456789abcdef.shard": SHARD,
        "4-0123456789abcdef.shard": bytes(5000),
    }


def test_manifest_by_the_package() -> None:
    manifest = decode_manifest(MANIFEST)
    head = manifest.head
    assert (head.checkpoint_id, head.attempt, head.step) == ("step-1000", "fedcba9876543210", 1000)
    assert (head.launch, head.node) == ("host-7 2026-01-02T03:04:05Z", "0a1b2c3d4e5f")
    assert (head.sequence, head.world_size) == (1_767_323_045_000_000_000, 8)
    assert head.supersedes == ("00000000deadbeef",)
    assert head.written_by == {"dcp_tiered": "0.1.0", "torch": "2.13.0"}
    assert math.isnan(head.metadata.pop("loss"))
    assert head.metadata == {"tags": ["a", ("b", 2)], 3: None}
    (shard,) = head.shards
    assert (shard.name, shard.node) == ("3-0123456789abcdef.shard", "0a1b2c3d4e5f")
    assert (shard.length, shard.crc32c) == (len(SHARD), own_decoder.crc32c(SHARD))
    assert shard.footer_start == struct.unpack_from("<Q", SHARD, len(SHARD) - 48)[0]
    found = [
        (
            entry.fqn,
            None if entry.dtype is None else DTYPES.index(entry.dtype),
            entry.shape,
            entry.requires_grad,
            *((c.offsets, c.sizes, c.shard, c.row) for c in entry.chunks),
        )
        for entry in manifest.entries
    ]
    assert found == EXPECTED_ENTRIES
    assert manifest.planner_data == EXPECTED_PLANNER


def test_manifest_by_the_second_decoder() -> None:
    meta, entries, planner = own_decoder.manifest(MANIFEST)
    names = ("name", "dtype", "shape", "requires_grad")
    found = [(*(entry[name] for name in names), *entry["chunks"]) for entry in entries]
    assert found == EXPECTED_ENTRIES
    assert planner == EXPECTED_PLANNER
    assert (meta["checkpoint_id"], meta["entries"]) == ("step-1000", 4)
    assert meta["shards"][0][:3] == ["3-0123456789abcdef.shard", "0a1b2c3d4e5f", len(SHARD)]
    assert math.isnan(meta["metadata"].pop("loss"))
    assert meta["metadata"] == {"tags": ["a", ("b", 2)], 3: None}


def test_records_by_the_package() -> None:
    commit, fence, expired = (decode_record(data, "step-1000") for data in RECORDS)
    assert isinstance(commit, Commit)
    assert (commit.attempt, commit.step) == ("fedcba9876543210", 1000)
    assert commit.sequence == 1_767_323_045_000_000_000
    assert commit.manifest_length == len(MANIFEST)
    (pack,) = commit.packs
    assert (pack.name, pack.length) == (f"packs/{PACK_NAME}", len(PACK))
    assert pack.crc32c == own_decoder.crc32c(PACK)
    (placement,) = commit.placements
    assert (placement.shard, placement.pack, placement.start) == ("3-0123456789abcdef.shard", 0, 0)
    assert (commit.bytes_stored, commit.committed_by) == (len(SHARD), "0a1b2c3d4e5f")
    assert commit.committed_at == "2026-01-02T03:05:00Z"
    assert fence == Fence(checkpoint_id="step-1000", attempts=("00000000deadbeef",))
    assert expired == Expired(checkpoint_id="step-1000")


def test_records_by_the_second_decoder() -> None:
    records = [own_decoder.record(data) for data in RECORDS]
    assert [record["kind"] for record in records] == ["commit", "fence", "expired"]
    assert {record["checkpoint_id"] for record in records} == {"step-1000"}
    assert records[0]["packs"][0]["length"] == len(PACK)
    assert records[1]["attempts"] == ["00000000deadbeef"]


@pytest.mark.parametrize("name", sorted(golden.files()))
def test_what_is_written_today_means_the_same(name: str) -> None:
    """zstd may compress differently, so the meaning is compared, by the second decoder."""
    old, new = (V1 / name).read_bytes(), golden.files()[name]
    if name.endswith(".shard"):
        assert own_decoder.shard_file(new) == own_decoder.shard_file(old)
    elif name.endswith(".pack"):
        for data in own_decoder.pack(new).values():
            assert data[:8] in (b"DCPTSHR1", bytes(8))
    elif name.startswith("manifest"):
        old_meta, new_meta = (own_decoder.manifest(data) for data in (old, new))
        assert repr(new_meta[1:]) == repr(old_meta[1:])
        assert new_meta[0].keys() == old_meta[0].keys()
    else:
        assert own_decoder.record(new).keys() == own_decoder.record(old).keys()


@pytest.mark.parametrize("kept", [V1, FRAMES], ids=lambda path: path.name)
def test_the_golden_files_are_those_of_the_script(kept: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "make_golden.py"
    command = [sys.executable, script, kept.name, tmp_path / "again"]
    subprocess.run(command, check=True, timeout=60)
    made = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert made == sorted(path.name for path in kept.iterdir())


def frame_table(data: bytes) -> list[tuple[int, int, int]]:
    _, _, arrays = own_decoder.footer(data, b"DCPTPAK1")
    return list(zip(arrays["codec"], arrays["raw"], arrays["stored"], strict=True))


def tensors_in(pack: bytes) -> dict[str, bytes]:
    (shard,) = own_decoder.pack(pack).values()
    return {item["name"]: item["bytes"] for item in own_decoder.shard_file(shard)[1]}


def test_compressed_pack_by_both() -> None:
    (record,) = [own_decoder.record((FRAMES / "record-1.json").read_bytes())]
    assert record["requires"] == ["frames"]
    (said,) = record["packs"]
    assert said["length"] == len(COMPRESSED) < said["raw_length"] * 0.7
    assert said["crc32c"] == own_decoder.crc32c(COMPRESSED)
    assert tensors_in(COMPRESSED) == {name: raw for name, (_, raw) in golden.tensors().items()}
    raw = own_decoder.unpacked(COMPRESSED)
    assert len(raw) == said["raw_length"]
    trailer = package_pack.decode_pack_trailer(COMPRESSED[-TRAILER_BYTES:], len(COMPRESSED))
    pack, table = package_pack.decode_pack_and_frames(
        said["name"], trailer, COMPRESSED[trailer.start :]
    )
    assert (pack.length, pack.crc32c, pack.raw_length) == tuple(
        said[name] for name in ("length", "crc32c", "raw_length")
    )
    assert table is not None
    found = bytearray(len(raw))
    for cut in table.cuts(0, len(raw)):
        stored, place = (memoryview(data) for data in (COMPRESSED[cut.start : cut.end], found))
        place = place[cut.raw_start : cut.raw_end]
        if cut.codec:
            frames.decode_frame(cut.codec, stored, place)
        else:
            place[:] = stored
    assert bytes(found) == raw
    assert [codec for codec, _, _ in frame_table(COMPRESSED)] == [0, 1, 0, 2, 0]


def test_what_is_compressed_today_means_the_same() -> None:
    new = golden.framed_files()
    assert own_decoder.pack(new["compressed.pack"]) == own_decoder.pack(COMPRESSED)
    old = decode_record((FRAMES / "record-1.json").read_bytes(), "step-1000")
    again = decode_record(new["record-1.json"], "step-1000")
    assert isinstance(old, Commit)
    assert isinstance(again, Commit)
    assert old.packs[0].raw_length == again.packs[0].raw_length


def test_who_does_not_know_frames_refuses_them_by_name() -> None:
    for needs in (["frames"], ["frames", "planes"]):
        with pytest.raises(InvalidError, match="needs .*" + needs[-1]):
            check_features(1, needs, "0.1", known=needs[:-1])
