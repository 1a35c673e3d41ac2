"""Azure Resource Manager: what it says of a storage account, asked with plain HTTP requests.

The storage service itself does not say where an account is, whatever the key. Its own library would
be one dependency more for three questions.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dcp_tiered.tiers.http_asking import NoTokenError, ask
from dcp_tiered.tiers.http_errors import scrubbed
from dcp_tiered.tiers.s3_asking import Answer

_MANAGEMENT = "https://management.azure.com"
_SCOPE = f"{_MANAGEMENT}/.default"
_VERSION = "2023-05-01"
_HINT = (
    "no token for Azure Resource Manager, for which an account key or a SAS is not enough: give"
    " client_id, client_secret and tenant_id as well, or log in with 'az login'"
)


class Management:
    """Asks about storage accounts; it makes its connections when it is asked first.

    Args:
        options: Of the run; a token is fetched for whoever they name.
        timeout_s: Longest silence within one request.
    """

    def __init__(self, options: Mapping[str, Any], timeout_s: float) -> None:
        self._options = options
        self._timeout = (min(5.0, timeout_s), timeout_s)
        self._session: Any = None
        self._credential: Any = None
        self._had_token = False

    def ask(self, resource: str, call: str, permission: str) -> Answer:
        """Ask once.

        Args:
            resource: The id of a storage account in small letters, and what of it.
            call: What is asked, for people.
            permission: What the asker needs.
        """
        account = resource.partition("/storageaccounts/")[2].partition("/")[0]
        return ask(partial(self._send, resource), f"{call}({account})", permission)

    def close(self) -> None:
        """Give connections back."""
        if self._session is not None:
            self._session.close()
        if hasattr(self._credential, "close") and self._credential is not self._given():
            self._credential.close()

    def _send(self, resource: str) -> Any:
        import requests

        if self._session is None:
            self._session = requests.Session()
        token = self._token()
        return self._session.get(
            f"{_MANAGEMENT}{resource}",
            params={"api-version": _VERSION},
            # An `auth` of its own, so that the session does not look into ~/.netrc.
            auth=partial(_sign, token),
            timeout=self._timeout,
            allow_redirects=False,
            stream=True,
        )

    def _token(self) -> str:
        from azure.core.exceptions import ClientAuthenticationError

        try:
            if self._credential is None:
                self._credential = self._given() or token_credential(self._options, self._timeout)
            token = str(self._credential.get_token(_SCOPE).token)
        except (ClientAuthenticationError, ValueError) as exc:
            why = scrubbed(exc).partition("\n")[0][:100]
            text = f"{_HINT} ({type(exc).__name__}: {why})"
            if self._had_token:  # an outage of the login is no violation
                raise OSError(text) from None
            raise NoTokenError(text) from None
        self._had_token = True
        return token

    def _given(self) -> Any:
        given = self._options.get("credential")
        return given if hasattr(given, "get_token") else None


def token_credential(options: Mapping[str, Any], timeout: tuple[float, float]) -> Any:
    """Return a credential that fetches tokens for whoever the options or the environment name.

    Args:
        options: As for adlfs.
        timeout: Seconds to connect, and of silence.
    """
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    bounds = {"connection_timeout": timeout[0], "read_timeout": timeout[1]}
    if options.get("client_id") and options.get("client_secret"):
        return ClientSecretCredential(
            tenant_id=options.get("tenant_id"),
            client_id=options["client_id"],
            client_secret=options["client_secret"],
            **bounds,
        )
    return DefaultAzureCredential(**bounds)


def _sign(token: str, request: Any) -> Any:
    request.headers["Authorization"] = f"Bearer {token}"
    return request
