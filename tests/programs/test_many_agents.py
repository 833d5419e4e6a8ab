"""Hundreds of agents, each a process: the daemon loses no report, and all reconnect after a restart."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.swarm import FLOOD_UID, REPORTS, AgentProcesses, SwarmDaemon, start_agents
from gpumond.facts.messages import Hello, Report, encode
from gpumond.host.runtime_directory import bind_agent_socket
from gpumond.metrics.exposition import MAX_SERIES
from gpumond.programs.agent_connection import SocketLimits
from gpumond.programs.agent_server import AgentServer
from tests.fakenvml import FakeDriver
from tests.helpers.running import until
from tests.helpers.values import make_pool

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be many users")


@contextmanager
def agents(library: Path, count: int) -> Iterator[tuple[AgentProcesses, FakeDriver, Path]]:
    """Start agent processes and a fake driver, in a directory that every user can reach."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        with start_agents(Path(name) / "stage", library, count) as (processes, driver):
            yield processes, driver, Path(name) / "stage"


def on_rejection(daemon: SwarmDaemon) -> dict[str, float]:
    """Return the counts of rejected agents by reason."""
    return {
        dict(labels)["reason"]: value
        for (name, labels), value in daemon.series().items()
        if name == "gpumond_agent_connections_rejected_total"
    }


@root
def test_reports_of_200_agents_are_all_received(nvml_library: Path):
    with agents(nvml_library, 200) as (processes, driver, place):
        daemon = SwarmDaemon(place, driver)
        try:
            counts = processes.send_reports(hz=3, seconds=4)
            assert (counts["connected"], counts["replaced"]) == (200, 0)
            assert counts["reports"] >= 200 * 3
            until(lambda: daemon.value(REPORTS) == counts["reports"])
            until(lambda: daemon.agents() == 200)
            assert on_rejection(daemon) == {}
        finally:
            assert daemon.stop() == 0


@root
def test_agents_reconnect_after_a_restart_of_the_daemon(nvml_library: Path):
    with agents(nvml_library, 300) as (processes, driver, place):
        daemon = SwarmDaemon(place, driver)
        assert processes.send_reports(hz=1, seconds=3)["connected"] == 300
        processes.start_reports(hz=1, seconds=12)
        daemon.stop()
        daemon = SwarmDaemon(place, driver)
        try:
            until(lambda: daemon.agents() == 300)
            counts = processes.finish_reports()
            assert on_rejection(daemon) == {}
            assert counts["connected"] == counts["connections"] == 300
            assert "Too many open files" not in daemon.log.read_text()
        finally:
            daemon.stop()


@root
def test_flood_of_one_user_does_not_affect_the_agents_of_another(nvml_library: Path):
    with agents(nvml_library, 20) as (processes, driver, place):
        daemon = SwarmDaemon(place, driver)
        try:
            assert processes.send_reports(hz=1, seconds=3)["connected"] == 20
            command = [sys.executable, "-S", "-m", "bench.flood", str(daemon.socket), str(FLOOD_UID), "6"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
                until(lambda: on_rejection(daemon))
                others = processes.send_reports(hz=2, seconds=4)
                series = daemon.series()
                counts = json.loads(flood.communicate()[0])
            assert (others["connected"], others["connections"], others["replaced"]) == (20, 0, 0)
            trains = {labels: value for (name, labels), value in series.items() if name == "gpumond_agents"}
            assert sum(value for labels, value in trains.items() if "train" in dict(labels)["workload"]) == 20
            assert counts["names"] > 1_000  # what a slow machine sends in this time
            assert len(series) < MAX_SERIES
            assert on_rejection(daemon)["crowd"] > 0
            assert len(daemon.log.read_text().splitlines()) < 300
        finally:
            assert daemon.stop() == 0


def test_reports_of_100_agents_in_one_process_are_all_received(tmp_path: Path):
    """Requires no privilege."""
    counts_received: Counter[str] = Counter()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = bind_agent_socket(tmp_path / "agent.sock", 0o600)
        intake = AgentServer(
            listener,
            limits=SocketLimits(messages_per_second=10**6),
            on_reports=lambda count: counts_received.update(report=count),
            on_rejection=lambda reason: counts_received.update([reason]),
        )
        intake.serve()
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
            for agent in connections:
                agent.setblocking(False)
                agent.connect(str(tmp_path / "agent.sock"))
            for number in range(20):
                messages = [encode(Hello("train"))] * (number == 0) + [encode(Report(pools=(make_pool(live=number),)))]
                await asyncio.gather(*(loop.sock_sendall(agent, b"".join(messages)) for agent in connections))
            while counts_received.total() < 2000:
                intake.reports()
                await asyncio.sleep(0.01)
        intake.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert counts_received == {"report": 2000}
