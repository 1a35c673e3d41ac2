"""A durable tier around another one, which does what the wrapper does not do itself."""

from collections.abc import Iterator

from dcp_tiered.interfaces import DurableTier, ObjectInfo, Source


class WrappedTier:
    """Hands everything on.

    Args:
        tier: What is wrapped.
    """

    def __init__(self, tier: DurableTier) -> None:
        self._tier = tier
        self.name, self.url = tier.name, tier.url
        self.keeps_writers_apart = tier.keeps_writers_apart

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        self._tier.put(key, data)

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object; see `DurableTier.upload`."""
        return self._tier.upload(key, source)

    def delete(self, key: str) -> None:
        """Remove an object; see `DurableTier.delete`."""
        self._tier.delete(key)

    def drop_uploads(self, prefix: str) -> None:
        """Let go of unfinished uploads; see `DurableTier.drop_uploads`."""
        self._tier.drop_uploads(prefix)

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; see `Tier.get`."""
        return self._tier.get(key, bytes_max)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`."""
        self._tier.read_into(key, start, buffer)

    def read_alignment(self, key: str) -> int:
        """Return which border memory has to lie on; see `Tier.read_alignment`."""
        return self._tier.read_alignment(key)

    def head(self, key: str) -> ObjectInfo:
        """Return length and checksum; see `Tier.head`."""
        return self._tier.head(key)

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield every key below a directory; see `Tier.list_keys`."""
        return self._tier.list_keys(prefix)

    def list_directories(self) -> Iterator[str]:
        """Yield the names right below the run root; see `Tier.list_directories`."""
        return self._tier.list_directories()

    def close(self) -> None:
        """Give connections back."""
        self._tier.close()
