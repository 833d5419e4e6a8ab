"""Contents of the wheel: the package with its data and the files of the start. Removal leaves no files."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpumond import __version__

ROOT = Path(__file__).parents[2]
MANUAL = f"gpumond-{__version__}.data/data/share/man/man1/gpumond.1"
SHOW = "import sys, threading; print('gpumond.agent' in sys.modules, threading.active_count())"

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.fspath(directory)]
    environ = {**os.environ, "GPUMOND_REVISION": "c0ffee"}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, timeout=100)
    (built,) = directory.glob("*.whl")
    return built


def test_wheel_contains_every_file_and_the_pth_line(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = {name for name in names if ".data/scripts/" in name}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gpumond").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names - scripts == package | {
        "gpumond.pth",
        "gpumond.start",
        "_gpumond_start.py",
        MANUAL,
        "gpumond/REVISION",
    }
    assert {os.path.basename(name) for name in scripts} == {"gpumond", "gpumond-python"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the commands of an environment without gpumond."""
    environment = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    return environment / "bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the commands of an environment in which the wheel is installed."""
    environment = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    commands = environment / "bin"
    command = [sys.executable, "-m", "pip", "--python", commands / "python", "--quiet", "install", "--no-deps"]
    subprocess.run([*command, "--no-index", wheel], check=True, timeout=100)
    return commands


def test_installation_states_the_commit_of_its_build(installed: Path) -> None:
    done = subprocess.run([installed / "gpumond", "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"gpumond {__version__} (revision c0ffee)\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("typing.py", "raise RuntimeError"),
        ("argparse.py", "print('own argparse')"),
        ("gpumond.py", "print('own gpumond')"),
        ("sitecustomize.py", "print('own sitecustomize')"),
        ("sitecustomize.py", "import typing; print('own sitecustomize', typing.__file__)"),
        ("usercustomize.py", "print('own usercustomize')"),
    ],
)
@pytest.mark.parametrize("agent", ["run", "line"])
def test_program_with_its_own_modules_runs_as_without_gpumond(
    installed: Path, bare: Path, tmp_path: Path, file: str, text: str, agent: str
) -> None:
    """The modules are on PYTHONPATH; the program runs in an environment with gpumond and without. Each module is
    executed as often.
    """
    own = tmp_path / "own"
    own.mkdir()
    (own / file).write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMOND_", "PYTHON"))}
    environ |= {"PYTHONPATH": os.fspath(own), "GPUMOND_SOCKET": "/nowhere"}
    for python in (installed / "python", bare / "python"):
        program = [python, "-c", "import sys; print('ran', sys.argv)", "--x"]
        with_agent = [installed / "gpumond", "run", "--workload", "w", "--", *program] if agent == "run" else program
        more = {} if agent == "run" else {"GPUMOND_AGENT": "1"}
        plain, carried = (
            subprocess.run(command, env=own_environ, capture_output=True, text=True, timeout=30)
            for command, own_environ in ((program, environ), (with_agent, environ | more))
        )
        assert (carried.stdout, carried.stderr, carried.returncode) == (plain.stdout, plain.stderr, plain.returncode)


@pytest.mark.parametrize("agent", ["run", "line"])
def test_program_next_to_a_module_named_gpumond_imports_that_module(
    installed: Path, tmp_path: Path, agent: str
) -> None:
    (tmp_path / "gpumond.py").write_text("print('own gpumond')")
    (tmp_path / "train.py").write_text("import gpumond; print(gpumond.__file__)")
    program = [installed / "python", tmp_path / "train.py"]
    command = [installed / "gpumond", "run", "--", *program] if agent == "run" else program
    environ = os.environ | {"GPUMOND_AGENT": "1", "GPUMOND_SOCKET": "/nowhere"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == (f"own gpumond\n{tmp_path / 'gpumond.py'}\n", "")


def test_run_works_with_an_installation_on_PYTHONPATH(wheel: Path, tmp_path: Path) -> None:
    """Layout of `pip install --target`, and of environment modules on clusters."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path,
        wheel,
    ]
    subprocess.run(command, check=True, timeout=100)
    environ = os.environ | {"PYTHONPATH": os.fspath(tmp_path), "GPUMOND_SOCKET": "/nowhere"}
    command = [tmp_path / "bin" / "gpumond", "run", "--", "echo", "ran"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("ran\n", "", 0)


def test_installation_starts_the_agent_by_variable_and_its_removal_leaves_no_files(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = os.fspath(tmp_path / "bin" / "python")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMOND_", "PYTHON"))}

    def pip(*arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", python, "--quiet", *arguments]
        subprocess.run(command, env=environ, check=True, timeout=100)

    def shows(**more: str) -> str:
        command = [python, "-W", "error", "-c", SHOW]
        done = subprocess.run(command, env=environ | more, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    pip("install", "--no-deps", "--no-index", os.fspath(wheel))
    assert shows() == "False 1\n"
    assert shows(GPUMOND_AGENT="1", GPUMOND_SOCKET="/nowhere") == "True 2\n"
    (tmp_path / "linked").symlink_to(tmp_path / "bin" / "gpumond")
    for command in (tmp_path / "bin" / "gpumond", tmp_path / "linked"):
        assert subprocess.run([command, "--version"], env=environ, timeout=30).returncode == 0
    (tmp_path / "linked").unlink()
    pip("uninstall", "--yes", "gpumond")
    assert shows(GPUMOND_AGENT="1") == "False 1\n"
    assert [path for path in tmp_path.rglob("*") if "gpumond" in path.name] == []
