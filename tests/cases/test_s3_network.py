"""What the S3 tier does when network and store misbehave, behind a proxy in front of SeaweedFS."""

import base64
import hashlib
import logging
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c
from botocore.exceptions import ClientError

from dcp_tiered.errors import (
    AbsentError,
    AlreadyExistsError,
    CorruptError,
    InvalidError,
    ResidencyError,
    TieredError,
    UnavailableError,
)
from dcp_tiered.format.pack import plan_pack
from dcp_tiered.interfaces import ObjectInfo
from dcp_tiered.services.packs import PackStore
from dcp_tiered.tiers.posix import PosixTier
from dcp_tiered.tiers.s3 import S3Tier
from examples.seaweed import SeaweedS3
from tests.conftest import Run
from tests.support import runs
from tests.support.fault_proxy import (
    LOST_REPLY,
    REQUEST_ID,
    RESET,
    STALL,
    TRUNCATED,
    Fault,
    FaultProxy,
    Request,
    refuse,
)
from tests.support.sources import BytesSource, pattern

PART_BYTES = 5 << 20
SMALL = pattern(70_001)
LARGE = pattern(2 * PART_BYTES + 11)
SLOW_DOWN = refuse(503, "SlowDown")
OPERATIONS = {
    "PutObject": lambda tier: tier.put("a.json", SMALL),
    "GetObject": lambda tier: tier.get("there.json", 1 << 20),
    "HeadObject": lambda tier: tier.head("there.json"),
    "ListObjectsV2": lambda tier: list(tier.list_keys("step-1")),
    "CreateMultipartUpload": lambda tier: tier.upload("a.pack", BytesSource(LARGE)),
    "UploadPart": lambda tier: tier.upload("a.pack", BytesSource(LARGE)),
    "CompleteMultipartUpload": lambda tier: tier.upload("a.pack", BytesSource(LARGE)),
}


@pytest.fixture(scope="module")
def client(s3_server: SeaweedS3) -> Any:
    """Give independent eyes on the store."""
    return s3_server.client()


@pytest.fixture
def proxy(s3_server: SeaweedS3) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


class Bench:
    """A tier behind the proxy, and the run root as it really is."""

    def __init__(self, proxy: FaultProxy, server: SeaweedS3, client: Any) -> None:
        self.proxy, self._server, self._client = proxy, server, client
        self.bucket = server.buckets[0]
        self.root = f"faults-{secrets.token_hex(6)}"

    def tier(self, retry_s: float = 30, timeout_s: float = 5, **options: Any) -> S3Tier:
        mine = self._server.storage_options() | {"endpoint_url": self.proxy.endpoint} | options
        return S3Tier(
            f"{self.bucket}/{self.root}",
            mine,
            request_timeout_s=timeout_s,
            request_retry_s=retry_s,
            part_bytes=PART_BYTES,
        )

    def write(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=f"{self.root}/{key}", Body=data)

    def read(self, key: str) -> bytes:
        reply = self._client.get_object(Bucket=self.bucket, Key=f"{self.root}/{key}")
        data: bytes = reply["Body"].read()
        return data

    def keys(self) -> list[str]:
        reply = self._client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.root}/")
        return [entry["Key"].removeprefix(f"{self.root}/") for entry in reply.get("Contents", ())]

    def begin_upload(self, key: str) -> None:
        self._client.create_multipart_upload(Bucket=self.bucket, Key=f"{self.root}/{key}")

    def open_uploads(self) -> list[str]:
        reply = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=f"{self.root}/")
        return [entry["Key"].removeprefix(f"{self.root}/") for entry in reply.get("Uploads") or ()]

    def buckets(self) -> list[str]:
        return [bucket["Name"] for bucket in self._client.list_buckets()["Buckets"]]


@pytest.fixture
def bench(proxy: FaultProxy, s3_server: SeaweedS3, client: Any) -> Iterator[Bench]:
    bench = Bench(proxy, s3_server, client)
    yield bench
    assert not proxy.seen("CreateBucket"), "O072: a bucket is never created by us"


# ------------------------------------------------------------------------------------- once

ONCE = {
    "SlowDown": SLOW_DOWN,
    "InternalError": refuse(500, "InternalError"),
    "BadDigest": refuse(400, "BadDigest"),
    "XAmzContentSHA256Mismatch": refuse(400, "XAmzContentSHA256Mismatch"),
    "RequestTimeout": refuse(400, "RequestTimeout"),
    "IncompleteBody": refuse(400, "IncompleteBody"),
    "ConditionalRequestConflict": refuse(409, "ConditionalRequestConflict"),
    "429": refuse(429, "TooManyRequests"),
    "408": Fault(status=408),
    "502": Fault(status=502),
    "504": Fault(status=504),
    "RequestTimeTooSkewed": refuse(403, "RequestTimeTooSkewed"),
    "OperationAborted": refuse(409, "OperationAborted"),
    "garbled": Fault(status=503, reply_body=b"<html>bad gateway"),
    "reset": RESET,
    "reset in the body": Fault(reset_after=40_000),
}
IN_PARTS = [ONCE[name] for name in ("SlowDown", "BadDigest", "reset", "reset in the body")]
"""Tried on large uploads too, which take seconds; the table of codes is one for all requests."""


