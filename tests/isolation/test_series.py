"""Series of one user's program while another user's agents report the maximum of pools."""

from __future__ import annotations

from tests.helpers.agents import full_report
from tests.helpers.running import until
from tests.helpers.users import ATTACKER, VICTIM
from tests.isolation.machine import DEVICE, GIB, Machine

FRAMES = 3
MAX_POOLS = 64


def test_user_with_many_pools_displaces_no_series_of_another(machine: Machine):
    victim = machine.agents(VICTIM, listed=True, workload="train", cached_bytes=GIB, ooms=0, allocators=2)
    until(lambda: machine.report(victim.pid))
    machine.frames(3)
    before = machine.series_of(victim.pid)
    assert len(before) > 10
    machine.agents(ATTACKER, processes=127, full=True, seconds=2.0)
    until(lambda: machine.daemon.get("status")["agents"] == 128, 60)
    for _ in range(FRAMES):
        machine.frames(1)
        assert before - machine.series_of(victim.pid) == {}


def test_pools_beyond_the_bound_are_summed_as_other(machine: Machine):
    attacker = machine.agents(ATTACKER, listed=True, full=True, live_bytes=GIB)
    pools = until(lambda: (machine.report(attacker.pid) or {}).get("pools"))
    assert len(pools) <= MAX_POOLS
    assert "other" in [pool["allocator"] for pool in pools]
    held = 2 * full_report(DEVICE, 0).count(b'"allocator"')
    assert sum(pool["held_bytes"] for pool in pools) == held
