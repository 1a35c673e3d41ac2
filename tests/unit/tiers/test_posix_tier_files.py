"""PosixTier towards the operating system: order of syncs, full disks, modes, temporaries."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.errors import AbsentError, CorruptError, InvalidError, UnavailableError
from dcp_tiered.tiers.posix import PosixTier
from tests.support.sources import BytesSource, pattern
from tests.support.tiers import mounted_tier


@pytest.fixture
def tier(tmp_path: Path) -> PosixTier:
    return mounted_tier(tmp_path / "run", tmp_path)


@pytest.fixture
def no_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be on a file system that does not know O_TMPFILE."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".tmp-*"))


# ------------------------------------------------------------------------------------- syncs


def _trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the calls that matter for durability, with the names of what they were done to."""
    calls: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "mkdir")}

    def fsync(fd: int) -> None:
        target = Path(f"/proc/self/fd/{fd}").readlink()
        kind = "directory" if target.is_dir() else "file"
        calls.append((f"fsync {kind}", target.name if kind == "directory" else ""))
        real["fsync"](fd)

    def link(source: Any, target: Any, **kwargs: Any) -> None:
        calls.append(("link", Path(target).name))
        real["link"](source, target, **kwargs)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(("mkdir", Path(path).name))
        real["mkdir"](path, *args, **kwargs)

    for name, function in (("fsync", fsync), ("link", link), ("mkdir", mkdir)):
        monkeypatch.setattr(os, name, function)
    return calls


