"""The real gunicorn, if it is installed: the agent starts in the application, and the workers are forks of it."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumond.facts.messages import Goodbye, Hello, Report
from tests.helpers.agent_daemon import SECONDS, FakeDaemon, environment
from tests.helpers.running import until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gunicorn") is None, reason="needs gunicorn (pip install)")

WORKERS = 4
APPLICATION = """
import os, threading, time
import gpumond.agent
gpumond.agent.start(workload="web")
def app(environ, start_response):
    time.sleep(0.02)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"answered by %d" % os.getpid()]
"""


@contextmanager
def serving(daemon: FakeDaemon, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    (directory / "application.py").write_text(APPLICATION)
    command = [sys.executable, "-m", "gunicorn", "--chdir", os.fspath(directory), "--bind", f"unix:{directory}/web"]
    command += ["--workers", str(WORKERS), *options, "application:app"]
    own = {"HOME": os.fspath(directory), "XDG_RUNTIME_DIR": os.fspath(directory)}  # for a socket of gunicorn's own
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, env=environment(daemon.path, **own), stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def ask(directory: Path) -> int:
    """Return the pid of the worker that answers."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(os.fspath(directory / "web"))
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.0 200"), answer
    return int(answer.rpartition(b" ")[2])


def reporting(daemon: FakeDaemon) -> set[int]:
    return {peer.pid for peer in list(daemon.peers) if not peer.gone and daemon.received(Report, peer.pid)}


@pytest.mark.parametrize("worker", [("sync",), ("gthread", "--threads", "4")], ids=lambda worker: worker[0])
@pytest.mark.parametrize("preload", [("--preload",), ()], ids=["preloaded", "each its own"])
def test_workers_report_serve_reload_and_end(
    daemon: FakeDaemon, tmp_path: Path, worker: tuple[str, ...], preload: tuple[str, ...]
) -> None:
    with serving(daemon, tmp_path, *preload, "--worker-class", *worker) as master:
        many = WORKERS + len(preload)  # the master loads the application, too
        first = daemon.wait(lambda d: pids if len(pids := reporting(d)) == many else None)
        assert (master.pid in first) == bool(preload)
        assert {daemon.wait_message(Hello, pid).workload for pid in first} == {"web"}
        assert {ask(tmp_path) for _ in range(20)} <= first - {master.pid}

        master.send_signal(signal.SIGHUP)
        old = first - {master.pid}
        second = daemon.wait(lambda d: new if len(new := reporting(d) - old) == many else None)
        assert all(daemon.wait_message(Goodbye, pid) for pid in old)
        assert until(lambda: ask(tmp_path) in second)

        master.terminate()
        assert master.wait(SECONDS) == 0
        assert all(daemon.wait_message(Goodbye, pid) for pid in second)
    log = (tmp_path / "log").read_text()
    assert "Shutting down" in log
    assert not [line for line in log.splitlines() if "SIGKILL" in line or "TIMEOUT" in line or "Traceback" in line]
