"""What conftest.py promises: nothing starts without the programs that a test needs, and no process is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forks import Fork
from tests.helpers.running import until

MODULE = """
import subprocess
import pytest
from tests.helpers.forks import Fork

@pytest.fixture
def started():
    subprocess.Popen(["sleep", "601"])
    raise AssertionError("a fixture was set up")

@pytest.mark.needs("promtool", "no-such-program")
def test_that_needs_a_program(started):
    pass

def test_that_does_not_say_what_it_needs():
    with pytest.raises(AssertionError, match="starts 'promtool' without a mark"):
        subprocess.run(["promtool", "--version"])

def test_that_leaves_a_process():
    subprocess.Popen(["setsid", "sh", "-c", "sleep 602 & echo $! > pid"]).wait()
    Fork(["python", "-m", "http.server", "--bind", "127.0.0.1", "0"])
"""


def test_absent_program_skips_before_a_start_and_a_left_process_fails_and_ends(tmp_path: Path):
    (tmp_path / "test_module.py").write_text(MODULE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "test_module.py",
    ]
    environ = {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    environ.pop("GPUMOND_TEST_SKIPS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    pid = int((tmp_path / "pid").read_text())
    assert "no-such-program" in done.stdout
    assert "2 passed, 1 skipped" in done.stdout
    assert "1 error" in done.stdout
    assert f"processes were left: {pid} sleep 602; " in done.stdout
    assert "-m http.server --bind 127.0.0.1 0" in done.stdout
    until(lambda: not running(pid))


def running(pid: int) -> bool:
    """Return whether a process has not ended; one that nothing has waited for has."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


def test_fork_has_its_own_arguments_environment_directory_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = "import os, sys; print(sys.argv[1:], os.environ['WORD'], os.getcwd()); sys.exit(3)"
    program = f"import atexit; atexit.register(print, 'end'); {program}"
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    with open("out", "wb") as out:
        assert Fork(["python", "-m", "program", "a", "b"], env={"WORD": "word"}, stdout=out).wait() == 3
    assert Path("out").read_text() == f"['a', 'b'] word {tmp_path}\nend\n"
