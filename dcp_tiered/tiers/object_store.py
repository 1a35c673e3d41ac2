"""Object stores other than S3: what their APIs have in common, on top of one request at a time.

A small object is created by one request. A large one is sent in parts that nobody sees, and becomes
visible whole with the last request. Both are create-only.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    UnavailableError,
)
from dcp_tiered.format.residency import Fact, Observed
from dcp_tiered.interfaces import ObjectInfo, Source
from dcp_tiered.tiers.object_client import Body, Client, Place
from dcp_tiered.tiers.s3_body import Window, damaged
from dcp_tiered.tiers.s3_errors import too_short
from dcp_tiered.tiers.store_requests import StoreRequests
from dcp_tiered.tiers.stored_crc import may_be, need_ours

_log = logging.getLogger(__name__)
_PARTS_MAX = 10_000
"""Azure takes 50,000 and Google any number; a part of a hundredth of a pack is small enough."""
_BYTES_PER_SECOND_MIN = 256 << 10
"""An upload slower than this is not tried on, as in S3."""
_TIDY_S = 5.0
"""After an upload has failed, nothing more is waited for longer than this."""


class ObjectStoreTier:
    """Objects of one bucket below one prefix.

    Args:
        place: The bucket.
        prefix: The run's, without slashes at its ends.
        request_retry_s: How long one request is tried again before its error is raised.
        part_bytes: Size of one request of a large upload.
        connections_max: Requests on their way at once.
    """

    name = "durable"

    def __init__(
        self,
        place: Place[Client],
        prefix: str,
        *,
        request_retry_s: float,
        part_bytes: int,
        connections_max: int = 16,
    ) -> None:
        self._requests = StoreRequests(place, request_retry_s, connections_max)
        self._prefix = prefix
        self._retry_s = request_retry_s
        self._part_bytes = part_bytes
        self._chunk_bytes = place.chunk_bytes
        self.keeps_writers_apart = place.keeps_writers_apart
        self._bucket_answers = False
        self.url = f"{place.url}/{prefix}"

    def __repr__(self) -> str:
        return f"ObjectStoreTier({self.url})"

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`.

        Raises:
            CorruptError: The store keeps no checksum, and the bytes read back are others.
        """
        full, crc = self._key(key), crc32c(data)
        info = self._call("create", key, lambda client: client.create(full, data, crc))
        if info.crc32c is None:
            is_same = self.get(key, len(data)) == data
        else:
            is_same = (info.length, info.crc32c) == (len(data), crc)
        if not is_same and not self.keeps_writers_apart:
            text = "another writer has replaced the object meanwhile"
            raise AlreadyExistsError(text, self.name, self._where(key))
        if not is_same:
            raise CorruptError("object has other bytes than were sent", self.name, self._where(key))

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object; see `DurableTier.upload`.

        Raises:
            UnavailableError: The store accepts the object and has something else.
        """
        until = time.monotonic() + self._retry_s + source.length / _BYTES_PER_SECOND_MIN
        if (found := self._find(key)) is not None:
            return self._ours(found, source)
        self._check(key, source)
        try:
            info = self._send(key, source, until)
        except (AlreadyExistsError, UnavailableError):
            # A last request whose reply was lost comes back as "exists" or as "no such upload", and
            # one of others may have been quicker: what is there decides.
            if (found := self._find(key, time.monotonic() + _TIDY_S)) is None:
                raise
            return self._ours(found, source)
        if not may_be(info, source):
            raise UnavailableError(
                "store accepted an object and has something else",
                self.name,
                self._where(key),
                "The upload is tried again; if this persists, the store loses data.",
            )
        return info

    def delete(self, key: str) -> None:
        """Remove an object; see `DurableTier.delete`."""
        full = self._key(key)
        try:
            self._call("delete", key, lambda client: client.remove(full))
        except AbsentError:
            self._need_bucket()

    def drop_uploads(self, prefix: str) -> None:
        """Do nothing: these stores drop what was begun and not ended, by themselves or a rule."""

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; see `Tier.get`."""
        info = self.head(key)
        if info.length > bytes_max:
            raise CorruptError(
                f"object of {info.length} bytes exceeds {bytes_max}", self.name, self._where(key)
            )
        data = bytearray(info.length)
        self.read_into(key, 0, memoryview(data))
        if info.crc32c not in (None, crc32c(data)):
            raise CorruptError(
                "object reads with other bytes than the store says it has",
                self.name,
                self._where(key),
                "Look at the network between.",
            )
        return bytes(data)

    def read_alignment(self, key: str) -> int:
        """Return 1: replies are received into any memory; see `Tier.read_alignment`."""
        del key
        return 1

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`. A broken reply is carried on."""
        full, done = self._key(key), 0
        while done < len(buffer):
            step = partial(_read, full, start + done, buffer[done:])
            try:
                count = self._call("read", key, step)
            except AbsentError as exc:
                self.head(key)  # its reply says what is missing, and this one's may not
                raise UnavailableError(
                    f"store has an object and does not send it: {exc.message}",
                    self.name,
                    self._where(key),
                    "Look at what is between here and the store.",
                ) from None
            if not count:
                raise too_short(self._where(key))
            done += count

    def head(self, key: str) -> ObjectInfo:
        """Return length and the checksum of the whole object, if the store keeps one."""
        return self._look(key, math.inf)

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield every key below a directory; see `Tier.list_keys`."""
        cut = len(self._prefix) + 1
        for page in self._pages(f"{prefix.rstrip('/')}/", ""):
            yield from (key[cut:] for key in page.keys)

    def list_directories(self) -> Iterator[str]:
        """Yield the names right below the run root that have something below them."""
        cut = len(self._prefix) + 1
        for page in self._pages("", "/"):
            yield from (name[cut:-1] for name in page.directories)

    def observe(self) -> Observed:
        """Look where the bucket is, whose it is, who can read it; with a pin only."""
        seen: Observed = self._requests.call("look at the bucket", "", _observe)
        return seen

    def observe_place(self) -> Observed:
        """Look where the bucket is and whose it is; with a pin only."""
        seen: Observed = self._requests.call("look at the bucket", "", _observe_place)
        return seen

    def look_public(self) -> Fact:
        """Look for signs that the bucket is public; without a pin only."""
        fact: Fact = self._requests.call("look at the bucket", "", _look_public)
        return fact

    def close(self) -> None:
        """Give connections back."""
        self._requests.close()

    def _pages(self, below: str, delimiter: str) -> Iterator[Any]:
        prefix, following = f"{self._prefix}/{below}", None
        while True:
            ask = partial(_page, prefix, delimiter, following)
            page = self._call("list", below, ask)
            yield page
            if page.following is None:
                return
            if page.following == following:
                raise UnavailableError(
                    "store breaks a listing off", self.name, self.url, "It is tried again."
                )
            following = page.following

    def _check(self, key: str, source: Source) -> None:
        """Pass when the parts of a source add up to what it says of itself; little is read."""
        total, part = 0, self._part(source)
        for start in range(0, source.length, part):
            length = min(part, source.length - start)
            total = combine_crc32c(total, source.checksum(length, start), length)
        if total != source.crc32c:
            raise damaged(key)

    def _send(self, key: str, source: Source, until: float) -> ObjectInfo:
        """Send a source in parts, then make it visible."""
        full = self._key(key)
        upload = self._call(
            "begin",
            key,
            lambda client: client.begin(full, source.length, source.crc32c),
            until=until,
        )
        try:
            self._send_parts(key, source, upload, until)
            info = self._call("finish", key, lambda client: client.finish(upload), until=until)
        except BaseException:
            self._abandon(key, upload)
            raise
        return self._named(key, info) if info is not None else self.head(key)

    def _send_parts(self, key: str, source: Source, upload: Any, until: float) -> None:
        at, part = 0, self._part(source)
        while at < source.length:
            length = min(part, source.length - at)
            crc = source.checksum(length, at)
            send = partial(_send_part, upload, at, key, source, length, crc)
            stored = self._call("send", key, send, until=until)
            if not at < stored <= at + length:
                raise UnavailableError(
                    f"store has {stored} bytes after {at} and {length} more were sent",
                    self.name,
                    self._where(key),
                    "The upload is begun anew.",
                )
            at = stored

    def _abandon(self, key: str, upload: Any) -> None:
        until = time.monotonic() + _TIDY_S
        with contextlib.suppress(AbsentError):
            try:
                self._call("abandon", key, lambda client: client.abandon(upload), until=until)
            except (InvalidError, UnavailableError, AlreadyExistsError) as exc:
                _log.info("cannot let go of an upload, the store drops it later: %s", exc.message)

    def _look(self, key: str, until: float) -> ObjectInfo:
        full = self._key(key)
        try:
            info = self._call("look", key, lambda client: client.look(full), until=until)
        except AbsentError:
            self._need_bucket()
            raise
        return self._named(key, info)

    def _need_bucket(self) -> None:
        """Pass when the bucket is there.

        One that is not may give the same reply as an object that is not.
        """
        if not self._bucket_answers:
            next(self._pages("", "/"))

    def _find(self, key: str, until: float = math.inf) -> ObjectInfo | None:
        try:
            return self._look(key, until)
        except AbsentError:
            return None

    def _ours(self, found: ObjectInfo, source: Source) -> ObjectInfo:
        """Return what is there if it is the source; see `need_ours`."""
        return need_ours(self, found, source, self._where(found.key))

    def _part(self, source: Source) -> int:
        """Return the size of the parts: what is wanted, so large that there are not too many."""
        size = max(self._part_bytes, -(-source.length // _PARTS_MAX))
        return -(-size // self._chunk_bytes) * self._chunk_bytes

    def _call(self, doing: str, key: str, send: Any, **bounds: float) -> Any:
        result = self._requests.call(doing, self._key(key), send, **bounds)
        self._bucket_answers = True
        return result

    def _named(self, key: str, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(key=key, length=info.length, crc32c=info.crc32c)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


def _read(key: str, start: int, buffer: memoryview, client: Client) -> int:
    return client.read_into(key, start, buffer)


def _observe(client: Client) -> Observed:
    return client.observe()


def _observe_place(client: Client) -> Observed:
    return client.observe_place()


def _look_public(client: Client) -> Fact:
    return client.look_public()


def _page(prefix: str, delimiter: str, following: str | None, client: Client) -> Any:
    return client.page(prefix, delimiter, following)


def _send_part(
    upload: Any, start: int, key: str, source: Source, length: int, crc: int, client: Client
) -> int:
    # On every try a window of its own: no retry sends an exhausted body.
    return client.send(upload, start, Body(Window(key, source, start, length, crc)))
