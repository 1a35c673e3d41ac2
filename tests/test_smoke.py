"""The main promise in its shortest form, on both kinds of durable tier."""

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredReader, TieredWriter

if TYPE_CHECKING:
    from tests.conftest import Run


@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_save_flush_load(kind: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    state = {"w": torch.randn(100, 37), "step": 7, "nested": {"lr": [0.1, 0.2]}}
    with TieredWriter(**run.arguments()) as writer:
        dcp.save(state, checkpoint_id="step-7", storage_writer=writer)
        writer.wait("durable", "step-7", timeout_s=60)
    assert len(run.commits("step-7")) == 1
    for arguments in (run.arguments(), run.durable_only()):
        target = {"w": torch.zeros(100, 37), "step": 0, "nested": {"lr": [0.0, 0.0]}}
        reader = TieredReader(**arguments)
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["w"], state["w"])
        assert (target["step"], target["nested"]) == (7, {"lr": [0.1, 0.2]})
        assert reader.checkpoint_id == "step-7"
        tier = "local" if "local" in arguments else "durable"
        assert reader.bytes_read[tier] >= 100 * 37 * 4
