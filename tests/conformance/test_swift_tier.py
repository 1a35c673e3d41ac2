"""S3Tier on OpenStack Swift: an S3 server that shares nothing with SeaweedFS.

It checks the checksums of parts and keeps none of whole objects, and its `If-None-Match` lets two
writers through that are at work at the same instant.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.tiers.s3 import S3Tier
from tests.conformance.test_fsspec_tier import TestFsspecS3Tier as FsspecSuite
from tests.conformance.test_s3_tier import S3Store
from tests.conformance.tier_suite import PART_BYTES, TierSuite
from tests.support import shelves
from tests.support.round_trip import round_trip
from tests.support.servers import SwiftStore, swift_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftStore]:
    with swift_store(tmp_path_factory.mktemp("swift")) as store:
        yield store


@pytest.fixture(scope="module")
def client(server: SwiftStore) -> Iterator[Any]:
    made = server.client()
    yield made
    made.close()


class TestS3TierOnSwift(TierSuite):
    lets_one_in = False

    @pytest.fixture(autouse=True)
    def _server(self, server: SwiftStore, client: Any) -> None:
        self.server, self.client = server, client

    def make_tier(self, root: str) -> S3Tier:
        return self._tier(root, self.server.storage_options())

    def make_store(self, root: str) -> S3Store:
        return S3Store(self.client, self.server.buckets[0], root)

    def make_broken_tier(self, root: str, secret: str) -> S3Tier:
        return self._tier(root, self.server.storage_options() | {"secret": secret})

    @pytest.mark.torture  # a thousand objects take this server a quarter of a minute
    def test_more_than_one_page_is_listed(self, tier: S3Tier, store: S3Store) -> None:
        super().test_more_than_one_page_is_listed(tier, store)

    def _tier(self, root: str, options: dict[str, Any]) -> S3Tier:
        return S3Tier(
            f"{self.server.buckets[0]}/{root}",
            options,
            request_timeout_s=10,
            request_retry_s=10,
            part_bytes=PART_BYTES,
        )


@pytest.mark.torture
class TestFsspecOnSwift(FsspecSuite):
    """Through s3fs, as in `test_fsspec_tier`: a second server for that client too."""

    lets_one_in = False

    @pytest.fixture(autouse=True)
    def _server(self, server: SwiftStore, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.client = server, client
        shelves.install(monkeypatch)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _client(cls) -> None:
        """SeaweedFS is not asked."""


def test_a_run_goes_through_swift_and_back(server: SwiftStore, client: Any, local: Path) -> None:
    url = f"tiered::s3://{server.buckets[0]}/through"
    options = server.storage_options()
    environment = {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]}
    round_trip(url, local, {"s3": options}, **environment)
    reply = client.list_objects_v2(Bucket=server.buckets[0], Prefix="through/")
    names = {entry["Key"].removeprefix("through/") for entry in reply["Contents"]}
    assert {"step-1/record-1.json", "step-2/record-1.json"} <= names
    packs = {name for name in names if name.endswith(".pack")}
    assert len(packs) == 2
    assert {f"{name}.ok" for name in packs} <= names  # read back, since no checksum is kept
