from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import pytest

from gpumond.facts.messages import from_json, to_json
from gpumond.facts.program import ProcessKey
from gpumond.tick import history as module
from gpumond.tick.history import (
    DEVICE_SIGNAL_COUNT,
    LIVE,
    MAX,
    MAX_PROCESS_SIGNALS,
    MAX_SAMPLES,
    MEDIAN,
    MIN,
    MINUTE,
    QUARTER_HOUR,
    TIERS,
    USED,
    CoarseSeries,
    History,
    HistoryRows,
    Series,
)
from tests.helpers.values import make_snapshot

PROCESS_SERIES = ("GPU-a", ProcessKey(10, 100))
NAN = float("nan")


def make_series(values: Sequence[float], every: float = 1.0, signals: int = 1) -> Series:
    series = Series(signals, 0.0, 0.0)
    for number, value in enumerate(values):
        series.add((number * every, *[value] * signals))
    return series


def make_history(values: Sequence[float], every: float = 1.0, begin: float = 0.0, taken_at: float = 1e9) -> History:
    history = History()
    for number, value in enumerate(values):
        at = begin + number * every
        assert history.advance(make_snapshot(elapsed_seconds=at, taken_at=taken_at + at))
        series = history.process_series(PROCESS_SERIES)
        assert series is not None
        series.add((at, value, NAN, NAN, NAN, NAN))
    return history


