"""The size of parts, and the window that a part is sent through."""

import io
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered import config, stack
from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.tiers.s3 import S3Tier, part_size
from dcp_tiered.tiers.s3_body import Window, send_in_blocks
from tests.support.sources import BytesSource, pattern

_MIB, _GIB = 1 << 20, 1 << 30


@given(st.integers(1, 50 * 10**12), st.integers(1, 10 * _GIB))
def test_no_object_takes_more_parts_than_s3_allows(length: int, wanted: int) -> None:
    """O064."""
    part = part_size(length, wanted)
    assert 5 * _MIB <= part <= 5 * _GIB
    assert -(-length // part) <= 10_000


@pytest.mark.parametrize(
    ("length", "wanted", "part"),
    [
        (1, 64 * _MIB, 64 * _MIB),
        (1 << 40, 64 * _MIB, -(-(1 << 40) // 10_000)),
        (10_000 * 64 * _MIB, 64 * _MIB, 64 * _MIB),
        (10_000 * 64 * _MIB + 1, 64 * _MIB, 64 * _MIB + 1),
        (100, 1, 5 * _MIB),
        (100, 6 * _GIB, 5 * _GIB),
        (10_000 * 5 * _GIB, 1, 5 * _GIB),
    ],
)
def test_parts_are_as_large_as_wanted_within_the_limits(
    length: int, wanted: int, part: int
) -> None:
    """O064."""
    assert part_size(length, wanted) == part


def test_what_s3_does_not_take_is_refused() -> None:
    """O064."""
    with pytest.raises(InvalidError):
        part_size(10_000 * 5 * _GIB + 1, 64 * _MIB)


@given(
    st.integers(0, 200),
    st.integers(0, 50),
    st.lists(st.one_of(st.integers(-1, 60), st.none()), max_size=20),
)
def test_a_window_reads_as_a_file_of_its_bytes_does(
    length: int, start: int, steps: list[int | None]
) -> None:
    data = pattern(length + start + 10)
    source = BytesSource(data)
    part = data[start : start + length]
    window = Window("k", source, start, length, BytesSource(part).crc32c)
    file = io.BytesIO(part)
    assert len(window) == length
    for step in steps:
        if step is None:
            assert window.seek(0) == file.seek(0)
        else:
            assert window.read(step) == file.read(step)
        assert window.tell() == file.tell()


def test_a_window_keeps_the_end_of_damaged_bytes_back() -> None:
    """So that no store, however careless, can take them for a whole object."""
    source = BytesSource(pattern(1000))
    window = Window("k", source, 0, 1000, source.crc32c ^ 1)
    for _ in range(2):
        window.seek(0)
        assert len(window.read(999)) == 999
        with pytest.raises(CorruptError):
            window.read(1)


def test_a_window_of_a_stopped_upload_ends() -> None:
    source = BytesSource(pattern(1000))
    stop = threading.Event()
    window = Window("k", source, 0, 1000, source.crc32c, stop)
    window.read(10)
    stop.set()
    with pytest.raises(InterruptedError):
        window.read(10)


@pytest.mark.parametrize("length", [0, 1, 256 << 10, (256 << 10) + 1, 1_000_000])
def test_a_body_is_sent_in_large_blocks_and_again_from_its_start(length: int) -> None:
    source = BytesSource(pattern(length))
    body = SimpleNamespace(
        body=Window("k", source, 0, length, source.crc32c), headers={"Content-Length": str(length)}
    )
    send_in_blocks(body)
    for _ in range(2):
        blocks = list(body.body)
        assert b"".join(blocks) == source.data
        assert len(blocks) == -(-length // (256 << 10))
        body.body.seek(0)


@pytest.mark.parametrize(("wanted", "made"), [(1 << 20, 16 << 20), (64 << 20, 64 << 20)])
def test_a_run_has_no_parts_below_16_mib(wanted: int, made: int) -> None:
    """Where a pack is larger than one; and 10,000 of them are more than any pack holds."""
    run = config.settings("tiered::s3://bucket/run", limits=config.Limits(part_bytes=wanted))
    tier = stack.durable_tier(run)
    assert isinstance(tier, S3Tier)
    assert part_size(run.limits.pack_bytes_target, tier._part_bytes) == made
