from __future__ import annotations

import os
import re
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

ANOTHER_PYTHON = re.compile(r"Skipped: \S* ?(needs|requires) Python \d")

LONG = (
    "tests/grafana/test_queries.py",
    "tests/integration/test_container.py",
    "tests/integration/test_systemd.py",
    "tests/cli/test_demo.py",
    "tests/integration/test_chart.py",
    "tests/integration/test_page_windows.py",
    "tests/integration/test_page.py",
    "tests/agent/test_launchers.py",
    "tests/agents/test_many_agents.py",
    "tests/api/test_openapi_fuzz.py",
    "tests/daemon/test_daemon.py",
    "tests/agent/test_fork.py",
    "tests/integration/",
    "tests/isolation/",
    "tests/grafana/",
    "tests/top/test_app.py",
)
"""Beginnings of the paths of files that take half a minute or more, those that mostly wait first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest, so that no worker finishes long after the others."""

    def place(item: pytest.Item) -> int:
        return next((i for i, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG))

    items.sort(key=place)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped where everything is installed, unless it needs another Python."""
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None:
        return  # in an xdist worker: the controller has all reports
    skips = reporter.stats.get("skipped", ())
    skipped = [report for report in skips if not ANOTHER_PYTHON.search(str(report.longrepr))]
    if os.environ.get("GPUMOND_TEST_SKIPS") == "forbidden" and skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for report in skipped:
            reporter.write_line(f"GPUMOND_TEST_SKIPS=forbidden, but skipped: {report.nodeid}: {report.longrepr}")


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
