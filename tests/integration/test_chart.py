"""deploy/helm and deploy/kubernetes: rendered by Helm's own engine and by kustomize, and strictly valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.config.loading import load_settings
from gpumond.config.settings import Settings
from gpumond.config.tokens import check_subjects, parse_tokens
from tests.helpers import certificates
from tests.helpers.machine import ROOT
from tests.integration.chart import CASES, REASON, REFUSED, USERS, built, objects, only, rendered, valid

pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(600)]


@pytest.mark.parametrize("case", CASES)
def test_helm_lint_finds_nothing(case: str):
    assert rendered()[case]["lint"] <= 1


@pytest.mark.parametrize("case", CASES)
def test_rendered_chart_is_valid(case: str):
    assert "refused" not in rendered()[case]
    valid(objects(case))


@pytest.mark.parametrize("case", REFUSED)
def test_schema_refuses_invalid_values(case: str):
    assert REFUSED[case][1] in rendered()[case]["refused"]


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("pod monitor", {"PodMonitor"}),
        ("service monitor", {"ServiceMonitor"}),
        ("rules", {"PrometheusRule"}),
        ("open", {"NetworkPolicy"}),
        ("injection", {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}),
        ("kyverno", {"ClusterPolicy"}),
        ("TLS", {"PodMonitor", "ServiceMonitor", "Secret"}),
        ("access", {"Secret", "ClusterRole", "ClusterRoleBinding"}),
    ],
)
def test_switches_add_or_remove_objects(case: str, kinds: set[str]):
    assert {entry["kind"] for entry in objects(case)} ^ {entry["kind"] for entry in objects("defaults")} == kinds


@pytest.mark.parametrize("way", ["chart", "kustomize"])
def test_chart_rules_equal_those_of_prometheus(way: str):
    found = objects("rules") if way == "chart" else built("deploy/kubernetes/monitoring")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/gpumond.rules.yaml").read_text())
    if way == "chart":  # whose instance label, the node's name, is no address
        for group in rules["groups"]:
            for rule in group["rules"]:
                rule.get("annotations", {}).pop("runbook_url", None)
    assert only(found, "PrometheusRule")["spec"] == rules


@pytest.mark.parametrize("way", ["chart", "kustomize"])
def test_chart_dashboards_equal_those_of_grafana(way: str):
    found = objects("dashboards") if way == "chart" else built("deploy/kubernetes/monitoring")
    maps = [entry["data"] for entry in found if "grafana_dashboard" in entry["metadata"].get("labels", ())]
    given = {path.name: json.loads(path.read_text()) for path in (ROOT / "grafana/dashboards").glob("*.json")}
    assert {name: json.loads(text) for data in maps for name, text in data.items()} == given
    assert given


@pytest.mark.parametrize(("case", "file"), [("injection", "policy.yaml"), ("kyverno", "kyverno.yaml")])
def test_chart_injects_as_the_policies_of_kubernetes(case: str, file: str):
    own = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/injection" / file).read_text()))
    for entry in own:
        found = only(objects(case), entry["kind"])
        assert found["spec"] == entry["spec"]
        assert found["metadata"]["name"] == entry["metadata"]["name"]


def test_pod_is_unprivileged():
    for case in CASES:
        pod = only(objects(case), "DaemonSet")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "runAsUser": USERS.get(case, 10001),
            "runAsGroup": USERS.get(case, 10001),
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert pod["automountServiceAccountToken"] is False
        assert not pod.get("hostNetwork")
        assert {probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")} == {
            "/-/healthy"
        }


@pytest.mark.parametrize("case", CASES)
def test_root_init_container_only_changes_the_owner_of_directories(case: str):
    """The init container has only the necessary capabilities, and is absent if the daemon is root."""
    pod = only(objects(case), "DaemonSet")["spec"]["template"]["spec"]
    user = USERS.get(case, 10001)
    given = pod.get("initContainers", [])
    agents = [each for each in given if each["name"] == "agent"]
    assert len(agents) == (case in ("injection", "kyverno"))
    assert all(each["securityContext"]["capabilities"] == {"drop": ["ALL"]} for each in agents)
    if user == 0:
        assert given == agents
        return
    (giver,) = [each for each in given if each not in agents]
    assert giver["command"] == ["chown", "-R", f"{user}:{user}", "/run/gpumond", "/var/lib/gpumond"]
    assert giver["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "DAC_READ_SEARCH"]}
    assert pod["securityContext"] == {"fsGroup": user}


@pytest.mark.parametrize("case", CASES)
def test_private_files_of_the_daemon_have_their_own_volume(case: str):
    pod = only(objects(case), "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    places = {entry["mountPath"]: entry["name"] for entry in container["volumeMounts"]}
    own = places[str(Path(variables["GPUMOND_RUNTIME_DIR"]).parent)]
    assert variables["GPUMOND_URL"] == f"unix://{variables['GPUMOND_RUNTIME_DIR']}/api.sock"
    (volume,) = [entry for entry in pod["volumes"] if entry["name"] == own]
    assert volume.keys() == {"name", "emptyDir"}
    assert own not in {entry["name"] for giver in pod.get("initContainers", ()) for entry in giver["volumeMounts"]} | {
        places["/run/gpumond"]
    }


def test_kubelet_socket_is_mounted_only_for_root():
    for case in CASES:
        volumes = {volume["name"] for volume in only(objects(case), "DaemonSet")["spec"]["template"]["spec"]["volumes"]}
        assert ("pod-resources" in volumes) == (USERS.get(case) == 0)
        assert ("log-names" in volumes) == (case != "no names")


@pytest.mark.parametrize(
    ("case", "tls", "login"),
    [
        ("pod monitor", None, None),
        (
            "TLS",
            {"serverName": "gpu.example.com", "ca": {"secret": {"name": "certificate", "key": "ca.crt"}}},
            None,
        ),
        (
            "TLS and users",
            {"serverName": "gpumond.gpumond.svc"},
            {key: {"name": "scraper", "key": key} for key in ("username", "password")},
        ),
    ],
)
def test_scrapes_and_probes_use_the_scheme_of_the_daemon(case: str, tls: object, login: object):
    found = objects(case)
    scheme = "https" if tls else "http"
    ends = [end for entry in found for end in entry.get("spec", {}).get("podMetricsEndpoints", ())]
    ends += [end for entry in found if entry["kind"] == "ServiceMonitor" for end in entry["spec"]["endpoints"]]
    assert ends
    for end in ends:
        assert (end["scheme"], end.get("tlsConfig"), end.get("basicAuth")) == (scheme, tls, login)
    (container,) = only(found, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    assert {probe["httpGet"]["scheme"] for name, probe in container.items() if name.endswith("Probe")} == {
        scheme.upper()
    }


@pytest.mark.parametrize("case", ["pod monitor", "TLS"])
def test_job_of_the_scraped_targets_is_the_one_of_the_rules(case: str):
    found = objects(case)
    monitors = [entry["spec"] for entry in found if entry["kind"] in ("PodMonitor", "ServiceMonitor")]
    sources = [entry["metadata"] for entry in found if entry["kind"] == "Service"]
    sources += [entry["spec"]["template"]["metadata"] for entry in found if entry["kind"] == "DaemonSet"]
    assert monitors
    assert {source["labels"][monitor["jobLabel"]] for monitor in monitors for source in sources} == {"gpumond"}


def test_values_of_community_charts_are_used():
    found = objects("additions")
    valid(found)
    assert rendered()["additions"]["lint"] <= 1
    assert "ServiceAccount" not in {entry["kind"] for entry in found}
    assert {entry["metadata"]["labels"]["team"] for entry in found} == {"ml"}
    daemon = only(found, "DaemonSet")
    assert (daemon["metadata"]["name"], daemon["metadata"]["namespace"]) == ("gpus", "accounting")
    pod = daemon["spec"]["template"]["spec"]
    (container,), (giver,) = pod["containers"], pod["initContainers"]
    assert container["image"] == "mirror.example/gpumond:0.1.0"
    assert container["args"][-2:] == ["--log-level", "debug"]
    assert {"name": "TZ", "value": "UTC"} in container["env"]
    assert {"ca", "tokens"} <= {mount["name"] for mount in container["volumeMounts"]}
    assert {"ca", "tokens"} <= {volume["name"] for volume in pod["volumes"]}
    assert (pod["serviceAccountName"], "hostPID" in pod, "affinity" in pod) == ("existing", False, False)
    assert giver["resources"] == {"limits": {"memory": "64Mi"}}
    assert pod["securityContext"] == {"fsGroup": 10001, "supplementalGroups": [44]}
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness", "startup")}
    assert paths == {"liveness": "/-/healthy", "readiness": "/-/ready", "startup": "/-/healthy"}
    assert container["startupProbe"]["failureThreshold"] == 30
    service = only(found, "Service")["metadata"]
    assert (service["annotations"]["a"], service["labels"]["c"]) == ("b", "d")
    (config,) = [entry["data"]["gpumond.yaml"] for entry in found if "gpumond.yaml" in entry.get("data", ())]
    assert yaml.safe_load(config)["tokens_file"] == "/etc/gpumond-tokens/tokens.yaml"


def test_monitor_scrapes_the_chosen_groups():
    (endpoint,) = only(objects("service monitor"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["params"] == {"collect[]": ["device", "owner", "daemon"]}


def test_monitor_has_the_fields_of_the_operator():
    monitor = only(objects("additions"), "PodMonitor")
    spec = monitor["spec"]
    (end,) = spec["podMetricsEndpoints"]
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert spec["namespaceSelector"] == {"matchNames": ["accounting"]}
    assert (spec["jobLabel"], spec["sampleLimit"]) == ("team", 60000)
    assert (end["scrapeTimeout"], end["honorLabels"]) == ("10s", True)
    assert [rule["targetLabel"] for rule in end["relabelings"]] == ["instance", "cluster"]
    assert end["metricRelabelings"] == [{"action": "labeldrop", "regex": "comm"}]
    plain = only(objects("pod monitor"), "PodMonitor")["spec"]
    assert not {"sampleLimit", "namespaceSelector"} & plain.keys()


def test_rules_can_be_disabled_added_and_linked_to_other_runbooks():
    own = only(objects("additions"), "PrometheusRule")["spec"]["groups"]
    alerts = {rule["alert"]: rule for group in own for rule in group["rules"] if "alert" in rule}
    given = yaml.safe_load((ROOT / "deploy/prometheus/gpumond.rules.yaml").read_text())["groups"]
    names = {rule["alert"] for group in given for rule in group["rules"] if "alert" in rule}
    assert names - alerts.keys() == {"GpumondIdleHolder"}
    assert own[-1] == {"name": "gpumond-additional", "rules": [{"record": "one", "expr": "vector(1)"}]}
    links = {alert: rule["annotations"]["runbook_url"] for alert, rule in alerts.items()}
    assert links["GpumondLeak"] == "https://wiki.example/gpumond#leak"
    assert {link.partition("#")[0] for link in links.values()} == {"https://wiki.example/gpumond"}


def test_pods_run_on_nodes_with_a_gpu_only():
    pod = only(objects("defaults"), "DaemonSet")["spec"]["template"]["spec"]
    labels = yaml.safe_load((ROOT / "deploy/helm/gpumond/values.yaml").read_text())["gpuNodeLabels"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["matchExpressions"] for term in required["nodeSelectorTerms"]] == [
        [{"key": label, "operator": "Exists"}] for label in labels
    ]
    chosen = only(objects("everything else"), "DaemonSet")["spec"]["template"]["spec"]
    assert chosen["affinity"] == {"nodeAffinity": {}}
    assert chosen["nodeSelector"] == {"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true"}


def test_service_account_has_no_permissions():
    kinds = {entry["kind"] for case in CASES if case != "access" for entry in objects(case)}
    assert not [kind for kind in kinds if kind.endswith(("Role", "RoleBinding"))]


def test_changed_configuration_changes_the_pods():
    before, after = (
        only(objects(case), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for case in ("defaults", "everything else")
    )
    assert before != after


def test_configuration_is_valid_for_gpumond(tmp_path: Path):
    (config,) = [entry["data"]["gpumond.yaml"] for entry in objects("everything else") if "data" in entry]
    (tmp_path / "gpumond.yaml").write_text(config)
    settings = load_settings(
        tmp_path / "gpumond.yaml", environ={"GPUMOND_LISTEN": "10.0.0.7:9917", "GPUMOND_SOURCE": "all"}
    )
    assert [rule.name for rule in settings.rules] == ["full"]
    assert settings.interval == 2


@pytest.mark.needs("openssl")
@pytest.mark.parametrize(("case", "users"), [("TLS", set()), ("TLS and users", {"prometheus"})])
def test_web_configuration_is_valid_for_gpumond(tmp_path: Path, case: str, users: set[str]):
    """A certificate in the mounted volume allows the daemon to start on a network address."""
    found = objects(case)
    pod = only(found, "DaemonSet")["spec"]["template"]["spec"]
    places = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    settings = settings_of(found, places, tmp_path)
    assert settings.web().tls is not None
    assert settings.web().users.keys() == users
    assert settings.insecure == (not users)


@pytest.mark.needs("openssl")
def test_callers_of_the_chart_are_valid_for_gpumond(tmp_path: Path):
    found = objects("access")
    pod = only(found, "DaemonSet")["spec"]["template"]["spec"]
    places = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    settings = settings_of(found, places, tmp_path)
    tokens = parse_tokens(only(found, "Secret")["stringData"]["tokens"], "tokens")
    assert [token.name for token in tokens] == ["runner", "argo"]
    check_subjects(tokens, settings.web().accepts_client_certificates, settings.token_review_audience is not None)
    assert settings.tokens_file == tmp_path / "tokens"
    assert str(settings.token_review_directory) == places["service-account"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tls"]
    assert {"key": "ca.crt", "path": "ca.crt"} in volume["secret"]["items"]
    assert only(found, "ClusterRoleBinding")["roleRef"]["name"] == only(found, "ClusterRole")["metadata"]["name"]
    (rule,) = only(found, "ClusterRole")["rules"]
    assert rule == {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}


def settings_of(found: list[dict[str, Any]], places: dict[str, str], directory: Path) -> Settings:
    """Return the settings of a rendered chart, with the mounted certificates and files in a directory."""
    certificates.make(directory)
    web = only(found, "Secret")["stringData"]["web.yml"].replace(f"{places['tls']}/tls", f"{directory}/server")
    (directory / "web.yml").write_text(web.replace(places["tls"], str(directory)))
    (config,) = [entry["data"]["gpumond.yaml"] for entry in found if entry["kind"] == "ConfigMap"]
    (directory / "gpumond.yaml").write_text(config.replace(places["web"], str(directory)))
    return load_settings(directory / "gpumond.yaml", environ={"GPUMOND_LISTEN": "10.0.0.7:9917"})


@pytest.mark.parametrize(
    "directory", ["deploy/kubernetes", "deploy/kubernetes/example", "deploy/kubernetes/monitoring"]
)
def test_kustomize_output_is_valid(directory: str):
    valid(built(directory))


def test_helm_and_kustomize_give_the_same_pods():
    base, chart = built("deploy/kubernetes"), objects("defaults")
    pods = [only(found, "DaemonSet")["spec"]["template"]["spec"] for found in (base, chart)]
    for pod in pods:
        (config,) = [volume for volume in pod["volumes"] if volume["name"] == "config"]
        config["configMap"]["name"] = config["configMap"]["name"].partition("-")[0]
    assert pods[0] == pods[1]
    assert only(base, "Service")["spec"]["ports"] == only(chart, "Service")["spec"]["ports"]
    (own,), (charts,) = (only(found, "NetworkPolicy")["spec"]["ingress"] for found in (base, chart))
    *peers, test = charts["from"]
    assert own == {**charts, "from": peers}
    assert test["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "gpumond-test"
    own_monitor = only(built("deploy/kubernetes/monitoring"), "PodMonitor")
    monitor = only(objects("pod monitor"), "PodMonitor")
    assert own_monitor["spec"] == monitor["spec"]
    for key, value in own_monitor["spec"]["selector"]["matchLabels"].items():
        assert only(base, "DaemonSet")["spec"]["template"]["metadata"]["labels"][key] == value
