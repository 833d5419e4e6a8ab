"""Text that UTF-8 cannot encode is refused; such text stored by older versions breaks no endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.alerts import Notification, StoredAlert
from gpumond.facts.frame import Alert
from gpumond.facts.units import require_encodable
from gpumond.features.rules.registry import rule_table
from gpumond.store.store import Store
from tests.helpers.opened_store import with_store
from tests.helpers.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]
LONE_SURROGATE = "\ud800"
RULE: dict[str, Any] = {"name": "own", "scope": "device", "value": "used_ratio", "above": 0.0}
RULES = [
    RULE | {"name": LONE_SURROGATE},
    RULE | {"value": LONE_SURROGATE},
    RULE | {"labels": {"a": LONE_SURROGATE}},
    RULE | {"labels": {LONE_SURROGATE: "a"}},
    RULE | {"annotations": {"a": LONE_SURROGATE}},
    RULE | {"match": {"gpu": LONE_SURROGATE}},
    RULE | {"receivers": [LONE_SURROGATE]},
    RULE | {"action": {"flush": {}, "workloads": [LONE_SURROGATE]}},
    RULE | {"action": {"flush": {"steps": [LONE_SURROGATE]}}},
    RULE | {LONE_SURROGATE: 1},
    RULE | {"for": LONE_SURROGATE},
]
ROUTES = (
    "frame",
    "snapshot",
    "rules",
    "alerts",
    "alerts/history",
    "receipts",
    "audit",
    "status",
    "baselines",
    "ledger",
)


def post(daemon: RunningDaemon, path: str, body: object) -> tuple[int, Any]:
    token = (daemon.directory / "token").read_text().strip()
    status, answer, _ = daemon.request(path, body, Authorization=f"Bearer {token}")
    return status, json.loads(answer)


def ready(daemon: RunningDaemon) -> RunningDaemon:
    until(lambda: daemon.request("/api/v1/status")[0] == 200)
    return daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path_factory.mktemp("unencodable") / "daemon", "--source", "sim") as daemon:
        yield ready(daemon)


def test_routes_that_accept_text_refuse_lone_surrogates_and_store_nothing(daemon: RunningDaemon):
    before = daemon.get("rules"), daemon.get("audit")
    for rule in RULES:
        for path in ("/api/v1/rules", "/api/v1/rules/preview"):
            status, problem = post(daemon, path, rule)
            assert status == 422, (path, rule, problem)
    for path, body in (
        ("/api/v1/flushes", {"target": {"workload": LONE_SURROGATE}}),
        ("/api/v1/flushes", {"target": {"device": LONE_SURROGATE}}),
        ("/api/v1/flushes", {"target": {"all": True}, "steps": [LONE_SURROGATE]}),
        ("/api/v1/baselines/a/compare", {"for_seconds": 5, LONE_SURROGATE: 1}),
        ("/api/v1/agents/1/limit", {"limit_bytes": 1, "device": LONE_SURROGATE}),
        ("/api/v1/release", {"for_seconds": LONE_SURROGATE}),
    ):
        status, problem = post(daemon, path, body)
        assert status == 422, (path, body, problem)
    assert (daemon.get("rules"), daemon.get("audit")) == before
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize("text", ["a\nb", "a\x00", "\x1b[1m", "\x85"])
def test_label_has_no_control_characters(daemon: RunningDaemon, text: str):
    for part in ({"labels": {"a": text}}, {"match": {"gpu": text}}):
        status, problem = post(daemon, "/api/v1/rules", RULE | part)
        assert (status, "control character" in problem["detail"]) == (422, True), problem


def test_unreadable_rows_of_older_versions_are_skipped_with_a_fault(serve: Serve, tmp_path: Path):
    path = tmp_path / "daemon0" / "state" / "gpumond.db"
    alert = Alert(
        rule="pwn",
        phase="firing",
        labels=(("alertname", "pwn"), ("a", LONE_SURROGATE)),
        annotations=(),
        value=1.0,
        active_at=time.time(),
        fired_at=time.time(),
    )

    async def keep(store: Store) -> None:
        await rule_table(store).put("pwn", RULE | {"name": "pwn", "labels": {"a": LONE_SURROGATE}}, "token")
        await rule_table(store).put("good", RULE | {"name": "good"}, "token")
        await store.store_alerts([StoredAlert((), alert, 1.0)], [Notification("log", 1, "raised", alert)], [alert])

    with_store(path, keep)
    (tmp_path / "daemon0").chmod(0o755)
    daemon = ready(serve("--source", "sim"))
    assert (
        {"good"}
        <= {rule["name"] for rule in daemon.get("rules")} - {"pwn"}
        == {rule["name"] for rule in daemon.get("rules")}
    )
    for route in ROUTES:
        assert daemon.request(f"/api/v1/{route}")[0] == 200, route
    faults = {fault["kind"]: fault["detail"] for fault in daemon.get("status")["faults"] if fault["source"] == "store"}
    assert "row_unreadable" in faults
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize(
    "text",
    [
        'rules: [{name: a, scope: device, value: used_ratio, above: 1, labels: {a: "\\ud800"}}]',
        'source: "\\ud800"',
        '"\\ud800": 1',
    ],
)
def test_configuration_with_a_lone_surrogate_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "gpumond.yaml"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "gpumond", "check-config", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "UTF-8 can't encode" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_yaml_references_are_checked_once():
    value: list[Any] = ["a"]
    for _ in range(100):
        value = [value, value]
    require_encodable(value)
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        require_encodable([value, {"a": [LONE_SURROGATE]}])
