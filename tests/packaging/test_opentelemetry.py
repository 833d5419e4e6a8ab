"""The Collector's configuration: every component exists, and its statements map our metrics to OpenTelemetry's.

The statements are executed on all metrics of the daemon by the part of OTTL that they use. Any other statement fails.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.metrics.catalog import FAMILIES

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "deploy/opentelemetry/collector.yaml").read_text())
STATEMENT = re.compile(r"(?P<function>\w+)\((?P<arguments>.*)\) where (?P<condition>.+)")
TEXT = re.compile(r'"([^"$]*)"')
ATTRIBUTE = re.compile(r'datapoint\.attributes\["([\w.]+)"\]')
CONVENTIONS = {
    "hw.gpu.memory.limit": ("updowncounter", "By", set()),
    "hw.gpu.memory.usage": ("updowncounter", "By", set()),
    "hw.gpu.utilization": ("gauge", "1", {"hw.gpu.task"}),
    "hw.power": ("gauge", "W", set()),
    "hw.energy": ("counter", "J", set()),
    "hw.temperature": ("gauge", "Cel", {"hw.sensor_location"}),
}
"""Instrument, unit and further attributes by name, as the semantic conventions for hardware define them."""


@dataclass
class Metric:
    """A metric with one data point."""

    name: str
    kind: str
    attributes: dict[str, str]
    unit: str = ""
    before: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.before = self.name


def metrics() -> list[Metric]:
    return [Metric(each.name, each.kind, {label: f"<{label}>" for label in each.labels}) for each in FAMILIES]


def text(written: str) -> str:
    found = TEXT.fullmatch(written)
    assert found, f"{written} is not a string without $, which the Collector would replace"
    return found[1]


def holds(condition: str, metric: Metric) -> bool:
    if found := re.fullmatch(r"IsMatch\(metric\.name, (.+)\)", condition):
        return re.search(text(found[1]), metric.name) is not None
    found = re.fullmatch(r"metric\.name == (.+)", condition)
    assert found, condition
    return metric.name == text(found[1])


def value(written: str, metric: Metric) -> str:
    if found := ATTRIBUTE.fullmatch(written):
        return metric.attributes[found[1]]
    if found := re.fullmatch(r'Concat\(\[(.+), (.+)\], (".*")\)', written):
        return text(found[3]).join((value(found[1], metric), value(found[2], metric)))
    return text(written)


def execute(statement: str, context: str, metric: Metric) -> bool:
    """Execute a statement on a metric. Returns False if its condition does not hold."""
    parsed = STATEMENT.fullmatch(statement)
    assert parsed, statement
    if not holds(parsed["condition"], metric):
        return False
    if parsed["function"] == "convert_gauge_to_sum":
        assert (context, parsed["arguments"], metric.kind) == ("metric", '"cumulative", false', "gauge")
        metric.kind = "updowncounter"
        return True
    assert parsed["function"] == "set"
    target, _, written = parsed["arguments"].partition(", ")
    if found := ATTRIBUTE.fullmatch(target):
        assert context == "datapoint"
        metric.attributes[found[1]] = value(written, metric)
    else:
        assert (context, target) in {("metric", "metric.name"), ("metric", "metric.unit")}
        setattr(metric, target.removeprefix("metric."), value(written, metric))
    return True


def transformed() -> tuple[list[Metric], list[str]]:
    """Return all metrics after the statements, and the statements that changed none."""
    found, idle = metrics(), []
    for group in CONFIG["processors"]["transform/hw"]["metric_statements"]:
        for statement in group["statements"]:
            if not [metric for metric in found if execute(statement, group["context"], metric)]:
                idle.append(statement)
    return found, idle


def test_pipelines_use_the_defined_components():
    (pipeline,) = CONFIG["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert sorted(pipeline[kind]) == sorted(CONFIG[kind])
        assert {name.partition("/")[0] for name in CONFIG[kind]} <= {"prometheus", "transform", "batch", "otlphttp"}
    assert CONFIG["processors"]["transform/hw"]["error_mode"] == "propagate"
    assert CONFIG["exporters"]["otlphttp"]["endpoint"] == "${env:OTLP_ENDPOINT}"


def test_every_statement_applies_to_a_metric_of_the_daemon():
    assert transformed()[1] == []


def test_metrics_of_devices_follow_the_conventions():
    found = [metric for metric in transformed()[0] if metric.name.startswith("hw.")]
    assert {metric.name for metric in found} == set(CONVENTIONS)
    for metric in found:
        instrument, unit, further = CONVENTIONS[metric.name]
        assert (metric.kind, metric.unit) == (instrument, unit)
        own = {name for name in metric.attributes if name.startswith("hw.")}
        assert own == {"hw.id", "hw.type", "hw.name"} | further
        assert (metric.attributes["hw.id"], metric.attributes["hw.type"]) == ("<uuid>", "gpu")
        assert metric.attributes["hw.name"] == "GPU <gpu>"
    tasks = {metric.attributes["hw.gpu.task"] for metric in found if metric.name == "hw.gpu.utilization"}
    assert tasks == {"general", "encoder", "decoder"}


def test_other_metrics_keep_their_names_and_units():
    others = [metric for metric in transformed()[0] if not metric.name.startswith("hw.")]
    assert len(others) > 50
    assert all((metric.name, metric.unit) == (metric.before, "") for metric in others)


@pytest.mark.needs("promtool")
def test_prometheus_accepts_the_configuration_of_the_receiver(tmp_path: Path):
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(CONFIG["receivers"]["prometheus"]["config"]))
    done = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
