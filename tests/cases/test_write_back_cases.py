"""Faults that users of other systems met between the local tier and the durable one."""

import errno
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import InvalidError, TieredReader, TieredWriter
from dcp_tiered.errors import AbsentError
from dcp_tiered.services import identity
from dcp_tiered.services.lock import FlusherLock
from dcp_tiered.tiers.s3 import S3Tier
from examples.seaweed import SeaweedS3
from tests.conftest import QUICK, Run, end_flushers
from tests.support import nodes, runs
from tests.support.fault_proxy import STALL, FaultProxy
from tests.support.ranks import run_ranks
from tests.support.storage_check import Eyes
from tests.support.tiers import mounted_tier
from tests.support.workers import await_that


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_mount_without_hard_links_is_refused_with_a_reason(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O053: an object store behind FUSE, where a rename is a copy that may stop half-way."""

    def refusing(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refusing)
    with pytest.raises(InvalidError, match="no hard links") as caught:
        mounted_tier(tmp_path / "run", tmp_path).put("a/record-1.json", b"{}")
    assert "s3://" in str(caught.value.hint)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


HELD = {0: (10, 20, 30), 1: (10, 30), 2: (10, 20, 40)}


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"of-{rank}": torch.full((5000,), float(100 * step + rank))}


def save_on_three_nodes(rank: int, roots: list[str], arguments: dict[str, Any]) -> None:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    mine = {**arguments, "local": roots[rank]}
    with TieredWriter(**mine) as writer:
        dcp.save(state_of(rank, 10), checkpoint_id="step-10", storage_writer=writer)
        writer.wait("durable", "step-10", timeout_s=60)
        end_flushers(Path(roots[rank]))
        (run_path,) = (path.parent for path in Path(roots[rank]).glob("*/run.json"))
        lock = FlusherLock(run_path)
        await_that("the lock of one that was killed", lambda: lock.holder() is None)
        with lock.hold(identity.current()) as is_mine:
            assert is_mine
            for step in (20, 30, 40):
                state = state_of(rank, step)
                dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)


def load_on_three_nodes(rank: int, roots: list[str], arguments: dict[str, Any]) -> str | None:
    target = {name: torch.zeros_like(value) for name, value in state_of(rank, 10).items()}
    reader = TieredReader(**{**arguments, "local": roots[rank]})
    dcp.load(target, storage_reader=reader)
    reader.close()
    for name, value in state_of(rank, 10).items():
        assert torch.equal(target[name], value)
    return reader.checkpoint_id


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nodes_that_hold_different_steps_agree_on_one_that_is_whole(
    posix_run: Run, tmp_path: Path
) -> None:
    """O056: not the least of the newest, and not the newest that one node knows of."""
    roots = [str(tmp_path / f"node-{rank}") for rank in HELD]
    for root in roots:
        Path(root).mkdir()
    run_ranks(3, save_on_three_nodes, roots, posix_run.arguments())
    for rank, steps in HELD.items():
        for path in Path(roots[rank]).glob("*/step-*"):
            if int(path.name.removeprefix("step-")) not in steps:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
    (shard,) = Path(roots[1]).glob("*/step-10/*.shard")
    runs.flip_bit(shard, 4096 + 100)
    chosen = run_ranks(3, load_on_three_nodes, roots, posix_run.arguments())
    assert chosen == ["step-10"] * 3


@pytest.mark.slow
def test_a_store_that_stalls_stops_no_save(s3_run: Run) -> None:
    """O060, O061: saves end at local speed, and of each checkpoint the record goes last."""
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy:
        arguments = runs.with_limits(runs.behind(s3_run, proxy.endpoint), request_timeout_s=2.0)
        stalled = proxy.inject(None, STALL)
        for number, name in enumerate("abc"):
            runs.save(arguments, name, number)
        await_that("a request that hangs", lambda: stalled.hits)
        with TieredWriter(**arguments) as writer:
            states = {line.checkpoint_id: line.level for line in writer.status()}
        assert states == dict.fromkeys("abc", "local")
        assert s3_run.keys() == {}
        proxy.clear()
        for name in "abc":
            runs.wait(arguments, name)
        answered = [r.path for r in proxy.log if r.method == "PUT" and r.status == 200]
    records = [path.split("/")[-2] for path in answered if "/record-" in path]
    assert sorted(records) == ["a", "b", "c"]
    for name in "abc":
        kinds = [path.split(f"/{name}/")[1][:6] for path in answered if f"/{name}/" in path]
        assert kinds[-1] == "record"
        assert kinds.count("packs/") == 1


class LaggingTier(nodes.CountingTier):
    """The durable tier of a node that sees what others have made only after a while, as on NFS."""

    lag_s = 0.6

    def __init__(self, tier: Any, root: Path) -> None:
        super().__init__(tier)
        self._root = root
        self._mine: set[str] = set()

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._mine.add(key)

    def upload(self, key: str, source: Any) -> Any:
        self._mine.add(key)
        return super().upload(key, source)

    def _sees(self, key: str) -> bool:
        try:
            age = time.time() - (self._root / key).stat().st_mtime
        except FileNotFoundError:
            return False
        return key in self._mine or age >= self.lag_s

    def _need(self, key: str) -> None:
        if not self._sees(key):
            raise AbsentError("no such object", "durable", key)

    def get(self, key: str, bytes_max: int) -> bytes:
        self._need(key)
        return super().get(key, bytes_max)

    def head(self, key: str) -> Any:
        self._need(key)
        return super().head(key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._need(key)
        super().read_into(key, start, buffer)

    def list_keys(self, prefix: str) -> Iterator[str]:
        yield from (key for key in super().list_keys(prefix) if self._sees(key))


def test_nodes_that_see_one_another_late_commit_once(tmp_path: Path) -> None:
    """O063."""
    durable = tmp_path / "lustre" / "run"
    durable.parent.mkdir()
    limits = replace(QUICK, linger_s=0.1)
    made = nodes.make_nodes(3, tmp_path / "nvme", durable, limits)
    for node in made:
        node.durable = LaggingTier(mounted_tier(durable, durable.parent), durable)
        node.restart()
        node.seal("a", 3, f"{node.rank:016x}")
    nodes.publish(made, "a")
    while sum(node.flusher.step() for node in made):
        time.sleep(0.02)
    eyes = Eyes(Run(url=f"tiered::file://{durable}", local=made[0].local.root))
    (commit,) = eyes.check().commits["a"]
    assert len(commit["packs"]) == 3
    assert [node.flusher.failures() for node in made] == [{}, {}, {}]


class _Busy(http.server.BaseHTTPRequestHandler):
    """An instance's own service that refuses most of those who ask at once."""

    server: Any

    def _answer(self) -> None:
        self.server.asked += 1
        if self.server.asked <= self.server.refuses:
            self.send_error(429)
            return
        path = "/latest/meta-data/iam/security-credentials/"
        body = b"token"
        if self.path == path:
            body = b"role"
        elif self.path == f"{path}role":
            until = datetime.now(UTC) + timedelta(hours=6)
            body = json.dumps(
                {
                    "Code": "Success",
                    "AccessKeyId": self.server.keys[0],
                    "SecretAccessKey": self.server.keys[1],
                    "Token": "",
                    "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            ).encode()
        self.send_response(200)
        self.send_header("x-aws-ec2-metadata-token-ttl-seconds", "21600")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = _answer  # noqa: N815 - http.server's names

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def test_a_busy_credential_service_is_asked_again(
    s3_server: SeaweedS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """O074: many processes of a node ask the metadata service at once."""
    service: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Busy)
    service.asked, service.refuses = 0, 7
    service.keys = s3_server.access_key, s3_server.secret_key
    threading.Thread(target=service.serve_forever, daemon=True).start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    endpoint = f"http://127.0.0.1:{service.server_address[1]}"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
    options = {**s3_server.storage_options(), "key": None, "secret": None}
    tier = S3Tier(
        f"{s3_server.buckets[0]}/busy",
        options,
        request_timeout_s=5.0,
        request_retry_s=30.0,
        part_bytes=16 << 20,
    )
    try:
        tier.put("a.json", b"{}")
        assert tier.get("a.json", 10) == b"{}"
        assert service.asked > service.refuses
    finally:
        tier.close()
        service.shutdown()
        service.server_close()
