"""`gpumond run`: the agent inside a program that knows nothing of it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.cli.run import INJECT, add_arguments, environment
from gpumond.wire import Hello, Report
from tests.agent.daemon import SECONDS, Daemon, finished, host
from tests.agent.daemon import environment as own_environment

RUN = """
import argparse, sys
from gpumond.cli.run import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run(parser.parse_args()))
"""


def gpumond_run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    environ = own_environment("/nowhere", **environ)
    return subprocess.run(command, env=environ, text=True, capture_output=True, timeout=SECONDS)


def test_a_program_run_so_has_an_agent_with_a_name_and_a_policy(daemon: Daemon) -> None:
    environ = environment(own_environment(daemon.path), "train/a", "step")
    with host("import sys; print(sys.stdin.read())", environ) as process:
        assert daemon.wait_message(Hello, process.pid).workload == "train/a"
        assert daemon.wait_message(Report).flush_policy == "step"
        assert finished(process) == "\n"


def test_programs_that_it_starts_have_one_too(daemon: Daemon) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    with host(code, environment(own_environment(daemon.path), "train", None)) as process:
        daemon.wait(lambda d: True if len({p.pid for p in d.peers if p.messages}) == 2 else None)
        finished(process)


def test_output_and_exit_code_are_the_commands_own() -> None:
    done = gpumond_run("--workload", "w", "--", sys.executable, "-c", "import sys; print(sys.argv); sys.exit(5)", "--x")
    assert (done.stdout, done.stderr, done.returncode) == ("['-c', '--x']\n", "", 5)


def test_the_command_dies_of_a_broken_pipe_as_it_would_from_a_shell() -> None:
    done = gpumond_run("--", "grep", "SigIgn", "/proc/self/status")
    assert int(done.stdout.split()[1], 16) >> (signal.SIGPIPE - 1) & 1 == 0


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        ([], 2, "no command given"),
        (["--"], 2, "no command given"),
        (["--workload", "no good", "--", "true"], 2, "workload: expected"),
        (["--", "no-such-command"], 1, "cannot start no-such-command: No such file"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], status: int, line: str) -> None:
    done = gpumond_run(*arguments)
    assert done.returncode == status
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_users_own_search_path_and_sitecustomize_are_kept(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('own', sys.modules['sitecustomize'].__file__)")
    code = "import sys, os, sitecustomize; print(sitecustomize.__file__, sys.path[1], os.environ['PYTHONPATH'])"
    environ = environment(own_environment("/nowhere", tmp_path), None, None)
    own = os.fspath(tmp_path / "sitecustomize.py")
    with host(code, environ) as process:
        assert finished(process).splitlines() == [f"own {own}", f"{own} {tmp_path} {INJECT}{os.pathsep}{tmp_path}"]


@pytest.mark.parametrize("text", ["1 / 0", "import no_such_module"])
def test_errors_of_the_users_own_sitecustomize_show_as_ever(tmp_path: Path, text: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    plain = own_environment("/nowhere", tmp_path)
    seen = [
        subprocess.run([sys.executable, "-c", "print('ran')"], env=environ, capture_output=True, timeout=SECONDS)
        for environ in (plain, environment(plain, None, None))
    ]
    assert (seen[0].returncode, seen[0].stdout, seen[0].stderr) == (seen[1].returncode, seen[1].stdout, seen[1].stderr)


def test_an_environment_without_gpumond_takes_the_one_that_started_it(daemon: Daemon) -> None:
    """And nothing else from there: its other packages stay out of sight."""
    code = "import os, sys; os.chdir('/'); import sitecustomize; sys.stdin.read(); print(*sys.path, sep='\\n')"
    with host(code, environment(own_environment(daemon.path), "isolated", None), "-S") as process:
        assert daemon.wait_message(Hello, process.pid).workload == "isolated"
        assert os.fspath(Path(INJECT).parents[2]) not in finished(process).splitlines()


def test_without_the_variable_the_injector_does_nothing() -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('gpumond.agent')])"
    environ = environment(own_environment("/nowhere"), None, None) | {"GPUMOND_AGENT": "0"}
    with host(code, environ) as process:
        assert finished(process) == "[]\n"


def test_running_twice_injects_once() -> None:
    once = environment({"PYTHONPATH": "a::b"}, "w", None)
    assert once["PYTHONPATH"] == f"{INJECT}{os.pathsep}a::b"
    assert environment(once, None, None)["PYTHONPATH"] == once["PYTHONPATH"]


def test_options_of_the_command_are_not_ours() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--workload", "w", "python", "train.py", "--workload", "theirs"])
    assert (arguments.workload, arguments.command) == ("w", ["python", "train.py", "--workload", "theirs"])
