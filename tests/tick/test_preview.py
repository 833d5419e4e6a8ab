"""Samples of the last hour for rule previews: packed, bounded, and complete when a preview reads them."""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.alerts import Rule
from gpumond.facts.frame import Frame, Ledger
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.snapshot import STARTING, SourceState
from gpumond.features.rules.evaluation import (
    MAX_PREVIEW_ALERTS,
    MOMENT_INTERVAL_SECONDS,
    PreviewMoments,
    pack_moment,
    preview,
    unpack_moment,
)
from gpumond.serve.examples import SNAPSHOT, VERDICT
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

RULE = Rule(name="hog", scope="device", value="used_ratio", above=0.5, for_seconds=0.0)


def make_frame(number: int, reports: int = 0, used: int = 0) -> Frame:
    pools = (make_pool(live=number), make_pool("GPU-b", live=number, cached=7))
    at = MOMENT_INTERVAL_SECONDS * number
    device = make_device(used_bytes=used, size_bytes=100, processes=(make_process(used_bytes=used),))
    snapshot = make_snapshot(
        device,
        taken_at=1000.0 + at,
        elapsed_seconds=at,
        reports=tuple(make_report(pid, pools) for pid in range(1, reports + 1)),
    )
    return Frame(snapshot, Ledger())


def test_packed_sample_unpacks_to_the_same_value():
    for snapshot in (SNAPSHOT, make_frame(3, reports=2 * 4 + 1).snapshot):
        assert unpack_moment(pack_moment(snapshot, (VERDICT,))) == (snapshot, (VERDICT,))


def test_hour_of_a_thousand_programs_needs_a_few_mebibytes():
    hour = PreviewMoments()
    pool = PoolUsage(
        allocator="torch",
        device_uuid="GPU-a",
        live_bytes=1 << 30,
        held_bytes=2 << 30,
        reclaimable=Reclaimable(5, 6, 7),
        stranded_bytes=8,
        ooms=0,
        retries=0,
    )
    for number in range(20):
        pools = (replace(pool, live_bytes=pool.live_bytes + number),)
        reports = tuple(make_report(pid, pools, age_seconds=pid / 999) for pid in range(1000))
        hour.add(Frame(make_snapshot(elapsed_seconds=30.0 * number, reports=reports), Ledger()))
    assert len(hour.moments()) == 20
    assert sum(map(len, hour.moments())) < 20 * 64 * 1024


def test_oldest_of_large_samples_are_dropped():
    size = len(pack_moment(make_frame(1, reports=50).snapshot, ()))
    hour = PreviewMoments(max_bytes=4 * size)
    for number in range(1, 20):
        hour.add(make_frame(number, reports=50, used=60))
    result = preview(RULE, hour.moments())
    assert 2 <= result.snapshots <= 5
    assert (result.from_at, result.to_at) == (1000.0 + 30 * (20 - result.snapshots), 1570.0)


def test_samples_are_kept_every_30_seconds_and_a_preview_finds_firing_alerts():
    hour = PreviewMoments()
    for number, used in enumerate((10, 90, 90, 10)):
        hour.add(make_frame(number, used=used))
        hour.add(replace(frame := make_frame(number, used=99), snapshot=replace(frame.snapshot, seq=9)))
    result = preview(RULE, hour.moments())
    assert result.snapshots == 4
    assert [(alert.fired_at, alert.resolved_at) for alert in result.fired] == [(1030.0, 1090.0)]


def test_frame_before_the_first_reading_is_not_kept():
    hour = PreviewMoments()
    source = SourceState(name="sim", up=False, responsive=True, reason=STARTING)
    hour.add(Frame(make_snapshot(source=source), Ledger()))
    assert not hour.moments()
    hour.add(replace(frame := make_frame(0, used=90), snapshot=replace(frame.snapshot, elapsed_seconds=0.5)))
    assert [alert.resolved_at for alert in preview(RULE, hour.moments()).fired] == [None]


def test_newest_alerts_are_kept_and_the_others_counted():
    rule = Rule(name="held", scope="process", value="used_bytes", above=0, for_seconds=0.0)
    moments = []
    for number in range(8):
        processes = tuple(make_process(pid, used_bytes=number % 2) for pid in range(1, 401))
        device = make_device(used_bytes=400, size_bytes=1000, processes=processes)
        at = MOMENT_INTERVAL_SECONDS * number
        moments.append(pack_moment(make_snapshot(device, taken_at=1000.0 + at, elapsed_seconds=at), ()))
    result = preview(rule, moments)
    assert (len(result.fired), result.omitted) == (MAX_PREVIEW_ALERTS, 4 * 400 - MAX_PREVIEW_ALERTS)
    starts = [alert.active_at for alert in result.fired]
    assert starts == sorted(starts)
    assert starts[-1] == 1000.0 + 7 * MOMENT_INTERVAL_SECONDS
