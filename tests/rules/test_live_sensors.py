"""Rules on sensors in a running daemon: a driver's readings become alerts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakenvml import FakeDriver, machine
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
    assert "had 2 uncorrected ECC errors since its driver was loaded" in summary
    lasting = {"persistence-mode-off", "thermal-throttling"}
    until(lambda: lasting <= {name for name, alert in alerts(daemon).items() if alert["phase"] == "pending"}, 120)
    device.ecc_uncorrected, device.remapped_failure, device.persistence, device.throttle = 0, 0, 1, 0
    driver.write()
    until(lambda: not {"ecc-uncorrected", "row-remap-failed", "persistence-mode-off"} & alerts(daemon).keys(), 120)
