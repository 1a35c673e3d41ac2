"""A pack on its way: compressed when wanted, found when there, as it is when there is no room."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import CorruptError, Limits, TieredWriter, UnavailableError
from dcp_tiered.format.pack import Pack, compressed_name, plan_pack
from dcp_tiered.interfaces import ObjectInfo, Source
from dcp_tiered.policy import compression
from dcp_tiered.services import compressing, shard_headers
from dcp_tiered.services.local_space import Disk
from dcp_tiered.services.pack_upload import PackUpload
from dcp_tiered.services.packs import PackStore
from dcp_tiered.services.wrapped_tier import WrappedTier
from dcp_tiered.tiers.posix import PosixTier
from tests.format_compat import own_decoder
from tests.support.disks import small_disk
from tests.support.runs import flip_bit
from tests.support.tiers import mounted_tier

STATE = {
    "w": (torch.arange(1_500_000) % 997 * 1e-4).bfloat16(),
    "m": torch.linspace(-1, 1, 400_000),
    "n": torch.arange(30_000),
    "small": torch.arange(50.0),
}
WHOLE = {"i": torch.randint(-(1 << 62), 1 << 62, (40_000,)), "f": torch.rand(50).double()}


class Counting(WrappedTier):
    """A durable tier that notes what is uploaded."""

    def __init__(self, tier: Any) -> None:
        super().__init__(tier)
        self.uploads: list[str] = []

    def upload(self, key: str, source: Source) -> ObjectInfo:
        self.uploads.append(key)
        return super().upload(key, source)


@dataclass
class Node:
    """One sealed shard file on a node, and a durable tier."""

    base: Path
    durable: Counting
    plan: Pack
    local: PosixTier
    limits: Limits = field(default_factory=Limits)

    def uploads(self, mode: str, stop: Callable[[], bool] = lambda: False) -> PackUpload:
        """Return what a flusher that has just been started makes."""
        packs = PackStore(self.local, self.durable)
        return PackUpload(self.local, packs, self.limits, stop, mode)

    def stored(self, pack: Pack) -> bytes:
        return (self.base / "lustre" / "run" / "a" / pack.name).read_bytes()

    def shard(self) -> Path:
        (path,) = (self.local.root / "a").glob("*.shard")
        return path

    def files(self) -> set[str]:
        return {path.name for path in self.local.root.rglob("*")}


def node(base: Path, nvme: Path, state: dict[str, Any] = STATE) -> Node:
    (base / "lustre").mkdir()
    with TieredWriter(f"tiered://{nvme}") as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
    (shard,) = nvme.glob("*/a/*.shard")
    root = shard.parents[1]
    local = PosixTier(root, nvme, "local")
    plan = plan_pack("a", "0123456789ab", [shard_headers.row(local, "a", shard.name)], "0.1")
    durable = Counting(mounted_tier(base / "lustre" / "run", base / "lustre"))
    return Node(base, durable, plan, local)


@pytest.fixture
def here(tmp_path: Path) -> Node:
    (tmp_path / "nvme").mkdir()
    return node(tmp_path, tmp_path / "nvme")


def test_a_pack_is_compressed_and_holds_the_shard_file(here: Node) -> None:
    before = here.files()
    pack = here.uploads("zstd").upload("a", here.plan, lambda: None)
    data = here.stored(pack)
    assert len(data) == pack.length < here.plan.length * 0.8
    assert own_decoder.unpacked(data) == here.shard().read_bytes()
    assert pack.name == compressed_name(here.plan) != here.plan.name
    assert here.files() == before, "nothing stays on the node"


@pytest.mark.parametrize("mode", ["off", "zstd"])
def test_compressing_and_reading_back_are_no_silence(mode: str, here: Node) -> None:
    moved: list[str] = []

    class Watched(WrappedTier):
        def upload(self, key: str, source: Source) -> ObjectInfo:
            moved.append("begun")
            info = super().upload(key, source)
            moved.append("sent")
            return info

    here.durable = Counting(Watched(here.durable))
    here.uploads(mode).upload("a", here.plan, lambda: moved.append("moved"))
    begun, sent = moved.index("begun"), moved.index("sent")
    assert ("moved" in moved[:begun]) == (mode == "zstd")
    assert "moved" in moved[sent:]


def test_off_means_off(here: Node) -> None:
    pack = here.uploads("off").upload("a", here.plan, lambda: None)
    assert pack == here.plan
    assert here.stored(pack).startswith(here.shard().read_bytes())


@pytest.mark.parametrize(("first", "then"), [("zstd", "zstd"), ("off", "zstd"), ("off", "auto")])
def test_what_a_flusher_before_uploaded_counts(first: str, then: str, here: Node) -> None:
    pack = here.uploads(first).upload("a", here.plan, lambda: None)
    assert here.uploads(then).upload("a", here.plan, lambda: None) == pack
    assert len(here.durable.uploads) == 1


def test_a_compressed_pack_counts_for_auto_too(here: Node) -> None:
    """Which would not have compressed it: it has not measured the link yet."""
    pack = here.uploads("zstd").upload("a", here.plan, lambda: None)
    assert here.uploads("auto").upload("a", here.plan, lambda: None) == pack
    assert here.durable.uploads == [f"a/{compressed_name(here.plan)}"]


def test_what_does_not_shrink_is_uploaded_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    here = node(tmp_path, tmp_path / "nvme", WHOLE)
    assert here.uploads("zstd").upload("a", here.plan, lambda: None) == here.plan
    assert here.durable.uploads == [f"a/{here.plan.name}"]


@pytest.mark.parametrize("at", [5_000, 1_000_000, -60])
def test_a_shard_file_that_rots_is_named_and_not_uploaded(at: int, here: Node) -> None:
    path = here.shard()
    flip_bit(path, at if at > 0 else path.stat().st_size + at)
    with pytest.raises(CorruptError) as caught:
        here.uploads("zstd").upload("a", here.plan, lambda: None)
    assert str(path) in (caught.value.key or "")
    assert not list((here.base / "lustre").rglob("*.pack"))


def test_a_flusher_that_is_asked_to_end_does_not_compress_on(here: Node) -> None:
    before, asked = here.files(), iter([False, False, True])
    with pytest.raises(UnavailableError, match="asked to end"):
        here.uploads("zstd", lambda: next(asked)).upload("a", here.plan, lambda: None)
    assert here.durable.uploads == []
    assert here.files() == before


def test_auto_compresses_on_a_slow_link_only(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is what the upload before it has shown, if that was large enough to show it."""
    monkeypatch.setattr(compression, "LINK_BYTES_MIN", 1)
    for hoped, expected in ((1e15, compressed_name(here.plan)), (1.0, here.plan.name)):
        monkeypatch.setattr(compression, "_CODEC_BYTES_PER_S", hoped)
        (here.local.root / "flusher-measured.json").unlink(missing_ok=True)
        uploads = here.uploads("auto")
        assert uploads.upload("a", here.plan, lambda: None) == here.plan, "the first one measures"
        (here.base / "lustre" / "run" / "a" / here.plan.name).unlink()
        pack = uploads.upload("a", here.plan, lambda: None)
        assert pack.name == expected
        (here.base / "lustre" / "run" / "a" / pack.name).unlink()


