"""KvikIO writes what it is given, on its device path, with a stub in place of the CUDA driver."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from dcp_tiered.engines.choose import probe
from tests.support.on_stub import ITEMS, LENGTH, noise

ROOT = Path(__file__).parents[3]
BLOCK = 256 << 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed; make brings it"
    ),
]

Scene = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stub driver."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    directory = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests/support/cuda_stub.c"
    library = directory / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return directory


@pytest.fixture
def scene(driver: Path, tmp_path: Path) -> Scene:
    """Return what plays a scene in a process of its own, in an empty working directory."""
    here = tmp_path / "cwd"
    here.mkdir()
    paths = [str(driver), os.environ.get("LD_LIBRARY_PATH", "")]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def play(name: str, directory: Path = tmp_path) -> dict[str, Any]:
        if not probe(directory).direct:
            pytest.skip(f"no O_DIRECT below {directory}")
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.on_stub", name, directory],
            cwd=here,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return play


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", mount]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("needs root and mount")
    yield mount
    subprocess.run(["umount", mount], check=True)


def image() -> bytes:
    expected = bytearray(LENGTH)
    for number, (_, start, length) in enumerate(ITEMS):
        expected[start : start + length] = noise(number, length).tobytes()
    return bytes(expected)


def sums() -> list[list[int]]:
    items = [noise(number, length).tobytes() for number, (*_, length) in enumerate(ITEMS)]
    return [[crc32c(item[at : at + BLOCK]) for at in range(0, len(item), BLOCK)] for item in items]


def test_one_file_holds_host_and_device_items(scene: Scene, tmp_path: Path) -> None:
    """Also: every buffer is dropped by its maker at once, and nothing is left in the directory."""
    found = scene("mixed")
    assert (tmp_path / "image").read_bytes() == image()
    assert found["crcs"] == sums()
    large = [n for kind, at, n in ITEMS if kind == "device" and n >= 1 << 20 and not at % 4096]
    assert found["posix"] == sum(length - length % 4096 for length in large)
    assert found["copies"] >= len(large), "KvikIO did not see device memory"
    assert found["cwd"] == [], "a log of cuFile"
    assert found["compat"] == 2, "the mode of other users of KvikIO in the process is theirs"


def test_memory_that_cufile_cannot_take_goes_through_the_host(scene: Scene, tmp_path: Path) -> None:
    """As with expandable_segments. cuFile itself would not even start here."""
    found = scene("not_plain")
    assert (tmp_path / "image").read_bytes() == image()
    assert found["crcs"] == sums()
    assert (found["copies"], found["posix"]) == (0, 0)


def test_a_full_disk_keeps_its_errno(scene: Scene, small_mount: Path) -> None:
    found = scene("full", small_mount)
    assert found["codes"] == ["ENOSPC"] * 3


def test_a_save_that_is_cancelled_waits_for_what_reads_its_memory(scene: Scene) -> None:
    assert scene("cancelled")["new_files"] == 0


def test_a_forked_process_is_refused_instead_of_waiting_for_ever(scene: Scene) -> None:
    assert scene("forked")["status"] == 3


def test_the_probe_reads_back_what_it_wrote_and_leaves_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    found = scene("prove")
    assert found["gds_bytes"] == 0
    assert found["left"] == ["cwd"]
