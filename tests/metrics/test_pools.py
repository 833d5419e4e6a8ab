"""Series of pools: unreported values have none, and host memory is separate from device memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpumond.facts.pools import Exactness, HostPool, PoolUsage, Reclaimable
from gpumond.facts.snapshot import AgentReport
from gpumond.metrics.exposition import Encoding, Exposition
from gpumond.metrics.telemetry import Telemetry
from tests.helpers.values import TickState, advance, make_device, make_snapshot


def series(*pools: PoolUsage, host_pools: tuple[HostPool, ...] = ()) -> dict[str, str]:
    """Return the values of the pool series by name."""
    report = AgentReport(
        pid=4242,
        start_ticks=1,
        uid=0,
        workload="train",
        age_seconds=0.0,
        frameworks=(),
        flush_policy="allow",
        pools=pools,
        host_pools=host_pools,
    )
    frame = advance(TickState(), (), make_snapshot(make_device(uuid="GPU-a"), reports=(report,))).frame
    page = Exposition(Telemetry()).page(frame, Encoding(False)).plain.decode()
    return dict(re.findall(r"^gpumond_((?:host_)?pool_\w+)\{.*\} (\S+)$", page, re.MULTILINE))


def pool_with(exactness: Exactness, held_known: bool) -> PoolUsage:
    return PoolUsage(
        allocator="rmm",
        device_uuid="GPU-a",
        live_bytes=50,
        held_bytes=50,
        reclaimable=Reclaimable(0, 0, 0, exactness),
        stranded_bytes=0,
        held_known=held_known,
    )


@pytest.mark.parametrize(
    ("exactness", "held_known", "shown"),
    [
        ("exact", True, {"pool_held_bytes", "pool_stranded_bytes", "pool_reclaimable_bytes"}),
        ("not_releasable", False, {"pool_reclaimable_bytes"}),
        ("interval", False, set()),
    ],
)
def test_unknown_values_have_no_series(exactness: Exactness, held_known: bool, shown: set[str]) -> None:
    known = series(pool_with(exactness, held_known))
    assert known.keys() - {"pool_live_bytes", "pool_refilled_flushes_total"} == shown
    assert known["pool_live_bytes"] == "50"


def test_unknown_live_bytes_have_no_series_and_nothing_that_follows_from_them() -> None:
    unknown = series(replace(pool_with("interval", True), live_bytes=None))
    assert unknown.keys() - {"pool_refilled_flushes_total"} == {"pool_held_bytes"}
    arena = series(replace(pool_with("not_releasable", True), live_bytes=None))
    assert arena.keys() - {"pool_refilled_flushes_total"} == {"pool_held_bytes", "pool_reclaimable_bytes"}


def test_pinned_host_memory_is_in_no_series_of_a_device() -> None:
    assert series(host_pools=(HostPool("torch", 64, 96),)) == {
        "host_pool_live_bytes": "64",
        "host_pool_held_bytes": "96",
    }


def test_unmapped_bytes_have_a_series_where_they_are_known() -> None:
    sleeping = replace(pool_with("exact", True), unmapped_bytes=7)
    assert series(sleeping)["pool_unmapped_bytes"] == "7"
    assert series(replace(sleeping, unmapped_bytes=0))["pool_unmapped_bytes"] == "0"


def test_live_allocations_have_a_series_where_they_are_counted() -> None:
    counted = replace(pool_with("exact", True), live_allocations=7)
    assert series(counted)["pool_live_allocations"] == "7"
    assert series(replace(counted, live_allocations=0))["pool_live_allocations"] == "0"
