"""G9: how fast does a shard file get to S3, and how much of the processor does that take?

Ours: what the flusher does with a pack, from the sealed shard file to the verified object. Every
client that is installed sends the same file to the same server at its best settings: unsigned
payload, parts in parallel, no checksum but what it insists on. Reference: the floor, one `sendfile`
per part from the page cache over plain connections, with URLs that were signed before; it checks
nothing and tries nothing again. Each uploader lives in a process of its own, whose user and system
time is counted. The server is a SeaweedFS on the same machine, so the wall time is mostly its own.

The answers are our speed as a part of the fastest client's, and our CPU seconds per GB; those of
every client, and which ones are not installed, are in the details. Clients that are not in this
environment are found where `PYTHONPATH` says.
"""

import http.client
import importlib.util
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import harness
from benchmarks.backends import Ours
from benchmarks.harness import Answer, Options, Pair, Sample
from dcp_tiered import __version__
from dcp_tiered.config import Limits
from dcp_tiered.format.pack import Pack, plan_pack
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.services.packs import PackStore
from dcp_tiered.tiers.posix import PosixTier
from dcp_tiered.tiers.s3 import S3Tier

SPEED, CPU = 0.95, 0.6
_PART_BYTES = 64 << 20
_SMALL_PART_BYTES = 16 << 20
_THREADS = 3
_CPU_OF_OTHERS = "cpu_s_per_gb"
_KEY = "run/step-1/packs/x.pack"
_WAIT_S = 600


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send which file."""

    server: Mapping[str, Any]
    """Options as s3fs takes them."""
    shard: Path
    """The sealed shard file, in its run directory."""


Send = Callable[[str], Callable[[], object]]
"""Gets ready for a bucket, which is not measured; what it returns uploads the file, and is."""


def ours(target: Target) -> Send:
    """Send the pack as the flusher does, from the local tier to a verified object."""
    run_path, checkpoint_id = target.shard.parent.parent, target.shard.parent.name
    local = PosixTier(run_path, run_path, "local")
    pack = _pack(Catalog(local, None), checkpoint_id)
    limits = Limits()

    def ready(bucket: str) -> Callable[[], object]:
        durable = S3Tier(
            f"{bucket}/run",
            target.server,
            request_timeout_s=limits.request_timeout_s,
            request_retry_s=limits.request_retry_s,
            part_bytes=limits.part_bytes,
        )
        list(durable.list_directories())  # connects: a flusher keeps its client, as the others do
        return lambda: PackStore(local, durable).upload(checkpoint_id, pack, _go_on)

    return ready


def _go_on() -> None:
    """Nothing ends an upload here."""


def _pack(catalog: Catalog, checkpoint_id: str) -> Pack:
    published = catalog.published(checkpoint_id)
    assert published is not None
    shards = [(shard.name, shard.length, shard.crc32c) for shard in published.head.shards]
    return plan_pack(checkpoint_id, published.head.shards[0].node, shards, __version__)


def boto3(target: Target) -> Send:
    """Send with boto3's own transfer manager."""
    server = target.server
    client = (
        import_module("boto3.session")
        .Session()
        .client(
            "s3",
            **_client_arguments(server),
        )
    )
    config = import_module("boto3.s3.transfer").TransferConfig(
        multipart_chunksize=_PART_BYTES, max_concurrency=_THREADS
    )
    path = str(target.shard)
    return lambda bucket: partial(client.upload_file, path, bucket, _KEY, Config=config)


def s3fs(target: Target) -> Send:
    """Send with `put_file`."""
    from s3fs import S3FileSystem

    files = S3FileSystem(
        **target.server,
        config_kwargs={
            "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
            "request_checksum_calculation": "when_required",
        },
    )
    put = partial(files.put_file, str(target.shard), chunksize=_SMALL_PART_BYTES, max_concurrency=4)
    return lambda bucket: partial(put, f"{bucket}/{_KEY}")


def obstore(target: Target) -> Send:
    """Send with the Rust client."""
    client = import_module("obstore")
    server = target.server

    def ready(bucket: str) -> Callable[[], object]:
        store = import_module("obstore.store").S3Store(
            bucket,
            endpoint=server["endpoint_url"],
            region=server["client_kwargs"]["region_name"],
            access_key_id=server["key"],
            secret_access_key=server["secret"],
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": f"{_WAIT_S}s"},
        )
        settings = {"chunk_size": _SMALL_PART_BYTES, "max_concurrency": 4}
        return lambda: client.put(store, _KEY, target.shard, **settings)

    return ready


