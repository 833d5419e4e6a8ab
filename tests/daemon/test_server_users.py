"""Callers of the daemon: identified by the kernel on its Unix socket, and by a token on its port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond.config.tokens import token_digest
from tests.helpers.running import RunningDaemon, until
from tests.helpers.serving import start_daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with start_daemon(tmp_path_factory.mktemp("server")) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log.read_text()


def test_unix_socket_requires_no_token_of_the_daemons_user(daemon: RunningDaemon):
    assert (daemon.directory / "api.sock").stat().st_mode & 0o777 == 0o600
    (daemon.directory / "token").rename(daemon.directory / "hidden")
    try:
        done = daemon.run("flush", "--all")
    finally:
        (daemon.directory / "hidden").rename(daemon.directory / "token")
    assert "no program with an agent matches all" in done.stderr
    assert done.returncode == 3
    by = daemon.get("audit")[-1]["actor"]
    assert by == f"uid:{os.geteuid()}"


def test_command_can_use_the_unix_socket(daemon: RunningDaemon):
    url = f"--url=unix://{daemon.directory}/api.sock"
    assert daemon.run("status", "--healthy", url).returncode == 0
    assert daemon.run("flush", "--all", url).returncode == 3
    assert daemon.get("audit")[-1]["actor"] == f"uid:{os.geteuid()}"
    nowhere = daemon.run("status", "--url=unix:///nowhere/api.sock")
    assert nowhere.returncode == 1
    assert "no daemon is reachable at unix:///nowhere/api.sock" in nowhere.stderr


@pytest.fixture
def directory_for_all() -> Iterator[Path]:
    """Directory that other users can enter. Those of pytest are closed by each session of pytest that starts."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_user_may_flush_only_their_own_programs(directory_for_all: Path):
    config = directory_for_all / "gpumond.yaml"
    config.write_text('socket_mode: "0666"\n')
    with start_daemon(directory_for_all, "--config", str(config)) as daemon:
        program = """
import http.client, json, os, socket, sys
os.setuid(4242)
def ask(path, body):
    c = http.client.HTTPConnection("localhost"); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect(sys.argv[1])
    c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = c.getresponse(); return answer.status, json.load(answer)["detail"]
for path, body in json.loads(sys.argv[2]): print(*ask(path, body))
"""
        asked = [
            ("/api/v1/flushes", {"target": {"pid": 1}}),
            ("/api/v1/release", {"for_seconds": 1}),
            ("/-/reload", {}),
        ]
        command = [sys.executable, "-c", program, str(daemon.directory / "api.sock"), json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines() == [
            "404 no program with an agent matches pid 1 (uid 4242); to list the programs: gpumond status",
            "403 uid:4242 lacks the `admin` scope; ask an administrator, or use a token that has it",
            "403 uid:4242 lacks the `admin` scope; ask an administrator, or use a token that has it",
        ], done.stderr


def test_token_file_is_reloaded_when_it_changes(tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text("")
    tokens.chmod(0o600)
    with start_daemon(tmp_path, "--tokens-file", str(tokens), "--log-format", "json") as daemon:

        def flush(token: str) -> int:
            return daemon.request("/api/v1/flushes", {"target": {"all": True}}, Authorization=f"Bearer {token}")[0]

        assert flush("gpm_nightly") == 401
        tokens.write_text(f"nightly flush {token_digest('gpm_nightly').hex()}\n")
        until(lambda: flush("gpm_nightly") == 404)
        assert daemon.get("audit")[-1]["actor"] == f"token:nightly@uid:{os.geteuid()}"
        tokens.write_text("nightly everything\n")
        time.sleep(1.5)  # the file is read at most once a second, when a request has a token
        assert flush("gpm_nightly") == 404
        assert "expected NAME SCOPE" in daemon.log.read_text()
        tokens.write_text("# no token\n")
        until(lambda: flush("gpm_nightly") == 401)
        log = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        assert {"at", "level", "logger", "message"} == log[0].keys()
        assert "gpm_nightly" not in daemon.log.read_text()


def test_local_token_is_not_sent_to_another_address(tmp_path: Path):
    (tmp_path / "token").write_text("gpm_secret\n")
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.9", 0))
    environ = {**os.environ, "GPUMOND_SOCKET": str(tmp_path / "agent.sock")}
    url = f"http://127.0.0.9:{listener.getsockname()[1]}"
    client = subprocess.Popen([sys.executable, "-m", "gpumond", "flush", "--all", "--url", url], env=environ)
    connection, _ = listener.accept()
    received.append(connection.recv(65536))
    connection.close()
    listener.close()
    client.wait(timeout=60)
    assert b"POST /api/v1/flushes" in received[0]
    assert b"gpm_secret" not in received[0]
