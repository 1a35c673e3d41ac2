"""T12: what a mount says of itself, and which marker files count."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dcp_tiered.tiers.mount_residency import MARKER, MountLook, mount_of, read_marker

GOOD = {"site_id": "fra-lus-1", "replicated_to": [], "public": False}
UID = os.getuid()


def put_marker(directory: Path, fields=GOOD, mode=0o644) -> Path:
    path = directory / MARKER
    path.write_text(json.dumps(fields))
    path.chmod(mode)
    return path


def test_a_mount_is_found_as_findmnt_finds_it(tmp_path: Path):
    (tmp_path / "a b").mkdir()
    for path in (tmp_path / "a b", Path("/proc/self"), Path("/")):
        command = ["findmnt", "-n", "-o", "TARGET,FSTYPE,SOURCE", "-T", str(path.resolve())]
        point, fstype, source = subprocess.check_output(command, text=True).split()[:3]
        found = mount_of(path)
        assert (str(found.point), found.fstype) == (point, fstype)
        assert source.startswith(found.source)


def test_a_marker_counts(tmp_path: Path):
    put_marker(tmp_path)
    assert read_marker(tmp_path, UID) == (GOOD, "")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_marker_that_others_can_write_does_not_count(tmp_path: Path, mode: int):
    put_marker(tmp_path, mode=mode)
    marker, why_not = read_marker(tmp_path, UID)
    assert marker is None
    assert "written by others" in why_not


def test_a_marker_of_another_owner_does_not_count(tmp_path: Path):
    """A copy that a user made is the user's."""
    put_marker(tmp_path)
    assert read_marker(tmp_path, UID + 1)[0] is None


def test_a_link_is_no_marker(tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / MARKER).symlink_to(put_marker(there))
    assert read_marker(tmp_path, UID)[0] is None


def test_a_pipe_is_no_marker_and_hangs_nothing(tmp_path: Path):
    os.mkfifo(tmp_path / MARKER, 0o644)
    assert read_marker(tmp_path, UID)[0] is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 60_000, '"x"'])
def test_what_is_no_object_is_no_marker(tmp_path: Path, text: str):
    (tmp_path / MARKER).write_text(text)
    assert read_marker(tmp_path, UID)[0] is None


@pytest.fixture
def mounted(tmp_path: Path):
    """Give an ext4 of our own, which only root can mount; skipped for others."""
    image, point = tmp_path / "image", tmp_path / "m"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False).returncode:
        pytest.skip("no mkfs.ext4")
    mount = ["mount", "-o", "loop", str(image), str(point)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)


def facts_of(look: MountLook):
    seen = look()
    return seen.target, {fact.name: fact for fact in seen.facts}


def test_facts_of_a_mount(mounted: Path):
    put_marker(mounted)
    (mounted / "run").mkdir()
    target, facts = facts_of(MountLook(mounted / "run", UID))
    assert target == f"file://{mounted}"
    assert {fact.verdict.value for fact in facts.values()} == {"ALLOW"}
    assert {"site_id=fra-lus-1", "fstype=ext4"} <= set(facts["mount"].values)


def test_what_a_site_says_counts(mounted: Path):
    put_marker(mounted, {"site_id": "x", "replicated_to": ["posix:muc"], "public": True})
    facts = facts_of(MountLook(mounted, UID))[1]
    assert facts["not_public"].verdict == "DENY"
    assert facts["replication"].values == ("posix:muc",)
    put_marker(mounted, {"site_id": "x"})
    facts = facts_of(MountLook(mounted, UID))[1]
    assert facts["not_public"].verdict == facts["replication"].verdict == "UNKNOWN"


def test_a_mount_that_is_gone_is_noticed(mounted: Path):
    """The root disk behind an unmounted point must not be taken for it."""
    put_marker(mounted)
    look = MountLook(mounted, UID)
    assert facts_of(look)[1]["mount"].verdict == "ALLOW"
    subprocess.run(["umount", str(mounted)], check=True)
    put_marker(mounted)  # even with a marker
    assert facts_of(look)[1]["mount"].verdict == "DENY"


def test_memory_is_no_durable_tier():
    facts = facts_of(MountLook(Path("/dev/shm"), UID))[1]
    assert facts["mount"].verdict == "DENY"


def test_a_directory_that_is_gone_is_unknown(tmp_path: Path):
    facts = facts_of(MountLook(tmp_path / "gone", UID))[1]
    assert {fact.verdict.value for fact in facts.values()} == {"UNKNOWN"}
