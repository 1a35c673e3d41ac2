"""The bytes of a pack and their checksums, whichever part of it is asked for."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered import CorruptError, TieredWriter
from dcp_tiered.format.pack import Pack, plan_pack
from dcp_tiered.services.pack_source import PackSource
from tests.support.runs import flip_bit
from tests.support.tiers import mounted_tier

BLOCK = 256 << 10
NAMES = ("0-00112233445566aa.shard", "1-00112233445566bb.shard")
STATE = {
    "large": torch.arange(3 * BLOCK + 17, dtype=torch.uint8),
    "block": torch.arange(BLOCK // 8, dtype=torch.int64),
    "small": torch.arange(99),
    "page": torch.arange(70_000, dtype=torch.uint8),
    "note": "no tensor",
}


class Case:
    """Two shard files in one pack, and the pack's bytes put together by hand."""

    def __init__(self, directory: Path) -> None:
        with TieredWriter(f"tiered://{directory}/nvme") as writer:
            dcp.save(STATE, checkpoint_id="a", storage_writer=writer)
        (shard,) = directory.glob("nvme/*/a/*.shard")
        self.directory = directory / "node"
        self.directory.mkdir()
        for name in NAMES:
            shutil.copy(shard, self.directory / name)
        data = shard.read_bytes()
        rows = [(name, len(data), crc32c(data)) for name in NAMES]
        self.pack: Pack = plan_pack("a", "0123456789ab", rows, "1")
        self.bytes = data + bytes(-len(data) % 4096) + data + self.pack.tail
        assert len(self.bytes) == self.pack.length


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("pack")
    (directory / "nvme").mkdir()
    return Case(directory)


class Counting(PackSource):
    """A source that counts what it reads."""

    bytes_read = 0

    def pread(self, length: int, start: int) -> bytes:
        self.bytes_read += length
        return super().pread(length, start)


@pytest.fixture(scope="module")
def source(case: Case) -> Iterator[Counting]:
    with Counting(case.directory, case.pack) as opened:
        yield opened


@given(data=st.data())
def test_every_range_has_its_bytes_and_its_checksum(
    data: st.DataObject, case: Case, source: Counting
) -> None:
    start = data.draw(st.integers(0, case.pack.length))
    length = data.draw(st.integers(0, case.pack.length - start))
    expected = case.bytes[start : start + length]
    assert source.pread(length, start) == expected
    assert source.checksum(length, start) == crc32c(expected)


def test_known_checksums_are_not_read_again(case: Case, source: Counting) -> None:
    source.checksum(case.pack.length, 0)
    source.bytes_read = 0
    assert source.checksum(case.pack.length, 0) == crc32c(case.bytes) == case.pack.crc32c
    # Headers, footers, small items and what is between; the blocks are four fifths and more.
    assert source.bytes_read < len(case.bytes) // 5


def test_a_footer_that_cannot_be_read_costs_a_read(case: Case, tmp_path: Path) -> None:
    """What is damaged is told by whoever compares the sum, not by the wrong exception here."""
    copy = tmp_path / "node"
    shutil.copytree(case.directory, copy)
    for name in NAMES:
        flip_bit(copy / name, (copy / name).stat().st_size - 60)
    shard = (copy / NAMES[0]).read_bytes()
    with PackSource(copy, case.pack) as source:
        assert source.checksum(len(shard), 0) == crc32c(shard)
        assert source.checksum(case.pack.length, 0) != case.pack.crc32c


def test_a_damaged_block_does_not_change_what_was_known(case: Case, tmp_path: Path) -> None:
    """So the store, or the body on its way, notices that the bytes are not those of the save."""
    copy = tmp_path / "node"
    shutil.copytree(case.directory, copy)
    flip_bit(copy / NAMES[0], BLOCK)
    with PackSource(copy, case.pack) as source:
        assert source.checksum(case.pack.length, 0) == case.pack.crc32c
        assert crc32c(source.pread(case.pack.length, 0)) != case.pack.crc32c


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one file system", "two"])
def test_a_pack_is_copied_where_a_file_system_can(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool
) -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm")) if elsewhere else tmp_path
    copied, real = [0], os.copy_file_range

    def counting(*args: int) -> int:
        count = real(*args)
        copied[0] += count
        return count

    monkeypatch.setattr(os, "copy_file_range", counting)
    try:
        tier = mounted_tier(root / "run", root)
        with PackSource(case.directory, case.pack) as source:
            tier.upload("a/packs/x.pack", source)
        assert (root / "run/a/packs/x.pack").read_bytes() == case.bytes
    finally:
        if elsewhere:
            shutil.rmtree(root)
    shards = sum(shard.length for shard in case.pack.shards)
    assert copied[0] == (0 if elsewhere else shards)


def test_a_copy_of_a_damaged_shard_file_is_not_created(case: Case, tmp_path: Path) -> None:
    for name in NAMES:
        shutil.copy(case.directory / name, tmp_path / name)
    flip_bit(tmp_path / NAMES[1], 5000)
    tier = mounted_tier(tmp_path / "run", tmp_path)
    with (
        PackSource(tmp_path, case.pack) as source,
        pytest.raises(CorruptError, match="do not have the checksum"),
    ):
        tier.upload("a/packs/x.pack", source)
    assert not list((tmp_path / "run").rglob("*.pack"))
