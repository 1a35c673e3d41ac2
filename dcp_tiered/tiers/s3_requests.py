"""One request to S3: a client per process, one retry layer with one deadline, errors of our tree.

s3fs is what users know, so options are read as s3fs reads them.
"""

import base64
import logging
import math
import os
import random
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered import metrics
from dcp_tiered.errors import InvalidError, TieredError
from dcp_tiered.metrics import Sample
from dcp_tiered.tiers.s3_body import send_in_blocks
from dcp_tiered.tiers.s3_errors import (
    TIER,
    ChecksumRefusedError,
    is_expired,
    is_overloaded,
    lacks_credentials,
    refuses_checksums,
    translate,
)
from dcp_tiered.tiers.s3_gate import Gate
from dcp_tiered.tiers.s3_parameters import Parameters, check_names, shared_loader
from dcp_tiered.tiers.s3_pins import Anchor, Pin, PinOnly, is_loopback

_log = logging.getLogger(__name__)

_PAUSE_S_MAX = 8.0
_CREDENTIALS_S = 10.0
"""How long to look for credentials: an instance's own service may be silent for a while, but who
has forgotten to give any wants to know soon."""
_CLIENT_OPTIONS = ("endpoint_url", "region_name", "use_ssl", "verify")
_CREDENTIALS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
_NOT_TAKEN = {
    "session": "Pass key, secret and token, or profile.",
    "username": "Pass it as key.",
    "password": "Pass it as secret.",
}
"""Options by which s3fs is told whose credentials to use; ignoring them would use others."""


