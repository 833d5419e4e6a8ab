"""Thirty daemons, Prometheus and Alertmanager with the shipped rules and routes: one cause gives one notification."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.fakenvml import GIB, Device, FakeDriver, Process
from tests.helpers.alert_listener import Listener
from tests.helpers.prometheus import Prometheus
from tests.helpers.running import RunningDaemon, until
from tests.integration.alertmanager import BINARY, Alertmanager

DEPLOY = Path(__file__).parents[2] / "deploy"
NAMES = [f"gpu-{number:02}" for number in range(1, 31)]
UNLOADED, KILLED, HUNG, FULL, ENGINE, DROPPED, PAUSED = NAMES[:7]
BEHIND_THE_SWITCH = NAMES[10:20]
DRIVER_NOT_LOADED = 9
RECEIVERS = """
  - name: slack
    webhook_configs: [{url: "URL/slack", send_resolved: true}]
  - name: pagerduty
    webhook_configs: [{url: "URL/pagerduty", send_resolved: true}]
  - name: mail
    webhook_configs: [{url: "URL/mail", send_resolved: true}]
"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.needs("prometheus"),
    pytest.mark.skipif(BINARY is None, reason="needs prometheus-alertmanager (apt)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the names of machines"),
]


class Machine(NamedTuple):
    driver: FakeDriver
    daemon: RunningDaemon


def healthy(uuid: str) -> Device:
    """Return a device without an error, which a process of this test uses."""
    return Device(uuid, used_bytes=2 * GIB, processes=[Process(os.getpid(), 2 * GIB, utilization=50)])


class Fleet:
    """``targets`` is the file of Prometheus' service discovery."""

    def __init__(self, directory: Path, library: Path, stack: ExitStack) -> None:
        self.listener, self.targets = Listener(), directory / "targets.json"
        stack.callback(self.listener.close)
        routes = (DEPLOY / "alertmanager/alertmanager.yaml").read_text()
        config = routes.partition("\nreceivers:")[0] + "\nreceivers:" + RECEIVERS.replace("URL", self.listener.url)
        config = "\n".join(line for line in config.splitlines() if "smtp" not in line)
        self.manager = Alertmanager(
            directory / "alertmanager", self.listener, config.replace("{", "{{").replace("}", "}}")
        )
        self.manager.start()
        stack.callback(self.manager.stop)
        settings = directory / "gpumond.yaml"
        settings.write_text(f"receivers: [{{name: am, type: alertmanager, url: '{self.manager.url}', resend: 5}}]\n")
        self.machines: dict[str, Machine] = {}
        for name in NAMES:
            place = directory / f"{name}-driver"
            place.mkdir()
            driver = FakeDriver(place, library, devices=[healthy(f"GPU-{name}-{number}") for number in range(8)])
            options = ["--source", "nvml", "--interval", "2s"]
            if name in (FULL, UNLOADED):  # these send their own alerts in addition
                options += ["--config", str(settings)]
            named = ("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh")
            daemon = RunningDaemon(directory / name, *options, environ=driver.env, around=named)
            stack.callback(daemon.stop)
            self.machines[name] = Machine(driver, daemon)
        self.discover(NAMES)
        shipped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["alerting"]
        alertmanagers = [{"static_configs": [{"targets": [self.manager.url.removeprefix("http://")]}]}]
        files = {"file_sd_configs": [{"files": [str(self.targets)], "refresh_interval": "1s"}], "scrape_interval": "5s"}
        self.prometheus = stack.enter_context(
            Prometheus(
                directory / "prometheus",
                {"gpumond": files},
                DEPLOY / "prometheus/gpumond.rules.yaml",
                "5s",
                {"alerting": {**shipped, "alertmanagers": alertmanagers}},
            )
        )

    def discover(self, names: list[str]) -> None:
        addresses = {name: self.machines[name].daemon.url.removeprefix("http://") for name in names}
        targets = [{"targets": [each], "labels": {"instance": f"{name}:9917"}} for name, each in addresses.items()]
        self.targets.write_text(json.dumps(targets))

    def notifications(self, rule: str, status: str = "firing") -> list[tuple[str, str]]:
        """Return receiver and machine (empty for several) of each notification of a rule."""
        found = [(request.line.split()[1].strip("/"), request.json) for request in self.listener.requests]
        return [
            (receiver, body["commonLabels"].get("machine", ""))
            for receiver, body in found
            if body["groupLabels"].get("rule") == rule and body["status"] == status
        ]

    def all(self) -> list[tuple[str, str, str]]:
        """Return rule, receiver and status of each notification."""
        return [
            (request.json["groupLabels"].get("rule", ""), request.line.split()[1].strip("/"), request.json["status"])
            for request in self.listener.requests
        ]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        running = Fleet(tmp_path_factory.mktemp("fleet"), nvml_library, stack)
        until(lambda: len(running.prometheus.instant("gpumond:up == 1")) == len(NAMES), 120)
        yield running


def use(machine: Machine, ratio: float) -> None:
    for device in machine.driver.devices:
        device.used_bytes = device.processes[0].used_bytes = int((device.total_bytes or 0) * ratio)
    machine.driver.write()


def test_each_cause_gives_one_notification(fleet: Fleet):
    use(fleet.machines[ENGINE], 0.90)  # as vLLM wants it: nothing is wrong
    use(fleet.machines[FULL], 0.99)
    fleet.machines[HUNG].driver.hang()
    fleet.machines[UNLOADED].driver.fail("*", code=DRIVER_NOT_LOADED)
    for name in (HUNG, UNLOADED):
        fleet.machines[name].driver.write()
    fleet.machines[KILLED].daemon.process.kill()
    fleet.discover([name for name in NAMES if name != DROPPED])
    once = {
        "device-nearly-full": [("slack", FULL)],
        "driver-unresponsive": [("pagerduty", HUNG), ("slack", HUNG)],
        "driver-down": [("pagerduty", UNLOADED), ("slack", UNLOADED)],
        "daemon-down": [("slack", KILLED)],
        "machines-missing": [("slack", "")],
    }
    until(lambda: all(fleet.notifications(rule) for rule in once), 900, 1)
    fleet.machines[PAUSED].daemon.process.send_signal(signal.SIGSTOP)  # scrapes are missed for 12 s
    until(lambda: fleet.prometheus.instant(f'up{{instance="{PAUSED}:9917"}} == 0'), 60, 1)
    fleet.machines[PAUSED].daemon.process.send_signal(signal.SIGCONT)
    for name in BEHIND_THE_SWITCH:
        fleet.machines[name].daemon.process.kill()
    until(lambda: fleet.notifications("many-daemons-down"), 900, 1)
    found: dict[str, list[Any]] = {rule: sorted(fleet.notifications(rule)) for rule in once}
    assert found == once
    assert sorted(fleet.notifications("many-daemons-down")) == [("pagerduty", ""), ("slack", "")]
    assert {rule for rule, _, _ in fleet.all()} == {*once, "many-daemons-down"}, "nothing about anything else"
    assert not [status for _, _, status in fleet.all() if status == "resolved"], "no cause has ended"

    use(fleet.machines[FULL], 0.1)
    fleet.machines[UNLOADED].driver.heal()
    fleet.machines[UNLOADED].driver.write()
    until(lambda: fleet.notifications("device-nearly-full", "resolved"), 900, 1)
    until(lambda: fleet.notifications("driver-down", "resolved"), 900, 1)
    assert fleet.notifications("device-nearly-full", "resolved") == [("slack", FULL)]
    assert sorted(fleet.notifications("driver-down", "resolved")) == once["driver-down"]
