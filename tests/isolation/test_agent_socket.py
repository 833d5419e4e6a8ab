"""Agents of another user while one user fills the backlog of the agents' socket with silent connections."""

from __future__ import annotations

import os

from tests.isolation.machine import Machine, delays

BOUND_SECONDS = 2.0
"""On a machine that runs nothing else. Other tests that run at the same time extend it in proportion to the load."""


def test_backlog_of_silent_connections_delays_no_other_user(machine: Machine):
    machine.attack("silent_agents", path=str(machine.daemon.socket), connections=4096)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert max(delays(machine)) <= BOUND_SECONDS * max(1.0, load)