class S3Requests:
    """Sends requests about one bucket.

    Args:
        bucket: The bucket; it is never created.
        options: As for s3fs: key, secret, token, profile, endpoint_url, anon, client_kwargs,
            config_kwargs, s3_additional_kwargs, requester_pays.
        request_timeout_s: Longest silence of the store within one request.
        request_retry_s: How long one request is tried again before its error is raised.
        connections_max: Requests on their way at once.
        pin: Where requests may go at all; None without a residency policy.

    Raises:
        InvalidError: An option is one that s3fs obeys and this would not, leads around the pin, or
            is wrong; see `Parameters`.
    """

    def __init__(
        self,
        bucket: str,
        options: Mapping[str, Any],
        *,
        request_timeout_s: float,
        request_retry_s: float,
        connections_max: int,
        pin: Pin | None = None,
    ) -> None:
        self.bucket = bucket
        self.pin = pin
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        self._retry_s = request_retry_s
        self._connections_max = connections_max
        self._client: Any = None
        self._lock = threading.Lock()
        self._gate = Gate(connections_max)
        self._counts: Counter[tuple[str, str]] = Counter()
        _alive.add(self)
        self._unconfirmed: TieredError | None = None
        self._is_encrypted = False
        """Whether the store has shown that it encrypts as asked."""
        for name, hint in _NOT_TAKEN.items():
            if options.get(name):
                what = f"s3 option {name} is not supported"
                raise InvalidError(what, TIER, f"s3://{bucket}", hint)
        check_names(bucket, options)
        self.parameters = Parameters(bucket, options)
        if pin is not None:
            pin.check_options(bucket, options)
            self.parameters.check_owner(pin.owner)

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections and locks behind: a client does not survive another process."""
        mine = dict.fromkeys(("_client", "_lock", "_gate", "_counts"))
        return {**self.__dict__, **mine}

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
                waited = time.monotonic()
                with self._gate.slot() as sent_in:
                    # A turn at the gate is no silence of the store.
                    deadline = min(deadline + time.monotonic() - waited, until)
                    return self._send(client, operation, arguments, use, sent_in)
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
                    self._count(operation, "failed")
                    raise error from exc
                self._count(operation, "retried")
                _log.info("retrying: %s", error.message)
                if _stopped_within(stop, pause):
                    raise error from exc

    def _send(
        self,
        client: Any,
        operation: str,
        arguments: Mapping[str, Any],
        use: Callable[[Any], Any] | None,
        sent_in: int,
    ) -> Any:
        """Send one request once, and tell the gate how that went."""
        arguments = {**self.parameters.of(operation), **arguments}
        owner = self.pin.owner if self.pin is not None else None
        if owner is not None:
            arguments["ExpectedBucketOwner"] = owner
        if self._unconfirmed is not None and "Body" in arguments:
            raise InvalidError(*self._unconfirmed.args)
        try:
            reply = getattr(client, operation)(Bucket=self.bucket, **arguments)
            self._check_confirmed(operation, reply)
            result = reply if use is None else use(reply)
        except Exception as exc:
            if is_overloaded(exc) and self._gate.slow_down(sent_in):
                _log.info("store is overloaded, %d requests at once now", self._gate.allowed)
            raise
        self._gate.went_well()
        self._count(operation, "ok")
        return result

    def prove_encryption(self, key: str) -> None:
        """See that an object that was sent in parts is encrypted as asked, unless others have been.

        Args:
            key: The object's key in the bucket.

        Raises:
            InvalidError: The store does not say so; it gets nothing more.
        """
        if self._is_encrypted or not self.parameters.encrypts():
            return
        self._note_encryption(self.parameters.unencrypted(self.call("head_object", key)))
        self._is_encrypted = True

    def _check_confirmed(self, operation: str, reply: Mapping[str, Any]) -> None:
        self._note_encryption(self.parameters.unconfirmed(operation, reply))
        self._is_encrypted |= operation == "put_object"

    def _note_encryption(self, error: TieredError | None) -> None:
        if error is not None:
            self._unconfirmed = error
            raise error

    def _count(self, operation: str, outcome: str) -> None:
        with self._lock:
            self._counts[operation, outcome] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of this process."""
        with self._lock:
            counts = sorted(self._counts.items())
        for (operation, outcome), count in counts:
            yield metrics.REQUESTS, {"operation": operation, "outcome": outcome}, count
        yield metrics.REQUESTS_MAX, {}, self._gate.allowed

    def region(self) -> str:
        """Return the region that requests are signed for, without sending one.

        Raises:
            InvalidError: A profile or an option is wrong.
        """
        try:
            # botocore's name for what it signs for us-east-1, where no region is configured.
            region = self._connect().meta.region_name
            return "us-east-1" if region in (None, "aws-global") else str(region)
        except TieredError:
            raise
        except Exception as exc:
            where = f"s3://{self.bucket}"
            raise translate(exc, "looking for the region", where, self._endpoint())[0] from exc

    def close(self) -> None:
        """Give connections back; the client is kept, which costs much more to make."""
        with self._lock:
            client = self._client
        if client is not None:
            client.close()

    def forget(self) -> None:
        """Start anew in a forked child: the parent's sockets are not ours, nor is its lock.

        Another thread may have held the lock at the fork, and in the child nobody would release it.
        """
        self._client = None
        self._lock = threading.Lock()
        self._gate = Gate(self._connections_max)
        self._counts = Counter()
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
        made = self._bare_client("s3")
        url = urlsplit(made.meta.endpoint_url)
        if (
            self.parameters.needs_tls()
            and url.scheme != "https"
            and not is_loopback(url.hostname or "")
        ):
            made.close()
            raise InvalidError(
                f"the key SSECustomerKey would go to {url.netloc} unencrypted",
                TIER,
                f"s3://{self.bucket}",
                "Use an endpoint with https.",
            )
        made.meta.events.register_first("before-send.s3", Anchor(f"s3://{self.bucket}", self.pin))
        made.meta.events.register_last("before-send.s3", send_in_blocks)
        return made

    def asking_client(self, service: str) -> Any:
        """Return a client for questions about this and other buckets, which never leave the pin.

        Args:
            service: `s3`, or `s3control` for questions about the account.
        """
        made = self._bare_client(service)
        where = f"s3://{self.bucket}"
        anchor = Anchor(where) if self.pin is None else PinOnly(where, self.pin.for_questions())
        made.meta.events.register_first("before-send", anchor)
        return made

    def anonymous_client(self) -> Any:
        """Return a client for questions that anybody could ask; not for use with a pin."""
        from botocore import UNSIGNED

        assert self.pin is None
        made = self._bare_client("s3", signature_version=UNSIGNED)
        made.meta.events.register_first("before-send", Anchor(f"s3://{self.bucket}"))
        return made

    def _bare_client(self, service: str, **config: Any) -> Any:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        options = self._options
        client = dict(options.get("client_kwargs") or {})
        client |= {k: options[k] for k in _CLIENT_OPTIONS if options.get(k) is not None}
        client |= {k: options[name] for name, k in _CREDENTIALS.items() if options.get(name)}
        # A session of its own: it looks credentials up afresh, and sessions are not thread-safe.
        session = botocore.session.Session(profile=options.get("profile"))
        session.register_component("data_loader", shared_loader())
        given = dict(options.get("config_kwargs") or {})
        s3 = {"payload_signing_enabled": False, **given.pop("s3", {})}
        pinned = self.pin.client_options() if self.pin is not None else {}
        if client.get("endpoint_url"):
            s3.setdefault("addressing_style", "path")
        settings = {
            "connect_timeout": min(5.0, self._timeout_s),
            "read_timeout": self._timeout_s,
            "max_pool_connections": self._connections_max,
            "tcp_keepalive": True,
            # Many compatible stores refuse the trailing checksums that newer SDKs send by default.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **({"signature_version": UNSIGNED} if options.get("anon") else {}),
            **given,
            **pinned,
            **config,
            "s3": s3 | pinned.get("s3", {}),
            # One retry layer, ours: botocore's would multiply with it.
            "retries": {"total_max_attempts": 1},
        }
        return session.create_client(
            service,
            config=Config(**settings),
            **client,
        )

    def _endpoint(self) -> str:
        client = self._client
        return "Amazon S3" if client is None else str(urlsplit(client.meta.endpoint_url).netloc)


def crc_header(crc: int) -> str:
    """Return a CRC32C as S3 writes it."""
    return base64.b64encode(struct.pack(">I", crc)).decode()


def crc_value(header: str) -> int:
    """Return the CRC32C that S3 wrote."""
    value: int = struct.unpack(">I", base64.b64decode(header))[0]
    return value


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
