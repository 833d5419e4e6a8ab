"""The command line says a token only to a listener whom the kernel names as root, its own user or the service's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forks
from tests.helpers.running import free_port
from tests.helpers.stubs import stub
from tests.helpers.users import ATTACKER, ROOT, SERVICE, as_user, obstacle, python
from tests.isolation.machine import Machine

LISTENER = """
import http.server, json, sys
kind, port = sys.argv[1], int(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        print(json.dumps([self.command, self.path, self.headers["Authorization"]]), flush=True)
        status = {"redirect": 302, "refuse": 401}.get(kind, 200)
        self.send_response(status)
        if kind == "redirect":
            self.send_header("Location", f"http://localhost:{port}{self.path}")
        body = b'{"detail": "reads require a token"}'
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = do_PUT = do_DELETE = answer
    def log_message(self, *arguments): pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("ready", flush=True)
server.serve_forever()
"""
READS = [("status",), ("alerts",), ("audit",), ("receipts",), ("top", "--once")]
CHANGES = [
    ("flush", "--all"),
    ("silence", "delete", "0" * 16),
    ("silence", "add", "rule=leak", "--for", "1h", "--reason", "known"),
    ("why", "--pid", "1"),
]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for listeners of other users")


class Listener:
    def __init__(self, uid: int | None, kind: str, port: int) -> None:
        command = [*as_user(uid), python(), "-S", "-c", LISTENER, kind, str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
        self.url = f"http://127.0.0.1:{port}"
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n"

    def requests(self) -> list[tuple[str, str, str | None]]:
        """End the listener, and return method, path and Authorization of each request."""
        self._process.kill()
        assert self._process.stdout
        requests = [tuple(json.loads(line)) for line in self._process.stdout.read().splitlines()]
        self.close()
        return requests

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    if reason := obstacle():
        pytest.skip(reason)
    with ExitStack() as stack:

        def start(uid: int | None, kind: str = "answer", port: int | None = None) -> Listener:
            listener = Listener(uid, kind, port or free_port())
            stack.callback(listener.close)
            return listener

        yield start


def gpumond(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMOND_")}
    environ = kept | {"GPUMOND_SOCKET": "/nowhere/agent.sock"} | environ
    return forks.run([sys.executable, "-m", "gpumond", *arguments], env=environ, cwd=ROOT)


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        *(("answer", command) for command in (*READS, *CHANGES)),
        *((kind, command) for kind in ("refuse", "redirect") for command in (READS[0], CHANGES[0])),
    ],
)
def test_token_is_not_said_to_a_listener_of_another_user(
    listen: Callable[..., Listener], kind: str, command: tuple[str, ...]
):
    listener = listen(ATTACKER, kind)
    failed = gpumond(*command, GPUMOND_URL=listener.url, GPUMOND_TOKEN="gpm_secret")
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    requests = listener.requests()
    assert [authorization for _, _, authorization in requests if authorization] == []
    assert {method for method, _, _ in requests} <= {"GET"}
    if command in CHANGES or kind == "refuse":
        assert f"uid {ATTACKER} listens at 127.0.0.1:" in failed.stderr


@pytest.mark.parametrize("command", CHANGES, ids=" ".join)
def test_token_file_is_not_said_to_a_listener_of_another_user(
    listen: Callable[..., Listener], tmp_path: Path, command: tuple[str, ...]
):
    (tmp_path / "token").write_text("gpm_secret\n")
    listener = listen(ATTACKER)
    failed = gpumond(*command, GPUMOND_URL=listener.url, GPUMOND_RUNTIME_DIR=str(tmp_path))
    assert f"uid {ATTACKER} listens at 127.0.0.1:" in failed.stderr
    assert listener.requests() == [], "the listener is checked before the first request"


def test_browser_is_not_sent_to_a_listener_of_another_user(listen: Callable[..., Listener], machine: Machine):
    """The daemon at the socket would return a code, which the address would contain."""
    listener = listen(ATTACKER)
    failed = gpumond("open", "--print", GPUMOND_URL=listener.url, GPUMOND_RUNTIME_DIR=str(machine.api.parent))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "so no sign-in code was sent" in failed.stderr
    assert {(method, authorization) for method, _, authorization in listener.requests()} <= {("GET", None)}


@pytest.mark.parametrize(("kind", "sent"), [("answer", [None]), ("refuse", [None, "Bearer gpm_secret"])])
def test_read_has_a_token_only_if_it_is_refused_without(
    listen: Callable[..., Listener], kind: str, sent: list[str | None]
):
    listener = listen(None, kind)
    gpumond("receipts", GPUMOND_URL=listener.url, GPUMOND_TOKEN="gpm_secret")
    assert [authorization for _, _, authorization in listener.requests()] == sent


@pytest.mark.parametrize("kind", ["answer", "refuse"])
def test_fleet_says_no_token_to_a_listener_of_another_user(listen: Callable[..., Listener], tmp_path: Path, kind: str):
    listener = listen(ATTACKER, kind)
    targets = tmp_path / "targets.json"
    targets.write_text(json.dumps([{"targets": [listener.url.removeprefix("http://")]}]))
    failed = gpumond("fleet", "status", "--targets", str(targets), GPUMOND_TOKEN="gpm_secret")
    assert f"uid {ATTACKER} listens at 127.0.0.1:" in failed.stdout
    assert {(method, authorization) for method, _, authorization in listener.requests()} <= {("GET", None)}


def test_token_is_not_sent_in_the_clear_to_another_machine():
    """An address that reaches this test, and isn't a loopback address."""
    with stub(lambda path, body: (401, {"detail": "reads require a token"})) as served:
        url = f"http://{served.address.replace('127.0.0.1', '0.0.0.0')}"
        read = gpumond("status", "--url", url, GPUMOND_TOKEN="gpm_secret")
        changed = gpumond("flush", "--all", "--url", url, GPUMOND_TOKEN="gpm_secret")
        assert served.requests == [("/api/v1/frame", None, "")]
    assert (read.returncode, changed.returncode) == (1, 1)
    assert "the token wasn't sent, because the connection doesn't use TLS" in read.stderr
    assert "the token isn't sent without TLS" in changed.stderr


def test_text_of_an_error_does_not_change_the_terminal():
    detail = "\x1b]0;title\x07 \x1b[2J \u202egpumond: all is well\ngpumond: done"
    with stub(lambda path, body: (409, {"detail": detail})) as served:
        for command in (("flush", "--all"), ("status",), ("limit", "--pid", "1", "1GiB")):
            failed = gpumond(*command, GPUMOND_URL=f"http://{served.address}")
            assert failed.returncode != 0
            assert all(character.isprintable() or character == "\n" for character in failed.stderr + failed.stdout)
            assert len(failed.stderr.splitlines()) == 1


def test_redirect_is_not_followed(listen: Callable[..., Listener]):
    listener = listen(None, "redirect")
    failed = gpumond("flush", "--all", GPUMOND_URL=listener.url, GPUMOND_TOKEN="gpm_secret")
    assert failed.returncode == 1
    assert len(listener.requests()) == 1


def test_token_is_said_to_the_owner_of_a_directory_that_only_root_can_give(
    listen: Callable[..., Listener], tmp_path: Path
):
    with ExitStack() as stack:
        directory = Path("/run") / f"gpumond-test-{os.getpid()}"
        directory.mkdir(mode=0o755)
        stack.callback(directory.rmdir)
        os.chown(directory, SERVICE, SERVICE)
        (directory / "token").write_text("gpm_secret\n")
        stack.callback((directory / "token").unlink)
        for uid, expected in ((SERVICE, ["Bearer gpm_secret"]), (ATTACKER, [])):
            listener = listen(uid)
            gpumond("flush", "--all", GPUMOND_URL=listener.url, GPUMOND_RUNTIME_DIR=str(directory))
            assert [authorization for _, _, authorization in listener.requests()] == expected


def test_socket_of_another_user_is_sent_no_request(machine: Machine, tmp_path: Path):
    api = machine.api
    failed = gpumond("status", "--url", f"unix://{api}")
    assert failed.returncode == 1
    assert f"uid {SERVICE} listens on {api}" in failed.stderr
    owned = gpumond_as(SERVICE, "status", "--json", "--url", f"unix://{api}")
    assert owned.returncode == 0, owned.stderr


def gpumond_as(uid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    command = [*as_user(uid), python(), "-m", "gpumond", *arguments]
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=60)


def test_default_address_is_the_socket_of_the_machines_daemon(machine: Machine, listen: Callable[..., Listener]):
    """Whoever has the port 9917 learns nothing, and says nothing."""
    try:
        listener = listen(ATTACKER, "answer", 9917)
    except AssertionError:
        pytest.skip("port 9917 is in use")
    shown = gpumond_as(SERVICE, "status", "--json")
    assert listener.requests() == [("GET", "/api/v1/frame", None)]
    assert shown.returncode == 1
    listener = listen(ATTACKER, "answer", 9917)
    os.environ["GPUMOND_RUNTIME_DIR"] = str(machine.api.parent)
    try:
        shown = gpumond_as(SERVICE, "status", "--json")
        flushed = gpumond_as(SERVICE, "flush", "--all")
    finally:
        del os.environ["GPUMOND_RUNTIME_DIR"]
    assert shown.returncode == 0, shown.stderr
    assert "no process" in flushed.stderr or flushed.returncode in (0, 3), flushed.stderr
    assert {(method, authorization) for method, _, authorization in listener.requests()} <= {("GET", None)}
