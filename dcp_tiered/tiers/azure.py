"""Azure Blob Storage, through the plain client of Microsoft's library in threads.

adlfs is what users configure, so options are read as adlfs reads them. The bytes do not go through
it: it makes containers, and tells a container that is not there as a blob that is not there. The
store computes no checksum of a blob that was sent in blocks, so what is uploaded is read back.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format.residency import Fact, Observed, Verdict
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.tiers.azure_management import Management, token_credential
from dcp_tiered.tiers.azure_residency import AzureLook
from dcp_tiered.tiers.host_pins import HostPin, azure_account, refuse_anonymous
from dcp_tiered.tiers.http_errors import RefusedError, need_library, scrubbed, translate_refusal
from dcp_tiered.tiers.object_client import Body, Page
from dcp_tiered.tiers.s3_errors import TIER

_READ_BYTES = 8 << 20
"""Of one request: the client holds a reply whole."""
_KEYS = ("credential", "account_key", "sas_token")
_EXISTS = ("BlobAlreadyExists", "ConditionNotMet")
_ABSENT = ("BlobNotFound",)
_GONE = ("InvalidBlockList", "InvalidBlockId")
_DENIED_HINT = (
    "Check the account, its key or token, and that it may create, read and list blobs in the"
    " container."
)
_DELETE_HINT = (
    "Allow who removes checkpoints to delete blobs in the container, and look for an immutability"
    " policy; then run the same command again."
)
_NO_CREDENTIALS = (
    "Pass az={'account_key': ...} or set AZURE_STORAGE_ACCOUNT_KEY, or log in with 'az login'."
)


@dataclass(kw_only=True)
class _Upload:
    """Blocks on their way: nobody sees them before they are listed in a commit."""

    key: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """Two uploads of one blob share its blocks; with this they do not take each other's."""
    starts: list[int] = field(default_factory=list)

    def block(self, start: int) -> str:
        """Return the id of a block; all of a blob have to be of one length."""
        return f"{self.nonce}-{start:016x}"


class AzurePlace:
    """A container of Azure Blob Storage.

    Args:
        container: Its name; it is never created.
        options: As for adlfs: account_name, account_key, connection_string, sas_token, credential,
            client_id, client_secret, tenant_id, anon, account_host.
        request_timeout_s: Longest silence of the store within one request.
        pin: Where all of them go; None where no policy says that.

    Raises:
        InvalidError: The library is not installed, no account is named, or an option is one that
            adlfs obeys and this would not, or that leads around the pin.
    """

    chunk_bytes = 1
    keeps_writers_apart = True

    def __init__(
        self,
        container: str,
        options: Mapping[str, Any],
        request_timeout_s: float,
        pin: HostPin | None = None,
    ) -> None:
        self.container = container
        self._pin = pin
        self.url = f"az://{container}"
        self._options = dict(options)
        self._timeout_s = request_timeout_s
        need_library("azure.storage.blob", "azure", self.url)
        if options.get("location_mode", "primary") != "primary":
            raise InvalidError(
                "az option location_mode is not supported", TIER, self.url, "Leave it out."
            )
        if not options.get("account_name") and not options.get("connection_string"):
            raise InvalidError(
                "no Azure storage account is named",
                TIER,
                self.url,
                "Pass az={'account_name': ...}, or set AZURE_STORAGE_ACCOUNT_NAME.",
            )
        if pin is not None:
            given = any(options.get(name) for name in (*_KEYS, "connection_string"))
            refuse_anonymous(options.get("anon") and not given, self.url)

    def connect(self) -> "AzureClient":
        """Return a client of this process."""
        from azure.storage.blob import ContainerClient

        settings: dict[str, Any] = {
            "container_name": self.container,
            "connection_timeout": min(5.0, self._timeout_s),
            "read_timeout": self._timeout_s,
            # One retry layer, ours; and bytes never go where a reply points to.
            "retry_total": 0,
            "permit_redirects": False,
            "raw_request_hook": self._check,
        }
        text = self._options.get("connection_string")
        account, endpoint = azure_account(self._options)
        if text:
            container = ContainerClient.from_connection_string(text, **settings)
        else:
            container = ContainerClient(endpoint, credential=self._credential(), **settings)
        if self._pin is None:
            return AzureClient(container)
        asker = Management(self._options, self._timeout_s)
        return AzureClient(container, asker, AzureLook(asker, account, self.container, self._pin))

    def _check(self, request: Any) -> None:
        """Pass for a request that goes where the pin says; called for each, with its last host."""
        if self._pin is not None:
            self._pin.check(request.http_request.url, self.url)

    def _credential(self) -> Any:
        """Return the credential that the options mean; none only where that was asked for."""
        options = self._options
        for name in _KEYS:
            if options.get(name):
                return options[name]
        if options.get("anon"):
            return None
        return token_credential(options, (min(5.0, self._timeout_s), self._timeout_s))

    def refusal(self, exc: Exception) -> RefusedError | None:
        """Return the reply behind an exception; see `Place.refusal`."""
        from azure.core.exceptions import HttpResponseError

        if isinstance(exc, RefusedError):
            return exc
        if not isinstance(exc, HttpResponseError) or exc.status_code is None:
            return None
        code = getattr(exc, "error_code", None) or ""
        headers = getattr(exc.response, "headers", None) or {}
        request = str(headers.get("x-ms-request-id", ""))
        return RefusedError(exc.status_code, str(getattr(code, "value", code)), request)

    def translate(self, exc: Exception, doing: str, where: str) -> tuple[TieredError, bool]:
        """Return our error for what a client raised; see `Place.translate`."""
        from azure.core import exceptions

        refused = self.refusal(exc)
        if refused is not None:
            return _translate_refusal(refused, doing, where)
        text = f"{doing} failed: {type(exc).__name__}: {scrubbed(exc)}"
        if isinstance(exc, exceptions.ClientAuthenticationError):
            return InvalidError(text, TIER, where, _NO_CREDENTIALS), False
        if isinstance(exc, (exceptions.AzureError, OSError)):
            hint = "Check that the store is up and can be reached from this node."
            return UnavailableError(text, TIER, where, hint), True
        return InvalidError(text, TIER, where, "Check the az options."), False


