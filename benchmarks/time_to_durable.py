"""G11: how long after the start of a save is it durable, against its slower half alone?

Ours: from the start of `dcp.save` until the flusher notes on the node that the commit is in the
bucket, which a client of its own then looks at; the flusher runs already, as it does after the
first save. Reference: the longer of the save to the local tier alone and the upload alone, which is
what the flusher does with the sealed shard file, in a process that does nothing else. Like the
flusher, that one finds the file on the disk and not in the page cache, since saves write around
that. 1 would be a perfect overlap; one after the other is up to 2. The server is a SeaweedFS on the
same machine and disk.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.backends import Ours
from benchmarks.flush_vs_clients import Target, Uploader, ours, seaweed
from benchmarks.harness import Answer, Options, Sample
from dcp_tiered import Limits, TieredWriter

TARGET = 1.15
_ASK_S, _REST_S = 0.01, 1.0
_FLUSH_S_MAX = 600.0


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


def _rest() -> None:
    """Let disk and server end what the sample before left them to do, such as to drop a bucket."""
    os.sync()
    time.sleep(_REST_S)


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

        def local() -> Sample:
            _rest()
            with harness.clock() as sample:
                alone.save(state)
            alone.remove()
            return sample

        def upload() -> Sample:
            _rest()
            harness.make_cold([shard])
            return uploader.upload()

        def durable() -> Sample:
            _rest()
            with harness.clock() as sample:
                flushed.save(state)
                flushed.await_durable()
            flushed.remove()
            return sample

        steps = {"local": local, "durable": durable}
        measured = harness.interleave(upload, steps, options.pairs)
        uploader.close()
        for backend in (alone, kept, flushed):
            backend.close()
    locals_s = [pair.sample.seconds for pair in measured["local"]]
    uploads_s = [pair.reference for pair in measured["durable"]]
    totals_s = [pair.sample.seconds for pair in measured["durable"]]
    bounds_s = [max(both) for both in zip(locals_s, uploads_s, strict=True)]
    ratios = [total / bound for total, bound in zip(totals_s, bounds_s, strict=True)]
    return [
        Answer(
            benchmark="time_to_durable",
            goal="G11",
            metric="time to durable / slower of save and upload",
            unit="1",
            bytes=harness.bytes_of(state),
            seconds=harness.median(totals_s),
            reference_seconds=harness.median(bounds_s),
            ratio=harness.median(ratios),
            ratios=ratios,
            stock=None,
            target=TARGET,
            bound="max",
            details={
                "local_s": harness.median(locals_s),
                "upload_s": harness.median(uploads_s),
            },
        )
    ]


if __name__ == "__main__":
    sys.exit(harness.main({"time_to_durable": run}, __doc__))
