"""The commands as an operator runs them: in a process of their own, looked at from outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import Limits, TieredWriter
from examples.seaweed import SeaweedS3
from tests.conftest import Run, end_flushers

STATE = {"w": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000), "lr": 0.1}
NEEDS_NO_TORCH = (
    "import sys; sys.modules['torch'] = None; from dcp_tiered.cli import main; sys.exit(main())"
)


def cli(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with torch blocked and no credentials but those in `env`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FSSPEC_"))}
    return subprocess.run(
        [sys.executable, "-c", NEEDS_NO_TORCH, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**clean, "AWS_EC2_METADATA_DISABLED": "true", **(env or {})},
        timeout=100,
    )


def credentials(server: SeaweedS3) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}


@pytest.fixture
def saved(s3_run: Run) -> Run:
    """Save three steps whose names sort otherwise than they were saved; all durable."""
    with TieredWriter(**s3_run.arguments()) as writer:
        for step in (9, 100, 20):
            dcp.save(STATE, checkpoint_id=f"step-{step}", storage_writer=writer)
        writer.wait("durable", "step-20", timeout_s=60)
    return s3_run


def test_ls_orders_by_time_of_save_and_marks_the_newest(saved: Run) -> None:
    """O119, O121: never by name."""
    assert saved.server is not None
    endpoint = f"s3.endpoint_url={saved.server.endpoint}"
    result = cli("ls", saved.url, "-o", endpoint, "--json", env=credentials(saved.server))
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["checkpoint_id"] for line in lines] == ["step-9", "step-100", "step-20"]
    assert {line["state"] for line in lines} == {"durable"}
    assert [line["attempt"] for line in lines] == [
        saved.commits(line["checkpoint_id"])[0]["attempt"] for line in lines
    ]
    table = cli("ls", saved.url, "-o", endpoint, env=credentials(saved.server)).stdout
    (newest,) = (line for line in table.splitlines() if "newest durable" in line)
    assert "step-20" in newest


def test_inspect_shows_extents_that_hold_the_values(saved: Run) -> None:
    assert saved.server is not None
    result = cli(
        "inspect", saved.url, "step-9", "--local", str(saved.local), "--json",
        env=credentials(saved.server),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    items = {item["key"]: item for item in shown["items"]}
    assert (items["w"]["dtype"], items["w"]["shape"]) == ("float32", [300, 1000])
    assert items["lr"]["dtype"] is None
    (shard,) = shown["shards"]
    pack = saved.get(f"step-9/{shard['pack']}")
    begin = shard["start_in_pack"] + items["w"]["start"]
    assert pack[begin : begin + 1_200_000] == STATE["w"].numpy().tobytes()
    table = cli(
        "inspect", saved.url, "step-9", "--local", str(saved.local), env=credentials(saved.server)
    )
    assert "float32" in table.stdout
    assert shard["name"] in table.stdout


def test_reading_commands_send_no_writing_request_and_need_no_local_tier(saved: Run) -> None:
    before = saved.keys()
    assert saved.server is not None
    for command in (("ls", saved.url), ("inspect", saved.url, "step-20")):
        endpoint = f"s3.endpoint_url={saved.server.endpoint}"
        result = cli(*command, "-o", endpoint, env=credentials(saved.server))
        assert result.returncode == 0, result.stderr
    assert saved.keys() == before


def test_ls_of_a_misspelt_prefix_says_that_nothing_is_there(saved: Run) -> None:
    assert saved.server is not None
    endpoint = f"s3.endpoint_url={saved.server.endpoint}"
    for more in ([], ["--json"]):
        found, missed = (
            cli("ls", url, "-o", endpoint, *more, env=credentials(saved.server))
            for url in (saved.url, f"{saved.url}-typo")
        )
        assert found.returncode == missed.returncode == 0
        assert "no checkpoint under" not in found.stderr
        assert f"no checkpoint under {saved.url}-typo: is it spelt so?" in missed.stderr
        assert "step-20" in found.stdout
        assert "step-20" not in missed.stdout


def test_exit_codes_tell_kinds_of_errors_apart(saved: Run) -> None:
    """O117, O071: wrong key, wrong bucket, no such checkpoint and store down are not alike."""
    assert saved.server is not None
    endpoint = ("-o", f"s3.endpoint_url={saved.server.endpoint}")
    good = credentials(saved.server)
    wrong = {**good, "AWS_SECRET_ACCESS_KEY": "canary-secret-canary"}
    denied = cli("ls", saved.url, *endpoint, env=wrong)
    assert denied.returncode == 3
    assert "access denied" in denied.stderr
    assert "HINT" in denied.stderr
    assert "canary-secret" not in denied.stderr
    assert cli("ls", "tiered::s3://no-such-bucket/run", *endpoint, env=good).returncode == 3
    assert cli("inspect", saved.url, "step-1", *endpoint, env=good).returncode == 7
    down = cli("ls", saved.url, "-o", "s3.endpoint_url=http://127.0.0.1:9", env=good)
    assert down.returncode == 4
    assert cli("ls", "s3:/bucket/run").returncode == 3
    assert cli("status", "/no/such/place").returncode == 3


def test_status_shows_local_then_durable_and_flush_makes_it_so(
    s3_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush without a flusher running: drained in the foreground, then nothing is left."""
    assert s3_run.server is not None
    with TieredWriter(**s3_run.arguments()) as writer:
        monkeypatch.setattr(writer, "_keep_flusher", lambda: None)
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    assert s3_run.keys() == {}
    (shown,) = map(json.loads, cli("status", str(s3_run.local), "--json").stdout.splitlines())
    assert [line["state"] for line in shown["checkpoints"]] == ["local"]
    assert shown["flusher_pid"] is None
    refused = cli("flush", str(s3_run.local), "--timeout", "20")
    assert refused.returncode == 3
    assert "AWS_ACCESS_KEY_ID" in refused.stderr
    drained = cli("flush", str(s3_run.local), env=credentials(s3_run.server))
    assert drained.returncode == 0, drained.stderr
    (warning,) = drained.stderr.splitlines()
    assert warning.startswith("no residency policy: ")
    assert len(s3_run.commits("step-1")) == 1
    (shown,) = map(json.loads, cli("status", str(s3_run.local), "--json").stdout.splitlines())
    assert [line["state"] for line in shown["checkpoints"]] == ["durable"]