def _translate_refusal(refused: RefusedError, doing: str, where: str) -> tuple[TieredError, bool]:
    text = refused.text(doing)
    if refused.code in _EXISTS:
        return AlreadyExistsError(f"blob is there already: {text}", TIER, where), False
    if refused.code in _ABSENT:
        return AbsentError(f"no such blob: {text}", TIER, where), False
    if refused.code in _GONE:
        hint = "Another upload of the same blob was quicker, or the store dropped the blocks."
        return UnavailableError(text, TIER, where, hint), False
    if refused.code == "ContainerNotFound":
        hint = "Create the container or correct the URL; it is never created here."
        return InvalidError(f"no such container: {text}", TIER, where, hint), False
    hint = _DELETE_HINT if doing.startswith("delete") else _DENIED_HINT
    return translate_refusal(refused, doing, where, hint)


class AzureClient:
    """See `Client`.

    Args:
        container: Microsoft's client of one container.
        management: Whom `look` asks; both None without a pin.
        look: At its account.
    """

    def __init__(
        self,
        container: Any,
        management: Management | None = None,
        look: AzureLook | None = None,
    ) -> None:
        self._container = container
        self._management, self._look = management, look

    def create(self, key: str, data: bytes, crc: int) -> ObjectInfo:
        """Create a small blob; see `Client.create`."""
        del crc
        self._container.get_blob_client(key).upload_blob(
            data, length=len(data), overwrite=False, max_concurrency=1
        )
        return ObjectInfo(key=key, length=len(data))

    def begin(self, key: str, length: int, crc: int) -> _Upload:
        """Begin to stage blocks, which takes no request; see `Client.begin`.

        The store drops what is not committed after a week.
        """
        del length, crc
        return _Upload(key=key)

    def send(self, upload: _Upload, start: int, body: Body) -> int:
        """Stage a block; see `Client.send`."""
        blob = self._container.get_blob_client(upload.key)
        blob.stage_block(upload.block(start), body, length=len(body))
        upload.starts.append(start)
        return start + len(body)

    def finish(self, upload: _Upload) -> None:
        """Commit the blocks; see `Client.finish`. The reply does not say what the blob is."""
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        self._container.get_blob_client(upload.key).commit_block_list(
            [BlobBlock(block_id=upload.block(start)) for start in upload.starts],
            match_condition=MatchConditions.IfMissing,
        )

    def abandon(self, upload: _Upload) -> None:
        """Do nothing: there is no such request, and a commit of others drops the blocks."""

    def look(self, key: str) -> ObjectInfo:
        """Return the length; see `Client.look`."""
        found = self._container.get_blob_client(key).get_blob_properties()
        if _is_folder(found.metadata):
            raise RefusedError(404, _ABSENT[0])
        return ObjectInfo(key=key, length=int(found.size))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer from the front; see `Client.read_into`."""
        length = min(_READ_BYTES, len(buffer))
        blob = self._container.get_blob_client(key)
        data = blob.download_blob(offset=start, length=length, max_concurrency=1).readall()
        buffer[: len(data)] = data
        return len(data)

    def remove(self, key: str) -> None:
        """Remove a blob; see `Client.remove`. One with snapshots is somebody's, and stays."""
        self._container.get_blob_client(key).delete_blob()

    def page(self, prefix: str, delimiter: str, following: str | None) -> Page:
        """Return one page of names; see `Client.page`."""
        if delimiter:
            listing = self._container.walk_blobs(prefix, delimiter=delimiter)
        else:
            listing = self._container.list_blobs(prefix, include=["metadata"])
        pages = listing.by_page(following)
        found = list(next(pages, ()))
        return Page(
            keys=[one.name for one in found if _is_blob(one)],
            directories=[one.name for one in found if one.name.endswith("/")],
            following=pages.continuation_token or None,
        )

    def observe(self) -> Observed:
        """Look at the account; see `Client.observe`."""
        assert self._look is not None
        return self._look.all()

    def observe_place(self) -> Observed:
        """Look where the account is; see `Client.observe_place`."""
        assert self._look is not None
        return self._look.place()

    def look_public(self) -> Fact:
        """Look whether the container was opened to everybody; see `Client.look_public`."""
        try:
            level = self._container.get_container_properties().public_access
        except Exception as exc:  # noqa: BLE001 - a SAS for blobs alone may not ask
            said = f"{type(exc).__name__}: {scrubbed(exc)[:200]}"
            return Fact(name="not_public", verdict=Verdict.UNKNOWN, evidence=said)
        if level is None:
            said, verdict = "the container is open to nobody without a key", Verdict.ALLOW
        else:
            said, verdict = f"the container is open to everybody: {level}", Verdict.DENY
        return Fact(name="not_public", verdict=verdict, evidence=said)

    def close(self) -> None:
        """Give connections back."""
        self._container.close()
        if self._management is not None:
            self._management.close()


def _is_blob(found: Any) -> bool:
    return not found.name.endswith("/") and not _is_folder(found.metadata)


def _is_folder(metadata: Mapping[str, str] | None) -> bool:
    """Tell whether a blob stands for a directory, as they do in accounts with a hierarchy."""
    return (metadata or {}).get("hdi_isfolder") == "true"
