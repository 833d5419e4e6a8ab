"""What a user installs: the package with its data, one line for Python's start, and nothing after it is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOW = "import sys, threading; print('gpumond.agent' in sys.modules, threading.active_count())"

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.fspath(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (built,) = directory.glob("*.whl")
    return built


def test_it_holds_every_file_of_the_package_and_the_line_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gpumond").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == package | {"gpumond.pth"}


def test_installed_it_starts_the_agent_where_the_variable_says_so_and_removed_it_leaves_nothing(
    wheel: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = os.fspath(tmp_path / "bin" / "python")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMOND_", "PYTHON"))}

    def pip(*arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", python, "--quiet", *arguments]
        subprocess.run(command, env=environ, check=True, timeout=100)

    def shows(**more: str) -> str:
        command = [python, "-W", "error", "-c", SHOW]
        done = subprocess.run(command, env=environ | more, capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    pip("install", "--no-deps", "--no-index", os.fspath(wheel))
    assert shows() == "False 1\n"
    assert shows(GPUMOND_AGENT="1", GPUMOND_SOCKET="/nowhere") == "True 2\n"
    pip("uninstall", "--yes", "gpumond")
    assert shows(GPUMOND_AGENT="1") == "False 1\n"
    assert [path for path in tmp_path.rglob("*") if "gpumond" in path.name] == []
