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
    units = "seconds|bytes|waits|checkpoints|requests|commits|incidents|objects"
    assert re.fullmatch(rf"dcp_tiered_([a-z_]+_)?({units})(_total|_max)?", metric.name)
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


def test_text_is_read_by_prometheus() -> None:
    """Labels with quotes and backslashes too."""
    parser = pytest.importorskip("prometheus_client.parser")
    written = metrics.text(Source().samples(), {"run": 's3://b/a"b\\c'})
    families = {one.name: one for one in parser.text_string_to_metric_families(written)}
    assert set(families) == {"dcp_tiered_read_bytes", "dcp_tiered_stage_buffer_bytes"}
    assert families["dcp_tiered_stage_buffer_bytes"].type == "gauge"
    read = families["dcp_tiered_read_bytes"]
    assert read.type == "counter"
    assert [(sample.labels, sample.value) for sample in read.samples] == [
        ({"run": 's3://b/a"b\\c', "tier": "local"}, 5.0),
        ({"run": 's3://b/a"b\\c', "tier": "durable"}, 7.0),
    ]


def test_a_label_has_no_escapes_but_those_that_prometheus_knows() -> None:
    """Its own parser refuses the whole file for one `\\u00e4`; the one for Python does not."""
    written = metrics.text(Source().samples(), {"run": 'file:///läufe\ta\nb"\\'})
    assert 'run="file:///läufe\ta\\nb\\"\\\\"' in written
