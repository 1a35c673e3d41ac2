"""A checkpoint that is not durable in time: people are told, and the flusher goes on."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_tiered.services import progress
from dcp_tiered.services.catalog import Catalog
from tests.conftest import QUICK, Run
from tests.support.nodes import Node, make_nodes, publish
from tests.support.storage_check import Eyes
from tests.support.workers import await_that


def line_of(node: Node) -> progress.CheckpointStatus:
    (line,) = progress.status(Catalog(node.local, None), node.local)
    return line


@pytest.mark.parametrize(
    ("deadline_s", "state"), [(60.0, "late"), (1e12, "local"), (None, "local")]
)
def test_status_and_log_say_what_is_late(
    deadline_s: float | None, state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durable = tmp_path / "lustre" / "run"
    durable.parent.mkdir()
    nodes = make_nodes(2, tmp_path, durable, replace(QUICK, flush_deadline_s=deadline_s))
    eyes = Eyes(Run(url=f"tiered::file://{durable}", local=nodes[0].local.root))
    for node in nodes:
        node.seal("a", 2, f"{node.rank:016x}")
    publish(nodes, "a")  # its sequence, which is its time, is long ago
    with caplog.at_level(logging.ERROR, "dcp_tiered"):
        for _ in range(3):
            nodes[0].flusher.step()
    assert line_of(nodes[0]).state == state
    is_late = state == "late"
    assert [record.getMessage()[:7] for record in caplog.records] == ["late: a"] * is_late
    assert progress.late(nodes[0].local.root) == is_late

    def flush() -> None:
        for node in nodes:
            node.flusher.step()

    await_that("the commit", lambda: eyes.check().commits or flush())
    await_that("the report", lambda: line_of(nodes[0]).state == "durable" or flush())
    assert progress.late(nodes[0].local.root) == 0
