"""Requests for the limit, the snapshot and the live classes of a program of another user."""

from __future__ import annotations

from typing import Any

from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import GIB, Machine

REQUESTS: dict[str, Any] = {"why": {}, "limit": {"limit_bytes": GIB}, "snapshot": {}}


def test_user_asks_only_own_programs(machine: Machine):
    victim, own = (
        machine.agents(user, listed=True, workload="train", cached_bytes=8 * GIB) for user in (VICTIM, ATTACKER)
    )
    until(lambda: machine.report(victim.pid) and machine.report(own.pid))
    for kind, body in REQUESTS.items():
        status, answer = machine.ask(ATTACKER, "POST", f"/api/v1/agents/{victim.pid}/{kind}", body).answer()
        assert (status, answer["detail"].partition(";")[0]) == (404, f"pid {victim.pid} is another user's program")
        status, answer = machine.ask(ATTACKER, "POST", f"/api/v1/agents/{own.pid}/{kind}", body).answer()
        assert (status, answer["detail"].partition(" has ")[0]) == (409, f"train (pid {own.pid})")  # it answers nothing
    status, _ = machine.ask(ATTACKER, "GET", f"/api/v1/agents/{victim.pid}/snapshots/1").answer()
    assert status == 404
    asked = [each for each in machine.daemon.get("audit") if each["actor"] == f"uid:{ATTACKER}"]
    assert {each["detail"]["pid"] for each in asked} == {own.pid}
