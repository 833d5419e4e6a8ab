"""Flushes of a user who names programs of another user."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import DEVICE, GIB, Machine


@pytest.mark.parametrize("target", [{"pid": 0}, {"workload": "train"}, {"device": DEVICE}, {"all": True}], ids=str)
def test_user_without_a_token_flushes_no_program_of_another_user(machine: Machine, target: dict[str, Any]):
    victim = machine.agents(VICTIM, listed=True, workload="train", cached_bytes=8 * GIB)
    own = machine.agents(ATTACKER, listed=True, workload="train", cached_bytes=8 * GIB)
    until(lambda: machine.report(victim.pid) and machine.report(own.pid))
    if "pid" in target:
        target = {"pid": victim.pid}
    status, answer = machine.flush(ATTACKER, target=target).answer()
    if "pid" in target:
        assert status == 404
    else:
        assert (status, [receipt["pid"] for receipt in answer["receipts"]]) == (200, [own.pid])
    assert victim.flushes() == 0
