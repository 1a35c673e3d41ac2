"""A small imitation of Amazon S3: several regions, owners, redirects, settings of buckets.

It is an HTTP proxy that ends TLS itself, so that botocore talks to Amazon's own host names, which
it makes and changes by itself, and the server counts the bytes of bodies that each host was sent.

    with Amazon(tmp_path) as amazon:
        bucket = amazon.add("ckpt", "eu-central-1", "123456789012")
        tier = S3Tier("ckpt/run", amazon.options("eu-central-1"), ...)
"""

import http.client
import re
import ssl
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

ACCOUNT = "123456789012"
_HOST = re.compile(r"(?:(?P<bucket>.+)\.)?s3\.(?P<region>[a-z0-9-]+)\.amazonaws\.com")
R2_ACCOUNT = "0123456789abcdef0123456789abcdef"
_R2 = re.compile(r"[0-9a-f]{32}\.(?:(?P<region>eu)\.)?r2\.cloudflarestorage\.com")
_CONTROL = re.compile(r"(?P<account>\d{12})\.s3-control\.(?P<region>[a-z0-9-]+)\.amazonaws\.com")
_BLOCKED = "".join(
    f"<{name}>true</{name}>"
    for name in (
        "BlockPublicAcls",
        "IgnorePublicAcls",
        "BlockPublicPolicy",
        "RestrictPublicBuckets",
    )
)
BLOCKED = f"<PublicAccessBlockConfiguration>{_BLOCKED}</PublicAccessBlockConfiguration>"
OPEN = BLOCKED.replace("true", "false")
ENFORCED = (
    "<OwnershipControls><Rule><ObjectOwnership>BucketOwnerEnforced</ObjectOwnership></Rule>"
    "</OwnershipControls>"
)
ABSENT = {
    "publicAccessBlock": "NoSuchPublicAccessBlockConfiguration",
    "policyStatus": "NoSuchBucketPolicy",
    "ownershipControls": "OwnershipControlsNotFoundError",
    "replication": "ReplicationConfigurationNotFoundError",
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
}
_ENCRYPTION = "x-amz-server-side-encryption"


def policy_status(is_public: str) -> str:
    return f"<PolicyStatus><IsPublic>{is_public}</IsPublic></PolicyStatus>"


def encryption(algorithm: str, key: str = "") -> str:
    key = f"<KMSMasterKeyID>{key}</KMSMasterKeyID>" if key else ""
    inner = f"<SSEAlgorithm>{algorithm}</SSEAlgorithm>{key}"
    return (
        "<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault>"
        f"{inner}</ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>"
    )


def replication(
    *targets: str, status: str = "Enabled", prefix: str = "", key: str | None = None
) -> str:
    encryption = (
        ""
        if key is None
        else (
            f"<EncryptionConfiguration><ReplicaKmsKeyID>{key}</ReplicaKmsKeyID>"
            "</EncryptionConfiguration>"
        )
    )
    rules = "".join(
        f"<Rule><Status>{status}</Status><Filter><Prefix>{prefix}</Prefix></Filter><Destination>"
        f"<Bucket>arn:aws:s3:::{target}</Bucket>{encryption}</Destination></Rule>"
        for target in targets
    )
    return f"<ReplicationConfiguration><Role>r</Role>{rules}</ReplicationConfiguration>"


def access_list(uri: str) -> str:
    return (
        '<AccessControlPolicy xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><Owner><ID>o'
        f'</ID></Owner><AccessControlList><Grant><Grantee xsi:type="Group"><URI>{uri}</URI>'
        "</Grantee><Permission>READ</Permission></Grant></AccessControlList></AccessControlPolicy>"
    )


@dataclass
class Bucket:
    """A bucket, and what its owner has set; a setting that is missing is absent."""

    region: str
    owner: str = ACCOUNT
    settings: dict[str, str] = field(
        default_factory=lambda: {
            "publicAccessBlock": BLOCKED,
            "ownershipControls": ENFORCED,
            "encryption": encryption("AES256"),
            "acl": access_list("http://acs.amazonaws.com/groups/s3/LogDelivery"),
            "accelerate": "<AccelerateConfiguration/>",
        }
    )
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    """Bytes and CRC32C header."""
    encrypted: dict[str, str] = field(default_factory=dict)
    """With what each object is encrypted, as its PUT asked."""
    lists_to_anybody: bool = False


