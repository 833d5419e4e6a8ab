"""Quotas of a real daemon in real programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.agent_daemon import environment, finished, host, run_in_program
from tests.helpers.running import RunningDaemon, until
from tests.helpers.scoped_program import WORKLOAD, program
from tests.helpers.simulated import UUID

MIB = 1 << 20
TEAM: dict[str, Any] = {"name": "team", "match": {"workload": "team/*"}, "limit": "300MiB"}

Serve = Callable[..., RunningDaemon]
Restart = Callable[[RunningDaemon], RunningDaemon]

pytestmark = pytest.mark.timeout(300)  # several starts of a daemon, which each take seconds on a busy machine


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Callable[..., RunningDaemon]:
    """Start a daemon with quotas in its configuration file. A second one uses the same state and socket."""

    def start(*quotas: Mapping[str, Any], **fields: Any) -> RunningDaemon:
        write(tmp_path, *quotas)
        environ = {"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")}
        options = ("--source", "sim", "--interval", "0.1s", "--config", os.fspath(tmp_path / "gpumond.yaml"))
        return serve(*options, environ=environ, **fields)

    return start


def write(directory: Path, *quotas: Mapping[str, Any]) -> None:
    (directory / "gpumond.yaml").write_text(yaml.safe_dump({"quotas": [dict(quota) for quota in quotas]}))


@contextmanager
def running(daemon: RunningDaemon, directory: Path, allow: bool = True) -> Iterator[subprocess.Popen[str]]:
    with host(program(directory / "cards", allow), environment(daemon.socket)) as process:
        yield process
        finished(process)


def change(daemon: RunningDaemon, method: str, path: str, body: object = None) -> int:
    token = (daemon.directory / "token").read_text().strip()
    return daemon.request(path, body, method, Authorization=f"Bearer {token}")[0]


def limit_of(daemon: RunningDaemon, process: subprocess.Popen[str]) -> float | None:
    return daemon.value("gpumond_process_limit_bytes", pid=str(process.pid), uuid=UUID)


def limits(daemon: RunningDaemon, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return the limits that the program reports, when it has reported."""

    def report() -> list[dict[str, Any]]:
        if daemon.request("/api/v1/agents")[0] != 200:
            return []
        return [report for report in daemon.get("agents") if report["pid"] == process.pid]

    found: list[dict[str, Any]] = until(report)[0]["limits"]
    return found


def has_limit(daemon: RunningDaemon, process: subprocess.Popen[str], mib: int | None) -> None:
    """Wait until report, metric and program have the limit."""
    size = None if mib is None else mib * MIB
    until(lambda: [size] == [limit["limit_bytes"] for limit in limits(daemon, process) or [{"limit_bytes": None}]])
    assert limit_of(daemon, process) == size
    run_in_program(process, f"assert allocator.limit_bytes == {size}, allocator.limit_bytes")


@pytest.fixture
def restarted() -> Iterator[Restart]:
    """Kill a daemon, and start it again with the same directory; stop the last one after the test."""
    with ExitStack() as running:

        def restart(daemon: RunningDaemon) -> RunningDaemon:
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
            file = daemon.directory.parent / "gpumond.yaml"
            options = ("--source", "sim", "--interval", "0.1s", "--config", os.fspath(file))
            environ = {"GPUMOND_SIM_DIR": daemon.environ["GPUMOND_SIM_DIR"]}
            return running.enter_context(RunningDaemon(daemon.directory, *options, environ=environ))

        yield restart


def test_limit_is_set_changed_and_removed_while_programs_run(start: Serve, tmp_path: Path):
    daemon = start(TEAM)
    with running(daemon, tmp_path) as process:
        has_limit(daemon, process, 300)
        (holding,) = until(lambda: daemon.get("processes"))
        assert (holding["limit_bytes"], holding["quota"]["limit_quota"]) == (300 * MIB, "team")
        write(tmp_path, TEAM | {"limit": "200MiB"})
        assert change(daemon, "POST", "/-/reload", {}) == 200
        has_limit(daemon, process, 200)
        other = {"name": "small", "match": {"user": str(os.getuid())}, "limit": "100MiB"}
        assert change(daemon, "PUT", "/api/v1/quotas/small", other) == 200
        has_limit(daemon, process, 100)
        assert change(daemon, "DELETE", "/api/v1/quotas/small") == 204
        has_limit(daemon, process, 200)
        write(tmp_path)
        assert change(daemon, "POST", "/-/reload", {}) == 200
        has_limit(daemon, process, None)
        entries = [(entry["actor"], entry["action"]) for entry in daemon.get("audit")]
        for expected in (
            (f"token@uid:{os.geteuid()}", "quota.create"),
            (f"token@uid:{os.geteuid()}", "quota.delete"),
            ("quota:team", "agent.limit"),
            ("quota:small", "agent.limit.answer"),
            ("quota", "agent.limit"),
        ):
            assert expected in entries


