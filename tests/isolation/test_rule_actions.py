"""A rule's action on a device where one user's program prevents its success."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import GIB, Agents, Machine

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
"""A round takes at most five seconds longer if another program of the device does not answer."""


@pytest.fixture(scope="module")
def settings() -> str:
    return RULES


def check_repeated_flushes(machine: Machine, victim: Agents) -> None:
    """Check that the action flushes the victim repeatedly, and that its flushes never count as failures."""
    until(lambda: victim.flushes() >= FLUSHES, SECONDS)
    _, flushed, rest = until(lambda: note(machine)).rpartition("flushed train: 1.0 GiB released")
    assert flushed
    assert "next attempt" not in rest.partition(";")[0]


def note(machine: Machine) -> str:
    alerts: list[dict[str, Any]] = [alert for alert in machine.daemon.get("alerts") if alert["rule"] == "cached"]
    return " ".join(text for alert in alerts for name, text in alert["annotations"] if name == "action")


def start_victim(machine: Machine) -> Agents:
    """Program that releases one GiB of many at each flush."""
    return machine.agents(VICTIM, listed=True, workload="train", cached_bytes=60 * GIB)


@pytest.mark.parametrize("body", [{"dry_run": True}, {}], ids=["plan", "flush"])
def test_flush_in_progress_of_a_program_prevents_no_other_flush(machine: Machine, body: dict[str, object]):
    own = {"target": {"all": True}, "timeout_seconds": 600, **body}
    silent = machine.agents(ATTACKER, answer="silence", cached_bytes=1)
    machine.attack("flushes", path=str(machine.api), body=own, pause=0.05)
    until(lambda: silent.flushes(dry_run=bool(body)) or silent.flushes())
    check_repeated_flushes(machine, start_victim(machine))


def test_silent_programs_prevent_no_other_flush(machine: Machine):
    machine.agents(ATTACKER, processes=8, answer="silence", cached_bytes=1)
    check_repeated_flushes(machine, start_victim(machine))


def test_negative_release_does_not_count_against_another_user(machine: Machine):
    machine.agents(ATTACKER, answer="gain", cached_bytes=GIB)
    check_repeated_flushes(machine, start_victim(machine))
