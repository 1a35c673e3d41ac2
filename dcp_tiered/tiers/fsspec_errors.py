"""What an exception of an fsspec implementation means, as far as its class and status tell.

Implementations agree on little more than `FileNotFoundError`, and use that for much. So nothing is
absent by an exception of theirs alone: `fsspec_store` looks twice and says so with its own.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    InvalidError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.tiers.http_errors import RefusedError, scrubbed, translate_refusal
from dcp_tiered.tiers.s3_errors import TIER

_DENIED_HINT = "Check the credentials and that they may create, read and list in the bucket."
_DELETE_HINT = (
    "Allow who removes checkpoints to delete in the bucket; then run the same command again."
)
_BUCKET_HINT = "Create the bucket or correct the URL; it is never created here."
_OPTIONS_HINT = "Check the options of that protocol, and the release of the package behind it."
_OURS = (AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, TypeError)
_QUERY = re.compile(r"\?[^\s'\"<>]+=[^\s'\"<>]*")
"""Of a URL: where signatures are."""
_SECRET_MIN = 6
"""A shorter value of an option would be found in half of all words."""
_TEXT_MAX = 300
_CAUSES_MAX = 8


class NotThereError(Exception):
    """Tell that a look and a listing agree: there is no such object."""


class NoBucketError(Exception):
    """Tell that not even the bucket can be listed."""


class BrokenOffError(Exception):
    """Tell that a stream failed in the middle and cannot be carried on.

    Args:
        cause: What it failed of.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


def refusal(exc: Exception) -> RefusedError | None:
    """Return the HTTP reply behind an exception, None where its class keeps none."""
    for one in _causes(exc):
        status = _status(one)
        if status is not None:
            return RefusedError(status, type(exc).__name__)
    return None


def translate(
    exc: Exception, doing: str, where: str, options: Mapping[str, Any]
) -> tuple[TieredError, bool]:
    """Return our error for what an implementation raised, and whether another try may help.

    Args:
        exc: What was raised.
        doing: The request and which try it was.
        where: URL of the object.
        options: Of the protocol; what they hold is not repeated.
    """
    if isinstance(exc, BrokenOffError):
        return _broken_off(exc.cause, doing, where, options)
    definite = _definite(exc, doing, where)
    if definite is not None:
        return definite, False
    text = f"{doing} failed: {type(exc).__name__}: {_said(exc, options)}"
    denied_hint = _DELETE_HINT if doing.startswith("delete") else _DENIED_HINT
    if isinstance(exc, PermissionError):
        return InvalidError(f"access denied: {text}", TIER, where, denied_hint), False
    refused = refusal(exc)
    if refused is not None:
        return translate_refusal(refused, doing, where, denied_hint)
    if isinstance(exc, _OURS) or type(exc) is ValueError:
        return InvalidError(text, TIER, where, _OPTIONS_HINT), False
    hint = "Check that the store is up and can be reached from this node."
    return UnavailableError(text, TIER, where, hint), True


def _definite(exc: Exception, doing: str, where: str) -> TieredError | None:
    """Return our error for what says whether something is there."""
    if isinstance(exc, FileExistsError):
        return AlreadyExistsError(f"object is there already: {doing}", TIER, where)
    # In reply to a read it may be anybody's, and `ObjectStoreTier.read_into` looks again.
    is_read = isinstance(exc, FileNotFoundError) and doing.startswith("read")
    if is_read or isinstance(exc, NotThereError):
        return AbsentError(f"no such object: {doing}", TIER, where)
    if isinstance(exc, NoBucketError | FileNotFoundError):
        return InvalidError(f"no such bucket: {doing}", TIER, where, _BUCKET_HINT)
    return None


def _broken_off(
    cause: Exception, doing: str, where: str, options: Mapping[str, Any]
) -> tuple[TieredError, bool]:
    if isinstance(cause, FileNotFoundError):
        text = f"{doing} failed: the store does not know the upload any more"
        return UnavailableError(text, TIER, where, "The upload is begun anew."), False
    error, _ = translate(cause, doing, where, options)
    if isinstance(error, UnavailableError):
        hint = "The upload is begun anew; check that the store can be reached."
        return UnavailableError(error.message, TIER, where, hint), False
    return error, False


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was made of, a bounded number of them."""
    current: BaseException | None = exc
    for _ in range(_CAUSES_MAX):
        if current is None:
            return
        yield current
        current = current.__cause__ or current.__context__


def _status(exc: BaseException) -> int | None:
    """Return an HTTP status from where the clients of stores keep it."""
    for holder in (exc, getattr(exc, "response", None)):
        for name in ("status_code", "status", "http_status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 300 <= status < 600:  # noqa: PLR2004 - HTTP
                return status
    return None


def _said(exc: Exception, options: Mapping[str, Any]) -> str:
    """Return the text of an exception without what is in the options or signs a URL."""
    text = _QUERY.sub("?...", scrubbed(exc))
    for secret in sorted(_leaves(options), key=len, reverse=True):
        text = text.replace(secret, "...")
    return text[:_TEXT_MAX]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str) and len(value) >= _SECRET_MIN:
        yield value
