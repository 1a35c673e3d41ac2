"""Facts about a bucket: where it is, whose it is, who can read it, and where copies of it go.

What a store does not answer is unknown. A compatible store may contradict what is attested about
it, but where it says it is proves nothing: that is a word in its configuration.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from dcp_tiered.format.residency import REPLICA_KEY, Fact, Observed, Verdict, worst
from dcp_tiered.tiers.s3_asking import ANYBODY, Answer, Asker, Kind
from dcp_tiered.tiers.s3_pins import Pin, is_loopback
from dcp_tiered.tiers.s3_replies import (
    BLOCKS,
    as_dict,
    blocked,
    bucket_of,
    encryption,
    grants,
    is_about,
    policy_status,
    replica_key,
    requested_encryption,
)
from dcp_tiered.tiers.s3_requests import S3Requests

_ALLOW, _DENY, _UNKNOWN = Verdict.ALLOW, Verdict.DENY, Verdict.UNKNOWN
_ACL_OWNERSHIPS = ("BucketOwnerPreferred", "ObjectWriter")
_REPLICA_HOPS_MAX = 3
_ASKED = ("location", "owner", "not_public", "replication", "encryption")


def observe(requests: S3Requests, pin: Pin, prefix: str) -> Observed:
    """Look at a bucket, with some ten requests.

    Args:
        requests: Of the run.
        pin: Where its requests may go.
        prefix: Of the run's objects; replication of others is none of our business.
    """
    with closing(Asker(requests)) as asker:
        sent = requests.parameters.of("put_object")
        return _Look(asker, requests.bucket, pin, prefix, sent).all()


def observe_place(requests: S3Requests, pin: Pin) -> Observed:
    """Look where a bucket is and whose it is, with two requests.

    Args:
        requests: Of the run.
        pin: Where its requests may go.
    """
    with closing(Asker(requests)) as asker:
        return _Look(asker, requests.bucket, pin, "", {}).place()


def look_public(requests: S3Requests, prefix: str) -> Fact:
    """Look for signs that a bucket is public, with three requests; none of them proves that not.

    Args:
        requests: Of the run; they need no pin.
        prefix: Of the run's objects.
    """
    bucket = requests.bucket
    with closing(Asker(requests)) as asker:
        answer = asker.ask("get_bucket_policy_status", "s3:GetBucketPolicyStatus", Bucket=bucket)
        if answer.kind is Kind.SILENT:
            return answer.unknown("not_public")
        facts = [policy_status(answer)]
        facts.append(grants(asker.ask("get_bucket_acl", "s3:GetBucketAcl", Bucket=bucket)))
        listed = asker.ask("list_objects_v2", "", ANYBODY, Bucket=bucket, Prefix=prefix, MaxKeys=1)
        if listed.kind is Kind.OK:
            facts.append(listed.fact("not_public", _DENY, "anybody can list it, without a key"))
        return worst("not_public", facts)


class _Look:
    """One look at one bucket."""

    def __init__(
        self, asker: Asker, bucket: str, pin: Pin, prefix: str, sent: Mapping[str, Any]
    ) -> None:
        self._asker, self._bucket, self._pin, self._prefix = asker, bucket, pin, prefix
        self._sent = sent
        self._is_aws = pin.provider == "aws"

    def place(self) -> Observed:
        """Return where it is and whose it is."""
        endpoint = self._endpoint()
        if endpoint.verdict is _DENY:
            return self._observed([endpoint, self._tls()])
        head = self._ask("head_bucket", "")
        owner = None if head.kind is Kind.SILENT else self._owner(head)
        facts = [endpoint, self._tls(), self._location(head), *([] if owner is None else [owner])]
        return self._observed(facts)

    def all(self) -> Observed:
        """Return every fact; a store that does not even answer for the bucket is asked no more."""
        endpoint = self._endpoint()
        if endpoint.verdict is _DENY:
            rest = [Fact(name=name, verdict=_UNKNOWN, evidence="not asked") for name in _ASKED]
        else:
            head = self._ask("head_bucket", "")
            if head.kind is Kind.SILENT:
                rest = [head.unknown(name) for name in _ASKED]
            else:
                rest = self._settings(head)
                if self._is_aws:
                    endpoint = worst("endpoint", [endpoint, self._acceleration()])
        return self._observed([endpoint, self._tls(), *rest])

    def _observed(self, facts: list[Fact]) -> Observed:
        target = f"s3://{self._bucket}" if self._is_aws else f"{self._pin.endpoint}/{self._bucket}"
        return Observed(target=target, provider=self._pin.provider, facts=tuple(facts))

    def _settings(self, head: Answer) -> list[Fact]:
        """Return what the bucket is and is set to."""
        owner = self._owner(head)
        return [
            self._location(head),
            *([] if owner is None else [owner]),
            self._not_public(),
            self._replication(),
            self._encryption(),
        ]

    def _encryption(self) -> Fact:
        """Tell whose key objects get: the one that is asked for with each, else the bucket's."""
        asked_for = requested_encryption(self._sent)
        if asked_for is not None:
            return asked_for
        return encryption(self._ask("get_bucket_encryption", "s3:GetEncryptionConfiguration"))

    def _ask(self, operation: str, permission: str, **arguments: Any) -> Answer:
        return self._asker.ask(operation, permission, **({"Bucket": self._bucket} | arguments))

    def _place(self, region: str) -> str:
        return f"{self._pin.partition if self._is_aws else self._pin.provider}:{region}"

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
        if self._pin.jurisdiction is not None and head.kind is Kind.OK:
            # Its region says "auto"; buckets of a jurisdiction answer at no other host.
            text = f"it answers at the host of jurisdiction {self._pin.jurisdiction}"
            return head.fact("location", _ALLOW, text, self._place(self._pin.jurisdiction))
        if head.region is None:
            if head.kind is Kind.OK:
                return head.fact("location", _UNKNOWN, "the store names no region")
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
        return worst("not_public", [self._blocks(), policy_status(status), self._acl()])

    def _blocks(self) -> Fact:
        """Tell whether public access is blocked: by the account or by the bucket."""
        answer = self._ask("get_public_access_block", "s3:GetBucketPublicAccessBlock")
        own = blocked(answer)
        if own is None:
            return answer.unknown("not_public")
        if own == set(BLOCKS):
            return answer.fact("not_public", _ALLOW, "the bucket blocks public access")
        if self._is_aws and self._pin.owner is not None:
            answer = self._asker.ask(
                "get_public_access_block",
                "s3:GetAccountPublicAccessBlock",
                "s3control",
                AccountId=self._pin.owner,
            )
            more = blocked(answer)
            if more is None:
                return answer.unknown("not_public")
            own |= more
        missing = [name for name in BLOCKS if name not in own]
        if not missing:
            return answer.fact("not_public", _ALLOW, "account and bucket block public access")
        return answer.fact("not_public", _DENY, f"public access is not blocked: {missing}")

    def _acl(self) -> Fact:
        """Tell whether access lists make it public, or that there are none."""
        if not self._is_aws:  # some say that lists are off, and go by them
            return grants(self._ask("get_bucket_acl", "s3:GetBucketAcl"))
        answer = self._ask("get_bucket_ownership_controls", "s3:GetBucketOwnershipControls")
        ownership = "ObjectWriter"
        if answer.kind is Kind.OK:
            controls = as_dict(answer.reply.get("OwnershipControls")).get("Rules")
            ownership = as_dict((controls or [None])[0]).get("ObjectOwnership", "")
        elif answer.code != "OwnershipControlsNotFoundError":
            return answer.unknown("not_public")
        if ownership == "BucketOwnerEnforced":
            return answer.fact("not_public", _ALLOW, "access lists are off")
        if ownership not in _ACL_OWNERSHIPS:
            return answer.fact("not_public", _UNKNOWN, f"ownership is {str(ownership)[:40]!r}")
        return grants(self._ask("get_bucket_acl", "s3:GetBucketAcl"))

    def _replication(self) -> Fact:
        """Follow replication from bucket to bucket."""
        facts, todo, seen = [], [(self._bucket, self._prefix)], {self._bucket}
        if not self._is_aws:
            evidence = "what a compatible store copies to other sites by itself is not visible"
            facts.append(Fact(name="replication", verdict=_UNKNOWN, evidence=evidence))
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
        rules = as_dict(answer.reply.get("ReplicationConfiguration")).get("Rules")
        if not isinstance(rules, list):
            return answer.unknown("replication"), set()
        ours = [rule for rule in rules if is_about(rule, prefix)]
        targets = {name for rule in ours if (name := bucket_of(rule)) is not None}
        keys = [f"{REPLICA_KEY}{key}" for rule in ours if (key := replica_key(rule))]
        if any(not _is_understood(rule) for rule in ours):
            text = f"a replication rule of {bucket} is not understood"
            return answer.fact("replication", _UNKNOWN, text, *keys), targets
        text = f"{bucket} is replicated to {', '.join(sorted(targets)) or 'nowhere'}"
        return answer.fact("replication", _ALLOW, text, *keys), targets

    def _replica(self, bucket: str) -> Fact:
        """Tell where a replica lies and whose it is."""
        head = self._ask("head_bucket", "s3:ListBucket", Bucket=bucket)
        if head.region is None:
            return head.unknown("replication")
        place = self._place(head.region)
        if not self._pin.replica_accounts:
            text = f"{bucket} is in {head.region}"
            return head.fact("replication", _ALLOW, text, place)
        for account in self._pin.replica_accounts:
            answer = self._ask(
                "head_bucket", "s3:ListBucket", Bucket=bucket, ExpectedBucketOwner=account
            )
            if answer.kind is Kind.OK:
                text = f"{bucket} is in {head.region} and belongs to {account}"
                return answer.fact("replication", _ALLOW, text, f"{place}/{account}")
            if answer.kind is not Kind.DENIED:
                return replace(answer.unknown("replication"), values=(place,))
        if head.kind is Kind.OK:
            text = f"{bucket} belongs to no account of the policy"
            return head.fact("replication", _DENY, text, place)
        return replace(head.unknown("replication"), values=(place,))


def _is_understood(rule: Mapping[str, Any]) -> bool:
    is_named = bucket_of(rule) is not None and replica_key(rule) is not None
    return is_named and rule.get("Status") == "Enabled"


def _bare(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
