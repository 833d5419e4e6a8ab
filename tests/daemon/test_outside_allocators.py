"""Memory that no allocator reports or counts, in a daemon over the fake driver library."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gpumond.facts.errors import CONDITION_REMEDIES
from gpumond.facts.messages import Hello, Report, encode, to_json
from gpumond.facts.pools import PoolUsage
from tests.fakenvml import GIB, MIB, Device, FakeDriver, Process
from tests.helpers.agent_daemon import environment, host
from tests.helpers.running import RunningDaemon, until
from tests.helpers.values import make_pool

UUID = "GPU-00000000-1111-2222-3333-444455556666"
CONTEXT = 520 * MIB
OTHER = 3 * GIB
"""Memory of another program, without an agent."""
WRONG = ("memory-freed", "crash", "crash-loop", "leak", "orphan")
PROGRAM = """
import json, select, sys, time
from gpumond.facts.pools import PoolUsage
from gpumond.facts.messages import Hello, Report, from_json
from gpumond.agent.transport import Transport
pools, transport = (), Transport()
while True:
    if not transport.is_connected and transport.connect(SOCKET, time.monotonic()):
        transport.enqueue(Hello("managed"))
    if select.select([sys.stdin], [], [], 0.1)[0]:
        pools = tuple(from_json(PoolUsage, json.dumps(each).encode()) for each in json.loads(sys.stdin.readline()))
    transport.enqueue(Report(pools=pools))
    transport.send_pending(time.monotonic())
    transport.receive(time.monotonic())
"""


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], driver: FakeDriver) -> RunningDaemon:
    driver.devices = [Device(uuid=UUID, used_bytes=200 * MIB, gpu_utilization=0, minor=0)]
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    until(lambda: daemon.request("/api/v1/frame")[0] == 200)
    return daemon


def begin(programs: ExitStack, daemon: RunningDaemon, driver: FakeDriver) -> subprocess.Popen[str]:
    """Start a program with an agent and a context on the device."""
    code = PROGRAM.replace("SOCKET", repr(str(daemon.socket)))
    process = programs.enter_context(host(code, environment(daemon.socket)))
    until(lambda: process.pid in [each["pid"] for each in daemon.get("agents")])
    driver.devices[0].processes.append(Process(process.pid, 0))
    driver.allocate(process.pid, CONTEXT)
    return process


def set_pools(process: subprocess.Popen[str], *pools: PoolUsage) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps([json.loads(to_json(pool)) for pool in pools]) + "\n")
    process.stdin.flush()


def rows(daemon: RunningDaemon, seconds: float = 2.0) -> Iterator[dict[int, dict[str, Any]]]:
    """Yield the processes by pid, in frames whose lines sum to the used bytes, without a fault or a wrong verdict."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        frame = daemon.get("frame")
        (device,) = frame["snapshot"]["devices"]
        assert sum(line["used_bytes"] for line in frame["ledger"]["lines"]) == device["used_bytes"]
        assert [each["overcount_bytes"] for each in frame["ledger"]["overcounts"]] == [0]
        assert frame["snapshot"]["faults"] == []
        assert not [each for each in frame["verdicts"] if each["kind"] in WRONG]
        yield {each["pid"]: each for each in frame["processes"]}
        time.sleep(0.05)


def row(daemon: RunningDaemon, pid: int) -> dict[str, Any]:
    return next((each for each in daemon.get("processes") if each["pid"] == pid), {})


def unattributed(daemon: RunningDaemon) -> int:
    return sum(line["used_bytes"] for line in daemon.get("ledger")["lines"] if line["share"] == "unattributed")


def test_managed_memory_is_that_of_the_program(daemon: RunningDaemon, driver: FakeDriver, programs: ExitStack):
    process = begin(programs, daemon, driver)
    set_pools(process, make_pool(UUID, live=3 * GIB, cached=GIB, allocator="cupy", managed=True))
    driver.allocate(process.pid, 4 * GIB, managed=True)
    until(lambda: row(daemon, process.pid).get("live_bytes") == 3 * GIB)
    for found in rows(daemon):
        own = found[process.pid]
        shares = [own[f"{share}_bytes"] for share in ("used", "live", "cached", "overhead")]
        assert shares == [CONTEXT, 3 * GIB, GIB, CONTEXT]
    assert unattributed(daemon) == 200 * MIB
    (condition,) = [each for each in daemon.get("status")["conditions"] if each["kind"] == "managed_memory"]
    assert condition["detail"] == f"pid {process.pid} (managed): 4.0 GiB is allocated; the part on the GPU is unknown"
    driver.devices[0].used_bytes -= 3 * GIB  # pages move to the host
    driver.write()
    until(lambda: row(daemon, process.pid)["live_bytes"] < 2 * GIB)
    for found in rows(daemon):
        assert found[process.pid]["live_bytes"] == GIB + 200 * MIB
    assert unattributed(daemon) == 0


