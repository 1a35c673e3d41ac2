"""One request to S3: a client per process, one retry layer with one deadline, errors of our tree.

s3fs is what users know, so options are read as s3fs reads them.
"""

import base64
import logging
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    ResidencyError,
    TieredError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

_TIER = "durable"
_PAUSE_S_MAX = 8.0
_RETRYABLE = {
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
_RETRYABLE_STATUS = {429, 500, 502, 503, 504}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_EXISTS = {"PreconditionFailed", "412"}
_REDIRECTS = {
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "Redirect",
    "TemporaryRedirect",
}
_CLIENT_OPTIONS = ("endpoint_url", "region_name", "use_ssl", "verify")
_NOT_PASSED_ON = ("requester_pays", "s3_additional_kwargs")
"""Options of s3fs that change what a request means; ignoring them could store in the clear."""
_ELSEWHERE = (
    "Correct the URL, or name the region with s3={'client_kwargs': {'region_name': ...}} if that"
    " place is meant; a redirect is never followed."
)


class S3Requests:
    """Sends requests about one bucket.

    Args:
        bucket: The bucket; it is never created.
        options: As for s3fs: key, secret, token, profile, endpoint_url, anon, client_kwargs,
            config_kwargs.
        request_timeout_s: Longest silence of the store within one request.
        request_retry_s: How long one request is tried again before its error is raised.

    Raises:
        InvalidError: An option is one that s3fs obeys and this would not.
    """

    def __init__(
        self,
        bucket: str,
        options: Mapping[str, Any],
        *,
        request_timeout_s: float,
        request_retry_s: float,
    ) -> None:
        self.bucket = bucket
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        self._retry_s = request_retry_s
        self._client: Any = None
        self._lock = threading.Lock()
        _alive.add(self)
        ignored = [name for name in _NOT_PASSED_ON if options.get(name)]
        if ignored:
            raise InvalidError(
                f"s3 option {ignored[0]} is not supported", _TIER, f"s3://{bucket}", "Leave it out."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections and locks behind: a client does not survive another process."""
        return {**self.__dict__, "_client": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def call(
        self,
        operation: str,
        key: str | None,
        *,
        fresh: Callable[[], Mapping[str, Any]] | None = None,
        use: Callable[[Any], Any] | None = None,
        stop: threading.Event | None = None,
        retry_s: float | None = None,
        **arguments: Any,
    ) -> Any:
        """Send one request until it succeeds, fails for good, or its time is over.

        Args:
            operation: botocore's method name.
            key: The object's key in the bucket, None for requests about the bucket.
            fresh: Makes arguments for every try, so that no retry sends an exhausted body.
            use: Consumes the reply within the retry, for replies that can break half way.
            stop: Ends the tries when somebody sets it.
            retry_s: How long to try, if not as long as usual.
            **arguments: botocore's arguments.
        """
        where = f"s3://{self.bucket}/{key or ''}"
        doing = operation
        if "PartNumber" in arguments:
            doing += f" of part {arguments['PartNumber']}"
        if key is not None:
            arguments["Key"] = key
        deadline = time.monotonic() + (self._retry_s if retry_s is None else retry_s)
        attempt = 0
        while True:
            attempt += 1
            client: Any = None
            try:
                client = self._connect()
                if fresh is not None:
                    arguments |= fresh()
                reply = getattr(client, operation)(Bucket=self.bucket, **arguments)
                return reply if use is None else use(reply)
            except TieredError:
                raise
            except Exception as exc:
                error, retryable = self._translate(exc, f"{doing} on try {attempt}", where)
                if _code(exc) in _EXPIRED:
                    self._drop(client)
                pause = random.uniform(0, min(_PAUSE_S_MAX, 0.2 * 2**attempt))  # noqa: S311 - jitter
                if not retryable or time.monotonic() + pause > deadline:
                    raise error from exc
                _log.info("retrying: %s", error.message)
                if _stopped_within(stop, pause):
                    raise error from exc

    def close(self) -> None:
        """Give connections back."""
        self._drop(self._client)

    def forget(self) -> None:
        """Start anew in a forked child: the parent's sockets are not ours, nor is its lock.

        Another thread may have held the lock at the fork, and in the child nobody would release it.
        """
        self._client = None
        self._lock = threading.Lock()
        _alive.add(self)

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _drop(self, client: Any) -> None:
        """Close a client unless another thread has replaced it already."""
        with self._lock:
            if client is None or client is not self._client:
                return
            self._client = None
        client.close()

    def _new_client(self) -> Any:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        options = self._options
        client = dict(options.get("client_kwargs") or {})
        client |= {k: options[k] for k in _CLIENT_OPTIONS if options.get(k) is not None}
        # A session of its own: it looks credentials up afresh, and sessions are not thread-safe.
        session = botocore.session.Session(profile=options.get("profile"))
        given = dict(options.get("config_kwargs") or {})
        s3 = {"payload_signing_enabled": False, **given.pop("s3", {})}
        if client.get("endpoint_url"):
            s3.setdefault("addressing_style", "path")
        settings = {
            "connect_timeout": min(5.0, self._timeout_s),
            "read_timeout": self._timeout_s,
            "max_pool_connections": 16,
            "tcp_keepalive": True,
            # Many compatible stores refuse the trailing checksums that newer SDKs send by default.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **({"signature_version": UNSIGNED} if options.get("anon") else {}),
            **given,
            "s3": s3,
            # One retry layer, ours: botocore's would multiply with it.
            "retries": {"total_max_attempts": 1},
        }
        made = session.create_client(
            "s3",
            config=Config(**settings),
            aws_access_key_id=options.get("key"),
            aws_secret_access_key=options.get("secret"),
            aws_session_token=options.get("token"),
            **client,
        )
        made.meta.events.register_first("before-send.s3", _Anchor(f"s3://{self.bucket}"))
        return made

    def _translate(self, exc: Exception, doing: str, where: str) -> tuple[TieredError, bool]:
        """Return our error for botocore's, and whether another try may help."""
        from botocore import exceptions, parsers

        if isinstance(exc, exceptions.ClientError):
            return self._refused(exc.response, doing, where)
        inner = getattr(exc, "kwargs", {}).get("error")
        if isinstance(inner, TieredError):
            # The body could not be read: that is the fault of our disk, not of the network.
            return inner, False
        text = f"{doing} failed: {type(exc).__name__}: {exc}"
        if isinstance(exc, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
            hint = (
                "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass s3={'key':, 'secret':}."
            )
            return InvalidError(text, _TIER, where, hint), False
        if isinstance(exc, exceptions.FlexibleChecksumError):
            hint = "The reply differs from what the store says it has; look at the network between."
            return CorruptError(text, _TIER, where, hint), True
        transient = (
            *transport_errors(),
            parsers.ResponseParserError,
            exceptions.CredentialRetrievalError,
            exceptions.MetadataRetrievalError,
        )
        if isinstance(exc, transient):
            hint = f"Check that {self._endpoint()} is up and can be reached from this node."
            return UnavailableError(text, _TIER, where, hint), True
        return InvalidError(text, _TIER, where, "Check the s3 options."), False

    def _refused(
        self, response: Mapping[str, Any], doing: str, where: str
    ) -> tuple[TieredError, bool]:
        refusal = response.get("Error", {})
        code = str(refusal.get("Code", ""))
        meta = response.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode", 0))
        text = f"{doing} answered {status} {code}"
        # botocore overlooks the id where a reply has no body.
        request = meta.get("RequestId") or meta.get("HTTPHeaders", {}).get("x-amz-request-id")
        if request:
            text += f", request {request}"
        if code in _EXPIRED:
            hint = "Renew the credentials; they are looked up again on every try."
            return UnavailableError(text, _TIER, where, hint), True
        if code in _EXISTS:
            return AlreadyExistsError(f"object is there already: {text}", _TIER, where), False
        if status == 404:  # noqa: PLR2004 - HTTP
            return self._missing(code, text, where, is_head=doing.startswith("head_object")), False
        if code in _RETRYABLE or status in _RETRYABLE_STATUS:
            hint = "The store is overloaded or failing; the request is tried again."
            return UnavailableError(text, _TIER, where, hint), True
        if status == 416:  # noqa: PLR2004 - range not satisfiable
            return too_short(where), False
        if code in _REDIRECTS or 300 <= status < 400 or "Region" in refusal:  # noqa: PLR2004
            text += f", region {refusal['Region']}" if "Region" in refusal else ""
            return ResidencyError(f"bucket is elsewhere: {text}", _TIER, where, _ELSEWHERE), False
        return _denied(status, text, where), False

    def _missing(self, code: str, text: str, where: str, *, is_head: bool) -> TieredError:
        """Return what a 404 means. Absent is only what the store itself says is absent (I8)."""
        if code == "NoSuchKey" or (is_head and code in ("404", "NotFound")):
            return AbsentError(f"no such object: {text}", _TIER, where)
        if code == "NoSuchUpload":
            hint = "Somebody aborted the upload; the next try starts a new one."
            return UnavailableError(text, _TIER, where, hint)
        if code == "NoSuchBucket":
            hint = f"Create bucket {self.bucket!r} or correct the URL; it is never created here."
            return InvalidError(f"no such bucket: {text}", _TIER, where, hint)
        hint = f"Check that {self._endpoint()} is an S3 endpoint."
        return InvalidError(f"not an answer of S3: {text}", _TIER, where, hint)

    def _endpoint(self) -> str:
        client = self._client
        return "Amazon S3" if client is None else str(urlsplit(client.meta.endpoint_url).netloc)


class _Anchor:
    """Keeps every request of a client in the place that its first one went to.

    botocore follows a bucket into whatever region the store names: it signs again, sends the body
    there, and remembers. A region in the settings is no pin, and there is no switch.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._place: tuple[str, str, str] | None = None

    def __call__(self, request: Any, **_: Any) -> None:
        url = urlsplit(request.url)
        place = (url.scheme, url.netloc, _signing_region(request.headers))
        # The first request of a client is on its way before any reply could have led it astray.
        if self._place is None:
            self._place = place
        if place != self._place:
            raise ResidencyError(
                f"store redirects from {_said(self._place)} to {_said(place)}",
                _TIER,
                self._where,
                _ELSEWHERE,
            )


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean a broken or silent connection."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    return (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.IncompleteReadError,
        HTTPError,
        OSError,
    )


def too_short(where: str) -> CorruptError:
    """Return the error for an object that ends too early."""
    return CorruptError("object ends before what was asked of it", _TIER, where)


def crc_header(crc: int) -> str:
    """Return a CRC32C as S3 writes it."""
    return base64.b64encode(struct.pack(">I", crc)).decode()


def crc_value(header: str) -> int:
    """Return the CRC32C that S3 wrote."""
    value: int = struct.unpack(">I", base64.b64decode(header))[0]
    return value


def _denied(status: int, text: str, where: str) -> InvalidError:
    if status in (401, 403):
        hint = (
            "Check the key, the secret and the bucket policy for GetObject, PutObject, ListBucket."
        )
        return InvalidError(f"access denied: {text}", _TIER, where, hint)
    return InvalidError(text, _TIER, where, "Check the URL and the s3 options.")


def _code(exc: Exception) -> str:
    response = getattr(exc, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else ""


def _signing_region(headers: Any) -> str:
    """Return the region in a signature's scope, empty for a request that is not signed."""
    value = headers.get("Authorization", b"")
    text = value.decode() if isinstance(value, bytes) else value
    scope = text.partition("Credential=")[2].partition(",")[0].split("/")
    return scope[-3] if len(scope) >= 5 else ""  # noqa: PLR2004 - key/date/region/service/aws4_request


def _said(place: tuple[str, str, str]) -> str:
    scheme, host, region = place
    return f"{scheme}://{host}" + (f" in region {region}" if region else "")


def _stopped_within(stop: threading.Event | None, pause_s: float) -> bool:
    if stop is not None:
        return stop.wait(pause_s)
    time.sleep(pause_s)
    return False


_alive: weakref.WeakSet[S3Requests] = weakref.WeakSet()


def _after_fork() -> None:
    for requests in list(_alive):
        requests.forget()


os.register_at_fork(after_in_child=_after_fork)
