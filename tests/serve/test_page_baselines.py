"""Curves of baselines on the page, without a browser."""

from __future__ import annotations

from typing import Any

from tests.serve.page_modules import needs_node, run_module

pytestmark = needs_node


def test_curves_of_two_baselines_have_one_scale():
    def side(levels: list[float]) -> Any:
        distribution = {"levels": levels, "peak": 8, "typical": 4, "low": 2, "high": 8}
        return {"workloads": [{"workload": "train", "measures": [{"measure": "used", "distribution": distribution}]}]}

    expression = "m.curves(given[0], given[1])"
    (found,) = run_module("curves", expression, side([4, 8]), side([2]))
    assert found == {
        "workload": "train",
        "top": 8,
        "before": "M0 50.00H500.00V0.00H1000.00",
        "after": "M0 75.00H1000.00",
    }