@dataclass(frozen=True)
class Fault:
    """What a question is answered with instead."""

    status: int = 0
    code: str = ""
    body: str | None = None
    silence_s: float = 0


@dataclass(frozen=True)
class Seen:
    """A request that reached a host."""

    host: str
    method: str
    path: str
    headers: dict[str, str]


class Amazon:
    """Every host of Amazon S3, on one port.

    Args:
        directory: For its certificate.
        upstream: Host and port of a server that answers instead, which then only sees the names.
    """

    def __init__(self, directory: Path, upstream: str | None = None) -> None:
        self.upstream = upstream
        self.ca = directory / "ca.pem"
        self._key = directory / "key.pem"
        self.buckets: dict[str, Bucket] = {}
        self.account_blocks: dict[str, str] = {}
        self.faults: dict[str, Fault] = {}
        """By setting, `head` for HeadBucket, `account` for that of the account."""
        self.refusing: set[str] = set()
        """Buckets whose HeadBucket the asker has no permission for."""
        self.log: list[Seen] = []
        self.body_bytes: Counter[str] = Counter()
        """Bytes of bodies, by host."""
        self.on_put: Any = None
        """Called with the key before an object is there."""

    def __enter__(self) -> Self:
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=amazon"
        command += f" -keyout {self._key} -out {self.ca} -addext subjectAltName={self._names()}"
        subprocess.run(command.split(), check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.ca, self._key)
        handler = type("Handler", (self._handler(),), {"amazon": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        return _Handler

    def _names(self) -> str:
        """Return the names in its certificate."""
        names = ",".join(
            f"DNS:{star}{service}.{region}.amazonaws.com"
            for region in ("eu-central-1", "eu-west-1", "us-east-2")
            for service in ("s3", "s3-control")
            for star in ("", "*.")
        )
        return names + "".join(
            f",DNS:{R2_ACCOUNT}.{part}r2.cloudflarestorage.com" for part in ("", "eu.")
        )

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, region: str, owner: str = ACCOUNT) -> Bucket:
        self.buckets[name] = Bucket(region, owner)
        return self.buckets[name]

    def options(self, region: str) -> dict[str, Any]:
        """Return options of a tier that talks to this server, as a user gives them."""
        proxy = f"http://127.0.0.1:{self._server.server_port}"
        return {
            "key": "k",
            "secret": "s",
            "client_kwargs": {"region_name": region, "verify": str(self.ca)},
            "config_kwargs": {"proxies": {"https": proxy, "http": proxy}},
        }

    def environment(self, region: str) -> dict[str, str]:
        """Return the environment of somebody who gives no options."""
        proxy = f"http://127.0.0.1:{self._server.server_port}"
        return {
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_DEFAULT_REGION": region,
            "AWS_CA_BUNDLE": str(self.ca),
            "HTTPS_PROXY": proxy,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body of a reply are two packets
    amazon: Amazon

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError, ssl.SSLError):
            self.connection = self.amazon.context.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()

    def do(self) -> None:
        host = self.headers["Host"].partition(":")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.amazon.body_bytes[host] += len(body)
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = urlsplit(self.path)
        self.amazon.log.append(Seen(host, self.command, self.path, headers))
        if self.amazon.upstream is not None:
            return self._pass_on(self.amazon.upstream, body)
        control, found = _CONTROL.fullmatch(host), _HOST.fullmatch(host)
        if r2 := _R2.fullmatch(host):
            return self._r2(r2["region"], unquote(path.path[1:]).partition("/")[0])
        if control:
            return self._setting("account", self.amazon.account_blocks.get(control["account"]))
        if not found:
            return self._error(500, "UnknownHost")
        name, key = found["bucket"], unquote(path.path[1:])
        if name is None:
            name, _, key = key.partition("/")
        bucket = self.amazon.buckets.get(name)
        if bucket is None:
            return self._error(404, "NoSuchBucket")
        if not key and self.command == "HEAD" and "head" in self.amazon.faults:
            return self._fault(self.amazon.faults["head"])
        if bucket.region != found["region"]:
            return self._error(301, "PermanentRedirect", {"x-amz-bucket-region": bucket.region})
        return self._about(name, key, headers, body)

    def _about(self, name: str, key: str, headers: dict[str, str], body: bytes) -> None:
        """Answer for a bucket or an object, at the host of its region."""
        bucket = self.amazon.buckets[name]
        told = {"x-amz-bucket-region": bucket.region}
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        is_head = not key and self.command == "HEAD"
        is_listing = self.command == "GET" and "list-type" in query
        is_known = "authorization" in headers or (is_listing and bucket.lists_to_anybody)
        owner = headers.get("x-amz-expected-bucket-owner", bucket.owner)
        if not is_known or owner != bucket.owner or (is_head and name in self.amazon.refusing):
            return self._error(403, "AccessDenied", told)
        if is_head:
            return self._reply(200, b"", told)
        for setting in ("accelerate", "acl", *ABSENT):
            if setting in query:
                return self._setting(setting, bucket.settings.get(setting))
        if self.command == "DELETE" and key and not query:
            bucket.objects.pop(key, None)
            return self._reply(204, b"")
        return self._object(bucket, key, query, body)

    def _r2(self, jurisdiction: str | None, name: str) -> None:
        """Answer for a bucket; one of a jurisdiction is not there at any other host."""
        bucket = self.amazon.buckets.get(name)
        if bucket is None or bucket.region != (jurisdiction or "auto"):
            return self._error(404, "NoSuchBucket")
        if self.command == "HEAD":
            return self._reply(200, b"", {"x-amz-bucket-region": "auto"})
        return self._error(501, "NotImplemented")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do  # noqa: N815 - http.server's names

    def _pass_on(self, upstream: str, body: bytes) -> None:
        server = http.client.HTTPConnection(upstream, timeout=30)
        with closing(server):
            server.request(self.command, self.path, body, dict(self.headers))
            reply = server.getresponse()
            self._reply(reply.status, reply.read(), dict(reply.getheaders()))

    def _setting(self, name: str, value: str | None) -> None:
        if name in self.amazon.faults:
            return self._fault(self.amazon.faults[name])
        if value is None:
            code = ABSENT["publicAccessBlock" if name == "account" else name]
            return self._error(404, code)
        return self._reply(200, value.encode())

    def _fault(self, fault: Fault) -> None:
        if fault.silence_s:
            time.sleep(fault.silence_s)
            self.close_connection = True
            return None
        if fault.body is not None:
            return self._reply(fault.status or 200, fault.body.encode())
        return self._error(fault.status, fault.code)

    def _object(self, bucket: Bucket, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if self.command == "PUT":
            if self.amazon.on_put is not None:
                self.amazon.on_put(key)
            if key in bucket.objects and self.headers.get("If-None-Match") == "*":
                return self._error(412, "PreconditionFailed")
            crc = self.headers.get("x-amz-checksum-crc32c", "")
            bucket.objects[key] = (body, crc)
            bucket.encrypted[key] = self.headers.get(_ENCRYPTION, "")
            said = {"x-amz-checksum-crc32c": crc, "ETag": '"e"'}
            return self._reply(200, b"", said | {_ENCRYPTION: bucket.encrypted[key]})
        if self.command in ("GET", "HEAD") and key:
            if key not in bucket.objects:
                return self._error(404, "NoSuchKey")
            data, crc = bucket.objects[key]
            extra = {"x-amz-checksum-crc32c": crc, "x-amz-checksum-type": "FULL_OBJECT"}
            extra[_ENCRYPTION] = bucket.encrypted.get(key, "")
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if span:
                begin, end = int(span[1]), min(int(span[2]) + 1, len(data))
                extra = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
                return self._reply(206, data[begin:end], extra)
            return self._reply(200, data, extra)
        if self.command == "GET" and "list-type" in query:
            return self._listing(bucket, query)
        if self.command == "GET" and "uploads" in query:
            return self._reply(200, b"<ListMultipartUploadsResult/>")
        return self._error(501, "NotImplemented")

    def _listing(self, bucket: Bucket, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query["prefix"][0], query.get("delimiter", [""])[0]
        keys = sorted(key for key in bucket.objects if key.startswith(prefix))
        if delimiter:
            cut = len(prefix)
            names = sorted({key[cut:].partition("/")[0] for key in keys if "/" in key[cut:]})
            inner = "".join(
                f"<CommonPrefixes><Prefix>{prefix}{name}/</Prefix></CommonPrefixes>"
                for name in names
            )
        else:
            inner = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys)
        self._reply(200, f"<ListBucketResult>{inner}</ListBucketResult>".encode())

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        text = f"<Error><Code>{code}</Code><Message>as played</Message></Error>"
        self._reply(status, text.encode(), headers)

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if value and name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        said = {name.lower(): value for name, value in (headers or {}).items()}
        length = said.get("content-length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
