"""What a failed request to S3 means: an error of our tree, and whether another try may help.

The one place that knows codes and statuses.
"""

from collections.abc import Mapping
from typing import Any

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    ResidencyError,
    TieredError,
    UnavailableError,
)

TIER = "durable"
_RETRYABLE = {
    "BadDigest",
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
RETRYABLE_STATUS = {408, 429, 500, 502, 503, 504}
_OVERLOADED = {
    "BandwidthLimitExceeded",
    "RequestLimitExceeded",
    "RequestThrottled",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
OVERLOADED_STATUS = {429, 503}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_EXISTS = {"PreconditionFailed", "412"}
_REDIRECTS = {
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "Redirect",
    "TemporaryRedirect",
}
ELSEWHERE = (
    "Correct the URL, or name the region with s3={'client_kwargs': {'region_name': ...}} if that"
    " place is meant; a redirect is never followed."
)


class ChecksumRefusedError(InvalidError):
    """The store says no to a request that carries a checksum, probably because it carries one."""


def translate(exc: Exception, doing: str, where: str, endpoint: str) -> tuple[TieredError, bool]:
    """Return our error for botocore's, and whether another try may help.

    Args:
        exc: What botocore or the network raised.
        doing: The operation, its part and which try it was.
        where: URL of the object.
        endpoint: What to call the store.
    """
    from botocore import exceptions, parsers

    if isinstance(exc, exceptions.ClientError):
        return _refused(exc.response, doing, where, endpoint)
    inner = getattr(exc, "kwargs", {}).get("error")
    if isinstance(inner, TieredError):
        # The body could not be read: that is the fault of our disk, not of the network.
        return inner, False
    text = f"{doing} failed: {type(exc).__name__}: {exc}"
    if isinstance(exc, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        hint = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass s3={'key':, 'secret':}."
        return InvalidError(text, TIER, where, hint), True
    if isinstance(exc, exceptions.FlexibleChecksumError):
        hint = "The reply differs from what the store says it has; look at the network between."
        return CorruptError(text, TIER, where, hint), True
    transient = (
        *transport_errors(),
        parsers.ResponseParserError,
        exceptions.CredentialRetrievalError,
        exceptions.MetadataRetrievalError,
    )
    if isinstance(exc, transient):
        hint = f"Check that {endpoint} is up and can be reached from this node."
        return UnavailableError(text, TIER, where, hint), True
    return InvalidError(text, TIER, where, "Check the s3 options."), False


def _refused(
    response: Mapping[str, Any], doing: str, where: str, endpoint: str
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
        return UnavailableError(text, TIER, where, hint), True
    if code in _EXISTS:
        return AlreadyExistsError(f"object is there already: {text}", TIER, where), False
    is_head = doing.startswith("head_object")
    if status == 404 and code == "404" and request and not is_head:  # noqa: PLR2004 - HTTP
        # The store's own reply, of which the body that says what is missing did not arrive.
        return UnavailableError(
            text, TIER, where, "The reply was cut off; it is asked again."
        ), True
    if status == 404:  # noqa: PLR2004 - HTTP
        return _missing(code, text, where, endpoint, is_head=is_head), False
    if code in _RETRYABLE or status in RETRYABLE_STATUS:
        hint = "The store is overloaded or failing; the request is tried again."
        return UnavailableError(text, TIER, where, hint), True
    if status == 416:  # noqa: PLR2004 - range not satisfiable
        return too_short(where), False
    if code in _REDIRECTS or 300 <= status < 400 or "Region" in refusal:  # noqa: PLR2004
        text += f", region {refusal['Region']}" if "Region" in refusal else ""
        return ResidencyError(f"bucket is elsewhere: {text}", TIER, where, ELSEWHERE), False
    return _denied(status, text, where, doing), False


def _missing(code: str, text: str, where: str, endpoint: str, *, is_head: bool) -> TieredError:
    """Return what a 404 means. Absent is only what the store itself says is absent (I8)."""
    if code == "NoSuchKey" or (is_head and code in ("404", "NotFound")):
        return AbsentError(f"no such object: {text}", TIER, where)
    if code == "NoSuchUpload":
        hint = "Somebody aborted the upload; the next try starts a new one."
        return UnavailableError(text, TIER, where, hint)
    if code == "NoSuchBucket":
        hint = "Create the bucket or correct the URL; it is never created here."
        return InvalidError(f"no such bucket: {text}", TIER, where, hint)
    hint = f"Check that {endpoint} is an S3 endpoint."
    return InvalidError(f"not an answer of S3: {text}", TIER, where, hint)


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
    return CorruptError("object ends before what was asked of it", TIER, where)


def _denied(status: int, text: str, where: str, doing: str) -> InvalidError:
    if status in (401, 403) and doing.startswith("delete_object"):
        hint = (
            "Allow s3:DeleteObject on the run's objects to who removes checkpoints; then run the"
            " same command again."
        )
        return InvalidError(f"access denied: {text}", TIER, where, hint)
    if status in (401, 403):
        hint = (
            "Check the key, the secret and the bucket policy for GetObject, PutObject, ListBucket."
        )
        return InvalidError(f"access denied: {text}", TIER, where, hint)
    hint = "Check the URL and the s3 options."
    if text.startswith(("get_object", "head_object")):
        hint += " What was stored under a key of yours (SSE-C) is read with that key only."
    return InvalidError(text, TIER, where, hint)


def code_of(exc: Exception) -> str:
    """Return the code in a reply of S3, empty for what is none."""
    response = getattr(exc, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else ""


def lacks_credentials(exc: Exception) -> bool:
    """Tell whether no credentials were found, or not all of them."""
    from botocore import exceptions

    return isinstance(exc, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError))


def refuses_checksums(exc: Exception, arguments: Mapping[str, Any]) -> bool:
    """Tell whether a reply may be a definite no to the checksum that a request carries.

    The words of stores differ: not implemented, or an invalid request or argument that is about
    a checksum. A reply to HEAD has no words.
    """
    response = getattr(exc, "response", None)
    if not isinstance(response, dict) or not any(name.startswith("Checksum") for name in arguments):
        return False
    code, status = code_of(exc), response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in _RETRYABLE | _EXPIRED or status not in (400, 501):
        return False
    wordless = code in ("", "400", "501")
    about = "checksum" in str(response.get("Error", {}).get("Message")).lower()
    return status == 501 or wordless or about  # noqa: PLR2004 - HTTP


def is_expired(exc: Exception) -> bool:
    """Tell whether the credentials are too old."""
    return code_of(exc) in _EXPIRED


def is_overloaded(exc: Exception) -> bool:
    """Tell whether the store asks for fewer requests."""
    response = getattr(exc, "response", None)
    meta = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return code_of(exc) in _OVERLOADED or meta.get("HTTPStatusCode") in OVERLOADED_STATUS
