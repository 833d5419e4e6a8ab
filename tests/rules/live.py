"""Alerts of a daemon, and changes of its rules."""

from __future__ import annotations

import json
import urllib.request

from tests.helpers.running import RunningDaemon


def firing(daemon: RunningDaemon) -> set[str]:
    return {alert["rule"] for alert in daemon.get("alerts") if alert["phase"] == "firing"}


def changed(daemon: RunningDaemon, method: str, route: str, body: object = None) -> int:
    """Return the status of a request with the daemon's token."""
    token = (daemon.directory / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{daemon.url}/api/v1/{route}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)
