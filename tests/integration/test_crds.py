"""Monitors and rules of deploy/kubernetes are valid for the Prometheus operator; test_chart.py checks the chart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.helpers.machine import ROOT
from tests.integration.crds import GROUP, REASON, errors_of

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

Manifest = dict[str, Any]
FILES = sorted((ROOT / "deploy/kubernetes").rglob("*.yaml"))
MANIFESTS = [entry for path in FILES for entry in yaml.safe_load_all(path.read_text()) if entry]
OWN_MANIFESTS = {entry["kind"]: entry for entry in MANIFESTS if str(entry.get("apiVersion")).startswith(GROUP)}

SERVICE_MONITOR: Manifest = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "ServiceMonitor",
    "metadata": {"name": "gpumond"},
    "spec": {"selector": {}, "endpoints": [{"port": "metrics", "basicAuth": {"username": {"name": "s", "key": "u"}}}]},
}
GOOD = {**OWN_MANIFESTS, "ServiceMonitor": SERVICE_MONITOR}


def test_valid_resources_have_no_errors():
    assert OWN_MANIFESTS.keys() == {"PodMonitor", "PrometheusRule"}
    assert errors_of(list(GOOD.values())) == [[], [], []]


@pytest.mark.parametrize(
    ("kind", "place", "value", "complaint"),
    [
        ("PodMonitor", "spec/podMetricsEndpoints/0/intervall", "15s", "/intervall is unknown"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/interval", "15 s", "/interval pattern"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/scheme", "ftp", "/scheme enum"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/relabelings/0/sourceLabel", [], "/sourceLabel is unknown"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/relabelings/0/action", "replaced", "/action enum"),
        ("PodMonitor", "spec/selector", None, "/spec/selector is null"),
        ("PodMonitor", "spec/endpoints", [], "/spec/endpoints is unknown"),
        ("PodMonitor", "metadata/label", {}, "/metadata/label is unknown"),
        ("PrometheusRule", "spec/groups/0/rules/0/for", 60, "/for type"),
        ("PrometheusRule", "spec/groups/0/rules/0/keepFiringFor", "1m", "/keepFiringFor is unknown"),
        ("PrometheusRule", "spec/groups/0/rules/0/labels", {"severity": 1}, "/labels/severity type"),
        ("PrometheusRule", "spec/groups/0/rules/0", {"alert": "x"}, "/rules/0 required"),
        ("ServiceMonitor", "spec/endpoints/0/basicAuth/username/key", 1, "/username/key type"),
        ("ServiceMonitor", "spec/endpoints/0/tlsConfig", {"ca": {"secrets": {}}}, "/ca/secrets is unknown"),
        ("ServiceMonitor", "spec/endpoints/0/tlsConfig", {"ca": {"secret": {"name": "c"}}}, "/ca/secret required"),
        ("ServiceMonitor", "spec/podMetricsEndpoints", [], "/spec/podMetricsEndpoints is unknown"),
    ],
)
def test_operator_resources_are_checked_for_errors(kind: str, place: str, value: object, complaint: str):
    changed = copy.deepcopy(GOOD[kind])
    *path, last = (int(key) if key.isdigit() else key for key in place.split("/"))
    inside: Any = changed
    for key in path:
        inside = inside[key]
    inside[last] = value
    (found,) = errors_of([changed])
    assert [error for error in found if complaint in error], found
