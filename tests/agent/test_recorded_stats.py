"""Formulas on statistics of PyTorch that were recorded on a real device (tests/gpu/recorder.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.agent.allocators.torch_formulas import (
    device_statistics,
    reclaimable_from_async_stats,
    reclaimable_from_snapshot,
    reclaimable_from_stats,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"


def records() -> Iterator[Any]:
    for path in sorted(FIXTURES.glob("torch-*.json")):
        recording = json.loads(path.read_text())
        for number, record in enumerate(recording["moments"]):
            yield pytest.param(recording["configuration"], record, id=f"{path.stem}-{number}")


def test_backends_each_have_a_recording():
    assert {path.stem.rpartition("-")[2] for path in FIXTURES.glob("torch-*.json")} == {"native", "expandable", "async"}


@pytest.mark.parametrize(("configuration", "record"), list(records()))
def test_recorded_flushes_agree_with_the_statistics(configuration: str, record: Any):
    statistics = device_statistics(record["stats"])
    if record["snapshot"] is None:
        promised = reclaimable_from_async_stats(statistics)
    else:
        promised = reclaimable_from_stats(statistics, "expandable_segments:True" in configuration)
    assert promised.low <= record["returned"] <= promised.high
    if promised.exactness == "exact":
        assert record["returned"] == promised.likely


@pytest.mark.parametrize(("configuration", "record"), list(records()))
def test_recorded_number_of_live_allocations_is_that_of_the_snapshot(configuration: str, record: Any):
    snapshot = record["snapshot"]
    blocks = [block["state"] for segment in snapshot or () for block in segment["blocks"]]
    expected = None if snapshot is None else blocks.count("active_allocated")
    assert device_statistics(record["stats"], has_counters=snapshot is not None).live_allocations == expected


@pytest.mark.parametrize(
    ("configuration", "record"), [param for param in records() if param.values[1]["snapshot"] is not None]
)
def test_recorded_flushes_equal_the_snapshot(configuration: str, record: Any):
    promised = reclaimable_from_snapshot(record["snapshot"])[0]
    assert promised.likely == record["returned"]
    assert promised.low <= record["returned"] <= promised.high
