"""What each role may do on S3: the only list of it; documents and documentation follow it.

The names are those of the AWS service authorization reference, which differ from the API's:
`s3:PutObject` is every part of an upload, `s3:GetObject` also HeadObject, `s3:ListBucket` also
HeadBucket.
"""

from dataclasses import dataclass

_GET = ("s3:GetObject",)
_PUT = ("s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject")
_LIST = ("s3:ListBucket",)
_LIST_UPLOADS = ("s3:ListBucket", "s3:ListBucketMultipartUploads")
_LOOK = (
    "s3:GetAccelerateConfiguration",
    "s3:GetBucketAcl",
    "s3:GetBucketOwnershipControls",
    "s3:GetBucketPolicyStatus",
    "s3:GetBucketPublicAccessBlock",
    "s3:GetEncryptionConfiguration",
    "s3:ListBucket",
)
_FOLLOW = ("s3:GetReplicationConfiguration",)
_ACCOUNT = ("s3:GetAccountPublicAccessBlock",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Actions by what they are on."""

    objects: tuple[str, ...] = ()
    """On the objects of the run."""
    bucket: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()
    """On the bucket and on those that it is replicated to."""
    account: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """On KMS keys, where the policy speaks of any."""

    def actions(self) -> frozenset[str]:
        """Return every action on S3."""
        return frozenset((*self.objects, *self.bucket, *self.buckets, *self.account))


_READS = Permissions(objects=_GET, bucket=_LIST, keys=("kms:Decrypt",))
ROLES = {
    # Looks for two seconds whether an id is taken; with on_local_full="write_through" it uploads
    # and is a flusher.
    "trainer": _READS,
    # Looks at the target too. KMS: S3 reads the parts of an upload back before it puts them
    # together, so that needs kms:Decrypt.
    "flusher": Permissions(
        objects=_PUT,
        bucket=tuple(sorted({*_LIST_UPLOADS, *_LOOK})),
        buckets=_FOLLOW,
        account=_ACCOUNT,
        keys=("kms:Decrypt", "kms:GenerateDataKey"),
    ),
    "reader": _READS,
    # Reads records and what no commit names, withdraws by a record, aborts open uploads.
    "remover": Permissions(
        objects=tuple(sorted((*_PUT, "s3:DeleteObject"))),
        bucket=_LIST_UPLOADS,
        keys=("kms:Decrypt", "kms:GenerateDataKey"),
    ),
    "checker": Permissions(bucket=_LOOK, buckets=_FOLLOW, account=_ACCOUNT),
}

WRITES = ("s3:PutObject", "s3:ReplicateObject")
"""By which data comes to a bucket; copies and parts of uploads are `s3:PutObject`."""
SETTINGS = (
    "s3:DeleteBucket",
    "s3:DeleteBucketPolicy",
    "s3:PutAccelerateConfiguration",
    "s3:PutBucketAcl",
    "s3:PutBucketOwnershipControls",
    "s3:PutBucketPolicy",
    "s3:PutBucketPublicAccessBlock",
    "s3:PutEncryptionConfiguration",
    "s3:PutReplicationConfiguration",
)
"""By which a bucket that was allowed stops being so."""
ACL_WRITES = ("s3:PutObjectAcl", "s3:PutObjectVersionAcl")
ACCOUNT_SETTINGS = ("s3:PutAccountPublicAccessBlock",)
