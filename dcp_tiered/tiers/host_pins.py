"""What every single request to Google or Azure is held to under a policy: scheme, host and port.

Neither service has a header that names the owner of a bucket, as S3 has. Google's regional
endpoints refuse a bucket of another location; a host of Azure is one storage account's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dcp_tiered.errors import InvalidError, ResidencyError
from dcp_tiered.format.residency import Fact, Verdict
from dcp_tiered.tiers.s3_errors import TIER
from dcp_tiered.tiers.s3_pins import is_loopback

AZURE_HOST = "blob.core.windows.net"
_HINT = "Change the policy if that place is meant; nothing is ever sent elsewhere instead."
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPin:
    """Where the requests about one bucket may go, and whose it has to be."""

    endpoint: str
    """Scheme, host and port."""
    place: str
    """How facts name it: `gcs:europe-west3` for a regional endpoint, else the endpoint itself."""
    owner: str
    """As the policy's rule has it."""

    def check(self, url: str, where: str) -> None:
        """Pass for a request that goes to the endpoint; called right before it is sent.

        Args:
            url: Where it goes, by a reply of the store perhaps.
            where: URL of the bucket, for messages.

        Raises:
            ResidencyError: It would go elsewhere.
        """
        parts, mine = urlsplit(url), urlsplit(self.endpoint)
        if _place(parts) != _place(mine):
            raise ResidencyError(
                f"a request was not sent: {parts.scheme}://{parts.netloc.rpartition('@')[2]} is"
                f" another endpoint than {self.endpoint}",
                TIER,
                where,
                _HINT,
            )

    def facts(self) -> tuple[Fact, Fact]:
        """Return what is known without a request: `endpoint` and `tls`."""
        url = urlsplit(self.endpoint)
        safe = url.scheme == "https" or is_loopback(url.hostname or "")
        return (
            Fact(
                name="endpoint",
                verdict=Verdict.ALLOW,
                evidence=f"requests go to {self.endpoint} and nowhere else",
                values=(self.place,),
                call="client settings",
            ),
            Fact(
                name="tls",
                verdict=Verdict.ALLOW if safe else Verdict.DENY,
                evidence=url.scheme if url.scheme == "https" else f"{url.scheme} to {url.hostname}",
            ),
        )


def google_endpoint(location: str) -> str:
    """Return the endpoint of Google that takes nothing for buckets of other locations."""
    return f"https://storage.{location}.rep.googleapis.com"


def bare(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def azure_account(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the storage account that options mean, and its endpoint; empty where they name none.

    A connection string wins over an account's name, as in adlfs.
    """
    text = options.get("connection_string")
    if not text:
        account = str(options.get("account_name") or "")
        return account, f"https://{options.get('account_host') or f'{account}.{AZURE_HOST}'}"
    said = dict(part.partition("=")[::2] for part in str(text).split(";"))
    if given := said.get("BlobEndpoint"):
        endpoint = bare(given)
        return said.get("AccountName") or endpoint.partition("://")[2].partition(".")[0], endpoint
    account = said.get("AccountName", "")
    scheme = said.get("DefaultEndpointsProtocol", "https")
    suffix = said.get("EndpointSuffix", "core.windows.net")
    return account, f"{scheme}://{account}.blob.{suffix}"


def refuse_anonymous(is_anonymous: object, where: str) -> None:
    """Refuse requests without credentials, which no owner could be held to.

    Raises:
        InvalidError: They would be sent.
    """
    if is_anonymous:
        raise InvalidError(
            "not under a residency policy: anonymous requests", TIER, where, "Give credentials."
        )


def _place(url: SplitResult) -> tuple[str, str | None, int | None]:
    try:
        return url.scheme, url.hostname, url.port or _PORTS.get(url.scheme)
    except ValueError:  # a port that is none
        return url.scheme, None, None