def test_suspended_program_beside_another(daemon: RunningDaemon, driver: FakeDriver, programs: ExitStack):
    process = begin(programs, daemon, driver)
    other = programs.enter_context(host("import time; time.sleep(600)", environment("/nowhere")))
    driver.devices[0].processes.append(Process(other.pid, 0))
    driver.allocate(other.pid, OTHER)
    set_pools(process, make_pool(UUID, live=8 * GIB, cached=GIB))
    driver.allocate(process.pid, 9 * GIB)
    until(lambda: row(daemon, process.pid).get("live_bytes") == 8 * GIB)
    for _ in range(10):
        driver.checkpoint(process.pid)
        until(lambda: row(daemon, process.pid).get("state") == "suspended")
        for found in rows(daemon, 0.8):
            own = found[process.pid]
            assert (own["used_bytes"], own["unmapped_bytes"], found[other.pid]["opaque_bytes"]) == (0, 9 * GIB, OTHER)
        driver.restore(process.pid)
        until(lambda: row(daemon, process.pid).get("live_bytes") == 8 * GIB)
        for found in rows(daemon, 0.4):
            own = found[process.pid]
            assert (own["live_bytes"], own["cached_bytes"], own["unmapped_bytes"]) == (8 * GIB, GIB, None)


def test_parts_of_the_overhead_of_a_fresh_program(daemon: RunningDaemon, driver: FakeDriver, programs: ExitStack):
    process = begin(programs, daemon, driver)
    until(lambda: row(daemon, process.pid).get("overhead_bytes") is None)
    set_pools(process, make_pool(UUID, live=GIB))
    driver.allocate(process.pid, GIB)
    until(lambda: row(daemon, process.pid).get("overhead_parts") == [["context", CONTEXT], ["other", 0]])
    driver.allocate(process.pid, 100 * MIB)
    until(lambda: row(daemon, process.pid).get("overhead_parts") == [["context", CONTEXT], ["other", 100 * MIB]])
    (line,) = [each for each in daemon.run("status", "-v").stdout.splitlines() if each.startswith("overhead")]
    assert line == f"overhead of managed (pid {process.pid}) on GPU 0: context 520.0 MiB, other 100.0 MiB"


def test_uncounted_pool_has_a_share_and_a_remedy_everywhere(serve: Callable[..., RunningDaemon], driver: FakeDriver):
    driver.devices = [Device("GPU-0", used_bytes=6 * GIB, processes=[Process(os.getpid(), 5 * GIB)])]
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    pool = make_pool("GPU-0", allocator="rmm", live_bytes=None, held_bytes=4 * GIB)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(str(daemon.socket))
        agent.sendall(encode(Hello("etl")) + encode(Report(frameworks=("rmm 26.10.00",), pools=(pool,))))
        until(lambda: [each for each in daemon.get("processes") if each["opaque_bytes"] == 4 * GIB])
        (process,) = daemon.get("processes")
        shares = [process[f"{name}_bytes"] for name in ("live", "cached", "stranded", "overhead", "opaque")]
        assert shares == [None, None, None, GIB, 4 * GIB]
        frame = daemon.get("frame")
        assert sum(line["used_bytes"] for line in frame["ledger"]["lines"]) == 6 * GIB
        (reported,) = daemon.get("agents")[0]["pools"]
        assert (reported["live_bytes"], reported["held_bytes"]) == (None, 4 * GIB)
        labels = {"uuid": "GPU-0", "gpu": "0", "workload": "etl", "pid": str(os.getpid()), "allocator": "rmm"}
        assert daemon.value("gpumond_pool_held_bytes", **labels) == 4 * GIB
        assert daemon.value("gpumond_pool_live_bytes", **labels) is None
        assert daemon.value("gpumond_device_condition", uuid="GPU-0", gpu="0", condition="live_unknown") == 1
        detail = f"pid {os.getpid()} (etl): 4.0 GiB in rmm can't be split into live and free bytes"
        for command in ("status", "doctor"):
            output = daemon.run(command).stdout
            assert detail in output
            assert CONDITION_REMEDIES["live_unknown"] in re.sub(r"(GPUMOND_\w+=\S+ )+", "", output)
        assert daemon.run("top", "--once").returncode == 0
