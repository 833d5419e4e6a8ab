"""A restart resolves no alert, loses none and creates none."""

from __future__ import annotations

from gpumond.facts.alerts import ClockTimes, Rule, from_stored, to_stored
from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.features.rules.evaluation import GRACE_SECONDS, VERDICT_GRACE_SECONDS, awaited_alerts
from tests.helpers.agents import GIB
from tests.helpers.values import Advanced, TickState, advance, evaluate, make_device, make_process, make_snapshot

RULE = Rule(name="full", scope="device", value="used_ratio", above=0.8, for_seconds=60.0)
BEGAN = 5000.0
"""Monotonic time at the start of the previous daemon."""


def full(used: int = 70 * GIB) -> DeviceReading:
    return make_device(used_bytes=used, processes=None)


def at(elapsed: float, *devices: DeviceReading) -> Snapshot:
    return make_snapshot(*devices, taken_at=1e6 + elapsed, elapsed_seconds=elapsed)


def run(memory: TickState, *seconds: float, device: DeviceReading | None = None) -> Advanced:
    for second in seconds:
        tick = advance(memory, [RULE], at(second, device or full()))
        memory = tick.memory
    return tick


def restart(memory: TickState, lived: float, outage: float = 2.0, ended: bool = False) -> TickState:
    alerts = list(to_stored(memory.alert_states, BEGAN))
    alert_states = from_stored(alerts, ClockTimes(1e6 + lived, BEGAN + lived), 1e6 + lived + outage)
    return TickState(alert_states, awaited=awaited_alerts(alert_states, lambda process: ended))


def test_firing_alert_continues_and_is_not_raised_again():
    tick = run(TickState(), 0.0, 60.0)
    assert len(tick.raised) == 1
    after = run(restart(tick.memory, 100.0), 0.0)
    assert (len(after.frame.alerts), after.raised, after.resolved) == (1, (), ())
    assert after.frame.alerts[0].fired_at == tick.frame.alerts[0].fired_at


def test_pending_time_continues_without_the_outage():
    memory = restart(run(TickState(), 0.0).memory, 50.0, outage=1000.0)
    assert run(memory, 0.0, 9.0).frame.alerts[0].phase == "pending"
    assert run(memory, 0.0, 10.0).frame.alerts[0].phase == "firing"


def test_alert_with_an_unseen_subject_is_kept_for_ten_minutes():
    memory = restart(run(TickState(), 0.0, 60.0).memory, 60.0)
    unseen = advance(memory, [RULE], at(1.0))
    assert (len(unseen.frame.alerts), unseen.resolved) == (1, ())
    gone = advance(unseen.memory, [RULE], at(GRACE_SECONDS + 1))
    assert (gone.frame.alerts, len(gone.resolved)) == ((), 1)


def test_alert_resolves_if_its_subject_is_below_the_level():
    memory = restart(run(TickState(), 0.0, 60.0).memory, 60.0)
    unseen = advance(memory, [RULE], at(1.0))
    over = advance(unseen.memory, [RULE], at(2.0, full(GIB)))
    assert len(over.resolved) == 1
    again = advance(over.memory, [RULE], at(3.0))
    assert again.frame.alerts == ()


def test_state_is_discarded_after_more_than_an_hour():
    assert restart(run(TickState(), 0.0, 60.0).memory, 60.0, outage=3601.0) == TickState()


def test_clock_set_back_during_the_outage_loses_no_alert():
    assert len(run(restart(run(TickState(), 0.0, 60.0).memory, 60.0, outage=-1e8), 0.0).frame.alerts) == 1


def test_alert_of_a_removed_rule_is_discarded():
    memory = restart(run(TickState(), 0.0, 60.0).memory, 60.0)
    assert advance(memory, [], at(0.0)).frame.alerts == ()


LEAK = Rule(name="leak", scope="process", value="leak", above=0)
VERDICT = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0)


def evaluated(memory: TickState, elapsed: float, *verdicts: Verdict, alive: bool = True) -> Advanced:
    device = make_device(processes=(make_process(10),) if alive else ())
    return evaluate(memory, [LEAK], at(elapsed, device), verdicts)


def test_alert_on_a_leak_is_kept_for_an_hour():
    memory = restart(evaluated(TickState(), 0.0, VERDICT).memory, 60.0)
    early = evaluated(memory, 10.0)
    assert (len(early.frame.alerts), early.resolved) == (1, ())
    assert len(evaluated(early.memory, VERDICT_GRACE_SECONDS + 1).resolved) == 1
    found = evaluated(early.memory, 1200.0, VERDICT)
    assert (len(found.frame.alerts), found.raised) == (1, ())
    assert len(evaluated(found.memory, 1300.0).resolved) == 1, "once found, it is over when it is over"
    assert len(evaluated(early.memory, GRACE_SECONDS + 1, alive=False).resolved) == 1


def test_alert_on_a_process_that_ended_during_the_outage_is_resolved_at_once():
    memory = restart(evaluated(TickState(), 0.0, VERDICT).memory, 60.0, ended=True)
    assert len(evaluated(memory, 0.0, alive=False).resolved) == 1
