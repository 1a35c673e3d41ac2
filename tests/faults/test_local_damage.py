"""Files of a run's directory rot: the message is clear, nothing loops, and the rest goes on."""

import json
from pathlib import Path

import pytest

from dcp_tiered import CorruptError, TieredWriter
from dcp_tiered.services.progress import read_reports
from tests.conftest import Run, flusher_pids
from tests.support import runs
from tests.support.storage_check import Eyes
from tests.support.workers import await_that

NOTES = ("node.json", "run.json", "flusher.lock", "flusher-status.json")
TYPES = b'{"pid": [], "flusher": {"pid": "x"}, "reports": [{"at": {}}], "node": 7, "url": 1}'


def damaged(how: str, data: bytes) -> bytes:
    whole = {"empty": b"", "list": b"[1, 2]", "types": TYPES, "deep": b"[" * 50_000}
    flipped = bytes(255 - byte for byte in data)
    return {**whole, "cut": data[: len(data) // 2], "noise": flipped}[how]


@pytest.mark.parametrize("how", ["empty", "cut", "noise", "list", "types", "deep"])
def test_damaged_notes_heal(how: str, posix_run: Run) -> None:
    """What is saved before and after becomes durable, whatever the notes say."""
    with runs.no_flusher(posix_run):
        runs.save(posix_run.arguments(), "before", 1)
    directory = runs.run_path(posix_run)
    (directory / "flusher-status.json").write_bytes(b'{"reports": []}')
    for name in NOTES:
        (directory / name).write_bytes(damaged(how, (directory / name).read_bytes()))
    runs.save(posix_run.arguments(), "after", 2)
    runs.wait(posix_run.arguments(), "before")
    runs.wait(posix_run.arguments(), "after")
    assert sorted(Eyes(posix_run).check().commits) == ["after", "before"]
    notes = {name: json.loads((directory / name).read_bytes()) for name in NOTES}
    assert notes["run.json"]["url"] == posix_run.url
    assert notes["flusher.lock"]["flusher"]["pid"] == notes["flusher-status.json"]["pid"]
    (shard,) = runs.shards(posix_run, "after")
    assert notes["node.json"]["node"].encode() in shard.read_bytes()[:4096]


def test_a_damaged_manifest_is_named_and_holds_nothing_up(posix_run: Run) -> None:
    with runs.no_flusher(posix_run):
        runs.save(posix_run.arguments(), "bad", 1)
        runs.save(posix_run.arguments(), "good", 2)
    path = runs.run_path(posix_run) / "bad" / "published-1.json"
    runs.flip_bit(path, path.stat().st_size // 2)
    runs.wait(posix_run.arguments(), "good")
    with TieredWriter(**posix_run.arguments()) as writer:
        lines = {line.checkpoint_id: line for line in writer.status()}
    assert (lines["bad"].state, lines["good"].state) == ("damaged", "durable")
    assert "bad/published-1.json" in (lines["bad"].error or "")
    error = runs.error_of(runs.save, posix_run.arguments(), "bad", 3)
    assert isinstance(error, CorruptError)
    assert str(path) in (error.hint or "")
    assert runs.load(posix_run.arguments()) == 2, "the newest sound one is loaded"
    await_that("the flusher ends", lambda: not flusher_pids(posix_run.local))
    log = (runs.run_path(posix_run) / "flusher.log").read_text()
    assert log.count("skipping a damaged local checkpoint") == 1
    assert "Traceback" not in log
    path.unlink()  # as the hint says
    runs.save(posix_run.arguments(), "bad", 4)
    runs.wait(posix_run.arguments(), "bad")


def test_a_damaged_copy_of_a_record_is_fetched_again(posix_run: Run) -> None:
    runs.save(posix_run.arguments(), "a", 1)
    runs.wait(posix_run.arguments(), "a")
    await_that("the flusher ends", lambda: not flusher_pids(posix_run.local))
    path = runs.run_path(posix_run) / "a" / "record-1.json"
    sound = path.read_bytes()
    runs.flip_bit(path, 10)
    assert runs.load(posix_run.arguments(), "a") == 1
    runs.wait(posix_run.arguments(), "a")
    assert path.read_bytes() == sound
    assert Eyes(posix_run).get("a/record-1.json") == sound


def test_a_damaged_record_in_the_store_stops_its_id_only(posix_run: Run) -> None:
    """I8: nobody can say what that id is, so nobody writes on top of it."""
    with runs.no_flusher(posix_run):
        runs.save(posix_run.arguments(), "a", 1)
        runs.save(posix_run.arguments(), "b", 2)
    record = Path(posix_run.url.removeprefix("tiered::file://")) / "a" / "record-1.json"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"{}")
    error = runs.error_of(runs.wait, posix_run.arguments(), "a")
    assert isinstance(error, CorruptError)
    assert (error.tier, error.key) == ("durable", "a/record-1.json")
    runs.wait(posix_run.arguments(), "b")
    assert record.read_bytes() == b"{}"
    assert read_reports(runs.run_path(posix_run))["a"].state == "damaged"
