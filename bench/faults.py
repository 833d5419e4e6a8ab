"""Recovery from a crash in the driver, and duration of SIGTERM in each state of the driver and with thousands of slow
connections.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.result import publish
from gpumond.host.machine import MAX_CONNECTIONS, max_http_connections_per_user
from gpumond.programs.agent_connection import SocketLimits
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import RunningDaemon, until

CRASHES = 10
CONNECTIONS, AGENTS = 5_000, 4_000
TIMES = 5

HOST = b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SLOW = (
    b"GET /metrics" + HOST + b"X: ",
    b"POST /api/v1/rules/preview" + HOST + b"Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n{",
    b"GET /api/v1/events" + HOST + b"\r\n",
    b"GET /openapi.json" + HOST + b"\r\n",
)
"""An incomplete head, an incomplete body, an unread stream, an unread answer."""


@contextmanager
def slow_connections(daemon: RunningDaemon, connections: int, agents: int) -> Iterator[None]:
    """Open connections from hundreds of addresses, each slow in one way of ``SLOW``, and half-open agents."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, connections + agents + 1024), hard))
    port = int(daemon.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(agents):
            agent = stack.enter_context(socket.socket(socket.AF_UNIX))
            agent.setblocking(False)
            agent.connect_ex(str(daemon.socket))
        for number in range(connections):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            connection.bind((f"127.1.{number // 16 // 250}.{number // 16 % 250 + 1}", 0))
            connection.connect_ex(("127.0.0.1", port))
            with contextlib.suppress(OSError):  # it waits to be accepted, or has been rejected
                connection.send(SLOW[number % len(SLOW)])
        yield


def descriptors_at_the_limit(daemon: RunningDaemon) -> int:
    """Return the number of descriptors once one user has the maximum of connections; 0 before."""
    held = descriptors(daemon)
    return held if held > max_http_connections_per_user(MAX_CONNECTIONS) + SocketLimits().pending_per_uid else 0


def descriptors(daemon: RunningDaemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def start(directory: Path, driver: FakeDriver) -> RunningDaemon:
    driver.write()
    return RunningDaemon(directory / "daemon", "--source", "nvml", environ=driver.env)


def crash(directory: Path, library: Path) -> list[float]:
    """Return the seconds from each crash, as the daemon notices it, to newer values."""
    driver = FakeDriver(directory, library, machine(8))
    daemon = start(directory, driver)
    until(lambda: daemon.value("gpumond_driver_up"))
    seconds = []
    for crashes in range(1, CRASHES + 1):
        driver.crash("nvmlDeviceGetMemoryInfo_v2", 1)
        driver.write()
        until(lambda: daemon.value("gpumond_driver_down_reason", reason="crashed"))
        began = time.perf_counter()
        driver.heal()
        driver.devices[1].used_bytes += 4096 * crashes
        driver.write()
        until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="1") == driver.devices[1].used_bytes)
        seconds.append(round(time.perf_counter() - began, 3))
    daemon.stop()
    return seconds


def sigterm(directory: Path, library: Path, state: str) -> dict[str, float]:
    driver = FakeDriver(directory, library, machine(2))
    if state == "hangs in init":
        driver.hang("nvmlInitWithFlags")
        driver.hang("nvmlInit_v2")
    if state == "hangs in shutdown":
        driver.hang("nvmlShutdown")
    daemon = start(directory, driver)
    if state != "hangs in init":
        until(lambda: daemon.value("gpumond_driver_up"))
    if state == "hangs in a call":
        driver.hang()
        driver.write()
        until(lambda: daemon.value("gpumond_driver_responsive") == 0)
    began = time.perf_counter()
    status = daemon.stop()
    return {"exit": status, "seconds": round(time.perf_counter() - began, 2)}


def sigterm_with_slow_connections(directory: Path, library: Path) -> dict[str, float]:
    daemon = start(directory, FakeDriver(directory, library, machine(2)))
    until(lambda: daemon.value("gpumond_driver_up"))
    with slow_connections(daemon, CONNECTIONS, AGENTS):
        held = until(lambda: descriptors_at_the_limit(daemon))
        began = time.perf_counter()
        status = daemon.stop()
        return {"exit": status, "seconds": round(time.perf_counter() - began, 2), "descriptors": held}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        library = build(directory)
        figures: dict[str, object] = {}
        for number, state in enumerate(("idle", "hangs in a call", "hangs in init", "hangs in shutdown")):
            place = directory / str(number)
            place.mkdir()
            figures[f"sigterm, driver {state}"] = sigterm(place, library, state)
        ends = []
        for number in range(TIMES):
            place = directory / f"slow{number}"
            place.mkdir()
            ends.append(sigterm_with_slow_connections(place, library))
        figures[f"sigterm, {CONNECTIONS} slow connections, {AGENTS} half-open agents"] = ends
        place = directory / "crash"
        place.mkdir()
        figures["crash_to_fresh_values_s"] = crash(place, library)
    publish("faults", figures)


if __name__ == "__main__":
    main()
