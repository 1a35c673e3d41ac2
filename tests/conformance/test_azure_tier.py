"""ObjectStoreTier keeps the promise of `Tier` on Azurite."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.tiers.azure import AzurePlace
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.conformance.store_fault_suite import StoreFaultSuite
from tests.conformance.tier_suite import PART_BYTES, TierSuite
from tests.support.round_trip import round_trip
from tests.support.servers import AzureStore, azure_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureStore]:
    with azure_store(tmp_path_factory.mktemp("azure")) as store:
        yield store


@pytest.fixture(scope="module")
def container(server: AzureStore) -> Iterator[Any]:
    with server.client() as client:
        yield client


class Store:
    """A run root in a container, seen by a plain client of Microsoft's."""

    def __init__(self, container: Any, root: str) -> None:
        self._container, self._root = container, root

    def read(self, key: str) -> bytes:
        data: bytes = self._container.download_blob(f"{self._root}/{key}").readall()
        return data

    def write(self, key: str, data: bytes) -> None:
        self._container.upload_blob(f"{self._root}/{key}", data, overwrite=True)

    def keys(self) -> set[str]:
        names = self._container.list_blob_names(name_starts_with=f"{self._root}/")
        return {name.removeprefix(f"{self._root}/") for name in names}

    def leftovers(self) -> list[str]:
        return []  # blocks that were never committed; no request drops them, and the store does


class TestAzureTier(TierSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: AzureStore, container: Any) -> None:
        self.server, self.container = server, container

    def make_tier(self, root: str) -> ObjectStoreTier:
        return self._tier(root, self.server.connection_string())

    def make_store(self, root: str) -> Store:
        return Store(self.container, root)

    def make_broken_tier(self, root: str, secret: str) -> ObjectStoreTier:
        key = "Y2FuYXJ5" + secret.encode().hex() + "AAAA"
        return self._tier(root, self.server.connection_string(key[: len(key) // 4 * 4]))

    def _tier(self, root: str, connection_string: str) -> ObjectStoreTier:
        place = AzurePlace(self.server.container, {"connection_string": connection_string}, 10)
        return ObjectStoreTier(place, root, request_retry_s=10, part_bytes=PART_BYTES)


class TestAzureFaults(StoreFaultSuite):
    @pytest.fixture(autouse=True)
    def _server(self, server: AzureStore, container: Any) -> None:
        self.server, self.container = server, container

    def endpoint(self) -> str:
        return self.server.endpoint

    def make_store(self, root: str) -> Store:
        return Store(self.container, root)

    def make_tier_at(self, endpoint: str, root: str, retry_s: float) -> ObjectStoreTier:
        text = self.server.connection_string().replace(self.server.endpoint, endpoint)
        place = AzurePlace(self.server.container, {"connection_string": text}, 1.0)
        return ObjectStoreTier(place, root, request_retry_s=retry_s, part_bytes=PART_BYTES)


def test_a_run_goes_through_azure_and_back(server: AzureStore, container: Any, local: Path) -> None:
    text = server.connection_string()
    url = f"tiered::az://{server.container}/through"
    round_trip(url, local, {"az": server.options()}, AZURE_STORAGE_CONNECTION_STRING=text)
    names = {
        name.removeprefix("through/")
        for name in container.list_blob_names(name_starts_with="through/")
    }
    assert {"step-1/record-1.json", "step-2/record-1.json"} <= names
    packs = {name for name in names if name.endswith(".pack")}
    assert len(packs) == 2
    assert {f"{name}.ok" for name in packs} <= names  # read back, since no checksum is kept
