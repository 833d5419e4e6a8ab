"""``gpumond run --need`` with a real daemon and real programs on a simulated device of 1 GiB."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpumond.features.quotas.admission_client import NO_MEMORY_EXIT_CODE
from gpumond.sim.device import MIB, DeviceSpec, create
from tests.helpers import forks
from tests.helpers.running import RunningDaemon, until

pytestmark = pytest.mark.timeout(300)  # each program starts twice: as gpumond run, then as the command

UUID = "GPU-simulated"
CONTEXT = 256
"""MiB that a program uses besides its allocations."""

PROGRAM = """
import sys
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, SimDevice
allocator = CachingAllocator(SimDevice("DIRECTORY"))
print("started", flush=True)
for line in sys.stdin:
    exec(line)
    print("did", line, end="", flush=True)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], tmp_path: Path) -> RunningDaemon:
    create(tmp_path / "cards" / "card0", DeviceSpec(UUID, 0, "sim", 1024 * MIB))
    environ = {"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")}
    daemon = serve("--source", "sim", "--interval", "0.1s", environ=environ)
    until(lambda: daemon.request("/-/ready")[0] == 200)
    return daemon


@pytest.fixture
def restarted(daemon: RunningDaemon) -> Iterator[Callable[[], RunningDaemon]]:
    """Kill the daemon, and start it again with the same directory and port; stop it after the test."""
    with ExitStack() as running:

        def restart() -> RunningDaemon:
            daemon.process.kill()
            daemon.process.wait()
            environ = {"GPUMOND_SIM_DIR": daemon.environ["GPUMOND_SIM_DIR"]}
            options = ("--source", "sim", "--interval", "0.1s")
            again = RunningDaemon(daemon.directory, *options, environ=environ, url=daemon.url)
            running.enter_context(again)
            until(lambda: again.request("/-/ready")[0] == 200)
            return again

        yield restart


