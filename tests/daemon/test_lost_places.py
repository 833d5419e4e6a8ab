"""A daemon whose socket is removed, or whose port belongs to another program."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.first_report import first_report
from tests.helpers.running import RunningDaemon, until
from tests.helpers.users import Request


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Runtime directory of the daemon."""
    return tmp_path / "run"


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], place: Path, tmp_path: Path) -> RunningDaemon:
    environ = {"GPUMOND_SIM_DIR": str(tmp_path)}
    own = ("--socket", str(place / "agent.sock"), "--runtime-dir", str(tmp_path / "own"))
    return serve("--source", "sim", "--interval", "0.1s", *own, environ=environ)


def is_heard(place: Path) -> bool:
    try:
        first_report(str(place / "agent.sock"))
    except (OSError, AssertionError):
        return False
    return True


def faults(daemon: RunningDaemon, kind: str) -> list[str]:
    until(lambda: daemon.request("/api/v1/snapshot")[0] == 200)
    return [fault["detail"] for fault in daemon.get("snapshot")["faults"] if fault["kind"] == kind]


def test_removed_socket_is_bound_again(daemon: RunningDaemon, place: Path):
    assert is_heard(place)
    (place / "agent.sock").unlink()
    until(lambda: is_heard(place))
    assert "was removed and created again" in daemon.log.read_text()


def test_removed_directory_is_created_again(daemon: RunningDaemon, place: Path):
    shutil.rmtree(place)
    until(lambda: is_heard(place))
    assert daemon.stop() == 0
    assert not (place / "agent.sock").exists()


def test_socket_that_another_file_replaces_is_a_fault_until_that_is_removed(daemon: RunningDaemon, place: Path):
    (place / "agent.sock").unlink()
    (place / "agent.sock").write_text("")
    until(lambda: faults(daemon, "socket_lost"))
    assert "replaced by another program" in faults(daemon, "socket_lost")[0]
    (place / "agent.sock").unlink()
    until(lambda: is_heard(place))
    until(lambda: not faults(daemon, "socket_lost"))


def test_port_of_another_program_is_taken_as_soon_as_it_is_free(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        agents = tmp_path / "run" / "agent.sock"
        command = [sys.executable, "-m", "gpumond", "serve", "--source", "sim", "--socket", str(agents)]
        command += ["--listen", f"127.0.0.1:{port}", "--state-dir", str(tmp_path / "state")]
        environ = {**os.environ, "GPUMOND_SIM_DIR": str(tmp_path)}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            until(lambda: is_heard(agents.parent))
            status = until(lambda: over_socket(agents.parent / "api.sock", "/api/v1/snapshot"))
            assert [fault["kind"] for fault in status["faults"] if fault["source"] == "http"] == ["port_in_use"]
            other.close()
            until(lambda: is_open(port))
            until(lambda: not over_socket(agents.parent / "api.sock", "/api/v1/snapshot")["faults"])
        finally:
            process.terminate()
            assert process.wait(30) == 0, (tmp_path / "log").read_text()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def over_socket(path: Path, route: str) -> dict[str, Any]:
    """Return the answer of a route over the API's socket; nothing before the first frame."""
    status, answer = Request(None, path, "GET", route).answer()
    return answer if status == 200 else {}
