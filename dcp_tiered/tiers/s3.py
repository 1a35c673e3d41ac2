"""S3 and compatible stores, through botocore's plain client in threads.

The bytes do not go through s3fs: it holds whole parts in memory and hashes them several times, and
its uploads can hang for ever where a server accepts a request and never answers. Here a part is a
window on the source that is re-read on every try, and its CRC32C goes along for the store to check.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

from awscrt.checksums import combine_crc32c, crc32c

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format.residency import Fact, Observed
from dcp_tiered.interfaces import ObjectInfo, Source
from dcp_tiered.metrics import Sample
from dcp_tiered.tiers.s3_body import Window, damaged, filling
from dcp_tiered.tiers.s3_errors import ChecksumRefusedError, too_short, transport_errors
from dcp_tiered.tiers.s3_pins import Pin
from dcp_tiered.tiers.s3_requests import S3Requests, crc_header, crc_value
from dcp_tiered.tiers.s3_residency import look_public, observe, observe_place
from dcp_tiered.tiers.stored_crc import may_be, need_ours

_log = logging.getLogger(__name__)

# S3's own limits; compatible stores copy them.
_PARTS_MAX = 10_000
_PART_BYTES_MIN = 5 << 20
PART_BYTES_WORTH = 16 << 20
"""Smaller parts cost more requests than they are worth; see `stack`."""
_PART_BYTES_MAX = 5 << 30

_PART_THREADS = 4
"""1 GiB to a server on the same two cores took 5.5 s with three, 5.1 with four, 5.2 with six."""
_BYTES_PER_SECOND_MIN = 256 << 10
"""An upload slower than this is not tried on: see `S3Tier.upload`."""
_TIDY_S = 5.0
"""Aborting what is left of an upload is a courtesy, and not waited for longer than this."""
_ASK = {"ChecksumMode": "ENABLED"}
_ALGORITHM = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}


class S3Tier:
    """Objects of one bucket below one prefix.

    Args:
        path: `bucket/prefix`.
        options: See `S3Requests`.
        request_timeout_s: Longest silence of the store within one request.
        request_retry_s: How long one request is tried again before its error is raised.
        part_bytes: Size of one request of a large upload.
        connections_max: Requests on their way at once.
        pin: Where requests may go at all; None without a residency policy.
    """

    name = "durable"
    keeps_writers_apart = True

    def __init__(
        self,
        path: str,
        options: Mapping[str, Any],
        *,
        request_timeout_s: float,
        request_retry_s: float,
        part_bytes: int,
        connections_max: int = 16,
        pin: Pin | None = None,
    ) -> None:
        bucket, _, self._prefix = path.partition("/")
        self._requests = S3Requests(
            bucket,
            options,
            request_timeout_s=request_timeout_s,
            request_retry_s=request_retry_s,
            connections_max=connections_max,
            pin=pin,
        )
        self._part_bytes = part_bytes
        self._retry_s = request_retry_s
        self._bucket_answers = False
        self._takes_sums = True
        self.url = f"s3://{path}"

    def __repr__(self) -> str:
        return f"S3Tier({self.url})"

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`.

        Where the store gives no checksum back, the bytes are read back. If they are others, those
        may be of somebody who put the key at the same instant: not every store lets only one in.
        """
        sums = {"ChecksumCRC32C": crc_header(crc32c(data))}
        reply = self._summed("put_object", key, sums, Body=data, IfNoneMatch="*")
        if _whole_crc(reply) is None and not self._reads(key, data):
            raise AlreadyExistsError(
                "object is there with other bytes than were sent", self.name, self._where(key)
            )

    def upload(self, key: str, source: Source) -> ObjectInfo:
        """Create a large object; see `DurableTier.upload`.

        Its requests are tried again until `request_retry_s` and a time that its length allows for
        are over, however many there are. What the store says of it comes from the last reply, or
        from one more request where that carries no checksum of the whole object.

        Raises:
            UnavailableError: The store accepts the object and has something else.
        """
        until = time.monotonic() + self._retry_s + source.length / _BYTES_PER_SECOND_MIN
        part = part_size(source.length, self._part_bytes)
        in_parts = source.length > part
        # What is sent in one request carries a condition instead, and so needs no look before.
        if in_parts and (found := self._find(key)) is not None:
            return self._ours(found, source)
        for replace in (False, True):
            if in_parts:
                info = self._put_parts(key, source, part, until)
            else:
                info = self._put_whole(key, source, until, {} if replace else {"IfNoneMatch": "*"})
            # Stores have answered 200 for objects that were short by whole parts, or not there.
            info = info or self._find(key)
            if info is not None and may_be(info, source):
                return info
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
                done = sum(filling(body, memoryview(buffer)))
                # botocore compares the checksum when it meets the end, not a byte before.
                if done != length or body.read(1):
                    raise OSError(f"reply has other than {length} bytes")
                return bytes(buffer)

        data: bytes = self._summed("get_object", key, _ASK, use=read)
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
                    for count in filling(body, buffer[done:]):
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
            reply = self._summed("head_object", key, _ASK)
        except AbsentError:
            # A reply to HEAD has no body that could say why: a bucket that is not there, or a web
            # server that is no store at all, gives the same 404 as an object that is not there.
            if not self._bucket_answers:
                next(self._pages(Prefix=f"{self._prefix}/", MaxKeys=1))
            raise
        return ObjectInfo(
            key=key,
            length=int(reply["ContentLength"]),
            crc32c=_whole_crc(reply),
            is_as_asked=self._requests.parameters.unencrypted(reply) is None,
        )

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

    def observe(self) -> Observed:
        """Look where the bucket is, whose it is, and where copies of it go; with a pin only."""
        assert self._requests.pin is not None
        return observe(self._requests, self._requests.pin, f"{self._prefix}/")

    def observe_place(self) -> Observed:
        """Look where the bucket is and whose it is; with a pin only."""
        assert self._requests.pin is not None
        return observe_place(self._requests, self._requests.pin)

    def look_public(self) -> Fact:
        """Look for signs that the bucket is public; without a pin only."""
        return look_public(self._requests, f"{self._prefix}/")

    def region(self) -> str:
        """Return the region that requests are signed for."""
        return self._requests.region()

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this process."""
        yield from self._requests.samples()

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

    def _reads(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key, len(data)) == data
        except CorruptError:  # longer, so not ours
            return False

    def _find(self, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except AbsentError:
            return None

    def _ours(self, found: ObjectInfo, source: Source) -> ObjectInfo:
        """Return what is there if it is the source, and stored as asked; see `need_ours`."""
        if not found.is_as_asked:
            where = self._where(found.key)
            raise InvalidError(
                "object is there already, and not encrypted as the options ask",
                self.name,
                where,
                f"Remove {where}; it is uploaded again.",
            )
        return need_ours(self, found, source, self._where(found.key))

    def _put_whole(
        self, key: str, source: Source, until: float, condition: dict[str, str]
    ) -> ObjectInfo | None:
        """Send a source in one request; return what the reply says of the object, if anything."""
        if not source.length and source.crc32c:
            raise damaged(key)
        try:
            reply = self._summed(
                "put_object",
                key,
                {"ChecksumCRC32C": crc_header(source.crc32c)},
                fresh=lambda: {"Body": Window(key, source, 0, source.length, source.crc32c)},
                until=until,
                ContentLength=source.length,
                **condition,
            )
        except AlreadyExistsError:
            # Perhaps by an earlier try of ours whose reply was lost.
            found = self._find(key)
            return found and self._ours(found, source)
        return _said(key, source, reply)

    def _put_parts(self, key: str, source: Source, part: int, until: float) -> ObjectInfo | None:
        """Send a source in parts; return what the reply says of the object, if anything."""

        def begin() -> dict[str, str]:
            # On every try: one whose reply is lost leaves an upload that nobody knows the id of.
            self._drop_uploads(key, whole=True)
            return {}

        made = self._summed("create_multipart_upload", key, _ALGORITHM, fresh=begin, until=until)
        upload = made["UploadId"]
        try:
            parts = self._send_parts(key, source, part, upload, until)
            info = self._complete(key, source, upload, parts, until)
        except BaseException:
            self._abort(key, upload)
            raise
        self._requests.prove_encryption(self._key(key))
        return info

    def _complete(
        self, key: str, source: Source, upload: str, parts: list[dict[str, Any]], until: float
    ) -> ObjectInfo | None:
        plain = [{name: one[name] for name in ("PartNumber", "ETag")} for one in parts]
        sums = {
            "MultipartUpload": {"Parts": parts},
            "ChecksumType": "FULL_OBJECT",
            "ChecksumCRC32C": crc_header(source.crc32c),
        }
        try:
            reply = self._summed(
                "complete_multipart_upload",
                key,
                sums,
                until=until,
                UploadId=upload,
                MultipartUpload={"Parts": plain},
            )
        except TieredError:
            # A Complete whose reply was lost comes back as NoSuchUpload: what is there decides.
            found = self._find(key)
            if found is None or not may_be(found, source):
                raise
            return found
        return _said(key, source, reply)

    def _send_parts(
        self, key: str, source: Source, part: int, upload: str, until: float
    ) -> list[dict[str, Any]]:
        stop = threading.Event()

        def send(number: int) -> tuple[int, int, dict[str, Any]]:
            start = number * part
            length = min(part, source.length - start)
            crc = source.checksum(length, start)
            sums = {"ChecksumCRC32C": crc_header(crc)}
            reply = self._summed(
                "upload_part",
                key,
                sums,
                fresh=lambda: {"Body": Window(key, source, start, length, crc, stop)},
                stop=stop,
                until=until,
                UploadId=upload,
                PartNumber=number + 1,
                ContentLength=length,
            )
            return crc, length, {"PartNumber": number + 1, "ETag": reply["ETag"]} | sums

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
            raise damaged(key)
        return entries

    def delete(self, key: str) -> None:
        """Remove an object; see `DurableTier.delete`.

        In a bucket with versions it stays as a noncurrent one, which a lifecycle rule ends.
        """
        with contextlib.suppress(AbsentError):
            self._call("delete_object", key)

    def drop_uploads(self, prefix: str) -> None:
        """Abort uploads that a killed predecessor left open, one page of them."""
        self._drop_uploads(prefix, whole=False)

    def _drop_uploads(self, prefix: str, *, whole: bool) -> None:
        """Abort open uploads of a key, or with `whole` unset of all keys that begin so."""
        full, cut = self._key(prefix), len(self._prefix) + 1
        try:
            reply = self._call("list_multipart_uploads", None, retry_s=_TIDY_S, Prefix=full)
        except TieredError as exc:
            _log.info("cannot list open uploads, leaving them to the bucket's lifecycle: %s", exc)
            return
        for upload in reply.get("Uploads") or ():
            if upload["Key"] == full or (upload["Key"].startswith(full) and not whole):
                self._abort(upload["Key"][cut:], upload["UploadId"])

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", key, retry_s=_TIDY_S, UploadId=upload)
        except TieredError as exc:
            if "NoSuchUpload" not in exc.message:
                _log.warning("cannot abort the upload of %s, its parts stay: %s", key, exc.message)

    def _summed(self, operation: str, key: str, sums: Mapping[str, Any], **arguments: Any) -> Any:
        """Send a request with checksums, or without them to a store that refuses them.

        That it is the checksums which it refuses is believed when the same request works without
        them. The object is then read back: see `put`, and `PackStore` for what is uploaded.
        """
        if not self._takes_sums:
            return self._call(operation, key, **arguments)
        try:
            return self._call(operation, key, **(arguments | dict(sums)))
        except ChecksumRefusedError as exc:
            refused = exc
        try:
            reply = self._call(operation, key, **arguments)
        except AbsentError:
            self._stop_sums(refused)
            raise
        self._stop_sums(refused)
        return reply

    def _stop_sums(self, refused: TieredError) -> None:
        if self._takes_sums:
            self._takes_sums = False
            _log.warning(
                "%s takes no checksums; what is sent there is read back instead: %s",
                self.url,
                refused.message,
            )

    def _call(self, operation: str, key: str | None, **arguments: Any) -> Any:
        full = None if key is None else self._key(key)
        reply = self._requests.call(operation, full, **arguments)
        self._bucket_answers = True
        return reply

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


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


def _said(key: str, source: Source, reply: Mapping[str, Any]) -> ObjectInfo | None:
    """Return what a reply says of an object that has just been sent, None when it says too little.

    An object that is short by some bytes or by whole parts would have another checksum.
    """
    crc = _whole_crc(reply)
    return None if crc is None else ObjectInfo(key=key, length=source.length, crc32c=crc)


def _whole_crc(reply: Mapping[str, Any]) -> int | None:
    """Return the CRC32C of the whole object from a reply, None for that of parts or for none."""
    stored = reply.get("ChecksumCRC32C")
    whole = reply.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return crc_value(stored) if stored and whole and "-" not in stored else None
