"""Requests for memory of a user who takes as much as the daemon gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpumond.features.quotas.admissions import MAX_REQUESTS_PER_USER
from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import GIB, Machine

FREE = 140


@pytest.fixture(autouse=True)
def withdrawn(machine: Machine) -> Iterator[list[tuple[int, str]]]:
    """Requests of the test, which are withdrawn after it."""
    asked: list[tuple[int, str]] = []
    yield asked
    for uid, name in asked:
        machine.ask(uid, "DELETE", f"/api/v1/admissions/{name}").text()


def ask(machine: Machine, asked: list[tuple[int, str]], uid: int, gib: int, wait: bool = False) -> dict[str, Any]:
    body = {"need_bytes": gib * GIB, "wait": wait}
    status, answer = machine.ask(uid, "POST", "/api/v1/admissions", body).answer()
    assert status == 200, answer
    asked.append((uid, answer["id"]))
    found: dict[str, Any] = answer
    return found


def test_grants_that_nobody_fills_leave_another_user_a_share(machine: Machine, withdrawn: list[tuple[int, str]]):
    for _ in range(MAX_REQUESTS_PER_USER):
        assert ask(machine, withdrawn, ATTACKER, FREE // MAX_REQUESTS_PER_USER)["state"] == "granted"
    assert ask(machine, withdrawn, VICTIM, 60)["state"] == "granted"


def test_request_that_cannot_fit_keeps_back_no_other_user(machine: Machine, withdrawn: list[tuple[int, str]]):
    machine.driver.devices[0].used_bytes = 100 * GIB
    machine.driver.write()
    until(lambda: machine.daemon.get("devices")[0]["used_bytes"] == 100 * GIB)
    waiting = ask(machine, withdrawn, ATTACKER, 100, wait=True)
    assert (waiting["state"], waiting["missing_bytes"] > 0) == ("waiting", True)
    assert ask(machine, withdrawn, VICTIM, 20)["state"] == "granted"
    assert ask(machine, withdrawn, ATTACKER, 1)["state"] == "refused", "the user's own requests keep their order"
