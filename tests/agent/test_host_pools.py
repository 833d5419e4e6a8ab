"""Pinned host memory in reports, apart from the pools of devices."""

from __future__ import annotations

from gpumond.facts.messages import Report
from gpumond.facts.pools import HostPool
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, finished, host

PROGRAM = """
import sys, torch
torch.WORLD.reset(host={statistics})
import gpumond.agent
gpumond.agent.start()
sys.stdin.read()
"""


def test_report_contains_pinned_host_memory(daemon: FakeDaemon) -> None:
    code = PROGRAM.format(statistics={"allocated_bytes": 96, "active_bytes": 64})
    with host(code, environment(daemon.path, FAKES)) as process:
        assert daemon.wait_message(Report).host_pools == (HostPool("torch", 64, 96),)
        assert finished(process) == ""


def test_failing_host_pool_leaves_the_report_complete(daemon: FakeDaemon) -> None:
    code = PROGRAM.format(statistics={"allocated_bytes": "much", "active_bytes": "more"})
    with host(code, environment(daemon.path, FAKES)) as process:
        report = daemon.wait_message(Report)
        assert (report.frameworks, report.host_pools) == (("torch 2.13.0",), ())
        assert finished(process) == ""
