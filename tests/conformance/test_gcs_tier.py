"""ObjectStoreTier keeps the promise of `Tier` on a server that speaks Google's API."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.tiers.gcs import GcsPlace
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.conformance.store_fault_suite import StoreFaultSuite
from tests.conformance.tier_suite import PART_BYTES, TierSuite
from tests.support.round_trip import round_trip
from tests.support.servers import GoogleStore, google_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleStore]:
    with google_store(tmp_path_factory.mktemp("google")) as store:
        yield store


class Store:
    """A run root in a bucket, seen by plain requests."""

    def __init__(self, server: GoogleStore, root: str) -> None:
        self._server, self._root = server, root

    def read(self, key: str) -> bytes:
        return self._server.read(f"{self._root}/{key}")

    def write(self, key: str, data: bytes) -> None:
        self._server.write(f"{self._root}/{key}", data)

    def keys(self) -> set[str]:
        return {name.removeprefix(f"{self._root}/") for name in self._server.objects(self._root)}

    def leftovers(self) -> list[str]:
        return []  # nobody can list resumable uploads; the store drops them after a week


class TestGcsTier(TierSuite):
    keeps_crc32c = True

    @pytest.fixture(autouse=True)
    def _server(self, server: GoogleStore) -> None:
        self.server = server

    def make_tier(self, root: str) -> ObjectStoreTier:
        return self._tier(root, self.server.bucket, self.server.options())

    def make_store(self, root: str) -> Store:
        return Store(self.server, root)

    def make_broken_tier(self, root: str, secret: str) -> ObjectStoreTier:
        return self._tier(root, "no-such-bucket", self.server.options() | {"token": secret})

    def _tier(self, root: str, bucket: str, options: dict[str, Any]) -> ObjectStoreTier:
        return ObjectStoreTier(
            GcsPlace(bucket, options, 10, 16), root, request_retry_s=10, part_bytes=PART_BYTES
        )


class TestGcsFaults(StoreFaultSuite):
    keeps_crc32c = True

    @pytest.fixture(autouse=True)
    def _server(self, server: GoogleStore) -> None:
        self.server = server

    def endpoint(self) -> str:
        return self.server.endpoint

    def make_store(self, root: str) -> Store:
        return Store(self.server, root)

    def make_tier_at(self, endpoint: str, root: str, retry_s: float) -> ObjectStoreTier:
        options = self.server.options() | {"endpoint_url": endpoint}
        place = GcsPlace(self.server.bucket, options, 1.0, 16)
        return ObjectStoreTier(place, root, request_retry_s=retry_s, part_bytes=PART_BYTES)


def test_a_run_goes_through_google_and_back(server: GoogleStore, local: Path) -> None:
    url = f"tiered::gs://{server.bucket}/through"
    round_trip(url, local, {"gs": server.options()}, FSSPEC_GCS_TOKEN="anon")
    names = {name.removeprefix("through/") for name in server.objects("through/")}
    assert {"step-1/record-1.json", "step-2/record-1.json"} <= names
    packs = [name for name in names if "/packs/" in name]
    assert len(packs) == 2  # the store keeps a checksum, so nothing else says that they are sound
