"""The loop from a rule over two real Alertmanagers to a flush, without a manual step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.agent_daemon import environment, host, run_in_program
from tests.helpers.alert_listener import Listener
from tests.helpers.running import RunningDaemon, until
from tests.helpers.scoped_program import program
from tests.integration.alertmanager import BINARY, Alertmanager

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs prometheus-alertmanager (apt)")

CONFIG = """
interval: 0.2
flush_cooldown: 0.1
receivers:
  - {{name: am-0, type: alertmanager, url: "{0}", resend: 1}}
  - {{name: am-1, type: alertmanager, url: "{1}", resend: 1}}
rules:
  - {{name: waste, scope: device, value: reclaimable_ratio, above: 30%}}
"""
ROUTES = """
route: {{receiver: flush, group_by: [alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers:
  - name: flush
    webhook_configs:
      - url: "{daemon}/api/v1/hooks/alertmanager"
        http_config: {{authorization: {{credentials_file: "{token}"}}}}
      - url: "{listener}"
"""
FILL_CACHE = "allocators[0].free(allocators[0].malloc(400 * MIB))"

Serve = Callable[..., RunningDaemon]


def flushed(daemon: RunningDaemon) -> list[dict[str, Any]]:
    """Return the receipts of flushes that released memory."""
    receipts: list[dict[str, Any]] = daemon.get("receipts")
    return [receipt for receipt in receipts if receipt["released_bytes"] > 0]


def hook_entries(daemon: RunningDaemon) -> list[dict[str, Any]]:
    """Return the audit entries of alerts that have flushed."""
    return [entry for entry in daemon.get("audit") if entry["action"] == "hook.flush"]


def notified(listener: Listener) -> list[str]:
    groups = [request.json for request in listener.requests]
    return [group["status"] for group in groups if group["groupLabels"] == {"alertname": "waste"}]


@pytest.mark.timeout(180)
def test_alert_is_resolved_by_its_flush_and_two_notifications_have_one_effect(serve: Serve, tmp_path: Path):
    listeners = [Listener(), Listener()]
    managers = [Alertmanager(tmp_path / f"am-{number}", each) for number, each in enumerate(listeners)]
    config = tmp_path / "gpumond.yaml"
    config.write_text(CONFIG.format(*(manager.url for manager in managers)))
    environ = {"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")}
    try:
        daemon = serve("--source", "sim", "--config", os.fspath(config), environ=environ)
        for manager, listener in zip(managers, listeners, strict=True):
            routes = ROUTES.format(daemon=daemon.url, token=daemon.directory / "token", listener=listener.url)
            (manager.directory / "config.yaml").write_text(routes)
            manager.start()
        with host(program(tmp_path / "cards"), environment(daemon.socket)) as process:
            run_in_program(process, FILL_CACHE)
            until(lambda: all(notified(each) == ["firing", "resolved"] for each in listeners), 60)
            until(lambda: daemon.log.read_text().count("1 repeated") == 1, 30)
            (entry,) = hook_entries(daemon)
            assert entry["detail"]["pids"] == [process.pid]
            (receipt,) = flushed(daemon)
            assert (receipt["pid"], receipt["requested_by"]) == (process.pid, f"token@uid:{os.geteuid()}")
            assert not any(manager.alerts() for manager in managers)

            run_in_program(process, FILL_CACHE)
            until(lambda: len(flushed(daemon)) == 2, 60)
            until(lambda: not any(manager.alerts() for manager in managers), 60)
            first, second = hook_entries(daemon)
            assert first["detail"]["fingerprint"] == second["detail"]["fingerprint"]
            assert first["detail"]["starts_at"] < second["detail"]["starts_at"]
            assert len(flushed(daemon)) == 2
    finally:
        for manager in managers:
            manager.stop()
        for listener in listeners:
            listener.close()
