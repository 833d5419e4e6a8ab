"""Growth of the held bytes as evidence on growth of live bytes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import Snapshot
from tests.helpers.curves import GIB, MIB, by_agent, by_process, last, leaking, steps_of

LIVE = leaking(300 * MIB, onset=12)


def evidence_of(kind: str, snapshots: Iterable[Snapshot]) -> dict[str, float]:
    verdict: Verdict = next(each for each in last(snapshots) if each.kind == kind)
    return dict(verdict.evidence)


@pytest.mark.parametrize(("kind", "minutes"), [("growing", 16), ("leak", 19)])
def test_held_bytes_grow_with_the_live_bytes_or_not_at_all(kind: str, minutes: float):
    times = list(steps_of(minutes))
    growing = evidence_of(kind, by_agent(LIVE, lambda at: LIVE(at) + GIB, times))
    assert growing["held_growth_bytes"] == pytest.approx(growing["growth_bytes"], rel=0.25)
    from_cache = evidence_of(kind, by_agent(LIVE, lambda at: 30 * GIB, times))
    assert from_cache["held_growth_bytes"] == 0


def test_growth_without_an_agent_has_no_held_bytes():
    assert "held_growth_bytes" not in evidence_of("leak", by_process(LIVE, steps_of(30)))
