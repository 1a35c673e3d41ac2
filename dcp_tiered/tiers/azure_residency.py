"""Facts about a storage account of Azure, as Azure Resource Manager tells them.

The account is where the bytes are; a container in it adds nothing but its name. Who has a key of
the account and nothing else learns nothing here, and then nothing is known.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.format.residency import (
    REDUNDANCY,
    STORE_KEY,
    VAULT,
    Fact,
    Observed,
    Verdict,
    worst,
)
from dcp_tiered.tiers.azure_management import Management
from dcp_tiered.tiers.host_pins import HostPin
from dcp_tiered.tiers.s3_asking import Answer, Kind
from dcp_tiered.tiers.s3_replies import as_dict

_ALLOW, _DENY, _UNKNOWN = Verdict.ALLOW, Verdict.DENY, Verdict.UNKNOWN
_READ = "Microsoft.Storage/storageAccounts/read"
_READ_REPLICAS = "Microsoft.Storage/storageAccounts/objectReplicationPolicies/read"
_ASKED = ("location", "owner", "not_public", "replication", "encryption")
_ID = re.compile(
    r"/subscriptions/([^/]+)/resourcegroups/([^/]+)/providers/microsoft\.storage/storageaccounts"
    r"/([a-z0-9]{3,24})"
)
"""Of a storage account, in small letters."""
_IN_ONE_PLACE = tuple(
    f"{kind}_{copies}"
    for kind in ("Standard", "StandardV2", "Premium", "PremiumV2")
    for copies in ("LRS", "ZRS")
)
"""Redundancies that keep all copies in one region; what is not listed may not."""
_TLS = ("TLS1_2", "TLS1_3")
_REPLICA_HOPS_MAX = 3


class AzureLook:
    """One look at one storage account.

    Args:
        management: Whom to ask.
        account: Its name.
        container: Of the run.
        pin: Where its requests go, and whose it has to be.
    """

    def __init__(self, management: Management, account: str, container: str, pin: HostPin) -> None:
        self._management, self._pin = management, pin
        self._account, self._container = account, container

    def place(self) -> Observed:
        """Return where it is and whose it is."""
        said = self._about(_id(self._pin.owner, self._account))
        return self._observed(said, [_location(said), _owner(said)])

    def all(self) -> Observed:
        """Return every fact; a service that does not answer for the account is asked no more."""
        said = self._about(_id(self._pin.owner, self._account))
        if said.kind is Kind.SILENT:
            return self._observed(said, [said.unknown(name) for name in _ASKED])
        facts = [
            _location(said),
            _owner(said),
            _not_public(said),
            worst("replication", [_copies(said), *self._replicas(said)]),
            _encryption(said),
        ]
        return self._observed(said, facts)

    def _about(self, account: str) -> Answer:
        return self._management.ask(account, "storageAccounts.get", _READ)

    def _observed(self, said: Answer, facts: list[Fact]) -> Observed:
        endpoint, tls = self._pin.facts()
        return Observed(
            target=f"az://{self._account}/{self._container}",
            provider="azure",
            facts=(endpoint, worst("tls", [tls, _encrypted_only(said)]), *facts),
        )

    def _replicas(self, said: Answer) -> list[Fact]:
        """Follow object replication from account to account."""
        facts: list[Fact] = []
        if said.kind is not Kind.OK:  # which `_copies` says
            return facts
        mine = _id(self._pin.owner, self._account)
        todo, seen, container = [mine], {mine}, self._container
        for _ in range(_REPLICA_HOPS_MAX):
            following = []
            for source in todo:
                fact, targets = self._policies(source, container)
                facts.append(fact)
                following += sorted(targets - seen)
                seen |= targets
            facts += [_replica(target, self._about(target)) for target in following]
            todo, container = following, ""
        if todo:
            evidence = f"replication goes on after {_REPLICA_HOPS_MAX} accounts"
            facts.append(Fact(name="replication", verdict=_UNKNOWN, evidence=evidence))
        return facts

    def _policies(self, source: str, container: str) -> tuple[Fact, set[str]]:
        """Return what is said of an account's object replication, and the accounts it goes to."""
        answer = self._management.ask(
            f"{source}/objectReplicationPolicies", "objectReplicationPolicies.list", _READ_REPLICAS
        )
        rows = answer.reply.get("value")
        if answer.kind is not Kind.OK or not isinstance(rows, list) or answer.reply.get("nextLink"):
            return answer.unknown("replication"), set()
        ours = [row for row in map(_properties, rows) if _is_about(row, source, container)]
        named = [_account_id(row.get("destinationAccount")) for row in ours]
        targets = {name for name in named if name is not None}
        if None in named:
            text = "an object replication policy does not say in full where to"
            return answer.fact("replication", _UNKNOWN, text), targets
        text = f"objects are copied to {', '.join(sorted(targets)) or 'no other account'}"
        return answer.fact("replication", _ALLOW, text[:300]), targets


def _id(owner: str, account: str) -> str:
    """Return the id of a storage account, in small letters as all of them here."""
    subscription, _, group = owner.partition("/")
    return (
        f"/subscriptions/{subscription}/resourcegroups/{group}/providers/microsoft.storage"
        f"/storageaccounts/{account}"
    ).lower()


