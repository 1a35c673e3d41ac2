"""Ask a provider's own API one question over HTTP, and tell apart every way not to answer."""

import json
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from dcp_tiered.errors import TieredError
from dcp_tiered.tiers.http_errors import scrubbed
from dcp_tiered.tiers.s3_asking import DENIED_STATUS, SILENT_STATUS, Answer, Kind

_REPLY_BYTES_MAX = 4 << 20
OVERLOADED = ("rateLimitExceeded", "userRateLimitExceeded")
"""Google says them with 403, which is else a lack of rights."""


class NoTokenError(Exception):
    """Nobody is logged in, or not as somebody who may ask."""


def ask(send: Callable[[], Any], call: str, permission: str) -> Answer:
    """Ask once.

    Args:
        send: Sends the question; returns a reply of `requests` whose body was not read yet.
        call: What it is, for people.
        permission: What the asker needs for it.

    Raises:
        TieredError: It was about to go to another place than it may.
    """
    try:
        with closing(send()) as reply:
            return _answer(reply, call, permission)
    except TieredError:
        raise
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is no answer
        kind, text = Kind.GARBLED, f"{type(exc).__name__}: {scrubbed(exc)[:200]}"
        if isinstance(exc, NoTokenError):
            kind, text = Kind.DENIED, str(exc)[:300]
        elif isinstance(exc, _silences()):
            kind = Kind.SILENT
        return Answer(kind=kind, call=call, permission=permission, text=text)


def _answer(reply: Any, call: str, permission: str) -> Answer:
    status = int(reply.status_code)
    said = _said(reply)
    code = _code(said)
    if status in SILENT_STATUS or code in OVERLOADED:
        kind = Kind.SILENT
    elif status in DENIED_STATUS:
        kind = Kind.DENIED
    elif not 200 <= status < 300:  # noqa: PLR2004 - HTTP
        kind = Kind.REFUSED
    else:
        kind = Kind.GARBLED if said is None else Kind.OK
    return Answer(
        kind=kind,
        call=call,
        permission=permission,
        code=code,
        status=status,
        reply=said if said is not None and kind is Kind.OK else {},
        text="" if kind is Kind.OK else f"answered {status} {code}".rstrip(),
    )


def _said(reply: Any) -> dict[str, Any] | None:
    data = reply.raw.read(_REPLY_BYTES_MAX, decode_content=True)
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _code(said: dict[str, Any] | None) -> str:
    """Return what a service calls what is wrong: Google in a list of reasons, Azure in a code."""
    error = (said or {}).get("error")
    if not isinstance(error, dict):
        return ""
    rows = error.get("errors")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict):
        return str(rows[0].get("reason", ""))[:80]
    return str(error.get("code", ""))[:80]


def _silences() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean a broken or silent connection, on the way to a token too."""
    from urllib3.exceptions import HTTPError

    found: list[type[Exception]] = [OSError, HTTPError]  # those of requests are OSErrors
    with suppress(ImportError):
        from google.auth.exceptions import RefreshError, TransportError

        found += [RefreshError, TransportError]
    with suppress(ImportError):
        from azure.core.exceptions import ServiceRequestError, ServiceResponseError

        found += [ServiceRequestError, ServiceResponseError]
    return tuple(found)
