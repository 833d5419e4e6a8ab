"""The recipes of docs/how-to/scale-out.md, with real Prometheus servers and Alertmanager."""

from __future__ import annotations

import re
import shlex
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.commands.main import make_parser
from gpumond.features.fleet import accounting, advise
from tests.grafana.boards import targets
from tests.helpers.alert_listener import Listener
from tests.helpers.prometheus import Prometheus
from tests.helpers.running import RunningDaemon, until
from tests.integration.alertmanager import BINARY, Alertmanager

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/scale-out.md").read_text()
BLOCKS = {
    title: yaml.safe_load(text) for title, text in re.findall(r'```yaml title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL)
}
RULES = ROOT / "deploy/prometheus/gpumond.rules.yaml"
RULE = {"groups": [{"name": "up", "rules": [{"alert": "Present", "expr": "gpumond_device_up == 1"}]}]}

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("prometheus")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("scale-out")
    with RunningDaemon(directory / "demo", "--devices", "1", "--interval", "0.5s", command="demo") as running:
        until(lambda: running.request("/api/v1/agents")[0] == 200 and running.get("agents"))
        yield running


def scraping(daemon: RunningDaemon, **others: Any) -> dict[str, Any]:
    address = daemon.url.removeprefix("http://")
    return {"gpumond": {"static_configs": [{"targets": [address], "labels": {"instance": "gpu-01:9917"}}], **others}}


def sent_alerts(server: Prometheus) -> bool:
    """Return whether a server has sent alerts to its Alertmanager."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
        found = re.findall(r"^prometheus_notifications_sent_total\{.*\} (\d+)", answer.read().decode(), re.MULTILINE)
    return any(int(each) for each in found)


def test_remote_write_sends_what_fleets_read_and_no_series_of_programs(daemon: RunningDaemon, tmp_path: Path):
    with Prometheus(tmp_path / "store", {}, flags=["--web.enable-remote-write-receiver"]) as store:
        (write,) = BLOCKS["prometheus.yaml: remote write"]["remote_write"]
        others = {"remote_write": [{**write, "url": f"{store.url}/api/v1/write"}]}
        with Prometheus(tmp_path / "prometheus", scraping(daemon), RULES, others=others) as prometheus:
            until(lambda: prometheus.instant("gpumond_pool_live_bytes"))
            until(lambda: prometheus.instant("gpumond:exists"))
            # Its subquery has values at whole minutes: the first one may come a minute after the first scrape.
            until(lambda: store.instant("owner:gpumond_wasted_gibibyte_hours:sum1h"), seconds=120)
            until(lambda: store.instant("gpumond_owner_used_bytes"))
            until(lambda: store.instant('gpumond_memory_bytes{share="cached"}'))
            assert store.instant('{pid!="", __name__!="ALERTS"}') == []


def test_remote_write_sends_what_the_dashboard_fleet_and_reports_read():
    (relabel,) = BLOCKS["prometheus.yaml: remote write"]["remote_write"][0]["write_relabel_configs"]
    fleet = [each.expression for each in targets() if each.board == "fleet"]
    read = [*fleet, *accounting.usage_queries(None).values(), *advise.need_queries(None, ["user"], 60).values()]
    names = {name for each in read for name in re.findall(r"\b(?:\w+:)?gpumond[:_][\w:]+", each)}
    assert names > {"gpumond_driver_up", "gpumond_flushes_total", "instance:gpumond_agent_coverage:ratio"}
    assert {name for name in names if not re.fullmatch(relabel["regex"], name)} == set()


@pytest.mark.skipif(BINARY is None, reason="needs prometheus-alertmanager (apt)")
def test_a_pair_of_servers_notifies_once(daemon: RunningDaemon, tmp_path: Path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(RULE))
    block = BLOCKS["prometheus.yaml: one of a pair"]
    with ExitStack() as stack:
        listener = Listener()
        stack.callback(listener.close)
        manager = Alertmanager(tmp_path / "alertmanager", listener)
        manager.start()
        stack.callback(manager.stop)
        managers = [{"static_configs": [{"targets": [manager.url.removeprefix("http://")]}]}]
        servers = []
        for replica in "ab":
            labels = {**block["global"]["external_labels"], "replica": replica}
            others = {"alerting": {**block["alerting"], "alertmanagers": managers}}
            server = Prometheus(tmp_path / replica, scraping(daemon), rules, others=others, external_labels=labels)
            servers.append(stack.enter_context(server))
        for server in servers:
            until(lambda one=server: sent_alerts(one))
        (alert,) = manager.alerts() or ()
        assert {"replica", "machine"} & set(alert["labels"]) == {"machine"}
        assert (alert["labels"]["machine"], alert["labels"]["cluster"]) == ("gpu-01", "eu-1")
        until(lambda: listener.requests)
        assert len(listener.requests) == 1


def test_queries_of_autoscalers_are_understood(daemon: RunningDaemon, tmp_path: Path):
    trigger, jobs = (BLOCKS[name]["spec"]["triggers"][0]["metadata"] for name in ("keda.yaml", "keda.yaml: jobs"))
    adapter = BLOCKS["adapter.yaml"]["externalRules"][0]["metricsQuery"].replace("<<.LabelMatchers>>", 'engine="chat"')
    room = re.search(r"```promql\n(.*?)\n```", PAGE, re.DOTALL)
    assert room is not None
    with Prometheus(tmp_path / "prometheus", scraping(daemon)) as prometheus:
        until(lambda: prometheus.instant(room[1]))
        (reclaimable,) = prometheus.instant(jobs["query"])
        assert float(reclaimable["value"][1]) > 0
        for query in (trigger["query"], adapter):
            prometheus.instant(query)


needs_schemas = pytest.mark.skipif(
    util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate (pip)"
)


@needs_schemas
@pytest.mark.parametrize("title", ["hpa.yaml", "job.yaml"])
def test_resource_of_kubernetes_is_valid(title: str):
    import kubernetes_validate

    kubernetes_validate.validate(BLOCKS[title], "1.36", strict=True)


def strict(required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without other keys."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME = {"type": "string", "maxLength": 253, "pattern": rf"^{LABEL}(\.{LABEL})*$"}
RESOURCE = {"type": "string", "pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"}
SIZE = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]*)?([KMGTPE]i|[mkMGTPE])?$"}
QUANTITY = {"anyOf": [{"type": "integer"}, SIZE]}
QUOTA = strict(["name", "nominalQuota"], name=RESOURCE, nominalQuota=QUANTITY)
FLAVOR = strict(["name", "resources"], name=NAME, resources={"type": "array", "items": QUOTA, "minItems": 1})
GROUP = strict(
    ["coveredResources", "flavors"],
    coveredResources={"type": "array", "items": RESOURCE, "minItems": 1},
    flavors={"type": "array", "items": FLAVOR, "minItems": 1},
)
TRANSFORMATION = strict(
    ["input"],
    input=RESOURCE,
    strategy={"enum": ["Retain", "Replace"]},
    outputs={"type": "object", "propertyNames": RESOURCE, "additionalProperties": QUANTITY},
)
KUEUE = {
    "ResourceFlavor": strict(),
    "ClusterQueue": strict(
        namespaceSelector=strict(matchLabels={"type": "object"}),
        cohortName=NAME,
        resourceGroups={"type": "array", "items": GROUP, "maxItems": 16},
    ),
    "LocalQueue": strict(clusterQueue=NAME),
}
"""What the recipe uses of the schemas of `spec` in Kueue 0.17 (config/components/crd/bases), version v1beta2."""


@needs_schemas
def test_queue_of_kueue_covers_what_its_configuration_counts():
    import jsonschema

    configuration = BLOCKS["kueue: controller_manager_config.yaml"]
    transformations = configuration["resources"]["transformations"]
    for transformation in transformations:
        jsonschema.validate(transformation, TRANSFORMATION)
    items = {item["kind"]: item for item in BLOCKS["kueue: queue"]["items"]}
    assert items.keys() == KUEUE.keys()
    for kind, item in items.items():
        assert item["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        jsonschema.validate(item.get("spec", {}), KUEUE[kind])
    (group,) = items["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == items["ResourceFlavor"]["metadata"]["name"]
    assert group["coveredResources"] == [each["name"] for each in flavor["resources"]]
    assert items["LocalQueue"]["spec"]["clusterQueue"] == items["ClusterQueue"]["metadata"]["name"]
    job = BLOCKS["job.yaml"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == items["LocalQueue"]["metadata"]["name"]
    assert job["metadata"]["namespace"] == items["LocalQueue"]["metadata"]["namespace"]
    resources = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    counted = {each["input"]: each["outputs"].keys() for each in transformations}
    requested = {*resources["requests"], *(name for gpu in resources["limits"] for name in counted[gpu])}
    assert requested == set(group["coveredResources"])


def test_command_of_the_job_is_understood():
    (container,) = BLOCKS["job.yaml"]["spec"]["template"]["spec"]["containers"]
    _, program, *words = shlex.split(container["args"][0])
    arguments = make_parser(["run"])[0].parse_args(words)
    assert (program, arguments.need, arguments.wait, arguments.need_device) == (
        "gpumond",
        "8GiB",
        "1h",
        "$NVIDIA_VISIBLE_DEVICES",
    )
    assert arguments.command == ["--", "python", "train.py"]


def test_size_of_all_gpus_counts_no_instance_twice(daemon: RunningDaemon, tmp_path: Path):
    query = re.search(r'```promql title="GiB of all GPUs"\n(.*?)\n```', PAGE, re.DOTALL)
    assert query is not None
    size = sum(device["size_bytes"] for device in daemon.get("devices") if not device["parent_uuid"])
    with Prometheus(tmp_path / "prometheus", scraping(daemon)) as prometheus:
        (found,) = until(lambda: prometheus.instant(query[1]))
    assert float(found["value"][1]) == size / 2**30
