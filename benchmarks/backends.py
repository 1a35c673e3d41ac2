"""What is measured, behind one interface: `dcp_tiered`, and stock DCP at its best settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.harness import settle
from dcp_tiered import Limits, TieredReader, TieredWriter

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from benchmarks.harness import State

_END_S = 20.0


class Backend(Protocol):
    """Saves and loads one checkpoint at a time, each under a new id."""

    def next_writer(self) -> StorageWriter:
        """Return the writer for the next save, which has to take it."""
        ...

    def save(
        self,
        state: State,
        *,
        writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        """Save, through a writer of `writer()`; at the end the checkpoint survives a power cut."""
        ...

    def begin(self, state: State) -> Future[Any]:
        """Stage and return; the rest goes on behind."""
        ...

    def prewarm(self, state: State) -> bool:
        """Get ready for the first `begin`, where that is possible; tell whether it is."""
        ...

    def reader(self) -> StorageReader:
        """Return a new reader of the last checkpoint."""
        ...

    def load(
        self,
        state: State,
        *,
        reader: StorageReader | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        """Load the last checkpoint, through a reader of `reader()`."""
        ...

    def files(self) -> list[Path]:
        """Return the files of the last checkpoint on the local disk."""
        ...

    def buffer_bytes(self) -> int:
        """Return the memory of buffers that are kept for the next save, without a staged state."""
        ...

    def remove(self) -> None:
        """Remove the last checkpoint, which needs to be finished."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


class Ours:
    """`dcp_tiered`, one writer for all saves.

    Args:
        directory: A new directory of ours.
        durable: With a durable tier in the same place; without one nothing is flushed.
    """

    def __init__(self, directory: Path, *, durable: bool = False) -> None:
        self._local = directory / "nvme"
        self._durable = directory / "durable" / "run"
        self._local.mkdir(parents=True)
        self._arguments: dict[str, Any] = {"url": f"tiered://{self._local}"}
        if durable:
            self._durable.parent.mkdir()
            self._arguments = {"url": f"tiered::file://{self._durable}", "local": self._local}
        # A flusher that has ended starts again with the next save: here one is to live throughout.
        self._arguments["limits"] = Limits(idle_exit_s=120.0)
        self._writer = TieredWriter(**self._arguments)
        self._number = 0

    @property
    def _id(self) -> str:
        return f"step-{self._number}"

    def next_writer(self) -> TieredWriter:
        return self._writer

    def save(
        self,
        state: State,
        *,
        writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        self._number += 1
        writer = writer or self._writer
        dcp.save(state, checkpoint_id=self._id, storage_writer=writer, planner=planner)

    def begin(self, state: State) -> Future[Any]:
        self._number += 1
        return _future(dcp.async_save(state, checkpoint_id=self._id, storage_writer=self._writer))

    def prewarm(self, state: State) -> bool:
        prewarm = getattr(self._writer, "prewarm", None)
        if prewarm is not None:
            prewarm(state)
        return prewarm is not None

    def reader(self) -> TieredReader:
        return TieredReader(**self._arguments)

    def load(
        self,
        state: State,
        *,
        reader: StorageReader | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        reader = reader or self.reader()
        dcp.load(state, checkpoint_id=self._id, storage_reader=reader, planner=planner)

    def files(self) -> list[Path]:
        return [path for path in self._local.glob(f"*/{self._id}/*") if path.is_file()]

    def buffer_bytes(self) -> int:
        return int(self._writer.metrics()['dcp_tiered_arena_bytes{use="write"}'])

    def is_durable(self) -> bool:
        """Tell whether the last checkpoint is committed; cheap, and nobody has to help."""
        with suppress(FileNotFoundError):
            return any(name.startswith("record-") for name in os.listdir(self._durable / self._id))  # noqa: PTH208
        return False

    def remove(self) -> None:
        for directory in (*self._local.glob(f"*/{self._id}"), self._durable / self._id):
            shutil.rmtree(directory, ignore_errors=True)
        settle(self._local)

    def close(self) -> None:
        self._writer.close()
        for lock in self._local.glob("*/flusher.lock"):
            _end_flusher(lock)
        shutil.rmtree(self._local.parent, ignore_errors=True)


class Stock:
    """`FileSystemWriter` and `FileSystemReader`: a thread per core, one file each, with fsync.

    `begin` stages with a `DefaultStager` that is kept and copies into the same memory again, which
    is several times faster than what `dcp.async_save` does by itself.

    Args:
        directory: A new directory of ours.
        keep_stager: False for what `dcp.async_save` does by itself.
    """

    def __init__(self, directory: Path, *, keep_stager: bool = True) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True)
        self._number = 0
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options) if keep_stager else None

    @property
    def _path(self) -> Path:
        return self._directory / f"step-{self._number}"

    def next_writer(self) -> dcp.FileSystemWriter:
        path = self._directory / f"step-{self._number + 1}"
        return dcp.FileSystemWriter(path, thread_count=len(os.sched_getaffinity(0)))

    def save(
        self,
        state: State,
        *,
        writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        writer = writer or self.next_writer()
        self._number += 1
        dcp.save(state, storage_writer=writer, planner=planner)

    def begin(self, state: State) -> Future[Any]:
        writer = self.next_writer()
        self._number += 1
        return _future(dcp.async_save(state, storage_writer=writer, async_stager=self._stager))

    def prewarm(self, state: State) -> bool:
        del state
        return False

    def reader(self) -> dcp.FileSystemReader:
        return dcp.FileSystemReader(self._path)

    def load(
        self,
        state: State,
        *,
        reader: StorageReader | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        dcp.load(state, storage_reader=reader or self.reader(), planner=planner)

    def buffer_bytes(self) -> int:
        return 0

    def files(self) -> list[Path]:
        return [path for path in self._path.iterdir() if path.is_file()]

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        settle(self._directory)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _future(response: Any) -> Future[Any]:
    """Return what tells the end of the whole save."""
    future: Future[Any] = getattr(response, "upload_completion", response)
    return future


def _end_flusher(lock: Path) -> None:
    """End the flusher that our saves started, and wait until it is gone."""
    try:
        pid = int(json.loads(lock.read_text(encoding="utf-8"))["pid"])
        command = Path(f"/proc/{pid}/cmdline")
        deadline = time.monotonic() + _END_S
        while b"flusher_process" in command.read_bytes() and time.monotonic() < deadline:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)
    except (OSError, ValueError, KeyError):
        return
