"""The seam below `ObjectStoreTier`: what one provider's API has to do, one request per call.

Every call is tried once, and raises what the provider's client raises; which error of ours that is,
and whether another try may help, `Place.translate` says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dcp_tiered.errors import TieredError
from dcp_tiered.format.residency import Fact, Observed
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.tiers.http_errors import RefusedError
from dcp_tiered.tiers.s3_body import BLOCK_BYTES, Window

C_co = TypeVar("C_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a listing."""

    keys: list[str]
    directories: list[str]
    """With their slash; only where a listing was asked to end at slashes."""
    following: str | None
    """What asks for the next page; None after the last."""


class Body:
    """A window as a request sends it: of known length, block by block, never whole in memory."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def __len__(self) -> int:
        return len(self._window)

    def __iter__(self) -> Iterator[bytes]:
        while block := self._window.read(BLOCK_BYTES):
            yield block


class Client(Protocol):
    """The objects of one bucket; used by several threads at once."""

    def create(self, key: str, data: bytes, crc: int) -> ObjectInfo:
        """Create a small object that must not be there yet."""
        ...

    def begin(self, key: str, length: int, crc: int) -> Any:
        """Begin to create a large object that must not be there yet; nobody sees it."""
        ...

    def send(self, upload: Any, start: int, body: Body) -> int:
        """Send the bytes from `start` on; return up to where the store has them."""
        ...

    def finish(self, upload: Any) -> ObjectInfo | None:
        """Make all that was sent visible at once; return what the reply says of it, if anything."""
        ...

    def abandon(self, upload: Any) -> None:
        """Let go of what was sent, as far as the store knows such a request."""
        ...

    def look(self, key: str) -> ObjectInfo:
        """Return length and checksum of an object, the latter where the store keeps one."""
        ...

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill a buffer from the front; return how far one request came, at least one byte."""
        ...

    def remove(self, key: str) -> None:
        """Remove an object; one that is not there may raise."""
        ...

    def page(self, prefix: str, delimiter: str, following: str | None) -> Page:
        """Return one page of the keys that begin with a prefix."""
        ...

    def observe(self) -> Observed:
        """Look where the bucket is, whose it is, who can read it; with a pin only."""
        ...

    def observe_place(self) -> Observed:
        """Look where the bucket is and whose it is; with a pin only."""
        ...

    def look_public(self) -> Fact:
        """Look for signs that the bucket is public, with a request or two."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


class Place(Protocol[C_co]):
    """One bucket and how to reach it: plain data that survives pickling."""

    url: str
    """For messages; holds no secret."""
    chunk_bytes: int
    """What the parts of a large object have to be a multiple of, save the last."""
    keeps_writers_apart: bool
    """See `Tier`; a client that only looks before it writes does not."""

    def connect(self) -> C_co:
        """Return a client of this process. Nothing is sent yet, except to find credentials."""
        ...

    def refusal(self, exc: Exception) -> RefusedError | None:
        """Return the reply behind an exception, None when there was none."""
        ...

    def translate(self, exc: Exception, doing: str, where: str) -> tuple[TieredError, bool]:
        """Return our error for what a client raised, and whether another try may help.

        Args:
            exc: What was raised.
            doing: The request and which try it was.
            where: URL of the object.
        """
        ...