def test_flush_waits_for_the_flusher_that_runs(s3_run: Run) -> None:
    assert s3_run.server is not None
    with TieredWriter(**s3_run.arguments()) as writer:
        for step in range(4):
            dcp.save(STATE, checkpoint_id=f"step-{step}", storage_writer=writer)
    result = cli("flush", str(s3_run.local), "--timeout", "60")
    assert result.returncode == 0, result.stderr
    assert all(len(s3_run.commits(f"step-{step}")) == 1 for step in range(4))


def test_flush_takes_over_a_flusher_with_wrong_credentials(s3_run: Run) -> None:
    assert s3_run.server is not None
    options = {"s3": {**s3_run.options["s3"], "secret": "wrong"}}
    limits = Limits(idle_exit_s=60, flush_retry_s_max=1.0, request_retry_s=1.0)
    arguments = {**s3_run.arguments(), **options, "limits": limits}
    with TieredWriter(**arguments) as writer:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
    result = cli(
        "flush", str(s3_run.local), "--take-over", "-o", f"s3.key={s3_run.server.access_key}",
        env=credentials(s3_run.server),
    )  # fmt: skip
    del result
    again = cli("flush", str(s3_run.local), "--take-over", env=credentials(s3_run.server))
    assert again.returncode == 0, again.stderr
    assert len(s3_run.commits("step-1")) == 1
    end_flushers(s3_run.local)


def test_incomplete_checkpoints_are_listed_with_the_reason(posix_run: Run, tmp_path: Path) -> None:
    """O045, O048, O052: a manifest without a commit is shown and is never the newest."""
    with TieredWriter(**posix_run.arguments()) as writer:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=writer)
        writer.wait("durable", "step-1", timeout_s=60)
    root = tmp_path / "lustre" / "run"
    (root / "step-2").mkdir()
    (manifest,) = (root / "step-1").glob("manifest-*.json")
    (root / "step-2" / manifest.name).write_bytes(manifest.read_bytes())
    (root / "not a checkpoint").mkdir()
    result = cli("ls", posix_run.url, "--json")
    lines = {line["checkpoint_id"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert {name: line["state"] for name, line in lines.items()} == {
        "step-1": "durable",
        "step-2": "incomplete",
    }
    assert "no commit" in lines["step-2"]["reason"]
    assert cli("inspect", posix_run.url, "step-2").returncode in (6, 7)
