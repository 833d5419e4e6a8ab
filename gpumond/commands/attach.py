"""``gpumond attach``: start the agent in a running program through the interpreter's debugging interface (PEP 768).

The main thread of the program runs a script file at its next safe point. The result is written to a second file.
Both files are in a directory that belongs to the program's user.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gpumond
from gpumond.agent.settings import FLUSH_POLICIES, workload_name
from gpumond.cli.arguments import DONE, NOTHING_TO_DO, add_option, parse_duration, print_error
from gpumond.facts.errors import ConfigError, GpumondError
from gpumond.facts.messages import printable_text

MAX_RESPONSE_BYTES = 4096
ALTERNATIVE = "start the program with `gpumond run -- COMMAND`, or call gpumond.agent.start() in it"

ATTACH_SCRIPT = """
def _gpumond_attach(package, answer, arguments):
    import threading

    def attach():
        import json, os, sys
        try:
            sys.path.append(package)  # after the program's own entries
            try:
                import gpumond.agent
            finally:
                sys.path.remove(package)
            gpumond.agent.start(**arguments)
            result = {"version": gpumond.__version__, "python": sys.version.split()[0]}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:200]}
        try:
            with open(answer + ".new", "w") as file:
                json.dump(result, file)
            os.replace(answer + ".new", answer)
        except OSError:
            pass

    threading.Thread(target=attach, name="gpumond-attach", daemon=True).start()


_gpumond_attach(*PARAMETERS)
"""

RemoteExec = Callable[[int, str], None]


class AttachError(GpumondError):
    """The agent cannot be started, and the program is unchanged. The message states the cause and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pid",
        type=int,
        metavar="PID",
        help="your program's pid; the program must run the same Python version as gpumond",
    )
    add_option(parser, "--workload NAME", "workload name under which your program's memory is reported")
    add_option(
        parser,
        "--flush-policy",
        "when the daemon may flush your program: at any time (allow, the default), only in step() (step), or never",
        choices=FLUSH_POLICIES,
    )
    add_option(
        parser,
        "--timeout DURATION",
        "how long to wait for your program (default: 10s)",
        type=parse_duration,
        default=10.0,
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.workload is not None:
            arguments.workload = workload_name(arguments.workload)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not os.path.exists(f"/proc/{arguments.pid}"):
        print_error(f"gpumond: there is no process {arguments.pid}")
        return NOTHING_TO_DO
    agent_arguments = {"workload": arguments.workload, "flush_policy": arguments.flush_policy}
    answer = attach(arguments.pid, agent_arguments, arguments.timeout, getattr(sys, "remote_exec", None))
    if problem := answer.get("error"):
        raise AttachError(f"the agent didn't start in process {arguments.pid}: {printable_text(problem)}")
    version, python = printable_text(answer["version"]), printable_text(answer["python"])
    print(f"agent {version} started in process {arguments.pid} (Python {python})")
    return DONE


def attach(
    pid: int, agent_arguments: dict[str, str | None], timeout_seconds: float, remote_exec: RemoteExec | None
) -> dict[str, str]:
    """Return the program's answer. ``agent_arguments``: those of `gpumond.agent.start`. Raises AttachError."""
    if remote_exec is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise AttachError(f"gpumond runs on Python {version}, but attach requires 3.14 or newer; {ALTERNATIVE}")
    uid = _program_uid(pid)
    directory = Path(tempfile.mkdtemp(prefix="gpumond-attach-"))
    try:
        _request_start(pid, directory, uid, agent_arguments, remote_exec)
        answer = _wait_for_answer(directory / "answer", uid, time.monotonic() + timeout_seconds)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if answer is None:  # the program may still read the script
        raise AttachError(
            f"process {pid} didn't respond within {timeout_seconds:g} s. If its main thread is in a long call, the "
            f"agent starts when that call returns. If remote debugging is disabled in it, {ALTERNATIVE}. "
            f"Remove {directory} when the program has exited"
        )
    shutil.rmtree(directory, ignore_errors=True)
    return answer


def _program_uid(pid: int) -> int:
    """Return the program's uid. Raises AttachError if the program cannot read our files."""
    try:
        same_namespace = os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise AttachError(
            f"process {pid} belongs to another user; run gpumond attach as that user or as root"
        ) from None
    if not same_namespace:
        raise AttachError(f"process {pid} runs in a container; run gpumond attach in that container, or {ALTERNATIVE}")
    return uid


def _request_start(
    pid: int, directory: Path, uid: int, agent_arguments: dict[str, str | None], remote_exec: RemoteExec
) -> None:
    package = os.fspath(Path(gpumond.__file__).resolve().parents[1])
    arguments = {name: value for name, value in agent_arguments.items() if value is not None}
    script = directory / "attach.py"
    script.write_text(ATTACH_SCRIPT.replace("PARAMETERS", repr((package, os.fspath(directory / "answer"), arguments))))
    if uid != os.geteuid():
        for path in (script, directory):
            os.chown(path, uid, -1)
    try:
        remote_exec(pid, os.fspath(script))
    except PermissionError:
        raise AttachError(
            f"gpumond has no access to process {pid}; run gpumond attach as root or with CAP_SYS_PTRACE"
        ) from None
    except (OSError, RuntimeError) as error:
        raise AttachError(f"can't attach to process {pid}: {printable_text(error)}; {ALTERNATIVE}") from None


def _wait_for_answer(path: Path, uid: int, deadline: float) -> dict[str, str] | None:
    """Return the program's answer once it is written. Only a small file owned by the program's user is accepted."""
    while not path.is_symlink() and not path.exists():
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            result = file.read(MAX_RESPONSE_BYTES) if stat.S_ISREG(status.st_mode) and status.st_uid == uid else b""
        answer = json.loads(result)
        names = ("error",) if "error" in answer else ("version", "python")
        return {name: str(answer[name]) for name in names}
    except (OSError, ValueError, TypeError, KeyError):
        raise AttachError("the program's response is invalid") from None
