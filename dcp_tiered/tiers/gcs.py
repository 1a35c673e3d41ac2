"""Google Cloud Storage: its JSON API, through plain HTTP requests in threads.

gcsfs is what users configure, so options are read as gcsfs reads them. The bytes do not go through
it: it holds whole parts in memory, tries a request again on its own, and tells a bucket that is not
there as an object that is not there.
"""

import binascii
import json
import secrets
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format.residency import Fact, Observed
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.tiers.gcs_credentials import Signer, TokenError, credentials
from dcp_tiered.tiers.gcs_residency import GoogleLook
from dcp_tiered.tiers.host_pins import HostPin, refuse_anonymous
from dcp_tiered.tiers.http_asking import OVERLOADED, ask
from dcp_tiered.tiers.http_errors import RefusedError, need_library, scrubbed, translate_refusal
from dcp_tiered.tiers.object_client import Body, Page
from dcp_tiered.tiers.s3_asking import Answer
from dcp_tiered.tiers.s3_body import filling
from dcp_tiered.tiers.s3_errors import TIER
from dcp_tiered.tiers.s3_requests import crc_header, crc_value

ENDPOINT = "https://storage.googleapis.com"
_OBJECT_FIELDS = "name,size,crc32c"
_NO_SUCH_UPLOAD = "no such upload"
_NO_GOOGLE = (
    "Set GOOGLE_APPLICATION_CREDENTIALS, run 'gcloud auth application-default login', or pass"
    " gs={'token': ...}."
)
_DENIED_HINT = "Check the credentials and that they may create, get and list objects in the bucket."

_DELETE_HINT = (
    "Allow storage.objects.delete in the bucket to who removes checkpoints, and look for a"
    " retention policy; then run the same command again."
)


@dataclass(kw_only=True)
class _Upload:
    """A resumable upload."""

    key: str
    url: str = field(repr=False)
    """Who has it may write: it is as good as a password."""
    length: int
    made: ObjectInfo | None = None
    """The object, once the last part is there."""


class GcsPlace:
    """A bucket of Google Cloud Storage.

    Args:
        bucket: Its name; it is never created.
        options: As for gcsfs: token, endpoint_url.
        request_timeout_s: Longest silence of the store within one request.
        connections_max: Requests on their way at once.
        pin: Where all of them go; None where no policy says that.

    Raises:
        InvalidError: The library is not installed, or an option is one that gcsfs obeys and this
            would not, or that leads around the pin.
    """

    chunk_bytes = 256 << 10
    keeps_writers_apart = True

    def __init__(
        self,
        bucket: str,
        options: Mapping[str, Any],
        request_timeout_s: float,
        connections_max: int,
        pin: HostPin | None = None,
    ) -> None:
        self.bucket = bucket
        self._pin = pin
        self.url = f"gs://{bucket}"
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        self._connections_max = connections_max
        need_library("google.auth.transport.requests", "gcs", self.url)
        if options.get("requester_pays"):
            raise InvalidError(
                "gs option requester_pays is not supported", TIER, self.url, "Leave it out."
            )
        if pin is not None:
            refuse_anonymous(options.get("token") == "anon", self.url)

    def connect(self) -> "GcsClient":
        """Return a client of this process; looks for credentials."""
        import requests
        from requests.adapters import HTTPAdapter

        session = requests.Session()
        # One retry layer, ours.
        adapter = HTTPAdapter(pool_maxsize=self._connections_max, max_retries=0)
        for scheme in ("http://", "https://"):
            session.mount(scheme, adapter)
        try:
            # With an `auth` of its own, the session does not look into ~/.netrc.
            session.auth = Signer(credentials(self._options.get("token")))
        except BaseException:
            session.close()
            raise
        given = ENDPOINT if self._pin is None else self._pin.endpoint
        endpoint = str(self._options.get("endpoint_url") or given).rstrip("/")
        timeout = (min(5.0, self._timeout_s), self._timeout_s)
        return GcsClient(session, endpoint, self.bucket, timeout, self._pin)

    def refusal(self, exc: Exception) -> RefusedError | None:
        """Return the reply behind an exception; see `Place.refusal`."""
        return exc if isinstance(exc, RefusedError) else None

    def translate(self, exc: Exception, doing: str, where: str) -> tuple[TieredError, bool]:
        """Return our error for what a client raised; see `Place.translate`."""
        from google.auth import exceptions as auth

        if isinstance(exc, RefusedError):
            return _translate_refusal(exc, doing, where)
        text = f"{doing} failed: {type(exc).__name__}: {scrubbed(exc)}"
        if isinstance(exc, (auth.TransportError, auth.RefreshError)):
            hint = "The credentials could not be renewed; they are tried again."
            return UnavailableError(text, TIER, where, hint), True
        if isinstance(exc, (auth.GoogleAuthError, TokenError)):
            return InvalidError(text, TIER, where, _NO_GOOGLE), False
        if isinstance(exc, _transport_errors()):
            hint = "Check that the store is up and can be reached from this node."
            return UnavailableError(text, TIER, where, hint), True
        return InvalidError(text, TIER, where, "Check the gs options."), False


