"""Scrapes and probes while one user previews rules endlessly without a token."""

from __future__ import annotations

from tests.helpers.running import until
from tests.helpers.users import ATTACKER
from tests.isolation.machine import Machine

SCRAPES = 15


def test_previews_prevent_no_scrape_and_no_probe(machine: Machine):
    machine.agents(ATTACKER, processes=20, full=True, seconds=1.0)
    until(lambda: machine.daemon.get("status")["agents"] == 20)
    machine.attack("previews", port=machine.port, clients=60)
    for _ in range(SCRAPES):
        for route in ("/metrics", "/-/healthy"):
            status, _, _ = machine.daemon.request(route)
            assert status == 200
