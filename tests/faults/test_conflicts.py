"""Several jobs want one checkpoint id: one owns it, whole, and the others learn that."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_tiered import ConflictError, TieredWriter, cause
from tests.conftest import Run, end_flushers
from tests.support import runs, workers
from tests.support.storage_check import Eyes

ROUNDS = 5


def save_rounds(arguments: dict[str, Any], gate: Any, mine: int) -> list[str]:
    """Save the same ids as the other job does at the same time; return how each round ended."""
    ends = []
    with TieredWriter(**arguments) as writer:
        for number in range(ROUNDS):
            gate.wait(60)
            try:
                state = runs.state_of(10 * number + mine)
                dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
                writer.wait("durable", f"step-{number}", timeout_s=60)
            except BaseException as exc:
                if not isinstance(cause(exc), ConflictError):
                    raise
                ends.append("conflict")
            else:
                ends.append("durable")
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("roots", ["two", "one"])
@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_of_two_jobs_exactly_one_commits(
    kind: str, roots: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """O051: on two local roots, and on one that both share."""
    run: Run = request.getfixturevalue(kind)
    gate = workers.context().Barrier(2)
    other = run.local if roots == "one" else tmp_path / "other-nvme"
    other.mkdir(exist_ok=True)
    try:
        ends = workers.run_together(
            (save_rounds, ({**run.arguments(), "local": str(local)}, gate, mine))
            for mine, local in enumerate((run.local, other), 1)
        )
    finally:
        end_flushers(other)
    checked = Eyes(run).check()
    for number in range(ROUNDS):
        assert sorted(end[number] for end in ends) == ["conflict", "durable"]
        assert len(checked.attempts(f"step-{number}")) == 1
        winner = 1 if ends[0][number] == "durable" else 2
        assert runs.load(run.durable_only(), f"step-{number}") == 10 * number + winner


def test_a_committed_id_is_refused_before_a_byte_is_written(s3_run: Run) -> None:
    runs.save(s3_run.arguments(), "best", 1)
    runs.wait(s3_run.arguments(), "best")
    before = sorted(s3_run.local.rglob("*.shard"))
    error = runs.error_of(runs.save, s3_run.arguments(), "best", 2)
    assert isinstance(error, ConflictError)
    assert "overwrite=True" in (error.hint or "")
    assert sorted(s3_run.local.rglob("*.shard")) == before
    assert runs.load(s3_run.durable_only(), "best") == 1


def overwrite_for_ever(arguments: dict[str, Any], rounds: int) -> None:
    with TieredWriter(**arguments, overwrite=True) as writer:
        for number in range(1, rounds + 1):
            dcp.save(runs.state_of(number), checkpoint_id="best", storage_writer=writer)
            if not number % 2:
                writer.wait("durable", "best", timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_a_reader_sees_the_old_or_the_new_one(kind: str, request: pytest.FixtureRequest) -> None:
    """O054: loads run all the time while the id is overwritten."""
    run: Run = request.getfixturevalue(kind)
    runs.save(run.arguments(), "best", 0)
    runs.wait(run.arguments(), "best")
    process, answers = workers.start(overwrite_for_ever, run.arguments(), 8)
    seen = []
    try:
        while process.is_alive():
            seen += [runs.load(run.durable_only(), "best"), runs.load(run.arguments(), "best")]
        assert answers.get() == (True, None)
    finally:
        process.kill()
        process.join()
    assert len(set(seen)) > 1, "the loads never fell between two overwrites"
    assert seen[::2] == sorted(seen[::2]), "a reader of the store went back in time"
    assert runs.load(run.durable_only(), "best") == 8
    assert len(Eyes(run).check().attempts("best")) >= 2
