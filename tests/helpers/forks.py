"""Processes forked from one that has imported what they need: the start of Python takes longer than most tests.

They have their own arguments, environment, directory and streams. /proc shows the command line and the environment of
the process from which they are forked. They end after their exit handlers, without freeing what was imported, which
takes longer than most commands.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from locale import getpreferredencoding
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair
from typing import Any, ClassVar

from gpumond.features import FEATURES

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "gpumond.cli.client",
    "gpumond.commands.demo",
    "gpumond.commands.serve",
    "gpumond.config.loading",
    "gpumond.daemon.server",
    "gpumond.features.alerts.action_decisions",
    "gpumond.features.alerts.outbox",
    "gpumond.features.engines.poller",
    "gpumond.features.flush.alertmanager_hook",
    "gpumond.features.oom.case",
    "gpumond.features.quotas.borrow",
    "gpumond.features.suspend.checkpoint_process",
    "gpumond.serve.app",
    "gpumond.view.html_report",
    *sorted(
        {
            f"{feature.package}.{name.partition(':')[0]}"
            for feature in FEATURES
            for name in (*feature.parts, *feature.routes)
        }
    ),
    "tests.engines.fake_engine",
)
"""Modules that are imported before a fork."""
AT_START = ("PYTHON", "LD_", "LC_", "LANG", "NODE_NAME", "TZ")
"""Beginnings of variables that have an effect at the start of a process only."""
OPTIONS = {"cwd", "env", "start_new_session", "stderr", "stdin", "stdout", "text"}
"""Those of ``subprocess.Popen`` that a fork has."""
SERVER = """
import atexit, gc, json, os, runpy, select, sys
from contextlib import suppress
from importlib import import_module
from socket import recv_fds, socket

codes = []

@atexit.register  # the first one is called last, and no modules are freed
def end():
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])

for name in sys.argv[1:]:
    import_module(name)
gc.freeze()  # a collection in a fork would copy these pages
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
            os.write(answers, pid.to_bytes(4, "little"))
            running[os.pidfd_open(pid)] = pid, answers
            for each in streams:
                os.close(each)
            continue
        requests.detach()
        for each, stream in enumerate(streams):
            os.dup2(stream, each)
        os.closerange(3, max(answers, *streams, *running, *(each for _, each in running.values())) + 1)
        module, sys.argv[1:], directory, environ, session = json.loads(request)
        if session:
            os.setsid()
        os.chdir(directory)
        sys.path[0] = directory
        os.environ.clear()
        os.environ.update(environ)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1, errors="backslashreplace")
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            codes.append(0)
        except SystemExit as ended:
            codes.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
            raise
        sys.exit()
"""


@cache
def _server() -> socket:
    """Start the process whose forks are returned, until the tests end."""
    ours, its = socketpair(AF_UNIX, SOCK_SEQPACKET)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUMOND_")}
    environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # as gpumond serve
    command = [sys.executable, "-c", SERVER, *IMPORTED]
    with its:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=its.fileno())

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


def can_fork(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Return whether a fork has the same effect as this command, which is ``python -m gpumond …`` of this Python.

    A bench measures the process that users start: a fork shares memory with its parent, and has its modules.
    """
    if "PYTEST_VERSION" not in os.environ:
        return False
    if [*command[:3]] != [sys.executable, "-m", "gpumond"] or options.keys() - OPTIONS:
        return False
    utf8 = {"PYTHONUTF8": "1"} if getpreferredencoding(False) == "UTF-8" else {}

    def at_start(given: Mapping[str, str]) -> dict[str, str]:
        found = {name: value for name, value in (utf8 | dict(given)).items() if name.startswith(AT_START)}
        if "--source" in command:  # only the child of the daemon loads the library of the driver
            found.pop("LD_LIBRARY_PATH", None)
        return found

    return at_start(options.get("env") or os.environ) == at_start(os.environ)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process as ``subprocess.Popen``, by a fork if that has the same effect."""
    kind: type[subprocess.Popen[Any]] = Fork if can_fork(command, options) else subprocess.Popen
    return kind(command, **options)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, at most a minute, by a fork if that has the same effect. Its output is returned."""
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class Fork(subprocess.Popen[Any]):
    """``python -m MODULE ARGUMENTS…`` as a fork. Executables and what a process does before it starts do not apply."""

    running: ClassVar[set[Fork]] = set()
    """Those whose end was not seen."""

    @classmethod
    def left(cls) -> dict[int, str]:
        """Return the command lines of those that run, by their pids."""
        return {each.pid: " ".join(each._command) for each in [*cls.running] if each.poll() is None}

    def __init__(self, command: Sequence[str], *, start_new_session: bool = False, **options: Any) -> None:
        self._command, self._session = command, start_new_session
        super().__init__(command, **options)

    def _execute_child(
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: object,
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: object,
        shell: object,
        *pipes: int,
    ) -> None:
        _, _, module, *arguments = (os.fspath(each) for each in args)
        pipes = pipes[:6]
        environ = dict(os.environ if env is None else env)
        request = [module, arguments, os.fspath(cwd or os.getcwd()), environ, self._session]
        streams = [own if own >= 0 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._answers, its = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with its:
            send_fds(_server(), [json.dumps(request).encode()], [its.fileno(), *streams])
        answer = self._answers.recv(4)
        assert answer, "the process from which others are forked has ended"
        self.pid = int.from_bytes(answer, "little")
        self._child_created = True
        self.running.add(self)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not select.select([self._answers], [], [], 0 if wait_flags else None)[0]:
            return 0, 0
        status = self._answers.recv(2)
        assert status, "the process from which others are forked has ended"
        self._answers.close()
        self.running.discard(self)
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode
