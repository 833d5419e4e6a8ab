"""Users who sign in at a reverse proxy in front of a daemon, which both run on this machine."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.fakenvml import GIB, Device, FakeDriver, Process
from tests.helpers.running import RunningDaemon, until
from tests.helpers.users import SERVICE, VICTIM, as_user, obstacle, python, start

TOKENS = "admins admin group:gpu-admins\n"
OWN_USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[RunningDaemon]:
    """A daemon whose proxy runs as SERVICE. Its device has a program of the test's user, and one of VICTIM."""
    if reason := obstacle():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("sign-on")
    tokens = directory / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    (directory / "gpumond.yaml").write_text(
        f"tokens_file: {tokens}\nidentity_proxy: {{user: '{SERVICE}'}}\nhosts: [gpu.example.com]\n"
    )
    driver = FakeDriver(directory, nvml_library, [Device("GPU-1", used_bytes=20 * GIB)])
    other = subprocess.Popen([*as_user(VICTIM), "sleep", "600"])
    driver.devices[0].processes = [Process(os.getpid(), 4 * GIB), Process(other.pid, 15 * GIB)]
    driver.write()
    options = ("--config", str(directory / "gpumond.yaml"), "--source", "nvml", "--interval", "0.2s")
    try:
        with RunningDaemon(directory / "daemon", *options, environ=driver.env) as running:
            until(lambda: running.request("/-/ready")[0] == 200)
            yield running
    finally:
        other.kill()
        other.wait()


@pytest.fixture(scope="module")
def proxy(daemon: RunningDaemon) -> Iterator[int]:
    process = start(SERVICE, "tests.helpers.reverse_proxy", daemon.url.rpartition(":")[2])
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


class Browser:
    """Requests of a browser that has signed in as ``user``, or has no session."""

    def __init__(self, port: int, user: str = "", groups: str = "") -> None:
        self._port = port
        session = {"user": user, **({"groups": groups} if groups else {})}
        self._cookie = {"Cookie": f"session={quote(json.dumps(session))}"} if user else {}

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, str]:
        with closing(self._send(path, method, body, headers)) as connection:
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def first_line(self, path: str, beginning: str) -> str:
        with closing(self._send(path, "GET", None, {})) as connection, connection.getresponse() as answer:
            while not (line := answer.readline().decode()).startswith(beginning):
                assert line
            return line

    def _send(self, path: str, method: str, body: Any, headers: dict[str, str]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        stated = {"Host": "gpu.example.com", "Content-Type": "application/json", **self._cookie}
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), {**stated, **named})
        return connection


def shown(text: str) -> tuple[set[int], list[tuple[str, int]]]:
    """Return the pids of a frame, and its device's lines of the ledger in GiB."""
    whole = json.loads(text)
    lines = [(line["share"], line["used_bytes"] // GIB) for line in whole["ledger"]["lines"]]
    return {each["pid"] for each in whole["processes"]}, sorted(lines)


def test_user_sees_own_programs_and_whole_totals(proxy: int):
    status, text = Browser(proxy, OWN_USER).ask("/api/v1/frame")
    assert status == 200
    assert shown(text) == ({os.getpid()}, [("opaque", 4), ("opaque", 15), ("unattributed", 1)])
    status, text = Browser(proxy, "nobody-here").ask("/api/v1/frame")
    assert shown(text) == (set(), [("opaque", 19), ("unattributed", 1)])


def test_stream_contains_own_programs_only(proxy: int):
    line = Browser(proxy, OWN_USER).first_line("/api/v1/live", "data: ")
    assert shown(line.removeprefix("data: "))[0] == {os.getpid()}


def test_group_of_administrators_changes_and_is_recorded(daemon: RunningDaemon, proxy: int):
    carol = Browser(proxy, "carol", groups="staff,gpu-admins")
    assert len(shown(carol.ask("/api/v1/frame")[1])[0]) == 2
    assert carol.ask("/-/reload", "POST", {}, Origin="https://evil.example")[0] == 403
    assert carol.ask("/-/reload", "POST", {}, Origin="https://gpu.example.com")[0] == 200
    assert daemon.get("audit")[-1]["actor"] == "proxy:carol"


def test_request_without_a_session_is_refused(proxy: int):
    assert Browser(proxy).ask("/api/v1/frame")[0] == 401
    assert Browser(proxy).ask("/api/v1/frame", X_Forwarded_User=OWN_USER)[0] == 401


def test_other_program_on_the_machine_cannot_state_an_identity(daemon: RunningDaemon):
    port = int(daemon.url.rpartition(":")[2])
    forged = {"X_Forwarded_User": "carol", "X_Forwarded_Groups": "gpu-admins"}
    direct = Browser(port)
    assert direct.ask("/-/reload", "POST", {}, **forged)[0] == 401
    assert len(shown(direct.ask("/api/v1/frame", **forged)[1])[0]) == 2  # as every local reader
    script = (
        "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); "
        "c.request('POST', '/-/reload', headers={'X-Forwarded-User': 'x', 'X-Forwarded-Groups': 'gpu-admins'}); "
        "print(c.getresponse().status)"
    )
    for uid, status in ((VICTIM, "401"), (SERVICE, "200")):
        command = [*as_user(uid), python(), "-S", "-c", script, str(port)]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == status


def test_unknown_user_of_the_proxy_is_refused_at_the_start(daemon: RunningDaemon, tmp_path: Path):
    (tmp_path / "gpumond.yaml").write_text("identity_proxy: {user: no-such-user}\n")
    own = ("--listen", "127.0.0.1:0", "--socket", str(tmp_path / "agent.sock"), "--state-dir", str(tmp_path / "state"))
    refused = daemon.run("serve", "--config", str(tmp_path / "gpumond.yaml"), *own)
    assert refused.returncode == 2
    assert "identity_proxy: user: this machine has no user 'no-such-user'" in refused.stderr
