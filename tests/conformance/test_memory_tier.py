"""ObjectStoreTier on fsspec's calls keeps the promise of `Tier`: here on `memory://`.

There is no such durable tier: what is in memory is gone with its process. Nor does anything there
keep two writers apart, or two readers of one file: it has one position. So none of the tests in
which threads are at one key at once is for it; `test_fsspec_tier` has them.
"""

import fsspec
import pytest

from dcp_tiered.tiers.fsspec_store import FsspecPlace
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.conformance.tier_suite import PART_BYTES, TierSuite


class MemoryStore:
    """A run root, seen without the tier."""

    def __init__(self, root: str) -> None:
        self._store, self._root = fsspec.filesystem("memory").store, f"/bucket/{root}/"

    def read(self, key: str) -> bytes:
        data: bytes = self._store[self._root + key].getvalue()
        return data

    def write(self, key: str, data: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(self._root + key, data)

    def keys(self) -> set[str]:
        mine = [path for path in list(self._store) if path.startswith(self._root)]
        return {path.removeprefix(self._root) for path in mine}

    def leftovers(self) -> list[str]:
        return []


class TestMemoryTier(TierSuite):
    # Other processes have a memory of their own.
    test_of_racing_processes_one_puts = None
    test_a_tier_works_on_both_sides_of_a_fork = None
    # Those that come late read the file at once, each from where another one has got to.
    test_of_racing_threads_one_puts = None
    test_uploads_of_one_object_at_once_all_succeed = None

    @pytest.fixture(autouse=True)
    def _bucket(self) -> None:
        fsspec.filesystem("memory").makedirs("/bucket", exist_ok=True)

    def make_tier(self, root: str) -> ObjectStoreTier:
        return self._tier("bucket", root)

    def make_store(self, root: str) -> MemoryStore:
        return MemoryStore(root)

    def make_broken_tier(self, root: str, secret: str) -> ObjectStoreTier:
        return self._tier("no-such-bucket", root, secret=secret)

    def _tier(self, bucket: str, root: str, **options: str) -> ObjectStoreTier:
        place = FsspecPlace("memory", bucket, options, 10, PART_BYTES)
        return ObjectStoreTier(place, root, request_retry_s=1, part_bytes=PART_BYTES)
