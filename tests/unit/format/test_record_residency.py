"""A commit says where it went and why that was allowed; one without a policy says nothing new."""

import json
from dataclasses import replace

import pytest
from awscrt.checksums import crc32c

from dcp_tiered.errors import CorruptError
from dcp_tiered.format.records import decode_record, encode_record
from tests.unit.format.samples import COMMIT

SAID = {
    "policy_sha256": "a" * 64,
    "target": "s3://ckpt",
    "facts": [{"name": "location", "verdict": "ALLOW", "values": ["aws:eu-central-1"]}],
    "attestations": [],
}


def test_a_commit_keeps_its_evidence():
    commit = replace(COMMIT, residency=SAID)
    data = encode_record(commit, "0")
    assert json.loads(data)["residency"] == SAID
    assert decode_record(data, COMMIT.checkpoint_id) == commit


def test_without_a_policy_nothing_is_stored():
    assert b"residency" not in encode_record(COMMIT, "0")


@pytest.mark.parametrize("value", ["x", [], 3, {str(n): n for n in range(100)}])
def test_another_shape_is_damage(value):
    fields = json.loads(encode_record(COMMIT, "0")) | {"residency": value}
    del fields["crc32c"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    fields["crc32c"] = crc32c(text.encode())
    with pytest.raises(CorruptError, match="residency"):
        decode_record(json.dumps(fields).encode(), COMMIT.checkpoint_id)
