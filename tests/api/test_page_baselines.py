"""Comparison of baselines on the page, without a browser."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import pytest

from gpumond.baselines.statistics import (
    MEASURES,
    Baseline,
    Blocks,
    Measured,
    WorkloadMeasures,
    compare,
    shift,
)
from gpumond.testing import GIB
from tests.api.page_modules import needs_node, run_module

pytestmark = needs_node


def random_baseline(rng: random.Random, name: str) -> Baseline:
    workloads = []
    for workload in rng.sample(["train", "serve", "[python]"], 2):
        measures = []
        for measure in rng.sample(MEASURES, 3):
            blocks = Blocks()
            for _ in range(rng.randint(1, 40)):
                blocks.add(rng.choice((0.0, rng.uniform(0, 9) * GIB)))
            distribution = blocks.distribution()
            assert distribution is not None
            measures.append(Measured(measure, distribution))
        workloads.append(WorkloadMeasures(workload, 60.0, tuple(measures), rng.choice((None, 0, 3))))
    return Baseline(name, None, 1e9, 60.0, 60.0, True, tuple(workloads))


def test_page_compares_baselines_as_the_daemon_does():
    rng = random.Random(1)
    pairs = [(random_baseline(rng, "before"), random_baseline(rng, "after")) for _ in range(20)]
    given = [[asdict(baseline) for baseline in pair] for pair in pairs]
    results = run_module("comparison", "given.map((pair) => m.compare(...pair))", *given)
    for pair, found in zip(pairs, results, strict=True):
        shown = {(each["workload"], each["measure"], each["stat"]): each for each in found}
        expected = compare(*pair).differences
        assert len(found) == len(expected)
        for difference in expected:
            own = shown[difference.workload, difference.measure, difference.stat]
            for field, value in asdict(difference).items():
                known = value if not isinstance(value, float) else pytest.approx(value, rel=1e-9)
                assert own[field] == known, (difference, field)


def test_interval_of_a_shift_requires_enough_levels():
    for count in (1, 3, 8):
        before, after = [float(number) for number in range(count)], [number + 2.5 for number in range(count)]
        middle, low, high = shift(before, after)
        found = run_module("comparison", "m.shift(...given)", before, after)
        assert (found["difference"], found["low"], found["high"]) == (middle, low, high)


def test_curves_of_two_baselines_have_one_scale():
    def side(levels: list[float]) -> Any:
        distribution = {"levels": levels, "peak": 8, "typical": 4, "low": 2, "high": 8}
        return {"workloads": [{"workload": "train", "measures": [{"measure": "used", "distribution": distribution}]}]}

    expression = "m.curves(given[0], given[1])"
    (found,) = run_module("comparison", expression, side([4, 8]), side([2]))
    assert found == {
        "workload": "train",
        "top": 8,
        "before": "M0 50.00H500.00V0.00H1000.00",
        "after": "M0 75.00H1000.00",
    }
