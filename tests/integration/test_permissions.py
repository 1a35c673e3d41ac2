"""The permissions that are documented are those that are used: no fewer, no more.

Each role does its work behind something that writes down its requests. What these need is looked up
in a table of its own, made from the reference of S3's API.
"""

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter
from dcp_tiered.cli import main
from dcp_tiered.policy.permissions import ROLES
from tests.conftest import Run
from tests.support import runs
from tests.support.amazon import ACCOUNT, BLOCKED, OPEN, Amazon, access_list, replication
from tests.support.fault_proxy import FaultProxy, refuse

pytestmark = pytest.mark.slow
REGION = "eu-central-1"
SETTINGS = {
    "accelerate": "s3:GetAccelerateConfiguration",
    "acl": "s3:GetBucketAcl",
    "encryption": "s3:GetEncryptionConfiguration",
    "ownershipControls": "s3:GetBucketOwnershipControls",
    "policyStatus": "s3:GetBucketPolicyStatus",
    "publicAccessBlock": "s3:GetBucketPublicAccessBlock",
    "replication": "s3:GetReplicationConfiguration",
}
BUCKET = {
    ("HEAD", ""): "s3:ListBucket",
    ("GET", "list-type"): "s3:ListBucket",
    ("GET", "uploads"): "s3:ListBucketMultipartUploads",
    **{("GET", name): action for name, action in SETTINGS.items()},
}
OBJECT = {
    ("GET", ""): "s3:GetObject",
    ("HEAD", ""): "s3:GetObject",
    ("PUT", ""): "s3:PutObject",
    ("POST", "uploads"): "s3:PutObject",
    ("PUT", "partNumber"): "s3:PutObject",
    ("POST", "uploadId"): "s3:PutObject",
    ("DELETE", "uploadId"): "s3:AbortMultipartUpload",
    ("DELETE", ""): "s3:DeleteObject",
}
PART = {"FSSPEC_TIERED_LIMITS": json.dumps({"part_bytes": 5 << 20})}
BIG = {"w": torch.arange(5_000_000, dtype=torch.int64)}
"""Three parts."""


def action_of(method: str, target: str, host: str = "") -> str:
    """Return what a request needs; KeyError for one that nobody has thought of."""
    url = urlsplit(target)
    names = parse_qs(url.query, keep_blank_values=True)
    if "s3-control" in host:
        assert (method, url.path) == ("GET", "/v20180820/configuration/publicAccessBlock")
        return "s3:GetAccountPublicAccessBlock"
    path = url.path.strip("/") if ".s3." in host else url.path.strip("/").partition("/")[2]
    table = OBJECT if path else BUCKET
    name = next((name for verb, name in table if name in names and verb == method), "")
    return table[method, name]


def used(proxy: FaultProxy) -> set[str]:
    return {action_of(request.method, request.path) for request in proxy.log}


def used_on(amazon: Amazon) -> set[str]:
    return {action_of(seen.method, seen.path, seen.host) for seen in amazon.log}


@pytest.fixture
def proxy(s3_run: Run) -> Iterator[FaultProxy]:
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as made:
        yield made


@pytest.fixture
def credentials(s3_run: Run, monkeypatch) -> None:
    assert s3_run.server is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_run.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_run.server.secret_key)
    for name, value in PART.items():
        monkeypatch.setenv(name, value)


def save(arguments: dict[str, Any], checkpoint_id: str) -> None:
    with TieredWriter(**arguments) as writer:
        dcp.save(BIG, checkpoint_id=checkpoint_id, storage_writer=writer)


def test_trainer(s3_run: Run, proxy: FaultProxy, credentials):
    """Its flusher has other credentials; see docs/residency.md."""
    # So long to answer, however busy this machine is.
    arguments = runs.with_limits(runs.behind(s3_run, proxy.endpoint), store_check_s=30.0)
    with runs.no_flusher(s3_run):
        save(s3_run.arguments(), "step-1")
    assert main(["flush", str(s3_run.local), "--timeout", "60"]) == 0
    with runs.no_flusher(s3_run):
        save(arguments, "step-2")
        runs.wait(arguments, "step-1")
    assert used(proxy) == ROLES["trainer"].actions()
    proxy.inject(None, refuse(403, "AccessDenied"))
    with runs.no_flusher(s3_run):
        save(arguments, "step-3")  # without any permission it saves as well
    assert runs.shards(s3_run, "step-3")


def test_flusher_uploads(s3_run: Run, proxy: FaultProxy, credentials):
    with runs.no_flusher(s3_run):
        save(s3_run.arguments(), "step-1")
    assert s3_run.keys() == {}
    command = ["flush", str(s3_run.local), "-o", f"s3.endpoint_url={proxy.endpoint}"]
    proxy.inject("UploadPart", refuse(403, "AccessDenied"), times=1)
    assert main([*command, "--timeout", "30"]) == 3
    assert proxy.seen("AbortMultipartUpload")
    assert main([*command, "--timeout", "60"]) == 0
    assert len(s3_run.commits("step-1")) == 1
    for operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"):
        assert proxy.seen(operation), operation
    looks = set(SETTINGS.values()) | {"s3:GetAccountPublicAccessBlock"}
    # Without a policy it asks only whether the bucket is public, and goes on where it may not.
    looks -= {"s3:GetBucketPolicyStatus", "s3:GetBucketAcl"}
    assert used(proxy) == ROLES["flusher"].actions() - looks


