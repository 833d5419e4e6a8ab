"""Real daemon in a subprocess, queried over HTTP."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from tests.helpers import forks

T = TypeVar("T")
D = TypeVar("D", bound="RunningDaemon")
START_SECONDS = 60.0
END_SECONDS = 60.0
_FIRST_PORT = 20_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw10").removeprefix("gw"))
PORTS = cycle(range(_FIRST_PORT, _FIRST_PORT + 1_000))
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def until(condition: Callable[[], T], seconds: float = 60.0, every: float = 0.02) -> T:
    """Wait until the result of the condition is true, and return it.

    ``every``: seconds between the first two calls. Later ones are up to five times as far apart, because a call may be
    a request or a command.
    """
    began = time.monotonic()
    while not (answer := condition()):
        waited = time.monotonic() - began
        assert waited < seconds, "the condition did not come true in time"
        time.sleep(min(5 * every, max(every, waited / 10)))
    return answer


def free_port() -> int:
    """Return a port that stays free until its use: another worker has other ports, and clients get higher ones."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def series_of(page: bytes) -> Series:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


class RunningDaemon:
    """``gpumond serve`` with its own socket and port, below ``directory``."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        environ: Mapping[str, str] | None = None,
        command: str = "serve",
        around: Sequence[str] = (),
        python: str = sys.executable,
        url: str = "",
    ):
        """``around`` is a command that runs the daemon's command; ``python`` is the interpreter of the daemon. ``url``
        is that of a previous daemon, whose port this one uses.
        """
        self.directory = directory
        directory.mkdir(mode=0o755, exist_ok=True)
        self.socket = directory / "agent.sock"
        self.url = url or f"http://127.0.0.1:{free_port()}"
        self.log = directory / "log"
        argv = [*around, python, "-m", "gpumond", command, "--listen", self.url.removeprefix("http://")]
        if command == "demo" and "--devices" not in options and "--sim-device" not in options:
            argv += ["--devices", "1"]
        argv += ["--socket", str(self.socket), "--state-dir", str(directory / "state"), *options]
        self.environ = {**os.environ, **(environ or {}), "GPUMOND_SOCKET": str(self.socket), "GPUMOND_URL": self.url}
        with self.log.open("ab") as log:
            self.process = forks.start(argv, env=self.environ, stdout=log, stderr=log)
        try:
            until(lambda: self.process.poll() is not None or self.healthy(), START_SECONDS)
        except AssertionError as error:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{error}: {self.log.read_text()}") from None
        assert self.process.poll() is None, self.log.read_text()

    def healthy(self) -> bool:
        try:
            return self.request("/-/healthy")[0] == 200
        except OSError:
            return False

    def request(
        self, path: str, body: object = None, method: str | None = None, **headers: str
    ) -> tuple[int, bytes, Mapping[str, str]]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        try:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers

    def get(self, route: str) -> Any:
        """Return the answer of a route. A daemon that has not read its devices yet is asked again, as it says."""

        def answer() -> tuple[int, bytes] | None:
            status, body, headers = self.request(f"/api/v1/{route}")
            return None if status == 503 and "Retry-After" in headers else (status, body)

        status, body = until(answer)
        assert status == 200, body
        return json.loads(body)

    def flush(self, **body: Any) -> tuple[int, Any, Mapping[str, str]]:
        token = (self.directory / "token").read_text().strip()
        status, answer, headers = self.request("/api/v1/flushes", body, Authorization=f"Bearer {token}")
        return status, json.loads(answer), headers

    def series(self) -> Series:
        """Return every sample of /metrics."""
        return series_of(self.request("/metrics")[1])

    def value(self, name: str, **labels: str) -> float | None:
        """Return the one sample that has this name and at least these labels, or None."""
        required = labels.items()
        lines = [line for line in self.request("/metrics")[1].splitlines() if line.startswith(name.encode())]
        series = series_of(b"\n".join([*lines, b""]))  # a page has thousands of series
        found = [value for (own, own_labels), value in series.items() if own == name and required <= own_labels]
        assert len(found) < 2, f"{name} {labels} is ambiguous"
        return found[0] if found else None

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a gpumond command against this daemon, in a process of its own only if it changes its process."""
        if arguments[0] not in ("doctor", "run", "serve"):
            return gpumond_here(*arguments, **self.environ)
        return forks.run([sys.executable, "-m", "gpumond", *arguments], env=self.environ)

    def stop(self) -> int:
        """End the daemon and return its exit status. It is killed if it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.stop()


def gpumond(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return forks.run([sys.executable, "-m", "gpumond", *arguments], env={**os.environ, **environ})


def gpumond_here(*arguments: str, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, without the start of one. An exception of the command is one of the test."""
    from gpumond.commands.main import main

    given, out, err = (io.TextIOWrapper(io.BytesIO(content), "utf-8") for content in (stdin, b"", b""))
    before, own = dict(os.environ), sys.stdin
    os.environ.update(environ)
    sys.stdin = given
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin = own
        os.environ.clear()
        os.environ.update(before)
    for stream in (out, err):
        stream.seek(0)
    return subprocess.CompletedProcess(("gpumond", *arguments), status, out.read(), err.read())
