"""Program data in the API of the real daemon, and the requests to programs."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.agent_daemon import environment, finished, host, run_in_program
from tests.helpers.running import RunningDaemon, until
from tests.helpers.scoped_program import WORKLOAD, attempt, program
from tests.helpers.simulated import UUID
from tests.helpers.stubs import fleet, write_targets

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Daemon of all tests, which the last of them stops."""
    directory = tmp_path_factory.mktemp("daemon")
    environ = {"GPUMOND_SIM_DIR": os.fspath(directory / "cards")}
    with RunningDaemon(directory / "daemon", "--source", "sim", "--interval", "0.2s", environ=environ) as daemon:
        yield daemon


@contextmanager
def running(daemon: RunningDaemon, directory: Path, allow_limit: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a program on a device of its own, and wait until the daemon has its report, at the end until it has none."""
    cards = Path(daemon.environ["GPUMOND_SIM_DIR"])
    environ = environment(daemon.socket, XDG_STATE_HOME=os.fspath(directory / "state"))
    try:
        with host(program(cards, allow_limit), environ) as process:
            until(lambda: daemon.request("/api/v1/agents")[0] == 200 and daemon.get("agents"))
            yield process
    finally:
        shutil.rmtree(cards)
    until(lambda: daemon.process.poll() is not None or not daemon.get("agents"))


def post(daemon: RunningDaemon, path: str, body: object = None) -> tuple[int, Any]:
    token = (daemon.directory / "token").read_text().strip()
    status, answer, _ = daemon.request(path, {} if body is None else body, Authorization=f"Bearer {token}")
    return status, json.loads(answer)


def listed(daemon: RunningDaemon, kind: str, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    events = json.loads(daemon.request("/api/v1/events", Accept="application/json")[1])
    return [event for event in events if (event["kind"], event["pid"]) == (kind, process.pid)]


def test_scopes_and_steps_are_metrics(daemon: RunningDaemon, tmp_path: Path):
    with running(daemon, tmp_path) as process:
        run_in_program(process, "for _ in range(7): agent.step()")
        run_in_program(process, "with agent.scope('epoch'), agent.scope('forward'): kept = allocator.malloc(100 * MIB)")
        own = {"pid": str(process.pid), "workload": WORKLOAD}
        until(lambda: daemon.value("gpumond_scope_entries_total", scope="epoch/forward", **own) == 1)
        assert daemon.value("gpumond_scope_retained_bytes", scope="epoch", uuid=UUID, **own) == 100 * MIB
        assert daemon.value("gpumond_scope_peak_bytes", scope="epoch", uuid=UUID, **own) == 150 * MIB
        assert daemon.value("gpumond_scope_retries_total", scope="epoch", **own) == 0
        assert daemon.value("gpumond_steps_total", **own) == 7
        assert daemon.value("gpumond_step_live_bytes", **own) == 50 * MIB
        assert daemon.value("gpumond_step_retained_bytes", **own) is None
        (report,) = daemon.get("agents")
        assert report["program"]["scopes"][0]["devices"][0]["peak_exact"] is True
        finished(process)


def test_error_is_an_event_with_a_snapshot_and_a_counter(daemon: RunningDaemon, tmp_path: Path):
    before = daemon.value("gpumond_events_total", kind="oom") or 0
    with running(daemon, tmp_path) as process:
        run_in_program(
            process, attempt("agent.scope('epoch')(agent.retry_on_oom(allocator.malloc, attempts=2))(2000 * MIB)")
        )
        first, second = until(lambda: len(found := listed(daemon, "oom", process)) > 1 and found)
        assert second["id"] == first["id"] + 1
        assert (first["workload"], first["device_uuid"]) == (WORKLOAD, UUID)
        details = dict(first["details"])
        assert (details["scope"], details["request_bytes"], details["live_bytes"]) == ("epoch", 2000 * MIB, 50 * MIB)
        own = {"pid": str(process.pid), "workload": WORKLOAD}
        assert daemon.value("gpumond_oom_retries_total", **own) == 1
        assert daemon.value("gpumond_oom_recovered_total", **own) == 0
        assert daemon.value("gpumond_scope_ooms_total", scope="epoch", **own) == 1
        assert daemon.value("gpumond_events_total", kind="oom") == before + 2
        finished(process)
        assert len(until(lambda: listed(daemon, "agent-disconnected", process))) == 1


def test_program_that_ends_out_of_memory_reports_it_at_exit(daemon: RunningDaemon, tmp_path: Path):
    """The error is not caught; exit code and traceback are those of the program."""
    with running(daemon, tmp_path) as process:
        out, err = process.communicate("allocator.malloc(2000 * MIB)\n", timeout=30)
        assert (process.returncode, out) == (1, "")
        assert err.splitlines()[-1].startswith("gpumond.sim.device.OutOfMemory: tried to allocate 2000.00 MiB")
        (event,) = until(lambda: listed(daemon, "oom", process))
        assert dict(event["details"])["live_bytes"] == 50 * MIB
        assert len(until(lambda: listed(daemon, "agent-disconnected", process))) == 1


def test_limit_is_set_through_the_api_and_in_the_audit(daemon: RunningDaemon, tmp_path: Path):
    with running(daemon, tmp_path, allow_limit=True) as process:
        status, applied = post(daemon, f"/api/v1/agents/{process.pid}/limit", {"limit_bytes": 300 * MIB})
        assert (status, applied[0]["applied"], applied[0]["device_uuid"]) == (200, True, UUID)
        run_in_program(process, "assert allocator.limit_bytes == 300 * MIB")
        entries = [entry for entry in daemon.get("audit") if entry["action"].startswith("agent.limit")]
        assert [entry["action"] for entry in entries] == ["agent.limit", "agent.limit.answer"]
        assert entries[0]["detail"]["limit_bytes"] == 300 * MIB
        finished(process)


def test_limit_of_an_operation_is_undone(daemon: RunningDaemon, tmp_path: Path):
    token = (daemon.directory / "token").read_text().strip()
    environ = {**os.environ, "GPUMOND_URL": daemon.url, "GPUMOND_TOKEN": token}
    given = ["--targets", str(write_targets(tmp_path / "one.json", {"gpu-1": daemon.url.removeprefix("http://")}))]

    def limited(size: str, operation: str) -> None:
        command = [sys.executable, "-m", "gpumond", "limit", "--pid", str(process.pid), size]
        subprocess.run(command, env={**environ, "GPUMOND_OPERATION": operation}, check=True, capture_output=True)

    def undone(operation: str) -> Any:
        done = fleet("undo", *given, operation, "--yes", "--json", GPUMOND_TOKEN=token)
        return [(each["undo"], each["result"], each["reason"]) for each in json.loads(done.stdout)["results"]]

    with running(daemon, tmp_path, allow_limit=True) as process:
        limited("300MiB", "OPS-1")
        until(lambda: daemon.value("gpumond_process_limit_bytes", pid=str(process.pid)) == 300 * MIB)
        limited("200MiB", "OPS-2")
        until(lambda: daemon.value("gpumond_process_limit_bytes", pid=str(process.pid)) == 200 * MIB)
        assert undone("OPS-1") == [
            (f"remove the limit of pid {process.pid}", "refused", "the limit has been changed since")
        ]
        assert undone("OPS-2") == [(f"limit pid {process.pid} to 300.0 MiB on {UUID}", "undone", "")]
        until(lambda: daemon.value("gpumond_process_limit_bytes", pid=str(process.pid)) == 300 * MIB)
        assert undone("OPS-1")[0][1] == "undone"
        run_in_program(process, "assert allocator.limit_bytes is None")
        finished(process)


def test_program_that_does_not_allow_a_limit_is_not_limited(daemon: RunningDaemon, tmp_path: Path):
    with running(daemon, tmp_path) as process:
        status, problem = post(daemon, f"/api/v1/agents/{process.pid}/limit", {"limit_bytes": 300 * MIB})
        assert status == 409
        assert "allow_limit=True" in problem["detail"]
        run_in_program(process, "assert allocator.limit_bytes is None")
        assert post(daemon, "/api/v1/agents/1/limit", {"limit_bytes": 5})[0] == 404
        finished(process)


def test_snapshot_is_written_by_the_program_for_its_own_user(daemon: RunningDaemon, tmp_path: Path):
    with running(daemon, tmp_path) as process:
        status, dump = post(daemon, f"/api/v1/agents/{process.pid}/snapshot")
        assert status == 200
        path = Path(dump["path"])
        assert path.parent == tmp_path / "state" / "gpumond" / "snapshots"
        assert (path.stat().st_size, path.stat().st_mode & 0o777) == (dump["size_bytes"], 0o600)
        status, problem = post(daemon, f"/api/v1/agents/{process.pid}/snapshot")
        assert (status, "at most one snapshot in" in problem["detail"]) == (409, True)
        finished(process)


def test_snapshot_is_fetched_by_the_command_line(daemon: RunningDaemon, tmp_path: Path):
    with running(daemon, tmp_path) as process:
        run_in_program(process, "kept = [allocator.malloc(2 * MIB) for _ in range(50)]")
        out = tmp_path / "fetched.json"
        command = [sys.executable, "-m", "gpumond", "snapshot", "--pid", str(process.pid), "--out", os.fspath(out)]
        done = subprocess.run(
            [*command, "--url", daemon.url], env=daemon.environ, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        (written,) = (tmp_path / "state" / "gpumond" / "snapshots").iterdir()
        assert out.read_bytes() == written.read_bytes()
        assert out.stat().st_mode & 0o777 == 0o600
        assert "fetched.json" in done.stdout
        actions = [entry["action"] for entry in daemon.get("audit")]
        assert {"agent.snapshot", "agent.fetch"} <= set(actions)
        assert daemon.request(f"/api/v1/agents/{process.pid}/snapshots/1")[0] == 401
        token = {"Authorization": f"Bearer {(daemon.directory / 'token').read_text().strip()}"}
        status, body, _ = daemon.request(f"/api/v1/agents/{process.pid}/snapshots/1", **token)
        assert (status, body) == (200, written.read_bytes())
        status, body, _ = daemon.request(f"/api/v1/agents/{process.pid}/snapshots/2", **token)
        assert (status, b"available: 1" in body) == (409, True)
        finished(process)


def test_event_stream_contains_the_events_of_the_program(daemon: RunningDaemon, tmp_path: Path):
    with running(daemon, tmp_path) as process:
        (came,) = until(lambda: listed(daemon, "agent-connected", process))
        address = daemon.url.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("GET", "/api/v1/events", headers={"Accept": "text/event-stream"})
        stream = connection.getresponse()
        assert stream.headers["content-type"].startswith("text/event-stream")
        run_in_program(process, "allocator.free(allocator.malloc(100 * MIB))")
        until(lambda: daemon.value("gpumond_pool_reclaimable_bytes", pid=str(process.pid)))
        assert daemon.flush(target={"pid": process.pid}, steps=["cache"])[0] == 200
        lines: list[str] = []
        while not any(line.startswith("data:") and '"flush"' in line for line in lines):
            lines.append(stream.readline().decode().rstrip("\n"))
        connection.close()
        event = json.loads(lines[-1].removeprefix("data: "))
        assert (event["pid"], dict(event["details"])["outcome"]) == (process.pid, "freed")
        assert f"id: {event['id']}" in lines
        again = http.client.HTTPConnection(address, timeout=30)
        again.request("GET", "/api/v1/events", headers={"Last-Event-ID": str(came["id"] - 1)})
        missed = again.getresponse()
        while not (line := missed.readline().decode()).startswith("data:"):
            pass
        assert json.loads(line.removeprefix("data: ")) == came
        assert daemon.stop() == 0  # readers are connected
        again.close()
