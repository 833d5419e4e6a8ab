"""`gpumond run` of a program whose modules have the names of modules that gpumond imports."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.users import ROOT

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMOND_", "PYTHON"))}
FAILS = "raise RuntimeError('a module of the program')\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual environment with the wheel."""
    place = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.fspath(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = place.glob("*.whl")
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", os.fspath(venv / "bin" / "python"), "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", os.fspath(wheel)], env=ENVIRON, check=True, timeout=100)
    return venv


def python(
    installed: Path, path: Path, *prefix: str, begin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of the virtual environment's Python in ``path``, with ``path`` in PYTHONPATH."""
    code = f"{begin}import sys; print('gpumond.agent' in sys.modules)"
    command = [*prefix, os.fspath(installed / "bin" / "python"), "-c", code]
    environ = {**ENVIRON, "PYTHONPATH": os.fspath(path), "GPUMOND_SOCKET": "/nowhere/agent.sock", **environ}
    return subprocess.run(command, env=environ, cwd=path, capture_output=True, text=True, timeout=60)


def run(installed: Path, path: Path) -> tuple[int, str, str]:
    done = python(installed, path, os.fspath(installed / "bin" / "gpumond"), "run", "--workload", "train", "--")
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", ["argparse", "json", "socket", "signal", "asyncio", "difflib"])
def test_program_with_a_module_named_like_the_standard_librarys_starts(installed: Path, tmp_path: Path, module: str):
    (tmp_path / f"{module}.py").write_text("")
    status, out, errors = run(installed, tmp_path)
    assert (status, errors) == (0, "")
    assert out in ("True\n", "False\n")  # the agent may need that module; the program is not affected


def test_module_typing_of_the_program_is_not_imported_by_the_command(installed: Path, tmp_path: Path):
    (tmp_path / "typing.py").write_text(FAILS)
    status, out, errors = run(installed, tmp_path)
    assert (status, errors) == (0, "")
    assert out in ("True\n", "False\n")


@pytest.mark.parametrize("source", [FAILS, ""])
def test_module_gpumond_of_the_program_is_not_imported_by_the_command(installed: Path, tmp_path: Path, source: str):
    (tmp_path / "gpumond.py").write_text(source)
    status, out, errors = run(installed, tmp_path)
    assert (status, out, errors) == (0, "False\n", "")


@pytest.mark.parametrize("source", [FAILS, ""])
def test_pth_line_is_silent_about_a_module_gpumond_of_the_program(installed: Path, tmp_path: Path, source: str):
    (tmp_path / "gpumond.py").write_text(source)
    done = python(installed, tmp_path, GPUMOND_AGENT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("file", ["__init__", "inject", "agent/__init__", "agent/autostart"])
@pytest.mark.parametrize("started", ["by run", "by the pth line", "by the start file"])
def test_package_gpumond_of_the_program_is_not_imported(installed: Path, tmp_path: Path, file: str, started: str):
    (tmp_path / "gpumond" / "agent").mkdir(parents=True)
    for name in ("__init__", "inject", "agent/__init__", "agent/autostart"):
        (tmp_path / "gpumond" / f"{name}.py").write_text("")
    (tmp_path / "gpumond" / f"{file}.py").write_text("print('mine')\nraise SystemExit(1)\n")
    if started == "by run":
        assert run(installed, tmp_path) == (0, "False\n", "")
        return
    begin = "from _gpumond_start import start; start(); " if started == "by the start file" else ""
    done = python(installed, tmp_path, begin=begin, GPUMOND_AGENT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import os, sys; sys.exit('threading of the program')"])
@pytest.mark.parametrize("started", ["by run", "by the pth line", "by the start file"])
def test_module_of_the_program_that_exits_does_not_end_the_program(
    installed: Path, tmp_path: Path, end: str, started: str
):
    (tmp_path / "threading.py").write_text(f"{end}\n")
    if started == "by run":
        assert run(installed, tmp_path) == (0, "True\n", "")
        return
    begin = "from _gpumond_start import start; start(); " if started == "by the start file" else ""
    done = python(installed, tmp_path, begin=begin, GPUMOND_AGENT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_interrupt_during_the_start_of_the_agent_reaches_the_program(installed: Path, tmp_path: Path):
    (tmp_path / "threading.py").write_text("raise KeyboardInterrupt\n")
    done = python(installed, tmp_path, begin="from _gpumond_start import start; start(); ", GPUMOND_AGENT="1")
    assert done.returncode != 0
    assert done.stdout == ""


def test_package_gpumond_next_to_the_program_is_the_programs(installed: Path, tmp_path: Path):
    program, elsewhere = tmp_path / "program", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (program / "gpumond").mkdir(parents=True)
    (program / "gpumond" / "__init__.py").write_text("mine = True\n")
    (program / "train.py").write_text("import gpumond; print(gpumond.mine)\n")
    command = [os.fspath(installed / "bin" / name) for name in ("gpumond", "python")]
    done = subprocess.run(
        [command[0], "run", "--", command[1], os.fspath(program / "train.py")],
        env=ENVIRON,
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_program_in_the_environment_of_another_installation_has_the_agent(installed: Path, tmp_path: Path):
    program = [sys.executable, "-c", "import sys; print('gpumond.agent' in sys.modules)"]
    command = [os.fspath(installed / "bin" / "gpumond"), "run", "--", *program]
    environ = {**ENVIRON, "GPUMOND_SOCKET": "/nowhere/agent.sock"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("module", ["sitecustomize", "usercustomize"])
def test_sitecustomize_of_the_program_runs_once(installed: Path, tmp_path: Path, module: str):
    (tmp_path / f"{module}.py").write_text("print('started')\n")
    without = python(installed, tmp_path).stdout.count("started")
    status, out, errors = run(installed, tmp_path)
    assert (status, out.count("started"), errors) == (0, without, "")
    assert out.endswith("True\n")
