from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.fakenvml import FakeDriver, build
from tests.running import RunningDaemon

hypothesis.settings.register_profile(
    "gpumond", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True
)
hypothesis.settings.load_profile("gpumond")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by the children of a background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

ANOTHER_PYTHON = "Skipped: needs Python "


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped where everything is installed, unless it needs another Python."""
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None:
        return  # in an xdist worker: the controller has all reports
    skipped = [report for report in reporter.stats.get("skipped", ()) if ANOTHER_PYTHON not in str(report.longrepr)]
    if os.environ.get("GPUMOND_TEST_SKIPS") == "forbidden" and skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the fake libnvidia-ml.so.1."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build the fake NVML library")
    return build(tmp_path_factory.mktemp("fakenvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> FakeDriver:
    """Fake NVIDIA driver without devices: fill ``driver.devices``, then call ``driver.write()``."""
    return FakeDriver(tmp_path, nvml_library)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RunningDaemon]]:
    """Start daemons, and stop them after the test."""
    started: list[RunningDaemon] = []

    def start(*options: str, **fields: Any) -> RunningDaemon:
        started.append(RunningDaemon(tmp_path / f"daemon{len(started)}", *options, **fields))
        return started[-1]

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.stop()