@pytest.mark.parametrize("fault", ONCE.values(), ids=ONCE)
def test_what_goes_wrong_once_is_tried_again(bench: Bench, fault: Fault) -> None:
    """O066, O067, O068: every operation, and every try sends its whole body."""
    bench.write("there.json", SMALL)
    bench.write("step-1/a", b"x")
    # A reply to HEAD has no body, so a refusal by code cannot reach it.
    without_body = fault.reply_body and fault.status is not None and 400 <= fault.status < 429
    faulty = set(OPERATIONS) - ({"HeadObject"} if without_body else set())
    if fault not in IN_PARTS:
        faulty -= {"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
    for operation in faulty:
        bench.proxy.inject(operation, fault, times=1)
    tier = bench.tier()
    tier.put("a.json", SMALL)
    data = LARGE if fault in IN_PARTS else SMALL
    tier.upload("a.pack", BytesSource(data))
    assert tier.get("there.json", 1 << 20) == SMALL
    assert tier.head("there.json").length == len(SMALL)
    assert list(tier.list_keys("step-1")) == ["step-1/a"]
    assert bench.read("a.json") == SMALL
    assert bench.read("a.pack") == data
    assert bench.open_uploads() == []
    for operation in faulty:
        assert len(bench.proxy.seen(operation)) >= 2
    for request in bench.proxy.seen("UploadPart"):
        assert request.length in (PART_BYTES, 11)
    assert {request.length for request in bench.proxy.seen("PutObject")} == {len(SMALL)}


def test_a_whole_upload_reads_its_source_again_on_every_try(bench: Bench) -> None:
    """O066: the first try has read all of the body when it fails."""
    bench.proxy.inject("PutObject", SLOW_DOWN, times=2)
    source = BytesSource(SMALL)
    bench.tier().upload("a.pack", source)
    assert [len(request.body) for request in bench.proxy.seen("PutObject")] == [len(SMALL)] * 3
    assert source.bytes_read == 3 * len(SMALL)
    assert bench.read("a.pack") == SMALL


def test_a_whole_upload_reads_its_source_once(bench: Bench) -> None:
    source = BytesSource(SMALL)
    bench.tier().upload("a.pack", source)
    assert source.bytes_read == len(SMALL)


# ---------------------------------------------------------------------------------- for ever


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_store_that_stays_overloaded_is_reported(bench: Bench, operation: str) -> None:
    """O068, O077: an end, with code, key, try and request id, and nothing left behind."""
    bench.write("there.json", SMALL)
    tier = bench.tier(retry_s=2)
    tier.head("there.json")  # connects, which takes long enough to use up a time this short
    connected = len(bench.proxy.log)
    bench.proxy.inject(operation, SLOW_DOWN)
    with pytest.raises(UnavailableError) as raised:
        OPERATIONS[operation](tier)
    error = raised.value
    tries = [seen for seen in bench.proxy.log[connected:] if seen.operation == operation]
    assert len(tries) >= 2
    code = "503" if operation == "HeadObject" else "SlowDown"
    assert code in error.message
    assert "on try" in error.message
    assert operation == "ListObjectsV2" or tries[0].key in str(error.key)
    assert REQUEST_ID in error.message
    assert error.tier == "durable"
    assert error.hint
    assert operation != "UploadPart" or "of part " in error.message
    assert bench.keys() == ["there.json"]
    assert bench.open_uploads() == []


def test_an_object_has_one_time_limit_however_many_requests_it_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O068: each part within its own time would be hours for an object of many parts."""
    monkeypatch.setattr("dcp_tiered.tiers.s3._BYTES_PER_SECOND_MIN", 1 << 40)
    tier = bench.tier(retry_s=1)
    tier.put("a.json", SMALL)  # connects
    bench.proxy.inject("CreateMultipartUpload", Fault(delay_s=1.5), times=1)
    bench.proxy.inject("UploadPart", SLOW_DOWN)
    with pytest.raises(UnavailableError, match="SlowDown"):
        tier.upload("a.pack", BytesSource(LARGE))
    paths = [request.path for request in bench.proxy.seen("UploadPart")]
    assert len(paths) == len(set(paths)), "nothing is tried again once the time is over"
    assert bench.open_uploads() == []


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        pytest.param("GetObject", RESET, id="GetObject-reset"),
        pytest.param("GetObject", STALL, id="GetObject-stall"),
        pytest.param("GetObject", TRUNCATED, id="GetObject-truncated"),
        pytest.param("ListObjectsV2", RESET, id="ListObjectsV2-reset"),
        pytest.param("ListObjectsV2", TRUNCATED, id="ListObjectsV2-truncated"),
        pytest.param("UploadPart", RESET, id="UploadPart-reset"),
        pytest.param("UploadPart", STALL, id="UploadPart-stall"),
    ],
)
def test_a_broken_network_is_reported(bench: Bench, operation: str, fault: Fault) -> None:
    """O067: the error reaches the caller, with the exception of the network behind it."""
    bench.write("there.json", SMALL)
    bench.proxy.inject(operation, fault)
    with pytest.raises(UnavailableError) as raised:
        OPERATIONS[operation](bench.tier(retry_s=0.5, timeout_s=1.5))
    assert raised.value.__cause__ is not None
    assert raised.value.hint
    assert bench.open_uploads() == []


def test_a_store_that_is_not_there_is_reported(bench: Bench) -> None:
    bench.proxy.__exit__(None, None, None)
    tier = bench.tier(retry_s=0.3)
    for call in OPERATIONS.values():
        with pytest.raises(UnavailableError):
            call(tier)


@pytest.mark.parametrize("length", [1000, PART_BYTES], ids=["answer", "body"])
def test_a_store_that_never_says_continue_is_given_up(bench: Bench, length: int) -> None:
    """The request waits for `100 Continue`, which never comes; the time-out covers that too."""
    bench.proxy.inject("PutObject", STALL)
    with pytest.raises(UnavailableError, match=r"ReadTimeout|ConnectionClosed"):
        bench.tier(retry_s=0.2, timeout_s=1).upload("a.pack", BytesSource(LARGE[:length]))
    assert {request.headers.get("expect") for request in bench.proxy.seen("PutObject")} == {
        "100-continue"
    }


# ------------------------------------------------------------------------------------ denied


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        *((operation, "AccessDenied") for operation in OPERATIONS),
        ("PutObject", "InvalidAccessKeyId"),
        ("GetObject", "SignatureDoesNotMatch"),
    ],
)
def test_denied_is_said_at_once_and_is_not_absent(bench: Bench, operation: str, code: str) -> None:
    """O071."""
    bench.proxy.inject(operation, refuse(403, code))
    with pytest.raises(InvalidError, match="access denied"):
        OPERATIONS[operation](bench.tier())
    # Parts are on their way at the same time; none of them is tried a second time.
    targets = [request.path for request in bench.proxy.seen(operation)]
    assert len(targets) == len(set(targets))
    assert bench.open_uploads() == []


def test_a_wrong_secret_is_denied_by_a_real_server(bench: Bench) -> None:
    """O071."""
    tier = bench.tier(secret="wrong")
    for call in OPERATIONS.values():
        with pytest.raises(InvalidError) as raised:
            call(tier)
        assert not isinstance(raised.value, AbsentError)


def test_a_missing_bucket_is_not_absent_and_not_created(bench: Bench) -> None:
    """O071, O072: a reply to HEAD cannot tell it from a missing object, so it is asked again."""
    before = bench.buckets()
    bench.bucket = "no-such-bucket"
    tier = bench.tier()
    for call in (
        *OPERATIONS.values(),
        lambda tier: tier.put("b", b""),
        lambda tier: tier.head("c"),
    ):
        with pytest.raises(InvalidError, match="no such bucket"):
            call(tier)
    assert bench.buckets() == before
    assert not [r for r in bench.proxy.log if r.method == "PUT" and r.operation != "PutObject"]


@pytest.mark.parametrize("operation", ["GetObject", "HeadObject", "ListObjectsV2"])
def test_a_web_server_that_knows_no_objects_is_not_an_empty_store(
    bench: Bench, operation: str
) -> None:
    """O071: a 404 of a gateway in between says nothing about the object."""
    bench.proxy.inject(None, Fault(status=404, reply_body=b"<html>Not Found</html>"))
    with pytest.raises(TieredError) as raised:
        OPERATIONS[operation](bench.tier(retry_s=0.2))
    assert not isinstance(raised.value, AbsentError)


def test_an_absent_object_is_looked_for_once(bench: Bench) -> None:
    """No needless request: that the bucket is there is known from the first answer."""
    bench.write("there.json", SMALL)
    tier = bench.tier()
    tier.head("there.json")
    before = len(bench.proxy.log)
    with pytest.raises(AbsentError):
        tier.head("absent")
    assert [request.operation for request in bench.proxy.log[before:]] == ["HeadObject"]


# ------------------------------------------------------------------------------- credentials


def test_expired_credentials_are_looked_up_again(
    bench: Bench, s3_server: SeaweedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O073: in the middle of a large upload, which then goes on where it was."""
    asked = tmp_path / "asked"
    script = tmp_path / "credentials"
    script.write_text(
        f"#!/bin/sh\necho x >> {asked}\n"
        f'echo \'{{"Version": 1, "AccessKeyId": "{s3_server.access_key}",'
        f' "SecretAccessKey": "{s3_server.secret_key}"}}\'\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {script}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))

    def is_old(request: Request) -> bool:
        return "partNumber=1" not in request.path and asked.read_text().count("x") < 2

    bench.proxy.inject("UploadPart", refuse(400, "ExpiredToken"), when=is_old)
    bench.tier(key=None, secret=None).upload("a.pack", BytesSource(LARGE))
    assert asked.read_text().count("x") == 2
    assert len(bench.proxy.seen("CreateMultipartUpload")) == 1
    assert bench.read("a.pack") == LARGE


def test_credentials_that_stay_expired_are_reported(bench: Bench) -> None:
    """O073."""
    bench.proxy.inject("PutObject", refuse(400, "ExpiredToken"))
    with pytest.raises(UnavailableError, match="ExpiredToken") as raised:
        bench.tier(retry_s=0.3).put("a.json", SMALL)
    assert "Renew" in str(raised.value.hint)


def test_credentials_that_come_late_are_found(
    bench: Bench, s3_server: SeaweedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O073: an instance's own service may not answer at first."""
    shared = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    tier = bench.tier(retry_s=0.5, key=None, secret=None)
    with pytest.raises(InvalidError, match="NoCredentialsError"):
        tier.put("a.json", SMALL)
    text = (
        f"[default]\naws_access_key_id = {s3_server.access_key}\n"
        f"aws_secret_access_key = {s3_server.secret_key}\n"
    )
    # In the middle of the next call, which looks for them again on every try.
    later = threading.Timer(0.5, shared.write_text, (text,))
    later.start()
    bench.tier(retry_s=30, key=None, secret=None).put("a.json", SMALL)
    later.join()
    assert bench.read("a.json") == SMALL


# ------------------------------------------------------------------------------ lost replies


def test_a_lost_reply_of_a_put_says_that_it_exists(bench: Bench) -> None:
    """The caller reads it back and finds its own bytes."""
    bench.proxy.inject("PutObject", LOST_REPLY, times=1)
    with pytest.raises(AlreadyExistsError):
        bench.tier().put("a.json", SMALL)
    assert bench.read("a.json") == SMALL


@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
@pytest.mark.parametrize(
    ("operation", "data"),
    [
        ("PutObject", SMALL),
        ("CreateMultipartUpload", LARGE),
        ("UploadPart", LARGE),
        ("CompleteMultipartUpload", LARGE),
    ],
)
def test_a_lost_reply_of_an_upload_does_no_harm(
    bench: Bench, operation: str, data: bytes, times: int | None
) -> None:
    bench.proxy.inject(operation, LOST_REPLY, times=times)
    if times == 1 or operation == "CompleteMultipartUpload":
        bench.tier(retry_s=30 if times else 0.5).upload("a.pack", BytesSource(data))
        assert bench.read("a.pack") == data
    else:
        with pytest.raises(UnavailableError):
            bench.tier(retry_s=0.5).upload("a.pack", BytesSource(data))
    # A lost Create leaves an upload whose id nobody knows; the next try finds and aborts it.
    allowed = ["a.pack"] if operation == "CreateMultipartUpload" and times is None else []
    assert bench.open_uploads() in ([], allowed)


def test_what_a_lost_create_left_goes_with_the_next_upload(bench: Bench) -> None:
    bench.proxy.inject("CreateMultipartUpload", LOST_REPLY)
    with pytest.raises(UnavailableError):
        bench.tier(retry_s=0.2).upload("a.pack", BytesSource(LARGE))
    assert bench.open_uploads() == ["a.pack"]
    bench.proxy.clear()
    bench.tier().upload("a.pack", BytesSource(LARGE))
    assert bench.open_uploads() == []


def test_an_error_inside_a_good_complete_is_an_error(bench: Bench) -> None:
    """S3 begins its answer with 200 before it knows how Complete will end."""
    bench.proxy.inject("CompleteMultipartUpload", refuse(200, "InternalError"), times=1)
    bench.tier().upload("a.pack", BytesSource(LARGE))
    assert bench.read("a.pack") == LARGE
    assert len(bench.proxy.seen("CompleteMultipartUpload")) == 2
    bench.proxy.inject("CompleteMultipartUpload", refuse(200, "InternalError"))
    with pytest.raises(UnavailableError, match="InternalError"):
        bench.tier(retry_s=0.3).upload("b.pack", BytesSource(LARGE))
    assert bench.keys() == ["a.pack"]
    assert bench.open_uploads() == []


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
def test_a_store_that_says_done_and_has_nothing_is_found_out(bench: Bench, data: bytes) -> None:
    """O065: sent once more, and then it is an error; nobody hears that it is durable."""
    done = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
    operation = "PutObject" if data is SMALL else "CompleteMultipartUpload"
    lie = Fault(
        status=200, reply_headers={"etag": '"x"'}, reply_body=b"" if data is SMALL else done
    )
    bench.proxy.inject(operation, lie, times=1)
    bench.tier().upload("a.pack", BytesSource(data))
    assert bench.read("a.pack") == data
    bench.proxy.inject(operation, lie)
    with pytest.raises(UnavailableError, match="something else"):
        bench.tier().upload("b.pack", BytesSource(data))
    assert bench.keys() == ["a.pack"]


def test_a_store_that_reports_a_short_object_is_found_out(bench: Bench) -> None:
    """O065: 200 for an upload, no checksum, and an object that lacks whole parts."""
    bench.proxy.inject("CompleteMultipartUpload", Fault(without=rb"<Checksum.*</Checksum[^>]*>"))
    bench.proxy.inject("HeadObject", Fault(), times=1)
    bench.proxy.inject("HeadObject", Fault(reply_headers={"content-length": str(PART_BYTES)}))
    with pytest.raises(UnavailableError, match="something else"):
        bench.tier().upload("a.pack", BytesSource(LARGE))
    assert len(bench.proxy.seen("CompleteMultipartUpload")) == 2


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
def test_an_upload_costs_as_few_requests_as_can_be(bench: Bench, data: bytes) -> None:
    """The store's word on the whole object comes with the last reply; nobody asks once more."""
    info = bench.tier().upload("a.pack", BytesSource(data))
    assert info == ObjectInfo(key="a.pack", length=len(data), crc32c=crc32c(data))
    asked = [request.operation for request in bench.proxy.log]
    parts = ["HeadObject", "ListObjectsV2", "CreateMultipartUpload", "ListMultipartUploads"]
    parts += ["UploadPart"] * 3 + ["CompleteMultipartUpload"]
    # A client that has never had an answer asks once whether the bucket is there.
    assert sorted(asked) == (["PutObject"] if data is SMALL else sorted(parts))


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["whole", "parts"])
def test_a_reply_with_another_checksum_is_not_believed(bench: Bench, data: bytes) -> None:
    """O065: the store has stored something, and says itself that it is not what was sent."""
    wrong = "AAAAAA=="
    xml = f"<CompleteMultipartUploadResult><ChecksumCRC32C>{wrong}</ChecksumCRC32C>"
    lie = Fault(
        status=200,
        reply_headers={"etag": '"x"', "x-amz-checksum-crc32c": wrong},
        reply_body=b"" if data is SMALL else f"{xml}</CompleteMultipartUploadResult>".encode(),
    )
    operation = "PutObject" if data is SMALL else "CompleteMultipartUpload"
    bench.proxy.inject(operation, lie)
    with pytest.raises(UnavailableError, match="something else"):
        bench.tier().upload("a.pack", BytesSource(data))
    assert len(bench.proxy.seen(operation)) == 2


# ------------------------------------------------------------------------- refused checksums

REFUSALS = {
    "not implemented": refuse(501, "NotImplemented"),
    "invalid argument": refuse(400, "InvalidArgument", Message="x-amz-checksum-crc32c unknown"),
    "invalid request": refuse(400, "InvalidRequest", Message="Unsupported checksum algorithm"),
}


def carries_checksum(request: Request) -> bool:
    return any(name.startswith("x-amz-checksum") for name in request.headers)


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_store_that_refuses_checksums_is_served_without(
    bench: Bench, refusal: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """O081: found out once, said once; and what was put is read back."""
    bench.proxy.inject(None, refusal, when=carries_checksum)
    # Such a store keeps none either, and gives none back.
    tier = bench.tier()
    with caplog.at_level(logging.WARNING, "dcp_tiered"):
        tier.put("a.json", SMALL)
        info = tier.upload("a.pack", BytesSource(LARGE))
        tier.upload("b.pack", BytesSource(SMALL))
    assert bench.read("a.json") == SMALL
    assert bench.read("a.pack") == LARGE
    assert bench.read("b.pack") == SMALL
    assert tier.get("a.json", 1 << 20) == SMALL
    assert tier.head("a.pack").length == len(LARGE)
    assert info is not None
    assert info.crc32c is None, "what the uploader reads back"
    assert len([r for r in bench.proxy.log if carries_checksum(r)]) == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "takes no checksums" in caplog.text
    (read_back,) = bench.proxy.seen("GetObject")[:1]
    assert read_back.key == "a.json"


def test_bytes_that_a_store_without_checksums_garbles_are_found_out(bench: Bench) -> None:
    """O081: never silently unverified, small objects included."""
    bench.proxy.inject(None, REFUSALS["not implemented"], when=carries_checksum)
    bench.proxy.inject("GetObject", Fault(flip_byte=True))
    with pytest.raises(AlreadyExistsError, match="other bytes"):
        bench.tier().put("a.json", SMALL)


@pytest.mark.parametrize("operation", ["HeadObject", "GetObject"])
def test_a_store_that_refuses_to_be_asked_for_checksums_is_not_asked(
    bench: Bench, operation: str
) -> None:
    bench.write("there.json", SMALL)
    bench.proxy.inject(operation, refuse(501, "NotImplemented"), when=carries_checksum)
    tier = bench.tier()
    for _ in range(2):
        OPERATIONS[operation](tier)
    assert [carries_checksum(r) for r in bench.proxy.seen(operation)] == [True, False, False]


def test_what_is_refused_with_and_without_checksums_is_an_error(bench: Bench) -> None:
    """A store that lacks something else gets its checksums next time."""
    bench.proxy.inject("PutObject", refuse(501, "NotImplemented"), times=2)
    tier = bench.tier()
    with pytest.raises(InvalidError, match="NotImplemented"):
        tier.put("a.json", SMALL)
    tier.put("a.json", SMALL)
    assert [carries_checksum(r) for r in bench.proxy.seen("PutObject")] == [True, False, True]


def test_a_checkpoint_becomes_durable_on_a_store_that_refuses_checksums(s3_run: Run) -> None:
    """O081: by the flusher's own process, which reads the pack back before it says so."""
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy:
        proxy.inject(None, REFUSALS["not implemented"], when=carries_checksum)
        arguments = runs.behind(s3_run, proxy.endpoint)
        runs.save(arguments, "a", 7)
        runs.wait(arguments, "a")
    sizes = s3_run.keys()
    (pack,) = (key for key in sizes if key.endswith(".pack"))
    read_back = [r for r in proxy.seen("GetObject") if r.path.endswith(pack)]
    ranges = [r.headers["range"].removeprefix("bytes=").split("-") for r in read_back]
    assert sum(int(end) - int(start) + 1 for start, end in ranges) == sizes[pack]
    kinds = sorted(key.rpartition(".")[2] for key in sizes)
    assert kinds == ["json", "json", "ok", "pack"]
    assert runs.load(s3_run.durable_only(), "a") == 7


def test_a_pack_costs_as_few_requests_as_can_be(s3_run: Run) -> None:
    """One look whether it is there, one upload, and one look before the commit names it."""
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy:
        arguments = runs.behind(s3_run, proxy.endpoint)
        runs.save(arguments, "a", 7)
        runs.wait(arguments, "a")
        asked = [r.operation for r in proxy.log if "/packs/" in r.path or r.path.endswith(".pack")]
    assert asked == ["HeadObject", "PutObject", "HeadObject"]


# ------------------------------------------------------------------------------------- reads


def test_a_truncated_reply_is_carried_on(bench: Bench) -> None:
    """O076: from the byte where it broke, and the bytes are right."""
    bench.write("a.pack", LARGE)
    bench.proxy.inject("GetObject", TRUNCATED, times=4)
    buffer = bytearray(4 << 20)
    bench.tier().read_into("a.pack", 4321, memoryview(buffer))
    assert buffer == LARGE[4321 : 4321 + len(buffer)]
    ranges = [request.headers["range"] for request in bench.proxy.seen("GetObject")]
    assert len(ranges) == len(set(ranges)) == 5
    assert {text.rpartition("-")[2] for text in ranges} == {str(4321 + len(buffer) - 1)}


@pytest.mark.parametrize("fault", [RESET, SLOW_DOWN, TRUNCATED], ids=["reset", "503", "truncated"])
def test_a_read_that_never_ends_well_is_an_error(bench: Bench, fault: Fault) -> None:
    """O076: no short read is passed off as a whole one."""
    bench.write("a.pack", SMALL)
    bench.proxy.inject("GetObject", fault)
    with pytest.raises(UnavailableError):
        bench.tier(retry_s=0.5).read_into("a.pack", 0, memoryview(bytearray(1000)))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(reply_headers={"content-range": "bytes 101-1100/70001"}),
        Fault(reply_headers={"content-range": "bytes 0-999/70001"}),
        Fault(reply_headers={"content-range": ""}),
    ],
    ids=["starts later", "starts earlier", "ignores the range"],
)
def test_a_reply_for_another_range_is_refused(bench: Bench, fault: Fault) -> None:
    """O076."""
    bench.write("a.pack", SMALL)
    bench.proxy.inject("GetObject", fault)
    buffer = bytearray(1000)
    with pytest.raises(CorruptError, match="range"):
        bench.tier().read_into("a.pack", 100, memoryview(buffer))
    assert buffer == bytes(1000)


def test_a_damaged_reply_is_read_again(bench: Bench) -> None:
    """O075."""
    tier = bench.tier(retry_s=2)
    tier.put("a.json", SMALL)
    bench.proxy.inject("GetObject", Fault(flip_byte=True), times=1)
    assert tier.get("a.json", 1 << 20) == SMALL
    bench.proxy.inject("GetObject", Fault(flip_byte=True))
    with pytest.raises(CorruptError) as raised:
        tier.get("a.json", 1 << 20)
    assert "a.json" in str(raised.value.key)


def test_a_listing_that_breaks_off_is_an_error(bench: Bench) -> None:
    bench.write("step-1/a", b"x")
    page = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated>"
        b"<NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    )
    bench.proxy.inject("ListObjectsV2", Fault(status=200, reply_body=page))
    with pytest.raises(UnavailableError, match="listing"):
        list(bench.tier().list_keys("step-1"))


# ------------------------------------------------------------------------------------ aborts


def test_an_interrupted_upload_is_aborted(bench: Bench) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(request: Request) -> None:
        del request
        signal.pthread_kill(main, signal.SIGINT)

    bench.proxy.inject(
        "UploadPart", Fault(hook=interrupt, stall=True), when=lambda r: "partNumber=2" in r.path
    )
    # A shell that starts the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.tier(timeout_s=2).upload("a.pack", BytesSource(LARGE))
    finally:
        signal.signal(signal.SIGINT, before)
    assert bench.keys() == []
    assert bench.open_uploads() == []
    assert len(bench.proxy.seen("AbortMultipartUpload")) == 1


def test_a_part_that_fails_stops_the_others(bench: Bench) -> None:
    """O067: parts that would go on trying for long are called off, and then the upload is."""
    bench.proxy.inject(
        "UploadPart", refuse(403, "AccessDenied"), when=lambda r: "partNumber=2" in r.path
    )
    bench.proxy.inject("UploadPart", SLOW_DOWN)
    with pytest.raises(InvalidError, match="of part 2"):
        bench.tier(retry_s=3600).upload("a.pack", BytesSource(LARGE))
    assert bench.open_uploads() == []


def test_an_upload_is_aborted_when_the_store_fails_at_the_end(bench: Bench) -> None:
    """Even when the look at what is there fails as well."""
    bench.proxy.inject("CompleteMultipartUpload", SLOW_DOWN)
    bench.proxy.inject("HeadObject", Fault(), times=1)
    bench.proxy.inject("HeadObject", refuse(403, "AccessDenied"))
    with pytest.raises(InvalidError):
        bench.tier(retry_s=0.3).upload("a.pack", BytesSource(LARGE))
    assert bench.open_uploads() == []


def test_an_abort_that_fails_hides_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.proxy.inject("UploadPart", refuse(403, "AccessDenied"))
    bench.proxy.inject("AbortMultipartUpload", refuse(403, "AccessDenied"))
    with (
        caplog.at_level(logging.WARNING, "dcp_tiered"),
        pytest.raises(InvalidError, match="of part"),
    ):
        bench.tier().upload("a.pack", BytesSource(LARGE))
    assert "cannot abort" in caplog.text


def test_stale_uploads_of_the_same_key_are_aborted(bench: Bench) -> None:
    for key in ("a.pack", "a.pack", "a.pack2"):
        bench.begin_upload(key)
    bench.tier().upload("a.pack", BytesSource(LARGE))
    assert bench.open_uploads() == ["a.pack2"]
    assert bench.read("a.pack") == LARGE


def test_without_the_right_to_list_uploads_the_upload_works(bench: Bench) -> None:
    bench.proxy.inject("ListMultipartUploads", refuse(403, "AccessDenied"))
    bench.tier().upload("a.pack", BytesSource(LARGE))
    assert bench.read("a.pack") == LARGE


def test_an_upload_that_somebody_aborted_can_be_tried_again(bench: Bench) -> None:
    """The bucket's lifecycle may do so; the caller is told to come back, not to fix its call."""
    bench.proxy.inject("UploadPart", refuse(404, "NoSuchUpload"))
    with pytest.raises(UnavailableError, match="NoSuchUpload"):
        bench.tier().upload("a.pack", BytesSource(LARGE))


# ---------------------------------------------------------------------------------- headers


def test_requests_are_such_as_plain_stores_take(bench: Bench) -> None:
    """O081: no trailing checksum, no aws-chunked; one CRC32C in a header."""
    tier = bench.tier()
    tier.put("a.json", SMALL)
    tier.upload("a.pack", BytesSource(LARGE))
    sent = [*bench.proxy.seen("PutObject"), *bench.proxy.seen("UploadPart")]
    assert len(sent) == 4
    for request in sent:
        names = {name for name in request.headers if name.startswith("x-amz-checksum")}
        assert names == {"x-amz-checksum-crc32c"}
        assert "x-amz-trailer" not in request.headers
        assert "aws-chunked" not in request.headers.get("content-encoding", "")
        assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_client_options_of_the_user_are_passed_on(bench: Bench) -> None:
    """O081: what s3fs users set works here, and does not collide with what we set."""
    options = {
        "retries": {"max_attempts": 7},
        "s3": {"payload_signing_enabled": True},
        "user_agent_extra": "from-the-user",
        "request_checksum_calculation": "when_required",
    }
    bench.proxy.inject("PutObject", SLOW_DOWN)
    tier = bench.tier(retry_s=0, config_kwargs=options)
    with pytest.raises(UnavailableError, match="on try 1"):
        tier.put("a.json", SMALL)
    (request,) = bench.proxy.seen("PutObject")
    assert "from-the-user" in request.headers["user-agent"]
    assert len(request.headers["x-amz-content-sha256"]) == 64


def test_credentials_may_be_among_the_clients_arguments(bench: Bench) -> None:
    """As s3fs has it: `key` and `secret` win over them."""
    mine = bench.tier()._requests._options
    inner = {"aws_access_key_id": mine["key"], "aws_secret_access_key": mine["secret"]}
    bench.tier(key=None, secret=None, client_kwargs=inner).put("a.json", SMALL)
    wrong = dict.fromkeys(inner, "wrong")
    bench.tier(client_kwargs=wrong).put("b.json", SMALL)
    assert bench.keys() == ["a.json", "b.json"]


def everything(tier: S3Tier) -> None:
    """Have a tier send each kind of request about objects."""
    tier.put("step-1/a.json", SMALL)
    tier.upload("step-1/a.pack", BytesSource(LARGE))
    tier.get("step-1/a.json", 1 << 20)
    tier.read_into("step-1/a.pack", 5, memoryview(bytearray(100)))
    tier.head("step-1/a.pack")
    list(tier.list_keys("step-1"))
    list(tier.list_directories())


def test_every_request_carries_what_its_operation_takes(bench: Bench, client: Any) -> None:
    """Names of headers as the documentation of S3 has them."""
    bench.begin_upload("step-1/a.pack")  # is aborted
    given = {
        "ExpectedBucketOwner": "123456789012",
        "StorageClass": "STANDARD_IA",
        "Tagging": "team=llm&run=42",
        "ACL": "bucket-owner-full-control",
        "Metadata": {"model": "m7"},
    }
    everything(bench.tier(s3_additional_kwargs=given, requester_pays=True))
    stores = {
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-tagging": "team=llm&run=42",
        "x-amz-acl": "bucket-owner-full-control",
        "x-amz-meta-model": "m7",
    }
    always = {"x-amz-expected-bucket-owner": "123456789012", "x-amz-request-payer": "requester"}
    for request in bench.proxy.log:
        expected = always
        if request.operation in ("PutObject", "CreateMultipartUpload"):
            expected = always | stores
        named = {name: request.headers.get(name) for name in always | stores}
        assert {name: value for name, value in named.items() if value} == expected, request
    assert {request.operation for request in bench.proxy.log} == {
        "PutObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
        "AbortMultipartUpload",
        "ListMultipartUploads",
        "ListObjectsV2",
        "HeadObject",
        "GetObject",
    }
    for name in ("a.json", "a.pack"):
        where = {"Bucket": bench.bucket, "Key": f"{bench.root}/step-1/{name}"}
        head = client.head_object(**where)
        assert (head["StorageClass"], head["Metadata"]) == ("STANDARD_IA", {"model": "m7"})
        tags = {tag["Key"]: tag["Value"] for tag in client.get_object_tagging(**where)["TagSet"]}
        assert tags == {"team": "llm", "run": "42"}


def test_the_key_of_a_customer_goes_along_and_is_needed(bench: Bench, client: Any) -> None:
    key = secrets.token_bytes(32)
    text = base64.b64encode(key).decode()
    digest = base64.b64encode(hashlib.md5(key).digest()).decode()
    algorithm = {"SSECustomerAlgorithm": "AES256"}
    given = {**algorithm, "SSECustomerKey": text, "SSECustomerKeyMD5": digest}
    everything(bench.tier(s3_additional_kwargs=given))
    prefix = "x-amz-server-side-encryption-customer-"
    without = {"ListObjectsV2", "ListMultipartUploads"}
    for request in bench.proxy.log:
        sent = {name: value for name, value in request.headers.items() if prefix in name}
        full = {
            f"{prefix}algorithm": "AES256",
            f"{prefix}key": text,
            f"{prefix}key-md5": digest,
        }
        assert sent == ({} if request.operation in without else full), request
    for name, data in (("a.json", SMALL), ("a.pack", LARGE)):
        where = {"Bucket": bench.bucket, "Key": f"{bench.root}/step-1/{name}"}
        with pytest.raises(ClientError, match="must provide the customer key"):
            client.get_object(**where)
        stored = client.get_object(**where, **algorithm, SSECustomerKey=key)["Body"].read()
        assert stored == data
    with pytest.raises(InvalidError, match="400") as raised:
        bench.tier(retry_s=3600).get("step-1/a.json", 1 << 20)
    assert "SSE-C" in str(raised.value.hint)


def test_the_store_keeps_the_checksum_of_what_it_encrypts(bench: Bench) -> None:
    """Where it does, no pack has to be read back."""
    given = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
    tier = bench.tier(s3_additional_kwargs=given)
    tier.upload("a.pack", BytesSource(LARGE))
    assert tier.head("a.pack") == ObjectInfo(key="a.pack", length=len(LARGE), crc32c=crc32c(LARGE))


@pytest.mark.parametrize(
    ("given", "asked", "operation"),
    [
        ({"ServerSideEncryption": "AES256"}, "x-amz-server-side-encryption", "PutObject"),
        (
            {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32},
            "x-amz-server-side-encryption-customer-algorithm",
            "UploadPart",
        ),
    ],
)
def test_a_store_that_ignores_the_encryption_gets_nothing_more(
    bench: Bench, given: dict[str, str], asked: str, operation: str
) -> None:
    """SeaweedFS takes a ServerSideEncryption that it does not know, and stores in the clear."""
    bench.proxy.inject(operation, Fault(reply_headers={asked: ""}))
    tier = bench.tier(retry_s=3600, s3_additional_kwargs=given)
    for _ in range(2):
        with pytest.raises(InvalidError, match="does not confirm"):
            OPERATIONS[operation](tier)
    sent = len(bench.proxy.seen("PutObject")) + len(bench.proxy.seen("UploadPart"))
    assert sent <= 4, "the parts that were on their way"
    assert len(bench.proxy.seen("PutObject")) <= 1
    assert bench.open_uploads() == []


def test_a_store_that_ignores_the_encryption_of_parts_gets_one_object(bench: Bench) -> None:
    """A pack may go before any small object, and no reply to one of its requests has to tell."""
    name = "x-amz-server-side-encryption"
    for operation in ("CreateMultipartUpload", "UploadPart", "HeadObject"):
        bench.proxy.inject(operation, Fault(reply_headers={name: ""}))
    tier = bench.tier(retry_s=3600, s3_additional_kwargs={"ServerSideEncryption": "AES256"})
    with pytest.raises(InvalidError, match="does not confirm ServerSideEncryption 'AES256'"):
        tier.upload("a.pack", BytesSource(LARGE))
    sent = len(bench.proxy.seen("UploadPart"))
    for work in (tier.upload, lambda key, source: tier.put(key, source.pread(9, 0))):
        with pytest.raises(InvalidError, match="does not confirm"):
            work("b.pack", BytesSource(LARGE))
    assert len(bench.proxy.seen("UploadPart")) == sent
    assert bench.proxy.seen("PutObject") == []
    assert bench.open_uploads() == []


def test_what_was_stored_without_encryption_is_no_verified_pack(
    bench: Bench, client: Any, tmp_path: Path
) -> None:
    """Nor does an upload take it for its own: it was sent before the options asked, say."""
    pack = plan_pack("a", "0" * 12, [(f"0-{'0' * 16}.shard", len(LARGE), crc32c(LARGE))], "test")
    data = LARGE + bytes(pack.length - len(LARGE) - len(pack.tail)) + pack.tail
    key, local = f"a/{pack.name}", PosixTier(tmp_path, tmp_path, "local")
    bench.tier().upload(key, BytesSource(data))
    found = client.head_object(Bucket=bench.bucket, Key=f"{bench.root}/{key}")
    assert "ServerSideEncryption" not in found
    tier = bench.tier(s3_additional_kwargs={"ServerSideEncryption": "AES256"})
    tier.put("a.json", b"{}")
    assert PackStore(local, bench.tier()).is_verified("a", pack)
    assert not PackStore(local, tier).is_verified("a", pack)
    assert PackStore(local, tier).verified("a", pack.name) is None
    with pytest.raises(InvalidError, match="not encrypted as the options ask") as raised:
        tier.upload(key, BytesSource(data))
    assert "Remove s3://" in str(raised.value.hint)
    assert tier.head("a.json").is_as_asked


def test_who_has_seen_the_encryption_asks_no_more(bench: Bench, client: Any) -> None:
    tier = bench.tier(s3_additional_kwargs={"ServerSideEncryption": "AES256"})
    asked = []
    for key in ("a.pack", "b.pack"):
        before = len(bench.proxy.seen("HeadObject"))
        tier.upload(key, BytesSource(LARGE))
        asked.append(len(bench.proxy.seen("HeadObject")) - before)
        found = client.head_object(Bucket=bench.bucket, Key=f"{bench.root}/{key}")
        assert found["ServerSideEncryption"] == "AES256"
    assert asked[0] == asked[1] + 1
    other = bench.tier(s3_additional_kwargs={"ServerSideEncryption": "AES256"})
    other.put("a.json", b"{}")
    before = len(bench.proxy.seen("HeadObject"))
    other.upload("c.pack", BytesSource(LARGE))
    assert len(bench.proxy.seen("HeadObject")) - before == asked[1]


def test_what_the_store_refuses_of_it_is_not_tried_again(bench: Bench) -> None:
    bench.proxy.inject("PutObject", refuse(400, "AccessControlListNotSupported"))
    tier = bench.tier(retry_s=3600, s3_additional_kwargs={"ACL": "bucket-owner-read"})
    with pytest.raises(InvalidError, match="400 AccessControlListNotSupported"):
        tier.put("a.json", SMALL)


# -------------------------------------------------------------------------------- redirects

REDIRECTS: dict[str, Callable[[str], Fault]] = {
    "301": lambda there: refuse(
        301,
        "PermanentRedirect",
        headers={"location": f"{there}/x", "x-amz-bucket-region": "us-east-2"},
        Endpoint=there.removeprefix("http://"),
    ),
    "301 without region": lambda there: refuse(
        301, "PermanentRedirect", headers={"location": f"{there}/x"}
    ),
    "307": lambda there: refuse(307, "TemporaryRedirect", headers={"location": f"{there}/x"}),
    "400": lambda _: refuse(400, "AuthorizationHeaderMalformed", Region="us-east-2"),
    "400 opt-in": lambda _: refuse(
        400,
        "IllegalLocationConstraintException",
        headers={"x-amz-bucket-region": "me-south-1"},
    ),
}
redirected = pytest.mark.parametrize(
    ("operation", "redirect"),
    [
        *(pytest.param("PutObject", fault, id=name) for name, fault in REDIRECTS.items()),
        pytest.param("UploadPart", REDIRECTS["301"], id="part"),
        pytest.param("CompleteMultipartUpload", REDIRECTS["301"], id="complete"),
    ],
)


@redirected
def test_a_redirect_by_a_server_is_not_followed(
    bench: Bench, operation: str, redirect: Callable[[str], Fault]
) -> None:
    with FaultProxy() as there:
        there.inject(None, Fault(status=200, reply_headers={"etag": '"x"'}))
        bench.proxy.inject(operation, redirect(there.endpoint))
        tier = bench.tier()
        for _ in range(2):  # botocore remembers where a bucket has gone
            with pytest.raises(ResidencyError) as raised:
                OPERATIONS[operation](tier)
            assert "region" in str(raised.value.hint)
        assert there.log == []
    # Nor is anything signed for the other region.
    for request in bench.proxy.log:
        assert "/us-east-1/s3/" in request.headers["authorization"]


@redirected
def test_a_bucket_is_not_followed_into_another_region(
    operation: str, redirect: Callable[[str], Fault]
) -> None:
    """With Amazon's own host names, which botocore changes by itself; a proxy plays all of them."""
    upload = (
        b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    )
    with FaultProxy() as amazon:
        amazon.inject(operation, redirect("http://ckpt-eu.s3.us-east-2.amazonaws.com"), times=1)
        amazon.inject("HeadObject", Fault(status=404))
        amazon.inject("CreateMultipartUpload", Fault(status=200, reply_body=upload))
        amazon.inject("ListMultipartUploads", Fault(status=200, reply_body=b"<x/>"))
        amazon.inject("ListObjectsV2", Fault(status=200, reply_body=b"<x/>"))
        amazon.inject(None, Fault(status=200, reply_headers={"etag": '"x"'}))
        tier = S3Tier(
            "ckpt-eu/run",
            {
                "key": "k",
                "secret": "s",
                "use_ssl": False,
                "client_kwargs": {"region_name": "eu-central-1"},
                "config_kwargs": {"proxies": {"http": amazon.endpoint}},
            },
            request_timeout_s=5,
            request_retry_s=5,
            part_bytes=PART_BYTES,
        )
        with pytest.raises(ResidencyError):
            OPERATIONS[operation](tier)
        hosts = {request.headers["host"] for request in amazon.log}
        assert hosts == {"ckpt-eu.s3.eu-central-1.amazonaws.com"}
