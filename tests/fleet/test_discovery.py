"""Lists of machines in the formats of Prometheus, Kubernetes and Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import yaml

from gpumond.facts.errors import ConfigError
from gpumond.features.fleet.connection import Machine, Machines, parse_machine
from gpumond.features.fleet.discovery import (
    DAEMONS_QUERY,
    LOOKBACK_SECONDS,
    QueriedProcess,
    SeriesSample,
    file_sd_groups,
    lookback_seconds,
    machines_from_endpoint_slices,
    machines_from_file,
    machines_from_groups,
    machines_from_prometheus,
    machines_from_slurm_nodes,
    processes_by_instance,
)
from gpumond.features.fleet.flush import processes_by_machine
from tests.helpers.stubs import fleet, stub

RULES = Path(__file__).parents[2] / "deploy/prometheus/gpumond.rules.yaml"
MACHINES = [
    Machine("node-1", "https://10.0.0.1:9917", (("rack", "7"),)),
    Machine("gpu-2:9000", "http://gpu-2:9000/proxy"),
    Machine("node-3", "http://[fd00::3]:9917"),
]


def test_printed_list_is_read_again():
    assert [*machines_from_groups(json.loads(json.dumps(file_sd_groups(MACHINES))), "http", "x")] == MACHINES


def test_yaml_and_json_files_are_equal(tmp_path: Path):
    (tmp_path / "targets.yaml").write_text("- targets: [gpu-1, 'gpu-2:80']\n  labels: {rack: 7}\n")
    (tmp_path / "targets.json").write_text('[{"targets": ["gpu-1", "gpu-2:80"], "labels": {"rack": "7"}}]')
    expected = [parse_machine(address, {"rack": "7"}, scheme="https") for address in ("gpu-1", "gpu-2:80")]
    for name in ("targets.yaml", "targets.json"):
        assert [*machines_from_file(tmp_path / name, "https")] == expected


@pytest.mark.parametrize(
    "content", ["{}", "[1]", '[{"targets": "gpu-1"}]', '[{"targets": ["gpu-1"], "labels": []}]', "[{]", '"' + "[" * 9]
)
@pytest.mark.parametrize("name", ["targets.json", "targets.yaml"])
def test_file_of_another_format_is_refused(tmp_path: Path, name: str, content: str):
    if "labels" in content:
        content = content.replace("[]}", "[1]}")
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        [*machines_from_file(tmp_path / name, "http")]


def test_file_that_does_not_exist_is_named(tmp_path: Path):
    for name in ("a.json", "a.yaml"):
        with pytest.raises(ConfigError, match=f"{name}: No such file"):
            [*machines_from_file(tmp_path / name, "http")]


def test_targets_of_prometheus_have_the_address_that_it_scrapes():
    targets = [
        {"labels": {"job": "gpumond", "instance": "node-1"}, "scrapeUrl": "https://10.0.0.1:9917/metrics"},
        {"labels": {"job": "pods", "instance": "gpu-2:80"}, "scrapeUrl": "http://gpu-2/proxy/metrics?x=y"},
        {"labels": {"job": "node", "instance": "node-1"}, "scrapeUrl": "http://10.0.0.1:9100/metrics"},
        {"labels": {"job": "pods", "instance": "10.1.0.7:8080"}, "scrapeUrl": "http://10.1.0.7:8080/metrics"},
    ]
    daemons = [{"job": "gpumond", "instance": "node-1"}, {"job": "pods", "instance": "gpu-2:80"}]
    assert [*machines_from_prometheus(targets, daemons)] == [
        Machine("node-1", "https://10.0.0.1:9917", (("job", "gpumond"),)),
        Machine("gpu-2:80", "http://gpu-2:80/proxy", (("job", "pods"),)),
    ]


@pytest.mark.parametrize(
    ("options", "expression", "names"),
    [
        ((), DAEMONS_QUERY, ["a", "b"]),
        (("--job", "pods"), 'up{job="pods"}', ["b"]),
    ],
)
def test_daemons_of_prometheus_are_those_of_any_job_or_of_a_named_one(
    options: tuple[str, ...], expression: str, names: list[str]
):
    known = [{"job": job, "instance": name} for job, name in (("gpumond", "a"), ("pods", "b")) if name in names]
    targets = [{"labels": each, "scrapeUrl": f"http://{each['instance']}:9917/metrics"} for each in known]
    targets.append({"labels": {"job": "pods", "instance": "c"}, "scrapeUrl": "http://c:80/metrics"})

    def answer(path: str, body: str) -> tuple[int, object]:
        if path == "/api/v1/targets":
            return 200, {"data": {"activeTargets": targets}}
        assert parse_qs(body)["query"] == [f"group by (job, instance) ({expression})"]
        result = [{"metric": each, "value": [0, "1"]} for each in known]
        return 200, {"data": {"resultType": "vector", "result": result}}

    with stub(answer) as served:
        shown = fleet("targets", "--prometheus", f"http://{served.address}", "--json", *options)
    assert [group["labels"]["instance"] for group in json.loads(shown.stdout)] == names


@pytest.mark.needs("promtool")
def test_daemons_in_prometheus_are_those_that_the_rules_find(tmp_path: Path):
    """A daemon of each kind: one whose job is named so, one with metrics of gpumond, one that was such a daemon."""
    series = {
        'up{job="gpumond/gpumond",instance="a"}': "0x9",
        'up{job="pods",instance="b"}': "1x9",
        'gpumond_build_info{job="pods",instance="b",version="1"}': "1x9",
        'up{job="pods",instance="c"}': "1 1 0x7",
        'gpumond_build_info{job="pods",instance="c",version="1"}': "1 1 stale",
        'up{job="pods",instance="d"}': "1x9",
    }
    expected = [("a", "gpumond/gpumond"), ("b", "pods"), ("c", "pods")]
    found = [{"labels": f'{{instance="{name}", job="{job}"}}', "value": 1} for name, job in expected]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"group by (job, instance) ({each})", "eval_time": "9m", "exp_samples": found}
            for each in (DAEMONS_QUERY, "gpumond:up")
        ],
    }
    file = tmp_path / "daemons.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_endpoint_slices_name_the_nodes():
    pod = {"kind": "Pod", "namespace": "gpumond", "name": "gpumond-x"}
    ports = [{"name": "other", "port": 1}, {"name": "metrics", "port": 9917}]
    ready = {"addresses": ["10.0.0.1"], "nodeName": "node-1", "targetRef": pod, "conditions": {"ready": True}}
    failing = {"addresses": ["10.0.0.2"], "nodeName": "node-2", "conditions": {"ready": False}}
    items = [
        {"addressType": "IPv4", "ports": ports, "endpoints": [ready, failing, {"addresses": []}]},
        {"addressType": "IPv6", "ports": ports, "endpoints": [{"addresses": ["fd00::3"]}]},
        {"addressType": "IPv4", "ports": None, "endpoints": None},
    ]
    assert [*machines_from_endpoint_slices({"items": items}, "http")] == [
        Machine("node-1", "http://10.0.0.1:9917", (("namespace", "gpumond"), ("pod", "gpumond-x"))),
        Machine("node-2", "http://10.0.0.2:9917"),
        Machine("[fd00::3]:9917", "http://[fd00::3]:9917"),
    ]


def test_node_in_several_partitions_is_listed_once():
    assert [each.name for each in machines_from_slurm_nodes("gpu-1\ngpu-2\ngpu-1\n", "http")] == ["gpu-1", "gpu-2"]


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
    assert lookback_seconds(expression) == seconds


@pytest.mark.parametrize("expression", ["x @ 1790000000", "x offset -5m", "x[5m + 1m]", "x offset (1h)"])
def test_query_whose_age_is_unknown_is_refused(expression: str):
    with pytest.raises(ConfigError):
        lookback_seconds(expression)


def sample(instance: str, pid: str, at: float = 1000.0, **labels: str) -> SeriesSample:
    return SeriesSample({"instance": instance, "pid": pid, **labels}, at, 1.0)


def test_series_of_one_process_are_combined():
    samples = (
        sample("a", "10", uuid="GPU-0", workload="train"),
        sample("a", "10", uuid="GPU-1", workload="train"),
        sample("b", "10"),
        sample("a", "other"),
    )
    scrapes = [
        SeriesSample({"instance": "a"}, 1000.0, 990.0),
        SeriesSample({"instance": "a", "job": "dcgm"}, 1000.0, 985.0),
    ]
    assert processes_by_instance(samples, scrapes, 60.0) == {
        ("", "a"): {10: QueriedProcess(10, 985.0 - 60.0, frozenset(("GPU-0", "GPU-1")), frozenset(("train",)))},
        ("", "b"): {10: QueriedProcess(10, 1000.0 - LOOKBACK_SECONDS - 60.0)},
    }


def test_machines_of_two_clusters_with_one_name_are_apart():
    samples = (sample("a", "10", cluster="x"), sample("a", "10", cluster="y"))
    scrapes = [
        SeriesSample({"instance": "a", "cluster": "x"}, 1000.0, 990.0),
        SeriesSample({"instance": "a", "cluster": "y"}, 1000.0, 980.0),
    ]
    processes = processes_by_instance(samples, scrapes, 0.0)
    assert processes == {("x", "a"): {10: QueriedProcess(10, 990.0)}, ("y", "a"): {10: QueriedProcess(10, 980.0)}}
    in_x, in_y = (Machine("a", f"http://a.{name}:9917", (("cluster", name),)) for name in ("x", "y"))
    found, missing = processes_by_machine(Machines([in_x, in_y]), processes)
    assert (dict(found), missing) == ({in_x: processes["x", "a"], in_y: processes["y", "a"]}, [])
    found, missing = processes_by_machine(Machines([in_x]), processes)
    assert (dict(found), [each.machine for each in missing]) == ({in_x: processes["x", "a"]}, ["y/a"])
    found, missing = processes_by_machine(
        Machines([in_x, in_y]), processes_by_instance([sample("a", "10")], scrapes, 0.0)
    )
    assert (found, len(missing)) == ([], 1)
    assert "keep it in the query" in missing[0].problem
    found, missing = processes_by_machine(Machines([Machine("a", "http://a:9917")]), processes)
    assert found == []
    assert {each.problem for each in missing} == {
        "machines in several clusters have this name; add the label cluster to those in your list"
    }


@pytest.mark.parametrize("labels", [{}, {"instance": "a"}, {"pid": "10"}])
def test_series_without_a_process_are_refused(labels: dict[str, str]):
    with pytest.raises(ConfigError, match=r"by \(instance, pid\)"):
        processes_by_instance([SeriesSample(labels, 1000.0, 1.0)], [], 0.0)
