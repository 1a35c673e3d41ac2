"""A flusher's metrics in a file, where node_exporter's textfile collector and people find them."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from dcp_tiered import metrics
from dcp_tiered.format import layout
from dcp_tiered.metrics import Sample, Source

_EVERY_S = 5.0


class MetricsFile:
    """Writes the metrics of one run's flusher.

    Args:
        run_path: The run's directory.
        url: The run, the label of every value: the files of several runs are collected together.
        sources: What has metrics.
    """

    def __init__(self, run_path: Path, url: str, *sources: Source) -> None:
        self._path = run_path / layout.METRICS_FILE
        self._labels = {"run": url}
        self._sources = sources
        self._due = 0.0

    def write_sometimes(self) -> None:
        """Write unless that was done a few seconds ago."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY_S
            self.write()

    def write(self) -> None:
        """Replace the file as a whole; a full disk must not stop the flusher that empties it."""
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(metrics.text(self._samples(), self._labels), encoding="utf-8")
            temporary.replace(self._path)

    def _samples(self) -> Iterator[Sample]:
        for source in self._sources:
            yield from source.samples()
