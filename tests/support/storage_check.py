"""Verify a run from its durable objects alone: nothing here imports what wrote them."""

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from awscrt.checksums import crc32c

from tests.format_compat import own_decoder

assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"

_BUCKET_URL = "tiered::s3://"
_RECORD = re.compile(r"([^/]+)/record-([1-9][0-9]*)\.json")


@dataclass
class Checked:
    """What the durable tier says, after all of it has been found true."""

    commits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Commit records by checkpoint id, in the order of their numbers."""

    def attempts(self, checkpoint_id: str) -> list[str]:
        """Return the committed attempts of an id, the one that counts last."""
        return [str(commit["attempt"]) for commit in self.commits.get(checkpoint_id, [])]


class Eyes:
    """Look at a run's durable objects as an outsider does, with one client for many looks."""

    def __init__(self, run: Any) -> None:
        self._root: Path | None = None
        self._proved: set[str] = set()
        if run.server is None:
            self._root = Path(run.url.removeprefix("tiered::file://"))
            return
        self.client = run.server.client()
        self._bucket, _, self._prefix = run.url.removeprefix(_BUCKET_URL).partition("/")

    def keys(self) -> dict[str, int]:
        """Return key and length of every object below the run root."""
        if self._root is not None:
            return self._files(self._root)
        pages = self.client.get_paginator("list_objects_v2")
        return {
            entry["Key"].removeprefix(f"{self._prefix}/"): entry["Size"]
            for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}/")
            for entry in page.get("Contents", ())
        }

    def get(self, key: str) -> bytes:
        """Return an object."""
        if self._root is not None:
            return (self._root / key).read_bytes()
        reply = self.client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")
        data: bytes = reply["Body"].read()
        return data

    def commits(self, checkpoint_id: str) -> list[dict[str, Any]]:
        """Return the commit records of an id, unchecked, in the order of their numbers."""
        numbered = [(m, key) for key in self.keys() if (m := _RECORD.fullmatch(key))]
        mine = sorted((int(m[2]), key) for m, key in numbered if m[1] == checkpoint_id)
        records = [json.loads(self.get(key)) for _, key in mine]
        return [record for record in records if record["kind"] == "commit"]

    def open_uploads(self) -> list[str]:
        """Return the keys of multipart uploads that are neither completed nor aborted."""
        if self._root is not None:
            return []
        return [upload["Key"] for upload in self._uploads()]

    def upload_ids(self) -> list[str]:
        """Return the ids of the same."""
        return [upload["UploadId"] for upload in self._uploads()]

    def _uploads(self) -> list[dict[str, Any]]:
        reply = self.client.list_multipart_uploads(Bucket=self._bucket, Prefix=f"{self._prefix}/")
        return list(reply.get("Uploads") or ())

    def check(self) -> Checked:
        """Prove of every commit that what it claims is there, byte for byte."""
        return check_durable(self.keys(), self.get, set())

    def check_new(self) -> Checked:
        """Do the same for what no earlier call has proved: long tests cannot read all again."""
        return check_durable(self.keys(), self.get, self._proved)

    @staticmethod
    def _files(root: Path) -> dict[str, int]:
        found = {}
        for path in root.rglob("*"):
            if path.is_file() and not path.name.startswith(".tmp-"):
                found[str(path.relative_to(root))] = path.stat().st_size
        return found


def manifest_meta(stored: bytes) -> dict[str, Any]:
    """Decode the JSON part of a manifest with nothing but zstd and struct."""
    line, _, body = stored.partition(b"\n")
    size = json.loads(line)["raw_bytes"]
    raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=max(size, 1))
    (length,) = struct.unpack_from("<I", raw)
    meta: dict[str, Any] = json.loads(raw[4 : 4 + length])["meta"]
    return meta


def published(run_path: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest that counts of every id on a local tier."""
    found: dict[str, dict[str, Any]] = {}
    for directory in run_path.iterdir():
        numbers = sorted(
            int(path.stem.removeprefix("published-")) for path in directory.glob("published-*.json")
        )
        if numbers:
            stored = (directory / f"published-{numbers[-1]}.json").read_bytes()
            found[directory.name] = manifest_meta(stored)
    return found


def check_durable(
    keys: Mapping[str, int], get: Callable[[str], bytes], proved: set[str]
) -> Checked:
    """Prove of every commit that no removal came after that what it claims is there, byte for byte.

    Args:
        keys: Key and length of all objects.
        get: Returns an object.
        proved: Records proved before, of which only the packs' lengths are looked at again;
            what is proved now is added.

    Raises:
        AssertionError: A commit claims something that is not so.
    """
    checked = Checked()
    numbered = [(match, key) for key in keys if (match := _RECORD.fullmatch(key))]
    withdrawn: set[str] = set()
    for match, key in sorted(numbered, key=lambda one: (one[0][1], -int(one[0][2]))):
        record = json.loads(get(key))
        assert record["checkpoint_id"] == match[1], key
        if record["kind"] == "expired":
            withdrawn.add(match[1])
        if record["kind"] == "commit" and match[1] not in withdrawn:
            for pack in record["packs"]:
                assert keys.get(f"{match[1]}/{pack['name']}") == pack["length"], pack
            if key not in proved:
                _check_commit(match[1], record, get)
                proved.add(key)
            checked.commits.setdefault(match[1], []).insert(0, record)
    return checked


def _check_commit(checkpoint_id: str, commit: dict[str, Any], get: Callable[[str], bytes]) -> None:
    manifest = get(f"{checkpoint_id}/manifest-{commit['attempt']}.json")
    assert hashlib.sha256(manifest).hexdigest() == commit["manifest_sha256"]
    assert len(manifest) == commit["manifest_length"]
    meta = manifest_meta(manifest)
    assert (meta["attempt"], meta["checkpoint_id"]) == (commit["attempt"], checkpoint_id)
    packs = []
    for pack in commit["packs"]:
        data = get(f"{checkpoint_id}/{pack['name']}")
        assert (len(data), crc32c(data)) == (pack["length"], pack["crc32c"]), pack
        if "raw_length" in pack:
            data = own_decoder.unpacked(data)
            assert len(data) == pack["raw_length"]
        packs.append(data)
    placed = {row["shard"]: (row["pack"], row["start"]) for row in commit["placements"]}
    assert placed.keys() == {row[0] for row in meta["shards"]}
    for name, _, length, crc, _ in meta["shards"]:
        number, start = placed[name]
        shard = packs[number][start : start + length]
        assert (len(shard), crc32c(shard)) == (length, crc), name
        assert shard.startswith(b"DCPTSHR1"), name
        assert shard.endswith(b"DCPTEND1"), name
