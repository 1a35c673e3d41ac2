"""A save wakes the flusher by the time of the run's directory."""

import threading
import time
from pathlib import Path

import pytest

from dcp_tiered.services import doorbell


def test_a_ring_ends_the_wait(tmp_path: Path) -> None:
    before = doorbell.heard([tmp_path])
    time.sleep(0.05)  # the time of a directory is coarse
    bell = threading.Timer(0.1, doorbell.ring, [tmp_path])
    bell.start()
    began = time.monotonic()
    doorbell.wait([tmp_path], before, 600.0)
    bell.join()
    assert time.monotonic() - began < 300.0
    assert doorbell.heard([tmp_path]) != before


def test_a_ring_during_the_look_is_heard(tmp_path: Path) -> None:
    before = doorbell.heard([tmp_path])
    time.sleep(0.05)
    doorbell.ring(tmp_path)
    began = time.monotonic()
    doorbell.wait([tmp_path], before, 600.0)
    assert time.monotonic() - began < 300.0


@pytest.mark.parametrize("paths", [[], ["here"], ["gone"]])
def test_silence_lasts_as_long_as_asked(tmp_path: Path, paths: list[str]) -> None:
    (tmp_path / "here").mkdir()
    runs = [tmp_path / name for name in paths]
    began = time.monotonic()
    doorbell.wait(runs, doorbell.heard(runs), 0.1)
    assert time.monotonic() - began >= 0.1


def test_a_run_that_is_gone_has_no_bell(tmp_path: Path) -> None:
    doorbell.ring(tmp_path / "gone")
    assert not list(tmp_path.iterdir())
