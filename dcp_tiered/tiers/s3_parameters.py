"""What users add to requests to S3: `s3_additional_kwargs` and `requester_pays`, as in s3fs.

A parameter goes along with every request whose operation takes it. What could change what the
requests here mean is refused, and so is what S3 would refuse hours later: only the names below may
be set. No message repeats a value that could be a secret.
"""

import base64
import binascii
import difflib
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dcp_tiered.errors import InvalidError
from dcp_tiered.tiers.s3_errors import TIER

OPTION = "s3_additional_kwargs"
_OPTIONS = [
    "anon",
    "asynchronous",
    "cache_regions",
    "client_kwargs",
    "config_kwargs",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "endpoint_url",
    "fixed_upload_size",
    "key",
    "loop",
    "max_concurrency",
    "password",
    "profile",
    "region_name",
    "requester_pays",
    "s3_additional_kwargs",
    "secret",
    "session",
    "token",
    "use_listings_cache",
    "use_ssl",
    "username",
    "verify",
    "version_aware",
]
"""What s3fs takes, and botocore's client with it."""
_SENT = (
    "put_object",
    "create_multipart_upload",
    "upload_part",
    "complete_multipart_upload",
    "abort_multipart_upload",
    "list_multipart_uploads",
    "list_objects_v2",
    "head_object",
    "get_object",
    "delete_object",
)
"""What is sent about objects; questions about the bucket carry nothing of the user's."""
_FREE = (
    "BucketKeyEnabled",
    "CacheControl",
    "ContentDisposition",
    "ContentLanguage",
    "ContentType",
    "ExpectedBucketOwner",
    "Expires",
    "Metadata",
    "ObjectLockRetainUntilDate",
    "SSECustomerKey",
    "SSECustomerKeyMD5",
    "SSEKMSEncryptionContext",
    "SSEKMSKeyId",
    "StorageClass",
    "Tagging",
)
_GRANTS = ("GrantFullControl", "GrantRead", "GrantReadACP", "GrantWriteACP")
_VALUES = {
    # Those that open an object to nobody but its bucket's owner.
    "ACL": ("private", "bucket-owner-read", "bucket-owner-full-control"),
    "ObjectLockLegalHoldStatus": ("ON", "OFF"),
    "ObjectLockMode": ("GOVERNANCE", "COMPLIANCE"),
    "RequestPayer": ("requester",),
    "SSECustomerAlgorithm": ("AES256",),
    "ServerSideEncryption": ("AES256", "aws:kms", "aws:kms:dsse"),
}
_ALLOWED = frozenset((*_FREE, *_GRANTS, *_VALUES))
_SECRETIVE = ("SSECustomerAlgorithm", "SSECustomerKey", "SSECustomerKeyMD5")
"""What a key may stand in, by mistake or not; only the last may be left out."""
_ASLEEP = ("GLACIER", "DEEP_ARCHIVE")
"""Storage classes that nothing can be read from at once."""
_KEY_BYTES = 32
_CONFIRMED = {
    "put_object": ("ServerSideEncryption", "SSECustomerAlgorithm"),
    "upload_part": ("SSECustomerAlgorithm",),
}
"""What every store that obeys it repeats in its reply."""
_ENCRYPTION = "ServerSideEncryption"


