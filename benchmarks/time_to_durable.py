"""G11: how long after the start of a save is it durable, against its slower half alone?

Ours: from the start of `dcp.save` until the flusher notes on the node that the commit is in the
bucket, which a client of its own then looks at; the flusher runs already, as it does after the
first save. Reference: the longer of the save to the local tier alone and the upload alone, which is
what the flusher does with the sealed shard file, in a process that does nothing else. Like the
flusher, that one finds the file on the disk and not in the page cache, since saves write around
that. 1 would be a perfect overlap; one after the other is up to 2. The server is a SeaweedFS on the
same machine and disk.

With two ranks on the node, each with half of the state, the second begins to write when half of an
upload's time is over: long enough for the first one's half to be uploaded. 1 would be a perfect
overlap of that; what begins with the end of the save takes 1.5.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from benchmarks import harness, ranks
from benchmarks.backends import Ours
from benchmarks.flush_vs_clients import Target, Uploader, ours, seaweed
from benchmarks.harness import Answer, Options, Sample
from dcp_tiered import Limits, TieredWriter

TARGET = 1.15
_ASK_S, _REST_S = 0.01, 1.0
_REST_BYTES = 64 << 20
_FLUSH_S_MAX = 600.0
_RANKS = 2


class OursOnS3(Ours):
    """`dcp_tiered` with a bucket behind it.

    Args:
        directory: A new directory of ours.
        server: Holds the bucket.
    """

    def __init__(self, directory: Path, server: Any) -> None:
        super().__init__(directory)
        self._writer.close()
        self._client, self._bucket = server.client(), server.buckets[0]
        self._prefix = directory.name
        self.arguments = self._arguments = {
            "url": f"tiered::s3://{self._bucket}/{self._prefix}",
            "local": str(self._local),
            "s3": server.storage_options(),
            "limits": Limits(idle_exit_s=120.0),
        }
        self._writer = TieredWriter(**self._arguments)

    def keys(self, below: str) -> list[str]:
        """Return the keys of this run's objects whose names begin so."""
        prefix = f"{self._prefix}/{below}"
        reply = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix)
        return [
            entry["Key"].removeprefix(f"{self._prefix}/") for entry in reply.get("Contents", ())
        ]

    def next_id(self) -> str:
        """Return the id of a checkpoint that others save for this one."""
        self._number += 1
        return self._id

    def is_durable(self) -> bool:
        """Tell whether the flusher has noted here that the last checkpoint is committed.

        It does that a moment later; a request would take from the server what the flush needs.
        """
        return any(path.name.startswith("record-") for path in self.files())

    def await_durable(self) -> None:
        """Return as soon as that is so, and a client of its own has seen the record."""
        deadline = time.monotonic() + _FLUSH_S_MAX
        while not self.is_durable():
            assert time.monotonic() < deadline, "the flush does not end"
            time.sleep(_ASK_S)
        assert self.keys(f"{self._id}/record-"), "the commit is noted, and not in the bucket"