def test_limit_is_set_again_in_a_program_that_was_killed(start: Serve, tmp_path: Path):
    daemon = start(TEAM)
    for _ in range(2):
        with host(program(tmp_path / "cards", True), environment(daemon.socket)) as process:
            has_limit(daemon, process, 300)
        shutil.rmtree(tmp_path / "cards")


def test_quota_of_the_api_is_kept_over_a_kill_of_the_daemon(start: Serve, restarted: Restart, tmp_path: Path):
    daemon = start()
    assert change(daemon, "PUT", "/api/v1/quotas/team", TEAM) == 200
    daemon = restarted(daemon)
    assert [quota["origin"] for quota in daemon.get("quotas")] == ["api"]
    with running(daemon, tmp_path) as process:
        has_limit(daemon, process, 300)


def test_limit_of_a_quota_that_was_removed_while_the_daemon_was_stopped_is_removed(
    start: Serve, restarted: Restart, tmp_path: Path
):
    daemon = start(TEAM, TEAM | {"name": "small", "limit": "200MiB"})
    with running(daemon, tmp_path) as process:
        has_limit(daemon, process, 200)
        write(tmp_path, TEAM)
        daemon = restarted(daemon)
        has_limit(daemon, process, 300)
        write(tmp_path)
        daemon = restarted(daemon)
        has_limit(daemon, process, None)


def test_lower_limit_of_the_program_remains_and_a_higher_one_does_not(start: Serve, tmp_path: Path):
    daemon = start(TEAM)
    with running(daemon, tmp_path) as process:
        has_limit(daemon, process, 300)
        run_in_program(process, "assert agent.limit(200 * MIB)[0].applied")
        has_limit(daemon, process, 200)
        seq = daemon.get("status")["snapshot_seq"]
        until(lambda: daemon.get("status")["snapshot_seq"] > seq + 3)
        has_limit(daemon, process, 200)
        run_in_program(process, "assert agent.limit(400 * MIB)[0].applied")
        has_limit(daemon, process, 300)


def test_program_that_does_not_allow_limits_has_only_the_alert(start: Serve, tmp_path: Path):
    daemon = start(TEAM | {"limit": "600MiB", "soft_limit": "400MiB"})
    with running(daemon, tmp_path, allow=False) as process:
        own = {"pid": str(process.pid), "uuid": UUID}
        until(lambda: daemon.value("gpumond_process_soft_limit_bytes", **own) == 400 * MIB)
        assert [alert for alert in daemon.get("alerts") if alert["rule"] == "quota-exceeded"] == []
        run_in_program(process, "more = allocator.malloc(200 * MIB)")
        alerts = until(lambda: [alert for alert in daemon.get("alerts") if alert["rule"] == "quota-exceeded"])
        text = dict(alerts[0]["annotations"])["summary"]
        for part in (f"{WORKLOAD} (pid {process.pid})", "400.0 MiB", "team quota", "uses "):
            assert part in text
        run_in_program(process, "allocator.free(more); allocator.empty_cache()")
        until(lambda: not [alert for alert in daemon.get("alerts") if alert["rule"] == "quota-exceeded"])
        assert limit_of(daemon, process) is None
        assert not [entry for entry in daemon.get("audit") if entry["action"] == "agent.limit"]
        run_in_program(process, "more = allocator.malloc(200 * MIB)")
        until(lambda: [alert for alert in daemon.get("alerts") if alert["rule"] == "quota-exceeded"])
        write(tmp_path)
        assert change(daemon, "POST", "/-/reload", {}) == 200
        until(lambda: not [alert for alert in daemon.get("alerts") if alert["rule"] == "quota-exceeded"])


def test_status_shows_the_limit(start: Serve, tmp_path: Path):
    match = TEAM["match"] | {"user": str(os.getuid())}
    daemon = start(TEAM | {"match": match, "soft_limit": "250MiB", "reserve": "100MiB"})
    with running(daemon, tmp_path) as process:
        has_limit(daemon, process, 300)
        until(lambda: daemon.get("processes"))  # the driver may be read only after the agent has reported
        shown = daemon.run("status").stdout
        assert "LIMIT" in shown
        assert "300.0 MiB" in shown


def test_wrong_quota_in_the_configuration_names_key_and_expectation(tmp_path: Path):
    daemon_directory = tmp_path / "config"
    daemon_directory.mkdir()
    write(daemon_directory, TEAM | {"limit": "lots"})
    command = ["check-config", os.fspath(daemon_directory / "gpumond.yaml")]
    done = subprocess.run([sys.executable, "-m", "gpumond", *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "quotas[0].limit: 'lots': expected a size such as 40GiB" in done.stderr
