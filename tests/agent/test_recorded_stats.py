"""Formulas on statistics of PyTorch that were recorded on a real device (tests/gpu/recorder.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.agent.adapters.torch_formulas import figures, from_async_stats, from_snapshot, from_stats

FIXTURES = Path(__file__).parent.parent / "fixtures"


def moments() -> Iterator[Any]:
    for path in sorted(FIXTURES.glob("torch-*.json")):
        recording = json.loads(path.read_text())
        for number, moment in enumerate(recording["moments"]):
            yield pytest.param(recording["configuration"], moment, id=f"{path.stem}-{number}")


def test_each_backend_has_a_recording():
    assert {path.stem.rpartition("-")[2] for path in FIXTURES.glob("torch-*.json")} == {"native", "expandable", "async"}


@pytest.mark.parametrize(("configuration", "moment"), list(moments()))
def test_recorded_flushes_agree_with_the_statistics(configuration: str, moment: Any):
    told = figures(moment["stats"])
    if moment["snapshot"] is None:
        promised = from_async_stats(told)
    else:
        promised = from_stats(told, "expandable_segments:True" in configuration)
    assert promised.low <= moment["returned"] <= promised.high
    if promised.exactness == "exact":
        assert moment["returned"] == promised.likely


@pytest.mark.parametrize(
    ("configuration", "moment"), [param for param in moments() if param.values[1]["snapshot"] is not None]
)
def test_recorded_flushes_equal_the_snapshot(configuration: str, moment: Any):
    promised = from_snapshot(moment["snapshot"])[0]
    assert promised.likely == moment["returned"]
    assert promised.low <= moment["returned"] <= promised.high