def awscrt(target: Target) -> Send:
    """Send with the C client."""
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.s3 import S3Client, S3RequestTlsMode, S3RequestType

    server = target.server
    client = S3Client(
        region=server["client_kwargs"]["region_name"],
        tls_mode=S3RequestTlsMode.DISABLED,
        credential_provider=AwsCredentialsProvider.new_static(server["key"], server["secret"]),
        part_size=_SMALL_PART_BYTES,
    )
    host = urlsplit(server["endpoint_url"]).netloc
    length = str(target.shard.stat().st_size)

    def send(bucket: str) -> None:
        headers = HttpHeaders([("host", host), ("content-length", length)])
        request = HttpRequest("PUT", f"/{bucket}/{_KEY}", headers)
        client.make_request(
            type=S3RequestType.PUT_OBJECT, request=request, send_filepath=str(target.shard)
        ).finished_future.result(_WAIT_S)

    return lambda bucket: partial(send, bucket)


def s3torchconnector(target: Target) -> Send:
    """Send with the writer of the PyTorch connector, in the pieces in which it sends parts."""
    made = import_module("s3torchconnector._s3client")
    server = target.server
    # It takes credentials from the environment only; this process has no other use for them.
    os.environ |= {"AWS_ACCESS_KEY_ID": server["key"], "AWS_SECRET_ACCESS_KEY": server["secret"]}
    client = made.S3Client(
        server["client_kwargs"]["region_name"],
        endpoint=server["endpoint_url"],
        s3client_config=made.S3ClientConfig(part_size=_SMALL_PART_BYTES, force_path_style=True),
    )

    def send(bucket: str) -> None:
        with target.shard.open("rb") as file, client.put_object(bucket, _KEY) as out:
            while data := file.read(_SMALL_PART_BYTES):
                out.write(data)

    return lambda bucket: partial(send, bucket)


