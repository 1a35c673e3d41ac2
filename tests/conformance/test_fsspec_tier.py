"""ObjectStoreTier on fsspec's calls keeps the promise of `Tier` on SeaweedFS, through s3fs.

S3 has a tier of its own that does better. Here it stands for what other packages bring.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_tiered.errors import AlreadyExistsError, InvalidError, UnavailableError
from dcp_tiered.tiers.fsspec_store import FsspecPlace
from dcp_tiered.tiers.object_store import ObjectStoreTier
from examples.seaweed import SeaweedS3
from tests.conformance.store_fault_suite import READS, StoreFaultSuite
from tests.conformance.test_s3_tier import S3Store
from tests.conformance.tier_suite import PART_BYTES, Store, TierSuite
from tests.support import shelves
from tests.support.fault_proxy import LOST_REPLY, Fault, FaultProxy, refuse
from tests.support.sources import BytesSource, pattern


class TestFsspecS3Tier(TierSuite):
    protocol = "shelf"
    client: Any = None

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: SeaweedS3, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = s3_server
        shelves.install(monkeypatch)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _client(cls, s3_server: SeaweedS3) -> Iterator[None]:
        cls.client = s3_server.client()
        yield
        cls.client.close()
        gc.collect()  # what s3fs keeps open, the server waits for when it ends

    def make_tier(self, root: str) -> ObjectStoreTier:
        return self._tier(root, self.server.storage_options())

    def make_store(self, root: str) -> S3Store:
        return S3Store(self.client, self.server.buckets[0], root)

    def make_broken_tier(self, root: str, secret: str) -> ObjectStoreTier:
        return self._tier(root, self.server.storage_options() | {"secret": secret})

    def _tier(self, root: str, options: dict[str, Any]) -> ObjectStoreTier:
        place = FsspecPlace(self.protocol, self.server.buckets[0], options, 10, PART_BYTES)
        return ObjectStoreTier(place, root, request_retry_s=10, part_bytes=PART_BYTES)


@pytest.mark.torture  # what is different here is also in `test_fsspec_stores`, by default
class TestFsspecWithoutCreate(TestFsspecS3Tier):
    """An implementation whose writes replace, and whose files are seen while they grow."""

    protocol = "plainshelf"
    lets_one_in = False


class TestFsspecFaults(StoreFaultSuite):
    """Beneath us s3fs tries again by itself: a call may be several requests."""

    test_a_redirect_is_not_followed = None  # that is up to the implementation

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: SeaweedS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.server, self.client = s3_server, s3_server.client()
        shelves.install(monkeypatch)
        yield
        self.client.close()

    def endpoint(self) -> str:
        return self.server.endpoint

    def make_store(self, root: str) -> S3Store:
        return S3Store(self.client, self.server.buckets[0], root)

    def make_tier_at(self, endpoint: str, root: str, retry_s: float) -> ObjectStoreTier:
        patience = {"read_timeout": 1, "retries": {"max_attempts": 1}}
        options = {
            **self.server.storage_options(),
            "endpoint_url": endpoint,
            "config_kwargs": patience,
        }
        place = FsspecPlace("shelf", self.server.buckets[0], options, 3.0, PART_BYTES)
        return ObjectStoreTier(place, root, request_retry_s=retry_s, part_bytes=PART_BYTES)

    def test_a_put_whose_reply_is_lost_is_there_already(
        self, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        """The first request looks; s3fs repeats what was lost, and is told of a bad request."""
        rule = proxy.add("drop_reply", "PUT", ".")
        with pytest.raises(AlreadyExistsError):
            tier.put("a/record", b"1")
        assert rule.hits == 1
        assert store.read("a/record") == b"1"

    @pytest.mark.parametrize("name", READS)
    def test_a_404_that_is_not_the_stores_is_not_absent(
        self, name: str, root: str, proxy: FaultProxy
    ) -> None:
        tier = self.make_tier_at(proxy.endpoint, root, 0.3)
        proxy.inject(None, Fault(status=404, reply_body=b"<html>nginx</html>"))
        with pytest.raises((InvalidError, UnavailableError)):
            READS[name](tier)
        tier.close()

    @pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
    def test_a_stream_that_breaks_off_leaves_nothing_and_is_begun_anew(
        self, operation: str, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        data, broken = pattern(3 * PART_BYTES + 17), [True]
        fault = refuse(500, "InternalError")
        rule = proxy.inject(operation, fault, when=lambda _: broken[0])
        with pytest.raises(UnavailableError) as raised:
            tier.upload("a/pack", BytesSource(data))
        assert "begun anew" in str(raised.value.hint)
        assert rule.hits
        assert (store.keys(), store.leftovers()) == (set(), [])
        broken.clear()
        broken.append(False)
        tier.upload("a/pack", BytesSource(data))
        assert store.read("a/pack") == data
        assert store.leftovers() == []

    def test_an_end_whose_reply_is_lost_is_a_success(
        self, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        data = pattern(2 * PART_BYTES + 17)
        rule = proxy.inject("CompleteMultipartUpload", LOST_REPLY, times=1)
        assert tier.upload("a/pack", BytesSource(data)).length == len(data)
        assert rule.hits == 1
        assert store.read("a/pack") == data
