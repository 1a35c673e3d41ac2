"""`dcp-tiered doctor` tells what a mount can do, and fails where nothing can be saved."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NEEDS_NO_TORCH = (
    "import sys; sys.modules['torch'] = None; from dcp_tiered.cli import main; sys.exit(main())"
)


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NEEDS_NO_TORCH, "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def mounted(directory: Path, options: str) -> Path:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "dcp-tiered-test", directory]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("needs root and mount")
    return directory


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    mount = mounted(tmp_path / "mount", "size=1m")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_shows_the_mount_and_why_without_torch_or_a_gpu(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    stat = os.statvfs(tmp_path)
    assert found["bytes_free"] == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.1)
    assert found["engine"] == ("direct" if found["direct"] else "buffered")
    assert "through host memory" in found["device_engine"]
    assert "is not installed" in found["device_reason"]
    assert list(tmp_path.iterdir()) == []
    table = doctor(tmp_path).stdout
    for text in (found["direct_reason"], found["device_reason"], found["file_system"]):
        assert text in table


def test_names_the_file_system(small_mount: Path) -> None:
    found = json.loads(doctor(small_mount, "--json").stdout)
    assert found["file_system"] == "tmpfs dcp-tiered-test"
    assert found["bytes_free"] == 1 << 20


def test_a_full_disk_is_unavailable_and_does_not_look_like_one_without_o_direct(
    small_mount: Path,
) -> None:
    (small_mount / "big").write_bytes(bytes(1 << 20))
    done = doctor(small_mount)
    assert done.returncode == 4
    assert "ENOSPC" in done.stderr
    assert "HINT" in done.stderr


def test_what_is_not_there_or_not_writable_is_invalid(tmp_path: Path) -> None:
    absent = doctor(tmp_path / "absent")
    assert absent.returncode == 3
    assert "mkdir -p" in absent.stderr
    (tmp_path / "file").touch()
    assert doctor(tmp_path / "file").returncode == 3


def test_a_read_only_mount_is_invalid(small_mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_mount], check=True)
    done = doctor(small_mount)
    assert done.returncode == 3
    assert "EROFS" in done.stderr
