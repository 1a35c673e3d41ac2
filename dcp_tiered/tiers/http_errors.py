"""What a refusal of an object store other than S3 means, as far as HTTP itself says it.

What S3 says is in `s3_errors`, which also has what both share: statuses, and errors without a code.
"""

import importlib
import re

from dcp_tiered.errors import InvalidError, ResidencyError, TieredError, UnavailableError
from dcp_tiered.tiers.s3_errors import RETRYABLE_STATUS, TIER, too_short

_DENIED = (401, 403)
_RANGE = 416
_SIGNED = re.compile(r"\b(sig|upload_id)=[^&\s'\")]+", re.IGNORECASE)
"""What makes a URL as good as a password."""


class RefusedError(Exception):
    """Report a reply that is no success.

    Args:
        status: Of HTTP.
        code: The store's own name for it, empty where it gave none.
        request: The store's id of the request, for its support.
    """

    def __init__(self, status: int, code: str, request: str = "") -> None:
        super().__init__(status, code, request)
        self.status = status
        self.code = code
        self.request = request

    def text(self, doing: str) -> str:
        """Return what happened, for a message."""
        code, request = self.code[:200], self.request[:100]
        return f"{doing} answered {self.status} {code}" + (
            f", request {request}" if request else ""
        )


def translate_refusal(
    refused: RefusedError, doing: str, where: str, denied_hint: str
) -> tuple[TieredError, bool]:
    """Return our error for a status that means the same in every store, and whether to try again.

    Args:
        refused: The reply; what is not there or there already is for the caller to say.
        doing: The request and which try it was.
        where: URL of the object.
        denied_hint: What to check when access is denied.
    """
    text = refused.text(doing)
    if refused.status in RETRYABLE_STATUS:
        hint = "The store is overloaded or failing; the request is tried again."
        return UnavailableError(text, TIER, where, hint), True
    if refused.status == _RANGE:
        return too_short(where), False
    if 300 <= refused.status < 400:  # noqa: PLR2004 - HTTP
        hint = "Correct the URL or the endpoint; a redirect is never followed."
        return ResidencyError(f"bucket is elsewhere: {text}", TIER, where, hint), False
    if refused.status in _DENIED:
        return InvalidError(f"access denied: {text}", TIER, where, denied_hint), False
    return InvalidError(text, TIER, where, "Check the URL and the options."), False


def scrubbed(exc: Exception) -> str:
    """Return the text of an exception without what would let its reader into the store."""
    return _SIGNED.sub(r"\1=...", str(exc))


def need_library(name: str, extra: str, where: str) -> None:
    """Pass when the client library of a store is installed.

    Raises:
        InvalidError: It is not; the hint has the command.
    """
    try:
        importlib.import_module(name)
    except ImportError as exc:
        hint = f"pip install 'dcp-tiered[{extra}]'"
        raise InvalidError(f"{name} is not installed", TIER, where, hint) from exc
