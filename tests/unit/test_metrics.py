"""What a monitor is told: every metric has a name in the right form, and Prometheus reads it."""

import re

import pytest

from dcp_tiered import metrics
from dcp_tiered.metrics import Metric, PrometheusCollector

ALL = [value for value in vars(metrics).values() if isinstance(value, Metric)]


class Source:
    def samples(self):
        yield metrics.READ_BYTES, {"tier": "local"}, 5
        yield metrics.READ_BYTES, {"tier": "durable"}, 7
        yield metrics.STAGE_BYTES, {}, 9


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_say_what_they_are(metric: Metric) -> None:
    units = "_seconds|_bytes|_waits|_checkpoints|_incidents"
    assert re.fullmatch(rf"dcp_tiered_[a-z_]+({units})(_total|_max)?", metric.name)
    assert metric.help


def test_names_are_unique() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)


def test_flat() -> None:
    assert metrics.flat(Source().samples()) == {
        'dcp_tiered_read_bytes_total{tier="local"}': 5,
        'dcp_tiered_read_bytes_total{tier="durable"}': 7,
        "dcp_tiered_stage_buffer_bytes": 9,
    }


def test_prometheus() -> None:
    """The text that a scrape gets is the library's own."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(Source()))
    lines = client.generate_latest(registry).decode().splitlines()
    assert 'dcp_tiered_read_bytes_total{tier="durable"} 7.0' in lines
    assert "# TYPE dcp_tiered_read_bytes_total counter" in lines
    assert "# TYPE dcp_tiered_stage_buffer_bytes gauge" in lines
    assert "dcp_tiered_stage_buffer_bytes 9.0" in lines
