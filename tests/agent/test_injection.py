"""`gpumond run`: the agent in a program that does not import it."""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.commands.run import INJECT_DIRECTORY, add_arguments, environment
from gpumond.facts.messages import Hello, Report
from tests.helpers.agent_daemon import SECONDS, FakeDaemon, environment as own_environment, finished, host

RUN = """
import sys
from gpumond.commands.main import main
sys.exit(main(["run", *sys.argv[1:]]))
"""


def gpumond_run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    environ = own_environment("/nowhere", **environ)
    return subprocess.run(command, env=environ, text=True, capture_output=True, timeout=SECONDS)


def test_run_program_has_an_agent_with_name_and_policy(daemon: FakeDaemon) -> None:
    environ = environment(own_environment(daemon.path), "train/a", "step")
    with host("import sys; print(sys.stdin.read())", environ) as process:
        assert daemon.wait_message(Hello, process.pid).workload == "train/a"
        assert daemon.wait_message(Report).flush_policy == "step"
        assert finished(process) == "\n"


def test_child_programs_of_a_run_program_have_an_agent(daemon: FakeDaemon) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    with host(code, environment(own_environment(daemon.path), "train", None)) as process:
        daemon.wait(lambda d: True if len({p.pid for p in d.peers if p.messages}) == 2 else None)
        finished(process)


def test_output_and_exit_code_are_those_of_the_command() -> None:
    done = gpumond_run("--workload", "w", "--", sys.executable, "-c", "import sys; print(sys.argv); sys.exit(5)", "--x")
    assert (done.stdout, done.stderr, done.returncode) == ("['-c', '--x']\n", "", 5)


def test_command_ends_by_sigpipe_as_from_a_shell() -> None:
    done = gpumond_run("--", "grep", "SigIgn", "/proc/self/status")
    assert int(done.stdout.split()[1], 16) >> (signal.SIGPIPE - 1) & 1 == 0


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        ([], 2, "no command given"),
        (["--"], 2, "no command given"),
        (["--workload", " ", "--", "true"], 2, "workload: expected"),
        (["--", "no-such-command"], 127, "no-such-command: command not found"),
        (["--", ""], 127, "command not found"),
        (["--", "/etc/passwd"], 126, "/etc/passwd: can't be executed: Permission denied"),
        (["--", "/"], 126, "/: can't be executed"),
    ],
)
def test_wrong_use_is_one_line_on_stderr(arguments: list[str], status: int, line: str) -> None:
    done = gpumond_run(*arguments)
    assert done.returncode == status
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_script_whose_interpreter_is_missing_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    done = gpumond_run("--", os.fspath(script))
    assert done.returncode == 127
    assert done.stderr == f"gpumond: {script}: the interpreter in its first line doesn't exist\n"


def test_search_path_and_sitecustomize_of_the_user_are_kept(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('own', sys.modules['sitecustomize'].__file__)")
    code = "import sys, os, sitecustomize; print(sitecustomize.__file__, sys.path[1], os.environ['PYTHONPATH'])"
    environ = environment(own_environment("/nowhere", tmp_path), None, None)
    own = os.fspath(tmp_path / "sitecustomize.py")
    with host(code, environ) as process:
        assert finished(process).splitlines() == [
            f"own {own}",
            f"{own} {tmp_path} {INJECT_DIRECTORY}{os.pathsep}{tmp_path}",
        ]


@pytest.mark.parametrize("text", ["1 / 0", "import no_such_module"])
def test_errors_of_the_users_sitecustomize_are_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    plain = own_environment("/nowhere", tmp_path)
    first, second = (
        subprocess.run([sys.executable, "-c", "print('ran')"], env=environ, capture_output=True, timeout=SECONDS)
        for environ in (plain, environment(plain, None, None))
    )
    assert (first.returncode, first.stdout, first.stderr) == (second.returncode, second.stdout, second.stderr)


def test_environment_without_gpumond_uses_the_one_that_started_it(daemon: FakeDaemon) -> None:
    """It imports nothing else from there."""
    code = "import os, sys; os.chdir('/'); import sitecustomize; sys.stdin.read(); print(*sys.path, sep='\\n')"
    with host(code, environment(own_environment(daemon.path), "isolated", None), "-S") as process:
        assert daemon.wait_message(Hello, process.pid).workload == "isolated"
        assert os.fspath(Path(INJECT_DIRECTORY).parents[2]) not in finished(process).splitlines()


def test_injector_does_nothing_without_the_variable() -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('gpumond.agent')])"
    environ = environment(own_environment("/nowhere"), None, None) | {"GPUMOND_AGENT": "0"}
    with host(code, environ) as process:
        assert finished(process) == "[]\n"


