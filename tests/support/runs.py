"""Small steps that fault tests share: save, wait, hold the flusher off, catch our error."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_tiered import TieredError, TieredReader, TieredWriter, cause
from dcp_tiered.format import layout
from dcp_tiered.run_url import parse_url
from dcp_tiered.services import identity
from dcp_tiered.services.lock import FlusherLock
from tests.conftest import Run
from tests.support import workers

SIZE = 50_000


def state_of(number: int) -> dict[str, Any]:
    """Return a state of which every value follows from a number."""
    values = torch.arange(SIZE, dtype=torch.int64) * 1_000_003 + number
    return {"a": values, "b": values.to(torch.float64) / 7, "n": number}


def number_of(state: dict[str, Any]) -> int:
    """Return which state it is, having proved that all of it belongs together."""
    number: int = state["n"]
    expected = state_of(number)
    assert torch.equal(state["a"], expected["a"]), "not all of one state"
    assert torch.equal(state["b"], expected["b"]), "not all of one state"
    return number


def save(arguments: dict[str, Any], checkpoint_id: str, number: int, **more: Any) -> None:
    """Save a state and let go of the writer."""
    with TieredWriter(**{**arguments, **more}) as writer:
        dcp.save(state_of(number), checkpoint_id=checkpoint_id, storage_writer=writer)


def wait(arguments: dict[str, Any], checkpoint_id: str, timeout_s: float = 60.0) -> None:
    """Wait until a checkpoint is durable."""
    with TieredWriter(**arguments) as writer:
        writer.wait("durable", checkpoint_id, timeout_s=timeout_s)


def load(arguments: dict[str, Any], checkpoint_id: str | None = None) -> int:
    """Load a checkpoint and return which state it is."""
    target = {"a": torch.zeros(SIZE, dtype=torch.int64), "b": torch.zeros(SIZE).double(), "n": -1}
    reader = TieredReader(**arguments)
    try:
        dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=reader)
    finally:
        reader.close()
    return number_of(target)


def error_of(work: Any, *args: Any, **kwargs: Any) -> TieredError:
    """Return our error out of what a call raises."""
    try:
        work(*args, **kwargs)
    except BaseException as exc:
        found = cause(exc)
        if found is None:
            raise
        return found
    raise AssertionError("nothing was raised")


def run_path(run: Run) -> Path:
    """Return the run's directory on the local tier, also before it is there."""
    return run.local / layout.run_directory(parse_url(run.url).root)


@contextmanager
def no_flusher(run: Run) -> Iterator[None]:
    """Hold the flusher's lock, so that what is saved inside stays local."""
    path = run_path(run)
    path.mkdir(exist_ok=True)
    lock = FlusherLock(path)
    workers.await_that("the end of the flusher that runs", lambda: lock.holder() is None, 20)
    with lock.hold(identity.current()) as mine:
        assert mine, "a flusher runs already"
        yield


def behind(run: Run, endpoint: str) -> dict[str, Any]:
    """Return a writer's arguments with the store behind another endpoint."""
    return {**run.arguments(), "s3": {**run.options["s3"], "endpoint_url": endpoint}}


def with_limits(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return arguments with other bounds."""
    return {**arguments, "limits": replace(arguments["limits"], **changes)}


def flip_bit(path: Path, at: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def shards(run: Run, checkpoint_id: str) -> list[Path]:
    """Return the sealed shard files of an id on this node."""
    return sorted((run_path(run) / checkpoint_id).glob("*.shard"))
