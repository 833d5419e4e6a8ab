"""Fakes of engines, and the parts of the daemon that talk to them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import send_fds, socket, socketpair
from typing import Any

from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import Reading
from gpumond.features.engines.settings import EngineConfig
from gpumond.sim.device import SimDevice, Spec, create
from tests.helpers.agents import GIB

ROOT = Path(__file__).parents[2]


def device(directory: Path, size_gib: int = 16) -> SimDevice:
    return create(directory / "SIM-0", Spec("SIM-0", 0, "Simulated", size_gib * GIB, context_bytes=0))


def candidates(card: SimDevice) -> list[ProcessKey]:
    return list(card.read().processes_by_key)


def reading(card: SimDevice) -> Reading:
    return Reading(devices=(card.read(),))


def used_bytes(card: SimDevice) -> int:
    return card.read().used_bytes or 0


class FakeEngine:
    """A fake that runs."""

    def __init__(self, kind: str, url: str, process: Fork | subprocess.Popen[str]) -> None:
        self.kind, self.url, self.process = kind, url, process

    def declaration(self, **fields: Any) -> EngineConfig:
        return EngineConfig.model_validate({"name": "e", "kind": self.kind, "url": self.url} | fields)

    def send(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        fields = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, fields, method="POST" if fields else "GET")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def record(self) -> Any:
        return self.send("/_test")

    def begin_request(self) -> InferenceRequest:
        return InferenceRequest(self)


class InferenceRequest:
    """A request that runs until ``finish``. ``answer`` is an HTTP status if it failed."""

    def __init__(self, fake: FakeEngine) -> None:
        self._fake = fake
        self.answer: Any = None
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()

    def _send(self) -> None:
        self.answer = self._fake.send("/_test/request", {})

    def finish(self) -> Any:
        self._fake.send("/_test/finish", {})
        self.thread.join(20)
        return self.answer


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """Yield the URL of a server that answers each request with this body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


FORKS = """
import json, os, signal, sys
from socket import recv_fds, socket
from tests.engines.fake_engine import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
requests = socket(fileno=os.dup(0))
while (request := recv_fds(requests, 1 << 16, 1))[0]:
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        for descriptor in (0, 1):
            os.dup2(request[1][0], descriptor)
        os.close(request[1][0])
        sys.argv[1:], sys.stdin, sys.stdout = json.loads(request[0]), open(0), open(1, "w")
        print(os.getpid(), flush=True)
        main()
    os.close(request[1][0])
"""


@cache
def _forks() -> tuple[socket, subprocess.Popen[bytes]]:
    """Start a process whose forks are fakes, until the tests end: the start of Python takes longer than most tests."""
    ours, its = socketpair()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUMOND_TEST_PROCESS")}
    with its:
        return ours, subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, env=environ, stdin=its)


class Fork:
    """A fork, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid, self._descriptor = pid, os.pidfd_open(pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._descriptor], [], [])

    def close(self) -> None:
        self.kill()
        self.wait()
        os.close(self._descriptor)


@contextmanager
def fake_engine(kind: str, card: SimDevice, *faults: str, path: Path | None = None) -> Iterator[FakeEngine]:
    arguments = [kind, "--card", str(card.directory), *(part for fault in faults for part in ("--fault", fault))]
    arguments += ["--socket", str(path)] if path else []
    ours, its = socketpair()
    with ours, its, ours.makefile() as lines:
        send_fds(_forks()[0], [json.dumps(arguments).encode()], [its.fileno()])
        its.close()
        process = Fork(int(lines.readline()))
        try:
            yield FakeEngine(kind, lines.readline().strip(), process)
        finally:
            process.close()
