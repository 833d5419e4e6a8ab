"""The first minutes of ordinary programs: a load is no growth, and activations are no leak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from gpumond.facts.snapshot import Snapshot
from gpumond.features.rules.built_in import BUILT_IN
from tests.helpers.agents import GIB
from tests.helpers.values import TickState, advance, make_device, make_pool, make_process, make_report, make_snapshot

MIB = GIB // 1024
CONTEXT = 256 * MIB
HEALTHY = {"warm-up", "steady", "churn", "periodic", "step-change"}
SECONDS = 600


def loading(second: int) -> tuple[int, int]:
    """Live and cached bytes of a server that loads 10 GiB in 20 s."""
    return min(second, 20) * GIB // 2, 0


def training(second: int) -> tuple[int, int]:
    """The same for a training: 4 GiB in 8 s, an optimizer after the first step, and activations of each step."""
    held = min(second, 8) * GIB // 2 + (2 * GIB if second > 15 else 0)
    activations = second % 5 * GIB // 2 if second > 10 else 0
    return held + activations, (2 * GIB - activations if second > 14 else 0)


def snapshots(curve: object, size: int, with_agent: bool) -> Iterator[Snapshot]:
    for second in count():
        live, cached = curve(second)  # type: ignore[operator]
        used = live + cached + CONTEXT
        process = make_process(used_bytes=used, comm="python3")
        free = size * GIB - used
        device = make_device(size_bytes=size * GIB, used_bytes=used, free_bytes=free, processes=(process,))
        reports = (make_report(pools=(make_pool(live=live, cached=cached),)),) if with_agent else ()
        snapshot = make_snapshot(device, reports=reports, elapsed_seconds=float(second))
        yield replace(snapshot, seq=second + 1, taken_at=1e6 + second)


@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no agent"])
@pytest.mark.parametrize("size", [16, 24, 80])
@pytest.mark.parametrize("curve", [loading, training])
def test_nothing_alarms_in_the_first_minutes(curve: object, size: int, with_agent: bool):
    state, found = TickState(), set[tuple[int, str]]()
    for second, snapshot in zip(range(SECONDS), snapshots(curve, size, with_agent), strict=False):
        advanced = advance(state, BUILT_IN, snapshot)
        state = advanced.memory
        found |= {(second, each.kind) for each in advanced.frame.verdicts if each.kind not in HEALTHY}
        found |= {(second, each.rule) for each in advanced.frame.alerts}
    assert not found
