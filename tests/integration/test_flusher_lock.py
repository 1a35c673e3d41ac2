"""The lock that keeps flushers single: a look does not disturb it, a request hits the one meant."""

import json
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_tiered.services import identity
from dcp_tiered.services.lock import FlusherLock
from tests.support import workers
from tests.support.disks import small_disk


def test_a_look_never_turns_a_flusher_away(tmp_path: Path) -> None:
    """A rank that polls `wait` looks many times a second, also while a flusher starts."""
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            FlusherLock(tmp_path).holder()

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            with FlusherLock(tmp_path).hold(None) as mine:
                assert mine
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_two_never_hold_it(tmp_path: Path) -> None:
    with FlusherLock(tmp_path).hold(identity.current()) as first:
        assert first
        with FlusherLock(tmp_path).hold(identity.current()) as second:
            assert not second
        holder = FlusherLock(tmp_path).holder()
        assert holder is not None
        assert holder.flusher == identity.current()
        assert not holder.is_orphaned()
    assert FlusherLock(tmp_path).holder() is None


def hold_and_die(path: str) -> None:
    with FlusherLock(Path(path)).hold(None):
        os._exit(9)


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    process, _ = workers.start(hold_and_die, str(tmp_path))
    process.join(30)
    assert process.exitcode == 9
    assert json.loads((tmp_path / "flusher.lock").read_bytes())["pid"] == process.pid
    assert FlusherLock(tmp_path).holder() is None


def test_a_request_to_hand_over_is_for_one_holder(tmp_path: Path) -> None:
    """A request that comes too late must not send the successor away, who was not meant."""
    lock = FlusherLock(tmp_path)
    with lock.hold(None):
        FlusherLock(tmp_path).ask_to_hand_over()
        assert lock.asked_to_hand_over()
        late = (tmp_path / "flusher.takeover").read_text()
    with lock.hold(None):
        assert not lock.asked_to_hand_over()
        other = replace(identity.current(), pid=1, started="1")
        (tmp_path / "flusher.takeover").write_text(other.text())
        assert not lock.asked_to_hand_over()
        (tmp_path / "flusher.takeover").write_text(late)
        assert lock.asked_to_hand_over()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_holder_ends_when_the_run_directory_is_no_longer_its_own(
    how: str, tmp_path: Path
) -> None:
    lock = FlusherLock(tmp_path)
    with lock.hold(None):
        assert not lock.asked_to_hand_over()
        (tmp_path / "flusher.lock").unlink()
        if how == "replaced":
            with FlusherLock(tmp_path).hold(None) as mine:
                assert mine
        assert lock.asked_to_hand_over()


def test_a_process_is_known_by_more_than_its_pid() -> None:
    here = identity.current()
    assert identity.is_running(here.text())
    assert not identity.is_running(replace(here, started="1").text())
    assert not identity.is_running(replace(here, host="elsewhere").text())
    assert not identity.is_running("no-identity")
    assert identity.from_json(here.to_json()) == here
    assert identity.from_json({**here.to_json(), "pid": "1"}) is None


def test_the_next_holder_says_who_it_is_on_a_full_disk(tmp_path: Path) -> None:
    """A holder that nobody knows is neither asked to hand over nor replaced when it hangs."""
    with small_disk(tmp_path, 4) as disk:
        lock = FlusherLock(disk.path)
        with lock.hold(None):
            pass
        assert not lock.was_killed()
        with (disk.path / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with lock.hold(None):
            holder = lock.holder()
            assert holder is not None
            assert holder.flusher == identity.current()