def _account_id(value: object) -> str | None:
    """Return the id of an account, None for a name without the rest."""
    found = str(value or "").lower().rstrip("/")
    return found if _ID.fullmatch(found) else None


def _owner_of(account_id: str) -> str:
    found = _ID.fullmatch(account_id)
    return f"{found[1]}/{found[2]}" if found else ""


def _properties(value: object) -> dict[str, Any]:
    return as_dict(as_dict(value).get("properties"))


def _is_about(row: Mapping[str, Any], source: str, container: str) -> bool:
    """Tell whether a replication policy may take objects of a container, empty for any."""
    theirs = str(row.get("sourceAccount") or "").lower().rstrip("/")
    if theirs not in (source, source.rpartition("/")[2]):
        return False  # it is where this policy's objects arrive
    rules = row.get("rules")
    if not container or not isinstance(rules, list) or not rules:
        return True
    return any(as_dict(rule).get("sourceContainer") in (None, container) for rule in rules)


def _place(value: object) -> str:
    return f"azure:{str(value)[:80].replace(' ', '').lower()}"


def _location(said: Answer) -> Fact:
    if said.status == 404:  # noqa: PLR2004 - HTTP
        return said.fact("location", _DENY, "no such storage account in that resource group")
    about = _properties(said.reply)
    name = about.get("primaryLocation") or said.reply.get("location")
    if not isinstance(name, str):
        return said.unknown("location")
    if about.get("failoverInProgress") is True:
        text = f"a failover away from {name[:80]} is going on"
        return said.fact("location", _UNKNOWN, text, _place(name))
    text = f"its primary location is {name[:80]}"
    if since := about.get("lastGeoFailoverTime"):
        text += f", since a failover at {str(since)[:40]}"
    return said.fact("location", _ALLOW, text, _place(name))


def _owner(said: Answer) -> Fact:
    owner = _owner_of(str(said.reply.get("id", "")).lower())
    if not owner:
        return said.unknown("owner")
    return said.fact("owner", _ALLOW, f"the account belongs to {owner}", owner)


def _not_public(said: Answer) -> Fact:
    is_open = _properties(said.reply).get("allowBlobPublicAccess")
    if is_open is False:
        return said.fact("not_public", _ALLOW, "the account allows no anonymous access")
    if is_open is True:
        text = "the account lets its containers be opened to everybody"
        return said.fact("not_public", _DENY, text)
    if said.kind is not Kind.OK:
        return said.unknown("not_public")
    text = "allowBlobPublicAccess is not set, and its default is not the same everywhere"
    return said.fact("not_public", _UNKNOWN, text)


def _copies(said: Answer) -> Fact:
    """Tell in how many places the service keeps an account by itself."""
    if said.kind is not Kind.OK:
        return said.unknown("replication")
    kind = str(as_dict(said.reply.get("sku")).get("name", ""))[:80]
    second = _properties(said.reply).get("secondaryLocation")
    values = [f"{REDUNDANCY}{kind}"]
    if second:
        owner = _owner_of(str(said.reply.get("id", "")).lower())
        values.append(f"{_place(second)}/{owner}")
        text = f"{kind} copies everything to {str(second)[:80]}"
        return said.fact("replication", _ALLOW, text, *values)
    if kind in _IN_ONE_PLACE:
        return said.fact("replication", _ALLOW, f"{kind} keeps all copies in one place", *values)
    text = f"redundancy {kind!r} is not known, and no second place is named"
    return said.fact("replication", _UNKNOWN, text, *values)


def _replica(target: str, said: Answer) -> Fact:
    """Tell where an account that objects are copied to is, and whose, and where its copies are."""
    location = _location(said)
    if location.verdict is not _ALLOW:
        return replace(location, name="replication", values=())
    places = [f"{place}/{_owner_of(target)}" for place in location.values]
    copies = _copies(said)
    values = [*places, *(v for v in copies.values if not v.startswith(REDUNDANCY))]
    name = target.rpartition("/")[2]
    text = f"{name}: {location.evidence}; {copies.evidence}"
    return said.fact("replication", copies.verdict, text, *values)


def _encryption(said: Answer) -> Fact:
    settings = as_dict(_properties(said.reply).get("encryption"))
    source = settings.get("keySource")
    if source == "Microsoft.Storage":
        return said.fact("encryption", _ALLOW, "no key of a customer", STORE_KEY)
    vault = as_dict(settings.get("keyvaultproperties")).get("keyvaulturi")
    host = urlsplit(str(vault or "")).hostname
    if source == "Microsoft.Keyvault" and host:
        text = f"a key in vault {host}, of which Resource Manager says no place"
        return said.fact("encryption", _ALLOW, text[:300], f"{VAULT}{host}")
    return said.unknown("encryption")


def _encrypted_only(said: Answer) -> Fact:
    """Tell whether the account refuses whoever talks to it in the open."""
    about = _properties(said.reply)
    version = str(about.get("minimumTlsVersion", ""))
    if about.get("supportsHttpsTrafficOnly") is False:
        return said.fact("tls", _DENY, "the account answers plain http too")
    if about.get("supportsHttpsTrafficOnly") is not True or not version:
        return said.unknown("tls")
    verdict = _ALLOW if version in _TLS else _DENY
    return said.fact("tls", verdict, f"the account wants {version[:20]} at least")
