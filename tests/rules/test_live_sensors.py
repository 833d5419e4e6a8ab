"""Rules on sensors in a running daemon: a driver's readings become alerts."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumond.sim.device import DeviceSpec, create
from tests.fakenvml import FakeDriver, machine
from tests.helpers.agents import GIB
from tests.helpers.alert_listener import Listener
from tests.helpers.running import RunningDaemon, until
from tests.rules.live import changed, firing

HOT = {
    "name": "hot",
    "scope": "device",
    "value": "gpu_temperature_celsius",
    "above": 85,
    "annotations": {"summary": "{value}, limit {threshold}"},
}


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], driver: FakeDriver) -> RunningDaemon:
    driver.devices = machine(1)
    device = driver.devices[0]
    device.ecc_uncorrected, device.remapped_failure, device.persistence, device.throttle = 0, 0, 1, 0
    driver.write()
    started: RunningDaemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    until(lambda: started.request("/-/ready")[0] == 200)
    return started


def alerts(daemon: RunningDaemon) -> dict[str, dict[str, Any]]:
    return {alert["rule"]: alert for alert in daemon.get("alerts")}


def test_temperature_is_a_value_of_rules(daemon: RunningDaemon, driver: FakeDriver):
    assert changed(daemon, "POST", "rules", HOT) == 201
    driver.devices[0].temperature = 90
    driver.write()
    until(lambda: "hot" in firing(daemon))
    assert dict(alerts(daemon)["hot"]["annotations"]) == {"summary": "90 °C, limit 85 °C"}
    driver.devices[0].temperature = None
    driver.write()
    until(lambda: daemon.value("gpumond_device_temperature_celsius", sensor="gpu") is None)
    assert "hot" in firing(daemon)
    driver.devices[0].temperature = 60
    driver.write()
    until(lambda: "hot" not in firing(daemon))


def test_faults_of_the_hardware_fire_built_in_rules(daemon: RunningDaemon, driver: FakeDriver):
    device = driver.devices[0]
    device.ecc_uncorrected, device.remapped_failure, device.persistence, device.throttle = 2, 1, 0, 0x40
    driver.write()
    until(lambda: {"ecc-uncorrected", "row-remap-failed"} <= firing(daemon), 120)
    summary = dict(alerts(daemon)["ecc-uncorrected"]["annotations"])["summary"]
    assert "has had uncorrected ECC errors (2 since the driver was loaded)" in summary
    lasting = {"persistence-mode-off", "thermal-throttling"}
    until(lambda: lasting <= {name for name, alert in alerts(daemon).items() if alert["phase"] == "pending"}, 120)
    device.ecc_uncorrected, device.remapped_failure, device.persistence, device.throttle = 0, 0, 1, 0
    driver.write()
    until(lambda: not {"ecc-uncorrected", "row-remap-failed", "persistence-mode-off"} & alerts(daemon).keys(), 120)


Serve = Callable[..., RunningDaemon]
CARD = DeviceSpec("GPU-51300000-0000-4000-8000-000000000001", 0, "Simulated", 24 * GIB, GIB)
NO_AGENTS = {"name": "no-agents", "scope": "daemon", "value": "agents", "below": 1}


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Callable[..., RunningDaemon]:
    create(tmp_path / "cards" / "card0", CARD)
    (tmp_path / "gpumond.yaml").write_text("rules: []\n")

    def started(*options: str) -> RunningDaemon:
        environ = {"GPUMOND_SIM_DIR": str(tmp_path / "cards")}
        config = ("--config", str(tmp_path / "gpumond.yaml"), "--state-dir", str(tmp_path / "state"))
        daemon = serve("--source", "sim", "--interval", "0.2s", *config, environ=environ)
        until(lambda: daemon.value("gpumond_driver_up"))
        return daemon

    return started


def request_json(daemon: RunningDaemon, route: str, body: object) -> tuple[int, Any]:
    token = (daemon.directory / "token").read_text().strip()
    status, answer, _ = daemon.request(route, body, Authorization=f"Bearer {token}")
    return status, answer.decode() if route == "/-/reload" else json.loads(answer)


def test_rule_created_over_http_fires_is_stored_and_audited(start: Callable[..., RunningDaemon]):
    """Its alert is in the past alerts after a crash."""
    daemon = start()
    (past,) = request_json(daemon, "/api/v1/rules/preview", NO_AGENTS)[1]["fired"]
    assert (past["rule"], past["phase"], past["resolved_at"]) == ("no-agents", "firing", None)
    assert request_json(daemon, "/api/v1/rules", NO_AGENTS)[0] == 201
    until(lambda: "no-agents" in firing(daemon))
    state = str(daemon.directory.parent / "state")
    assert daemon.stop() == 0
    again = start()
    until(lambda: "no-agents" in firing(again))
    assert "created rule no-agents" in again.run("audit").stdout
    verified = again.run("audit", "verify", "--state-dir", state, "--log", str(daemon.log))
    assert (verified.returncode, "unchanged" in verified.stdout) == (0, True)
    assert changed(again, "DELETE", "rules/no-agents") == 204
    (before,) = until(lambda: again.get("alerts/history"))
    assert request_json(again, "/api/v1/rules", NO_AGENTS | {"name": "other", "below": 0})[0] == 201
    again.process.kill()
    again.process.wait()
    assert start().get("alerts/history") == [before]


def overrides(daemon: RunningDaemon, name: str) -> dict[str, tuple[str, object]]:
    entry = daemon.get(f"rules/{name}")
    return {field: (each["origin"], each["value"]) for field, each in entry["overrides"].items()}


def test_override_is_in_effect_and_survives_a_kill(start: Callable[..., RunningDaemon]):
    """The device is empty: its use is above 0 only with the override, which lowers the threshold below 0."""
    daemon = start()
    route = "rules/device-nearly-full/override"
    assert changed(daemon, "PUT", route, {"threshold": -1, "for": 0, "severity": "critical"}) == 200
    until(lambda: "device-nearly-full" in firing(daemon))
    (alert,) = [each for each in daemon.get("alerts") if each["rule"] == "device-nearly-full"]
    assert dict(alert["labels"])["severity"] == "critical"
    daemon.process.kill()
    daemon.process.wait()
    again = start()
    assert overrides(again, "device-nearly-full") == {
        "threshold": ("api", -1),
        "for": ("api", 0),
        "severity": ("api", "critical"),
    }
    until(lambda: "device-nearly-full" in firing(again))
    assert changed(again, "DELETE", route) == 204
    until(lambda: "device-nearly-full" not in firing(again))
    again.process.kill()
    again.process.wait()
    assert overrides(start(), "device-nearly-full") == {}


def test_overrides_of_the_file_are_reloaded(start: Callable[..., RunningDaemon], tmp_path: Path):
    daemon = start()
    file = tmp_path / "gpumond.yaml"
    file.write_text("rule_overrides: {device-nearly-full: {threshold: -1, for: 0}, leak: {enabled: false}}\n")
    assert request_json(daemon, "/-/reload", {})[0] == 200
    until(lambda: "device-nearly-full" in firing(daemon))
    assert overrides(daemon, "device-nearly-full") == {"threshold": ("file", -1), "for": ("file", 0)}
    assert daemon.get("rules/leak")["enabled"] is False
    file.write_text("rule_overrides: {leak: {nothing: 1}}\n")
    assert request_json(daemon, "/-/reload", {})[0] == 422
    assert overrides(daemon, "leak") == {"enabled": ("file", False)}
    file.write_text("{}\n")
    assert request_json(daemon, "/-/reload", {})[0] == 200
    until(lambda: "device-nearly-full" not in firing(daemon))
    assert (overrides(daemon, "leak"), daemon.get("rules/leak")["enabled"]) == ({}, True)


def test_command_line_overrides_and_restores_a_rule(start: Callable[..., RunningDaemon]):
    daemon = start()
    made = daemon.run("rules", "override", "device-nearly-full", "--threshold", "90%", "--for", "5m")
    assert (made.returncode, made.stderr) == (0, "")
    cells = [cell.strip() for cell in made.stdout.splitlines()[1].split("  ") if cell.strip()]
    assert cells == [
        "device-nearly-full",
        "built-in",
        "warning",
        "device unreclaimable_ratio above 90% for 5 min; "
        "overridden: threshold 90% (api; default 97%), for 5 min (api; default 1 min)",
    ]
    assert daemon.run("rules", "override", "leak", "--disable").returncode == 0
    lines = {line.split()[0]: line for line in daemon.run("rules", "list").stdout.splitlines()}
    assert "enabled false (api; default true)" in lines["leak"]
    assert " disabled; " in lines["leak"]
    entries = {entry["name"]: entry for entry in json.loads(daemon.run("rules", "list", "--json").stdout)}
    assert (entries["leak"]["enabled"], entries["device-lost"]["overrides"]) == (False, {})
    restored = json.loads(daemon.run("rules", "restore", "leak", "--json").stdout)
    assert (restored["enabled"], restored["overrides"]) == (True, {})
    again = daemon.run("rules", "restore", "leak")
    assert (again.returncode, "leak isn't overridden through the API" in again.stderr) == (2, True)
    for options, text in (((), "pass at least one of"), (("--for", "soon"), "--for 'soon': expected a duration")):
        wrong = daemon.run("rules", "override", "leak", *options)
        assert (wrong.returncode, text in wrong.stderr) == (2, True)


def test_reload_applies_receivers_and_names_settings_that_need_a_restart(
    start: Callable[..., RunningDaemon], tmp_path: Path
):
    listener = Listener()
    daemon = start()
    receiver = f"{{name: hook, type: webhook, url: '{listener.url}'}}"
    (tmp_path / "gpumond.yaml").write_text(
        f"receivers: [{receiver}]\nrules: [{json.dumps(NO_AGENTS)}]\nretention: 7d\ncompat: dcgm\nsocket_mode: '666'\n"
    )
    status, answer = request_json(daemon, "/-/reload", {})
    assert (status, answer.strip().partition("; restart the daemon to apply ")[2]) == (200, "socket_mode")
    until(lambda: [alert["rule"] for request in listener.requests for alert in request.json["alerts"]] == ["no-agents"])
    until(lambda: daemon.value("DCGM_FI_DEV_FB_FREE_BYTES") is not None)
    listener.close()


@pytest.mark.parametrize("how", ["SIGHUP", "POST"])
def test_reload_applies_rules_and_an_invalid_file_changes_nothing(
    start: Callable[..., RunningDaemon], tmp_path: Path, how: str
):
    daemon = start()

    def reload(text: str) -> tuple[int, Any]:
        (tmp_path / "gpumond.yaml").write_text(text)
        if how == "POST":
            return request_json(daemon, "/-/reload", {})
        daemon.process.send_signal(signal.SIGHUP)
        return 0, ""

    reload(f"rules: [{json.dumps(NO_AGENTS)}]\ninterval: 5s\n")
    until(lambda: "no-agents" in firing(daemon))
    status, answer = reload("rules: [{name: no-agents, scope: daemon}]\n")
    until(lambda: "the previous one stays" in daemon.log.read_text())
    assert "no-agents" in firing(daemon)
    if how == "POST":
        assert status == 422
        assert "rules[0].value" in json.loads(answer)["detail"]
    reload("disabled_rules: [device-lost]\n")
    until(lambda: "no-agents" not in firing(daemon))
    past = daemon.get("alerts/history")[-1]
    assert (past["rule"], past["phase"]) == ("no-agents", "resolved")
    assert past["active_at"] <= past["fired_at"] < past["resolved_at"]
    assert {"device-lost", "no-agents"}.isdisjoint(entry["name"] for entry in daemon.get("rules"))
