from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.diagnosis.previous_runs import MAX_PROGRAMS, EarlierUse, EarlierUses, RunFloors
from gpumond.facts.snapshot import Snapshot
from tests.helpers.agents import GIB
from tests.helpers.curves import HOUR, MIB, MINUTE, Curve, at_moment, by_process, kinds, of_device, onsets, steps_of
from tests.helpers.values import make_process


def lives(curve: Curve, length: float, count: int, then: Curve) -> Iterator[Snapshot]:
    """Make snapshots of ``count`` lives of a program, and of a last one."""
    for number in range(count + 1):
        for at in steps_of(length, 5.0):
            used = int((then if number == count else curve)(at))
            process = make_process(10 + number, used, start_ticks=number, comm="serve", uid=1000)
            yield at_moment(number * (length + 1) * MINUTE + at, of_device(used, (process,)))


FILLS: Curve = lambda at: 10 * GIB + 200 * MIB * min(100.0, at / MINUTE)  # noqa: E731
LEAKS: Curve = lambda at: 10 * GIB + 200 * MIB * at / MINUTE  # noqa: E731


def leaks(snapshots: Iterator[Snapshot]) -> list[float]:
    return [at / MINUTE for at, verdict in onsets(snapshots) if verdict.kind == "leak"]


def test_growth_up_to_the_level_that_the_last_life_held_is_no_leak():
    assert len(leaks(lives(FILLS, 210, 1, FILLS))) == 1, "nobody can tell in the first life"
    after = leaks(lives(FILLS, 210, 1, LEAKS))
    assert len(after) == 2
    assert after[1] > 211 + 100, "above the level"


def test_level_that_a_leak_reaches_is_no_baseline():
    assert len(leaks(lives(LEAKS, 150, 1, LEAKS))) == 2


def test_growth_that_repeats_a_returned_tooth_is_no_leak():
    tooth: Curve = lambda at: 10 * GIB + 100 * MIB * (at % (40 * MINUTE)) / MINUTE  # noqa: E731
    assert "leak" not in kinds(onsets(by_process(tooth, steps_of(240, 5.0))))


@pytest.mark.parametrize("per_hour", [5 * MIB, 60 * MIB])
def test_slow_leak_is_found_within_two_days(per_hour: float):
    found = leaks(by_process(lambda at: 20 * GIB + per_hour * at / HOUR, steps_of(48 * 60, 30.0)))
    assert len(found) == 1


@pytest.mark.parametrize("curve", [lambda at: 20 * GIB, lambda at: 20 * GIB + 8 * MIB * (at / HOUR) ** 0.5])
def test_level_that_hardly_changes_for_days_is_no_leak(curve: Curve):
    assert not leaks(by_process(curve, steps_of(72 * 60, 60.0)))


def test_floors_that_rise_from_day_to_day_are_a_rise():
    floors = RunFloors()
    for quarter in range(12 * 16):
        hour = quarter / 4
        floors.add(hour * HOUR, (20 + 4 * (hour % 24 > 12)) * GIB + 20 * MIB * hour)
    assert len(floors.rising_floors()) == 12


def test_records_are_limited_to_the_newest_programs():
    earlier_uses = EarlierUses()
    for number in range(MAX_PROGRAMS + 5):
        earlier_uses.record((f"job-{number}", 1), float(number), held=GIB)
    assert len(earlier_uses.records()) == MAX_PROGRAMS
    assert earlier_uses.repeated_bytes(("job-0", 1)) == 0
    earlier_uses.restore([EarlierUse(name="job-0", uid=1, seen_at=0.0, held_bytes=GIB)])
    assert earlier_uses.repeated_bytes(("job-0", 1)) > GIB


def test_program_of_another_user_has_its_own_past():
    diagnosis = Diagnosis()
    for snapshot in lives(FILLS, 210, 0, FILLS):
        diagnosis = diagnose(diagnosis, snapshot)
    diagnose(diagnosis, at_moment(212 * MINUTE, of_device(0, ())))
    assert diagnosis.earlier_uses.repeated_bytes(("serve", 1000)) > 20 * GIB
    assert diagnosis.earlier_uses.repeated_bytes(("serve", 1001)) == 0
