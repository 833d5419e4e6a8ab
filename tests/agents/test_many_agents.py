"""Crowds of agents, each a process of its own: none is lost, none costs another, and after a restart all are back."""

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

from bench.swarm import FLOOD_UID, REPORTS, Crowd, Started, stage
from gpumond.agents.server import AgentServer, Limits
from gpumond.host.runtime_directory import bind_agent_socket
from gpumond.metrics import MAX_SERIES
from gpumond.protocol.messages import Hello, Report, encode
from gpumond.testing import make_pool
from tests.fakenvml import FakeDriver
from tests.running import until

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be many users")


@contextmanager
def agents(library: Path, count: int) -> Iterator[tuple[Crowd, FakeDriver, Path]]:
    """Their processes, on the devices of a driver; in a directory that every user can reach."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        with stage(Path(name) / "stage", library, count) as (crowd, driver):
            yield crowd, driver, Path(name) / "stage"


def refused(daemon: Started) -> dict[str, float]:
    """How often agents were refused, by reason."""
    return {
        dict(labels)["reason"]: value
        for (name, labels), value in daemon.series().items()
        if name == "gpumond_agent_rejects_total"
    }


@root
def test_two_hundred_agents_lose_no_report(nvml_library: Path):
    with agents(nvml_library, 200) as (crowd, driver, place):
        daemon = Started(place, driver)
        try:
            counts = crowd.speak(hz=3, seconds=4)
            assert (counts["connected"], counts["replaced"]) == (200, 0)
            assert counts["reports"] >= 200 * 3
            until(lambda: daemon.value(REPORTS) == counts["reports"])
            until(lambda: daemon.agents() == 200)
            assert refused(daemon) == {}
        finally:
            assert daemon.stop() == 0


@root
def test_three_hundred_agents_are_back_after_a_restart(nvml_library: Path):
    with agents(nvml_library, 300) as (crowd, driver, place):
        daemon = Started(place, driver)
        assert crowd.speak(hz=1, seconds=3)["connected"] == 300
        crowd.begin(hz=1, seconds=12)
        daemon.stop()
        daemon = Started(place, driver)
        try:
            until(lambda: daemon.agents() == 300)
            counts = crowd.end()
            assert counts["connected"] == counts["connections"] == 300
            assert refused(daemon) == {}
            assert "Too many open files" not in daemon.log.read_text()
        finally:
            daemon.stop()


@root
def test_a_user_who_floods_costs_another_nothing(nvml_library: Path):
    with agents(nvml_library, 20) as (crowd, driver, place):
        daemon = Started(place, driver)
        try:
            assert crowd.speak(hz=1, seconds=3)["connected"] == 20
            command = [sys.executable, "-S", "-m", "bench.flood", str(daemon.socket), str(FLOOD_UID), "6"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
                until(lambda: refused(daemon).get("rate"))
                honest = crowd.speak(hz=2, seconds=4)
                seen = daemon.series()
                counts = json.loads(flood.communicate()[0])
            assert (honest["connected"], honest["connections"], honest["replaced"]) == (20, 0, 0)
            trains = {labels: value for (name, labels), value in seen.items() if name == "gpumond_agents"}
            assert sum(value for labels, value in trains.items() if "train" in dict(labels)["workload"]) == 20
            assert counts["names"] > 10_000
            assert len(seen) < MAX_SERIES
            assert refused(daemon)["crowd"] > 0
            assert len(daemon.log.read_text().splitlines()) < 300
        finally:
            assert daemon.stop() == 0


def test_a_hundred_agents_of_one_user_lose_no_report(tmp_path: Path):
    """In one process, which needs no privilege."""
    heard: Counter[str] = Counter()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = bind_agent_socket(tmp_path / "agent.sock", 0o600)
        intake = AgentServer(
            listener,
            limits=Limits(frames_per_second=10**6),
            reported=lambda count: heard.update(report=count),
            rejected=lambda reason: heard.update([reason]),
        )
        intake.serve()
        with ExitStack() as stack:
            crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
            for agent in crowd:
                agent.setblocking(False)
                agent.connect(str(tmp_path / "agent.sock"))
            for turn in range(20):
                said = [encode(Hello("train"))] * (turn == 0) + [encode(Report(pools=(make_pool(live=turn),)))]
                await asyncio.gather(*(loop.sock_sendall(agent, b"".join(said)) for agent in crowd))
            while heard.total() < 2000:
                intake.reports()
                await asyncio.sleep(0.01)
        intake.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert heard == {"report": 2000}
