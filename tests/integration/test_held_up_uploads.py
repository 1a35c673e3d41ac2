"""A target of the durable tier that does not answer holds up what lies on it, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from dcp_tiered.services import progress
from dcp_tiered.services.catalog import Catalog
from dcp_tiered.tiers.posix import PosixTier
from tests.conftest import Run
from tests.support import runs
from tests.support.disks import Disk
from tests.support.workers import await_that


def line_of(run: Run, checkpoint_id: str) -> progress.CheckpointStatus:
    path = runs.run_path(run)
    local = PosixTier(path, path, "local")
    lines = progress.status(Catalog(local, None), local)
    return next(line for line in lines if line.checkpoint_id == checkpoint_id)


@pytest.mark.parametrize(
    ("limits", "state", "why"),
    [
        ({"request_timeout_s": 1.0}, "uploading", "nothing moved"),
        ({"request_timeout_s": 600.0, "flush_deadline_s": 1.0}, "late", "it is late"),
    ],
)
def test_a_target_that_hangs_holds_up_only_what_lies_on_it(
    limits: dict[str, Any], state: str, why: str, target: Disk, tmp_path: Path, local: Path
) -> None:
    run = Run(f"tiered::file://{tmp_path}/lustre/run", local)
    arguments = runs.with_limits(run.arguments(), **limits)
    with target.frozen():
        for number in (1, 2, 3):
            runs.save(arguments, f"step-{number}", number)
        for number in (2, 3):
            await_that(f"step-{number}", lambda number=number: run.commits(f"step-{number}"))
        assert run.commits("step-1") == []
        assert list(target.path.glob("*.pack")) == []
        await_that(state, lambda: line_of(run, "step-1").state == state)
        held = line_of(run, "step-1")
        assert held.level == "local"
        assert held.error is not None
        assert why in held.error
    runs.wait(arguments, "step-1")
    assert len(run.commits("step-1")) == 1
    assert len(list(target.path.glob("*.pack"))) == 1
    assert runs.load(run.durable_only(), "step-1") == 1