@pytest.fixture
def start(daemon: RunningDaemon, tmp_path: Path) -> Iterator[Start]:
    """Start a program with ``gpumond run`` and these options; kill it at the end."""
    code = PROGRAM.replace("DIRECTORY", os.fspath(tmp_path / "cards" / "card0"))
    with ExitStack() as stack:

        def start(*options: str, command: tuple[str, ...] = (sys.executable, "-c", code)) -> subprocess.Popen[str]:
            process = forks.start(
                [sys.executable, "-m", "gpumond", "run", *options, "--", *command],
                env=daemon.environ,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def first_error(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def do(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert line_of(process) == f"did {line}\n"


def allocate(process: subprocess.Popen[str], mib: int) -> None:
    """Allocate until the program uses this many MiB, its context included."""
    do(process, f"block = allocator.malloc({mib - CONTEXT} * MIB)")


def used(daemon: RunningDaemon, process: subprocess.Popen[str]) -> float | None:
    return daemon.value("gpumond_process_memory_used_bytes", pid=str(process.pid))


def refused(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (NO_MEMORY_EXIT_CODE, "")
    return error


def test_program_starts_if_it_fits_and_counts_before_it_allocates(daemon: RunningDaemon, start: Start):
    first = start("--need", "600MiB")
    assert line_of(first) == "started\n"
    error = refused(start("--need", "600MiB"))
    assert "GPU 0 has 424.0 MiB available, but 600.0 MiB is needed" in error
    assert "176.0 MiB is missing" in error
    allocate(first, 600)
    until(lambda: used(daemon, first) == 600 * MIB)
    second = start("--need", "400MiB")
    assert line_of(second) == "started\n"
    allocate(second, 400)


def test_program_that_ends_without_its_memory_releases_it(daemon: RunningDaemon, start: Start):
    first = start("--need", "600MiB")
    assert line_of(first) == "started\n"
    first.kill()
    first.wait()
    assert line_of(start("--need", "600MiB", "--wait", "30s")) == "started\n"


def test_neighbor_is_flushed_for_a_program_that_waits(daemon: RunningDaemon, start: Start):
    neighbor = start("--workload", "neighbor")
    assert line_of(neighbor) == "started\n"
    do(neighbor, "allocator.free(allocator.malloc(500 * MIB))")
    until(lambda: daemon.value("gpumond_pool_reclaimable_bytes", pid=str(neighbor.pid)) == 500 * MIB)
    error = refused(start("--need", "700MiB"))
    assert f"Flushing neighbor (pid {neighbor.pid}, 500.0 MiB) would make room" in error
    assert "add --wait 10m" in error
    waiting = start("--need", "700MiB", "--wait", "1m")
    assert line_of(waiting) == "started\n"
    allocate(waiting, 700)
    (receipt,) = daemon.get("receipts")
    assert (receipt["pid"], receipt["outcome"], receipt["requested_by"]) == (
        neighbor.pid,
        "freed",
        f"token@uid:{os.geteuid()}",
    )
    assert receipt["requested_for"] == f"pid {waiting.pid}"
    by = f"{pwd.getpwuid(os.geteuid()).pw_name} (token)"
    caller = f"gpumond for pid {waiting.pid}, requested by {by}"
    assert all(caller in daemon.run(command).stdout for command in ("receipts", "events"))
    audit = daemon.run("audit").stdout
    assert f"{by}  automatically requested a flush of pid {neighbor.pid}" in audit
    assert f" for pid {waiting.pid}" in audit


def test_program_that_refuses_flushes_is_not_flushed(daemon: RunningDaemon, start: Start):
    neighbor = start("--flush-policy", "never")
    assert line_of(neighbor) == "started\n"
    do(neighbor, "allocator.free(allocator.malloc(500 * MIB))")
    until(lambda: daemon.value("gpumond_pool_held_bytes", pid=str(neighbor.pid)) == 500 * MIB)
    error = refused(start("--need", "700MiB", "--wait", "1s"))
    assert "432.0 MiB is missing" in error
    assert daemon.get("receipts") == []


def test_programs_start_in_order_and_one_that_is_killed_loses_its_place(daemon: RunningDaemon, start: Start):
    first = start("--need", "1000MiB")
    assert line_of(first) == "started\n"
    second = start("--need", "900MiB", "--wait", "5m")
    assert "MiB available, but 900.0 MiB is needed" in first_error(second)
    third = start("--need", "800MiB", "--wait", "5m")
    assert "number 2 in the queue, behind pid" in first_error(third)
    second.send_signal(signal.SIGKILL)
    first.kill()
    assert line_of(third) == "started\n"


def test_grants_and_places_are_kept_over_a_kill_of_the_daemon(start: Start, restarted: Callable[[], RunningDaemon]):
    first = start("--need", "600MiB")
    assert line_of(first) == "started\n"
    second = start("--need", "500MiB", "--wait", "5m")
    assert "MiB available, but 500.0 MiB is needed" in first_error(second)
    restarted()
    third = start("--need", "100MiB", "--wait", "5m")
    assert "number 2 in the queue, behind pid" in first_error(third)
    first.kill()
    first.wait()
    for process in (second, third):
        assert line_of(process) == "started\n"


def test_reserve_of_a_quota_is_restored_by_flushes(daemon: RunningDaemon, start: Start):
    token = (daemon.directory / "token").read_text().strip()
    quota = {"name": "owner", "match": {"workload": "owner", "user": str(os.getuid())}, "reserve": "800MiB"}
    assert daemon.request("/api/v1/quotas/owner", quota, "PUT", Authorization=f"Bearer {token}")[0] == 200
    owner, neighbor = start("--workload", "owner"), start("--workload", "neighbor")
    for process in (owner, neighbor):
        assert line_of(process) == "started\n"
    do(neighbor, "allocator.free(allocator.malloc(300 * MIB))")
    allocate(owner, CONTEXT + 50)
    until(lambda: daemon.get("receipts"))
    assert daemon.get("receipts")[0]["pid"] == neighbor.pid
    missing = 2 * CONTEXT + 50 + (800 - CONTEXT - 50) - 1024  # both programs and the rest of the reserve
    own = {"pid": str(owner.pid)}
    until(lambda: daemon.value("gpumond_process_reserve_shortage_bytes", **own) == missing * MIB)
    shown = [each["reserve_shortage_bytes"] for each in daemon.get("processes") if each["pid"] == owner.pid]
    assert shown == [missing * MIB]
    text = f"{missing}.0 MiB of the 800.0 MiB reserve of"
    until(lambda: text in " ".join(daemon.run("status", "--wide").stdout.split()))
    error = refused(start("--need", "300MiB"))
    assert "has 0 B available" in error


def test_command_that_cannot_be_started_releases_its_memory(daemon: RunningDaemon, start: Start):
    missing = start("--need", "600MiB", command=("/nonexistent/program",))
    missing.communicate(timeout=30)
    assert missing.returncode == 127
    assert line_of(start("--need", "600MiB")) == "started\n"


WRONG = (
    (("--need", "lots"), 2, "expected a size such as 80GiB"),
    (("--need", "50%"), 2, "expected a size such as 80GiB"),
    (("--need", "1GiB", "--wait", "soon"), 2, "expected a duration"),
    (("--wait", "1m"), 2, "require --need"),
    (("--need", "40"), 2, "expected a unit, as in 40GiB"),
    (("--need", "2GiB"), 1, "2.0 GiB requested, but GPU 0 can provide at most 1.0 GiB"),
    (("--need", "1MiB", "--need-device", "7"), 2, "no GPU '7'"),
)


def test_wrong_options_state_what_is_expected(start: Start):
    for options, status, says in WRONG:
        process = start(*options)
        out, error = process.communicate(timeout=30)
        assert (process.returncode, out) == (status, "")
        assert says in error
