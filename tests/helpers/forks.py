"""Processes forked from one that has imported what they need: the start of Python takes longer than most tests.

They have their own arguments, environment, directory and streams. /proc shows the command line and the environment of
the process from which they are forked.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, recv_fds, send_fds, socket, socketpair
from typing import IO, ClassVar

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "gpumond.commands.serve",
    "gpumond.config.loading",
    "gpumond.daemon.server",
    "gpumond.features.alerts.actions",
    "gpumond.features.alerts.outbox",
    "gpumond.features.engines.poller",
    "gpumond.features.flush.alertmanager",
    "gpumond.features.oom.case_file",
    "gpumond.features.quotas.borrow",
    "gpumond.features.suspend.helper",
    "gpumond.view.html_report",
    "tests.engines.fake_engine",
)
"""Modules that are imported before a fork."""
AT_START = ("PYTHON", "LD_PRELOAD", "LC_", "LANG", "NODE_NAME", "TZ")
"""Beginnings of variables that have an effect at the start of a process only."""
SERVER = """
import json, os, runpy, select, sys
from contextlib import suppress
from importlib import import_module
from socket import recv_fds, send_fds, socket

for name in sys.argv[1:]:
    import_module(name)
requests = socket(fileno=os.dup(0))
running = {}
while True:
    for ready in select.select([requests, *running], [], [])[0]:
        if ready is not requests:
            pid, answers = running.pop(ready)
            status = os.waitpid(pid, 0)[1]
            with suppress(OSError):
                os.write(answers, status.to_bytes(2, "little"))
            os.close(answers)
            os.close(ready)
            continue
        request, descriptors, *_ = recv_fds(requests, 1 << 20, 4)
        if not request:
            os._exit(0)
        answers, *streams = descriptors
        if pid := os.fork():
            own = os.pidfd_open(pid)
            with socket(fileno=os.dup(answers)) as client:
                send_fds(client, [pid.to_bytes(4, "little")], [own])
            running[own] = pid, answers
            for each in streams:
                os.close(each)
            continue
        requests.detach()
        for each, stream in enumerate(streams):
            os.dup2(stream, each)
        os.closerange(3, max(answers, *streams, *running, *(each for _, each in running.values())) + 1)
        module, sys.argv[1:], directory, environ = json.loads(request)
        os.chdir(directory)
        sys.path[0] = directory
        os.environ.clear()
        os.environ.update(environ)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
"""


@cache
def _server() -> tuple[socket, subprocess.Popen[bytes]]:
    """Start the process whose forks are returned, until the tests end."""
    ours, its = socketpair(AF_UNIX, SOCK_SEQPACKET)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUMOND_")}
    environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # as gpumond serve
    command = [sys.executable, "-c", SERVER, *IMPORTED]
    with its:
        return ours, subprocess.Popen(command, cwd=ROOT, env=environ, stdin=its.fileno())


def can_fork(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether a fork has the same effect as this command, which is ``python -m gpumond …`` of this Python."""

    def at_start(given: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in given.items() if name.startswith(AT_START)}

    return [*argv[:3]] == [sys.executable, "-m", "gpumond"] and at_start(environ) == at_start(os.environ)


class Fork:
    """``python -m MODULE ARGUMENTS…``, with the methods of ``subprocess.Popen``."""

    running: ClassVar[set[Fork]] = set()
    """Those whose end was not seen."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        stdin: IO[bytes] | socket | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        """Without ``stdin``, the input is empty."""
        self.args = [sys.executable, "-m", module, *arguments]
        self.returncode: int | None = None
        request = json.dumps([module, arguments, os.getcwd(), dict(os.environ if environ is None else environ)])
        self._answers, its = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with its, open(os.devnull, "rb") as empty:
            streams = (stdin or empty).fileno(), stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2
            send_fds(_server()[0], [request.encode()], [its.fileno(), *streams])
        answer, (self._descriptor,), *_ = recv_fds(self._answers, 4, 1)
        self.pid = int.from_bytes(answer, "little")
        self.running.add(self)

    @classmethod
    def left(cls) -> dict[int, str]:
        """Return the command lines of those that run, by their pids."""
        return {each.pid: " ".join(each.args) for each in [*cls.running] if each.poll() is None}

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            status = self._answers.recv(2)
            assert status, "the process from which others are forked has ended"
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
            self._answers.close()
            os.close(self._descriptor)
            self.running.discard(self)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
