"""S3 and compatible stores, through botocore's plain client in threads.

The bytes do not go through s3fs: it holds whole parts in memory and hashes them several times, and
its uploads can hang for ever where a server accepts a request and never answers. Here a part is a
window on the source that is re-read on every try, and its CRC32C goes along for the store to check.
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from io import RawIOBase
from typing import Any

from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import (
    AbsentError,
    CorruptError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.interfaces import ObjectInfo, Source
from dcp_tiered.tiers.s3_requests import (
    S3Requests,
    crc_header,
    crc_value,
    too_short,
    transport_errors,
)

_log = logging.getLogger(__name__)

# S3's own limits; compatible stores copy them.
_PARTS_MAX = 10_000
_PART_BYTES_MIN = 5 << 20
_PART_BYTES_MAX = 5 << 30

_PART_THREADS = 3
_READ_BYTES = 256 << 10
_SUM_BYTES = 1 << 20
_UPLOADS_MAX = 2
_TIDY_S = 5.0
"""Aborting what is left of an upload is a courtesy, and not waited for longer than this."""
_ALGORITHM = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}


class S3Tier:
    """Objects of one bucket below one prefix.

    Args:
        path: `bucket/prefix`.
        options: See `S3Requests`.
        request_timeout_s: Longest silence of the store within one request.
        request_retry_s: How long one request is tried again before its error is raised.
        part_bytes: Size of one request of a large upload.
    """

    name = "durable"

    def __init__(
        self,
        path: str,
        options: Mapping[str, Any],
        *,
        request_timeout_s: float,
        request_retry_s: float,
        part_bytes: int,
    ) -> None:
        bucket, _, self._prefix = path.partition("/")
        self._requests = S3Requests(
            bucket, options, request_timeout_s=request_timeout_s, request_retry_s=request_retry_s
        )
        self._part_bytes = part_bytes
        self._bucket_answers = False
        self.url = f"s3://{path}"

    def __repr__(self) -> str:
        return f"S3Tier({self.url})"

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        self._call(
            "put_object", key, Body=data, IfNoneMatch="*", ChecksumCRC32C=crc_header(crc32c(data))
        )

    def upload(self, key: str, source: Source) -> None:
        """Create a large object; see `Tier.upload`.

        The name is unique to its bytes, so the last request needs no condition.
        """
        found = self._find(key)
        if found is not None:
            if not _same(found, source):
                raise CorruptError(
                    "object is there with other bytes than ours", self.name, self._where(key)
                )
            return
        for _ in range(_UPLOADS_MAX):
            self._send(key, source)
            # Stores have answered 200 for objects that were short by whole parts, or not there.
            if _same(self._find(key), source):
                return
        raise UnavailableError(
            "store accepted an object and has something else",
            self.name,
            self._where(key),
            "The upload is tried again; if this persists, the store loses data.",
        )

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; see `Tier.get`."""

        def read(reply: Any) -> bytes:
            with closing(reply["Body"]) as body:
                length = int(reply["ContentLength"])
                if length > bytes_max:
                    raise CorruptError(
                        f"object of {length} bytes exceeds {bytes_max}", self.name, self._where(key)
                    )
                buffer = bytearray(length)
                done = sum(_filling(body, memoryview(buffer)))
                # botocore compares the checksum when it meets the end, not a byte before.
                if done != length or body.read(1):
                    raise OSError(f"reply has other than {length} bytes")
                return bytes(buffer)

        data: bytes = self._call("get_object", key, use=read, ChecksumMode="ENABLED")
        return data

    def read_alignment(self, key: str) -> int:
        """Return 1: replies are received into any memory; see `Tier.read_alignment`."""
        del key
        return 1

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`. A broken reply is carried on."""
        done = 0

        def read(reply: Any) -> None:
            nonlocal done
            with closing(reply["Body"]) as body:
                if not str(reply.get("ContentRange", "")).startswith(f"bytes {start + done}-"):
                    raise CorruptError("store ignored the range", self.name, self._where(key))
                before = done
                try:
                    for count in _filling(body, buffer[done:]):
                        done += count
                except transport_errors():
                    if done == before:
                        raise

        while done < len(buffer):
            before = done
            span = f"bytes={start + done}-{start + len(buffer) - 1}"
            self._call("get_object", key, use=read, Range=span)
            if done == before:
                raise too_short(self._where(key))

    def head(self, key: str) -> ObjectInfo:
        """Return length and the checksum of the whole object, if the store keeps one."""
        try:
            reply = self._call("head_object", key, ChecksumMode="ENABLED")
        except AbsentError:
            # A reply to HEAD has no body that could say why: a bucket that is not there, or a web
            # server that is no store at all, gives the same 404 as an object that is not there.
            if not self._bucket_answers:
                next(self._pages(Prefix=f"{self._prefix}/", MaxKeys=1))
            raise
        stored = reply.get("ChecksumCRC32C")
        whole = reply.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        crc = crc_value(stored) if stored and whole and "-" not in stored else None
        return ObjectInfo(key=key, length=int(reply["ContentLength"]), crc32c=crc)

    def list_keys(self, prefix: str) -> Iterator[str]:
        """Yield every key below a directory; see `Tier.list_keys`."""
        cut = len(self._prefix) + 1
        for page in self._pages(Prefix=f"{self._prefix}/{prefix.rstrip('/')}/"):
            yield from (entry["Key"][cut:] for entry in page.get("Contents", ()))

    def list_directories(self) -> Iterator[str]:
        """Yield the names right below the run root that have something below them."""
        cut = len(self._prefix) + 1
        for page in self._pages(Prefix=f"{self._prefix}/", Delimiter="/"):
            yield from (entry["Prefix"][cut:-1] for entry in page.get("CommonPrefixes", ()))

    def close(self) -> None:
        """Give connections back."""
        self._requests.close()

    def _pages(self, **arguments: Any) -> Iterator[Any]:
        while True:
            page = self._call("list_objects_v2", None, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == arguments.get("ContinuationToken"):
                raise UnavailableError(
                    "store breaks a listing off", self.name, self.url, "It is tried again."
                )
            arguments["ContinuationToken"] = token

    def _find(self, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except AbsentError:
            return None

    def _send(self, key: str, source: Source) -> None:
        part = part_size(source.length, self._part_bytes)
        if source.length > part:
            self._put_parts(key, source, part)
            return
        if not source.length and source.crc32c:
            raise _damaged(key)
        self._call(
            "put_object",
            key,
            fresh=lambda: {"Body": _Window(key, source, 0, source.length, source.crc32c)},
            ContentLength=source.length,
            ChecksumCRC32C=crc_header(source.crc32c),
        )

    def _put_parts(self, key: str, source: Source, part: int) -> None:
        def begin() -> dict[str, str]:
            # On every try: one whose reply is lost leaves an upload that nobody knows the id of.
            self._abort_stale(key)
            return _ALGORITHM

        upload = self._call("create_multipart_upload", key, fresh=begin)["UploadId"]
        try:
            parts = self._send_parts(key, source, part, upload)
            self._complete(key, source, upload, parts)
        except BaseException:
            self._abort(key, upload)
            raise

    def _complete(self, key: str, source: Source, upload: str, parts: list[Any]) -> None:
        try:
            self._call(
                "complete_multipart_upload",
                key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                ChecksumType="FULL_OBJECT",
                ChecksumCRC32C=crc_header(source.crc32c),
            )
        except TieredError:
            # A Complete whose reply was lost comes back as NoSuchUpload: what is there decides.
            if not _same(self._find(key), source):
                raise

    def _send_parts(self, key: str, source: Source, part: int, upload: str) -> list[Any]:
        stop = threading.Event()

        def send(number: int) -> tuple[int, int, dict[str, Any]]:
            start = number * part
            length = min(part, source.length - start)
            # Read once for the checksum, which goes ahead of the bytes, and once to be sent.
            crc = _sum(source, start, length, stop)
            reply = self._call(
                "upload_part",
                key,
                fresh=lambda: {"Body": _Window(key, source, start, length, crc, stop)},
                stop=stop,
                UploadId=upload,
                PartNumber=number + 1,
                ContentLength=length,
                ChecksumCRC32C=crc_header(crc),
            )
            entry = {"PartNumber": number + 1, "ETag": reply["ETag"]}
            return crc, length, entry | {"ChecksumCRC32C": crc_header(crc)}

        count = -(-source.length // part)
        with ThreadPoolExecutor(_PART_THREADS, "dcp-tiered-part") as pool:
            futures = [pool.submit(send, number) for number in range(count)]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                # Leaving `with` waits for the parts on their way, and so it should: a part that
                # arrives after the abort stays in the bucket. `stop` makes that wait a short one.
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        total, entries = 0, []
        for future in futures:
            crc, length, entry = future.result()
            total = combine_crc32c(total, crc, length)
            entries.append(entry)
        if total != source.crc32c:
            raise _damaged(key)
        return entries

    def _abort_stale(self, key: str) -> None:
        """Abort uploads of this very key that a killed predecessor or a lost reply left open."""
        full = self._key(key)
        try:
            reply = self._call("list_multipart_uploads", None, retry_s=_TIDY_S, Prefix=full)
        except TieredError as exc:
            _log.info("cannot list open uploads, leaving them to the bucket's lifecycle: %s", exc)
            return
        for upload in reply.get("Uploads") or ():
            if upload["Key"] == full:
                self._abort(key, upload["UploadId"])

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", key, retry_s=_TIDY_S, UploadId=upload)
        except TieredError as exc:
            if "NoSuchUpload" not in exc.message:
                _log.warning("cannot abort the upload of %s, its parts stay: %s", key, exc.message)

    def _call(self, operation: str, key: str | None, **arguments: Any) -> Any:
        full = None if key is None else self._key(key)
        reply = self._requests.call(operation, full, **arguments)
        self._bucket_answers = True
        return reply

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


class _Window(RawIOBase):
    """A seekable view of a part of a source, so that a part never lies in memory as a whole.

    It takes the checksum as it goes and does not hand out its last bytes when that is wrong: the
    request breaks off, and damaged bytes become visible not even on a store that checks nothing.
    """

    def __init__(
        self,
        key: str,
        source: Source,
        start: int,
        length: int,
        crc: int,
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self._key, self._source, self._start, self._length = key, source, start, length
        self._expected, self._stop = crc, stop
        self._at = self._summed = self._crc = 0

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = origin + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = self._length - self._at
        count = left if size is None or size < 0 else min(size, left)
        if count <= 0:
            return b""
        _go_on(self._stop)
        data = self._source.pread(count, self._start + self._at)
        if self._at == 0:
            self._summed = self._crc = 0
        if self._at == self._summed:
            self._crc = crc32c(data, self._crc)
            self._summed += len(data)
        self._at += len(data)
        if self._summed == self._length and self._crc != self._expected:
            raise _damaged(self._key)
        return data


def part_size(length: int, wanted: int) -> int:
    """Return the size of the parts of an object: what is wanted, within what S3 takes.

    Raises:
        InvalidError: The object is larger than S3 takes at all.
    """
    size = max(wanted, _PART_BYTES_MIN, -(-length // _PARTS_MAX))
    if length > _PARTS_MAX * _PART_BYTES_MAX:
        raise InvalidError(
            f"object of {length} bytes is larger than S3 takes",
            "durable",
            None,
            "Save on more ranks, so that each writes a smaller shard file.",
        )
    return min(size, _PART_BYTES_MAX)


def _same(found: ObjectInfo | None, source: Source) -> bool:
    """Tell whether what is there is the source, as far as the store can say."""
    if found is None or found.length != source.length:
        return False
    return found.crc32c in (None, source.crc32c)


def _sum(source: Source, start: int, length: int, stop: threading.Event) -> int:
    crc, done = 0, 0
    while done < length:
        _go_on(stop)
        data = source.pread(min(_SUM_BYTES, length - done), start + done)
        crc = crc32c(data, crc)
        done += len(data)
    return crc


def _go_on(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise InterruptedError("another part of the upload failed")


def _filling(stream: Any, buffer: memoryview) -> Iterator[int]:
    """Fill a buffer from a reply and yield the size of each step; end early when the reply does."""
    done = 0
    while done < len(buffer):
        data = stream.read(min(_READ_BYTES, len(buffer) - done))
        if not data:
            return
        buffer[done : done + len(data)] = data
        done += len(data)
        yield len(data)


def _damaged(key: str) -> CorruptError:
    return CorruptError(
        "bytes to upload do not have the checksum that they were saved with",
        "local",
        key,
        "The local copy is damaged: look at 'dmesg' for the device and save again.",
    )
