"""One request to S3: a client per process, one retry layer with one deadline, errors of our tree.

s3fs is what users know, so options are read as s3fs reads them.
"""

import base64
import functools
import logging
import math
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.errors import InvalidError, ResidencyError, TieredError
from dcp_tiered.tiers.s3_body import send_in_blocks
from dcp_tiered.tiers.s3_errors import (
    ELSEWHERE,
    TIER,
    ChecksumRefusedError,
    is_expired,
    lacks_credentials,
    refuses_checksums,
    translate,
)

_log = logging.getLogger(__name__)

_PAUSE_S_MAX = 8.0
_CREDENTIALS_S = 10.0
"""How long to look for credentials: an instance's own service may be silent for a while, but who
has forgotten to give any wants to know soon."""
_CLIENT_OPTIONS = ("endpoint_url", "region_name", "use_ssl", "verify")
_NOT_PASSED_ON = ("requester_pays", "s3_additional_kwargs")
"""Options of s3fs that change what a request means; ignoring them could store in the clear."""


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
                f"s3 option {ignored[0]} is not supported", TIER, f"s3://{bucket}", "Leave it out."
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
        until: float = math.inf,
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
            until: When to try no more at the latest, by the monotonic clock.
            **arguments: botocore's arguments.
        """
        where = f"s3://{self.bucket}/{key or ''}"
        doing = operation
        if "PartNumber" in arguments:
            doing += f" of part {arguments['PartNumber']}"
        if key is not None:
            arguments["Key"] = key
        begun = time.monotonic()
        deadline = min(begun + (self._retry_s if retry_s is None else retry_s), until)
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
                said = f"{doing} on try {attempt}"
                error, retryable = translate(exc, said, where, self._endpoint())
                if refuses_checksums(exc, arguments):
                    error = ChecksumRefusedError(error.message, error.tier, error.key, error.hint)
                if lacks_credentials(exc):
                    deadline = min(deadline, begun + _CREDENTIALS_S)
                if is_expired(exc) or lacks_credentials(exc):
                    # A new client looks credentials up afresh.
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
        session.register_component("data_loader", _shared_loader())
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
        made.meta.events.register_last("before-send.s3", send_in_blocks)
        return made

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
                TIER,
                self._where,
                ELSEWHERE,
            )


def crc_header(crc: int) -> str:
    """Return a CRC32C as S3 writes it."""
    return base64.b64encode(struct.pack(">I", crc)).decode()


def crc_value(header: str) -> int:
    """Return the CRC32C that S3 wrote."""
    value: int = struct.unpack(">I", base64.b64decode(header))[0]
    return value


@functools.cache
def _shared_loader() -> Any:
    """Return botocore's reader of its own data files.

    Reading them takes nearly all of the time that a new client takes. Sessions only look at what it
    has read, as the clients of one session do, so all of a process may share it.
    """
    import botocore.loaders

    return botocore.loaders.create_loader()


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
