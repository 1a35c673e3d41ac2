"""Block checksums of host memory: the same values whoever asks for them."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_tiered.engines.block_sums import block_crcs
from tests.format_compat.own_decoder import crc32c

BLOCK = 256 << 10


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 777])
def test_the_main_thread_and_others_agree(length: int) -> None:
    data = random.Random(length).randbytes(length)
    real = [crc32c(data[at : at + BLOCK]) for at in range(0, length, BLOCK)]
    assert block_crcs(memoryview(data)) == real
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(block_crcs, memoryview(data)).result() == real
