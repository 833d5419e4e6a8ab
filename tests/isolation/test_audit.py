"""The audit while one user's agents answer flushes with the maximum of text and pools."""

from __future__ import annotations

import json

from tests.helpers.running import until
from tests.helpers.users import ADMINISTRATOR, ATTACKER
from tests.isolation.machine import Machine

ENTRY_BYTES = 4096
ENTRIES = 20
AGENTS, ALLOCATORS = 8, 24
FLUSHES = 12
"""Number of requests; with the large one, below the limit of a user per minute."""


def test_audit_entries_of_a_users_flushes_are_short_and_evict_no_administrators_entry(machine: Machine):
    for number in range(ENTRIES):
        status, _ = machine.flush(ADMINISTRATOR, target={"workload": f"absent-{number}"}).answer()
        assert status == 404
    agents = [
        machine.agents(
            ATTACKER, workload=f"w{number}", device_uuid=f"GPU-{number}", answer="many", allocators=ALLOCATORS
        )
        for number in range(AGENTS)
    ]
    until(lambda: all(machine.report(agent.pid) for agent in agents))
    machine.flush(ATTACKER, 100, target={"all": True}).answer()
    for _ in range(FLUSHES):
        machine.flush(ATTACKER, target={"workload": "absent"}).answer()
    entries = machine.daemon.get("audit?limit=1000")
    targets = [entry["detail"]["target"] for entry in entries if entry["action"] == "flush.request"]
    assert [f"workload absent-{number}" for number in range(ENTRIES)] == targets[:ENTRIES]
    assert max(len(json.dumps(entry["detail"])) for entry in entries) <= ENTRY_BYTES


def test_receipts_are_for_pools_that_the_agent_reported(machine: Machine):
    agent = machine.agents(ATTACKER, answer="many")
    until(lambda: machine.report(agent.pid))
    status, answer = machine.flush(ATTACKER, target={"pid": agent.pid}).answer()
    assert status == 200
    assert len(answer["receipts"]) <= 1
