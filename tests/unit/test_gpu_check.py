"""The script for machines with a GPU: what of it can run without one, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Place

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@NO_GPU
def test_says_that_there_is_no_cuda() -> None:
    done = run()
    assert done.returncode == 2
    assert "no CUDA" in done.stderr
    assert done.stdout == ""


@NO_GPU
@pytest.mark.slow
def test_every_check_runs_and_nothing_is_left(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--mebibytes", 8, "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(lines) == {
        *("probe", "block_crcs", "staging", "async"),
        *("engine_direct", "engine_kvikio", "engine_gds"),
    }
    assert lines["engine_direct"]["ratio"] > 0
    assert lines["engine_gds"]["skipped"], "asked for by name, it says why it is not there"
    assert lines["probe"]["machine"]["gpu"] == "no GPU"
    assert all(name in done.stderr for name in lines), "the table"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Place) -> gpu_check.Details:
        raise AssertionError("wrong sums")

    monkeypatch.setattr(gpu_check, "check_block_crcs", fail)
    monkeypatch.setattr(gpu_check, "check_engine", lambda *_, **__: {"answer": "fine"})
    results = gpu_check._run_checks(Place(tmp_path, "cpu", 1 << 20))
    assert [result["check"] for result in results if not result["ok"]] == ["block_crcs"]
    assert "wrong sums" in str(results[1]["answer"])
    assert len(results) == 7
    monkeypatch.setattr(gpu_check, "_BUDGET_S", 0.0)
    late = gpu_check._run_checks(Place(tmp_path, "cpu", 1 << 20))
    assert {result["answer"] for result in late} == {"not begun: out of time"}


def test_a_tensor_that_is_not_in_the_file_as_it_was_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 19, dtype=torch.int32)
    path = tmp_path / "a.shard"
    data = bytearray(bytes(4096) + bytes(tensor.numpy()) + b"footer")
    path.write_bytes(data)
    gpu_check._compare_files([path], {"model": {"w": tensor}})
    data[4096 + 1_000_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="w is not in the files"):
        gpu_check._compare_files([path], {"model": {"w": tensor}})
