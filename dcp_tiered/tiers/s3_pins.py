"""What every single request to S3 is held to: host, scheme, signing region and bucket owner.

A check beforehand says where a bucket was. These say where a request goes, right before it is sent:
botocore follows a bucket into whatever region a store names, and has no switch against that.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.errors import InvalidError, ResidencyError
from dcp_tiered.tiers.s3_errors import ELSEWHERE, TIER

SUFFIXES = {
    "aws": "amazonaws.com",
    "aws-cn": "amazonaws.com.cn",
    "aws-us-gov": "amazonaws.com",
    "aws-eusc": "amazonaws.eu",
}
_HINT = "Change the policy if that place is meant; nothing is ever sent elsewhere instead."
_ALIAS = re.compile(r".*(-s3alias|--ol-s3|--x-s3|\.mrap)")
"""Access points, Object Lambda, directory buckets, multi-region access points: names of something
else than a bucket whose facts could be looked at."""
_REGIONAL = {
    "use_accelerate_endpoint": False,
    "use_arn_region": False,
    "s3_disable_multiregion_access_points": True,
    "us_east_1_regional_endpoint": "regional",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Where requests may go."""

    regions: tuple[str, ...] = ()
    """Signing regions; empty for a compatible store that is known by its endpoint."""
    partition: str = "aws"
    owner: str | None = None
    """Account that every request says the bucket has to belong to."""
    endpoint: str | None = None
    """Of a compatible store: scheme, host and port; None for AWS."""
    jurisdiction: str | None = None
    """Of R2, which the endpoint names; None for any other store."""
    replica_accounts: tuple[str, ...] = ()
    """Whose buckets replicas may lie in."""
    replica_regions: tuple[str, ...] = ()
    """Where they may lie: asked about there, while nothing else is sent."""

    @property
    def provider(self) -> str:
        """Return which kind of store it is, as facts and rules name it."""
        if self.endpoint is None:
            return "aws"
        return "s3compat" if self.jurisdiction is None else "r2"

    def for_questions(self) -> "Pin":
        """Return where questions about buckets may go."""
        regions = (*self.regions, *self.replica_regions) if self.regions else ()
        return replace(self, regions=regions)

    def client_options(self) -> dict[str, Any]:
        """Return botocore's settings against ways around the regional endpoint."""
        return {"ignore_configured_endpoint_urls": True, "s3": dict(_REGIONAL)}

    def check_options(self, bucket: str, options: Mapping[str, Any]) -> None:
        """Refuse, before anything is sent, options that lead around a pin.

        Raises:
            InvalidError: One of them does.
        """
        if options.get("anon"):
            raise _refused("anonymous requests have no owner and no signing region", bucket)
        if _ALIAS.fullmatch(bucket):
            raise _refused("the bucket's name is that of an access point or directory", bucket)
        given = dict(options.get("config_kwargs") or {})
        s3 = given.get("s3") or {}
        weakened = [name for name, value in _REGIONAL.items() if s3.get(name, value) != value]
        if weakened or given.get("ignore_configured_endpoint_urls", True) is not True:
            raise _refused(f"option {weakened or 'ignore_configured_endpoint_urls'}", bucket)
        client = options.get("client_kwargs") or {}
        if False in (options.get("verify"), client.get("verify")):
            raise _refused("verify=False trusts any server", bucket)

    def why_not(self, url: str, region: str, bucket: str) -> str | None:
        """Return why a request must not be sent, None when it may.

        Args:
            url: Where it goes.
            region: In its signature, empty when it has none.
            bucket: What it is about, or another bucket whose location is asked.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme != "https" and not is_loopback(host):
            return f"{parts.scheme}://{host} is not encrypted"
        if not region:
            return "it is not signed"
        if self.regions and region not in self.regions:
            return f"it is signed for region {region!r}"
        if self.endpoint is not None:
            mine = urlsplit(self.endpoint)
            hosts = (mine.netloc, f"{bucket}.{mine.netloc}")
            same = parts.scheme == mine.scheme and parts.netloc in hosts
            return None if same else f"{parts.scheme}://{parts.netloc} is another endpoint"
        return None if self.is_regional(host, region) else f"host {host} is not that of {region}"

    def is_regional(self, host: str, region: str) -> bool:
        """Tell whether a host is the endpoint of S3, or of its control plane, in a region."""
        suffix, place = re.escape(SUFFIXES[self.partition]), re.escape(region)
        bucket, account = r"(?:[a-z0-9][a-z0-9.-]*\.)?", r"(?:\d{12}\.)?"
        own = rf"{bucket}s3(?:-fips)?(?:\.dualstack)?\.{place}\.{suffix}"
        control = rf"{account}s3-control(?:-fips)?(?:\.dualstack)?\.{place}\.{suffix}"
        private = rf"{bucket}(?:bucket\.)?vpce-[0-9a-z-]+\.s3\.{place}\.vpce\.{suffix}"
        return any(re.fullmatch(pattern, host) for pattern in (own, control, private))


class Anchor:
    """Keeps every request of a client in the place that its first one went to, and in the pin.

    Args:
        where: URL of the bucket.
        pin: None where no policy says more than that.
    """

    def __init__(self, where: str, pin: Pin | None = None) -> None:
        self._where = where
        self._pin = pin
        self._place: tuple[str, str, str] | None = None

    def __call__(self, request: Any, **_: Any) -> None:
        """Raise instead of letting a request leave for another place; botocore calls this last.

        Raises:
            ResidencyError: It would.
        """
        url = urlsplit(request.url)
        region = _signing_region(request.headers)
        bucket = urlsplit(self._where).netloc
        why_not = self._pin.why_not(request.url, region, bucket) if self._pin else None
        if why_not is not None:
            raise ResidencyError(f"a request was not sent: {why_not}", TIER, self._where, _HINT)
        place = (url.scheme, url.netloc, region)
        # The first request of a client is on its way before any reply could have led it astray.
        if self._place is None:
            self._place = place
        if place != self._place:
            raise ResidencyError(
                f"store redirects from {_said(self._place)} to {_said(place)}",
                TIER,
                self._where,
                ELSEWHERE,
            )


class PinOnly(Anchor):
    """Keeps requests in the pin, whichever host of it they go to: for clients that only ask."""

    def __call__(self, request: Any, **_: Any) -> None:
        """Raise instead of letting a request leave the pin; see `Anchor`."""
        self._place = None
        super().__call__(request)


def compatible_endpoint(options: Mapping[str, Any]) -> str | None:
    """Return scheme, host and port of a compatible store that options name, None for AWS."""
    client = options.get("client_kwargs") or {}
    url = urlsplit(str(options.get("endpoint_url") or client.get("endpoint_url") or ""))
    host = url.hostname or ""
    is_aws = not host or any(host.endswith(f".{suffix}") for suffix in SUFFIXES.values())
    return None if is_aws else f"{url.scheme}://{url.netloc}"


def configured_region(options: Mapping[str, Any]) -> str:
    """Return the region of requests by options, environment and profile, empty when none is."""
    client = options.get("client_kwargs") or {}
    region = client.get("region_name") or options.get("region_name")
    if region:
        return str(region)
    import botocore.session

    session = botocore.session.Session(profile=options.get("profile"))
    return str(session.get_config_variable("region") or "")


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refused(what: str, bucket: str) -> InvalidError:
    return InvalidError(
        f"not under a residency policy: {what}", TIER, f"s3://{bucket}", "Leave that out."
    )


def _signing_region(headers: Any) -> str:
    """Return the region in a signature's scope, empty for a request that is not signed."""
    value = headers.get("Authorization", b"")
    text = value.decode() if isinstance(value, bytes) else value
    scope = text.partition("Credential=")[2].partition(",")[0].split("/")
    return scope[-3] if len(scope) >= 5 else ""  # noqa: PLR2004 - key/date/region/service/aws4_request


def _said(place: tuple[str, str, str]) -> str:
    scheme, host, region = place
    return f"{scheme}://{host}" + (f" in region {region}" if region else "")
