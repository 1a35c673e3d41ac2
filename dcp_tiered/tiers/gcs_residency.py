"""Facts about a bucket of Google Cloud Storage, by three questions to its JSON API.

Google copies a bucket to the regions of its location and nowhere else by itself. Which regions
those are is told for a pair that the owner chose, and not for the locations that have a name of
their own, such as EU or EUR4.
"""

import re
from collections.abc import Callable
from typing import Any

from dcp_tiered.format.residency import STORE_KEY, Fact, Observed, Verdict, worst
from dcp_tiered.tiers.host_pins import HostPin
from dcp_tiered.tiers.s3_asking import Answer, Kind
from dcp_tiered.tiers.s3_replies import as_dict

_ALLOW, _DENY, _UNKNOWN = Verdict.ALLOW, Verdict.DENY, Verdict.UNKNOWN
_ASKED = ("location", "owner", "not_public", "replication", "encryption")
_ANYBODY = ("allUsers", "allAuthenticatedUsers")
_KEY = re.compile(r"projects/([^/]+)/locations/([^/]+)/keyRings/[^/]+/cryptoKeys/.+")


class GoogleLook:
    """One look at one bucket.

    Args:
        ask: Asks with a path behind the bucket's, what it is for people, and the permission.
        bucket: Its name.
    """

    def __init__(self, ask: Callable[[str, str, str], Answer], bucket: str) -> None:
        self._ask, self._name = ask, bucket

    def place(self, pin: HostPin) -> Observed:
        """Return where it is and whose it is."""
        layout = self._layout()
        if layout.kind is Kind.SILENT:
            return self._observed(pin, [layout.unknown("location")])
        return self._observed(pin, [_location(layout), _owner(self._bucket())])

    def all(self, pin: HostPin) -> Observed:
        """Return every fact; a store that does not even answer for the bucket is asked no more."""
        layout = self._layout()
        if layout.kind is Kind.SILENT:
            return self._observed(pin, [layout.unknown(name) for name in _ASKED])
        bucket = self._bucket()
        facts = [
            _location(layout),
            _owner(bucket),
            self._not_public(bucket),
            _replication(layout),
            _encryption(bucket),
        ]
        return self._observed(pin, facts)

    def public(self) -> Fact:
        """Return whether there is a sign that it is public."""
        return self._not_public(self._bucket())

    def _layout(self) -> Answer:
        return self._ask(
            "/storageLayout", "storage.buckets.getStorageLayout", "storage.objects.list"
        )

    def _bucket(self) -> Answer:
        return self._ask("", "storage.buckets.get", "storage.buckets.get")

    def _observed(self, pin: HostPin, facts: list[Fact]) -> Observed:
        target = f"gs://{self._name}"
        return Observed(target=target, provider="gcs", facts=(*pin.facts(), *facts))

    def _not_public(self, bucket: Answer) -> Fact:
        """Tell whether anybody can read it: not where that is prevented, else by who has a role."""
        settings = as_dict(bucket.reply.get("iamConfiguration"))
        if settings.get("publicAccessPrevention") == "enforced":
            return bucket.fact("not_public", _ALLOW, "public access prevention is enforced")
        if bucket.kind is Kind.SILENT:
            return bucket.unknown("not_public")
        who = self._ask("/iam", "storage.buckets.getIamPolicy", "storage.buckets.getIamPolicy")
        return worst("not_public", [_lists(bucket, settings), _members(who)])


def _location(layout: Answer) -> Fact:
    if layout.status == 404:  # noqa: PLR2004 - HTTP
        return layout.fact("location", _DENY, "no such bucket; it is never created here")
    name, kind = layout.reply.get("location"), layout.reply.get("locationType")
    if not isinstance(name, str) or not isinstance(kind, str):
        return layout.unknown("location")
    regions = as_dict(layout.reply.get("customPlacementConfig")).get("dataLocations")
    values = [name, *(regions if isinstance(regions, list) else ())]
    places = [f"gcs:{str(value)[:80].lower()}" for value in values]
    if kind == "region" or len(values) > 1:
        said = ", ".join(place.removeprefix("gcs:") for place in places)
        return layout.fact("location", _ALLOW, f"the store says {said}, a {kind[:40]}", *places)
    evidence = f"{name[:80]} is a {kind[:40]}, and the store does not say which regions it has"
    return layout.fact("location", _UNKNOWN, evidence, *places)


def _owner(bucket: Answer) -> Fact:
    number = bucket.reply.get("projectNumber")
    if not isinstance(number, str | int):
        return bucket.unknown("owner")
    text = f"the bucket belongs to project {number}"[:200]
    return bucket.fact("owner", _ALLOW, text, str(number)[:80])


def _replication(layout: Answer) -> Fact:
    if not isinstance(layout.reply.get("location"), str):
        return layout.unknown("replication")
    text = "the store copies a bucket within its location only; transfer jobs cannot be seen"
    return layout.fact("replication", _ALLOW, text)


def _encryption(bucket: Answer) -> Fact:
    if bucket.kind is not Kind.OK:
        return bucket.unknown("encryption")
    key = as_dict(bucket.reply.get("encryption")).get("defaultKmsKeyName")
    if key is None:
        return bucket.fact("encryption", _ALLOW, "no key of a customer", STORE_KEY)
    found = _KEY.fullmatch(str(key))
    if found is None:
        return bucket.fact("encryption", _UNKNOWN, f"key {str(key)[:100]} names no location")
    place = f"gcs:{found[2].lower()}/{found[1]}"
    return bucket.fact("encryption", _ALLOW, f"key {key}"[:300], place)


def _lists(bucket: Answer, settings: dict[str, Any]) -> Fact:
    """Tell whether objects can have access lists of their own, which no question about it shows."""
    if bucket.kind is not Kind.OK:
        return bucket.unknown("not_public")
    if as_dict(settings.get("uniformBucketLevelAccess")).get("enabled") is True:
        return bucket.fact("not_public", _ALLOW, "objects have no access lists of their own")
    text = (
        "objects may have access lists of their own: enforce public access prevention, or switch"
        " uniform bucket-level access on"
    )
    return bucket.fact("not_public", _UNKNOWN, text)


def _members(who: Answer) -> Fact:
    rows = who.reply.get("bindings", [])
    if who.kind is not Kind.OK or not isinstance(rows, list):
        return who.unknown("not_public")
    members: set[str] = set()
    for row in rows:
        listed = as_dict(row).get("members", [])
        if not isinstance(listed, list):
            return who.unknown("not_public")
        members |= {str(member) for member in listed}
    public = sorted(members & set(_ANYBODY))
    if public:
        return who.fact("not_public", _DENY, f"{' and '.join(public)} may use the bucket")
    return who.fact("not_public", _ALLOW, "no role is given to everybody")
