"""A residency policy as people write it: a dict, a TOML file, or the short form.

[[allow]]
provider = "aws"
regions = ["eu-central-1"]
owner = "123456789012"
"""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.errors import InvalidError
from dcp_tiered.format.columns import canonical_json
from dcp_tiered.format.residency import FACTS, is_r2, r2_endpoint
from dcp_tiered.policy.jurisdictions import JURISDICTIONS
from dcp_tiered.policy.residency import REQUIRED, Attestation, Policy, Rule

PARTITIONS = ("aws", "aws-cn", "aws-us-gov", "aws-eusc")
TTL_S_MAX = 3600.0
_VERSION = 1
_LOCATED = ("gcs", "azure")
"""Providers that call their regions locations."""
_TOP = ("version", "allow", "attestations", "ttl_s", "owner")
_KEYS = ("key_regions", "key_accounts", "require_kms")
_RULE_KEYS = {
    "aws": ("partition", "regions", "jurisdictions", "owner", *_KEYS),
    "s3compat": ("endpoint", "regions", "owner", *_KEYS),
    "r2": ("jurisdiction", "account"),
    "gcs": ("locations", "jurisdictions", "owner", "endpoint", *_KEYS),
    "azure": (
        *("locations", "jurisdictions", "owner", "account", "endpoint"),
        *("redundancy", "require_kms", "key_vaults"),
    ),
    "posix": ("site_id", "fstype", "source"),
}
_NEEDED = {
    "aws": ("regions", "owner"),
    "s3compat": ("endpoint",),
    "r2": ("jurisdiction", "account"),
    "gcs": ("locations", "owner"),
    "azure": ("locations", "owner"),
    "posix": ("site_id",),
}
_R2_JURISDICTIONS = ("eu", "fedramp")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{1,40}")
_R2_ACCOUNT = re.compile(r"[0-9a-f]{32}")
_OWNERS = {
    "aws": (re.compile(r"\d{12}"), "a text of 12 digits"),
    "gcs": (re.compile(r"\d{1,20}"), "a project number, as a text of digits"),
    "azure": (
        re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[a-z0-9_.()-]{1,90}"),
        "'SUBSCRIPTION/RESOURCE GROUP', the first an id",
    ),
}
"""By provider; that of AWS for all others."""
_KEY_OWNERS = _OWNERS | {
    "gcs": (re.compile(r"[a-z0-9][a-z0-9.:-]{0,60}"), "a project as names of keys have it"),
}
_AZURE_NAMES = {
    "account": (re.compile(r"[a-z0-9]{3,24}"), "a storage account's name"),
    "redundancy": (re.compile(r"[A-Za-z0-9]+_[A-Z]+"), "a redundancy such as Standard_ZRS"),
    "key_vaults": (re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+"), "a key vault's host name"),
}
_HINT = "docs/residency.md has the schema and examples."


def parse(given: Mapping[str, Any] | str) -> Policy:
    """Return the policy that a user wrote.

    Args:
        given: Plain data, or the text of a TOML file.

    Raises:
        InvalidError: It is not a policy; the message names the key, and the line of a file.
    """
    text = given if isinstance(given, str) else ""
    return _Parser(text).policy(_toml(text) if isinstance(given, str) else given)


def _toml(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise _wrong(f"not TOML: {exc}") from exc


def _wrong(what: str) -> InvalidError:
    return InvalidError(f"residency policy: {what}", None, None, _HINT)


class _Parser:
    """Checks one policy.

    Args:
        text: The file it is from, empty when there is none.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def policy(self, given: Mapping[str, Any]) -> Policy:
        """Return the policy."""
        if not isinstance(given, Mapping):
            raise _wrong(f"a mapping is needed, not a {type(given).__name__}")
        self._only(given, _TOP, "")
        if given.get("version", _VERSION) != _VERSION:
            raise self._bad("version", f"is not {_VERSION}")
        rows = self._list(given, "allow", "")
        if not rows:
            raise self._bad("allow", "is empty, so nothing would be allowed")
        owner = given.get("owner")
        if owner is not None and not any(isinstance(row, str) for row in rows):
            raise self._bad("owner", "belongs into each [[allow]]; it is for the short form")
        rules = tuple(self._rules(rows, owner))
        self._refuse_two_owners(rules)
        vouched = tuple(
            self._attestation(row, f"attestations[{n}]")
            for n, row in enumerate(self._list(given, "attestations", ""))
        )
        ttl_s = self._ttl(given)
        plain = _plain(rules, vouched, ttl_s)
        return Policy(
            allow=rules,
            attestations=vouched,
            ttl_s=ttl_s,
            sha256=hashlib.sha256(canonical_json(plain)).hexdigest(),
            plain=plain,
        )

    def _rules(self, rows: Sequence[Any], owner: object) -> Iterable[Rule]:
        short: dict[str, list[str]] = {}
        for n, row in enumerate(rows):
            where = f"allow[{n}]"
            if isinstance(row, str):
                partition, places = self._short(row, where)
                short.setdefault(partition, []).extend(places)
            elif isinstance(row, Mapping):
                yield self._rule(row, where, n)
            else:
                raise self._bad(where, "is neither a table nor text such as 'aws:eu-central-1'")
        for partition, places in short.items():
            if partition in PARTITIONS:
                row = {"provider": "aws", "partition": partition, "regions": places}
            else:
                row = {"provider": partition, "locations": places}
            yield self._rule(row if owner is None else row | {"owner": owner}, "allow", partition)

    def _short(self, text: str, where: str) -> tuple[str, Sequence[str]]:
        """Return partition, or provider, and regions of `aws:eu-central-1` or `aws:EU`."""
        partition, _, place = text.partition(":")
        if partition not in (known := (*PARTITIONS, *_LOCATED)):
            raise self._bad(where, f"{text!r} begins with none of {', '.join(known)}")
        if place in JURISDICTIONS:
            return partition, self._jurisdiction(place, partition, where)
        return partition, [place]

    def _rule(self, row: Mapping[str, Any], where: str, name: object) -> Rule:
        provider = row.get("provider")
        if provider not in REQUIRED:
            raise self._bad(f"{where}.provider", f"is not one of {', '.join(REQUIRED)}")
        self._only(row, ("id", "provider", *_RULE_KEYS[provider]), where)
        partition = row.get("partition", "aws")
        if partition not in PARTITIONS:
            raise self._bad(f"{where}.partition", f"is not one of {', '.join(PARTITIONS)}")
        regions = [*self._regions(row, "locations" if provider in _LOCATED else "regions", where)]
        for jurisdiction in self._texts(row, "jurisdictions", where):
            listed_as = provider if provider in _LOCATED else partition
            regions += self._jurisdiction(jurisdiction, listed_as, where)
        rule = Rule(
            id=self._text(row, "id", where) or f"{provider}-{name}",
            provider=provider,
            partition=partition,
            regions=tuple(sorted(set(regions))),
            owner=self._owner(row, _OWNERS, row.get("owner"), f"{where}.owner"),
            key_regions=tuple(self._regions(row, "key_regions", where)),
            key_accounts=tuple(
                str(self._owner(row, _KEY_OWNERS, account, f"{where}.key_accounts"))
                for account in self._texts(row, "key_accounts", where)
            ),
            require_kms=self._flag(row, "require_kms", where),
            endpoint=self._r2_host(row, where) if provider == "r2" else self._endpoint(row, where),
            jurisdiction=self._text(row, "jurisdiction", where),
            account=self._text(row, "account", where),
            site_id=self._text(row, "site_id", where),
            fstype=self._text(row, "fstype", where),
            source=self._text(row, "source", where),
            redundancy=tuple(self._texts(row, "redundancy", where)),
            key_vaults=tuple(self._texts(row, "key_vaults", where)),
        )
        self._complete(rule, where)
        if provider == "azure":
            self._check_azure(rule, where)
        return rule

    def _complete(self, rule: Rule, where: str) -> None:
        for key in _NEEDED[rule.provider]:
            if not getattr(rule, key):
                raise self._bad(f"{where}.{key}", "is missing")

    def _check_azure(self, rule: Rule, where: str) -> None:
        for key, (form, wanted) in _AZURE_NAMES.items():
            value = getattr(rule, key)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and not form.fullmatch(one):
                    raise self._bad(f"{where}.{key}", f"{one!r} is not {wanted}")

    def _refuse_two_owners(self, rules: Iterable[Rule]) -> None:
        """Refuse what no single request could be pinned to."""
        owners: dict[str, str | None] = {}
        for rule in rules:
            if rule.provider == "gcs":  # whose requests name no owner
                continue
            pinned = rule.places() if rule.provider == "aws" else {rule.endpoint or rule.id}
            if rule.provider == "azure":  # asked by the name of the account and its owner
                pinned = {f"account {rule.account or 'of any name'}"}
            for place in pinned:
                if owners.setdefault(place, rule.owner) != rule.owner:
                    raise self._bad("allow", f"gives {place} two owners")

    def _attestation(self, row: object, where: str) -> Attestation:
        if not isinstance(row, Mapping):
            raise self._bad(where, "is not a table")
        self._only(row, ("target", "fact", "by", "reason", "expires"), where)
        texts = {key: self._text(row, key, where) for key in ("target", "fact", "by", "reason")}
        for key, value in texts.items():
            if not value:
                raise self._bad(f"{where}.{key}", "is missing")
        if texts["fact"] not in FACTS:
            raise self._bad(f"{where}.fact", f"is not one of {', '.join(FACTS)}")
        return Attestation(
            target=str(texts["target"]),
            fact=str(texts["fact"]),
            by=str(texts["by"]),
            reason=str(texts["reason"]),
            expires=self._moment(row.get("expires"), f"{where}.expires"),
        )

    def _moment(self, value: object, where: str) -> datetime:
        """Return a date, at its first second in UTC, or a moment."""
        try:
            if isinstance(value, str):
                value = datetime.fromisoformat(value)
            if isinstance(value, date) and not isinstance(value, datetime):
                value = datetime(value.year, value.month, value.day, tzinfo=UTC)
            if isinstance(value, datetime):
                return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
        except (ValueError, OverflowError) as exc:
            raise self._bad(where, f"is not a date: {exc}") from exc
        raise self._bad(where, "is missing or not a date such as 2027-01-31")

    def _jurisdiction(self, name: str, partition: str, where: str) -> tuple[str, ...]:
        listed = JURISDICTIONS.get(name, {}).get(partition)
        if listed is None:
            raise self._bad(where, f"jurisdiction {name!r} has no list for {partition}")
        return listed

    def _ttl(self, given: Mapping[str, Any]) -> float:
        ttl_s = given.get("ttl_s", Policy.__dataclass_fields__["ttl_s"].default)
        is_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
        if not is_number or not 1 <= ttl_s <= TTL_S_MAX:
            raise self._bad("ttl_s", f"is not a number of seconds from 1 to {TTL_S_MAX:g}")
        return float(ttl_s)

    def _endpoint(self, row: Mapping[str, Any], where: str) -> str | None:
        text = self._text(row, "endpoint", where)
        if text is None:
            return None
        url = urlsplit(text)
        bare = not url.path.strip("/") and not url.query and "@" not in url.netloc
        if url.scheme not in ("http", "https") or not url.hostname or not bare:
            raise self._bad(
                f"{where}.endpoint", "is not of the form https://host or https://host:port"
            )
        endpoint = f"{url.scheme}://{url.netloc}"
        if is_r2(endpoint):
            raise self._bad(f"{where}.endpoint", "is one of R2, for which provider is 'r2'")
        return endpoint

    def _r2_host(self, row: Mapping[str, Any], where: str) -> str:
        """Return the endpoint of a rule's jurisdiction and account."""
        jurisdiction, account = row.get("jurisdiction"), row.get("account")
        if jurisdiction not in _R2_JURISDICTIONS:
            listed = ", ".join(_R2_JURISDICTIONS)
            raise self._bad(f"{where}.jurisdiction", f"is not one of {listed}")
        if not isinstance(account, str) or not _R2_ACCOUNT.fullmatch(account):
            raise self._bad(f"{where}.account", "is not a text of 32 hex digits")
        return r2_endpoint(account, jurisdiction)

    def _regions(self, row: Mapping[str, Any], key: str, where: str) -> list[str]:
        regions = [text.strip().lower() for text in self._texts(row, key, where)]
        if row["provider"] == "azure":
            regions = [text.replace(" ", "") for text in regions]  # `West Europe` for people
        for region in regions:
            if not _REGION.fullmatch(region):
                raise self._bad(
                    f"{where}.{key}", f"{region!r} is no region; a name is needed, no pattern"
                )
        return regions

    def _owner(
        self,
        row: Mapping[str, Any],
        forms: Mapping[str, tuple[re.Pattern[str], str]],
        value: object,
        where: str,
    ) -> str | None:
        if value is None:
            return None
        form, wanted = forms.get(row["provider"], forms["aws"])
        if row["provider"] == "azure" and isinstance(value, str):
            value = value.lower()  # Azure spells one group in several ways
        if not isinstance(value, str) or not form.fullmatch(value):
            raise self._bad(where, f"is not {wanted}")
        return value

    def _texts(self, row: Mapping[str, Any], key: str, where: str) -> list[str]:
        values = self._list(row, key, where)
        if not all(isinstance(value, str) for value in values):
            raise self._bad(f"{where}.{key}", "holds something else than text")
        return [str(value) for value in values]

    def _list(self, row: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
        value = row.get(key, [])
        if not isinstance(value, list | tuple):
            raise self._bad(f"{where}.{key}".lstrip("."), "is not a list")
        return value

    def _text(self, row: Mapping[str, Any], key: str, where: str) -> str | None:
        value = row.get(key)
        if value is None or (isinstance(value, str) and value and len(value) <= 300):  # noqa: PLR2004 - ample
            return value
        raise self._bad(f"{where}.{key}", "is not a text")

    def _flag(self, row: Mapping[str, Any], key: str, where: str) -> bool:
        value = row.get(key, False)
        if not isinstance(value, bool):
            raise self._bad(f"{where}.{key}", "is neither true nor false")
        return value

    def _only(self, row: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        for key in row:
            if key not in known:
                shown = f"{where}.{key}".lstrip(".")
                raise self._bad(shown, f"is not known; known are {', '.join(known)}")

    def _bad(self, where: str, what: str) -> InvalidError:
        return _wrong(f"{where} {what}{self._line(where)}")

    def _line(self, where: str) -> str:
        """Return in which line a key is, as far as a plain look at the text tells."""
        table, _, key = where.rpartition(".")
        name, _, index = (table or where).rstrip("]").partition("[")
        header = f"[[{name}]]"
        heads = [n for n, line in enumerate(self._lines) if line.strip() == header]
        begin = heads[int(index)] if index and int(index) < len(heads) else 0
        for n, line in enumerate(self._lines[begin:], begin):
            if re.match(rf"\s*{re.escape(key)}\s*=", line):
                return f", line {n + 1}"
            if n > begin and heads and line.lstrip().startswith("["):
                break
        return f", line {begin + 1}" if self._lines else ""


def _plain(rules: Iterable[Rule], vouched: Iterable[Attestation], ttl_s: float) -> dict[str, Any]:
    """Return a policy as plain data from which `parse` makes the same one."""
    return {
        "version": _VERSION,
        "allow": [_plain_rule(rule) for rule in rules],
        "attestations": [
            {
                "target": one.target,
                "fact": one.fact,
                "by": one.by,
                "reason": one.reason,
                "expires": one.expires.isoformat(),
            }
            for one in vouched
        ],
        "ttl_s": ttl_s,
    }


def _plain_rule(rule: Rule) -> dict[str, Any]:
    known = ("id", "provider", *_RULE_KEYS[rule.provider])
    values = {key: getattr(rule, key) for key in known if hasattr(rule, key)}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value not in (None, (), False)
    }
