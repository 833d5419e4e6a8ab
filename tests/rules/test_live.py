"""Rules of a running daemon: made over HTTP, taken from its file again, still there after a restart."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumond.sim.device import Spec, create
from gpumond.testing import GIB
from tests.alerting.listener import Listener
from tests.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]
CARD = Spec("GPU-51300000-0000-4000-8000-000000000001", 0, "Simulated", 24 * GIB, GIB)
NOBODY = {"name": "nobody", "scope": "daemon", "value": "agents", "below": 1}


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Callable[..., RunningDaemon]:
    create(tmp_path / "cards" / "card0", CARD)
    (tmp_path / "gpumond.yaml").write_text("rules: []\n")

    def started(*options: str) -> RunningDaemon:
        environ = {"GPUMOND_SIM_DIR": str(tmp_path / "cards")}
        config = ("--config", str(tmp_path / "gpumond.yaml"), "--state-dir", str(tmp_path / "state"))
        daemon = serve("--source", "sim", "--interval", "0.2", *config, environ=environ)
        until(lambda: daemon.value("gpumond_driver_up"))
        return daemon

    return started


def send(daemon: RunningDaemon, route: str, body: object) -> tuple[int, Any]:
    token = (daemon.directory / "token").read_text().strip()
    status, answer, _ = daemon.request(route, body, Authorization=f"Bearer {token}")
    return status, answer.decode() if route == "/-/reload" else json.loads(answer)


def firing(daemon: RunningDaemon) -> set[str]:
    return {alert["rule"] for alert in daemon.get("alerts") if alert["phase"] == "firing"}


def test_a_rule_made_over_http_fires_is_kept_and_is_in_the_audit(start: Callable[..., RunningDaemon]):
    daemon = start()
    (past,) = send(daemon, "/api/v1/rules/preview", NOBODY)[1]["fired"]
    assert (past["rule"], past["phase"], past["resolved_at"]) == ("nobody", "firing", None)
    assert send(daemon, "/api/v1/rules", NOBODY)[0] == 201
    until(lambda: "nobody" in firing(daemon))
    state = str(daemon.directory.parent / "state")
    assert daemon.stop() == 0
    again = start()
    until(lambda: "nobody" in firing(again))
    assert "rule.create" in again.run("audit").stdout
    verified = again.run("audit", "verify", "--state-dir", state)
    assert (verified.returncode, "whole" in verified.stdout) == (0, True)


def test_alerts_that_are_over_are_known_after_a_crash(
    start: Callable[..., RunningDaemon],
):
    daemon = start()
    assert send(daemon, "/api/v1/rules", NOBODY)[0] == 201
    until(lambda: "nobody" in firing(daemon))
    token = {"Authorization": f"Bearer {(daemon.directory / 'token').read_text().strip()}"}
    request = urllib.request.Request(f"{daemon.url}/api/v1/rules/nobody", method="DELETE", headers=token)
    urllib.request.urlopen(request, timeout=10).close()
    (before,) = until(lambda: daemon.get("alerts/history"))
    assert send(daemon, "/api/v1/rules", NOBODY | {"name": "other", "below": 0})[0] == 201  # is written after it
    daemon.process.kill()
    daemon.process.wait()
    assert start().get("alerts/history") == [before]


def test_a_reload_takes_up_receivers_and_names_what_waits_for_a_restart(
    start: Callable[..., RunningDaemon], tmp_path: Path
):
    listener = Listener()
    daemon = start()
    receiver = f"{{name: hook, type: webhook, url: '{listener.url}'}}"
    (tmp_path / "gpumond.yaml").write_text(
        f"receivers: [{receiver}]\nrules: [{json.dumps(NOBODY)}]\nretention: 7d\ncompat: dcgm\nsocket_mode: '666'\n"
    )
    status, answer = send(daemon, "/-/reload", {})
    assert (status, answer.strip().partition("; needs a restart: ")[2]) == (200, "socket_mode")
    until(lambda: [alert["rule"] for request in listener.requests for alert in request.json["alerts"]] == ["nobody"])
    until(lambda: daemon.value("DCGM_FI_DEV_FB_FREE") is not None)
    listener.close()


@pytest.mark.parametrize("how", ["SIGHUP", "POST"])
def test_a_reload_takes_up_rules_and_a_wrong_file_changes_nothing(
    start: Callable[..., RunningDaemon], tmp_path: Path, how: str
):
    daemon = start()

    def reload(text: str) -> tuple[int, Any]:
        (tmp_path / "gpumond.yaml").write_text(text)
        if how == "POST":
            return send(daemon, "/-/reload", {})
        daemon.process.send_signal(signal.SIGHUP)
        return 0, ""

    reload(f"rules: [{json.dumps(NOBODY)}]\ninterval: 5s\n")
    until(lambda: "nobody" in firing(daemon))
    status, answer = reload("rules: [{name: nobody, scope: daemon}]\n")
    until(lambda: "the one before holds" in daemon.log.read_text())
    assert "nobody" in firing(daemon)
    if how == "POST":
        assert status == 422
        assert "rules[0].value" in json.loads(answer)["detail"]
    reload("disabled_rules: [device-lost]\n")
    until(lambda: "nobody" not in firing(daemon))
    past = daemon.get("alerts/history")[-1]
    assert (past["rule"], past["phase"]) == ("nobody", "resolved")
    assert past["active_at"] <= past["fired_at"] < past["resolved_at"]
    assert {"device-lost", "nobody"}.isdisjoint(entry["name"] for entry in daemon.get("rules"))
