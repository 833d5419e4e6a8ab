from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.fakenvml import FakeDriver, build
from tests.helpers.forks import Fork
from tests.helpers.running import RunningDaemon, until

hypothesis.settings.register_profile(
    "gpumond", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True
)
hypothesis.settings.load_profile("gpumond")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by the children of a background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "GPUMOND_TEST_PROCESS"
"""Variable in the environment of each process that a test starts."""

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
    "tests/agent/test_torch_objects.py",
    "tests/daemon/test_engines.py",
    "tests/fleet/test_engines.py",
    "tests/suspend/test_cycle.py",
    "tests/daemon/test_suspension.py",
    "tests/engines/test_return.py",
    "tests/programs/test_many_agents.py",
    "tests/serve/test_openapi_fuzz.py",
    "tests/daemon/test_daemon.py",
    "tests/agent/test_fork.py",
    "tests/engines/test_flush.py",
    "tests/integration/",
    "tests/isolation/",
    "tests/grafana/",
    "tests/top/test_app.py",
)
"""Beginnings of the paths of files that take half a minute or more, those that mostly wait first."""


PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "cc": "gcc",
    "man": "man-db",
    "node": "nodejs",
    "promtool": "prometheus",
}
"""Debian's packages of programs, where they have another name."""

OPTIONAL = {
    *("alertmanager", "amtool", "buildah", "cc", "chromium", "chromium-headless-shell", "mmdebstrap", "fish", "gcc"),
    *("google-chrome", "man"),
    *("newuidmap", "node", "npm", "openssl", "podman", "prometheus", "prometheus-alertmanager", "promtool", "rpmbuild"),
    *("runc", "systemd-analyze", "systemd-nspawn", "valgrind", "zsh"),
}
"""Programs that a machine may lack. A test that starts one has a mark `needs` or `skipif`."""

COMPILED = {"nvml_library": "cc", "library": "cc", "cuda_library": "cc"}
"""Fixtures that compile a library."""


STARTING = {"serve", *COMPILED}
"""Fixtures that start processes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest, and skip tests whose programs are not installed.

    Tests that start a process through a fixture or a program are marked as slow.
    """

    def place(item: pytest.Item) -> int:
        return next((i for i, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG))

    items.sort(key=place)  # no worker finishes long after the others
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for name in fixtures & COMPILED.keys():
            item.add_marker(pytest.mark.needs(COMPILED[name]))
        needed = {program for mark in item.iter_markers("needs") for program in mark.args}
        if needed or fixtures & STARTING:
            item.add_marker("slow")
        absent = sorted(program for program in needed if shutil.which(program) is None)
        if absent:
            packages = ", ".join(sorted({PACKAGES.get(program, program) for program in absent}))
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(absent)} (Debian: {packages})"))


running: list[pytest.Item] = []
"""The test that this process is running, or none."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    running.append(item)
    yield
    running.pop()


def check_program(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail a test that starts an optional program and would fail on a machine without it."""
    if event == "subprocess.Popen" and running and Path(os.fsdecode(arguments[0] or "")).name in OPTIONAL:
        item = running[-1]
        if not any(mark.name in ("needs", "skipif") for mark in item.iter_markers()):
            raise AssertionError(f"{item.nodeid} starts {arguments[0]!r} without a mark that says so")


sys.addaudithook(check_program)


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


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail after the last test of a module if a process that they started still runs, and end it."""
    os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    yield
    mark = f"{MARK}={os.environ.pop(MARK)}".encode()
    try:
        until(lambda: not (marked(mark) or Fork.left()), 10)
    except AssertionError:
        left = marked(mark) | Fork.left()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail("processes were left: " + "; ".join(f"{pid} {command}" for pid, command in left.items()))
    if simulated := sys.modules.get("gpumond.sim.allocator"):
        for allocator in simulated.allocators():  # of programs that a test simulated in this process
            allocator.close()


def marked(mark: bytes) -> dict[int, str]:
    """Return the other running processes that have this variable in their environment."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark in environment(directory).split(b"\0") and int(directory.name) != os.getpid():
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def environment(directory: Path) -> bytes:
    """Return a process's environment, which the kernel shows as empty while the process is in execve."""
    written = 0
    while not (found := (directory / "environ").read_bytes()) and written < 50:
        state, *fields = (directory / "stat").read_text().rpartition(") ")[2].split()
        if state in "ZX" or not os.readlink(directory / "exe"):  # a kernel thread has no program
            break
        written += int(fields[-2]) > 0  # its end: execve has come to the environment, or it is empty
        time.sleep(0.001)
    return found


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the fake libnvidia-ml.so.1."""
    return build(tmp_path_factory.mktemp("fakenvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> FakeDriver:
    """Fake NVIDIA driver without devices: fill ``driver.devices``, then call ``driver.write()``."""
    return FakeDriver(tmp_path, nvml_library)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RunningDaemon]]:
    """Start daemons, and stop them after the test."""
    numbers = count()
    with ExitStack() as running:

        def start(*options: str, **fields: Any) -> RunningDaemon:
            directory = tmp_path / f"daemon{next(numbers)}"
            return running.enter_context(RunningDaemon(directory, *options, **fields))

        yield start
