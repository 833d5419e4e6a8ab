"""Fakes of engines, and the parts of the daemon that talk to them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socketpair
from typing import Any

from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import Reading
from gpumond.features.engines.settings import EngineConfig
from gpumond.sim.device import DeviceSpec, SimDevice, create
from tests.helpers.agents import GIB
from tests.helpers.forks import Fork


def device(directory: Path, size_gib: int = 16) -> SimDevice:
    return create(directory / "SIM-0", DeviceSpec("SIM-0", 0, "Simulated", size_gib * GIB, context_bytes=0))


def candidates(card: SimDevice) -> list[ProcessKey]:
    return list(card.read().processes_by_key)


def reading(card: SimDevice) -> Reading:
    return Reading(devices=(card.read(),))


def used_bytes(card: SimDevice) -> int:
    return card.read().used_bytes or 0


class FakeEngine:
    """A fake that runs."""

    def __init__(self, kind: str, url: str, process: subprocess.Popen[Any]) -> None:
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


@contextmanager
def fake_engine(kind: str, card: SimDevice, *faults: str, path: Path | None = None) -> Iterator[FakeEngine]:
    arguments = [kind, "--card", str(card.directory), *(part for fault in faults for part in ("--fault", fault))]
    arguments += ["--socket", str(path)] if path else []
    command = [sys.executable, "-m", "tests.engines.fake_engine", *arguments]
    ours, its = socketpair()  # it ends with this process
    with ours, its, Fork(command, stdin=its, stdout=subprocess.PIPE, text=True) as process:
        its.close()
        assert process.stdout is not None
        try:
            yield FakeEngine(kind, process.stdout.readline().strip(), process)
        finally:
            process.kill()
