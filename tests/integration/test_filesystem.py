"""The `tiered` fsspec protocol lists what is on the tiers."""

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs

from dcp_tiered import TieredWriter
from tests.conftest import Run


@pytest.mark.parametrize("kind", ["s3_run", "posix_run"])
def test_lists_checkpoints_and_their_objects(kind: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    with TieredWriter(**run.arguments()) as writer:
        for step in (1, 2):
            dcp.save({"w": torch.ones(10)}, checkpoint_id=f"step-{step}", storage_writer=writer)
        writer.wait("durable", "step-2", timeout_s=60)
    fs, path = url_to_fs(run.url, tiered={"local": str(run.local)}, **run.options)
    assert [name.rsplit("/", 1)[1] for name in fs.ls(path, detail=False)] == ["step-1", "step-2"]
    listed = {
        entry["name"].removeprefix(f"{path}/"): entry["size"] for entry in fs.ls(f"{path}/step-1")
    }
    assert listed == {k: v for k, v in run.keys().items() if k.startswith("step-1/")}
    assert fs.isdir(path)
    assert fs.exists(f"{path}/step-2")
    assert not fs.exists(f"{path}/step-3")


def test_lists_what_is_only_local(posix_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with TieredWriter(**posix_run.arguments()) as writer:
        monkeypatch.setattr(writer, "_keep_flusher", lambda: None)
        dcp.save({"w": torch.ones(10)}, checkpoint_id="step-1", storage_writer=writer)
    monkeypatch.setenv("FSSPEC_TIERED_LOCAL", str(posix_run.local))
    fs, path = url_to_fs(posix_run.url)
    assert [name.rsplit("/", 1)[1] for name in fs.ls(path, detail=False)] == ["step-1"]


def test_is_registered_by_its_entry_point() -> None:
    assert "tiered" in fsspec.available_protocols()
    assert fsspec.get_filesystem_class("tiered").__module__ == "dcp_tiered.filesystem"
