"""Read what a store says of a bucket's settings; what has another shape says nothing."""

from collections.abc import Mapping
from typing import Any

from dcp_tiered.format.residency import STORE_KEY, Fact, Verdict, worst
from dcp_tiered.tiers.s3_asking import Answer, Kind

_ALLOW, _DENY, _UNKNOWN = Verdict.ALLOW, Verdict.DENY, Verdict.UNKNOWN
BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
_NO_BLOCK = "NoSuchPublicAccessBlockConfiguration"
_PUBLIC_GROUPS = ("/global/AllUsers", "/global/AuthenticatedUsers")
_LOG_GROUP = "/s3/LogDelivery"
_ARN_PARTS = 6
_CLIENT = "client settings"


def blocked(answer: Answer) -> set[str] | None:
    """Return which public accesses are blocked, None when that is not known."""
    if answer.code == _NO_BLOCK:
        return set()
    flags = answer.reply.get("PublicAccessBlockConfiguration")
    if answer.kind is not Kind.OK or not isinstance(flags, dict):
        return None
    return {name for name in BLOCKS if flags.get(name) is True}


def policy_status(answer: Answer) -> Fact:
    """Tell whether the bucket policy makes it public."""
    if answer.code == "NoSuchBucketPolicy":
        return answer.fact("not_public", _ALLOW, "there is no bucket policy")
    is_public = as_dict(answer.reply.get("PolicyStatus")).get("IsPublic")
    if answer.kind is not Kind.OK or not isinstance(is_public, bool):
        return answer.unknown("not_public")
    if is_public:
        return answer.fact("not_public", _DENY, "the bucket policy makes it public")
    return answer.fact("not_public", _ALLOW, "the bucket policy is not public")


def grants(answer: Answer) -> Fact:
    """Tell whether an access list is public."""
    rows = answer.reply.get("Grants")
    if answer.kind is not Kind.OK or not isinstance(rows, list):
        return answer.unknown("not_public")
    groups = [str(as_dict(row.get("Grantee")).get("URI") or "") for row in rows]
    groups = [group for group in groups if group and not group.endswith(_LOG_GROUP)]
    if not groups:
        return answer.fact("not_public", _ALLOW, "no access list names a group")
    verdict = _DENY if any(group.endswith(_PUBLIC_GROUPS) for group in groups) else _UNKNOWN
    return answer.fact("not_public", verdict, f"an access list names {groups[0][:100]}")


def is_about(rule: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether a replication rule may take objects below a prefix."""
    if rule.get("Status") == "Disabled":
        return False
    filters = as_dict(rule.get("Filter"))
    theirs = (
        rule.get("Prefix") or filters.get("Prefix") or as_dict(filters.get("And")).get("Prefix")
    )
    theirs = str(theirs or "")
    return theirs.startswith(prefix) or prefix.startswith(theirs)


def bucket_of(rule: Mapping[str, Any]) -> str | None:
    """Return the bucket that a replication rule copies to, None where it names none."""
    arn = str(as_dict(rule.get("Destination")).get("Bucket") or "")
    return arn.rpartition(":")[2] or None if arn.startswith("arn:") else None


def replica_key(rule: Mapping[str, Any]) -> str | None:
    """Return place and account of the key that replicas get, empty for none, None if unknown."""
    said = as_dict(as_dict(rule.get("Destination")).get("EncryptionConfiguration"))
    key = str(said.get("ReplicaKmsKeyID") or "")
    return _place_of_key(key) if key else ""


def encryption(answer: Answer) -> Fact:
    """Tell whose key objects are stored under, and where that lies."""
    if answer.code == "ServerSideEncryptionConfigurationNotFoundError":
        return answer.fact("encryption", _ALLOW, "no key of a customer", STORE_KEY)
    if answer.kind is not Kind.OK:
        return answer.unknown("encryption")
    rules = as_dict(answer.reply.get("ServerSideEncryptionConfiguration")).get("Rules")
    found = [_key(answer, as_dict(rule)) for rule in rules or ()]
    return worst("encryption", found) if found else answer.unknown("encryption")


def requested_encryption(sent: Mapping[str, Any]) -> Fact | None:
    """Tell the same of what every put asks for, None where it leaves that to the bucket.

    Args:
        sent: Parameters of the user's that go along with a put.
    """
    if "SSECustomerAlgorithm" in sent:
        evidence = "a key that goes along with every request (SSE-C); where it is kept is not known"
        return Fact(name="encryption", verdict=_UNKNOWN, evidence=evidence, call=_CLIENT)
    algorithm, key = sent.get("ServerSideEncryption"), str(sent.get("SSEKMSKeyId") or "")
    return None if algorithm is None else _encrypted(algorithm, key, _CLIENT)


def _key(answer: Answer, rule: Mapping[str, Any]) -> Fact:
    default = as_dict(rule.get("ApplyServerSideEncryptionByDefault"))
    key = str(default.get("KMSMasterKeyID") or "")
    return _encrypted(default.get("SSEAlgorithm"), key, answer.call)


def _encrypted(algorithm: Any, key: str, call: str) -> Fact:
    """Tell where the key lies that objects are encrypted with."""

    def fact(verdict: Verdict, evidence: str, *values: str) -> Fact:
        return Fact(name="encryption", verdict=verdict, evidence=evidence, values=values, call=call)

    if algorithm == "AES256":
        return fact(_ALLOW, "SSE-S3", STORE_KEY)
    if algorithm not in ("aws:kms", "aws:kms:dsse"):
        return fact(_UNKNOWN, f"algorithm is {str(algorithm)[:40]}")
    if not key:
        # The key of AWS for S3 in the account and region of the bucket.
        return fact(_ALLOW, f"{algorithm}, key of AWS", STORE_KEY)
    if key.rpartition("/")[2].startswith("mrk-"):
        return fact(_DENY, "the key is replicated to other regions")
    place = _place_of_key(key)
    if place is None:
        return fact(_UNKNOWN, f"key {key[:100]} names no region and account")
    if ":alias/" in key:
        return fact(_UNKNOWN, f"{key[:100]} is an alias, which may stand for any key", place)
    return fact(_ALLOW, f"key {key}", place)


def _place_of_key(key: str) -> str | None:
    parts = key.split(":")
    is_named = len(parts) >= _ARN_PARTS and parts[2] == "kms"
    return f"{parts[1]}:{parts[3]}/{parts[4]}" if is_named else None


def as_dict(value: Any) -> dict[str, Any]:
    """Return a part of a reply; an empty one for what has another shape."""
    return value if isinstance(value, dict) else {}
