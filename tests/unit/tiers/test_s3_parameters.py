"""Which parameters of requests are taken, which are refused, and what refusals do not repeat."""

import base64
import hashlib
import inspect
import pickle
from typing import Any

import pytest

from dcp_tiered import config, stack
from dcp_tiered.errors import InvalidError
from dcp_tiered.tiers.s3 import S3Tier
from dcp_tiered.tiers.s3_parameters import Parameters, check_names

KEY = bytes(range(100, 132))
TEXT = base64.b64encode(KEY).decode()
DIGEST = base64.b64encode(hashlib.md5(KEY).digest()).decode()
CUSTOMER = {
    "SSECustomerAlgorithm": "AES256",
    "SSECustomerKey": TEXT,
    "SSECustomerKeyMD5": DIGEST,
}
ALL_USERS = 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'
POLICY = {"allow": ["aws:eu-central-1"], "owner": "123456789012"}


def made(given: Any, **options: Any) -> Parameters:
    return Parameters("ckpt", {"s3_additional_kwargs": given, **options})


def error_of(given: Any, **options: Any) -> InvalidError:
    with pytest.raises(InvalidError) as raised:
        made(given, **options)
    return raised.value


def test_each_operation_gets_what_it_takes() -> None:
    """By the published interface of S3: which request has which header."""
    parameters = made(
        {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "k",
            "BucketKeyEnabled": True,
            "StorageClass": "STANDARD_IA",
            "Tagging": "team=llm",
            "ACL": "bucket-owner-full-control",
            "GrantRead": 'id="abc"',
            "ExpectedBucketOwner": "123456789012",
        },
        requester_pays=True,
    )
    everywhere = {"ExpectedBucketOwner": "123456789012", "RequestPayer": "requester"}
    of_puts = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "k",
        "BucketKeyEnabled": True,
        "StorageClass": "STANDARD_IA",
        "Tagging": "team=llm",
        "ACL": "bucket-owner-full-control",
        "GrantRead": 'id="abc"',
    }
    assert parameters.of("put_object") == everywhere | of_puts
    assert parameters.of("create_multipart_upload") == everywhere | of_puts
    for operation in (
        "upload_part",
        "complete_multipart_upload",
        "abort_multipart_upload",
        "list_multipart_uploads",
        "list_objects_v2",
        "head_object",
        "get_object",
        "delete_object",
    ):
        assert parameters.of(operation) == everywhere
    assert parameters.of("head_bucket") == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (CUSTOMER, KEY),
        ({"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}, b"k" * 32),
    ],
    ids=["base64", "text"],
)
def test_a_customer_key_goes_where_it_is_needed(given: dict[str, str], expected: bytes) -> None:
    parameters = made(given)
    with_key = {
        operation
        for operation in (
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
        if parameters.of(operation)
    }
    assert with_key == {
        "put_object",
        "create_multipart_upload",
        "upload_part",
        "complete_multipart_upload",
        "head_object",
        "get_object",
    }
    sent = parameters.of("get_object")
    assert base64.b64decode(sent["SSECustomerKey"]) == expected
    assert base64.b64decode(sent["SSECustomerKeyMD5"]) == hashlib.md5(expected).digest()


def test_a_key_in_bytes_becomes_what_the_flusher_can_be_told() -> None:
    options = {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": KEY}}
    settings = config.settings("tiered::s3://ckpt/run", options={"s3": options})
    assert settings.options["s3_additional_kwargs"] == CUSTOMER


def test_a_parameter_for_nobody_is_none() -> None:
    assert made({"RequestPayer": None}).of("get_object") == {}
    assert made(None, requester_pays=False).of("get_object") == {}
    assert made({"RequestPayer": None}, requester_pays=True).of("get_object") == {
        "RequestPayer": "requester"
    }


@pytest.mark.parametrize(
    "name",
    [
        *("Bucket", "Key", "Body", "ContentLength", "ContentMD5", "ContentEncoding"),
        *("IfMatch", "IfNoneMatch", "IfModifiedSince", "WriteOffsetBytes"),
        *("ChecksumAlgorithm", "ChecksumCRC32C", "ChecksumSHA256", "ChecksumMode", "ChecksumType"),
        *("UploadId", "PartNumber", "MultipartUpload", "MpuObjectSize"),
        *("Range", "VersionId", "ResponseContentEncoding"),
        *("Prefix", "Delimiter", "ContinuationToken", "StartAfter", "MaxKeys", "EncodingType"),
        "WebsiteRedirectLocation",
        "MFA",
        "BypassGovernanceRetention",
    ],
)
def test_what_requests_rely_on_is_not_to_be_set(name: str) -> None:
    error = error_of({name: "x"})
    assert f"{name} would change" in error.message
    assert error.hint == "Leave it out."


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ServerSideEncrytion", "ServerSideEncryption"),
        ("SSEKmsKeyID", "SSEKMSKeyId"),
        ("acl", "ACL"),
        ("storage_class", "StorageClass"),
        ("", None),
    ],
)
def test_a_name_that_no_request_has_is_refused(name: str, meant: str | None) -> None:
    error = error_of({name: "x"})
    assert repr(name) in error.message
    assert error.hint == (f"Is {meant} meant?" if meant else "Leave it out.")


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"StorageClass": 5}, "StorageClass is a int", "string"),
        ({"StorageClass": None}, "StorageClass is a NoneType", "string"),
        ({"Tagging": {"a": "b"}}, "Tagging is a dict", "string"),
        ({"BucketKeyEnabled": "true"}, "BucketKeyEnabled is a str", "boolean"),
        ({"Metadata": {"a": 1}}, "Metadata is a dict", "map"),
        ({"Metadata": {"a": "b\r\nx-amz-acl: public-read"}}, "printable", "encode"),
        ({"Tagging": "straße=1"}, "printable", "encode"),
        ({"ObjectLockRetainUntilDate": "soon"}, "ObjectLockRetainUntilDate", "timestamp"),
        ({"ObjectLockMode": "governance"}, "'governance'", "GOVERNANCE or COMPLIANCE"),
        ({"ServerSideEncryption": "aws:kmss"}, "'aws:kmss'", "AES256 or aws:kms"),
        ({"RequestPayer": "me"}, "'me'", "requester"),
        ({"StorageClass": "GLACIER"}, "GLACIER cannot be read at once", "GLACIER_IR"),
        ({"StorageClass": "DEEP_ARCHIVE"}, "DEEP_ARCHIVE cannot", "STANDARD_IA"),
        ({"SSEKMSKeyId": "k"}, "ServerSideEncryption is not set", "'aws:kms'"),
        (
            {"SSEKMSKeyId": "k", "ServerSideEncryption": "AES256"},
            "ServerSideEncryption is AES256",
            "'aws:kms'",
        ),
        (CUSTOMER | {"ServerSideEncryption": "AES256"}, "both set", "leave one"),
        ("AES256", "is a str, not a mapping", "'s3_additional_kwargs': {"),
    ],
)
def test_values_that_cannot_be_right_are_refused(given: Any, message: str, hint: str) -> None:
    error = error_of(given)
    assert "s3 option s3_additional_kwargs: " in error.message
    assert message in error.message
    assert hint in str(error.hint)
    assert (error.tier, error.key) == ("durable", "s3://ckpt")


