"""The note that gives up a flush: what a disk garbled frees nothing."""

import json
from dataclasses import replace

import pytest

from dcp_tiered.errors import CorruptError, InvalidError
from dcp_tiered.format.superseded import Superseded, decode_superseded, encode_superseded

NOTE = Superseded(
    checkpoint_id="step-1",
    attempt="0123456789abcdef",
    sequence=7,
    launch="host:1",
    alone=True,
    shards=("0-0123456789abcdef.shard", "1-0123456789abcdef.shard"),
    reason="step-3 needs room",
)
DATA = encode_superseded(NOTE, "test")


def test_a_note_reads_back() -> None:
    assert decode_superseded(DATA, "step-1", NOTE.attempt) == NOTE
    assert json.loads(DATA)["shards"] == list(NOTE.shards)


def test_no_flipped_bit_is_believed() -> None:
    for at in range(len(DATA)):
        for bit in range(8):
            garbled = bytearray(DATA)
            garbled[at] ^= 1 << bit
            with pytest.raises((CorruptError, InvalidError)):
                decode_superseded(bytes(garbled), "step-1", NOTE.attempt)


@pytest.mark.parametrize("where", [("step-2", NOTE.attempt), ("step-1", "f" * 16)])
def test_a_note_in_another_place_is_refused(where: tuple[str, str]) -> None:
    with pytest.raises(CorruptError, match="another attempt"):
        decode_superseded(DATA, *where)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards": ("../../0-0123456789abcdef.shard",)},
        {"shards": ("published-1.json",)},
        {"alone": 1},
        {"sequence": -1},
        {"reason": "x" * 1001},
    ],
)
def test_what_a_reader_would_refuse_is_not_written(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidError):
        encode_superseded(replace(NOTE, **wrong), "test")
