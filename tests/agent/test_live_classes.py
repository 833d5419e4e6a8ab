"""Classes of live bytes: the tests of live_classes.py, in a process that may import PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs PyTorch", allow_module_level=True)

TESTS = Path(__file__).with_name("live_classes.py")


def test_live_classes_of_pytorch() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, env=environ, cwd=TESTS.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
