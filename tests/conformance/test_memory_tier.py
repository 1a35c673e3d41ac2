"""ObjectStoreTier keeps the promise of `Tier` on any client: here fsspec's `memory://`.

There is no such durable tier: what is in memory is gone with its process. It shows what the tier
itself adds to a client that does one thing per call.
"""

import threading
from typing import Any

import fsspec

from dcp_tiered.errors import AbsentError, AlreadyExistsError, InvalidError, TieredError
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.tiers.http_errors import RefusedError
from dcp_tiered.tiers.object_client import Body, Page
from dcp_tiered.tiers.object_store import ObjectStoreTier
from tests.conformance.tier_suite import PART_BYTES, TierSuite

_LOCK = threading.Lock()


class MemoryPlace:
    """A bucket in the memory of this process."""

    url = "memory://bucket"
    chunk_bytes = 1

    def __init__(self, bucket: str, secret: str = "") -> None:
        self.bucket, self.secret = bucket, secret

    def connect(self) -> "MemoryClient":
        return MemoryClient(self.bucket)

    def refusal(self, exc: Exception) -> RefusedError | None:
        del exc
        return None

    def translate(self, exc: Exception, doing: str, where: str) -> tuple[TieredError, bool]:
        text = f"{doing} failed: {type(exc).__name__}"
        if isinstance(exc, FileExistsError):
            return AlreadyExistsError(text, "durable", where), False
        if isinstance(exc, FileNotFoundError):
            return AbsentError(text, "durable", where), False
        return InvalidError(text, "durable", where, "Look at the test."), False


class MemoryClient:
    """Literal calls about one file each, without listing caches."""

    def __init__(self, bucket: str) -> None:
        self._files: Any = fsspec.filesystem("memory")
        self._root = f"/{bucket}"

    def _path(self, key: str) -> str:
        if self._root == "/closed":
            raise PermissionError
        return f"{self._root}/{key}"

    def create(self, key: str, data: bytes, crc: int) -> ObjectInfo:
        del crc
        with _LOCK:
            self._files.pipe_file(self._path(key), data, mode="create")
        return ObjectInfo(key=key, length=len(data))

    def begin(self, key: str, length: int, crc: int) -> tuple[str, bytearray]:
        del length, crc
        return key, bytearray()

    def send(self, upload: tuple[str, bytearray], start: int, body: Body) -> int:
        upload[1][start:] = b"".join(body)
        return len(upload[1])

    def finish(self, upload: tuple[str, bytearray]) -> ObjectInfo:
        return self.create(upload[0], bytes(upload[1]), 0)

    def abandon(self, upload: Any) -> None:
        """Nothing is visible before `finish`."""

    def look(self, key: str) -> ObjectInfo:
        found = self._files.info(self._path(key))
        if found["type"] != "file":
            raise FileNotFoundError(key)
        return ObjectInfo(key=key, length=found["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        path = self._path(key)
        with _LOCK:  # a file in memory has one position
            data = self._files.cat_file(path, start=start, end=start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def page(self, prefix: str, delimiter: str, following: str | None) -> Page:
        del following
        cut = len(self._root) + 1
        begin = self._path(prefix)
        found = [path[cut:] for path in list(self._files.store) if path.startswith(begin)]
        if not delimiter:
            return Page(keys=found, directories=[], following=None)
        rests = [key[len(prefix) :].partition("/") for key in found]
        names = {f"{prefix}{name}/" for name, slash, _ in rests if slash}
        return Page(keys=[], directories=sorted(names), following=None)

    def close(self) -> None:
        """There is no connection."""


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
        mine = [path for path in self._store if path.startswith(self._root)]
        return {path.removeprefix(self._root) for path in mine}

    def leftovers(self) -> list[str]:
        return []


class TestMemoryTier(TierSuite):
    # Other processes have a memory of their own.
    test_of_racing_processes_one_puts = None
    test_a_tier_works_on_both_sides_of_a_fork = None

    def make_tier(self, root: str) -> ObjectStoreTier:
        return self._tier(MemoryPlace("bucket"), root)

    def make_store(self, root: str) -> MemoryStore:
        return MemoryStore(root)

    def make_broken_tier(self, root: str, secret: str) -> ObjectStoreTier:
        return self._tier(MemoryPlace("closed", secret), root)

    def _tier(self, place: MemoryPlace, root: str) -> ObjectStoreTier:
        return ObjectStoreTier(place, root, request_retry_s=1, part_bytes=PART_BYTES)
