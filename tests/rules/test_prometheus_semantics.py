"""Alert states compared with Prometheus: an oracle over many series, promtool over some, and clock jumps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from gpumond.facts.alerts import AlertStates, Rule
from gpumond.features.rules.evaluation import evaluate_rule
from gpumond.quantities.scope import UnreadableSubjects
from tests.rules.prometheus import GONE, UNKNOWN, Oracle, Series, random_series
from tests.rules.rows import Row, of

LABELS = (("gpu", "0"), ("uuid", "GPU-a"))
UNREADABLE = UnreadableSubjects(devices=frozenset({"GPU-a"}))


def states(series: Series, wall: Callable[[float], float] = lambda elapsed: 1e9 + elapsed) -> list[str]:
    """States of gpumond after each evaluation. An unknown value occurs in both its forms."""
    rule = Rule(
        name="r", scope="device", value="x", above=0.5, for_seconds=series.hold, keep_firing_for_seconds=series.keep
    )
    alert_states: AlertStates = {}
    phases = []
    for number, (elapsed, value) in enumerate(zip(series.times, series.values, strict=True)):
        unreadable = UNREADABLE if value == UNKNOWN and number % 2 else UnreadableSubjects()
        known = value if isinstance(value, float) else None
        subjects = of("x") if value == GONE or unreadable is UNREADABLE else of("x", Row(LABELS, known))
        alert_states = evaluate_rule(rule, subjects, alert_states, unreadable, wall(elapsed), elapsed)
        phases.append(alert_states[LABELS].alert.phase if alert_states else "inactive")
    return phases


def expected(series: Series) -> list[str]:
    """An unknown value is a missing evaluation. An alert whose subject has ended is not kept firing, unlike in
    Prometheus.
    """
    oracle = Oracle(series.hold, series.keep)
    found = []
    for elapsed, value in zip(series.times, series.values, strict=True):
        if value != UNKNOWN:
            oracle.keep = 0.0 if value == GONE else series.keep
            oracle.evaluate(elapsed, isinstance(value, float) and value > 0.5)
        found.append(oracle.state)
    return found


def test_states_of_ten_thousand_random_series_equal_those_of_prometheus():
    rng = Random(164)
    reached = set()
    for _ in range(10_000):
        series = random_series(rng)
        ours = states(series)
        assert ours == expected(series), series
        reached.update(pairwise(ours))
    assert len(reached) == 8  # of nine; pending never follows firing directly


@pytest.mark.needs("promtool")
def test_states_equal_those_of_promtool(tmp_path: Path):
    rng = Random(42)
    chosen = {f"a{number}": random_series(rng, 30, regular=True) for number in range(40)}
    rules = [
        {"alert": name, "expr": f"{name} > 0.5", "for": f"{s.hold:.0f}s", "keep_firing_for": f"{s.keep:.0f}s"}
        for name, s in chosen.items()
    ]
    inputs = [
        {"series": name, "values": " ".join("stale" if value == GONE else str(value) for value in s.values)}
        for name, s in chosen.items()
    ]
    ours = {name: states(series) for name, series in chosen.items()}
    expectations = [
        {
            "expr": "ALERTS",
            "eval_time": f"{minute}m",
            "exp_samples": [
                {"labels": f'ALERTS{{alertname="{name}",alertstate="{phases[minute]}"}}', "value": 1}
                for name, phases in ours.items()
                if phases[minute] != "inactive"
            ],
        }
        for minute in range(30)
    ]
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": expectations}]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    (tmp_path / "tests.yaml").write_text(
        json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


HOUR, TEN_YEARS = 3600.0, 10 * 365 * 86400.0


@pytest.mark.parametrize("jump", [HOUR, -HOUR, TEN_YEARS, -TEN_YEARS])
def test_clock_jump_neither_fires_nor_resolves(jump: float):
    rng = Random(7)
    for _ in range(300):
        series = random_series(rng)
        when = rng.choice(series.times)
        jumping = states(series, lambda elapsed, when=when: 1e9 + elapsed + (jump if elapsed >= when else 0))  # type: ignore[misc]
        assert jumping == states(series)