@pytest.mark.parametrize("how", ["put", "upload"])
def test_a_file_is_synced_before_it_has_a_name_and_the_directory_after(
    tier: PosixTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    calls = _trace(monkeypatch)
    if how == "put":
        tier.put("step-1/a", b"12345")
    else:
        tier.upload("step-1/a", BytesSource(b"12345"))
    assert calls == [
        ("mkdir", "run"),
        ("fsync directory", tmp_path.name),
        ("mkdir", "step-1"),
        ("fsync directory", "run"),
        ("fsync file", ""),
        ("link", "a"),
        ("fsync directory", "step-1"),
    ]


def test_a_directory_that_is_there_is_not_synced_into_its_parent_again(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put("step-1/a", b"1")
    calls = _trace(monkeypatch)
    tier.put("step-1/b", b"2")
    assert calls == [("fsync file", ""), ("link", "b"), ("fsync directory", "step-1")]


def test_a_failed_sync_is_not_tried_again(tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has dropped the pages: a second sync would report a success that is none."""
    synced: list[int] = []

    def fails(fd: int) -> None:
        if not Path(f"/proc/self/fd/{fd}").readlink().is_dir():
            synced.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(UnavailableError) as raised:
        tier.put("step-1/a", b"12345")
    assert raised.value.errno == errno.EIO
    assert len(synced) == 1
    assert list((tier.root / "step-1").iterdir()) == []


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, UnavailableError),
        (errno.EDQUOT, UnavailableError),
        (errno.EROFS, InvalidError),
        (errno.EACCES, InvalidError),
        (errno.EIO, UnavailableError),
    ],
)
def test_what_the_system_refuses_is_kept(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    tier.put("step-1/before", b"")
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(kind) as raised:
        tier.put("step-1/a", b"x" * 4321)
    error = raised.value
    assert error.errno == code
    assert (error.tier, error.key) == ("durable", str(tier.root / "step-1/a"))
    assert "4321 bytes asked" in error.message
    assert "bytes free" in error.message
    assert error.hint
    assert [path.name for path in (tier.root / "step-1").iterdir()] == ["before"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """Mount a file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_says_how_much_was_asked_and_is_free(small_disk: Path) -> None:
    tier = mounted_tier(small_disk / "run", small_disk)
    tier.put("step-1/small", b"fits")
    for call in (
        lambda: tier.put("step-1/large", bytes(2 << 20)),
        lambda: tier.upload("step-1/large", BytesSource(pattern(2 << 20))),
    ):
        with pytest.raises(UnavailableError) as raised:
            call()
        assert raised.value.errno == errno.ENOSPC
        assert f"{2 << 20} bytes asked" in raised.value.message
        assert "bytes free" in raised.value.message
    assert [path.name for path in (small_disk / "run/step-1").iterdir()] == ["small"]
    tier.put("step-1/again", bytes(500_000))


def test_a_read_only_mount_is_reported(small_disk: Path) -> None:
    tier = mounted_tier(small_disk / "run", small_disk)
    tier.put("step-1/before", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InvalidError) as raised:
        tier.put("step-1/after", b"2")
    assert raised.value.errno == errno.EROFS
    assert tier.get("step-1/before", 1) == b"1"


def test_a_directory_without_the_right_to_write_is_reported(tmp_path: Path) -> None:
    """In a process of its own, since root may write everywhere."""
    base = tmp_path / "theirs"
    base.mkdir()
    base.chmod(0o555)
    code = f"""
        import os
        from pathlib import Path
        from dcp_tiered.errors import InvalidError
        from dcp_tiered.tiers.posix import PosixTier
        import awscrt.checksums  # before the right to read it goes
        if os.geteuid() == 0:
            for parent in Path({str(base)!r}).parents:
                if len(parent.parts) > 2:
                    parent.chmod(0o755)
            os.setgid(65534)
            os.setuid(65534)
        tier = PosixTier(Path({str(base / "run")!r}), Path({str(base)!r}), "local")
        try:
            tier.put("step-1/a", b"1")
        except InvalidError as error:
            print(error.errno)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(errno.EACCES)
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("how", ["missing", "file"])
def test_a_base_that_is_no_directory_is_an_error_and_not_an_empty_tier(
    tmp_path: Path, how: str
) -> None:
    base = tmp_path / "mount"
    if how == "file":
        base.write_bytes(b"")
    tier = mounted_tier(base / "run", base)
    calls: list[Any] = [
        lambda: tier.put("step-1/a", b"1"),
        lambda: tier.upload("step-1/a", BytesSource(b"1")),
        lambda: tier.get("step-1/a", 1),
        lambda: tier.head("step-1/a"),
        lambda: tier.read_into("step-1/a", 0, memoryview(bytearray(1))),
        lambda: list(tier.list_keys("step-1")),
        lambda: list(tier.list_directories()),
    ]
    for call in calls:
        with pytest.raises(InvalidError) as raised:
            call()
        assert not isinstance(raised.value, AbsentError)
    assert base.exists() == (how == "file")


# ------------------------------------------------------------------------------ short writes


@pytest.mark.parametrize("cap", [1, 7, 4096])
def test_short_writes_are_carried_on(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:cap]))
    data = pattern(cap * 20 + 3)
    tier.put("a/put", data)
    tier.upload("a/upload", BytesSource(data))
    assert (tier.root / "a/put").read_bytes() == data
    assert (tier.root / "a/upload").read_bytes() == data


@pytest.mark.parametrize("cap", [1, 7, 4096])
def test_short_reads_are_carried_on(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    data = pattern(cap * 20 + 3)
    tier.put("a/b", data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: real(fd, [bufs[0][:cap]], at))
    buffer = bytearray(len(data))
    tier.read_into("a/b", 0, memoryview(buffer))
    assert buffer == data
    assert tier.get("a/b", len(data)) == data


# ------------------------------------------------------------------------------- large files


@pytest.mark.parametrize("border", [1 << 31, 1 << 32, 1 << 33])
def test_offsets_are_of_64_bits(tier: PosixTier, border: int) -> None:
    """O012."""
    data = pattern(64)
    path = tier.root / "step-1/large.shard"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.seek(border - 32)
        file.write(data)
        file.truncate(border + 1000)
    assert tier.head("step-1/large.shard").length == border + 1000
    buffer = bytearray(64)
    tier.read_into("step-1/large.shard", border - 32, memoryview(buffer))
    assert buffer == data
    with pytest.raises(CorruptError):
        tier.read_into("step-1/large.shard", border + 1000 - 10, memoryview(buffer))


# ------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("fallback", [False, True], ids=["tmpfile", "fallback"])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_and_directories_are_for_their_owner_alone(
    tier: PosixTier, request: pytest.FixtureRequest, umask: int, *, fallback: bool
) -> None:
    """O125: whatever the umask."""
    if fallback:
        request.getfixturevalue("no_tmpfile")
    before = os.umask(umask)
    try:
        tier.put("step-1/packs/a", b"1")
        tier.upload("step-1/packs/b", BytesSource(b"2"))
        with tier.create("step-1/c") as staged:
            assert os.fstat(staged.fd).st_mode & 0o777 == 0o600
            staged.seal()
    finally:
        os.umask(before)
    paths = [tier.root, *tier.root.rglob("*")]
    assert len(paths) == 6
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# ------------------------------------------------------------------------------- temporaries


def test_with_tmpfile_nothing_has_a_name_before_it_is_sealed(tier: PosixTier) -> None:
    with tier.create("step-1/a") as staged:
        os.write(staged.fd, b"12345")
        assert list((tier.root / "step-1").iterdir()) == []
        staged.seal()
    assert [path.name for path in (tier.root / "step-1").iterdir()] == ["a"]


@pytest.mark.usefixtures("no_tmpfile")
def test_without_tmpfile_a_temporary_is_invisible_and_goes(tier: PosixTier) -> None:
    with tier.create("step-1/a") as staged:
        assert len(temporaries(tier.root)) == 1
        assert list(tier.list_keys("step-1")) == []
        staged.seal()
    with tier.create("step-1/b"):
        pass
    with pytest.raises(RuntimeError), tier.create("step-1/c"):
        raise RuntimeError
    assert [path.name for path in (tier.root / "step-1").iterdir()] == ["a"]


@pytest.mark.usefixtures("no_tmpfile")
def test_sweep_leaves_the_temporary_of_a_living_owner(tier: PosixTier) -> None:
    with tier.create("step-1/a") as staged:
        os.write(staged.fd, b"12345")
        tier.sweep("step-1")
        assert len(temporaries(tier.root)) == 1
        staged.seal()
    assert (tier.root / "step-1/a").read_bytes() == b"12345"


def test_sweep_removes_what_a_killed_owner_left_and_nothing_else(tier: PosixTier) -> None:
    tier.put("step-1/a", b"1")
    tier.put("step-1/below/b", b"1")
    code = f"""
        import errno, os, signal
        from pathlib import Path
        real = os.open
        def refusing(path, flags, *args, **kwargs):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "")
            return real(path, flags, *args, **kwargs)
        os.open = refusing
        from dcp_tiered.tiers.posix import PosixTier
        tier = PosixTier(Path({str(tier.root)!r}), Path({str(tier.base)!r}), "local")
        with tier.create("step-1/never") as staged:
            os.write(staged.fd, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -9
    assert len(temporaries(tier.root)) == 1
    tier.sweep("step-1")
    assert temporaries(tier.root) == []
    assert set(tier.list_keys("step-1")) == {"step-1/a", "step-1/below/b"}
    tier.sweep("step-2")


@pytest.mark.usefixtures("no_tmpfile")
def test_a_sweeper_between_creation_and_lock_does_no_harm(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the name away; the writer notices and takes another one."""
    real = fcntl.flock
    swept: list[Path] = []

    def late(fd: int, operation: int) -> None:
        if not operation & fcntl.LOCK_NB and not swept:
            swept.extend(temporaries(tier.root))
            tier.sweep("step-1")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    tier.put("step-1/a", b"12345")
    assert len(swept) == 1
    assert tier.get("step-1/a", 5) == b"12345"
    assert temporaries(tier.root) == []


@pytest.mark.usefixtures("no_tmpfile")
def test_a_file_system_without_locks_can_be_written(
    tier: PosixTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without `-o flock`: no sweeper can take a lock either, so temporaries stay."""

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with tier.create("step-1/a") as staged:
        tier.sweep("step-1")
        assert len(temporaries(tier.root)) == 1
        staged.seal()
    assert tier.head("step-1/a").length == 0


def cached_pages(path: Path) -> int:
    """Count pages of a file in the page cache, by reads that may not wait and do not read ahead."""
    fd, cached = os.open(path, os.O_RDONLY), 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for at in range(0, os.fstat(fd).st_size, mmap.PAGESIZE):
        try:
            cached += os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
    os.close(fd)
    return cached


def test_a_cold_range_in_aligned_memory_is_read_around_the_page_cache(tier: PosixTier) -> None:
    """The answer is right either way; the second, unaligned read shows that the count can rise."""
    data = pattern(4 << 20)
    path = tier.path("big")
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no O_DIRECT here")
    finally:
        os.close(fd)
    aligned = memoryview(mmap.mmap(-1, 3 << 20))
    tier.read_into("big", mmap.PAGESIZE, aligned)
    assert aligned == data[mmap.PAGESIZE : mmap.PAGESIZE + len(aligned)]
    assert cached_pages(path) <= 8
    unaligned = memoryview(bytearray((3 << 20) + 1))[1:]
    tier.read_into("big", mmap.PAGESIZE, unaligned)
    assert unaligned == aligned
    assert cached_pages(path) >= len(aligned) // mmap.PAGESIZE