def floor(target: Target) -> Send:
    """Send with nothing between the page cache and the sockets."""
    client = _botocore(target.server)
    where = urlsplit(target.server["endpoint_url"])
    size = target.shard.stat().st_size

    def put(bucket: str, upload: str, number: int) -> dict[str, Any]:
        names = {"Bucket": bucket, "Key": _KEY, "UploadId": upload, "PartNumber": number}
        signed = urlsplit(client.generate_presigned_url("upload_part", names))
        start = (number - 1) * _PART_BYTES
        count = min(_PART_BYTES, size - start)
        connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=_WAIT_S)
        connection.putrequest("PUT", f"{signed.path}?{signed.query}")
        connection.putheader("Content-Length", str(count))
        connection.endheaders()
        with target.shard.open("rb") as file:
            connection.sock.sendfile(file, start, count)
        reply = connection.getresponse()
        assert reply.status == http.client.OK, reply.read()
        connection.close()
        return {"PartNumber": number, "ETag": reply.headers["ETag"]}

    def send(bucket: str) -> None:
        made = client.create_multipart_upload(Bucket=bucket, Key=_KEY)
        numbers = range(1, -(-size // _PART_BYTES) + 1)
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = list(pool.map(partial(put, bucket, made["UploadId"]), numbers))
        client.complete_multipart_upload(
            Bucket=bucket, Key=_KEY, UploadId=made["UploadId"], MultipartUpload={"Parts": parts}
        )

    return lambda bucket: partial(send, bucket)


@contextmanager
def seaweed(directory: Path) -> Iterator[Any]:
    """Run an S3 server with its data in a directory, which is gone afterwards."""
    # The examples import each other as scripts do, so mypy knows this module by another name.
    with import_module("examples.seaweed").SeaweedS3(directory) as server:
        yield server
    shutil.rmtree(directory, ignore_errors=True)


def _lean_config() -> Any:
    from botocore.config import Config

    return Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
    )


def _client_arguments(server: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "endpoint_url": server["endpoint_url"],
        "region_name": server["client_kwargs"]["region_name"],
        "aws_access_key_id": server["key"],
        "aws_secret_access_key": server["secret"],
        "config": _lean_config(),
    }


def _botocore(server: Mapping[str, Any]) -> Any:
    import botocore.session

    return botocore.session.Session().create_client(
        "s3",
        **_client_arguments(server),
    )


CLIENTS: dict[str, Callable[[Target], Send]] = {
    "boto3": boto3,
    "s3fs": s3fs,
    "obstore": obstore,
    "awscrt": awscrt,
    "s3torchconnector": s3torchconnector,
}


class Uploader:
    """A process that uploads on demand and tells what each upload took.

    Args:
        make: Makes what it uploads with.
        target: What to upload.
        server: Has the buckets.
    """

    def __init__(self, make: Callable[[Target], Send], target: Target, server: Any) -> None:
        self._server = server
        self._size = target.shard.stat().st_size
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, target, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def upload(self) -> Sample:
        """Upload once, into a bucket that is gone afterwards, and see that all is there."""
        client, bucket = self._server.client(), f"bench-{os.urandom(6).hex()}"
        client.create_bucket(Bucket=bucket)
        self._pipe.send(bucket)
        if not self._pipe.poll(_WAIT_S):
            raise TimeoutError("an uploader does not answer")
        sample: Sample
        sample, error = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        (entry,) = client.list_objects_v2(Bucket=bucket)["Contents"]
        assert entry["Size"] >= self._size, "an upload is short"
        client.delete_object(Bucket=bucket, Key=entry["Key"])
        client.delete_bucket(Bucket=bucket)  # at once gives back what a deleted object does later
        return sample

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _serve(make: Callable[[Target], Send], target: Target, pipe: Any) -> None:
    ready = make(target)
    while True:
        try:
            bucket = pipe.recv()
        except EOFError:
            return
        try:
            send = ready(bucket)
            with harness.clock() as sample:
                send()
            pipe.send((sample, ""))
        except Exception as exc:  # noqa: BLE001 - raised on the other side
            pipe.send((Sample(), f"{type(exc).__name__}: {exc}"))


@contextmanager
def _uploaders(options: Options) -> Iterator[tuple[dict[str, Uploader], int]]:
    """Give an uploader per client that is installed, and the size of what they upload."""
    backend = Ours(options.directory / "saved")
    backend.save(harness.make_state(options.bytes))
    (shard,) = (path for path in backend.files() if path.suffix == ".shard")
    shard.read_bytes()  # so that the page cache is as warm for the first one as for the last
    installed = {name: make for name, make in CLIENTS.items() if importlib.util.find_spec(name)}
    with seaweed(options.directory / "server") as server:
        target = Target(server.storage_options(), shard)
        makes = {"floor": floor, "ours": ours, **installed}
        made: dict[str, Uploader] = {}
        try:
            for name, make in makes.items():
                made[name] = Uploader(make, target, server)
            yield made, shard.stat().st_size
        finally:
            for uploader in made.values():
                uploader.close()
    backend.close()


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    with _uploaders(options) as (uploaders, size):
        floor_cpu: list[float] = []

        def reference() -> Sample:
            sample = uploaders["floor"].upload()
            floor_cpu.append(sample.cpu_s / (size / harness.GB))
            return sample

        steps = {name: one.upload for name, one in uploaders.items() if name != "floor"}
        measured = harness.interleave(reference, steps, options.pairs)
    mine = measured.pop("ours")
    speeds = {name: harness.median(harness.speeds(pairs)) for name, pairs in measured.items()}
    cpus = {name: harness.median(harness.cpu_per_gb(p, size)) for name, p in measured.items()}
    details = {
        "of_floor": {"ours": harness.median(harness.speeds(mine)), **speeds},
        _CPU_OF_OTHERS: {"floor": harness.median(floor_cpu), **cpus},
        "not_installed": sorted(CLIENTS.keys() - measured.keys()),
    }
    best = max(speeds, key=lambda name: speeds[name])
    return [
        _speed(mine, measured[best], size, details | {"fastest": best}),
        _cpu(mine, size, cpus.get("s3fs"), details),
    ]


def _speed(mine: list[Pair], best: list[Pair], size: int, details: dict[str, Any]) -> Answer:
    pairs = zip(harness.speeds(mine), harness.speeds(best), strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return Answer(
        benchmark="flush_vs_clients",
        goal="G9",
        metric="flush / fastest S3 client",
        unit="1",
        bytes=size,
        seconds=harness.median(pair.sample.seconds for pair in mine),
        reference_seconds=harness.median(pair.sample.seconds for pair in best),
        ratio=harness.median(ratios),
        ratios=ratios,
        stock=None,
        target=SPEED,
        bound="min",
        details=details,
    )


def _cpu(mine: list[Pair], size: int, stock: float | None, details: dict[str, Any]) -> Answer:
    ratios = harness.cpu_per_gb(mine, size)
    return Answer(
        benchmark="flush_vs_clients",
        goal="G9",
        metric="CPU of the flush",
        unit="s/GB",
        bytes=size,
        seconds=harness.median(pair.sample.cpu_s for pair in mine),
        reference_seconds=None,
        ratio=harness.median(ratios),
        ratios=ratios,
        stock=stock,
        target=CPU,
        bound="max",
        details=details,
    )


if __name__ == "__main__":
    sys.exit(harness.main({"flush_vs_clients": run}, __doc__))
