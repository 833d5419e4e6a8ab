"""Daemon that is killed at random times while rules and an override change, flushes are requested and alerts fire."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpumond.store import verify_audit
from tests.alerting.listener import Listener
from tests.fakenvml import FakeDriver, machine
from tests.running import RunningDaemon, until

CONFIG = """
interval: 0.1
receivers: [{{name: hook, type: webhook, url: "{url}"}}]
rules:
  - {{name: full, scope: device, value: used_ratio, above: 50%}}
  - {{name: full-for-long, scope: device, value: used_ratio, above: 50%, for: 1h}}
"""


OVERRIDDEN = "allocation-retries"


@dataclass
class Figures:
    kills: int = 0
    acknowledged: int = 0
    serving_seconds: list[float] = field(default_factory=list)


class Killing:
    """``round`` starts the daemon, checks the state of the previous one, works, and kills it. Raises AssertionError."""

    def __init__(self, directory: Path, driver: FakeDriver, seed: int = 1) -> None:
        self.figures = Figures()
        self._random = random.Random(seed)
        self._directory, self._driver, self._hook = directory, driver, Listener()
        driver.devices = machine(1)
        driver.devices[0].used_bytes = int(driver.devices[0].total_bytes * 0.9)
        driver.write()
        (directory / "config.yaml").write_text(CONFIG.format(url=self._hook.url))
        self._rules: dict[str, float] = {}
        self._attempted: dict[str, float | None] = {}
        self._level = self._attempted_level = 0.0
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
        problems = verify_audit(self._directory / "daemon" / "state" / "gpumond.db")
        assert problems == []
        self._hook.close()

    def _check(self, daemon: RunningDaemon) -> None:
        assert verify_audit(daemon.directory / "state" / "gpumond.db") == []
        kept = {entry["name"]: entry["rule"]["above"] for entry in daemon.get("rules") if entry["origin"] == "api"}
        for name, above in self._rules.items():
            assert kept.get(name) in (above, self._attempted.get(name)), f"{name} was acknowledged and is lost"
        self._rules, self._attempted = kept, {}
        overrides = next(entry["overrides"] for entry in daemon.get("rules") if entry["name"] == OVERRIDDEN)
        level = overrides["level"]["value"] if overrides else 0.0
        assert level in (self._level, self._attempted_level), "an override was acknowledged and is lost"
        self._level = level
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

    def _work(self, daemon: RunningDaemon) -> None:
        """Change rules and request flushes until the daemon no longer answers; record what was acknowledged."""
        token = (daemon.directory / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=10)

        def ask(method: str, path: str, body: dict[str, Any]) -> int:
            connection.request(method, path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 400 or answer.status in (404, 429), text
            return answer.status

        try:
            while True:
                self._number += 1
                name, above = f"rule-{self._number % 7}", 2.0**45 + self._number
                self._attempted[name] = above
                rule = {"name": name, "scope": "device", "value": "used_bytes", "above": above}
                assert ask("PUT", f"/api/v1/rules/{name}", rule) == 200
                self._rules[name] = above
                self._attempted_level = float(self._number)
                assert ask("PUT", f"/api/v1/rules/{OVERRIDDEN}/override", {"level": self._number}) == 200
                self._level = self._attempted_level
                self._changes += 2
                self.figures.acknowledged += 2
                if (
                    ask("POST", "/api/v1/flushes", {"target": {"pid": 1}}) == 404
                ):  # otherwise there were too many in a minute
                    self._flushes += 1
                    self.figures.acknowledged += 1
        except (OSError, http.client.HTTPException):
            pass  # it has been killed
        finally:
            connection.close()
