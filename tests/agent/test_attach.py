"""`gpumond attach`: the agent in a running program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumond import __version__
from gpumond.commands.attach import AttachError, attach
from gpumond.facts.messages import Hello, Report
from tests.helpers.agent_daemon import SECONDS, FakeDaemon, environment, finished, host

PROGRAM = "import sys\nfor path in sys.stdin: exec(open(path.strip()).read(), {})"
"""Executes the files whose paths it receives, as an interpreter with remote execution does."""

NEW_ENOUGH = sys.version_info >= (3, 14)


@pytest.fixture
def program(daemon: FakeDaemon) -> Iterator[subprocess.Popen[str]]:
    with host(PROGRAM, environment(daemon.path)) as process:
        yield process


def send_path(process: subprocess.Popen[str], path: str) -> None:
    assert process.stdin is not None
    process.stdin.write(path + "\n")
    process.stdin.flush()


def attach_directories() -> list[Path]:
    return list(Path(os.environ.get("TMPDIR", "/tmp")).glob("gpumond-attach-*"))


def test_attach_starts_the_agent_under_the_name(daemon: FakeDaemon, program: subprocess.Popen[str]) -> None:
    before = attach_directories()
    started = {"workload": "late/one", "flush_policy": "step"}
    answer = attach(program.pid, started, SECONDS, lambda pid, path: send_path(program, path))
    assert answer == {"version": __version__, "python": sys.version.split()[0]}
    assert daemon.wait_message(Hello, program.pid).workload == "late/one"
    assert daemon.wait_message(Report, program.pid).flush_policy == "step"
    assert attach_directories() == before
    assert finished(program) == ""


def test_failed_start_is_reported_with_its_reason(program: subprocess.Popen[str]) -> None:
    answer = attach(program.pid, {"workload": " "}, SECONDS, lambda pid, path: send_path(program, path))
    assert answer["error"].startswith("ValueError: workload: expected")
    assert finished(program) == ""


def test_attach_to_an_unresponsive_program_times_out(program: subprocess.Popen[str]) -> None:
    with pytest.raises(AttachError, match=r"didn't respond within 0\.1 s") as refused:
        attach(program.pid, {}, 0.1, lambda pid, path: None)
    for path in set(attach_directories()):
        if str(path) in str(refused.value):
            assert (path / "attach.py").exists()  # the program may still read it
            shutil.rmtree(path)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"{", b'"' + b"x" * 100_000 + b'"', b"\xff"])
def test_invalid_answer_is_refused(program: subprocess.Popen[str], text: bytes) -> None:
    def answer_with_text(pid: int, path: str) -> None:
        Path(path).with_name("answer").write_bytes(text)

    with pytest.raises(AttachError, match="response is invalid"):
        attach(program.pid, {}, SECONDS, answer_with_text)


def test_answer_is_not_read_through_a_symbolic_link(program: subprocess.Popen[str]) -> None:
    def answer_with_a_link(pid: int, path: str) -> None:
        Path(path).with_name("answer").symlink_to("/etc/passwd")

    with pytest.raises(AttachError, match="response is invalid"):
        attach(program.pid, {}, SECONDS, answer_with_a_link)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(1, "Operation not permitted"), "CAP_SYS_PTRACE"),
        (RuntimeError("Can't send commands from a Python 3.14 process to a Python 3.13 process"), "Python 3.13"),
        (OSError(3, "No such process"), "No such process"),
    ],
)
def test_refusal_states_reason_and_remedy(program: subprocess.Popen[str], error: Exception, words: str) -> None:
    def fail(pid: int, path: str) -> None:
        raise error

    before = attach_directories()
    with pytest.raises(AttachError, match=words):
        attach(program.pid, {}, SECONDS, fail)
    assert attach_directories() == before


def gpumond_attach(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpumond", "attach", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def test_missing_process_exits_with_3() -> None:
    done = gpumond_attach("4194305")
    assert (done.returncode, done.stderr) == (3, "gpumond: there is no process 4194305\n")


@pytest.mark.skipif(NEW_ENOUGH, reason="needs Python 3.13 or older")
def test_older_python_is_refused_with_an_alternative(program: subprocess.Popen[str]) -> None:
    done = gpumond_attach(str(program.pid))
    assert done.returncode == 1
    assert "attach requires 3.14 or newer" in done.stderr
    assert "gpumond run --" in done.stderr


@pytest.mark.skipif(not NEW_ENOUGH, reason="needs Python 3.14")
def test_attach_starts_the_agent_in_a_real_program(daemon: FakeDaemon) -> None:
    with host("import time\nwhile True: time.sleep(0.01)", environment(daemon.path)) as process:
        done = gpumond_attach(str(process.pid), "--workload", "entered")
        assert (done.returncode, done.stderr) == (0, "")
        assert daemon.wait_message(Hello, process.pid).workload == "entered"
