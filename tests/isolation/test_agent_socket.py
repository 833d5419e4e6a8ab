"""Agents of another user while one user fills the backlog of the agents' socket with silent connections."""

from __future__ import annotations

import json
import os

from tests.isolation.machine import Machine
from tests.isolation.users import VICTIM, start

BOUND_SECONDS = 2.0
"""On a machine that runs nothing else. Other tests that run at the same time extend it in proportion to the load."""
REPORTS = 5


def test_backlog_of_silent_connections_delays_no_other_user(machine: Machine):
    machine.attack("silent_agents", path=str(machine.daemon.socket), connections=4096)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert max(delays(machine)) <= BOUND_SECONDS * max(1.0, load)


def delays(machine: Machine) -> list[float]:
    """Return the seconds from each connection of the victim until the daemon has its first report."""
    process = start(VICTIM, "tests.isolation.first_report", str(machine.daemon.socket), str(REPORTS))
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, "a report was not heard within 10 s"
    found: list[float] = json.loads(out)
    return found
