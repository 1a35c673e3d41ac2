"""Ask a store one question about a bucket or an account, and tell apart every way not to answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from dcp_tiered.errors import ResidencyError
from dcp_tiered.format.residency import Fact, Verdict
from dcp_tiered.tiers.s3_errors import transport_errors
from dcp_tiered.tiers.s3_requests import S3Requests

ANYBODY = "anybody"
"""The service name of S3 asked without credentials."""
_REGION = "x-amz-bucket-region"
DENIED_STATUS = (401, 403)
SILENT_STATUS = (408, 429, 500, 502, 503, 504)


class Kind(Enum):
    """How a question was answered."""

    OK = auto()
    REFUSED = auto()
    """With a code that says something."""
    DENIED = auto()
    """The asker lacks a permission."""
    SILENT = auto()
    """The store is down, slow or unreachable."""
    GARBLED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, and how it was asked for."""

    kind: Kind
    call: str
    permission: str
    code: str = ""
    status: int = 0
    region: str | None = None
    """What the store says that the bucket's region is; told with refusals too."""
    reply: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def fact(self, name: str, verdict: Verdict, evidence: str, *values: str) -> Fact:
        """Return what this answer says about a fact."""
        return Fact(
            name=name, verdict=verdict, evidence=evidence, values=tuple(values), call=self.call
        )

    def unknown(self, name: str) -> Fact:
        """Return that this answer says nothing about a fact, and what would help."""
        return Fact(
            name=name,
            verdict=Verdict.UNKNOWN,
            evidence=self.text or "answer is not understood",
            call=self.call,
            permission=self.permission if self.kind is Kind.DENIED else "",
            transient=self.kind is Kind.SILENT,
        )


class Asker:
    """Asks about buckets, once each time; use it for one look and close it.

    Args:
        requests: Whose credentials, settings and pin to use.
    """

    def __init__(self, requests: S3Requests) -> None:
        self._requests = requests
        self._clients: dict[str, Any] = {}
        self._told: list[str] = []
        """Regions that the store named while it was asked last."""

    def client(self, service: str = "s3") -> Any:
        """Return the client of a service."""
        if service not in self._clients:
            made = (
                self._requests.anonymous_client()
                if service == ANYBODY
                else self._requests.asking_client(service)
            )
            made.meta.events.register_first("needs-retry", self._note_region)
            self._clients[service] = made
        return self._clients[service]

    def close(self) -> None:
        """Give connections back."""
        for client in self._clients.values():
            client.close()

    def ask(self, operation: str, permission: str, service: str = "s3", **arguments: Any) -> Answer:
        """Ask once.

        Args:
            operation: botocore's method name.
            permission: What the asker needs for it.
            service: `s3`, `s3control` or `ANYBODY`.
            **arguments: botocore's arguments.
        """
        client = self.client(service)
        name = client.meta.method_to_api_mapping[operation]
        shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
        call = f"{service}:{name}({shown})"
        self._told.clear()
        try:
            reply = getattr(client, operation)(**arguments)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is no answer
            return self._no_answer(exc, call, permission)
        region = next(iter(self._told), None) or reply.get("BucketRegion")
        return Answer(
            kind=Kind.OK, call=call, permission=permission, region=region, reply=reply, status=200
        )

    def _no_answer(self, exc: Exception, call: str, permission: str) -> Answer:
        from botocore import exceptions

        kind, code, status, text = Kind.GARBLED, "", 0, f"{type(exc).__name__}: {str(exc)[:200]}"
        if isinstance(exc, exceptions.ClientError):
            code = str(exc.response.get("Error", {}).get("Code", ""))
            status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            text = f"answered {status} {code}"
            kind = Kind.REFUSED
            if status in DENIED_STATUS:
                kind = Kind.DENIED
            elif status in SILENT_STATUS:
                kind = Kind.SILENT
        elif isinstance(exc, ResidencyError):
            # botocore was about to follow the store into another region; the guard stopped it.
            kind, status, text = Kind.REFUSED, 301, exc.message
        elif isinstance(exc, transport_errors()):
            kind = Kind.SILENT
        return Answer(
            kind=kind,
            call=call,
            permission=permission,
            code=code,
            status=status,
            region=next(iter(self._told), None),
            text=text,
        )

    def _note_region(self, response: Any = None, **_: Any) -> None:
        """Keep the region in a reply, before botocore acts on it."""
        region = response[0].headers.get(_REGION) if response is not None else None
        if region is not None:
            self._told.append(str(region))
