"""Number of live allocations as evidence on growth: memory that a program keeps, and arenas that become larger."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpumond.diagnosis.detectors import LiveAllocations
from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import Snapshot
from gpumond.testing import make_pool, make_process, make_report
from tests.helpers.curves import GIB, MIB, MINUTE, at_moment, last, leaking, of_device, onsets, steps_of

Number = Callable[[float], int | None]

BASE, PER_MINUTE, ONSET = 20 * GIB, 300 * MIB, 12.0
LIVE = leaking(PER_MINUTE, ONSET, BASE)
GROWING, LEAKING = ONSET + 4, ONSET + 7
"""Minutes at which the verdicts have been active for more than a minute."""


def kept(at: float) -> int:
    """Return the number of blocks of a program that keeps one of 5 MiB each second."""
    return 400 + int(LIVE(at) - BASE) // (5 * MIB)


def arena(at: float) -> int:
    return 400


def varying(at: float) -> int:
    """Return the number within steps that allocate a thousand blocks."""
    return 400 + 97 * (7 * int(at) % 11)


def unknown(at: float) -> None:
    return None


def seen(number: Number, minutes: float, second: Number | None = None) -> Iterator[Snapshot]:
    """Make snapshots of a leak; ``second``: the number of the allocations of another pool, which does not grow."""
    for at in steps_of(minutes):
        own = int(LIVE(at))
        pools = [make_pool(live=own, live_allocations=number(at))]
        if second is not None:
            pools.append(make_pool(live=GIB, allocator="cupy", live_allocations=second(at)))
        device = of_device(own + 3 * GIB, (make_process(10, own + 3 * GIB),))
        yield at_moment(at, device, reports=(make_report(10, tuple(pools)),))


def verdict_of(kind: str, snapshots: Iterator[Snapshot]) -> Verdict:
    return next(verdict for verdict in last(snapshots) if verdict.kind == kind)


@pytest.mark.parametrize(("kind", "minutes"), [("growing", GROWING), ("leak", LEAKING)])
def test_number_rises_with_memory_that_the_program_keeps(kind: str, minutes: float):
    verdict = verdict_of(kind, seen(kept, minutes))
    evidence = dict(verdict.evidence)
    assert evidence["live_allocations_per_minute"] == pytest.approx(60, abs=2)
    assert evidence["live_allocations_growth_ratio"] > 5
    assert " more live allocations each minute; GPU 0 " in verdict.summary


@pytest.mark.parametrize(("kind", "minutes"), [("growing", GROWING), ("leak", LEAKING)])
def test_number_does_not_rise_with_an_arena_that_becomes_larger(kind: str, minutes: float):
    verdict = verdict_of(kind, seen(arena, minutes))
    evidence = dict(verdict.evidence)
    assert (evidence["live_allocations_per_minute"], evidence["live_allocations_growth_ratio"]) == (0.0, 0.0)
    assert ", in few, large allocations; GPU 0 " in verdict.summary


@pytest.mark.parametrize(("number", "refused"), [(kept, True), (arena, False), (varying, False), (unknown, False)])
def test_larger_allocations_are_refused_if_the_number_rises(number: Number, refused: bool):
    leak = verdict_of("leak", seen(number, LEAKING))
    assert leak.fit is not None
    values = {each.kind: each.value for each in leak.fit.refused}
    assert values.get("larger-allocations") == (
        dict(leak.evidence)["live_allocations_growth_ratio"] if refused else None
    )


def test_number_does_not_affect_which_verdicts_are_found():
    found = [
        [(at, verdict.kind) for at, verdict in onsets(seen(number, LEAKING))]
        for number in (unknown, kept, arena, varying)
    ]
    assert "leak" in {kind for _, kind in found[0]}
    assert found[1:] == found[:1] * 3


def test_sentence_does_not_mention_a_number_that_varies_more_than_it_could_grow():
    leak = verdict_of("leak", seen(varying, LEAKING))
    assert "live_allocations_per_minute" in dict(leak.evidence)
    assert "allocations" not in leak.summary


@pytest.mark.parametrize("second", [None, unknown])
def test_number_is_unknown_unless_all_pools_count(second: Number | None):
    for kind, minutes in (("growing", GROWING), ("leak", LEAKING)):
        verdict = verdict_of(kind, seen(unknown if second is None else kept, minutes, second))
        assert not [name for name, _ in verdict.evidence if "allocations" in name]
        assert "allocations" not in verdict.summary


def test_numbers_of_several_pools_are_added():
    leak = verdict_of("leak", seen(kept, LEAKING, lambda at: int(at)))
    assert dict(leak.evidence)["live_allocations_per_minute"] == pytest.approx(120, abs=3)


def test_growth_is_that_since_the_verdict_began():
    allocations = LiveAllocations()

    def block(number: int | None, at: float) -> float | None:
        for sample in (number, None if number is None else number + 3):
            allocations.add(sample, closes=False)
        allocations.add(None, closes=True)
        found = allocations.growth(at, GIB + MIB * at, 1.0)
        return None if found is None else found.per_minute

    assert [block(10, 0.0), block(20, 15.0), block(None, 30.0)] == [None] * 3
    assert block(30, MINUTE) == 20.0
    allocations.end()
    assert [block(90, 2 * MINUTE), block(90, 3 * MINUTE)] == [None, 0.0]
