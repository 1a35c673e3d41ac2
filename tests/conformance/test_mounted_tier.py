"""MountedTier keeps the promise of `Tier`, with each engine, and where O_TMPFILE is not known."""

import errno
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered import UnavailableError
from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.interfaces import Engine
from dcp_tiered.tiers.mounted import MountedTier
from tests.conformance.tier_suite import TierSuite
from tests.support.disks import small_disk
from tests.support.sources import BytesSource
from tests.support.tiers import best_engine
from tests.support.workers import await_that


class PosixStore:
    """A run root below a directory, seen by plain file operations."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def keys(self) -> set[str]:
        return {path for path in self._files() if not Path(path).name.startswith(".tmp-")}

    def leftovers(self) -> list[str]:
        return [path for path in self._files() if Path(path).name.startswith(".tmp-")]

    def _files(self) -> set[str]:
        found = (path for path in self._root.rglob("*") if path.is_file())
        return {str(path.relative_to(self._root)) for path in found}


def buffered_engine(directory: Path) -> Engine:
    return BufferedEngine()


class TestMountedTier(TierSuite):
    engine_for = staticmethod(best_engine)

    @pytest.fixture(autouse=True)
    def _base(self, tmp_path: Path) -> None:
        self.base = tmp_path / "mount"
        self.base.mkdir()

    def make_tier(self, root: str) -> MountedTier:
        return MountedTier(self.base / root, self.base, self.engine_for, 8)

    def make_store(self, root: str) -> PosixStore:
        return PosixStore(self.base / root)

    def make_broken_tier(self, root: str, secret: str) -> MountedTier:
        del secret  # a file system has none
        base = self.base / "not-mounted"
        return MountedTier(base / root, base, self.engine_for, 8)


class TestMountedTierThroughThePageCache(TestMountedTier):
    engine_for = staticmethod(buffered_engine)


class TestMountedTierWithoutTmpfile(TestMountedTier):
    """The same on a file system that does not know O_TMPFILE."""

    # Other processes know nothing of what is patched away in this one.
    test_of_racing_processes_one_puts = None

    @pytest.fixture(autouse=True)
    def _no_tmpfile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refusing)


def test_nothing_is_written_to_another_mount_than_before(tmp_path: Path) -> None:
    """A record on the disk below a mount that went away would name packs that are not there."""
    if os.geteuid():
        pytest.skip("only root can mount a disk")
    base = tmp_path / "lustre"
    base.mkdir()
    tier = MountedTier(base / "run", base, best_engine, 8)
    tier.put("a/manifest.json", b"{}")
    subprocess.run(["mount", "-t", "tmpfs", "none", base], check=True)
    try:
        with pytest.raises(UnavailableError, match="another file system") as raised:
            tier.put("a/record-1.json", b"{}")
        assert raised.value.hint
        assert list(base.rglob("*")) == []
    finally:
        subprocess.run(["umount", base], check=True)
    tier.put("a/record-1.json", b"{}")
    assert (base / "run/a/record-1.json").read_bytes() == b"{}"


class Begun(BytesSource):
    """Waits when the first bytes are asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def pread(self, length: int, start: int) -> bytes:
        self.begun.set()
        self.go_on.wait()
        return super().pread(length, start)


def test_an_upload_that_hangs_keeps_no_buffer_from_others(tmp_path: Path) -> None:
    base = tmp_path / "lustre"
    (base / "run").mkdir(parents=True)
    tier = MountedTier(base / "run", base, best_engine, 0)
    data = bytes(16 << 20)
    with small_disk(tmp_path, 64) as disk, ThreadPoolExecutor(2) as pool:
        (base / "run/a").symlink_to(disk.path)
        source = Begun(data)
        hanging = pool.submit(tier.upload, "a/pack", source)
        assert source.begun.wait(30)
        with disk.frozen():
            source.go_on.set()
            await_that("its reads", lambda: source.bytes_read >= 8 << 20)
            time.sleep(0.2)  # until it has all the buffers that it gets
            pool.submit(tier.upload, "b/pack", BytesSource(data)).result(30)
            assert (base / "run/b/pack").read_bytes() == data
            assert not hanging.done()
        assert hanging.result(30).length == len(data)
