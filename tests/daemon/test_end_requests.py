"""A rule that asks idle programs to end, with a real daemon and a real program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.agent_daemon import environment, host, run_in_program
from tests.helpers.running import RunningDaemon, until
from tests.helpers.scoped_program import WORKLOAD, program

RULE = {
    "name": "unused",
    "scope": "process",
    "value": "used_bytes",
    "above": 0,
    "action": {"flush": {}, "request_end": True},
}

Serve = Callable[..., RunningDaemon]


def start(serve: Serve, directory: Path, **settings: Any) -> RunningDaemon:
    file = directory / "gpumond.yaml"
    file.write_text(yaml.safe_dump({"rules": [RULE], **settings}))
    environ = {"GPUMOND_SIM_DIR": os.fspath(directory / "cards")}
    return serve("--source", "sim", "--interval", "0.1s", "--config", os.fspath(file), environ=environ)


def note(daemon: RunningDaemon) -> str:
    """Wait for the annotation of the rule's alert."""

    def found() -> str:
        alerts = [alert for alert in daemon.get("alerts") if alert["rule"] == "unused"]
        return dict(alerts[0]["annotations"]).get("action", "") if alerts else ""

    until(lambda: daemon.request("/-/ready")[0] == 200)
    return until(found)


def test_program_ends_by_its_own_function_after_a_flush(serve: Serve, tmp_path: Path):
    code = program(tmp_path / "cards").replace(
        "agent.start(",
        "import os, signal\nagent.on_end_request(lambda: os.kill(os.getpid(), signal.SIGTERM))\nagent.start(",
    )
    daemon = start(serve, tmp_path, allow_end_requests=True)
    with host(code, environment(daemon.socket)) as process:
        assert process.wait(60) == -15
        entries = [entry for entry in daemon.get("audit") if entry["actor"] == "rule:unused"]
        actions = [entry["action"] for entry in entries]
        assert actions.index("flush.request") < actions.index("agent.end")
        assert entries[actions.index("agent.end")]["detail"]["pid"] == process.pid


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "wasn't asked to exit: the configuration doesn't allow it (allow_end_requests)"),
        (
            {"allow_end_requests": True},
            "wasn't asked to exit: {workload} (pid {pid}) has no function for requests to exit",
        ),
    ],
)
def test_program_is_not_asked_without_permission_or_function(
    serve: Serve, tmp_path: Path, settings: dict[str, Any], says: str
):
    daemon = start(serve, tmp_path, **settings)
    with host(program(tmp_path / "cards"), environment(daemon.socket)) as process:
        expected = says.format(workload=WORKLOAD, pid=process.pid)
        assert f"{WORKLOAD} (pid {process.pid}) {expected}" in note(daemon)
        run_in_program(process, "pass")
