"""The reserve of a quota, and programs that take the name of its workload."""

from __future__ import annotations

import pytest

from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import GIB, Machine


@pytest.fixture(scope="module")
def settings() -> str:
    return f"""
reclaim: all
quotas:
  - name: prod
    match: {{workload: prod, user: "{VICTIM}"}}
    reserve: 30GiB
"""


def reserved(machine: Machine, pid: int) -> str:
    (process,) = (each for each in machine.daemon.get("processes") if each["pid"] == pid)
    quota = process["quota"]
    return str(quota["reserve_quota"]) if quota else ""


def test_program_of_another_user_takes_no_reserve_by_a_name(machine: Machine):
    victim = machine.agents(VICTIM, listed=True, workload="prod", live_bytes=GIB, cached_bytes=60 * GIB)
    attackers = machine.agents(ATTACKER, listed=True, workload="prod", live_bytes=GIB, processes=6)
    until(lambda: len(machine.daemon.get("processes")) == 7)
    until(lambda: all(machine.report(pid) for pid in (victim.pid, *attackers.pids)))
    machine.frames(3)
    assert reserved(machine, victim.pid) == "prod"
    assert {reserved(machine, pid) for pid in attackers.pids} == {""}
    assert victim.flushes() == 0
    status, answer = machine.ask(VICTIM, "POST", "/api/v1/admissions", {"need_bytes": 60 * GIB}).answer()
    assert (status, answer["state"]) == (200, "granted")
