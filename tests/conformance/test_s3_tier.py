"""S3Tier keeps the promise of `Tier` on SeaweedFS."""

from typing import Any

import pytest

from dcp_tiered.tiers.s3 import S3Tier
from examples.seaweed import SeaweedS3
from tests.conformance.tier_suite import PART_BYTES, TierSuite


class S3Store:
    """A run root in a bucket, seen by a plain botocore client."""

    def __init__(self, client: Any, bucket: str, root: str) -> None:
        self._client, self._bucket, self._root = client, bucket, root

    def read(self, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=self._bucket, Key=f"{self._root}/{key}")[
            "Body"
        ].read()
        return data

    def write(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"{self._root}/{key}", Body=data)

    def keys(self) -> set[str]:
        pages = self._client.get_paginator("list_objects_v2")
        return {
            entry["Key"].removeprefix(f"{self._root}/")
            for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._root}/")
            for entry in page.get("Contents", ())
        }

    def leftovers(self) -> list[str]:
        reply = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=f"{self._root}/")
        return [upload["Key"] for upload in reply.get("Uploads") or ()]


class TestS3Tier(TierSuite):
    keeps_crc32c = True
    client: Any = None

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: SeaweedS3) -> None:
        self.server = s3_server

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _client(cls, s3_server: SeaweedS3) -> None:
        cls.client = s3_server.client()

    def make_tier(self, root: str) -> S3Tier:
        return self._tier(root, self.server.storage_options())

    def make_store(self, root: str) -> S3Store:
        return S3Store(self.client, self.server.buckets[0], root)

    def make_broken_tier(self, root: str, secret: str) -> S3Tier:
        return self._tier(root, self.server.storage_options() | {"secret": secret})

    def _tier(self, root: str, options: dict[str, Any]) -> S3Tier:
        return S3Tier(
            f"{self.server.buckets[0]}/{root}",
            options,
            request_timeout_s=10,
            request_retry_s=10,
            part_bytes=PART_BYTES,
        )
