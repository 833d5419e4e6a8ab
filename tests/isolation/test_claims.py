"""Claims of one user's agent about a device on which the driver does not list its process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import DEVICE, GIB, Machine

WORKLOAD = "train"
SIZE = 141 * GIB
FRAMES = 6
RULES = f"""
rules:
  - name: wasted
    scope: device
    value: reclaimable_under_pressure_ratio
    above: 0.01
    action:
      flush: {{min_reclaimable: 1}}
      cooldown: 1
      max_per_hour: 3600
  - name: large
    scope: workload
    value: held_bytes
    above: {20 * GIB}
  - name: small
    scope: workload
    value: held_bytes
    below: {20 * GIB}
"""


@pytest.fixture(scope="module")
def settings() -> str:
    return RULES


def alerts(machine: Machine, rule: str) -> list[dict[str, str]]:
    """Return the labels of the rule's firing alerts."""
    found: list[dict[str, Any]] = machine.daemon.get("alerts")
    return [dict(alert["labels"]) for alert in found if alert["rule"] == rule and alert["phase"] == "firing"]


def run_out_of_memory(machine: Machine, uid: int, **options: Any) -> None:
    """Count out-of-memory errors in a program of a user."""
    agent = machine.agents(uid, ooms=0, **options)
    until(lambda: machine.report(agent.pid))
    for ooms in (1, 2):
        agent.change(ooms=ooms)
        machine.frames(2)


def test_ooms_of_a_program_on_another_device_flush_no_other_user(machine: Machine):
    victim = machine.agents(VICTIM, listed=True, workload=WORKLOAD, cached_bytes=30 * GIB)
    until(lambda: machine.report(victim.pid))
    run_out_of_memory(machine, ATTACKER)
    machine.frames(FRAMES)
    assert victim.flushes() == 0
    assert alerts(machine, "wasted") == []


def test_ooms_of_a_program_on_the_device_flush_programs_of_its_user_only(machine: Machine):
    """The alert states the waste; what one user's programs claim moves no other user's."""
    victim = machine.agents(VICTIM, listed=True, workload=WORKLOAD, cached_bytes=30 * GIB)
    other = machine.agents(ATTACKER, listed=True, cached_bytes=30 * GIB)
    until(lambda: machine.report(victim.pid) and machine.report(other.pid))
    run_out_of_memory(machine, ATTACKER, listed=True)
    until(other.flushes)
    until(lambda: alerts(machine, "wasted"))
    machine.frames(FRAMES)
    assert victim.flushes() == 0


def test_nearly_full_device_flushes_programs_of_all_users(machine: Machine):
    victim = machine.agents(VICTIM, listed=True, workload=WORKLOAD, live_bytes=90 * GIB, cached_bytes=30 * GIB)
    until(victim.flushes)


def test_workload_has_the_bytes_of_one_user(machine: Machine):
    victim = machine.agents(VICTIM, listed=True, workload=WORKLOAD, live_bytes=5 * GIB)
    until(lambda: alerts(machine, "small"))
    attacker = machine.agents(ATTACKER, workload=WORKLOAD, live_bytes=40 * GIB)
    until(lambda: machine.report(attacker.pid))
    machine.frames(FRAMES)
    assert machine.report(victim.pid)
    uid = machine.report(attacker.pid)["uid"]  # type: ignore[index]
    assert [labels for labels in alerts(machine, "large") if labels.get("uid") != str(uid)] == []
    assert [labels for labels in alerts(machine, "small") if labels.get("uid") != str(uid)] != []


def test_claim_of_the_whole_device_does_not_change_the_ledger(machine: Machine):
    """The driver lists another program, so its list is complete."""
    victim = machine.agents(VICTIM, listed=True, live_bytes=GIB)
    until(lambda: held(machine, victim.pid) == GIB)
    machine.driver.devices[0].used_bytes = 40 * GIB
    machine.driver.write()
    until(lambda: unattributed(machine) == 39 * GIB)
    attacker = machine.agents(ATTACKER, allocators=8, live_bytes=SIZE - GIB)
    until(lambda: machine.report(attacker.pid))
    machine.frames(FRAMES)
    assert unattributed(machine) == 39 * GIB
    assert held(machine, victim.pid) == GIB
    assert held(machine, attacker.pid) == 0


def test_pools_of_a_program_are_limited_to_the_drivers_count(machine: Machine):
    machine.driver.devices[0].used_bytes = 40 * GIB
    attacker = machine.agents(ATTACKER, listed=True, allocators=8, live_bytes=10 * GIB)
    until(lambda: machine.report(attacker.pid))
    machine.frames(FRAMES)
    assert held(machine, attacker.pid) <= 11 * GIB


def lines(machine: Machine) -> list[dict[str, Any]]:
    return [line for line in machine.daemon.get("ledger")["lines"] if line["device_uuid"] == DEVICE]


def unattributed(machine: Machine) -> int:
    return sum(line["used_bytes"] for line in lines(machine) if line["share"] == "unattributed")


def held(machine: Machine, pid: int) -> int:
    return sum(line["used_bytes"] for line in lines(machine) if line["pid"] == pid)
