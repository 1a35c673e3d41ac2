"""A file that is only held in memory reads as the file would."""

from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.engines.held import HeldImage

PIECES = st.lists(st.tuples(st.integers(0, 50), st.binary(max_size=80)), max_size=8)


@given(PIECES, st.integers(0, 900), st.integers(0, 900))
def test_reads_what_a_file_would_hold(
    pieces: list[tuple[int, bytes]], one: int, other: int
) -> None:
    image, file = HeldImage(), b""
    for gap, data in pieces:
        file += bytes(gap)
        crcs = image.append(len(file), memoryview(data))
        assert crcs == ([crc32c(data)] if data else [])
        file += data
    file += bytes(1000 - len(file)) if len(file) < 1000 else b""
    image.finish(len(file))
    first, last = sorted((one, other))
    assert image.length == len(file)
    assert image.pread(last - first, first) == file[first:last]
    assert image.checksum(last - first, first) == crc32c(file[first:last])
