"""Daemon with a real Alertmanager and its receiver: outages, restarts and kills."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakenvml import FakeDriver, machine
from tests.helpers.alert_listener import Listener
from tests.helpers.running import RunningDaemon, until
from tests.integration.alertmanager import BINARY, Alertmanager

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs prometheus-alertmanager (apt)")

CONFIG = """
interval: 0.2
receivers:
  - {{name: am, type: alertmanager, url: "{url}", resend: 1}}
rules:
  - {{name: full, scope: device, value: used_ratio, above: 50%, labels: {{severity: page}}}}
"""


class AlertmanagerSetup:
    def __init__(self, directory: Path, driver: FakeDriver):
        self.receiver, self.driver, self.directory = Listener(), driver, directory
        self.manager = Alertmanager(directory / "alertmanager", self.receiver)
        self.config = directory / "config.yaml"
        self.config.write_text(CONFIG.format(url=self.manager.url))
        driver.devices = machine(1)
        self.daemon: RunningDaemon | None = None

    def use(self, ratio: float) -> None:
        self.driver.devices[0].used_bytes = int(self.driver.devices[0].total_bytes * ratio)
        self.driver.write()

    def start_daemon(self) -> RunningDaemon:
        options = ("--source", "nvml", "--config", str(self.config))
        self.daemon = RunningDaemon(self.directory / "daemon", *options, environ=self.driver.env)
        return self.daemon

    def fires(self) -> list[Any]:
        return [alert for alert in self.manager.alerts() or () if alert["labels"]["alertname"] == "full"]

    def notifications(self) -> list[str]:
        """Return the notifications about the rule that the Alertmanager's receiver got, in order."""
        groups = [request.json for request in self.receiver.requests]
        return [group["status"] for group in groups if group["groupLabels"] == {"alertname": "full"}]

    def close(self) -> None:
        if self.daemon and self.daemon.process.poll() is None:
            self.daemon.stop()
        self.manager.stop()
        self.receiver.close()


@pytest.fixture
def setup(tmp_path: Path, driver: FakeDriver) -> Iterator[AlertmanagerSetup]:
    setup = AlertmanagerSetup(tmp_path, driver)
    yield setup
    setup.close()


def test_alert_arrives_and_is_resolved(setup: AlertmanagerSetup):
    setup.manager.start()
    setup.use(0.9)
    daemon = setup.start_daemon()
    (alert,) = until(setup.fires)
    assert alert["labels"] == {
        "alertname": "full",
        "gpu": "0",
        "instance": socket.gethostname(),
        "machine": socket.gethostname(),
        "rule": "full",
        "severity": "page",
        "uuid": setup.driver.devices[0].uuid,
    }
    setup.use(0.1)
    until(lambda: not setup.fires())
    until(lambda: setup.notifications() == ["firing", "resolved"])
    assert daemon.value("gpumond_notifications_failed_total") is None
    assert (daemon.value("gpumond_notifications_total", receiver="am") or 0) >= 2


def test_killed_and_restarted_daemon_resolves_nothing(setup: AlertmanagerSetup):
    setup.manager.start()
    setup.use(0.9)
    daemon = setup.start_daemon()
    (before,) = until(setup.fires)
    until(lambda: setup.notifications() == ["firing"])
    daemon.process.kill()
    daemon.process.wait()
    daemon = setup.start_daemon()
    until(lambda: (daemon.value("gpumond_notifications_total", receiver="am") or 0) >= 3)
    (after,) = setup.fires()
    assert after["startsAt"] == before["startsAt"]
    assert setup.notifications() == ["firing"]
    setup.use(0.1)
    until(lambda: setup.notifications() == ["firing", "resolved"])


def test_alert_during_an_alertmanager_outage_arrives_afterwards(setup: AlertmanagerSetup):
    setup.use(0.9)
    daemon = setup.start_daemon()
    until(lambda: daemon.value("gpumond_notifications_failed_total", receiver="am", reason="connection"))
    setup.manager.start()
    until(setup.fires)
    until(lambda: setup.notifications() == ["firing"])


def test_alertmanager_without_its_state_is_notified_again(setup: AlertmanagerSetup):
    setup.manager.start()
    setup.use(0.9)
    setup.start_daemon()
    until(setup.fires)
    setup.manager.lose_everything()
    setup.manager.start()
    until(setup.fires)


def test_alert_that_ends_during_an_alertmanager_outage_is_resolved_afterwards(setup: AlertmanagerSetup):
    setup.manager.start()
    setup.use(0.9)
    daemon = setup.start_daemon()
    until(setup.fires)
    until(lambda: setup.notifications() == ["firing"])
    setup.manager.stop()
    setup.use(0.1)
    until(lambda: daemon.value("gpumond_notifications_failed_total", receiver="am", reason="connection"))
    daemon.process.kill()
    daemon.process.wait()
    setup.start_daemon()
    setup.manager.start()
    until(lambda: setup.notifications() == ["firing", "resolved"])
    assert not setup.fires()
