"""Device memory, as far as a CPU can stand in for it: checksums and copies are exact."""

import numpy as np
import pytest
import torch
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dcp_tiered.engines import device
from dcp_tiered.engines.device import TensorBytes, block_crcs

BLOCK = 256 << 10


def noise(length: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, length, dtype="u1"))


def expected(flat: torch.Tensor) -> list[int]:
    data = bytes(flat.numpy())
    return [crc32c(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


@pytest.mark.parametrize("length", [0, 1, 4, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
def test_checksums_are_those_of_the_host(length: int) -> None:
    flat = noise(length)
    assert block_crcs(flat) == expected(flat)


def test_checksums_go_on_behind_the_first_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_PIECE_BYTES", 2 * BLOCK)
    flat = noise(5 * BLOCK + 1)
    assert block_crcs(flat) == expected(flat)


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F])
def test_signs_of_words_do_not_matter(fill: int) -> None:
    flat = torch.full((BLOCK,), fill, dtype=torch.uint8)
    assert block_crcs(flat) == expected(flat)


@given(st.integers(0, 2 * BLOCK + 9), st.integers(0, 9), st.integers(0, 1 << 32))
def test_checksums_of_any_part_of_any_tensor(length: int, offset: int, seed: int) -> None:
    part = noise(length + offset, seed)[offset:]
    assert block_crcs(part) == expected(part)


def test_a_device_without_room_is_summed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: torch.Tensor) -> list[int]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "block_crcs", no_room)
    flat = noise(2 * BLOCK + 5)
    assert TensorBytes(flat).crcs() == expected(flat)


def test_copies_any_part_into_a_buffer() -> None:
    flat = noise(10_000)
    data = TensorBytes(flat)
    buffer = bytearray(3000)
    data.copy_to(7000, memoryview(buffer))
    data.copy_to(0, memoryview(buffer)[:0])
    assert bytes(buffer) == bytes(flat.numpy()[7000:])
    assert data.nbytes == 10_000
