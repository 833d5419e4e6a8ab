"""Flushes of one user and of the administrator while another user's agent on the device never answers."""

from __future__ import annotations

import pytest

from tests.helpers.running import until
from tests.helpers.users import ADMINISTRATOR, ATTACKER, VICTIM
from tests.isolation.machine import DEVICE, GIB, Agents, Machine

SECONDS = 10.0
"""A flush takes at most five seconds longer because of another user's program."""
PLAN = {"target": {"all": True}, "dry_run": True, "timeout_seconds": 600}
FLUSH = {"target": {"all": True}, "timeout_seconds": 600}


@pytest.fixture(params=[PLAN, FLUSH], ids=["plan", "flush"])
def victim(request: pytest.FixtureRequest, machine: Machine) -> Agents:
    """Program with a cache, while a flush or plan of the attacker's silent programs is in progress."""
    silent = machine.agents(ATTACKER, processes=3, listed=True, answer="silence", cached_bytes=GIB)
    victim = machine.agents(VICTIM, listed=True, workload="train", cached_bytes=8 * GIB)
    until(lambda: machine.report(victim.pid) and len(machine.daemon.get("agents")) == 4)
    machine.attack("flushes", path=str(machine.api), body=request.param, pause=0.2)
    until(lambda: silent.flushes(dry_run=request.param.get("dry_run", False)))
    return victim


def test_user_can_flush_their_own_programs(machine: Machine, victim: Agents):
    for target in ({"pid": victim.pid}, {"workload": "train"}):
        status, answer = machine.flush(VICTIM, SECONDS, target=target).answer()
        assert status == 200
        assert [receipt["outcome"] for receipt in answer["receipts"]] == ["freed"]
        assert answer["released_bytes"] == GIB


def test_administrator_can_flush_the_other_programs(machine: Machine, victim: Agents):
    for number, target in enumerate(({"device": DEVICE}, {"all": True}), 1):
        request = machine.flush(ADMINISTRATOR, 2 * SECONDS, target=target, timeout_seconds=2)
        until(lambda number=number: victim.flushes() == number, SECONDS)
        status, answer = request.answer()
        assert status in (200, 504)
        outcomes = {receipt["pid"]: receipt["outcome"] for receipt in answer["receipts"]}
        assert outcomes.pop(victim.pid) == "freed"
        assert len(outcomes) == 3
        assert "freed" not in outcomes.values()
