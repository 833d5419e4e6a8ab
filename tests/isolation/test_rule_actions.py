"""A rule's action on a device where one user's program keeps it from succeeding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.isolation.machine import GIB, Agents, Machine
from tests.isolation.users import ATTACKER, VICTIM
from tests.running import until

RULES = """
rules:
  - name: cached
    scope: device
    value: reclaimable_bytes
    above: 0
    action:
      flush: {min_reclaimable: 1}
      cooldown: 1
      max_per_hour: 3600
"""
FLUSHES = 3
SECONDS = 45.0
"""A round takes at most five seconds longer where another program of the device does not answer."""


@pytest.fixture(scope="module")
def settings() -> str:
    return RULES


def is_flushed_all_along(machine: Machine, victim: Agents) -> None:
    """The action flushes the victim again and again, and its flush never counts as a failure."""
    until(lambda: victim.flushes() >= FLUSHES, SECONDS)
    _, flushed, rest = until(lambda: note(machine)).rpartition("flushed train: 1.0 GiB released")
    assert flushed
    assert "next try" not in rest.partition(";")[0]


def note(machine: Machine) -> str:
    alerts: list[dict[str, Any]] = [alert for alert in machine.daemon.get("alerts") if alert["rule"] == "cached"]
    return " ".join(text for alert in alerts for name, text in alert["annotations"] if name == "action")


def a_victim(machine: Machine) -> Agents:
    """A program that gives a GiB back at each flush, out of many."""
    return machine.agents(VICTIM, listed=True, workload="train", cached_bytes=60 * GIB)


@pytest.mark.parametrize("body", [{"dry_run": True}, {}], ids=["plan", "flush"])
def test_a_program_whose_flush_is_under_way_keeps_no_other_from_its_flush(machine: Machine, body: dict[str, object]):
    own = {"target": {"all": True}, "timeout_seconds": 600, **body}
    silent = machine.agents(ATTACKER, answer="silence", cached_bytes=1)
    machine.attack("flushes", path=str(machine.api), body=own, pause=0.05)
    until(lambda: silent.flushes(dry_run=bool(body)) or silent.flushes())
    is_flushed_all_along(machine, a_victim(machine))


def test_programs_that_never_answer_keep_no_other_from_its_flush(machine: Machine):
    machine.agents(ATTACKER, processes=8, answer="silence", cached_bytes=1)
    is_flushed_all_along(machine, a_victim(machine))


def test_a_release_below_zero_does_not_count_against_another_user(machine: Machine):
    machine.agents(ATTACKER, answer="gain", cached_bytes=GIB)
    is_flushed_all_along(machine, a_victim(machine))
