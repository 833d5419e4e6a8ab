from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.users import obstacle
from tests.isolation.machine import Machine


@pytest.fixture(scope="session")
def _users() -> None:
    if reason := obstacle():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def library(nvml_library: Path) -> Iterator[Path]:
    """Directory of the fake libnvidia-ml.so.1, readable by every user."""
    with tempfile.TemporaryDirectory(prefix="gpumond-") as place:
        os.chmod(place, 0o755)
        yield Path(shutil.copy(nvml_library, place))


@pytest.fixture(scope="module")
def start_machine(_users: None, library: Path) -> Iterator[Callable[..., Machine]]:
    """Start machines, and stop them after the module's tests."""
    with contextlib.ExitStack() as stack:

        def start(settings: str = "", around: tuple[str, ...] = (), **environ: str) -> Machine:
            place = tempfile.TemporaryDirectory(prefix="gpumond-", ignore_cleanup_errors=True)
            machine = Machine(Path(stack.enter_context(place)), library, settings, around, **environ)
            stack.callback(machine.close)
            return machine

        yield start


@pytest.fixture(scope="module")
def settings() -> str:
    """Configuration file of the module's machine."""
    return ""


@pytest.fixture(scope="module")
def _machine(start_machine: Callable[..., Machine], settings: str) -> Machine:
    return start_machine(settings)


@pytest.fixture
def machine(_machine: Machine) -> Iterator[Machine]:
    """The module's machine. Programs and attacks end with each test."""
    yield _machine
    _machine.end_programs()