@pytest.mark.parametrize("note", [None, b"{}", b"[", b'{"link_bytes_per_s": "x"}'])
def test_what_was_measured_is_there_for_the_next_flusher(
    note: bytes | None, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be a new one for every checkpoint; what is damaged counts as not measured."""
    monkeypatch.setattr(compression, "LINK_BYTES_MIN", 1)
    monkeypatch.setattr(compression, "_CODEC_BYTES_PER_S", 1e15)
    here.uploads("auto").upload("a", here.plan, lambda: None)
    (here.base / "lustre" / "run" / "a" / here.plan.name).unlink()
    path = here.local.root / "flusher-measured.json"
    assert json.loads(path.read_bytes())["link_bytes_per_s"] > 0
    if note is not None:
        path.write_bytes(note)
    compressed = here.uploads("auto").upload("a", here.plan, lambda: None).raw_length is not None
    assert compressed == (note is None)
    assert json.loads(path.read_bytes())["packs_since"] == (0 if compressed else 1)


def test_without_room_a_pack_goes_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a real disk: first there is no room from the start, then it runs out on the way."""
    with small_disk(tmp_path, 16) as disk:
        here = node(tmp_path, disk.path)
        (disk.path / "others").write_bytes(bytes(6 << 20))
        assert here.uploads("zstd").upload("a", here.plan, lambda: None) == here.plan
        assert "not compressing" in caplog.text
        (here.base / "lustre" / "run" / "a" / here.plan.name).unlink()
        caplog.clear()

        def full_at_once(local: Any, limits: Any) -> Disk:
            (disk.path / "more").write_bytes(bytes(1 << 20))
            return Disk(size=1 << 31, free=1 << 30, reserve=0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compressing, "disk_of", full_at_once)
            assert here.uploads("zstd").upload("a", here.plan, lambda: None) == here.plan
        assert "No space left" in caplog.text
        assert own_decoder.unpacked(here.stored(here.plan)) == here.shard().read_bytes()


def test_the_room_of_a_compressed_pack_is_taken_at_once_and_no_more_than_needed(
    tmp_path: Path,
) -> None:
    """A save that looks what is free would else lose it again while the pack grows."""
    with small_disk(tmp_path, 32) as disk:
        here = node(tmp_path, disk.path)
        blocks = os.statvfs(disk.path)
        seen: list[int] = []

        def taken() -> int:
            now = os.statvfs(disk.path)
            return (blocks.f_bavail - now.f_bavail) * now.f_frsize

        def look() -> bool:
            seen.append(taken())
            return False

        pack = here.uploads("zstd", look).upload("a", here.plan, lambda: seen.append(taken()))
        assert pack.raw_length is not None
        assert seen[0] >= here.plan.length - blocks.f_frsize
        # Later looks are made while the pack is uploaded.
        assert pack.length <= seen[-1] < pack.length + (64 << 10)
        assert taken() == 0
