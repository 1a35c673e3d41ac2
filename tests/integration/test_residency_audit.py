"""`dcp-tiered residency audit` on what flushers left on Amazon, played over TLS."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.cli import main
from tests.conftest import Run
from tests.support import runs
from tests.support.amazon import ACCOUNT, Amazon, Bucket

pytestmark = pytest.mark.slow
REGION = "eu-central-1"
POLICY = f'[[allow]]\nprovider = "aws"\nregions = ["{REGION}"]\nowner = "{ACCOUNT}"\n'
URL = "tiered::s3://ckpt/run"
LOST = f"packs/{'0' * 12}-{'f' * 16}.pack"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Iterator[tuple[Amazon, dict[str, Any]]]:
    """Save one id without a policy, then again with one, and leave a pack of a third try."""
    path = tmp_path_factory.mktemp("audit")
    (path / "nvme").mkdir()
    (path / "policy.toml").write_text(POLICY)
    with Amazon(path) as amazon, pytest.MonkeyPatch.context() as patch:
        for name, value in amazon.environment(REGION).items():
            patch.setenv(name, value)
        bucket = amazon.add("ckpt", REGION)
        run = Run(url=URL, local=path / "nvme", options={"s3": amazon.options(REGION)})
        for number, more in enumerate(({}, {"residency": path / "policy.toml"})):
            with runs.no_flusher(run):
                runs.save(run.arguments(), "step-1", number, overwrite=True, **more)
            assert main(["flush", str(run.local), "--timeout", "60"]) == 0
        bucket.objects[f"run/step-1/{LOST}"] = (b"x", "")
        yield amazon, dict(bucket.objects)


@pytest.fixture
def bucket(written) -> Bucket:
    amazon, objects = written
    found: Bucket = amazon.buckets["ckpt"]
    found.objects = dict(objects)
    amazon.log.clear()
    return found


def record(bucket: Bucket, number: int) -> dict[str, Any]:
    """Read a record without our code."""
    return json.loads(bucket.objects[f"run/step-1/record-{number}.json"][0])


def lines(capsys) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_commit_is_shown_with_its_evidence(written, bucket: Bucket, capsys):
    before = dict(bucket.objects)
    assert main(["residency", "audit", URL, "--json"]) == 9
    old, new, lost = lines(capsys)
    assert (old["record"], old["state"], old["finding"]) == (1, "superseded", "no policy")
    assert old["evidence"] is None
    assert (new["record"], new["state"], new["finding"]) == (2, "committed", "evidence")
    stored = record(bucket, 2)
    for name in ("committed_at", "committed_by", "step"):
        assert new[name] == stored[name]
    evidence, said = new["evidence"], stored["residency"]
    for name in ("policy_sha256", "target", "rule", "facts", "attestations"):
        assert evidence[name] == said[name], name
    where = (evidence["provider"], evidence["regions"], evidence["owner"])
    assert where == ("aws", [f"aws:{REGION}"], ACCOUNT)
    assert (lost["kind"], lost["names"]) == ("uncommitted", [LOST])
    amazon = written[0]
    assert {seen.method for seen in amazon.log} == {"GET"}
    assert len(amazon.log) == 1 + 1 + 2, "the ids, what is below one, its records"
    assert bucket.objects == before


def test_a_table_says_the_same(bucket: Bucket, capsys):
    assert main(["residency", "audit", URL]) == 9
    shown = capsys.readouterr().out
    for text in ("no policy", "superseded", "s3://ckpt", ACCOUNT, "ALLOW:", LOST):
        assert text in shown, text
    assert "records: 1 evidence, 1 no policy; uncommitted objects: 1" in shown


def test_the_exit_code_tells_what_was_found(bucket: Bucket, tmp_path: Path, capsys):
    del bucket.objects["run/step-1/record-1.json"]
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    command = ["residency", "audit", URL, "--json", "--policy", str(policy)]
    assert main(["residency", "audit", URL]) == 0
    assert main(command) == 0
    capsys.readouterr()
    policy.write_text(POLICY.replace(REGION, "eu-west-1"))
    assert main(command) == 9
    judged = lines(capsys)[0]
    assert judged["finding"] == "not allowed"
    assert f"not in the policy: aws:{REGION}" in judged["why"]
    bucket.objects["run/step-1/record-2.json"] = (b"{}", "")
    assert main(command) == 5
    damaged = lines(capsys)[0]
    assert (damaged["finding"], damaged["evidence"]) == ("damaged", None)
    policy.write_text("allow = 3")
    assert main(command) == 3


def test_nothing_is_no_clean_run(bucket: Bucket):
    assert main(["residency", "audit", f"{URL}-mistyped"]) == 7


def test_what_a_store_says_is_no_markup_and_no_command_to_a_terminal(bucket: Bucket, capsys):
    bucket.objects["run/step-1/[/x]\x9b2J"] = (b"x", "")
    assert main(["residency", "audit", URL]) == 9
    shown = capsys.readouterr().out
    assert "[/x]" in shown
    assert "\x9b" not in shown


def test_a_store_that_does_not_answer_is_no_finding(written, bucket: Bucket, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("FSSPEC_TIERED_LIMITS", json.dumps({"request_retry_s": 0}))
    assert main(["residency", "audit", URL]) == 4
    assert main(["residency", "audit", "/only/here"]) == 3