def test_nested_run_injects_once() -> None:
    once = environment({"PYTHONPATH": "a::b"}, "w", None)
    assert once["PYTHONPATH"] == f"{INJECT_DIRECTORY}{os.pathsep}a::b"
    assert environment(once, None, None)["PYTHONPATH"] == once["PYTHONPATH"]


def test_options_of_the_command_are_passed_to_it() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--workload", "w", "python", "train.py", "--workload", "theirs"])
    assert (arguments.workload, arguments.command) == ("w", ["python", "train.py", "--workload", "theirs"])


def test_injector_is_valid_syntax_in_older_pythons() -> None:
    """A tool that the program calls may run in an older Python, which would report a syntax error on stderr."""
    text = (Path(INJECT_DIRECTORY) / "sitecustomize.py").read_text()
    newer = (ast.AnnAssign, ast.JoinedStr, ast.NamedExpr, ast.Match)
    nodes = list(ast.walk(ast.parse(text)))
    assert not [node for node in nodes if isinstance(node, newer)]
    assert not [node for node in nodes if getattr(node, "annotation", None) or getattr(node, "returns", None)]
    assert "__future__" not in text
    assert text.isascii()  # Python 2 requires it for other encodings


WAITS = "import sys; sys.stdin.read()"


def launched(tmp_path: Path, kind: str) -> list[str]:
    """A command that runs Python in one of the usual ways."""
    (tmp_path / "train.py").write_text(WAITS)
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import subprocess, sys\nsys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)")
    script = tmp_path / "train.sh"
    script.write_text(f'#!/bin/sh\ncd /\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    train = os.fspath(tmp_path / "train.py")
    return {
        "a script": [sys.executable, train],
        "python -m": [sys.executable, "-m", "train"],
        "a shell script": [os.fspath(script), train],
        "sh -c": ["sh", "-c", f"{sys.executable} {train}"],
        "env": ["env", "A=1", sys.executable, train],
        "a launcher": [sys.executable, os.fspath(launcher), train],
        "a launcher of a module": [sys.executable, os.fspath(launcher), "-m", "train"],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["a script", "python -m", "a shell script", "sh -c", "env", "a launcher", "a launcher of a module"],
)
def test_agent_starts_however_python_is_started(daemon: FakeDaemon, tmp_path: Path, kind: str) -> None:
    environ = environment(own_environment(daemon.path, tmp_path), "train", None)
    command = [sys.executable, "-c", RUN, "--", *launched(tmp_path, kind)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        processes = 2 if "launcher" in kind else 1
        daemon.wait(lambda d: True if len({p.pid for p in d.peers if p.messages}) == processes else None)
        assert finished(process) == ""


@pytest.mark.parametrize("options", [["-I"], ["-E"], ["-S"], ["-I", "-S"], ["-s", "-B", "-O"]])
def test_python_that_ignores_its_environment_runs_unchanged(tmp_path: Path, options: list[str]) -> None:
    done = gpumond_run("--", sys.executable, *options, "-c", "print('well'); raise SystemExit(4)")
    assert (done.stdout, done.stderr, done.returncode) == ("well\n", "", 4)


def test_children_in_another_environment_use_the_agent_of_their_parent(daemon: FakeDaemon, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    other = os.fspath(tmp_path / "other" / "bin" / "python")
    absent = subprocess.run([other, "-c", "import gpumond"], capture_output=True, cwd="/", timeout=SECONDS)
    assert absent.returncode == 1
    code = f"import subprocess; subprocess.run([{other!r}, '-c', {WAITS!r}], cwd='/')"
    with host(code, environment(own_environment(daemon.path), "train", None)) as process:
        daemon.wait(lambda d: True if len({p.pid for p in d.peers if p.messages}) == 2 else None)
        finished(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1])
def test_signal_ends_the_program_as_without_the_agent(daemon: FakeDaemon, number: signal.Signals) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    ends = []
    plain = own_environment(daemon.path)
    for environ in (plain, environment(plain, None, None)):
        with host(code, environ, "-X", "no_debug_ranges") as process:  # it may not sleep yet when the signal arrives
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=SECONDS)
            ends.append((process.returncode, out, err))
    assert ends[0] == ends[1]


SITE = "import site, sys, threading; sys.path.insert(0, {0!r}); site.addsitedir({0!r}); "
SITE_3_15 = (
    "import pkgutil, sys, threading; sys.path.insert(0, {0!r}); "
    "[pkgutil.resolve_name(line.strip())() for line in open({0!r} + '/gpumond.start')]; "
)
"""What Python 3.15 does with a .start file (PEP 829)."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Directory with the package and the files that the wheel installs next to it."""
    directory = tmp_path / "site-packages"
    shutil.copytree(Path(__file__).parents[2] / "deploy" / "site-packages", directory)
    (directory / "gpumond").symlink_to(Path(INJECT_DIRECTORY).parents[1])
    return directory


@pytest.mark.parametrize(
    ("environ", "modules", "threads"),
    [({}, [], 1), ({"GPUMOND_AGENT": "0"}, [], 1), ({"GPUMOND_AGENT": "1"}, ["gpumond", "gpumond.agent"], 2)],
)
@pytest.mark.parametrize("start", [SITE, SITE_3_15], ids=["pth", "start"])
def test_start_of_python_starts_the_agent_if_the_variable_is_set(
    site: Path, start: str, environ: dict[str, str], modules: list[str], threads: int
) -> None:
    """The wheel installs both files in the environment's site-packages."""
    loaded = "[m for m in ('gpumond', 'gpumond.agent') if m in sys.modules]"
    code = f"{start.format(os.fspath(site))} print({loaded}, threading.active_count())"
    with host(code, own_environment("/nowhere", **environ), "-I", "-S") as process:
        assert finished(process) == f"{modules} {threads}\n"


@pytest.mark.parametrize("start", [SITE, SITE_3_15], ids=["pth", "start"])
def test_start_of_python_with_a_broken_package_prevents_no_program(site: Path, start: str) -> None:
    (site / "gpumond").unlink()
    shutil.copytree(INJECT_DIRECTORY, site / "gpumond" / "agent" / "inject")
    (site / "gpumond" / "__init__.py").touch()
    autostart = Path(INJECT_DIRECTORY).with_name("autostart.py").read_text()
    (site / "gpumond" / "agent" / "autostart.py").write_text(autostart)
    (site / "gpumond" / "agent" / "__init__.py").write_text("print('loaded'); 1 / 0")
    code = f"{start.format(os.fspath(site))} print('well')"
    with host(code, own_environment("/nowhere", GPUMOND_AGENT="1"), "-I", "-S") as process:
        assert finished(process) == "loaded\nwell\n"


def test_pth_line_and_run_start_one_agent(daemon: FakeDaemon, site: Path) -> None:
    environ = environment(own_environment(daemon.path), "once", None)
    with host(f"{SITE.format(os.fspath(site))} print(threading.active_count()); sys.stdin.read()", environ) as process:
        daemon.wait_message(Report, process.pid)
        assert finished(process) == "2\n"
        assert len(daemon.received(Hello)) == 1
