"""A durable tier on a mount: striped on Lustre, written around the page cache, full or not."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import resident_bytes
from dcp_tiered.engines.choose import probe
from dcp_tiered.errors import UnavailableError
from dcp_tiered.syscalls import file_system_type
from dcp_tiered.tiers import mounted
from dcp_tiered.tiers.mounted import MountedTier, stripes_for
from tests.support.disks import Disk, small_disk
from tests.support.sources import BytesSource
from tests.support.tiers import mounted_tier

MIB = 1 << 20


def tier_on(base: Path, stripes: int = 8) -> MountedTier:
    return mounted_tier(base / "run", base, stripes)


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Play Lustre: its magic number, and a tool that notes what it is asked for."""
    tools, notes = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    tool = tools / "lfs"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n[ ! -e {tmp_path}/refuse ]\n')
    tool.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(mounted, "file_system_type", lambda _: 0x0BD00BD0)
    return notes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path, 48) as made:
        yield made


def test_packs_are_striped_once_per_directory(tmp_path: Path, lfs: Path) -> None:
    tier = tier_on(tmp_path)
    tier.put("step-1/manifest-0.json", b"{}")
    for name in ("a", "b"):
        tier.upload(f"step-1/packs/{name}.pack", BytesSource(b"x" * 100))
    tier.upload("step-2/packs/c.pack", BytesSource(b"y" * 100))
    root = tmp_path / "run"
    assert lfs.read_text().splitlines() == [
        f"setstripe -c 8 -S 4194304 {root}/step-1/packs",
        f"setstripe -c 8 -S 4194304 {root}/step-2/packs",
    ]


def test_striping_that_fails_costs_speed_only(
    tmp_path: Path, lfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "refuse").touch()
    tier_on(tmp_path).upload("step-1/packs/a.pack", BytesSource(b"x" * 100))
    assert (tmp_path / "run/step-1/packs/a.pack").read_bytes() == b"x" * 100
    assert "not striped" in caplog.text


def test_striping_can_be_switched_off(tmp_path: Path, lfs: Path) -> None:
    tier_on(tmp_path, stripes=0).upload("step-1/packs/a.pack", BytesSource(b"x"))
    assert not lfs.exists()


def test_other_file_systems_are_left_alone(tmp_path: Path) -> None:
    assert file_system_type(tmp_path) not in (0, 0x0BD00BD0)
    assert file_system_type(Path("/proc")) == 0x9FA0, "as linux/magic.h has it"


@pytest.mark.parametrize(
    ("size", "stripes"), [(1, 1), (128 * MIB, 1), (512 * MIB, 4), (1 << 30, 8), (1 << 40, 8)]
)
def test_stripes_follow_the_size_of_packs(size: int, stripes: int) -> None:
    assert stripes_for(size) == stripes


def test_packs_do_not_fill_the_page_cache(tmp_path: Path) -> None:
    if not probe(tmp_path).direct:
        pytest.skip("no O_DIRECT here")
    data = os.urandom(8 * MIB + 777)
    tier_on(tmp_path).upload("step-1/packs/a.pack", BytesSource(data))
    path = tmp_path / "run/step-1/packs/a.pack"
    assert resident_bytes(path) <= 8192
    assert path.read_bytes() == data


def test_a_full_mount_keeps_no_part_of_a_pack(disk: Disk) -> None:
    with pytest.raises(UnavailableError) as caught:
        tier_on(disk.path).upload("step-1/packs/a.pack", BytesSource(os.urandom(64 * MIB)))
    assert caught.value.errno == errno.ENOSPC
    assert [path for path in disk.path.rglob("*") if path.is_file()] == []


def test_a_mount_that_fails_is_an_error_with_its_errno(disk: Disk) -> None:
    tier = tier_on(disk.path)
    tier.upload("step-1/packs/a.pack", BytesSource(b"x" * MIB))
    disk.fail()
    with pytest.raises(UnavailableError) as caught:
        tier.upload("step-1/packs/b.pack", BytesSource(b"y" * MIB))
    assert caught.value.errno == errno.EIO
