"""Text that no answer can contain: a lone surrogate, wherever a request or a configuration file accepts text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.users import ADMINISTRATOR, VICTIM
from tests.isolation.machine import Machine

BAD = "\ud800"
RULE = {"name": "text", "scope": "device", "value": "used_ratio", "above": 0.0}
ACTION = {"flush": {}, "workloads": [BAD]}
ROUTES = ("rules", "frame", "alerts", "alerts/history", "audit", "snapshot", "receipts")
FIELDS: list[dict[str, Any]] = [
    {"labels": {"a": BAD}},
    {"annotations": {"summary": BAD}},
    {"match": {"workload": BAD}},
    {"action": ACTION},
]


def check_all_routes(machine: Machine) -> None:
    for route in ROUTES:
        assert machine.daemon.request(f"/api/v1/{route}")[0] == 200, route
    status, _, _ = machine.daemon.request("/api/v1/events", Accept="application/json")
    assert status == 200


@pytest.mark.parametrize("fields", FIELDS, ids=[next(iter(fields)) for fields in FIELDS])
@pytest.mark.parametrize("route", ["/api/v1/rules", "/api/v1/rules/preview"])
def test_rule_with_a_lone_surrogate_is_refused_and_not_stored(machine: Machine, fields: dict[str, Any], route: str):
    name = f"text-{next(iter(fields))}"
    status, answer = machine.ask(ADMINISTRATOR, "POST", route, RULE | {"name": name} | fields).answer()
    assert status == 422, answer
    assert machine.ask(ADMINISTRATOR, "GET", f"/api/v1/rules/{name}").answer()[0] == 404
    check_all_routes(machine)


@pytest.mark.parametrize("target", [{"workload": BAD}, {"device": BAD}])
def test_flush_with_a_lone_surrogate_is_refused_and_not_in_the_audit(machine: Machine, target: dict[str, str]):
    status, answer = machine.flush(VICTIM, target=target).answer()
    assert status == 422, answer
    check_all_routes(machine)


def test_configuration_file_with_a_lone_surrogate_is_refused(tmp_path: Path):
    config = tmp_path / "gpumond.yaml"
    config.write_text("rules:\n  - " + json.dumps(RULE | {"labels": {"a": BAD}}) + "\n")
    command = [sys.executable, "-m", "gpumond", "check-config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert r"\ud800" in done.stderr