def test_requester_pays_is_yes_or_no() -> None:
    error = error_of(None, requester_pays="false")
    assert "requester_pays is a str" in error.message


@pytest.mark.parametrize(
    "given",
    [
        {"ACL": "public-read"},
        {"ACL": "public-read-write"},
        {"ACL": "authenticated-read"},
        {"ACL": "aws-exec-read"},
        {"GrantRead": ALL_USERS},
        {"GrantReadACP": f'id="abc", {ALL_USERS}'},
        {"GrantFullControl": ALL_USERS.replace("AllUsers", "AuthenticatedUsers")},
        {"GrantWriteACP": ALL_USERS.replace("uri", "URI")},
    ],
)
def test_what_would_make_objects_public_is_refused(given: dict[str, str]) -> None:
    (name,) = given
    assert name in error_of(given).message


WRONG_KEYS = {
    "no key": {"SSECustomerAlgorithm": "AES256"},
    "no algorithm": {"SSECustomerKey": TEXT, "SSECustomerKeyMD5": DIGEST},
    "no digest": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": TEXT},
    "short": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": TEXT[:31]},
    "no base64": CUSTOMER | {"SSECustomerKey": "*" + TEXT[1:]},
    "wrong digest": CUSTOMER | {"SSECustomerKeyMD5": TEXT},
    "bytes and digest": CUSTOMER | {"SSECustomerKey": KEY},
    "number": CUSTOMER | {"SSECustomerKey": int.from_bytes(KEY)},
    "in the wrong place": {"SSECustomerAlgorithm": TEXT, "SSECustomerKey": "AES256"},
}