class _Late(DefaultSavePlanner):
    """Hands out the first value after a while."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s

    def resolve_data(self, write_item: Any) -> Any:
        time.sleep(self._delay_s)
        self._delay_s = 0.0
        return super().resolve_data(write_item)


class UnevenRanks:
    """Two ranks of one node, of which the second begins to write later.

    Args:
        arguments: Of their writers.
        size: Bytes of both together.
    """

    def __init__(self, arguments: Mapping[str, Any], size: int) -> None:
        context, port = ranks.context(), ranks.free_port()
        self._pipes, self._processes = [], []
        for rank in range(_RANKS):
            ours, theirs = context.Pipe()
            job = (rank, port, dict(arguments), size // _RANKS, theirs)
            process = context.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def save(self, checkpoint_id: str, delay_s: float) -> None:
        """Return when both ranks have saved."""
        for pipe in self._pipes:
            pipe.send((checkpoint_id, delay_s))
        for pipe in self._pipes:
            assert pipe.poll(_FLUSH_S_MAX), "a rank does not answer"
            pipe.recv()

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _rank(rank: int, port: int, arguments: dict[str, Any], size: int, pipe: Connection) -> None:
    ranks.join(rank, _RANKS, port)
    state = {f"rank-{rank}": torch.empty(size, dtype=torch.uint8).random_()}
    with TieredWriter(**arguments) as writer:
        while True:
            try:
                checkpoint_id, delay_s = pipe.recv()
            except EOFError:
                return
            planner = _Late(delay_s if rank else 0.0)
            dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer, planner=planner)
            pipe.send(checkpoint_id)


def _rest(size: int) -> None:
    """Let disk and server end what the sample before left them to do, such as to drop a bucket."""
    os.sync()
    time.sleep(_REST_S * min(1.0, size / _REST_BYTES))


def run(options: Options) -> list[Answer]:
    """Answer the question on top."""
    state = harness.make_state(options.bytes)
    with seaweed(options.directory / "server") as server:
        alone = Ours(options.directory / "alone")
        kept = Ours(options.directory / "kept")
        flushed = OursOnS3(options.directory / "flushed", server)
        kept.save(state)
        (shard,) = (path for path in kept.files() if path.suffix == ".shard")
        uploader = Uploader(ours, Target(server.storage_options(), shard), server)
        uneven = OursOnS3(options.directory / "uneven", server)
        limits = replace(uneven.arguments["limits"], pack_bytes_target=options.bytes // 4)
        two = UnevenRanks({**uneven.arguments, "limits": limits}, options.bytes)
        last = Sample()

        def local() -> Sample:
            _rest(options.bytes)
            with harness.clock() as sample:
                alone.save(state)
            alone.remove()
            return sample

        def upload() -> Sample:
            nonlocal last
            _rest(options.bytes)
            harness.make_cold([shard])
            last = uploader.upload()
            return last

        def durable() -> Sample:
            _rest(options.bytes)
            with harness.clock() as sample:
                flushed.save(state)
                flushed.await_durable()
            flushed.remove()
            return sample

        def two_ranks() -> Sample:
            _rest(options.bytes)
            with harness.clock() as sample:
                two.save(uneven.next_id(), last.seconds / 2)
                uneven.await_durable()
            uneven.remove()
            return sample

        steps = {"local": local, "durable": durable, "two_ranks": two_ranks}
        measured = harness.interleave(upload, steps, options.pairs)
        uploader.close()
        two.close()
        for backend in (alone, kept, flushed, uneven):
            backend.close()
    locals_s = [pair.sample.seconds for pair in measured["local"]]
    uploads_s = [pair.reference for pair in measured["durable"]]
    totals_s = [pair.sample.seconds for pair in measured["durable"]]
    bounds_s = [max(both) for both in zip(locals_s, uploads_s, strict=True)]
    details = {"local_s": harness.median(locals_s), "upload_s": harness.median(uploads_s)}
    uneven_s = [pair.sample.seconds for pair in measured["two_ranks"]]
    halves_s = [pair.reference for pair in measured["two_ranks"]]
    size = harness.bytes_of(state)
    return [
        _answer("time to durable / slower of save and upload", size, totals_s, bounds_s, details),
        _answer("the same, of two ranks one after the other", size, uneven_s, halves_s, {}),
    ]


def _answer(
    metric: str,
    size: int,
    seconds: list[float],
    bounds: list[float],
    details: dict[str, float],
) -> Answer:
    ratios = [one / bound for one, bound in zip(seconds, bounds, strict=True)]
    return Answer(
        benchmark="time_to_durable",
        goal="G11",
        metric=metric,
        unit="1",
        bytes=size,
        seconds=harness.median(seconds),
        reference_seconds=harness.median(bounds),
        ratio=harness.median(ratios),
        ratios=ratios,
        stock=None,
        target=TARGET,
        bound="max",
        details=details,
    )


if __name__ == "__main__":
    sys.exit(harness.main({"time_to_durable": run}, __doc__))
