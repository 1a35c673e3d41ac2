"""Uploads that are paced, counted, refused and cut off."""

import math
import time
from pathlib import Path

import pytest

from dcp_tiered import metrics
from dcp_tiered.services.outgoing import Outgoing, TooLateError
from dcp_tiered.tiers.mounted import MountedTier
from tests.support.sources import BytesSource, pattern
from tests.support.tiers import mounted_tier

_MIB = 1 << 20


def tier(tmp_path: Path) -> MountedTier:
    return mounted_tier(tmp_path / "run", tmp_path)


def stored(tmp_path: Path) -> dict[str, bytes]:
    files = (path for path in (tmp_path / "run").rglob("*") if path.is_file())
    return {str(path.relative_to(tmp_path / "run")): path.read_bytes() for path in files}


def test_the_pace_is_kept_by_the_clock_and_counted(tmp_path: Path) -> None:
    """Three blocks of 8 MiB: the first passes at once, the others wait for those before them."""
    data = pattern(24 * _MIB)
    paced = Outgoing(tier(tmp_path), 8 * _MIB)
    begun = time.monotonic()
    paced.upload("a/x.pack", BytesSource(data))
    seconds = time.monotonic() - begun
    values = metrics.flat(paced.samples())
    assert values["dcp_tiered_upload_bytes_total"] == len(data)
    assert 0 < values["dcp_tiered_pacing_seconds_total"] <= seconds
    assert stored(tmp_path) == {"a/x.pack": data}
    assert paced.sent == {"a": len(data)}


def test_without_a_rate_nothing_waits(tmp_path: Path) -> None:
    free = Outgoing(tier(tmp_path), None)
    free.upload("a/x.pack", BytesSource(pattern(8 * _MIB)))
    assert metrics.flat(free.samples())["dcp_tiered_pacing_seconds_total"] == 0


def test_what_would_end_too_late_is_not_begun(tmp_path: Path) -> None:
    """Not before a rate is known; what is there already says nothing about the rate."""
    due = math.inf
    out = Outgoing(tier(tmp_path), None, lambda: due)
    source = BytesSource(pattern(_MIB))
    out.upload("a/x.pack", source)
    out.upload("a/x.pack", source)
    due = time.monotonic() + 60
    huge = BytesSource(b"")
    huge.length = 1 << 60
    with pytest.raises(TooLateError, match="not begun"):
        out.upload("b/x.pack", huge)
    assert huge.bytes_read == 0
    out.upload("c/x.pack", source)
    assert sorted(stored(tmp_path)) == ["a/x.pack", "c/x.pack"]


def test_what_is_not_over_in_time_is_cut_off(tmp_path: Path) -> None:
    due = math.inf
    out = Outgoing(tier(tmp_path), None, lambda: due)

    class Late(BytesSource):
        def pread(self, length: int, start: int) -> bytes:
            nonlocal due
            due = time.monotonic()
            return super().pread(length, start)

    source = Late(pattern(64 * _MIB))
    with pytest.raises(TooLateError, match="cut off"):
        out.upload("a/x.pack", source)
    assert source.bytes_read < source.length
    assert stored(tmp_path) == {}
    assert out.sent == {}
