"""One promise, every engine: what is appended lies in the file, summed; errors keep their errno."""

import errno
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from awscrt.checksums import crc32c

from dcp_tiered.engines.arena import Arena
from dcp_tiered.engines.buffered import BufferedEngine
from dcp_tiered.engines.choose import choose, probe
from dcp_tiered.engines.device import TensorBytes
from dcp_tiered.engines.direct import DirectEngine
from dcp_tiered.engines.gds import GdsEngine
from dcp_tiered.errors import BackpressureError, InvalidError
from dcp_tiered.interfaces import Engine

BLOCK = 256 << 10
RANDOM = np.random.default_rng(7)


def noise(length: int) -> memoryview:
    return memoryview(RANDOM.integers(0, 256, length, dtype="u1"))


def aligned_noise(length: int) -> memoryview:
    area = memoryview(mmap.mmap(-1, (length // mmap.PAGESIZE + 1) * mmap.PAGESIZE))
    area[:length] = noise(length)
    return area[:length]


@pytest.fixture(params=["direct", "buffered", "small buffers", "gds"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    if request.param == "buffered":
        return BufferedEngine()
    if not probe(tmp_path).direct:
        pytest.skip(f"no O_DIRECT below {tmp_path}: {probe(tmp_path).reason}")
    if request.param == "gds":
        return GdsEngine(DirectEngine(Arena(1 << 20, 4)), "gds", lambda _: "host")
    return DirectEngine(Arena(1 << 20, 4) if request.param == "direct" else Arena(8192, 2))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "image"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    yield fd, path
    os.close(fd)


def write(engine: Engine, fd: int, megabytes: int) -> None:
    with engine.writing(fd, megabytes << 20) as image:
        for number in range(megabytes):
            image.append(number << 20, noise(1 << 20))
        image.finish(megabytes << 20)


def fail_with(code: int, text: str) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, text)

    return fail


def sums(data: memoryview) -> list[int]:
    return [crc32c(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def tensor_noise(length: int) -> TensorBytes:
    """A tensor as a device has it; on the CPU it is copied the same way."""
    return TensorBytes(torch.from_numpy(np.array(noise(length))))


def host_bytes(data: memoryview | TensorBytes) -> memoryview:
    return memoryview(data.flat.numpy()) if isinstance(data, TensorBytes) else data


@pytest.mark.parametrize(
    "make", [noise, aligned_noise, tensor_noise], ids=["unaligned", "aligned", "device"]
)
def test_writes_what_it_is_given_wherever_it_starts(engine, file, make) -> None:
    """Lengths and gaps around every border: page, buffer, request, checksum block."""
    fd, path = file
    lengths = [1, 0, 4095, 4096, 4097, 64, 8191, 8192, BLOCK, BLOCK + 1, 3 << 20, 1 << 20, 777]
    expected, cursor = bytearray(), 0
    with engine.writing(fd, 1 << 20) as image:
        for gap, length in zip([0, 64, 4096, 1, 0, 9000, 3, 70_000] * 2, lengths, strict=False):
            data = make(length)
            start = cursor + gap
            start += -start % (4096 if length >= 64 << 10 else 1)
            assert image.append(start, data) == sums(host_bytes(data))
            expected.extend(bytes(start - cursor))
            expected.extend(host_bytes(data))
            cursor = start + length
        image.finish(cursor)
    assert path.read_bytes() == bytes(expected)


def test_an_empty_file_is_empty(engine, file) -> None:
    fd, path = file
    with engine.writing(fd, 10_000) as image:
        image.finish(0)
    assert path.stat().st_size == 0


def test_reaches_beyond_four_gib(engine, file) -> None:
    """O012, O013: 64-bit offsets; the hole stays one."""
    fd, path = file
    data = noise(5000)
    with engine.writing(fd, 0) as image:
        image.append(0, noise(10))
        image.append((5 << 30) + 64, data)
        image.finish((5 << 30) + 64 + len(data))
    assert path.stat().st_size == (5 << 30) + 64 + len(data)
    assert os.pread(fd, len(data), (5 << 30) + 64) == bytes(data)
    assert os.pread(fd, 64, 5 << 30) == bytes(64)
    assert path.stat().st_blocks * 512 < 16 << 20


def test_short_writes_are_carried_on(engine, file, monkeypatch) -> None:
    fd, path = file
    pwrite, pwritev = os.pwrite, os.pwritev
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: pwrite(f, data[:12288], at))
    monkeypatch.setattr(os, "pwritev", lambda f, d, at, *fl: pwritev(f, [d[0][:5000]], at, *fl))
    data = noise(3 << 20)
    with engine.writing(fd, len(data)) as image:
        image.append(0, data)
        image.finish(len(data))
    assert path.read_bytes() == bytes(data)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_an_error_of_any_write_comes_out_with_its_errno(engine, file, monkeypatch, code) -> None:
    fd, _ = file
    monkeypatch.setattr(os, "pwrite", fail_with(code, os.strerror(code)))
    monkeypatch.setattr(os, "pwritev", fail_with(code, os.strerror(code)))
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        write(engine, fd, 64)
    assert caught.value.errno == code


def test_buffers_come_back_after_an_error(tmp_path: Path, monkeypatch) -> None:
    if not probe(tmp_path).direct:
        pytest.skip("no O_DIRECT here")
    arena = Arena(1 << 20, 3)
    engine = DirectEngine(arena)
    fd = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(os, "pwrite", fail_with(errno.EIO, "x"))
    for _ in range(5):
        with pytest.raises(OSError, match="x"):
            write(engine, fd, 8)
    os.close(fd)
    assert arena.bytes_held <= 3 << 20
    taken = [arena.take() for _ in range(3)]
    assert len({buffer.obj for buffer in taken}) == 3


def test_a_full_disk_is_told_before_the_first_byte(tmp_path: Path) -> None:
    """The reservation fails with ENOSPC where the file system can reserve."""
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], check=False
        ).returncode
    ):
        pytest.skip("needs root and mount")
    try:
        fd = os.open(mount / "image", os.O_RDWR | os.O_CREAT)
        try:
            engine = choose("auto", mount, Arena(1 << 20, 2))
            with pytest.raises(OSError, match="space") as caught:
                write(engine, fd, 64)
            assert caught.value.errno == errno.ENOSPC
        finally:
            os.close(fd)
    finally:
        subprocess.run(["umount", mount], check=True)


def test_direct_writing_leaves_nothing_in_the_page_cache(tmp_path: Path) -> None:
    if not probe(tmp_path).direct:
        pytest.skip("no O_DIRECT here")
    fd = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    data = noise(8 << 20)
    with DirectEngine(Arena(1 << 20, 4)).writing(fd, len(data)) as image:
        image.append(0, data)
        image.finish(len(data))
    cached = 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # looking must not read ahead
    for at in range(0, len(data), mmap.PAGESIZE):
        try:
            cached += os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
    os.close(fd)
    assert cached <= 1, "but for the page of the probe itself"


def test_an_engine_asked_for_by_name_has_to_work(tmp_path: Path, monkeypatch, caplog) -> None:
    refuse = fail_with(errno.EINVAL, "Invalid argument")
    monkeypatch.setattr("dcp_tiered.engines.choose.open_direct", refuse)
    with caplog.at_level("INFO"):
        assert choose("auto", tmp_path, Arena(4096, 1)).name == "buffered"
    assert len([record for record in caplog.records if "buffered" in record.message]) == 1
    with pytest.raises(InvalidError, match="does not work on this mount") as caught:
        choose("direct", tmp_path, Arena(4096, 1))
    assert caught.value.hint is not None


def test_the_arena_holds_no_more_than_its_budget_and_waits(monkeypatch) -> None:
    arena = Arena(8192, 2)
    first, second = arena.take(), arena.take()
    assert arena.bytes_held == 16384
    monkeypatch.setattr("dcp_tiered.engines.arena._WAIT_S_MAX", 0.01)
    with pytest.raises(BackpressureError):
        arena.take()
    assert arena.waits == 1
    arena.give_back(first)
    assert arena.take().obj is first.obj
    arena.give_back(second)