@pytest.mark.parametrize("tier", [0, MINUTE])
def test_block_has_minimum_median_and_maximum_of_its_samples(tier: int):
    values = [float(value * 37 % 101) for value in range(200)]
    series, seconds = make_series(values), TIERS[tier].seconds
    blocks = [values[i : i + seconds] for i in range(0, 199 // seconds * seconds, seconds)]
    assert list(series.column(tier, 0, MIN)) == [min(block) for block in blocks]
    assert list(series.column(tier, 0, MEDIAN)) == [median(block) for block in blocks]
    assert list(series.column(tier, 0, MAX)) == [max(block) for block in blocks]
    assert list(series.times(tier)) == [seconds * i for i in range(len(blocks))]
    assert set(series.counts(tier)) == {seconds}


def test_blocks_longer_than_a_minute_are_made_of_minutes():
    series = make_series([float(second // 60) for second in range(3700)])
    assert list(series.column(2, 0)) == [2 + 5 * i for i in range(12)]
    assert list(series.column(QUARTER_HOUR, 0)) == [7, 22, 37, 52]
    assert list(series.column(QUARTER_HOUR, 0, MAX)) == [14, 29, 44, 59]
    assert set(series.counts(QUARTER_HOUR)) == {900}


def test_block_closes_by_time_and_a_gap_has_no_block():
    series = Series(1, 0.0, 0.0)
    for at in (0.0, 57.0, 114.0, 2000.0, 2057.0, 2114.0):
        series.add((at, at))
    assert list(series.times(MINUTE)) == [0, 60, 1980, 2040]
    assert list(series.counts(MINUTE)) == [2, 1, 1, 1]


def test_unknown_samples_are_nan():
    series = make_series([NAN, 1.0, NAN, 3.0] * 10)
    assert list(series.column(0, 0)) == [1.0, 2.0]
    unknown = make_series([NAN] * 40)
    assert all(value != value for value in unknown.column(0, 0))


def test_samples_closer_than_the_minimum_distance_are_dropped():
    series = make_series([0.0] * 1000, every=0.1)
    assert len(series.rows) == pytest.approx(1000 * 0.1, abs=2)


def test_rows_are_limited_to_the_newest():
    rows = HistoryRows(2, 5)
    gone = []
    for i in range(8):
        gone += rows.next_replaced()[:1]
        rows.append((float(i), float(i), -float(i)))
    assert gone == [0, 1, 2]
    assert list(rows.newest_rows(3)) == [5, -5, 6, -6, 7, -7]
    assert list(rows.times(99)) == list(rows.column(0, 99)) == [3, 4, 5, 6, 7]


def test_series_has_the_signals_of_its_longest_row():
    series = Series(1, 0.0, 0.0)
    for at in range(60):
        series.add((float(at), 1.0))
    assert list(series.column(0, LIVE, count=2)) == pytest.approx([NAN, NAN], nan_ok=True)
    for at in range(60, 120):
        series.add((float(at), 1.0, 2.0) if at < 90 else (float(at), 1.0))
    assert list(series.column(0, USED)) == [1.0] * 7
    assert list(series.column(0, LIVE)) == pytest.approx([NAN] * 4 + [2.0] * 2 + [NAN], nan_ok=True)
    assert list(series.samples(LIVE, 31)) == pytest.approx([2.0] + [NAN] * 30, nan_ok=True)


def test_record_includes_blocks_that_are_no_longer_kept():
    series = make_series([1000.0] * 120 + [1.0] * 60 * 260)
    assert max(series.column(MINUTE, 0)) == 1.0
    assert series.past_peaks[MINUTE] == [1000.0]


def test_history_of_64_devices_and_500_processes_needs_at_most_72_mib():
    """Measured with every row of every tier in use."""
    process, device = Series(MAX_PROCESS_SIGNALS, 0.0, 0.0), Series(DEVICE_SIGNAL_COUNT, 0.0, 0.0)
    for series in (process, device):
        for rows, capacity in (
            (series.rows, MAX_SAMPLES),
            *zip(series.tiers, (tier.rows for tier in TIERS), strict=True),
        ):
            for _ in range(capacity + 10):
                rows.append([0.0] * (1 + rows.width))
            assert len(rows) == capacity
    one_process, one_device = (sum(rows.size_bytes for rows in (s.rows, *s.tiers)) for s in (process, device))
    assert 500 * one_process + 64 * one_device <= 72 * 1024 * 1024


def test_points_are_samples_or_the_longest_blocks_within_the_resolution():
    history = make_history([float(i) for i in range(1000)])
    assert [point.median for point in history.series(PROCESS_SERIES, "used")] == list(range(100, 1000))
    for resolution, seconds in ((15, 15), (59, 15), (60, 60), (899, 300), (900, 900)):
        points = history.series(PROCESS_SERIES, "used", resolution=resolution)
        assert points
        assert {round(b.at - a.at) % seconds for a, b in pairwise(points)} <= {0}
    assert history.series(PROCESS_SERIES, "used", since=1e9 + 990.5)[0].median == 991
    assert history.series(PROCESS_SERIES, "live") == ()
    assert history.series(("GPU-a", ProcessKey(11, 100)), "used") == history.series(("GPU-b", None), "used") == ()


def test_wall_clock_step_moves_no_sample_relative_to_another():
    history = make_history([1.0] * 10)
    history.advance(make_snapshot(elapsed_seconds=10.0, taken_at=5e8))
    times = [point.at for point in history.series(PROCESS_SERIES, "used")]
    assert times == [5e8 - 10 + i for i in range(10)]


def test_snapshot_that_is_not_newer_is_ignored():
    history = make_history([1.0] * 3)
    assert not history.advance(make_snapshot(elapsed_seconds=2.0))
    assert not history.advance(make_snapshot(elapsed_seconds=1.0))


def test_ended_life_is_kept_and_the_newest_life_of_a_pid_is_returned():
    history = make_history([1.0] * 3)
    history.end(PROCESS_SERIES)
    assert len(history.series(PROCESS_SERIES, "used")) == 3
    reused = ProcessKey(10, 101)
    other = history.process_series(("GPU-a", reused))
    assert other is not None
    other.add((3.0, 7.0, NAN, NAN, NAN, NAN))
    assert history.newest_process("GPU-a", 10) == reused
    assert [point.median for point in history.series(("GPU-a", reused), "used")] == [7.0]
    assert len(history.series(PROCESS_SERIES, "used")) == 3
    for pid in range(module.MAX_ENDED_PROCESSES + 1):
        history.process_series(("GPU-b", ProcessKey(pid, 1)))
        history.end(("GPU-b", ProcessKey(pid, 1)))
    assert history.series(("GPU-b", ProcessKey(0, 1)), "used") == ()


def test_moment_has_the_programs_that_were_there_and_no_others():
    history = make_history([float(value) for value in range(100)])
    history.end(PROCESS_SERIES)
    later = ("GPU-a", ProcessKey(11, 200))
    for second in range(100, 160):
        history.advance(make_snapshot(elapsed_seconds=float(second), taken_at=1e9 + second))
        history.device_series("GPU-a").add((history.now, *[7.0] * DEVICE_SIGNAL_COUNT))
        if second != 130:
            series = history.process_series(later)
            assert series is not None
            series.add((history.now, 5.0))
    moments: Sequence[tuple[float, float | None, Sequence[tuple[object, float]]]] = [
        (50.0, None, [(PROCESS_SERIES, 50.0)]),
        (98.9, None, [(PROCESS_SERIES, 98.0)]),
        (99.5, None, []),  # it has ended, and the other one has not begun
        (130.5, None, [(("GPU-a", None), 7.0), (later, 5.0)]),
        (159.0, None, [(("GPU-a", None), 7.0), (later, 5.0)]),
        (50.0, 15.0, [(PROCESS_SERIES, 44.0)]),  # the median of the block from 37 to 52
        (-50.0, None, []),
    ]
    for at, resolution, expected in moments:
        found = [(key, point.used) for key, _, point in history.shares_at(1e9 + at, resolution)]
        assert found == expected, (at, resolution)


def test_processes_never_exceed_the_limit():
    history = make_history([1.0])
    made = [history.process_series(("GPU-a", ProcessKey(pid, 1))) for pid in range(1000, 1000 + module.MAX_PROCESSES)]
    assert made[-2] is not None
    assert made[-1] is None


def test_restored_series_continues_when_the_life_is_seen_again():
    before = make_history([float(i // 900) for i in range(4000)])
    kept = [from_json(CoarseSeries, to_json(one)) for one in before.coarse_series()]
    after = History()
    after.restore(kept)
    # After a reboot the monotonic clock starts again; an hour of wall time has passed.
    after.advance(make_snapshot(elapsed_seconds=50.0, taken_at=1e9 + 4000 + 3600))
    series = after.process_series(PROCESS_SERIES)
    assert series is not None
    assert list(series.column(QUARTER_HOUR, USED)) == list(before.processes[PROCESS_SERIES].column(QUARTER_HOUR, USED))
    assert series.past_peaks[MINUTE][USED] == 4.0
    assert series.past_peaks[MINUTE][LIVE] == -float("inf")
    assert after.to_unix(series.started) == pytest.approx(1e9)
    shown = [point.at for point in after.series(PROCESS_SERIES, "used", resolution=900)]
    *closed, _ = [point.at for point in before.series(PROCESS_SERIES, "used", resolution=900)]
    assert shown == pytest.approx(closed)


def test_restored_series_is_discarded_without_its_life():
    kept = make_history([1.0] * 2000).coarse_series()
    after = History()
    after.restore(kept)
    for at in (0.0, module.MAX_WAIT_FOR_PROCESS_SECONDS + 1):
        after.advance(make_snapshot(elapsed_seconds=at, taken_at=2e9 + at))
    series = after.process_series(PROCESS_SERIES)
    assert series is not None
    assert len(series.tiers[QUARTER_HOUR]) == 0


def test_blocks_of_processes_that_begin_together_close_at_different_times():
    history = make_history([1.0])
    ends = set()
    for pid in range(60):
        series = history.process_series(("GPU-a", pid + 50, 1))
        assert series is not None
        at = 0.5
        while not series.add((at, 0.0, 0.0, 0.0, 0.0, 0.0)):
            at += 1.0
        ends.add(at)
    assert len(ends) == 15
