"""Files in deploy/ are accepted by the programs that read them, and agree with the rules of the daemon."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.config.loading import load_settings
from gpumond.config.settings import SettingsConfig
from gpumond.facts.alerts import Rule
from gpumond.facts.units import parse_seconds
from gpumond.features.loadgen import command as load_command
from gpumond.features.rules.built_in import BUILT_IN, TEXTS, daemon_texts
from gpumond.features.rules.command import run_file
from gpumond.features.rules.settings import RuleConfig, rule_body
from gpumond.host.runtime_directory import SERVICE_RUNTIME_DIRECTORY
from gpumond.metrics.exposition import Exposition, ScrapeFormat
from gpumond.metrics.telemetry import Telemetry
from gpumond.serve.examples import SNAPSHOT
from tests.helpers.values import TickState, advance
from tools.docs import alerts
from tools.docs.alerts import alert_name
from tools.docs.rules import document

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FLEET_ONLY = {
    "configuration-not-loaded",
    "daemon-absent",
    "daemon-down",
    "machines-missing",
    "many-daemons-down",
    "readings-stale",
    "rules-missed",
}
PROGRAM_ALERT = "GpumondProgramAlert"
"""Alert with the rules of programs whose series are not scraped; its label `rule` is that of the daemon's alert."""
MISSED_SCRAPE_SECONDS = 180