@pytest.mark.parametrize("given", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_a_wrong_customer_key_is_refused_and_not_repeated(given: dict[str, Any]) -> None:
    error = error_of(given)
    assert "SSECustomer" in error.message
    shown = f"{error} {error!r} {error.__cause__!r} {error.__context__!r}"
    for secret in (TEXT[1:20], str(int.from_bytes(KEY))[:20], repr(KEY)[2:20]):
        assert secret not in shown


def test_a_tier_shows_no_key_and_can_be_pickled() -> None:
    tier = S3Tier(
        "ckpt/run",
        {"s3_additional_kwargs": CUSTOMER},
        request_timeout_s=1,
        request_retry_s=1,
        part_bytes=1,
    )
    copy = pickle.loads(pickle.dumps(tier))
    assert copy._requests.parameters.of("get_object") == CUSTOMER
    for shown in (tier, tier._requests, tier._requests.parameters):
        assert TEXT not in f"{shown!r}{shown}"


@pytest.mark.parametrize(("owner", "is_refused"), [("123456789012", False), ("999999999999", True)])
def test_another_owner_than_the_policys_is_refused(owner: str, is_refused: bool) -> None:
    options = {
        "client_kwargs": {"region_name": "eu-central-1"},
        "s3_additional_kwargs": {"ExpectedBucketOwner": owner},
    }
    settings = config.settings("tiered::s3://ckpt/run", options={"s3": options}, residency=POLICY)
    if is_refused:
        with pytest.raises(InvalidError, match="ExpectedBucketOwner is '999999999999'"):
            stack.build(settings)
    else:
        stack.build(settings).close()


def test_a_key_is_not_sent_unencrypted() -> None:
    """To another machine: nothing is sent at all, and nothing is tried again."""
    tier = S3Tier(
        "ckpt/run",
        {
            "s3_additional_kwargs": CUSTOMER,
            "endpoint_url": "http://192.0.2.1:9000",
            "key": "k",
            "secret": "s",
        },
        request_timeout_s=60,
        request_retry_s=3600,
        part_bytes=1,
    )
    for work in (lambda: tier.put("a", b"x"), tier.region):
        with pytest.raises(InvalidError, match=r"unencrypted.*\n.*https") as raised:
            work()
        assert "192.0.2.1:9000" in raised.value.message


# ------------------------------------------------------------------------ noted with the run


def test_all_but_the_key_is_noted_with_the_run() -> None:
    given = {**CUSTOMER, "Tagging": "a=b"}
    options = {"s3": {"s3_additional_kwargs": given, "requester_pays": True, "secret": "s"}}
    noted = config.settings("tiered::s3://ckpt/run", options=options).public_options()
    assert noted == {
        "requester_pays": True,
        "s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "Tagging": "a=b"},
    }


def test_the_environment_adds_the_key_to_what_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "Tagging": "a=b"}}
    bare = config.settings("tiered::s3://ckpt/run", noted=noted)
    with pytest.raises(InvalidError, match="without SSECustomerKey") as raised:
        stack.build(bare)
    assert "FSSPEC_S3_S3_ADDITIONAL_KWARGS" in str(raised.value.hint)
    said = f'{{"SSECustomerKey": "{TEXT}", "SSECustomerKeyMD5": "{DIGEST}", "Tagging": "c=d"}}'
    monkeypatch.setenv("FSSPEC_S3_S3_ADDITIONAL_KWARGS", said)
    merged = config.settings("tiered::s3://ckpt/run", noted=noted).options["s3_additional_kwargs"]
    assert merged == {**CUSTOMER, "Tagging": "a=b"}
    chosen = {"s3": {"s3_additional_kwargs": {"Tagging": "e=f"}}}
    mine = config.settings("tiered::s3://ckpt/run", options=chosen, noted=noted)
    assert mine.options["s3_additional_kwargs"] == {"Tagging": "e=f"}


# -------------------------------------------------------------------------- other credentials


@pytest.mark.parametrize("option", ["session", "username", "password"])
def test_credentials_that_would_be_ignored_are_refused(option: str) -> None:
    with pytest.raises(InvalidError, match=option):
        stack.build(config.settings("tiered::s3://ckpt/run", options={"s3": {option: "x"}}))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("s3_aditional_kwargs", "s3_additional_kwargs"),
        ("endpoint", "endpoint_url"),
        ("requester_pay", "requester_pays"),
    ],
)
def test_a_misspelt_option_is_refused_before_it_has_no_effect(name: str, meant: str) -> None:
    with pytest.raises(InvalidError, match=name) as raised:
        check_names("ckpt", {name: "a-secret"})
    assert raised.value.hint is not None
    assert meant in raised.value.hint
    assert "a-secret" not in str(raised.value)


def test_what_s3fs_takes_and_what_nobody_knows_is_passed_over() -> None:
    from s3fs import S3FileSystem

    taken = inspect.signature(S3FileSystem.__init__).parameters.keys() - {"self", "kwargs"}
    check_names("ckpt", dict.fromkeys([*taken, "colour"]))