def test_reader(s3_run: Run, proxy: FaultProxy, credentials, capsys):
    with runs.no_flusher(s3_run):
        save(s3_run.arguments(), "step-1")
    assert main(["flush", str(s3_run.local), "--timeout", "60"]) == 0
    reading = {**s3_run.durable_only(), "s3": runs.behind(s3_run, proxy.endpoint)["s3"]}
    target = {"w": torch.zeros(5_000_000, dtype=torch.int64)}
    reader = TieredReader(**reading)
    dcp.load(target, storage_reader=reader)
    reader.close()
    assert torch.equal(target["w"], BIG["w"])
    option = ("-o", f"s3.endpoint_url={proxy.endpoint}")
    assert main(["ls", s3_run.url, *option]) == 0
    assert main(["inspect", s3_run.url, "step-1", *option]) == 0
    assert main(["residency", "audit", s3_run.url, *option]) == 9
    assert used(proxy) == ROLES["reader"].actions()


def test_remover(s3_run: Run, proxy: FaultProxy, credentials):
    with runs.no_flusher(s3_run):
        for step in (1, 2):
            save(s3_run.arguments(), f"step-{step}")
    assert main(["flush", str(s3_run.local), "--timeout", "60"]) == 0
    assert s3_run.server is not None
    bucket, _, prefix = s3_run.url.removeprefix("tiered::s3://").partition("/")
    s3_run.server.client().create_multipart_upload(
        Bucket=bucket, Key=f"{prefix}/step-1/packs/left-over"
    )
    option = ("-o", f"s3.endpoint_url={proxy.endpoint}")
    assert main(["rm", s3_run.url, "step-1", *option]) == 0
    assert used(proxy) == ROLES["remover"].actions()
    assert s3_run.keys().keys() >= {"step-1/record-1.json", "step-1/record-2.json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Amazon]:
    with Amazon(tmp_path_factory.mktemp("amazon")) as amazon:
        yield amazon


@pytest.fixture
def amazon(server: Amazon, monkeypatch) -> Amazon:
    """A bucket that is only just allowed, so that every question has to be asked."""
    server.buckets.clear()
    server.log.clear()
    bucket = server.add("ckpt", REGION)
    server.add("replica", REGION)
    bucket.settings |= {
        "publicAccessBlock": OPEN,
        "acl": access_list("http://acs.amazonaws.com/groups/s3/LogDelivery"),
        "replication": replication("replica"),
    }
    del bucket.settings["ownershipControls"]
    server.account_blocks[ACCOUNT] = BLOCKED
    for name, value in server.environment(REGION).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text(f'[[allow]]\nprovider = "aws"\nregions = ["{REGION}"]\nowner = "{ACCOUNT}"\n')
    return file


def test_checker(amazon: Amazon, policy: Path, capsys):
    assert main(["residency", "check", "tiered::s3://ckpt/run", "--policy", str(policy)]) == 0
    assert used_on(amazon) == ROLES["checker"].actions()
    asked = {(seen.host.partition(".")[0], seen.path) for seen in amazon.log}
    assert ("replica", "/?replication") in asked
    only_bucket = {
        action_of(seen.method, seen.path, seen.host)
        for seen in amazon.log
        if seen.host.startswith("ckpt.")
    }
    assert only_bucket == {*ROLES["checker"].bucket, *ROLES["checker"].buckets}


def test_flusher_looks(amazon: Amazon, policy: Path, local: Path):
    url, options = f"tiered::s3://ckpt/run-{uuid.uuid4().hex[:8]}", {"s3": amazon.options(REGION)}
    run = Run(url=url, local=local, options={**options, "residency": policy})
    with runs.no_flusher(run):
        runs.save(run.arguments(), "step-1", 1)
    amazon.log.clear()
    assert main(["flush", str(local), "--timeout", "60"]) == 0
    # Uploads in parts are seen behind the other server.
    assert used_on(amazon) == ROLES["flusher"].actions() - {"s3:AbortMultipartUpload"}


def listed(document: dict[str, Any]) -> set[str]:
    return {action for one in document["Statement"] for action in one["Action"]}


@pytest.mark.parametrize("role", ROLES)
def test_the_documents_list_the_same(role, policy: Path, capsys):
    command = ["residency", "export", "tiered::s3://ckpt/run", "--policy", str(policy)]
    assert main([*command, "--for", "iam", "--role", role]) == 0
    document = json.loads(capsys.readouterr().out)
    assert listed(document) == ROLES[role].actions()
    assert {one["Effect"] for one in document["Statement"]} == {"Allow"}


def table_rows() -> Iterable[tuple[str, set[str]]]:
    text = (Path(__file__).parents[2] / "docs" / "residency.md").read_text()
    section = text.split("## Roles and permissions")[1].split("\n## ")[0]
    for line in section.splitlines():
        if match := re.match(r"\| `(\w+)` ", line):
            yield match[1], set(re.findall(r"s3:\w+", line))


def test_the_documentation_lists_the_same():
    looks = ROLES["checker"].actions()
    rows = dict(table_rows())
    rows["flusher"] |= looks  # it says "and all of the checker"
    assert rows == {name: role.actions() for name, role in ROLES.items()}