def _translate_refusal(exc: RefusedError, doing: str, where: str) -> tuple[TieredError, bool]:
    text = exc.text(doing)
    if exc.status == 412:  # noqa: PLR2004 - HTTP
        return AlreadyExistsError(f"object is there already: {text}", TIER, where), False
    if exc.code == _NO_SUCH_UPLOAD:
        hint = "The store has dropped the upload; the next try starts a new one."
        return UnavailableError(text, TIER, where, hint), False
    if exc.status == 404:  # noqa: PLR2004 - HTTP
        # In reply to a read it may be anybody's, and `ObjectStoreTier.read_into` looks again.
        if doing.startswith("read") or (exc.code and doing.startswith(("look", "delete"))):
            return AbsentError(f"no such object: {text}", TIER, where), False
        hint = "Create the bucket or correct the URL; it is never created here."
        return InvalidError(f"no such bucket: {text}", TIER, where, hint), False
    if exc.code in OVERLOADED:
        return translate_refusal(RefusedError(429, exc.code, exc.request), doing, where, "")
    hint = _DELETE_HINT if doing.startswith("delete") else _DENIED_HINT
    return translate_refusal(exc, doing, where, hint)


class GcsClient:
    """See `Client`.

    Args:
        session: Signs what it sends.
        endpoint: Scheme and host.
        bucket: Its name.
        timeout: Seconds to connect, and of silence.
        pin: See `GcsPlace`.
    """

    def __init__(
        self,
        session: Any,
        endpoint: str,
        bucket: str,
        timeout: tuple[float, float],
        pin: HostPin | None = None,
    ) -> None:
        self._session = session
        self._timeout = timeout
        self._name, self._pin = bucket, pin
        self._bucket = f"{endpoint}/storage/v1/b/{quote(bucket, safe='')}"
        self._objects = f"{self._bucket}/o"
        self._uploads = f"{endpoint}/upload/storage/v1/b/{quote(bucket, safe='')}/o"

    def create(self, key: str, data: bytes, crc: int) -> ObjectInfo:
        """Create a small object; see `Client.create`. The store checks its checksum."""
        border = secrets.token_hex(16)
        said = json.dumps({"name": key, "crc32c": crc_header(crc)})
        body = (
            f"--{border}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{said}\r\n"
            f"--{border}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        with self._send(
            "POST",
            self._uploads,
            {"uploadType": "multipart", "ifGenerationMatch": "0", "fields": _OBJECT_FIELDS},
            data=body + data + f"\r\n--{border}--\r\n".encode(),
            headers={"Content-Type": f"multipart/related; boundary={border}"},
        ) as reply:
            return _info(key, _json(reply))

    def begin(self, key: str, length: int, crc: int) -> _Upload:
        """Begin a resumable upload; see `Client.begin`. The store checks the checksum at its end.

        It drops what is not ended after a week.
        """
        with self._send(
            "POST",
            self._uploads,
            {"uploadType": "resumable", "ifGenerationMatch": "0", "fields": _OBJECT_FIELDS},
            json={"name": key, "crc32c": crc_header(crc)},
            headers={
                "X-Upload-Content-Type": "application/octet-stream",
                "X-Upload-Content-Length": str(length),
            },
        ) as reply:
            return _Upload(key=key, url=reply.headers["Location"], length=length)

    def send(self, upload: _Upload, start: int, body: Body) -> int:
        """Send a part; see `Client.send`. What the store has already of it, it does not mind."""
        span = f"bytes {start}-{start + len(body) - 1}/{upload.length}"
        with self._send_part(upload, span, body) as reply:
            if reply.status_code != 308:  # noqa: PLR2004 - Resume Incomplete
                upload.made = _info(upload.key, _json(reply))
                return upload.length
            # No header: the store has kept nothing of it.
            return int(reply.headers.get("Range", "bytes=0--1").partition("-")[2]) + 1

    def finish(self, upload: _Upload) -> ObjectInfo:
        """Return the object, which the last part made; see `Client.finish`."""
        if upload.made is None:
            with self._send_part(upload, f"bytes */{upload.length}", b"") as reply:
                upload.made = _info(upload.key, _json(reply))
        return upload.made

    def abandon(self, upload: _Upload) -> None:
        """Cancel an upload; see `Client.abandon`."""
        if upload.made is None:
            with closing(self._request("DELETE", upload.url)):
                pass  # 499 is its success

    def look(self, key: str) -> ObjectInfo:
        """Return length and checksum; see `Client.look`."""
        url = f"{self._objects}/{quote(key, safe='')}"
        with self._send("GET", url, {"fields": _OBJECT_FIELDS}) as reply:
            return _info(key, _json(reply))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer from the front; see `Client.read_into`."""
        url = f"{self._objects}/{quote(key, safe='')}"
        span = f"bytes={start}-{start + len(buffer) - 1}"
        headers = {"Range": span, "Accept-Encoding": "identity"}
        with self._send("GET", url, {"alt": "media"}, headers=headers, stream=True) as reply:
            if not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise RefusedError(reply.status_code, "store ignored the range")
            done = 0
            try:
                for count in filling(reply.raw, buffer):
                    done += count
            except _transport_errors():
                if not done:
                    raise
            return done

    def remove(self, key: str) -> None:
        """Remove an object; see `Client.remove`."""
        with self._send("DELETE", f"{self._objects}/{quote(key, safe='')}", {}):
            pass  # its reply is empty

    def page(self, prefix: str, delimiter: str, following: str | None) -> Page:
        """Return one page of keys; see `Client.page`."""
        parameters = {"prefix": prefix, "fields": "items(name),prefixes,nextPageToken"}
        if delimiter:
            parameters["delimiter"] = delimiter
        if following is not None:
            parameters["pageToken"] = following
        with self._send("GET", self._objects, parameters) as reply:
            said = _json(reply)
        return Page(
            keys=[str(item["name"]) for item in said.get("items") or ()],
            directories=[str(name) for name in said.get("prefixes") or ()],
            following=said.get("nextPageToken") or None,
        )

    def observe(self) -> Observed:
        """Look at the bucket; see `Client.observe`."""
        assert self._pin is not None
        return GoogleLook(self._ask, self._name).all(self._pin)

    def observe_place(self) -> Observed:
        """Look where the bucket is; see `Client.observe_place`."""
        assert self._pin is not None
        return GoogleLook(self._ask, self._name).place(self._pin)

    def look_public(self) -> Fact:
        """Look for signs that the bucket is public; see `Client.look_public`."""
        return GoogleLook(self._ask, self._name).public()

    def close(self) -> None:
        """Give connections back."""
        self._session.close()

    def _ask(self, path: str, call: str, permission: str) -> Answer:
        send = partial(self._request, "GET", self._bucket + path, stream=True)
        return ask(send, f"{call}({self._name})", permission)

    def _send(self, method: str, url: str, parameters: dict[str, str], **more: Any) -> Any:
        """Send a request; return the reply to close, a success.

        Raises:
            RefusedError: It is none.
        """
        return _succeeded(self._request(method, url, params=parameters, **more))

    def _send_part(self, upload: _Upload, span: str, body: Body | bytes) -> Any:
        reply = self._request("PUT", upload.url, data=body, headers={"Content-Range": span})
        if reply.status_code in (404, 410):
            with reply:
                raise RefusedError(reply.status_code, _NO_SUCH_UPLOAD, _request_of(reply))
        return reply if reply.status_code == 308 else _succeeded(reply)  # noqa: PLR2004

    def _request(self, method: str, url: str, **more: Any) -> Any:
        if self._pin is not None:  # an upload goes where a reply of the store says
            self._pin.check(url, f"gs://{self._name}")
        return self._session.request(
            method, url, timeout=self._timeout, allow_redirects=False, **more
        )


def _succeeded(reply: Any) -> Any:
    if 200 <= reply.status_code < 300:  # noqa: PLR2004 - HTTP
        return reply
    with reply:
        raise RefusedError(reply.status_code, _reason(reply), _request_of(reply))


def _reason(reply: Any) -> str:
    """Return what the store says is wrong; empty where it is not the store that answers."""
    try:
        error = json.loads(reply.content)["error"]
        return str(error["errors"][0]["reason"] or error["code"])
    except (ValueError, KeyError, TypeError, IndexError):
        return ""


def _request_of(reply: Any) -> str:
    return str(reply.headers.get("X-GUploader-UploadID", ""))


def _json(reply: Any) -> dict[str, Any]:
    """Return a reply.

    Raises:
        OSError: It was cut off, or is not the store's.
    """
    try:
        said = json.loads(reply.content)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise OSError("reply is not JSON")  # as a broken connection: tried again
    return said


def _info(key: str, said: Mapping[str, Any]) -> ObjectInfo:
    try:
        crc = said.get("crc32c")
        return ObjectInfo(
            key=key,
            length=int(said["size"]),
            crc32c=None if crc is None else crc_value(crc),
        )
    except (KeyError, ValueError, TypeError, binascii.Error, struct.error):
        raise OSError("reply tells no length or a broken checksum") from None


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean a broken or silent connection."""
    from urllib3.exceptions import HTTPError

    return (HTTPError, OSError)  # those of requests are OSErrors
