"""Checkpoints under a key that goes along with every request, from the writer to the reader."""

import base64
import hashlib
import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from botocore.exceptions import ClientError

from dcp_tiered import InvalidError, TieredReader, TieredWriter
from dcp_tiered.cli import main
from tests.conftest import Run, flusher_pids
from tests.support import runs
from tests.support.fault_proxy import FaultProxy, refuse
from tests.support.workers import await_that

pytestmark = pytest.mark.slow
KEY = secrets.token_bytes(32)
TEXT = base64.b64encode(KEY).decode()
DIGEST = base64.b64encode(hashlib.md5(KEY).digest()).decode()
CUSTOMER = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": KEY}
STATE = {"w": torch.arange(5_000_000, dtype=torch.float32), "step": 7}
"""More than one part of an upload."""


def with_parameters(run: Run, given: dict[str, Any], endpoint: str | None = None) -> Run:
    mine = {**run.options["s3"], "s3_additional_kwargs": given}
    if endpoint is not None:
        mine["endpoint_url"] = endpoint
    limits = replace(run.limits, part_bytes=16 << 20)
    return replace(run, options={"s3": mine}, limits=limits)


def heads(run: Run, **key: Any) -> dict[str, Any]:
    """Return what the store says of every object of a run, asked without our code."""
    assert run.server is not None
    bucket, _, prefix = run.url.removeprefix("tiered::s3://").partition("/")
    client = run.server.client()
    return {
        name: client.head_object(Bucket=bucket, Key=f"{prefix}/{name}", **key)
        for name in run.keys()  # noqa: SIM118
    }


def need_no_key(place: Path) -> None:
    """Refuse a file, or one below a directory, that holds the key in any form."""
    secret = (KEY, KEY.hex().encode(), TEXT.encode(), DIGEST.encode())
    files = [path for path in (place, *place.rglob("*")) if path.is_file()]
    assert files
    for path in files:
        assert not any(one in path.read_bytes() for one in secret), path


def test_a_customer_key_is_needed_for_every_object_and_kept_nowhere(
    s3_run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert s3_run.server is not None
    with FaultProxy(s3_run.server.endpoint) as proxy, caplog.at_level("DEBUG", "dcp_tiered"):
        run = with_parameters(s3_run, CUSTOMER, proxy.endpoint)
        proxy.inject("PutObject", refuse(503, "SlowDown"), times=2)
        proxy.inject("UploadPart", refuse(400, "InvalidArgument"))
        with TieredWriter(**run.arguments()) as writer:
            dcp.save(STATE, checkpoint_id="step-7", storage_writer=writer)
            (flusher,) = await_that("a flusher", lambda: flusher_pids(run.local))
            with pytest.raises(InvalidError, match="400 InvalidArgument") as raised:
                writer.wait("durable", "step-7", timeout_s=60)
            need_no_key(run.local)
            need_no_key(Path(f"/proc/{flusher}/cmdline"))
            shown = repr((writer, writer.status(), raised.value)) + caplog.text
            assert not any(one in shown for one in (TEXT, DIGEST, repr(KEY)))
            proxy.clear()
            await_that("durable", lambda: writer.status()[0].state == "durable")
        need_no_key(run.local)
        log = (run.run_path() / "flusher.log").read_text()
        assert "503 SlowDown" in log
        assert "400 InvalidArgument" in log
        assert {request.operation for request in proxy.log} > {"UploadPart", "PutObject"}
        target = {"w": torch.zeros(5_000_000), "step": 0}
        reader = TieredReader(**run.durable_only())
        dcp.load(target, checkpoint_id="step-7", storage_reader=reader)
        reader.close()
    assert torch.equal(target["w"], STATE["w"])
    assert sum("/record-" in name for name in heads(run, **CUSTOMER)) == 1


def test_without_the_key_nothing_is_read(s3_run: Run) -> None:
    run = with_parameters(s3_run, CUSTOMER)
    runs.save(run.arguments(), "step-1", 1)
    runs.wait(run.arguments(), "step-1")
    found = heads(run, **CUSTOMER)
    assert len(found) >= 3
    assert {head["SSECustomerAlgorithm"] for head in found.values()} == {"AES256"}
    with pytest.raises(ClientError, match="400"):
        heads(run)
    error = runs.error_of(runs.load, s3_run.durable_only(), "step-1")
    assert isinstance(error, InvalidError)
    assert "SSE-C" in str(error.hint)
    assert runs.load(run.durable_only()) == 1


def test_a_command_takes_the_key_from_the_environment_and_the_rest_from_the_run(
    s3_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert s3_run.server is not None
    run = with_parameters(s3_run, {**CUSTOMER, "StorageClass": "STANDARD_IA"})
    with runs.no_flusher(run):
        runs.save(run.arguments(), "step-1", 1)
    noted = json.loads((run.run_path() / "run.json").read_text())["options"]
    assert noted["s3_additional_kwargs"] == {
        "SSECustomerAlgorithm": "AES256",
        "StorageClass": "STANDARD_IA",
    }
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_run.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_run.server.secret_key)
    assert main(["flush", str(run.local)]) == 3
    said = capsys.readouterr()
    assert "FSSPEC_S3_S3_ADDITIONAL_KWARGS" in said.err + said.out
    assert run.keys() == {}
    secret = {"SSECustomerKey": TEXT, "SSECustomerKeyMD5": DIGEST}
    monkeypatch.setenv("FSSPEC_S3_S3_ADDITIONAL_KWARGS", json.dumps(secret))
    assert main(["flush", str(run.local)]) == 0, capsys.readouterr()
    found = heads(run, **CUSTOMER)
    assert {head["StorageClass"] for head in found.values()} == {"STANDARD_IA"}
    need_no_key(run.local)
    capsys.readouterr()
    assert main(["ls", run.url, "--local", str(run.local), "--json"]) == 0
    assert '"step-1"' in capsys.readouterr().out


def test_an_option_of_a_command_is_read_as_what_it_means(
    s3_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3_run.server is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_run.server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_run.server.secret_key)
    with runs.no_flusher(s3_run):
        runs.save(s3_run.arguments(), "step-1", 1)
    options = ["-o", 's3.s3_additional_kwargs={"ServerSideEncryption": "AES256"}']
    options += ["-o", "s3.requester_pays=false"]
    assert main(["flush", str(s3_run.local), *options]) == 0
    assert {head.get("ServerSideEncryption") for head in heads(s3_run).values()} == {"AES256"}