class Parameters:
    """Parameters by the operation that they go along with.

    Args:
        bucket: For messages.
        options: Of the tier.

    Raises:
        InvalidError: One is unknown, not to be set, or has a value that cannot be right.
    """

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        self._where = f"s3://{bucket}"
        given = self._given(options)
        taken = _members() if given else {}
        for name, value in given.items():
            self._check(name, value, taken)
        self._check_encryption(given)
        given |= self._customer_key(given)
        self._of = {
            operation: {name: given[name] for name in sorted(given) if name in shapes}
            for operation, shapes in taken.items()
        }

    def of(self, operation: str) -> Mapping[str, Any]:
        """Return what goes along with an operation, named as botocore's method is."""
        return self._of.get(operation, {})

    def check_owner(self, owner: str | None) -> None:
        """Refuse another owner of the bucket than the residency policy names.

        Raises:
            InvalidError: It is another one.
        """
        said = self.of("get_object").get("ExpectedBucketOwner")
        if owner is not None and said not in (None, owner):
            raise self._refused(
                f"ExpectedBucketOwner is {said!r}, and {owner!r} in the residency policy",
                "Leave it out: every request names the owner of the policy.",
            )

    def unconfirmed(self, operation: str, reply: Mapping[str, Any]) -> InvalidError | None:
        """Return the error for a reply that does not confirm the encryption that was asked for."""
        return self._unconfirmed(_CONFIRMED.get(operation, ()), self.of(operation), reply)

    def encrypts(self) -> bool:
        """Tell whether objects are to be encrypted by the store."""
        return _ENCRYPTION in self.of("put_object")

    def unencrypted(self, found: Mapping[str, Any]) -> InvalidError | None:
        """Return the error for an object that the store does not say is encrypted as asked.

        No reply to a request of a multipart upload has to repeat that.
        """
        return self._unconfirmed((_ENCRYPTION,), self.of("put_object"), found)

    def _unconfirmed(
        self, names: Sequence[str], asked: Mapping[str, Any], reply: Mapping[str, Any]
    ) -> InvalidError | None:
        for name in names:
            if name in asked and reply.get(name) != asked[name]:
                return self._refused(
                    f"the store does not confirm {name} {asked[name]!r}, so what was just sent is"
                    " stored without it",
                    "Use a store that has it, or leave it out; this process stores nothing more.",
                )
        return None

    def needs_tls(self) -> bool:
        """Tell whether requests carry a key."""
        return "SSECustomerKey" in self.of("get_object")

    def _given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        given, pays = options.get(OPTION), options.get("requester_pays")
        if not isinstance(given, Mapping | None):
            raise self._refused(
                f"it is a {type(given).__name__}, not a mapping",
                f"Pass s3={{'{OPTION}': {{'StorageClass': 'STANDARD_IA'}}}}.",
            )
        if not isinstance(pays, bool | None):
            raise InvalidError(
                f"s3 option requester_pays is a {type(pays).__name__}, not True or False",
                TIER,
                self._where,
                "Pass s3={'requester_pays': True}.",
            )
        named = {str(name): value for name, value in (given or {}).items()}
        if named.get("RequestPayer", ...) is None:
            del named["RequestPayer"]
        return named | ({"RequestPayer": "requester"} if pays else {})

    def _check(self, name: str, value: Any, taken: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse a name that is none of those allowed, or a value that no request could carry."""
        shape = next((shapes[name] for shapes in taken.values() if name in shapes), None)
        if name not in _ALLOWED or shape is None:
            raise self._unknown(name, is_known=shape is not None)
        if not _is_valid(value, shape):
            raise self._refused(
                f"{name} is a {type(value).__name__} that S3 does not take",
                f"Pass a {shape.type_name}, as for botocore's put_object.",
            )
        if name != "SSECustomerKey" and not all(_is_plain(text) for text in _texts(value)):
            raise self._refused(
                f"{name} holds other characters than printable ASCII",
                "Headers carry no others: encode the value.",
            )
        self._check_value(name, value)

    def _check_value(self, name: str, value: Any) -> None:
        allowed = _VALUES.get(name)
        if allowed is not None and value not in allowed:
            what = name if name in _SECRETIVE else f"{name} {value[:40]!r}"
            why = "; what opens objects to others is always refused" if name == "ACL" else ""
            raise self._refused(f"{what} is not taken", f"Use {' or '.join(allowed)}{why}.")
        if name in _GRANTS and "uri" in value.lower():
            raise self._refused(
                f"{name} names a group", "Name accounts by id: groups are the public, or near it."
            )
        if name == "StorageClass" and value in _ASLEEP:
            raise self._refused(
                f"objects of StorageClass {value} cannot be read at once",
                "Use a class that is read at once, such as STANDARD_IA or GLACIER_IR.",
            )

    def _check_encryption(self, given: Mapping[str, Any]) -> None:
        """Refuse combinations that S3 refuses."""
        mode = given.get("ServerSideEncryption", "")
        if not mode.startswith("aws:kms"):
            for name in ("SSEKMSKeyId", "SSEKMSEncryptionContext"):
                if name in given:
                    raise self._refused(
                        f"{name} is set, and ServerSideEncryption is {mode or 'not set'}",
                        "Set ServerSideEncryption to 'aws:kms'.",
                    )
        customer = [name for name in _SECRETIVE if name in given]
        if customer and mode:
            raise self._refused(
                f"{customer[0]} and ServerSideEncryption are both set",
                "S3 encrypts an object in one way: leave one of them out.",
            )
        missing = [name for name in _SECRETIVE[:2] if name not in given]
        if customer and missing:
            raise self._refused(
                f"{customer[0]} is set without {missing[0]}",
                "Set SSECustomerAlgorithm and SSECustomerKey. A run's node never notes the key:"
                f" commands take it, as JSON, from FSSPEC_S3_{OPTION.upper()}.",
            )

    def _customer_key(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Return a key of the user's as headers carry it, and its digest."""
        if "SSECustomerKey" not in given:
            return {}
        text, digest = given["SSECustomerKey"], given.get("SSECustomerKeyMD5")
        key = text.encode() if digest is None else _decoded(text)
        md5 = base64.b64encode(hashlib.md5(key, usedforsecurity=False).digest()).decode()
        if len(key) != _KEY_BYTES or digest not in (None, md5):
            what = "has another digest than SSECustomerKeyMD5"
            raise self._refused(
                "SSECustomerKey " + (what if len(key) == _KEY_BYTES else "is not one of 32 bytes"),
                "Pass 32 bytes, or their base64 together with the base64 of their MD5 as"
                " SSECustomerKeyMD5.",
            )
        return {"SSECustomerKey": base64.b64encode(key).decode(), "SSECustomerKeyMD5": md5}

    def _unknown(self, name: str, *, is_known: bool) -> InvalidError:
        if is_known:
            return self._refused(
                f"{name} would change what the requests here rely on", "Leave it out."
            )
        lower = {allowed.lower(): allowed for allowed in sorted(_ALLOWED)}
        near = difflib.get_close_matches(name.lower(), lower, 1, 0.7)
        hint = f"Is {lower[near[0]]} meant?" if near else "Leave it out."
        return self._refused(f"no request that is sent takes {name[:60]!r}", hint)

    def _refused(self, what: str, hint: str) -> InvalidError:
        return InvalidError(f"s3 option {OPTION}: {what}", TIER, self._where, hint)


def check_names(bucket: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that is hardly anything but a misspelt one: it would have no effect.

    Raises:
        InvalidError: The hint says what was meant.
    """
    for name in options.keys() - set(_OPTIONS):
        near = difflib.get_close_matches(str(name), _OPTIONS, 1, 0.8)
        if near:
            text = f"there is no s3 option {str(name)[:60]!r}"
            raise InvalidError(text, TIER, f"s3://{bucket}", f"Is {near[0]} meant?")


@functools.cache
def shared_loader() -> Any:
    """Return botocore's reader of its own data files.

    Reading them takes nearly all of the time that a new client takes. Sessions only look at what it
    has read, as the clients of one session do, so all of a process may share it.
    """
    import botocore.loaders

    return botocore.loaders.create_loader()


def _members() -> dict[str, Mapping[str, Any]]:
    """Return the shapes of all parameters of what is sent, by botocore's names."""
    from botocore.model import ServiceModel

    model = ServiceModel(shared_loader().load_service_model("s3", "service-2"), "s3")
    names = {name.replace("_", ""): name for name in _SENT}
    return {
        names[operation.lower()]: model.operation_model(operation).input_shape.members
        for operation in model.operation_names
        if operation.lower() in names
    }


def _is_valid(value: Any, shape: Any) -> bool:
    from botocore.validate import ParamValidator

    # Its own report repeats the value.
    return value is not None and not ParamValidator().validate(value, shape).has_errors()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from pair


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
