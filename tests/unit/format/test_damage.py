"""Damaged bytes end in CorruptError or InvalidError, or mean what they meant before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.footer import TRAILER_BYTES, decode_trailer
from dcp_tiered.format.records import (
    decode_record,
)
from dcp_tiered.format.shardfile import (
    END_MAGIC,
    decode_header,
)
from tests.unit.format.samples import (
    PACK,
    READERS,
    REFUSED,
    SHARD,
    STORED,
    TAIL,
    read_tail,
)


@pytest.mark.parametrize("kind", READERS)
def test_every_cut_is_refused(kind: str) -> None:
    read, data = READERS[kind]
    for length in range(len(data)):
        with pytest.raises(REFUSED):
            read(data[:length])


@pytest.mark.parametrize("kind", READERS)
def test_every_flipped_bit_is_refused_or_changes_nothing(kind: str) -> None:
    """O050 and alike: a disk that garbles one bit. Only the text for people is not summed."""
    read, data = READERS[kind]
    expected = repr(read(data))
    refused = 0
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = read(bytes(damaged))
        except REFUSED:
            refused += 1
        else:
            assert repr(found) == expected
    assert refused >= len(data) * 8 * 0.95


@pytest.mark.parametrize("kind", ["footer", "pack", "manifest", "record"])
def test_bytes_behind_the_end_are_refused(kind: str) -> None:
    read, data = READERS[kind]
    for more in (b"x", bytes(64), data):
        with pytest.raises(REFUSED):
            read(data + more)


@pytest.mark.parametrize("kind", READERS)
@given(noise=st.binary(max_size=300))
def test_noise_is_refused(kind: str, noise: bytes) -> None:
    read, data = READERS[kind]
    for attempt in (noise, data[: len(data) // 2] + noise, noise.ljust(4096, b"\0")):
        with pytest.raises(REFUSED):
            read(attempt)


def test_another_file_of_ours_is_refused() -> None:
    with pytest.raises(CorruptError, match="wrong magic"):
        decode_header(b"DCPTPAK1" + SHARD.data[8:4096])
    with pytest.raises(CorruptError, match="DCPTEND1"):
        read_tail(PACK.tail, PACK.length - len(PACK.tail))
    with pytest.raises(CorruptError, match="wrong format name"):
        decode_record(STORED.partition(b"\n")[0], "step-1")


@pytest.mark.parametrize("shift", [-64, 1, 1 << 40])
def test_a_trailer_that_points_elsewhere_is_refused(shift: int) -> None:
    trailer = bytearray(TAIL[-TRAILER_BYTES:])
    trailer[:8] = (SHARD.footer_start + shift).to_bytes(8, "little")
    with pytest.raises(CorruptError, match="says that it has"):
        decode_trailer(bytes(trailer), len(SHARD.data), END_MAGIC)


def test_a_file_longer_than_its_trailer_says_is_refused() -> None:
    with pytest.raises(CorruptError, match="says that it has"):
        decode_trailer(TAIL[-TRAILER_BYTES:], len(SHARD.data) + 1, END_MAGIC)
