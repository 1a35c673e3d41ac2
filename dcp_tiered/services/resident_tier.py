"""The durable tier under residency: asked before each write or read, then written or read."""

from collections.abc import Iterator
from contextlib import contextmanager

from dcp_tiered.interfaces import DurableTier, ObjectInfo, Source
from dcp_tiered.services.residency import Guard, Residency
from dcp_tiered.services.wrapped_tier import WrappedTier


class ResidentTier(WrappedTier):
    """A durable tier that nothing is written to unless it may be; as safe for threads as that is.

    Args:
        tier: Where to.
        residency: Asked before every write.
    """

    def __init__(self, tier: DurableTier, residency: Guard) -> None:
        super().__init__(tier)
        self._residency = residency

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        with self._writing(key):
            super().put(key, data)

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object; see `DurableTier.upload`."""
        with self._writing(key):
            return super().upload(key, source)

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        self._residency.require()
        self._residency.note(key)
        try:
            yield
        finally:
            self._residency.sent(key)


class ReadFromResident(WrappedTier):
    """A durable tier that nothing is read from unless it is where the policy wants it.

    Args:
        tier: Where from.
        residency: Asked before every read.
    """

    def __init__(self, tier: DurableTier, residency: Residency) -> None:
        super().__init__(tier)
        self._residency = residency

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; see `Tier.get`."""
        self._residency.require()
        return super().get(key, bytes_max)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`."""
        self._residency.require()
        super().read_into(key, start, buffer)

    def head(self, key: str) -> ObjectInfo:
        """Return length and checksum; see `Tier.head`."""
        self._residency.require()
        return super().head(key)

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield every key below a directory; see `Tier.list_keys`."""
        self._residency.require()
        return super().list_keys(prefix)

    def list_directories(self) -> Iterator[str]:
        """Yield the names right below the run root; see `Tier.list_directories`."""
        self._residency.require()
        return super().list_directories()


class RemoveFromResident(ReadFromResident):
    """The same for who removes: nothing is withdrawn or deleted in another place either."""

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        self._residency.require()
        super().put(key, data)

    def delete(self, key: str) -> None:
        """Remove an object; see `DurableTier.delete`."""
        self._residency.require()
        super().delete(key)

    def drop_uploads(self, prefix: str) -> None:
        """Let go of unfinished uploads; see `DurableTier.drop_uploads`."""
        self._residency.require()
        super().drop_uploads(prefix)
