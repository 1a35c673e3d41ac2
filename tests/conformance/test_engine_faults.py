"""What goes wrong below an engine comes out with its errno, and leaves nothing behind."""

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.engines.direct import DirectEngine
from dcp_tiered.errors import InvalidError, UnavailableError
from dcp_tiered.interfaces import Engine
from dcp_tiered.tiers.posix import PosixTier
from tests.support.disks import Disk, small_disk

MEGABYTE = 1 << 20
NOISE = memoryview(np.random.default_rng(7).integers(0, 256, MEGABYTE, dtype="u1"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path, 48) as made:
        yield made


@pytest.fixture(params=["direct", "buffered", "buffered, no RWF_DONTCACHE"])
def engine(request: pytest.FixtureRequest, monkeypatch) -> Engine:
    if request.param == "direct":
        return DirectEngine(Arena(MEGABYTE, 4))
    if "," in request.param:
        monkeypatch.setattr("dcp_tiered.engines.buffered._DONTCACHE", 0)
        monkeypatch.setattr("dcp_tiered.engines.buffered._WINDOW_BYTES", MEGABYTE)
    return BufferedEngine()


def tier_on(path: Path) -> PosixTier:
    return PosixTier(path / "run", path, "local")


def write(
    engine: Engine, fd: int, megabytes: int, after_the_first: Callable[[], None] = lambda: None
) -> None:
    with engine.writing(fd, 0) as image:
        for number in range(megabytes):
            image.append(number * MEGABYTE, NOISE)
            if not number:
                after_the_first()
        image.finish(megabytes * MEGABYTE)


def names_below(path: Path) -> list[str]:
    return [entry.name for entry in path.rglob("*") if entry.is_file()]


def test_a_full_disk_is_enospc_and_leaves_no_file(engine: Engine, disk: Disk) -> None:
    tier = tier_on(disk.path)
    free = os.statvfs(disk.path).f_bfree
    with tier.create("step-1/a") as staged, pytest.raises(OSError, match="space") as caught:
        write(engine, staged.fd, 64)
    assert caught.value.errno == errno.ENOSPC
    assert names_below(disk.path) == []
    assert os.statvfs(disk.path).f_bfree >= free - 8, "the space is given back"


def test_a_device_that_fails_while_it_is_written_is_eio(engine: Engine, disk: Disk) -> None:
    tier = tier_on(disk.path)

    def save() -> None:
        with tier.create("step-1/a") as staged:
            write(engine, staged.fd, 16, after_the_first=disk.fail)
            staged.seal()

    with pytest.raises((OSError, UnavailableError)) as caught:
        save()
    assert caught.value.errno == errno.EIO
    assert names_below(disk.path) == []


def test_a_device_that_fails_before_fsync_seals_nothing(
    engine: Engine, disk: Disk, monkeypatch
) -> None:
    """A failed fsync is not tried again: the kernel has dropped the pages and would lie."""
    syncs = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (syncs.append(fd), fsync(fd)))
    tier = tier_on(disk.path)
    with tier.create("step-1/a") as staged:
        write(engine, staged.fd, 1)
        disk.fail()
        syncs.clear()
        with pytest.raises(UnavailableError) as caught:
            staged.seal()
    assert caught.value.errno == errno.EIO
    assert len(syncs) == 1
    assert names_below(disk.path) == []


def test_a_file_that_cannot_be_closed_is_an_error(
    engine: Engine, tmp_path: Path, monkeypatch
) -> None:
    """NFS tells some errors that late; the descriptor is gone all the same."""
    close, failed = os.close, []

    def fail(fd: int) -> None:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if is_file:
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def save() -> None:
        with tier_on(tmp_path).create("step-1/a") as staged:
            monkeypatch.setattr(os, "close", fail)
            write(engine, staged.fd, 1)
            staged.seal()

    try:
        with pytest.raises((OSError, UnavailableError)) as caught:
            save()
    finally:
        monkeypatch.undo()
    assert caught.value.errno == errno.EIO
    assert len(failed) == len(set(failed)), "none is closed twice"
    # The direct engine's own descriptor fails before the file is sealed.
    assert names_below(tmp_path) == ([] if isinstance(engine, DirectEngine) else ["a"])


def test_a_read_only_file_system_is_told_before_a_byte(disk: Disk) -> None:
    tier = tier_on(disk.path)
    tier.put("step-1/a", b"x")
    disk.make_read_only()
    with pytest.raises(InvalidError) as caught, tier.create("step-1/b"):
        pass
    assert caught.value.errno == errno.EROFS
    assert names_below(disk.path) == ["a"]


_LIMITED = """
import os, resource, sys
from tests.conformance.test_engine_faults import MEGABYTE, NOISE
from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.engines.direct import DirectEngine
engine = BufferedEngine() if sys.argv[2] == "buffered" else DirectEngine(Arena(MEGABYTE, 4))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MEGABYTE + 4096, resource.RLIM_INFINITY))
try:
    with engine.writing(fd, 0) as image:
        for number in range(8):
            image.append(number * MEGABYTE, NOISE)
        image.finish(8 * MEGABYTE)
except OSError as exc:
    print(exc.errno)
"""


@pytest.mark.parametrize("name", ["direct", "buffered"])
def test_a_write_that_is_short_at_a_limit_goes_on_and_tells_why_it_ends(
    tmp_path: Path, name: str
) -> None:
    """The kernel itself writes 4 KiB of the fifth megabyte, and nothing after that."""
    path = tmp_path / "image"
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, path, name], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG)], done.stderr
    assert path.stat().st_size <= 4 * MEGABYTE + 4096
    assert path.read_bytes()[: 4 * MEGABYTE] == bytes(NOISE) * 4


def test_signals_do_not_disturb_a_write(engine: Engine, tmp_path: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    fd = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    try:
        write(engine, fd, 32)
        os.fsync(fd)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(fd)
    assert seen
    assert (tmp_path / "image").read_bytes() == bytes(NOISE) * 32


@pytest.mark.parametrize("engine", ["direct", "buffered"], indirect=True)
def test_nobody_writes_any_more_when_a_save_is_cancelled(engine: Engine, tmp_path: Path) -> None:
    area = memoryview(mmap.mmap(-1, 32 * MEGABYTE))
    fd = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    threads = set(threading.enumerate())

    def save() -> None:
        with engine.writing(fd, 64 * MEGABYTE) as image:
            image.append(0, area)
            image.append(32 * MEGABYTE, NOISE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    assert set(threading.enumerate()) <= threads
    os.ftruncate(fd, 0)
    area[:] = b"\xff" * len(area)
    time.sleep(0.2)
    assert os.fstat(fd).st_size == 0
    os.close(fd)
    if isinstance(engine, DirectEngine):
        arena = engine._arena
        buffers = [arena.take() for _ in range(arena.count)]
        assert len({id(buffer.obj) for buffer in buffers}) == arena.count
