"""Facts about a bucket: where it is, whose it is, who can read it, and where copies of it go.

What a store does not answer is unknown. A compatible store may contradict what is attested about
it, but where it says it is proves nothing: that is a word in its configuration.
"""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.format.residency import STORE_KEY, Fact, Observed, Verdict, worst
from dcp_tiered.tiers.s3_asking import Answer, Asker, Kind
from dcp_tiered.tiers.s3_pins import Pin, is_loopback
from dcp_tiered.tiers.s3_requests import S3Requests

_ALLOW, _DENY, _UNKNOWN = Verdict.ALLOW, Verdict.DENY, Verdict.UNKNOWN
_BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
_NO_BLOCK = "NoSuchPublicAccessBlockConfiguration"
_PUBLIC_GROUPS = ("/global/AllUsers", "/global/AuthenticatedUsers")
_LOG_GROUP = "/s3/LogDelivery"
_ACL_OWNERSHIPS = ("BucketOwnerPreferred", "ObjectWriter")
_REPLICA_HOPS_MAX = 3
_ARN_PARTS = 6
_ASKED = ("location", "owner", "not_public", "replication", "encryption")


def observe(requests: S3Requests, pin: Pin, prefix: str) -> Observed:
    """Look at a bucket, with some ten requests.

    Args:
        requests: Of the run.
        pin: Where its requests may go.
        prefix: Of the run's objects; replication of others is none of our business.
    """
    asker = Asker(requests)
    try:
        return _Look(asker, requests.bucket, pin, prefix).all()
    finally:
        asker.close()


