"""Daemon that is killed at random times while rules, an override, a quota and silences change, memory is granted,
flushes are requested and alerts fire.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakenvml import FakeDriver, machine
from tests.helpers.alert_listener import Listener
from tests.helpers.running import RunningDaemon, until

CONFIG = """
interval: 0.1
receivers: [{{name: hook, type: webhook, url: "{url}"}}]
rules:
  - {{name: full, scope: device, value: used_ratio, above: 50%}}
  - {{name: full-for-long, scope: device, value: used_ratio, above: 50%, for: 1h}}
"""


OVERRIDDEN = "allocation-retries"
QUOTA = "limited"


@dataclass
class DeviceStatistics:
    kills: int = 0
    acknowledged: int = 0
    serving_seconds: list[float] = field(default_factory=list)


class Killing:
    """``round`` starts the daemon, checks the state of the previous one, works, and kills it. Raises AssertionError."""

    def __init__(self, directory: Path, driver: FakeDriver, seed: int = 1) -> None:
        self.figures = DeviceStatistics()
        self._random = random.Random(seed)
        self._directory, self._driver, self._hook = directory, driver, Listener()
        driver.devices = machine(1)
        driver.devices[0].used_bytes = int(driver.devices[0].total_bytes * 0.9)
        driver.write()
        (directory / "config.yaml").write_text(CONFIG.format(url=self._hook.url))
        self._rules: dict[str, float] = {}
        self._attempted: dict[str, float | None] = {}
        self._level = self._attempted_level = 0.0
        self._soft = self._attempted_soft = 0
        self._silences: list[str] = []
        self._ending = self._ended = self._grant = ""
        self._flushes = 0
        self._number = 0
        self._changes = 0
        self._times: dict[str, Any] = {}

    def round(self) -> None:
        began = time.monotonic()
        options = ("--source", "nvml", "--config", str(self._directory / "config.yaml"))
        daemon = RunningDaemon(self._directory / "daemon", *options, environ=self._driver.env)
        self.figures.serving_seconds.append(time.monotonic() - began)
        until(lambda: daemon.value("gpumond_driver_up"))
        self._check(daemon)
        worker = threading.Thread(target=self._work, args=(daemon,))
        worker.start()
        time.sleep(self._random.uniform(0.0 if self.figures.kills else 0.5, 0.6))  # alerts begin in the first round
        daemon.process.kill()
        daemon.process.wait()
        worker.join()
        self.figures.kills += 1

    def end(self) -> None:
        self._hook.close()

    def _check(self, daemon: RunningDaemon) -> None:
        kept = {entry["name"]: entry["rule"]["above"] for entry in daemon.get("rules") if entry["origin"] == "api"}
        for name, above in self._rules.items():
            assert kept.get(name) in (above, self._attempted.get(name)), f"{name} was acknowledged and is lost"
        self._rules, self._attempted = kept, {}
        overrides = next(entry["overrides"] for entry in daemon.get("rules") if entry["name"] == OVERRIDDEN)
        threshold = overrides["threshold"]["value"] if overrides else 0.0
        assert threshold in (self._level, self._attempted_level), "an override was acknowledged and is lost"
        self._level = threshold
        self._check_quota_and_silences(daemon)
        self._check_grant(daemon)
        entries = daemon.get("audit?limit=100000")
        assert sum(entry["action"].startswith("rule.") for entry in entries) >= self._changes
        assert sum(entry["action"] == "flush.request" for entry in entries) >= self._flushes
        own = ("full", "full-for-long")
        alerts = until(lambda: [alert for alert in daemon.get("alerts") if alert["rule"] in own])
        times = {a["rule"]: (a["phase"], a["active_at"], a["fired_at"]) for a in alerts}
        assert times == (self._times or times), "an alert began again"
        self._times = times
        statuses = [alert["status"] for request in self._hook.requests for alert in request.json["alerts"]]
        assert "resolved" not in statuses, "a firing alert was resolved"

    def _check_quota_and_silences(self, daemon: RunningDaemon) -> None:
        soft = sum(entry["quota"]["soft_limit"] for entry in daemon.get("quotas"))
        assert soft in (self._soft, self._attempted_soft), "a quota was acknowledged and is lost"
        self._soft = soft
        states = {entry["silence"]["id"]: entry["state"] for entry in daemon.get("silences")}
        for name in self._silences:
            assert states[name] == "active" or name == self._ending, "a silence was acknowledged and is lost"
        assert states.get(self._ended, "ended") == "ended", "the end of a silence was acknowledged and is lost"
        self._silences, self._ending = [name for name, state in states.items() if state == "active"], ""

    def _check_grant(self, daemon: RunningDaemon) -> None:
        if not self._grant:
            return
        token = (daemon.directory / "token").read_text().strip()
        for method, expected in (("PUT", 200), ("DELETE", 204)):
            path = f"/api/v1/admissions/{self._grant}"
            status, answer, _ = daemon.request(path, None, method, Authorization=f"Bearer {token}")
            assert status == expected, "granted memory was acknowledged and is lost"
            assert method == "DELETE" or json.loads(answer)["state"] == "granted"
        self._grant = ""

    def _work(self, daemon: RunningDaemon) -> None:
        """Change rules and request flushes until the daemon no longer answers; record what was acknowledged."""
        token = (daemon.directory / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=60)

        def send(method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 400 or answer.status in (404, 429), text
            return answer.status, json.loads(text or b"null")

        def ask(method: str, path: str, body: dict[str, Any] | None = None) -> int:
            return send(method, path, body)[0]

        try:
            while True:
                self._number += 1
                name, above = f"rule-{self._number % 7}", 2.0**45 + self._number
                self._attempted[name] = above
                rule = {"name": name, "scope": "device", "value": "used_bytes", "above": above}
                assert ask("PUT", f"/api/v1/rules/{name}", rule) == 200
                self._rules[name] = above
                self._attempted_level = float(self._number)
                assert ask("PUT", f"/api/v1/rules/{OVERRIDDEN}/override", {"threshold": self._number}) == 200
                self._level = self._attempted_level
                self._changes += 2
                self._attempted_soft = self._number
                quota = {"name": QUOTA, "match": {"workload": "none"}, "soft_limit": self._number}
                assert ask("PUT", f"/api/v1/quotas/{QUOTA}", quota) == 200
                self._soft = self._number
                self.figures.acknowledged += 3
                self._change_silences(send)
                if not self._grant:
                    self._grant = send("POST", "/api/v1/admissions", {"need_bytes": 1})[1]["id"]
                if (
                    ask("POST", "/api/v1/flushes", {"target": {"pid": 1}}) == 404
                ):  # otherwise there were too many in a minute
                    self._flushes += 1
                    self.figures.acknowledged += 1
        except (OSError, http.client.HTTPException):
            pass  # it has been killed
        finally:
            connection.close()

    def _change_silences(self, send: Callable[[str, str, dict[str, Any] | None], tuple[int, Any]]) -> None:
        """Create a silence, and end the oldest of several; a daemon accepts thirty changes a minute."""
        matcher = {"name": "rule", "operator": "=", "value": "none"}
        body = {"matchers": [matcher], "for_seconds": 3600, "reason": f"change {self._number}"}
        status, answer = send("POST", "/api/v1/silences", body)
        if status == 201:
            self._silences.append(answer["silence"]["id"])
            self.figures.acknowledged += 1
        if len(self._silences) > 1:
            self._ending = self._silences[0]
            if send("DELETE", f"/api/v1/silences/{self._ending}", None)[0] == 204:
                self._ended = self._silences.pop(0)
                self.figures.acknowledged += 1
