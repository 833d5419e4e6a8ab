"""Daemon that shares neither the host's nor the programs' PID namespace, with real namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from gpumond.facts.errors import CONDITION_REMEDIES
from gpumond.facts.messages import Hello, Report, encode
from gpumond.facts.program import MAX_PID
from tests.fakenvml import GIB, MIB, Device, FakeDriver
from tests.helpers.agent_daemon import environment
from tests.helpers.running import RunningDaemon, until
from tests.helpers.values import make_pool

APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
OTHER_USER = 47111
UUID = "GPU-0"
PROGRAM = """
import sys, time
import gpumond.agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import DeviceSpec, create
directory, uuid, name, live = sys.argv[1:]
allocator = CachingAllocator(create(directory, DeviceSpec(uuid, 0, "sim", 1 << 30, context_bytes=0)))
kept, freed = allocator.malloc(int(live) << 20), allocator.malloc(20 << 20)
allocator.free(freed)
gpumond.agent.start(workload=name)
time.sleep(600)
"""
RAW = """
import os, socket, sys
directory, uid, messages = sys.argv[1:]
os.chdir(directory)
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("agent.sock")
    connection.sendall(bytes.fromhex(messages))
    while connection.recv(4096):
        pass
"""


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon], driver: FakeDriver) -> Iterator[RunningDaemon]:
    """Daemon in a PID namespace of its own, with a device of which the driver lists no process."""
    if subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("no new PID namespace may be made here")
    driver.devices = [Device(UUID, used_bytes=GIB)]
    driver.write()
    environ = driver.env | {"GPUMOND_SOCKET_MODE": "0666"}
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=environ, around=APART)
    until(lambda: daemon.request("/-/ready")[0] == 200)
    yield daemon
    daemon.process.kill()  # unshare does not pass other signals on
    daemon.process.wait()


@contextmanager
def program(daemon: RunningDaemon, name: str, live_mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with an agent as the first process of a PID namespace of its own."""
    arguments = [str(daemon.directory / f"device-{name}"), UUID, name, str(live_mib)]
    command = [*APART, sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, env=environment(daemon.socket)) as process:
        try:
            yield process
        finally:
            process.kill()


def agents(daemon: RunningDaemon, count: int) -> dict[str, Any]:
    """Wait until the daemon has so many agents, and return them by workload."""
    until(lambda: len(daemon.get("agents")) == count)
    return {agent["workload"]: agent for agent in daemon.get("agents")}


def kinds(daemon: RunningDaemon) -> list[str]:
    return [condition["kind"] for condition in daemon.get("status")["conditions"]]


def shares(daemon: RunningDaemon) -> dict[int, tuple[int, int]]:
    """Return the live and cached bytes of each process."""
    return {each["pid"]: (each["live_bytes"], each["cached_bytes"]) for each in daemon.get("processes")}


def test_programs_of_other_namespaces_are_listed_and_flushed_by_the_numbers_of_their_connections(
    daemon: RunningDaemon,
):
    with program(daemon, "one", 30), program(daemon, "two", 40):
        found = agents(daemon, 2)
        one, two = found["one"], found["two"]
        assert one["pid"] > MAX_PID < two["pid"] != one["pid"]
        assert [(each["start_ticks"], each["uid"]) for each in (one, two)] == [(None, os.getuid())] * 2
        until(lambda: shares(daemon).get(one["pid"]) == (30 * MIB, 20 * MIB))
        until(lambda: shares(daemon).get(two["pid"]) == (40 * MIB, 20 * MIB))
        frame = daemon.get("frame")
        (device,) = frame["snapshot"]["devices"]
        assert sum(line["used_bytes"] for line in frame["ledger"]["lines"]) == device["used_bytes"]
        status, answer, _ = daemon.flush(target={"pid": one["pid"]})
        assert status == 200
        (receipt,) = answer["receipts"]
        assert (receipt["outcome"], receipt["released_bytes"]) == ("freed", 20 * MIB)
        assert (receipt["pid"], receipt["driver_released_bytes"]) == (one["pid"], None)
        until(lambda: shares(daemon).get(one["pid"]) == (30 * MIB, 0))
        assert shares(daemon)[two["pid"]] == (40 * MIB, 20 * MIB)


def test_status_and_doctor_name_the_programs_and_what_is_unknown_of_them(daemon: RunningDaemon):
    with program(daemon, "one", 30) as process:
        pid = agents(daemon, 1)["one"]["pid"]
        until(lambda: "agent_pid_unknown" in kinds(daemon))
        until(lambda: pid in shares(daemon))
        detail = f"agent_pid_unknown: one (uid {os.getuid()}, connection {pid})"
        for command in ("status", "doctor"):
            output = daemon.run(command).stdout
            assert detail in output
            assert CONDITION_REMEDIES["agent_pid_unknown"] in output
        (own,) = [each for each in daemon.get("processes") if each["pid"] == pid]
        unknown = ("start_ticks", "used_bytes", "overhead_bytes", "comm", "uid", "user", "container", "state")
        assert [own[name] for name in unknown] == [None] * len(unknown)
        process.kill()
        agents(daemon, 0)
        until(lambda: "agent_pid_unknown" not in kinds(daemon))


def test_every_connection_has_its_own_number_and_the_uid_that_the_kernel_states(daemon: RunningDaemon):
    """Three programs claim most of the device each. A claim counts up to the used memory of the device."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run programs as another user")
    messages = encode(Hello("forged")) + encode(Report(pools=(make_pool(UUID, live=90 * GIB, cached=10 * GIB),)))
    command = [sys.executable, "-c", RAW, str(daemon.directory)]
    with ExitStack() as running:
        for uid in (OTHER_USER, OTHER_USER, 0):
            process = running.enter_context(subprocess.Popen([*command, str(uid), messages.hex()]))
            running.callback(process.kill)
        until(lambda: len(daemon.get("agents")) == 3)
        found = daemon.get("agents")
        assert len({agent["pid"] for agent in found}) == 3
        assert sorted(agent["uid"] for agent in found) == [0, OTHER_USER, OTHER_USER]
        until(lambda: len(shares(daemon)) == 3)
        assert all(sum(own) <= GIB for own in shares(daemon).values())