class _Look:
    """One look at one bucket."""

    def __init__(self, asker: Asker, bucket: str, pin: Pin, prefix: str) -> None:
        self._asker, self._bucket, self._pin, self._prefix = asker, bucket, pin, prefix
        self._is_aws = pin.endpoint is None

    def all(self) -> Observed:
        """Return every fact; after the first silence nothing more is asked."""
        facts = [self._endpoint(), self._tls()]
        is_ours = facts[0].verdict is not _DENY
        head = self._ask("head_bucket", "") if is_ours else None
        asked: dict[str, Callable[[], Fact | None]] = {}
        if head is not None and head.kind is not Kind.SILENT:
            asked = {
                "location": lambda: self._location(head),
                "owner": lambda: self._owner(head),
                "not_public": self._not_public,
                "replication": self._replication,
                "encryption": self._encryption,
            }
            if self._is_aws:
                facts[0] = worst("endpoint", [facts[0], self._acceleration()])
        for name in _ASKED:
            if name in asked:
                facts += [fact for fact in [asked[name]()] if fact is not None]
            elif head is not None:
                facts.append(head.unknown(name))
            else:
                facts.append(Fact(name=name, verdict=_UNKNOWN, evidence="not asked"))
        target = f"s3://{self._bucket}" if self._is_aws else f"{self._pin.endpoint}/{self._bucket}"
        provider = "aws" if self._is_aws else "s3compat"
        return Observed(target=target, provider=provider, facts=tuple(facts))

    def _ask(self, operation: str, permission: str, **arguments: Any) -> Answer:
        return self._asker.ask(operation, permission, **({"Bucket": self._bucket} | arguments))

    def _place(self, region: str) -> str:
        return f"{self._pin.partition if self._is_aws else 's3compat'}:{region}"

    def _endpoint(self) -> Fact:
        """Tell where this client sends its requests to, without sending one."""
        meta = self._asker.client().meta
        url, region = meta.endpoint_url, meta.region_name or ""
        why_not = self._pin.why_not(url, region, self._bucket)
        value = self._place(region) if self._is_aws and why_not is None else _bare(url)
        return Fact(
            name="endpoint",
            verdict=_ALLOW if why_not is None else _DENY,
            evidence=why_not or f"requests go to {_bare(url)}, signed for {region}",
            values=(value,),
            call="client settings",
        )

    def _tls(self) -> Fact:
        url = urlsplit(self._asker.client().meta.endpoint_url)
        safe = url.scheme == "https" or is_loopback(url.hostname or "")
        evidence = url.scheme if url.scheme == "https" else f"{url.scheme} to {url.hostname}"
        return Fact(name="tls", verdict=_ALLOW if safe else _DENY, evidence=evidence)

    def _acceleration(self) -> Fact:
        answer = self._ask("get_bucket_accelerate_configuration", "s3:GetAccelerateConfiguration")
        if answer.kind is not Kind.OK:
            return answer.unknown("endpoint")
        status = answer.reply.get("Status")
        if status in (None, "Suspended"):
            return answer.fact("endpoint", _ALLOW, "no transfer acceleration")
        verdict = _DENY if status == "Enabled" else _UNKNOWN
        return answer.fact("endpoint", verdict, f"transfer acceleration is {str(status)[:40]}")

    def _location(self, head: Answer) -> Fact:
        if head.status == 404:  # noqa: PLR2004 - HTTP
            return head.fact("location", _DENY, "no such bucket; it is never created here")
        if head.region is None:
            return head.unknown("location")
        value = self._place(head.region)
        if self._is_aws:
            return head.fact("location", _ALLOW, f"the store says {head.region}", value)
        evidence = f"a compatible store says {head.region}, which only its operator can know"
        return head.fact("location", _UNKNOWN, evidence, value)

    def _owner(self, head: Answer) -> Fact | None:
        owner = self._pin.owner
        if owner is None:
            return None
        answer = self._ask("head_bucket", "s3:ListBucket", ExpectedBucketOwner=owner)
        if answer.kind is Kind.OK:
            if self._is_aws:
                return answer.fact("owner", _ALLOW, f"the bucket belongs to {owner}", owner)
            return answer.fact("owner", _UNKNOWN, "compatible stores may ignore the question")
        if answer.kind is Kind.DENIED and head.kind is Kind.OK:
            return answer.fact("owner", _DENY, f"the bucket does not belong to {owner}")
        return answer.unknown("owner")

    def _not_public(self) -> Fact:
        status = self._ask("get_bucket_policy_status", "s3:GetBucketPolicyStatus")
        return worst("not_public", [self._blocks(), _policy_status(status), self._acl()])

    def _blocks(self) -> Fact:
        """Tell whether public access is blocked: by the account or by the bucket."""
        answer = self._ask("get_public_access_block", "s3:GetBucketPublicAccessBlock")
        own = _blocked(answer)
        if own is None:
            return answer.unknown("not_public")
        if own == set(_BLOCKS):
            return answer.fact("not_public", _ALLOW, "the bucket blocks public access")
        if self._is_aws and self._pin.owner is not None:
            answer = self._asker.ask(
                "get_public_access_block",
                "s3:GetAccountPublicAccessBlock",
                "s3control",
                AccountId=self._pin.owner,
            )
            more = _blocked(answer)
            if more is None:
                return answer.unknown("not_public")
            own |= more
        missing = [name for name in _BLOCKS if name not in own]
        if not missing:
            return answer.fact("not_public", _ALLOW, "account and bucket block public access")
        return answer.fact("not_public", _DENY, f"public access is not blocked: {missing}")

    def _acl(self) -> Fact:
        """Tell whether access lists make it public, or that there are none."""
        answer = self._ask("get_bucket_ownership_controls", "s3:GetBucketOwnershipControls")
        ownership = "ObjectWriter"
        if answer.kind is Kind.OK:
            controls = _dict(answer.reply.get("OwnershipControls")).get("Rules")
            ownership = _dict((controls or [None])[0]).get("ObjectOwnership", "")
        elif answer.code != "OwnershipControlsNotFoundError":
            return answer.unknown("not_public")
        if ownership == "BucketOwnerEnforced":
            return answer.fact("not_public", _ALLOW, "access lists are off")
        if ownership not in _ACL_OWNERSHIPS:
            return answer.fact("not_public", _UNKNOWN, f"ownership is {str(ownership)[:40]!r}")
        return _grants(self._ask("get_bucket_acl", "s3:GetBucketAcl"))

    def _replication(self) -> Fact:
        """Follow replication from bucket to bucket."""
        facts, todo, seen = [], [(self._bucket, self._prefix)], {self._bucket}
        for _ in range(_REPLICA_HOPS_MAX):
            following = []
            for bucket, prefix in todo:
                fact, targets = self._replicas(bucket, prefix)
                facts.append(fact)
                for target in sorted(targets - seen):
                    seen.add(target)
                    facts.append(self._replica(target))
                    following.append((target, ""))
            todo = following
        if todo:
            evidence = f"replication goes on after {_REPLICA_HOPS_MAX} buckets"
            facts.append(Fact(name="replication", verdict=_UNKNOWN, evidence=evidence))
        return worst("replication", facts)

    def _replicas(self, bucket: str, prefix: str) -> tuple[Fact, set[str]]:
        """Return what a bucket says of its replication, and the buckets that it names."""
        answer = self._ask(
            "get_bucket_replication", "s3:GetReplicationConfiguration", Bucket=bucket
        )
        if answer.code == "ReplicationConfigurationNotFoundError":
            return answer.fact("replication", _ALLOW, f"{bucket} is not replicated"), set()
        if answer.kind is not Kind.OK:
            return answer.unknown("replication"), set()
        rules = _dict(answer.reply.get("ReplicationConfiguration")).get("Rules")
        if not isinstance(rules, list):
            return answer.unknown("replication"), set()
        ours = [rule for rule in rules if _is_about(rule, prefix)]
        targets = {name for rule in ours if (name := _bucket_of(rule)) is not None}
        if any(_bucket_of(rule) is None or rule.get("Status") != "Enabled" for rule in ours):
            text = f"a replication rule of {bucket} is not understood"
            return answer.fact("replication", _UNKNOWN, text), targets
        text = f"{bucket} is replicated to {', '.join(sorted(targets)) or 'nowhere'}"
        return answer.fact("replication", _ALLOW, text), targets

    def _replica(self, bucket: str) -> Fact:
        answer = self._ask("head_bucket", "s3:ListBucket", Bucket=bucket)
        if answer.region is None:
            return answer.unknown("replication")
        text = f"{bucket} is in {answer.region}"
        return answer.fact("replication", _ALLOW, text, self._place(answer.region))

    def _encryption(self) -> Fact:
        answer = self._ask("get_bucket_encryption", "s3:GetEncryptionConfiguration")
        if answer.code == "ServerSideEncryptionConfigurationNotFoundError":
            return answer.fact("encryption", _ALLOW, "no key of a customer", STORE_KEY)
        if answer.kind is not Kind.OK:
            return answer.unknown("encryption")
        rules = _dict(answer.reply.get("ServerSideEncryptionConfiguration")).get("Rules")
        found = [self._key(answer, _dict(rule)) for rule in rules or ()]
        return worst("encryption", found) if found else answer.unknown("encryption")

    def _key(self, answer: Answer, rule: Mapping[str, Any]) -> Fact:
        default = _dict(rule.get("ApplyServerSideEncryptionByDefault"))
        algorithm, key = default.get("SSEAlgorithm"), str(default.get("KMSMasterKeyID") or "")
        if algorithm == "AES256":
            return answer.fact("encryption", _ALLOW, "SSE-S3", STORE_KEY)
        if algorithm not in ("aws:kms", "aws:kms:dsse"):
            return answer.fact("encryption", _UNKNOWN, f"algorithm is {str(algorithm)[:40]}")
        if not key:
            # The key of AWS for S3 in the account and region of the bucket.
            return answer.fact("encryption", _ALLOW, f"{algorithm}, key of AWS", STORE_KEY)
        parts = key.split(":")
        if len(parts) < _ARN_PARTS or parts[2] != "kms":
            return answer.fact("encryption", _UNKNOWN, f"key {key[:100]} names no region")
        if "/mrk-" in key:
            return answer.fact("encryption", _DENY, "the key is replicated to other regions")
        return answer.fact("encryption", _ALLOW, f"key {key}", f"{parts[1]}:{parts[3]}/{parts[4]}")


