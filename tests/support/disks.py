"""A real disk that is small, and fails when a test says so: ext4 on a loop device."""

import ctypes
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_EXT4_IOC_SHUTDOWN = 0x8004587D
_SHUTDOWN_WITHOUT_FLUSH = 2


@dataclass
class Disk:
    """A mounted file system."""

    path: Path

    def fail(self) -> None:
        """Let every later write and sync fail with EIO, as when the device is gone."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, ctypes.c_uint32(_SHUTDOWN_WITHOUT_FLUSH))
        finally:
            os.close(fd)

    def make_read_only(self) -> None:
        _run("mount", "-o", "remount,ro", self.path)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let every write hang, as when the target behind it does not answer."""
        _run("fsfreeze", "--freeze", self.path)
        try:
            yield
        finally:
            _run("fsfreeze", "--unfreeze", self.path)


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Disk]:
    """Mount a disk of its own; skips where that is not allowed."""
    if os.geteuid():
        pytest.skip("only root can mount a disk")
    image, mount = directory / "disk.img", directory / "disk"
    mount.mkdir()
    image.touch()
    os.truncate(image, megabytes << 20)
    try:
        _run("mke2fs", "-q", "-t", "ext4", image)
        _run("mount", "-o", "loop", image, mount)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no loop device with ext4 here: {exc}")
    try:
        yield Disk(mount)
    finally:
        _run("umount", "--lazy", mount)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
