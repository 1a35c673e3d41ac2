"""S3 and compatible stores, through botocore's plain client in threads.

s3fs is what users know, so options are read as s3fs reads them. The bytes go another way: s3fs holds
whole parts in memory and hashes them several times, and its uploads can hang for ever where a server
accepts a request and never answers. Here a part is a window on the source that is re-read on every
try, its CRC32C goes with it for the store to check, and one retry layer has one deadline.
"""

import base64
import io
import logging
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
from dcp_tiered.interfaces import ObjectInfo, Source

_log = logging.getLogger(__name__)

_PARTS_MAX = 9_000
"""Below S3's limit of 10,000: the part size grows before that is ever reached."""
_PART_THREADS = 3
_READ_BYTES = 256 << 10
_RETRYABLE = {
    "500",
    "502",
    "503",
    "504",
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_ABSENT = {"NoSuchKey", "NotFound", "404"}
_EXISTS = {"PreconditionFailed", "412"}
_ALGORITHM = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
_CLIENT_OPTIONS = ("endpoint_url", "region_name", "use_ssl", "verify")


class S3Tier:
    """Objects of one bucket below one prefix.

    Args:
        path: `bucket/prefix`.
        options: As for s3fs: key, secret, token, profile, endpoint_url, anon, client_kwargs,
            config_kwargs.
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
        self._bucket, _, self._prefix = path.partition("/")
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        self._retry_s = request_retry_s
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._client: Any = None
        self._client_pid = 0
        self.url = f"s3://{path}"

    def __repr__(self) -> str:
        return f"S3Tier({self.url})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections and locks behind: a client does not survive another process."""
        return {**self.__dict__, "_client": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Create a small object; see `Tier.put`."""
        self._call(
            "put_object", key, Body=data, IfNoneMatch="*", ChecksumCRC32C=_header(crc32c(data))
        )

    def upload(self, key: str, source: Source) -> None:
        """Create a large object; see `Tier.upload`.

        The name is unique to its bytes, so the last request needs no condition.
        """
        if self._is_there(key, source):
            return
        part = max(self._part_bytes, -(-source.length // _PARTS_MAX))
        if source.length <= part:
            self._put_whole(key, source)
        else:
            self._abort_stale(key)
            self._put_parts(key, source, part)
        if not self._is_there(key, source):
            raise UnavailableError(
                "store accepted an object and does not have it",
                self.name,
                self._where(key),
                "The upload is tried again; if this persists, the store loses data.",
            )

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole; see `Tier.get`."""

        def read(reply: Any) -> bytes:
            length = int(reply["ContentLength"])
            if length > bytes_max:
                raise CorruptError(
                    f"object of {length} bytes exceeds {bytes_max}", self.name, self._where(key)
                )
            buffer = bytearray(length)
            _fill(reply["Body"], memoryview(buffer))
            return bytes(buffer)

        data: bytes = self._call("get_object", key, use=read)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start`; see `Tier.read_into`. A broken reply is carried on."""
        if not buffer:
            return
        done = 0

        def read(reply: Any) -> None:
            nonlocal done
            first = done
            if not str(reply.get("ContentRange", "")).startswith(f"bytes {start + done}-"):
                raise CorruptError("store ignored the range", self.name, self._where(key))
            try:
                for count in _filling(reply["Body"], buffer[done:]):
                    done += count
            except OSError:
                if done == first:
                    raise
            finally:
                reply["Body"].close()

        while done < len(buffer):
            before = done
            span = f"bytes={start + done}-{start + len(buffer) - 1}"
            self._call("get_object", key, use=read, Range=span)
            if done == before:
                raise self._too_short(self._where(key))

    def head(self, key: str) -> ObjectInfo:
        """Return length and the checksum of the whole object, if the store keeps one."""
        reply = self._call("head_object", key, ChecksumMode="ENABLED")
        stored = reply.get("ChecksumCRC32C")
        whole = reply.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        crc = _value(stored) if stored and whole and "-" not in stored else None
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
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _pages(self, **arguments: Any) -> Iterator[Any]:
        while True:
            page = self._call("list_objects_v2", None, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _is_there(self, key: str, source: Source) -> bool:
        try:
            info = self.head(key)
        except AbsentError:
            return False
        return info.length == source.length and info.crc32c in (None, source.crc32c)

    def _put_whole(self, key: str, source: Source) -> None:
        if _sum(source, 0, source.length) != source.crc32c:
            raise _damaged(key)
        self._call(
            "put_object",
            key,
            body=lambda: _Window(source, 0, source.length),
            ContentLength=source.length,
            ChecksumCRC32C=_header(source.crc32c),
        )

    def _put_parts(self, key: str, source: Source, part: int) -> None:
        upload = self._call("create_multipart_upload", key, **_ALGORITHM)["UploadId"]
        try:
            parts = self._send_parts(key, source, part, upload)
            self._call(
                "complete_multipart_upload",
                key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                ChecksumType="FULL_OBJECT",
                ChecksumCRC32C=_header(source.crc32c),
            )
        except BaseException as exc:
            # A Complete whose reply was lost comes back as NoSuchUpload: what is there decides.
            if isinstance(exc, TieredError) and self._is_there(key, source):
                return
            self._abort(key, upload)
            raise

    def _send_parts(self, key: str, source: Source, part: int, upload: str) -> list[Any]:
        def send(number: int) -> tuple[int, int, dict[str, Any]]:
            start = number * part
            length = min(part, source.length - start)
            crc = _sum(source, start, length)
            reply = self._call(
                "upload_part",
                key,
                body=lambda: _Window(source, start, length),
                UploadId=upload,
                PartNumber=number + 1,
                ContentLength=length,
                ChecksumCRC32C=_header(crc),
            )
            entry = {"PartNumber": number + 1, "ETag": reply["ETag"]}
            return crc, length, entry | {"ChecksumCRC32C": _header(crc)}

        count = -(-source.length // part)
        with ThreadPoolExecutor(_PART_THREADS, "dcp-tiered-part") as pool:
            futures = [pool.submit(send, number) for number in range(count)]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
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
        """Abort uploads of this very key that a killed predecessor left open."""
        try:
            reply = self._call("list_multipart_uploads", None, Prefix=self._key(key))
        except TieredError as exc:
            _log.info("cannot list open uploads, leaving them to the bucket's lifecycle: %s", exc)
            return
        for upload in reply.get("Uploads") or ():
            if upload["Key"] == self._key(key):
                self._abort(key, upload["UploadId"])

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", key, UploadId=upload)
        except TieredError as exc:
            _log.warning("cannot abort the upload of %s, its parts stay: %s", key, exc.message)

    def _call(
        self,
        operation: str,
        key: str | None,
        *,
        body: Callable[[], "_Window"] | None = None,
        use: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """Send one request until it succeeds, fails for good, or its time is over.

        Args:
            operation: botocore's method name.
            key: The object, None for requests about the bucket.
            body: Makes a fresh body for every try, so that no retry sends an exhausted one.
            use: Consumes the reply within the retry, for replies that can break half way.
            **arguments: botocore's arguments.
        """
        if key is not None:
            arguments["Key"] = self._key(key)
        deadline = time.monotonic() + self._retry_s
        attempt = 0
        while True:
            attempt += 1
            try:
                client = self._connect()
                if body is not None:
                    arguments["Body"] = body()
                reply = getattr(client, operation)(Bucket=self._bucket, **arguments)
                return reply if use is None else use(reply)
            except TieredError:
                raise
            except Exception as exc:
                error, retryable = self._translate(exc, operation, key, attempt)
                pause = random.uniform(0, min(8.0, 0.2 * 2**attempt))  # noqa: S311 - jitter
                if not retryable or time.monotonic() + pause > deadline:
                    raise error from exc
                _log.info("retrying: %s", error.message)
                time.sleep(pause)

    def _translate(
        self, exc: Exception, operation: str, key: str | None, attempt: int
    ) -> tuple[TieredError, bool]:
        """Return our error for botocore's, and whether another try may help."""
        from botocore import exceptions

        where = self._where(key)
        if isinstance(exc, exceptions.ClientError):
            return self._refused(exc.response, operation, where, attempt)
        text = f"{operation} failed on try {attempt}: {type(exc).__name__}: {exc}"
        if isinstance(exc, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
            hint = (
                "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass s3={'key':, 'secret':}."
            )
            return InvalidError(text, self.name, where, hint), False
        transient = (exceptions.HTTPClientError, exceptions.ConnectionError, OSError)
        if isinstance(exc, transient):
            hint = f"Check that {self._endpoint()} is up and can be reached from this node."
            return UnavailableError(text, self.name, where, hint), True
        if isinstance(exc, exceptions.FlexibleChecksumError):
            return CorruptError(text, self.name, where), True
        return InvalidError(text, self.name, where, "Check the s3 options."), False

    def _refused(
        self, response: Mapping[str, Any], operation: str, where: str, attempt: int
    ) -> tuple[TieredError, bool]:
        code = str(response.get("Error", {}).get("Code", ""))
        meta = response.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode", 0))
        text = f"{operation} answered {status} {code} on try {attempt}"
        if meta.get("RequestId"):
            text += f", request {meta['RequestId']}"
        if code in _EXPIRED:
            self.close()
            hint = "Renew the credentials; they are looked up again on every try."
            return UnavailableError(text, self.name, where, hint), True
        if code == "NoSuchBucket":
            hint = f"Create bucket {self._bucket!r} or correct the URL; it is never created here."
            return InvalidError(f"no such bucket: {text}", self.name, where, hint), False
        if code in _ABSENT or (status == 404 and code != "NoSuchUpload"):  # noqa: PLR2004
            return AbsentError(f"no such object: {text}", self.name, where), False
        if code in _EXISTS:
            return AlreadyExistsError("object is there already", self.name, where), False
        if code in _RETRYABLE or status >= 500 or status == 429:  # noqa: PLR2004 - HTTP classes
            hint = "The store is overloaded or failing; the request is tried again."
            return UnavailableError(text, self.name, where, hint), True
        if status == 416:  # noqa: PLR2004 - range not satisfiable
            return self._too_short(where), False
        if status in (401, 403):
            hint = "Check the key, the secret and the bucket policy for GetObject, PutObject, ListBucket."
            return InvalidError(f"access denied: {text}", self.name, where, hint), False
        return InvalidError(text, self.name, where, "Check the URL and the s3 options."), False

    def _too_short(self, where: str) -> CorruptError:
        return CorruptError("object ends before what was asked of it", self.name, where)

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None or self._client_pid != os.getpid():
                self._client = self._new_client()
                self._client_pid = os.getpid()
            return self._client

    def _new_client(self) -> Any:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        options = self._options
        client = dict(options.get("client_kwargs") or {})
        client |= {k: options[k] for k in _CLIENT_OPTIONS if options.get(k) is not None}
        session = botocore.session.Session(profile=options.get("profile"))
        given = dict(options.get("config_kwargs") or {})
        s3 = {"payload_signing_enabled": False, **given.pop("s3", {})}
        if client.get("endpoint_url"):
            s3.setdefault("addressing_style", "path")
        config = Config(
            **{
                "connect_timeout": min(5.0, self._timeout_s),
                "read_timeout": self._timeout_s,
                "max_pool_connections": 16,
                "tcp_keepalive": True,
                **given,
            },
            s3=s3,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # One retry layer, ours: botocore's would multiply with it.
            retries={"total_max_attempts": 1},
            **({"signature_version": UNSIGNED} if options.get("anon") else {}),
        )
        return session.create_client(
            "s3",
            config=config,
            aws_access_key_id=options.get("key"),
            aws_secret_access_key=options.get("secret"),
            aws_session_token=options.get("token"),
            **client,
        )

    def _endpoint(self) -> str:
        client = self._options.get("client_kwargs") or {}
        return str(self._options.get("endpoint_url") or client.get("endpoint_url") or "Amazon S3")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _where(self, key: str | None) -> str:
        return self.url if key is None else f"{self.url}/{key}"


class _Window(io.RawIOBase):
    """A seekable view of a part of a source, so that a part never lies in memory as a whole."""

    def __init__(self, source: Source, start: int, length: int) -> None:
        super().__init__()
        self._source, self._start, self._length, self._at = source, start, length, 0

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
        data = self._source.pread(count, self._start + self._at) if count > 0 else b""
        self._at += len(data)
        return data


def _sum(source: Source, start: int, length: int) -> int:
    crc, done = 0, 0
    while done < length:
        data = source.pread(min(1 << 20, length - done), start + done)
        crc = crc32c(data, crc)
        done += len(data)
    return crc


def _fill(stream: Any, buffer: memoryview) -> None:
    done = sum(_filling(stream, buffer))
    if done != len(buffer):
        raise OSError(f"reply ended after {done} of {len(buffer)} bytes")


def _filling(stream: Any, buffer: memoryview) -> Iterator[int]:
    """Fill a buffer from a reply and yield the size of each step; ends early when the reply does."""
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    done = 0
    while done < len(buffer):
        try:
            data = stream.read(min(_READ_BYTES, len(buffer) - done))
        except (HTTPError, BotoCoreError) as exc:
            raise OSError(f"reply broke off: {exc}") from exc
        if not data:
            return
        buffer[done : done + len(data)] = data
        done += len(data)
        yield len(data)


def _header(crc: int) -> str:
    return base64.b64encode(struct.pack(">I", crc)).decode()


def _value(header: str) -> int:
    value: int = struct.unpack(">I", base64.b64decode(header))[0]
    return value


def _damaged(key: str) -> CorruptError:
    return CorruptError(
        "bytes to upload do not have the checksum that they were saved with",
        "local",
        key,
        "The local copy is damaged: look at 'dmesg' for the device and save again.",
    )
