"""Bytes in the memory of an accelerator: copied in the right order, summed where they lie.

CRC32C without a host pass: the checksum is linear over GF(2), so two halves of a block combine by
"advance the left one over as many zero bytes as the right one has, and xor". That is done for all
pairs at once, words first: each level is four table lookups over half as many values as the one
before. What comes out is the ordinary checksum, so a file looks the same whoever wrote it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from awscrt.checksums import crc32c

from dcp_tiered.format.shardfile import BLOCK_BYTES

_WORD_BYTES = 4
_LEVELS = (BLOCK_BYTES // _WORD_BYTES).bit_length() - 1  # a block is a power of two of words
_PIECE_BYTES = 32 << 20
"""Summed at a time; with the values of the first level that takes about three times as much."""
_ONES = 0xFFFFFFFF


class TensorBytes:
    """The bytes of a tensor on an accelerator, as they are once all work queued so far is done.

    Args:
        flat: One-dimensional, contiguous, of uint8; it is held as long as this lives.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.nbytes = flat.numel()
        self._ready = _record(flat.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Where the bytes lie, for libraries that read device memory."""
        interface: dict[str, Any] = self.flat.__cuda_array_interface__
        return interface

    def synchronize(self) -> None:
        """Wait until the values are there, for readers that know nothing of streams."""
        if self._ready is not None:
            self._ready.synchronize()

    def copy_to(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on; the copy is complete when this returns."""
        if not len(buffer):
            return
        target = torch.frombuffer(buffer, dtype=torch.uint8)
        with self._side_stream():
            target.copy_(self.flat[start : start + len(buffer)], non_blocking=True)
            copied = _record(self.flat.device)
        if copied is not None:
            copied.synchronize()

    def crcs(self) -> list[int]:
        """Return the CRC32C of each 256 KiB block, see `block_crcs`."""
        with self._side_stream():
            try:
                return block_crcs(self.flat)
            except torch.OutOfMemoryError:
                # The trainer needs what is left. The bytes can be summed on the host.
                return [_host_crc(block) for block in self.flat.split(BLOCK_BYTES)]

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Run a block behind what the values wait for, and behind nothing else of the trainer."""
        device = self.flat.device
        if self._ready is None:
            yield
            return
        stream = _side_stream_of(device)
        with torch.get_device_module(device).stream(stream):
            stream.wait_event(self._ready)
            yield


def block_crcs(flat: torch.Tensor) -> list[int]:
    """Return the CRC32C of each 256 KiB block of a tensor, taken on the tensor's device.

    The last block, where it is short, is summed on the host. It runs on the current stream and
    takes about 100 MB there, whatever the size of the tensor.

    Args:
        flat: One-dimensional, contiguous, of uint8.

    Raises:
        torch.OutOfMemoryError: The device has no room for that.
    """
    whole = flat.numel() - flat.numel() % BLOCK_BYTES
    crcs: list[int] = []
    for start in range(0, whole, _PIECE_BYTES):
        crcs += _whole_block_crcs(flat[start : min(whole, start + _PIECE_BYTES)])
    if whole < flat.numel():
        crcs.append(_host_crc(flat[whole:]))
    return crcs


def _host_crc(block: torch.Tensor) -> int:
    return int(crc32c(block.cpu().numpy().data))


def _whole_block_crcs(piece: torch.Tensor) -> list[int]:
    if piece.data_ptr() % _WORD_BYTES or piece.storage_offset() % _WORD_BYTES:
        piece = piece.clone()
    tables = _tables(piece.device)
    values = piece.view(torch.int32)
    for level in range(_LEVELS):
        values = _advance(values[0::2], tables[level]) ^ values[1::2]
    # The tree leaves out the last word's own step. Then what a register that starts with ones adds.
    raw = _advance(values, tables[0]).tolist()
    ones = _advanced(_ONES, BLOCK_BYTES) ^ _ONES
    return [(value & _ONES) ^ ones for value in raw]


def _advance(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Advance registers over zero bytes: the four bytes of each look up what they turn into."""
    result = table[0].index_select(0, values & 0xFF)
    for byte in range(1, _WORD_BYTES):
        # The shift copies the sign; the mask takes it off again.
        index = values.bitwise_right_shift(8 * byte).bitwise_and_(0xFF)
        result ^= table[byte].index_select(0, index)
    return result


@cache
def _tables(device: torch.device) -> torch.Tensor:
    """Return, for each level, what each byte of a register turns into: (16, 4, 256) of int32."""
    rows = [
        [_byte_table(8 * byte, _WORD_BYTES << level) for byte in range(_WORD_BYTES)]
        for level in range(_LEVELS)
    ]
    unsigned = torch.tensor(rows, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).int().to(device)


def _byte_table(shift: int, zeros: int) -> list[int]:
    """Return the registers that a byte at `shift` leaves after `zeros` zero bytes."""
    bits = [_advanced(1 << (shift + bit), zeros) for bit in range(8)]
    table = [0]
    for bit in bits:
        table += [entry ^ bit for entry in table]
    return table


def _advanced(register: int, zeros: int) -> int:
    """Return a register after a number of zero bytes, by the CRC that the host takes.

    The library complements before and after; so does this, which cancels out.
    """
    return _ONES ^ int(crc32c(bytes(zeros), register ^ _ONES))


def _record(device: torch.device) -> Any:
    """Mark the end of what is queued on the current stream; None where nothing is ever queued."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).current_stream(device).record_event()


@cache
def _side_stream_of(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)
