"""Processes that the result of a PromQL query names, and the age of its data."""

from __future__ import annotations

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.features.fleet.connection import Machine, Machines
from gpumond.features.fleet.discovery import LOOKBACK_SECONDS, Named, Sample, data_seconds, named
from gpumond.features.fleet.flush import by_machine


@pytest.mark.parametrize(
    ("expression", "seconds"),
    [
        ("gpumond_pool_reclaimable_bytes > 2 ^ 30", 0),
        ('gpumond_pool_live_bytes{workload="a[5m]@x:y"}', 0),
        ("avg_over_time(gpumond_pool_reclaimable_bytes[10m]) > 1", 600),
        ("max_over_time(x[1h30m:]) > 1", 5400),
        ("max_over_time(avg_over_time(x[2m])[1h:5m] offset 1d)", 3600 + 300 + 120 + 86400),
        ("rate(x[300])  # not [1h]", 300),
        ('ALERTS{alertname="GpumondIdleHolder"}', LOOKBACK_SECONDS),
        ("workload:gpumond_pool_bytes:sum", LOOKBACK_SECONDS),
        ('{"workload:gpumond_pool_bytes:sum", pid="1"}', LOOKBACK_SECONDS),
        ('{__name__="workload:gpumond_pool_bytes:sum"}', LOOKBACK_SECONDS),
        ('x{instance="gpu-1:9917"}', 0),
    ],
)
def test_age_of_the_data_is_bounded(expression: str, seconds: float):
    assert data_seconds(expression) == seconds


@pytest.mark.parametrize("expression", ["x @ 1790000000", "x offset -5m", "x[5m + 1m]", "x offset (1h)"])
def test_query_whose_age_is_unknown_is_refused(expression: str):
    with pytest.raises(ConfigError):
        data_seconds(expression)


def sample(instance: str, pid: str, at: float = 1000.0, **labels: str) -> Sample:
    return Sample({"instance": instance, "pid": pid, **labels}, at, 1.0)


def test_series_of_one_process_are_combined():
    samples = (
        sample("a", "10", uuid="GPU-0", workload="train"),
        sample("a", "10", uuid="GPU-1", workload="train"),
        sample("b", "10"),
        sample("a", "other"),
    )
    scrapes = [Sample({"instance": "a"}, 1000.0, 990.0), Sample({"instance": "a", "job": "dcgm"}, 1000.0, 985.0)]
    assert named(samples, scrapes, 60.0) == {
        ("", "a"): {10: Named(10, 985.0 - 60.0, frozenset(("GPU-0", "GPU-1")), frozenset(("train",)))},
        ("", "b"): {10: Named(10, 1000.0 - LOOKBACK_SECONDS - 60.0)},
    }


def test_machines_of_two_clusters_with_one_name_are_apart():
    samples = (sample("a", "10", cluster="x"), sample("a", "10", cluster="y"))
    scrapes = [
        Sample({"instance": "a", "cluster": "x"}, 1000.0, 990.0),
        Sample({"instance": "a", "cluster": "y"}, 1000.0, 980.0),
    ]
    processes = named(samples, scrapes, 0.0)
    assert processes == {("x", "a"): {10: Named(10, 990.0)}, ("y", "a"): {10: Named(10, 980.0)}}
    in_x, in_y = (Machine("a", f"http://a.{name}:9917", (("cluster", name),)) for name in ("x", "y"))
    found, missing = by_machine(Machines([in_x, in_y]), processes)
    assert (dict(found), missing) == ({in_x: processes["x", "a"], in_y: processes["y", "a"]}, [])
    found, missing = by_machine(Machines([in_x]), processes)
    assert (dict(found), [each.machine for each in missing]) == ({in_x: processes["x", "a"]}, ["y/a"])
    found, missing = by_machine(Machines([in_x, in_y]), named([sample("a", "10")], scrapes, 0.0))
    assert (found, len(missing)) == ([], 1)
    assert "keep it in the query" in missing[0].problem
    found, missing = by_machine(Machines([Machine("a", "http://a:9917")]), processes)
    assert found == []
    assert {each.problem for each in missing} == {
        "machines in several clusters have this name; add the label cluster to those in your list"
    }


@pytest.mark.parametrize("labels", [{}, {"instance": "a"}, {"pid": "10"}])
def test_series_without_a_process_are_refused(labels: dict[str, str]):
    with pytest.raises(ConfigError, match=r"by \(instance, pid\)"):
        named([Sample(labels, 1000.0, 1.0)], [], 0.0)
