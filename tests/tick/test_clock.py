"""Clock changes and suspend: the conclusions about the devices do not change.

Durations use the monotonic clock, which cannot be set. On Linux it stops while a machine is suspended; while a daemon
is stopped (SIGSTOP, a frozen container) it continues. store/test_retention.py tests the store, and
rules/test_prometheus_semantics.py the rules.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumond.facts.snapshot import Snapshot
from gpumond.features.rules.built_in import BUILT_IN
from tests.helpers.agents import GIB
from tests.helpers.values import (
    TickState,
    advance,
    make_device,
    make_fault,
    make_pool,
    make_process,
    make_report,
    make_snapshot,
)

DAY = 86400.0
JUMP_AT, END = 900, 1800
Timeline = list[tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]
"""Second; alerts that began and that ended with it; active verdicts."""


def at(second: int, elapsed: float, taken_at: float) -> Snapshot:
    """Return a device: full from minute 5 to 20, lost from minute 22 to 25, out of memory once before and after the
    jump.
    """
    full, lost = 300 <= second < 1200, 1320 <= second < 1500
    used = (79 if full else 20) * GIB
    device = make_device(used_bytes=used, processes=(make_process(10, used),))
    pool = make_pool(live=18 * GIB, ooms=(second >= 60) + (second >= 1600), retries=0)
    fields = {"elapsed_seconds": elapsed, "taken_at": taken_at, "reports": (make_report(pools=(pool,)),)}
    if lost:
        gone = make_device(up=False, missed_readings=3, size_bytes=None, used_bytes=None, processes=None)
        return make_snapshot(gone, faults=(make_fault("GPU-a"),), **fields)
    return make_snapshot(device, **fields)


def conclusions(wall: Callable[[int], float], monotonic: Callable[[int], float] = float) -> Timeline:
    """Return the conclusions at the second in which they change, for any clock."""
    memory, timeline = TickState(), Timeline()
    for second in range(0, END, 5):
        tick = advance(memory, BUILT_IN, at(second, monotonic(second), 1e9 + wall(second)))
        memory = tick.memory
        raised, resolved = (tuple(alert.rule for alert in alerts) for alerts in (tick.raised, tick.resolved))
        timeline.append((second, raised, resolved, tuple(verdict.kind for verdict in tick.frame.verdicts)))
    return timeline


@pytest.mark.parametrize(
    "jump", [1800.0, -1800.0, 3600.0, -3600.0, 3650 * DAY, -3650 * DAY], ids=lambda jump: f"{jump:+g} s"
)
def test_clock_step_and_suspend_change_no_conclusion(jump: float):
    steady = conclusions(float)
    assert {"device-nearly-full", "device-lost", "out-of-memory"} <= {
        rule for _, raised, _, _ in steady for rule in raised
    }
    assert conclusions(lambda second: second + (jump if second >= JUMP_AT else 0.0)) == steady


def test_clock_running_backwards_changes_no_conclusion():
    assert conclusions(lambda second: -float(second)) == conclusions(float)


def test_daemon_stopped_for_an_hour_continues_its_alerts_and_ends_expired_ones():
    """Both clocks advance by an hour, so the ten minutes after the first OOM are over; nothing else changes."""

    def hour_later(second: int) -> float:
        return second + (3600.0 if second >= JUMP_AT else 0.0)

    timeline = conclusions(hour_later, hour_later)
    before = [(second, raised, resolved) for second, raised, resolved, _ in timeline if second < JUMP_AT]
    assert before == [(s, r, o) for s, r, o, _ in conclusions(float) if s < JUMP_AT]
    (first, *rest) = [(raised, resolved) for second, raised, resolved, _ in timeline if second >= JUMP_AT]
    assert first == ((), ("out-of-memory",))
    assert [raised for raised, _ in rest if raised] == [("device-lost",), ("out-of-memory",)]
    assert [resolved for _, resolved in rest if resolved] == [("device-nearly-full",), ("device-lost",)]
