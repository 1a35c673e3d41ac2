"""Who asks Google: gcsfs's option `token` as credentials that sign requests."""

import json
import os
from collections.abc import Mapping
from typing import Any

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class TokenError(Exception):
    """The token option is none that is understood."""


class Signer:
    """Signs requests with credentials that it renews in time; None leaves them unsigned."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self, request: Any) -> Any:
        """Return a request with what proves who we are."""
        if self._credentials is not None:
            from google.auth.transport.requests import Request

            self._credentials.before_request(
                Request(), request.method, request.url, request.headers
            )
        return request


def credentials(token: Any) -> Any:
    """Return the credentials that gcsfs's option `token` means; never none where none were asked.

    Left alone, gcsfs goes on without credentials when it finds none.
    """
    import google.auth
    import google.auth.compute_engine
    import google.oauth2.credentials

    if token in (None, "google_default"):
        return google.auth.default(scopes=[_SCOPE])[0]
    if token == "anon":  # noqa: S105 - a word, not a secret
        return None
    if token == "cloud":  # noqa: S105 - a word, not a secret
        return google.auth.compute_engine.Credentials()
    if isinstance(token, str) and os.path.exists(token):
        with open(token, encoding="utf-8") as file:
            token = json.load(file)
    if isinstance(token, str):
        return google.oauth2.credentials.Credentials(token)
    return _of_mapping(token)


def _of_mapping(token: Any) -> Any:
    from google.oauth2.credentials import Credentials
    from google.oauth2.service_account import Credentials as ServiceAccount

    kind = token.get("type") if isinstance(token, Mapping) else None
    try:
        if kind == "service_account":
            return ServiceAccount.from_service_account_info(token, scopes=[_SCOPE])
        if kind == "authorized_user":
            return Credentials.from_authorized_user_info(token, scopes=[_SCOPE])
    except ValueError:
        raise TokenError(f"token of type {kind} is incomplete") from None
    raise TokenError("token is neither of a service account nor of a user")
