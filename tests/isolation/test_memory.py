"""Memory of the daemon while one user's connections request large answers and never read them."""

from __future__ import annotations

import time

from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import GIB, Machine

BOUND_MIB = 150
SECONDS = 6.0
"""Seconds of the attack in full effect during which the memory is measured."""


def test_memory_is_bounded_when_readers_never_read(machine: Machine):
    machine.agents(ATTACKER, processes=127, full=True, seconds=2.0)
    victim = machine.agents(VICTIM, listed=True, live_bytes=GIB)
    until(lambda: machine.report(victim.pid))
    paths = ["/api/v1/frame", "/metrics"]
    machine.attack("slow_readers", port=machine.port, paths=paths, connections=250, sources=32, requests=1)
    assert most_memory(machine) <= BOUND_MIB
    assert machine.series_of(victim.pid)


def most_memory(machine: Machine) -> float:
    """Return MiB, after some seconds of the attack or as soon as the limit is exceeded."""
    most, end = machine.memory(), time.monotonic() + SECONDS
    while most <= BOUND_MIB and time.monotonic() < end:
        time.sleep(0.1)
        most = max(most, machine.memory())
    return most
