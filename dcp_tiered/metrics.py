"""Every metric: name, unit, labels. `TieredWriter.metrics` and `TieredReader.metrics` give values.

A flusher writes its own into a file, in the text format of Prometheus.

Names follow Prometheus: a base unit in the name, `_total` for what only grows. Values belong to one
process: where DCP saves in another one (PROCESS), that one counts what is written.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Sample = tuple["Metric", Mapping[str, str], float]
"""A metric, its labels, and its value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A name and what it means."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        """Tell whether it only grows."""
        return self.name.endswith("_total")


STALL = Metric(
    "dcp_tiered_stall_seconds_total",
    "Time that async saves waited until the staged copy of the save before them was written",
)
STAGE = Metric("dcp_tiered_stage_seconds_total", "Time that staging took, without that wait")
STAGE_BYTES = Metric("dcp_tiered_stage_buffer_bytes", "Size of the staging buffer")
WRITE = Metric("dcp_tiered_write_seconds_total", "Time to write and sync shard files")
WRITE_BYTES = Metric("dcp_tiered_write_bytes_total", "Bytes of shard files written")
WRITE_THROUGH_BYTES = Metric(
    "dcp_tiered_write_through_bytes_total",
    "Bytes that went to the durable tier during a save because the local one was full",
)
BACKPRESSURE = Metric(
    "dcp_tiered_backpressure_seconds_total", "Time that saves waited for room on this node"
)
BACKPRESSURE_WAITS = Metric(
    "dcp_tiered_backpressure_waits_total", "How often a save had to wait for room on this node"
)
SUPERSEDED = Metric(
    "dcp_tiered_superseded_checkpoints_total",
    "Checkpoints whose flush this process gave up, so that a save had room",
)
EVICTED_BYTES = Metric(
    "dcp_tiered_evicted_bytes_total",
    "Bytes of durable and of superseded checkpoints removed from this node",
)
LOCAL_BYTES = Metric(
    "dcp_tiered_local_bytes", "What the run takes on this node, when that was last looked at"
)
HELD_RESIDENCY = Metric(
    "dcp_tiered_held_residency_checkpoints",
    "Checkpoints that the residency policy keeps on this node",
)
REQUESTS = Metric(
    "dcp_tiered_requests_total",
    "Requests to the durable tier, by operation and outcome (`ok`, `retried` or `failed`)",
    ("operation", "outcome"),
)
REQUESTS_MAX = Metric(
    "dcp_tiered_requests_max", "Requests that may be on their way at once; fewer after SlowDown"
)
COMMITS = Metric("dcp_tiered_commits_total", "Checkpoints that this flusher found or made durable")
PENDING = Metric(
    "dcp_tiered_pending_checkpoints", "Published checkpoints of this node that are not durable yet"
)
PENDING_AGE = Metric(
    "dcp_tiered_pending_seconds_max", "How long the flusher knows of the oldest of them"
)
HELD_UP = Metric(
    "dcp_tiered_held_up_checkpoints",
    "Checkpoints whose upload has been silent, so that others begin",
)
LATE = Metric(
    "dcp_tiered_late_checkpoints", "Checkpoints that are not durable after `flush_deadline_s`"
)
INCIDENTS = Metric(
    "dcp_tiered_residency_incidents",
    "Incident files on this node: what was written, and where that was found to be forbidden then",
)
OBJECTS = Metric(
    "dcp_tiered_objects_total",
    "Objects put on the durable tier; so many per checkpoint as `dcp_tiered_commits_total` has it",
)
UPLOAD_BYTES = Metric("dcp_tiered_upload_bytes_total", "Bytes of packs sent, repeated ones too")
PACING = Metric(
    "dcp_tiered_pacing_seconds_total", "Time that uploads waited because of `bytes_per_second_max`"
)
READ = Metric("dcp_tiered_read_seconds_total", "Time to read, verify and copy")
READ_BYTES = Metric("dcp_tiered_read_bytes_total", "Bytes read, by tier", ("tier",))
ARENA_BYTES = Metric("dcp_tiered_arena_bytes", "Memory that the I/O buffers take", ("use",))
ARENA_BYTES_MAX = Metric("dcp_tiered_arena_bytes_max", "Memory that they may take", ("use",))
ARENA_WAITS = Metric(
    "dcp_tiered_arena_waits_total", "How often work had to wait for an I/O buffer", ("use",)
)
ARENA_WAIT = Metric(
    "dcp_tiered_arena_wait_seconds_total", "Time that work waited for an I/O buffer", ("use",)
)


def flat(samples: Iterable[Sample]) -> dict[str, float]:
    """Return samples by name, with labels as in `name{tier="local"}`."""
    return {_key(metric, labels): value for metric, labels, value in samples}


def _key(metric: Metric, labels: Mapping[str, str]) -> str:
    text = ",".join(f'{name}="{labels[name]}"' for name in metric.labels)
    return f"{metric.name}{{{text}}}" if text else metric.name


def text(samples: Iterable[Sample], more: Mapping[str, str]) -> str:
    """Return samples as Prometheus reads them from a text file.

    Args:
        samples: The samples; those of one metric follow each other.
        more: Labels that each of them gets.
    """
    lines: list[str] = []
    for metric, labels, value in samples:
        head = f"# TYPE {metric.name} {'counter' if metric.is_counter else 'gauge'}"
        if head not in lines:
            lines += [f"# HELP {metric.name} {metric.help}", head]
        pairs = ",".join(f'{name}="{_escaped(said)}"' for name, said in {**more, **labels}.items())
        lines.append(f"{metric.name}{{{pairs}}} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(said: str) -> str:
    """Return a label's value; any other escape, as JSON has, makes a scraper refuse the file."""
    return said.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@runtime_checkable
class Source(Protocol):
    """What has metrics: a writer or a reader, a flusher, some tiers."""

    def samples(self) -> Iterable[Sample]:
        """Return the current values."""
        ...


class PrometheusCollector:
    """Hand a writer's or reader's metrics to `prometheus_client.REGISTRY.register`.

    Needs the extra: `pip install 'dcp-tiered[metrics]'`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Any]:
        """Yield metric families, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric, labels, value in self._source.samples():
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = families.setdefault(
                metric.name, kind(metric.name, metric.help, labels=metric.labels)
            )
            family.add_metric([labels[name] for name in metric.labels], value)
        yield from families.values()
