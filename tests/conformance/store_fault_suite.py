"""What an `ObjectStoreTier` does when network and store misbehave, behind a proxy.

An implementation adds a subclass that tells how to reach its store through the proxy.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_tiered.errors import AbsentError, AlreadyExistsError, InvalidError, UnavailableError
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.conformance.tier_suite import Store
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.sources import BytesSource, pattern

DATA = pattern(300_000)
READS: dict[str, Callable[[ObjectStoreTier], Any]] = {
    "get": lambda tier: tier.get("a/there", 1 << 20),
    "head": lambda tier: tier.head("a/there").length,
    "list": lambda tier: list(tier.list_keys("a")),
}
GIVEN = {"get": DATA, "head": len(DATA), "list": ["a/there"]}


class StoreFaultSuite:
    """The faults."""

    def endpoint(self) -> str:
        """Return where the proxy has to send requests on to."""
        raise NotImplementedError

    def make_tier_at(self, endpoint: str, root: str, retry_s: float) -> ObjectStoreTier:
        """Return a tier that reaches its store through an endpoint."""
        raise NotImplementedError

    def make_store(self, root: str) -> Store:
        """Return independent eyes on a run root."""
        raise NotImplementedError

    @pytest.fixture
    def proxy(self) -> Iterator[FaultProxy]:
        with FaultProxy(self.endpoint()) as proxy:
            yield proxy

    @pytest.fixture
    def root(self) -> str:
        return f"faults-{secrets.token_hex(6)}"

    @pytest.fixture
    def store(self, root: str) -> Store:
        return self.make_store(root)

    @pytest.fixture
    def tier(self, proxy: FaultProxy, root: str) -> Iterator[ObjectStoreTier]:
        tier = self.make_tier_at(proxy.endpoint, root, 20.0)
        yield tier
        tier.close()

    @pytest.mark.parametrize("kind", ["status", "reset", "truncate", "stall"])
    @pytest.mark.parametrize("name", READS)
    def test_a_read_is_tried_again(
        self, kind: str, name: str, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        store.write("a/there", DATA)
        fault = proxy.add(kind, "*", ".")
        assert READS[name](tier) == GIVEN[name]
        assert fault.hits == 1

    @pytest.mark.parametrize("kind", ["status", "reset", "drop_reply"])
    def test_a_deletion_is_tried_again(
        self, kind: str, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        store.write("a/there", DATA)
        fault = proxy.add(kind, "DELETE", "there")
        tier.delete("a/there")
        assert store.keys() == set()
        assert fault.hits == 1

    def test_who_may_not_delete_is_told_what_is_missing(
        self, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        store.write("a/there", DATA)
        proxy.inject(None, Fault(status=403), when=lambda request: request.method == "DELETE")
        with pytest.raises(InvalidError, match="access denied") as raised:
            tier.delete("a/there")
        assert "delete" in (raised.value.hint or "")
        assert store.keys() == {"a/there"}

    @pytest.mark.parametrize("kind", ["status", "reset"])
    def test_a_write_is_tried_again(
        self, kind: str, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        proxy.add(kind, "*", ".")
        tier.put("a/record", b"1")
        tier.upload("a/pack", BytesSource(DATA))
        assert store.keys() == {"a/record", "a/pack"}
        assert store.read("a/pack") == DATA

    def test_a_put_whose_reply_is_lost_is_there_already(
        self, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        proxy.add("drop_reply", "*", ".")
        with pytest.raises(AlreadyExistsError):
            tier.put("a/record", b"1")
        assert store.read("a/record") == b"1"

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_an_upload_whose_reply_is_lost_is_a_success(
        self, number: int, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        """The first request looks, the others begin, send and end."""
        seen: list[Any] = []

        def is_that(request: Any) -> bool:
            seen.append(request)
            return len(seen) == number

        proxy.inject(None, Fault(drop_response=True), times=1, when=is_that)
        info = tier.upload("a/pack", BytesSource(DATA))
        assert info.length == len(DATA)
        assert store.keys() == {"a/pack"}
        assert store.read("a/pack") == DATA

    @pytest.mark.parametrize("name", READS)
    @pytest.mark.parametrize(("status", "error"), [(500, UnavailableError), (403, InvalidError)])
    def test_a_store_that_stays_away_is_told_and_not_absent(
        self,
        name: str,
        status: int,
        error: type[Exception],
        root: str,
        proxy: FaultProxy,
    ) -> None:
        tier = self.make_tier_at(proxy.endpoint, root, 0.3)
        proxy.inject(None, Fault(status=status))
        with pytest.raises(error) as raised:
            READS[name](tier)
        assert not isinstance(raised.value, AbsentError)
        tier.close()

    @pytest.mark.parametrize("name", READS)
    def test_a_404_that_is_not_the_stores_is_not_absent(
        self, name: str, root: str, proxy: FaultProxy
    ) -> None:
        tier = self.make_tier_at(proxy.endpoint, root, 0.3)
        proxy.inject(None, Fault(status=404, reply_body=b"<html>nginx</html>"))
        with pytest.raises(InvalidError):
            READS[name](tier)
        tier.close()

    def test_a_redirect_is_not_followed(self, root: str, proxy: FaultProxy) -> None:
        tier = self.make_tier_at(proxy.endpoint, root, 0.3)
        proxy.inject(
            None, Fault(status=307, reply_headers={"Location": f"{proxy.endpoint}/elsewhere"})
        )
        with pytest.raises(Exception, match="elsewhere: create on try 1 answered 307"):
            tier.put("a/record", b"1")
        assert not proxy.requests("*", "/elsewhere")
        assert len(proxy.log) == 1
        tier.close()

    def test_a_damaged_reply_is_not_returned(
        self, tier: ObjectStoreTier, store: Store, proxy: FaultProxy
    ) -> None:
        store.write("a/there", DATA)
        rule = proxy.inject(
            None, Fault(flip_byte=True), times=1, when=lambda r: "Range" in _named(r.headers)
        )
        if self.keeps_crc32c:
            with pytest.raises(Exception, match="other bytes"):
                tier.get("a/there", 1 << 20)
        else:  # nobody can tell here; what is read into tensors has checksums of ours
            assert len(tier.get("a/there", 1 << 20)) == len(DATA)
        assert rule.hits == 1

    keeps_crc32c = False


def _named(headers: dict[str, str]) -> set[str]:
    return {"Range" for name in headers if name.lower() in ("range", "x-ms-range")}
