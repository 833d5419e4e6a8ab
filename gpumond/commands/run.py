"""``gpumond run``: start your unmodified program with the agent."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping

import gpumond.agent
from gpumond.agent.settings import FLUSH_POLICIES, workload_name
from gpumond.cli.arguments import add_option
from gpumond.facts.errors import ConfigError
from gpumond.facts.messages import program_socket

CONNECT_SECONDS = 1.0
INJECT_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(gpumond.agent.__file__)), "inject")

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes for a command that cannot be started, as in sh and env."""
EXIT_CODES_HELP = """exit codes: those of your program, or
  1    the daemon can't be reached or refuses the request (with --need)
  2    usage or configuration error
  75   the memory doesn't become available in time (with --need); your program isn't started
  126  your program can't be executed
  127  your program doesn't exist"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--workload NAME", "workload name under which your program's memory is reported")
    add_option(
        parser,
        "--flush-policy",
        "when the daemon may flush your program: at any time (allow, the default), only in step() (step), or never",
        choices=FLUSH_POLICIES,
    )
    add_option(
        parser, "--borrow", "after a failed RMM allocation, ask the daemon to flush other programs, then try again"
    )
    add_option(
        parser,
        "--suspendable",
        "let the daemon suspend your program while it is idle; SIGCONT or `gpumond resume` resumes it",
    )
    add_option(parser, "--allow-limit", "let `gpumond limit` and quotas limit your program")
    add_option(
        parser,
        "--need SIZE|auto",
        "start your program only if this much GPU memory is available; auto: what earlier runs needed (requires "
        "--workload). Programs that start without --need can still take that memory",
    )
    add_option(parser, "--need-device GPU", "with --need: which GPU, if there are several")
    add_option(parser, "--wait DURATION", "with --need: how long to wait, such as 10m (default: don't wait)")
    add_option(
        parser, "--url URL", "with --need: your daemon's address (default: $GPUMOND_URL, then http://127.0.0.1:9917)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND...", help="your program, with its arguments"
    )
    parser.epilog = f"{parser.epilog or ''}\n\n{EXIT_CODES_HELP}"


def run(arguments: argparse.Namespace) -> int:
    """Replace this process with the command. Returns an exit code only if that fails."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError("no command given; example: gpumond run -- python train.py")
    try:
        environ = environment(
            os.environ,
            arguments.workload,
            arguments.flush_policy,
            borrow=arguments.borrow,
            suspendable=arguments.suspendable,
            allow_limit=arguments.allow_limit,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if arguments.suspendable:  # a thread of the agent waits for it: the main thread may wait for the driver
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
    if arguments.need is None:
        if arguments.wait or arguments.need_device:
            raise ConfigError("--wait and --need-device require --need")
        if sys.stderr is not None and sys.stderr.isatty():  # elsewhere, the output is the program's alone
            _warn_without_daemon()
        return _replace_process(command, environ)
    from gpumond.agent.program_report import rank_and_world_size
    from gpumond.cli import client
    from gpumond.cli.arguments import parse_address
    from gpumond.features.quotas import admission_client as admission

    try:
        url = parse_address(arguments.url or os.environ.get("GPUMOND_URL") or client.DEFAULT_URL)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--url {error}") from None
    wait_seconds, workload = admission.parse_wait(arguments.wait), environ.get("GPUMOND_WORKLOAD", "")
    if arguments.need == admission.AUTO:
        need = admission.auto_need(url, workload, arguments.need_device, rank_and_world_size(environ)[1] or 1)
    else:
        need = admission.parse_size(arguments.need)
    with admission.request_admission(url, need, arguments.need_device, workload, wait_seconds) as admission_id:
        if admission_id is None:
            return admission.NO_MEMORY_EXIT_CODE
        return _replace_process(command, environ | {"GPUMOND_ADMISSION": admission_id})


def _warn_without_daemon() -> None:
    """Print one line if no daemon listens where the agent of the program connects."""
    path = program_socket()
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_SECONDS)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        message = f"no daemon is listening at {path}; your program runs unobserved until you start gpumond serve"
        print(f"gpumond: {message}", file=sys.stderr)
    except OSError:
        pass  # a daemon may listen


def _replace_process(command: list[str], environ: Mapping[str, str]) -> int:
    """Replace this process with the command. Returns an exit code only if that fails."""
    sys.stdout.flush()
    # Python ignores these signals, and the command would inherit the setting.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)
    except (FileNotFoundError, ValueError):  # ValueError: an empty name
        if os.path.exists(command[0]):
            return _fail(f"{command[0]}: the interpreter in its first line doesn't exist", NOT_FOUND)
        return _fail(f"{shlex.quote(command[0])}: command not found", NOT_FOUND)
    except OSError as error:
        return _fail(f"{command[0]}: can't be executed: {error.strerror}", NOT_EXECUTABLE)


def environment(
    environ: Mapping[str, str],
    workload: str | None,
    flush_policy: str | None,
    **allowed: bool,
) -> dict[str, str]:
    """Return the environment that starts the agent in every Python program. Raises ValueError for a bad name.

    ``allowed``: what the program allows: ``borrow``, ``suspendable`` and ``allow_limit``.
    """
    python_path = environ.get("PYTHONPATH", "")
    if INJECT_DIRECTORY not in python_path.split(os.pathsep):
        python_path = f"{INJECT_DIRECTORY}{os.pathsep}{python_path}" if python_path else INJECT_DIRECTORY
    variables = {"GPUMOND_AGENT": "1", "PYTHONPATH": python_path}
    if workload is not None:
        variables["GPUMOND_WORKLOAD"] = workload_name(workload)
    if flush_policy is not None:
        variables["GPUMOND_FLUSH_POLICY"] = flush_policy
    variables |= {f"GPUMOND_{name.upper()}": "1" for name, value in allowed.items() if value}
    return {**environ, **variables}


def _fail(message: str, exit_code: int) -> int:
    print(f"gpumond: {message}", file=sys.stderr)
    return exit_code