def _blocked(answer: Answer) -> set[str] | None:
    """Return which public accesses are blocked, None when that is not known."""
    if answer.code == _NO_BLOCK:
        return set()
    flags = answer.reply.get("PublicAccessBlockConfiguration")
    if answer.kind is not Kind.OK or not isinstance(flags, dict):
        return None
    return {name for name in _BLOCKS if flags.get(name) is True}


def _policy_status(answer: Answer) -> Fact:
    if answer.code == "NoSuchBucketPolicy":
        return answer.fact("not_public", _ALLOW, "there is no bucket policy")
    is_public = _dict(answer.reply.get("PolicyStatus")).get("IsPublic")
    if answer.kind is not Kind.OK or not isinstance(is_public, bool):
        return answer.unknown("not_public")
    if is_public:
        return answer.fact("not_public", _DENY, "the bucket policy makes it public")
    return answer.fact("not_public", _ALLOW, "the bucket policy is not public")


def _grants(answer: Answer) -> Fact:
    """Tell whether an access list is public."""
    grants = answer.reply.get("Grants")
    if answer.kind is not Kind.OK or not isinstance(grants, list):
        return answer.unknown("not_public")
    groups = [str(_dict(grant.get("Grantee")).get("URI") or "") for grant in grants]
    groups = [group for group in groups if group and not group.endswith(_LOG_GROUP)]
    if not groups:
        return answer.fact("not_public", _ALLOW, "no access list names a group")
    verdict = _DENY if any(group.endswith(_PUBLIC_GROUPS) for group in groups) else _UNKNOWN
    return answer.fact("not_public", verdict, f"an access list names {groups[0][:100]}")


def _is_about(rule: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether a replication rule may take objects below a prefix."""
    if rule.get("Status") == "Disabled":
        return False
    filters = _dict(rule.get("Filter"))
    theirs = rule.get("Prefix") or filters.get("Prefix") or _dict(filters.get("And")).get("Prefix")
    theirs = str(theirs or "")
    return theirs.startswith(prefix) or prefix.startswith(theirs)


def _bucket_of(rule: Mapping[str, Any]) -> str | None:
    arn = str(_dict(rule.get("Destination")).get("Bucket") or "")
    return arn.rpartition(":")[2] or None if arn.startswith("arn:") else None


def _bare(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _dict(value: Any) -> dict[str, Any]:
    """Return a part of a reply; an empty one for what has another shape."""
    return value if isinstance(value, dict) else {}