def groups() -> list[dict[str, Any]]:
    content = yaml.safe_load((DEPLOY / "prometheus/gpumond.rules.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in groups() if "alert" in rule}


def accepted(*command: str) -> None:
    done = subprocess.run([*command[:-1], str(DEPLOY / command[-1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("promtool")
def test_promtool_accepts_the_rules_and_their_tests_pass():
    accepted("promtool", "check", "config", "prometheus/prometheus.yaml")
    accepted("promtool", "check", "rules", "prometheus/gpumond.rules.yaml")
    accepted("promtool", "test", "rules", "prometheus/gpumond.rules.test.yaml")
    accepted("promtool", "test", "rules", "prometheus/gpumond.sums.test.yaml")


@pytest.mark.needs("amtool")
def test_amtool_accepts_the_alertmanager():
    accepted("amtool", "check-config", "alertmanager/alertmanager.yaml")


def test_both_sets_have_the_same_names():
    assert ALERTS.keys() == {PROGRAM_ALERT, *map(alert_name, FLEET_ONLY), *(alert_name(rule.name) for rule in BUILT_IN)}


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_both_sets_have_the_same_thresholds(rule: Rule):
    other = ALERTS[alert_name(rule.name)]
    sign, threshold = (">", rule.above) if rule.above is not None else ("<", rule.below)
    thresholds = [float(number) for number in re.findall(rf" {sign} (\d+(?:\.\d+)?)", other["expr"])]
    assert threshold in thresholds
    assert parse_seconds(other.get("for", 0)) == rule.for_seconds
    windows = re.findall(r"max_over_time\(.*\[(\w+)(?::\w+)?\]\)", other["expr"]) if rule.scope != "device" else []
    kept = windows[0] if rule.keep_firing_for_seconds and windows else other.get("keep_firing_for", 0)
    assert parse_seconds(kept) == rule.keep_firing_for_seconds or parse_seconds(kept) == MISSED_SCRAPE_SECONDS
    assert other["labels"] == {**dict(rule.labels), "rule": rule.name}


@pytest.mark.parametrize("rule", [rule for rule in BUILT_IN if rule.scope != "daemon"], ids=lambda r: r.name)
def test_alerts_have_a_test_in_which_their_subject_ends(rule: Rule):
    name = alert_name(rule.name)
    assert ("keep_firing_for" in ALERTS[name]) == (rule.scope in ("device", "engine")), "a process that ends is gone"
    content = yaml.safe_load((DEPLOY / "prometheus/gpumond.rules.test.yaml").read_text())
    end = {"device": "device-removed", "engine": "engine-removed"}.get(rule.scope, "process-ends")
    (ends,) = [test for test in content["tests"] if test["name"] == end]
    checks = [
        (check["eval_time"], bool(check["exp_alerts"]))
        for check in ends["alert_rule_test"]
        if check["alertname"] == name
    ]
    kept = "keep_firing_for" in ALERTS[name]
    assert checks[-2:] == [("19m45s", True), ("23m15s" if kept else "20m", False)]


def test_alerts_with_a_window_require_their_subject():
    """A window has a value after its series ended. Alerts about the fleet or Prometheus as a whole have no subject."""
    windows = {
        name: rule["expr"]
        for name, rule in ALERTS.items()
        if name not in ("GpumondMachinesMissing", "GpumondRulesMissed")
        and re.search(r"\[\w+(:\w+)?\]|time\(\) - .* < ", rule["expr"])
    }
    assert windows
    assert [name for name, text in windows.items() if "and on (cluster, job, instance, " not in text] == []


def test_alerts_have_a_test_that_fires_them_and_one_that_does_not():
    content = yaml.safe_load((DEPLOY / "prometheus/gpumond.rules.test.yaml").read_text())
    checks = [check for test in content["tests"] for check in test["alert_rule_test"]]
    for fires in (True, False):
        assert {check["alertname"] for check in checks if bool(check["exp_alerts"]) == fires} == ALERTS.keys()


@pytest.mark.parametrize("file", alerts.FILES, ids=lambda file: file.name)
def test_alerts_have_the_daemons_texts(file: Path):
    text = file.read_text()
    assert alerts.with_texts(text) == text, "run `make docs`"


def test_a_daemons_text_refers_to_no_other_machine():
    assert [name for name in TEXTS if "on that machine" in " ".join(daemon_texts(name))] == []


def test_alerts_have_a_runbook():
    text = (ROOT / "docs/how-to/runbooks.md").read_text()
    sections = set(re.findall(r"^## (\S+)$", text, re.MULTILINE))
    for name, rule in ALERTS.items():
        daemon, _, section = rule["annotations"]["runbook_url"].partition("/docs/runbooks/")
        assert daemon in ("http://{{ $labels.instance }}", "http://localhost:9917")
        if name == PROGRAM_ALERT:
            assert section == "{{ $labels.rule }}"
        else:
            assert alert_name(section) == name
            assert section in sections


def test_alerts_on_programs_are_those_that_read_series_of_programs():
    (names,) = re.findall(r'rule=~"(.+?)"', ALERTS[PROGRAM_ALERT]["expr"])
    of_programs = {rule.name for rule in BUILT_IN if rule.scope in ("process", "pool", "program")}
    assert set(names.split("|")) == of_programs


def test_documentation_of_rules_is_current():
    assert (ROOT / "docs/reference/rules.md").read_text() == document(), "run `make docs`"


def test_rules_use_existing_metrics():
    page = (
        Exposition(Telemetry())
        .scrape(advance(TickState(), BUILT_IN, SNAPSHOT).frame, ScrapeFormat(False))
        .body.decode()
    )
    exported = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    recorded = {rule["record"] for rule in groups() if "record" in rule}
    name = re.compile(r"[a-z_]+:gpumond_[a-z0-9_:]+|gpumond[:_][a-z_:]+\b")
    used = {found for rule in groups() for found in name.findall(rule["expr"])}
    assert used <= exported | recorded


def test_sums_are_tested_and_described():
    """Each series that the groups gpumond-sums and gpumond-owners record."""
    content = yaml.safe_load((DEPLOY / "prometheus/gpumond.rules.yaml").read_text())
    sums = [group for group in content["groups"] if group["name"] in ("gpumond-sums", "gpumond-owners")]
    recorded = [rule["record"] for group in sums for rule in group["rules"]]
    test, *_ = yaml.safe_load((DEPLOY / "prometheus/gpumond.sums.test.yaml").read_text())["tests"]
    page = document_text("reference/recorded-series.md")
    assert [name for name in recorded if name not in {check["expr"] for check in test["promql_expr_test"]}] == []
    assert re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) == recorded
    assert [group["interval"] for group in sums] == ["1m", "1m"]


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_built_in_rules_can_be_written_in_a_configuration(rule: Rule):
    assert RuleConfig.model_validate(rule_body(rule)).rule() == rule


def test_example_configuration_is_valid_and_its_tests_pass():
    settings = load_settings(DEPLOY / "gpumond.example.yaml", environ={})
    assert [rule.name for rule in settings.rules if rule.action] == ["notebooks-cache"]
    count, failures = run_file(DEPLOY / "gpumond.example.test.yaml")
    assert (count > 0, failures) == (True, [])


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("Dockerfile", r"useradd --uid (\d+) "),
        ("Dockerfile", r"USER (\d+):\1$"),
        ("deploy/container.tmpfiles", r"^d /run/gpumond 0755 (\d+) \1 -$"),
        ("deploy/sidecar/compose.yaml", r"uid=(\d+),gid=\1,mode=0755"),
        ("deploy/sidecar/pod.yaml", r"chown ([1-9]\d*):\1 \."),
        ("deploy/sidecar/pod.yaml", r"runAsUser: ([1-9]\d*)\n +runAsGroup: \1$"),
        ("deploy/helm/gpumond/values.yaml", r"^runAsUser: (\d+)$"),
        ("deploy/kubernetes/daemonset.yaml", r'chown, -R, "(\d+):\1"'),
        (
            "deploy/kubernetes/daemonset.yaml",
            r"runAsUser: ([1-9]\d*)\n +runAsGroup: \1$",
        ),
    ],
)
def test_containers_have_one_user(file: str, where: str):
    """Containers have the user to whom the image and the machine give their directories."""
    assert re.findall(where, (ROOT / file).read_text(), re.MULTILINE) == ["10001"]


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/sidecar/compose.yaml"])
def test_compose_daemons_are_not_root(file: str):
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    ours = [service for service in services.values() if service["image"].startswith("gpumond:")]
    assert ours
    for service in ours:
        assert "user" not in service
        assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)


def manifest(path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / path).read_text())
    return content


def mounted(volume: str | dict[str, Any]) -> tuple[str, bool]:
    """Return the target of a volume of a compose file, and whether it is read-only."""
    if isinstance(volume, dict):
        return volume["target"], bool(volume.get("read_only"))
    _, place, *options = volume.split(":")
    return place, options == ["ro"]


def test_programs_get_the_agents_directory_read_only_and_nothing_else_of_the_daemons():
    train = manifest("sidecar/compose.yaml")["services"]["train"]
    (program,) = manifest("kubernetes/example/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    mounts = [(entry["mountPath"], entry.get("readOnly", False)) for entry in program["volumeMounts"]]
    (in_pod,) = manifest("sidecar/pod.yaml")["spec"]["containers"]
    assert in_pod["volumeMounts"] == [{"name": "gpumond-socket", "mountPath": "/run/gpumond", "readOnly": True}]
    documented = re.findall(r"-v (/run/gpumond):/run/gpumond(:ro)? ", document_text("how-to/install-container.md"))
    assert [mounted(volume) for volume in train["volumes"]] == [("/run/gpumond", True)]
    assert [(place, only) for place, only in mounts if place.startswith(("/run", "/tmp", "/var"))] == [
        ("/run/gpumond", True)
    ]
    assert documented == [("/run/gpumond", ""), ("/run/gpumond", ":ro")], "of the daemon, and of programs"


def test_pod_with_a_sidecar_shares_no_pid_namespace():
    pod = manifest("sidecar/pod.yaml")["spec"]
    assert not {"hostPID", "shareProcessNamespace"} & pod.keys()
    _, daemon = pod["initContainers"]
    assert (daemon["name"], daemon["restartPolicy"]) == ("gpumond", "Always")
    assert "hostPath" not in str(pod["volumes"])


def test_private_files_of_the_daemon_are_in_no_shared_directory():
    (image,) = re.findall(r"GPUMOND_RUNTIME_DIR=(\S+) \\$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert Path(image).parts[:2] == ("/", "tmp")
    for file in (ROOT / "docker-compose.yml", DEPLOY / "sidecar/compose.yaml"):
        for service in yaml.safe_load(file.read_text())["services"].values():
            if service["image"].startswith("gpumond:"):
                assert service["tmpfs"] == ["/tmp"]
                assert "GPUMOND_RUNTIME_DIR" not in service.get("environment", {})
    pod = manifest("kubernetes/daemonset.yaml")["spec"]["template"]["spec"]
    (daemon,), (giver,) = pod["containers"], pod["initContainers"]
    variables = {entry["name"]: entry.get("value") for entry in daemon["env"]}
    assert (variables["GPUMOND_RUNTIME_DIR"], variables["GPUMOND_URL"]) == (image, f"unix://{image}/api.sock")
    (volume,) = [entry["name"] for entry in daemon["volumeMounts"] if entry["mountPath"] == "/tmp"]
    assert volume not in {entry["name"] for entry in giver["volumeMounts"]}
    (kind,) = [entry for entry in pod["volumes"] if entry["name"] == volume]
    assert kind["emptyDir"]["medium"] == "Memory"


def test_service_directory_is_one_that_the_command_line_searches():
    service = (DEPLOY / "systemd/gpumond.service").read_text()
    assert f" GPUMOND_RUNTIME_DIR={SERVICE_RUNTIME_DIRECTORY} " in service
    assert f"\nRuntimeDirectory={SERVICE_RUNTIME_DIRECTORY.removeprefix('/run/')}\n" in service
    assert SERVICE_RUNTIME_DIRECTORY not in (DEPLOY / "systemd/gpumond.tmpfiles").read_text()


def test_periodic_tests_pass_options_that_the_load_generator_accepts():
    unit = (DEPLOY / "systemd/gpumond-stress@.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+/gpumond (.*)$", unit, re.MULTILINE)
    job, claim = yaml.safe_load_all((DEPLOY / "kubernetes/stress/cronjob.yaml").read_text())
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    parser = argparse.ArgumentParser()
    load_command.add_arguments(parser)
    for words in (command.replace("%%", "%").replace("%i", "0").split(), container["args"]):
        assert words[0] == "loadgen"
        given = parser.parse_args(words[1:])
        assert (given.scenario, given.backend, given.duration, given.fill) == ("stress", "cupy", 600.0, 0.8)
    assert "StateDirectory=gpumond-stress\n" in unit
    assert " --report /var/lib/gpumond-stress/device-%i.jsonl" in unit
    assert Path(container["args"][-1]).parent.as_posix() in [each["mountPath"] for each in container["volumeMounts"]]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def document_text(path: str) -> str:
    return (ROOT / "docs" / path).read_text()


def section(text: str, title: str) -> str:
    """Return the section below a heading of level 2, up to the next one."""
    _, found, after = text.partition(f"\n## {title}\n")
    assert found, title
    return after.partition("\n## ")[0]


@pytest.mark.parametrize("name", [*(rule.name for rule in BUILT_IN), *sorted(FLEET_ONLY)])
def test_runbook_has_symptom_cause_and_remedy(name: str):
    text = section(document_text("how-to/runbooks.md"), name)
    assert [word for word in ("**Symptom:**", "**Cause:**", "**Remedy:**") if word not in text] == []


def test_settings_are_described():
    text = document_text("reference/configuration.md") + document_text("how-to/access.md")
    assert [name for name in SettingsConfig.model_fields if f"{name}:" not in text and f"`{name}`" not in text] == []
