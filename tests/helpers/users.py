"""Processes of other users of the machine, without capabilities.

Each is a real uid, which requires root: the uids of a range in ``/etc/subuid`` count as one user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVICE, ATTACKER, VICTIM = 41_001, 41_002, 41_003
ADMINISTRATOR = None
"""User who runs the tests: root."""

REQUEST = """
import http.client, json, socket, sys
path, method, route, body, seconds, stream = json.load(sys.stdin)
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.settimeout(seconds)
connection.sock.connect(path)
headers = {"Content-Type": "application/json"} if body is not None else {}
connection.request(method, route, body, headers | ({"Accept": "text/event-stream"} if stream else {}))
answer = connection.getresponse()
print(json.dumps([answer.status, (answer.readline() if stream else answer.read()).decode()]))
"""


def as_user(uid: int | None) -> tuple[str, ...]:
    """Return the command that runs another one as this user; empty for the administrator."""
    if uid is ADMINISTRATOR:
        return ()
    ids = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return ("setpriv", *ids, "--inh-caps=-all", "--bounding-set=-all", "--")


@cache
def python() -> str:
    """Return an interpreter that every user may run: this one, or the system's of the same version if this one is in a
    directory of root.
    """
    own = os.path.realpath(sys.executable)
    done = subprocess.run([*as_user(VICTIM), "test", "-x", own])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return sys.executable if done.returncode == 0 else shutil.which(version, path="/usr/local/bin:/usr/bin") or own


def python_path() -> dict[str, str]:
    """Return the environment variable by which any interpreter finds the modules of this one."""
    packages = (path for path in sys.path if path.endswith("site-packages"))
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *packages])}


@cache
def obstacle() -> str:
    """Return the reason why this machine cannot run processes of other users, or an empty string."""
    if os.geteuid() != 0:
        return "needs root, to run programs of several users"
    agent = "gpumond.facts.messages"
    for uid, module in ((SERVICE, "gpumond.daemon.server"), (ATTACKER, agent), (VICTIM, agent)):
        try:
            command = [*as_user(uid), python(), "-c", f"import {module}"]
            done = subprocess.run(
                command, env={**os.environ, **python_path()}, cwd="/", capture_output=True, text=True, timeout=60
            )
        except OSError as error:
            return f"setpriv: {error.strerror}"
        if done.returncode != 0:
            return f"needs a Python that every user may run: {(done.stderr.splitlines() or ['?'])[-1]}"
    return ""


def start(uid: int | None, module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start ``python -m module`` as a user, with pipes for its input and output."""
    command = [*as_user(uid), python(), "-m", module, *arguments]
    environ = {**os.environ, **python_path()}
    return subprocess.Popen(command, env=environ, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Request:
    """Request of a user over the API's Unix socket, in a process of the user. With ``stream`` it ends after the first
    line.
    """

    def __init__(
        self,
        uid: int | None,
        path: Path,
        method: str,
        route: str,
        body: Any = None,
        seconds: float = 60,
        stream: bool = False,
    ) -> None:
        text = body if body is None or isinstance(body, str) else json.dumps(body)
        self._seconds = seconds
        self._process = subprocess.Popen(
            [*as_user(uid), python(), "-S", "-c", REQUEST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin
        self._process.stdin.write(json.dumps([str(path), method, route, text, seconds, stream]))
        self._process.stdin.close()
        self._process.stdin = None

    def answer(self) -> tuple[int, Any]:
        """Return status and decoded body. Raises AssertionError if there was no answer in time."""
        status, body = self.text()
        return status, json.loads(body) if body else None

    def text(self) -> tuple[int, str]:
        out, errors = self._process.communicate(timeout=self._seconds + 30)
        assert self._process.returncode == 0, (errors.splitlines() or ["no answer"])[-1]
        status, body = json.loads(out)
        return status, body

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
