"""Bounded history of each device and of each process on a device: samples in rows of numbers. No I/O.

`diagnosis.history_recorder` adds the samples, and `store` keeps them over a restart.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import floor, inf, isfinite, nan, nextafter
from typing import Literal, NamedTuple

from gpumond.facts.program import ProcessKey, process_key
from gpumond.facts.snapshot import Snapshot

HistorySignal = Literal["used", "live", "held", "stranded", "utilization", "unattributed", "opaque"]
SIGNALS: tuple[HistorySignal, ...] = ("used", "live", "held", "stranded", "utilization", "unattributed", "opaque")
"""Signals that can be requested, in bytes; the utilization is a ratio. Live, held and stranded are reported by agents
and summed over their pools; opaque are the bytes of processes without such a report.
"""
USED, LIVE, HELD, STRANDED, STEP_END, UTILIZATION, UNATTRIBUTED, OPAQUE, LOAD = range(9)
"""All signals. STEP_END: live bytes at the end of a step; LOAD: requests of the serving engines on the device."""
MAX_PROCESS_SIGNALS, DEVICE_SIGNAL_COUNT = 5, 9
"""A process has USED without an agent, and STEP_END only with steps."""
_SIGNAL_INDICES: Mapping[HistorySignal, int] = {
    "used": USED,
    "live": LIVE,
    "held": HELD,
    "stranded": STRANDED,
    "utilization": UTILIZATION,
    "unattributed": UNATTRIBUTED,
    "opaque": OPAQUE,
}

MAX_PROCESSES = 1000
"""Maximum number of processes with a history; a further one is observed without it."""
MAX_ENDED_PROCESSES = 32
"""Number of ended processes whose series are kept, the newest."""
MAX_WAIT_FOR_PROCESS_SECONDS = 600.0
"""Time that a restored series waits for its process."""

ProcessSeriesKey = tuple[str, ProcessKey]
"""Device UUID and process"""

SeriesKey = tuple[str, ProcessKey | None]
"""Device UUID and process; None for the device as a whole"""


class SharesPoint(NamedTuple):
    """Used bytes and the bytes of each share at one time; an unknown one is None. ``low`` and ``high``: limits of the
    used bytes within the block that begins at ``at`` (Unix time).
    """

    at: float
    low: float
    high: float
    used: float
    live: float | None
    cached: float | None
    stranded: float | None
    overhead: float | None
    opaque: float | None
    unattributed: float | None


class Point(NamedTuple):
    """One block, or one sample, that begins at ``at`` (Unix time)."""

    at: float
    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseSeries:
    """Series of one device (``pid`` None) or process in the form that the store keeps.

    ``blocks`` are rows of the 15-minute tier: Unix time, count, then minimum, median, maximum of each signal;
    ``records`` the highest median of each signal in each tier so far. Unknown is None.
    """

    device_uuid: str
    pid: int | None
    start_ticks: int | None
    born_at: float
    records: tuple[tuple[float | None, ...], ...]
    blocks: tuple[tuple[float | None, ...], ...]


class History:
    """Series of all devices and processes, extended by each snapshot.

    Time is the snapshots' monotonic clock, times ``speedup``. Unix times are derived from the newest snapshot, so
    a step of the wall clock moves no sample relative to another.
    """

    def __init__(self, speedup: float = 1.0) -> None:
        self.speedup = speedup
        self.now = -inf
        self.taken_at = 0.0
        self.devices: dict[str, Series] = {}
        self.processes: dict[ProcessSeriesKey, Series] = {}
        self._ended: dict[ProcessSeriesKey, Series] = {}
        self._awaited: dict[SeriesKey, CoarseSeries] = {}
        self._awaited_until = inf
        self._series_made = 0
        self._max_samples = MAX_SAMPLES if speedup == 1 else int(MAX_SAMPLES * speedup / ACCELERATED_DISTANCE_SECONDS)

    def to_unix(self, at: float) -> float:
        """Convert a time of this clock to Unix time."""
        return self.taken_at - (self.now - at) / self.speedup

    def advance(self, snapshot: Snapshot) -> bool:
        """Advance the clock. Returns False, and nothing may be added, if the snapshot is not newer than the last."""
        now = snapshot.elapsed_seconds * self.speedup
        if now <= self.now:
            return False
        self.now, self.taken_at = now, snapshot.taken_at
        if self._awaited:
            self._awaited_until = min(self._awaited_until, now + MAX_WAIT_FOR_PROCESS_SECONDS * self.speedup)
            if now > self._awaited_until:
                self._awaited.clear()
        return True

    def device_series(self, uuid: str) -> Series:
        """Return the series of a device; create it if necessary."""
        series = self.devices.get(uuid)
        if series is None:
            series = self.devices[uuid] = self._make_series((uuid, None), DEVICE_SIGNAL_COUNT, DEVICE_SIGNAL_COUNT)
        return series

    def process_series(self, key: ProcessSeriesKey) -> Series | None:
        """Return the series of a process; create it if necessary. None if there are too many."""
        series = self.processes.get(key)
        if series is None and len(self.processes) < MAX_PROCESSES:
            series = self.processes[key] = self._make_series(key, USED + 1, MAX_PROCESS_SIGNALS)
        return series

    def end(self, key: ProcessSeriesKey) -> None:
        """Mark a process as ended. Its series is kept for some time."""
        series = self.processes.pop(key, None)
        if series is not None:
            series.ended_at = self.now
            self._ended.pop(key, None)
            self._ended[key] = series
            if len(self._ended) > MAX_ENDED_PROCESSES:
                del self._ended[next(iter(self._ended))]

    def forget(self, uuid: str) -> None:
        """Remove a device that no longer exists."""
        self.devices.pop(uuid, None)

    def newest_process(self, device_uuid: str, pid: int) -> ProcessKey | None:
        """Return the newest process with this pid that has or had a series on the device."""
        for series in (self.processes, self._ended):
            for uuid, process in reversed(series):
                if (uuid, process.pid) == (device_uuid, pid):
                    return process
        return None

    def series(
        self,
        key: SeriesKey,
        signal: HistorySignal,
        since: float = 0.0,
        resolution: float | None = None,
        until: float = inf,
    ) -> tuple[Point, ...]:
        """Return samples (resolution None or below 15 s) or the longest blocks that are not longer than
        ``resolution``.

        ``since`` and ``until`` are Unix times: a block that ends after ``since`` is included. Times at which the
        signal was unknown are left out. The last block is the one that has not closed yet. Empty if the device, process
        or signal is unknown.
        """
        series = self._find(key)
        signal_index = _SIGNAL_INDICES[signal]
        if series is None or signal_index >= series.signals:
            return ()
        fitting_tiers = [i for i, tier in enumerate(TIERS) if resolution is not None and tier.seconds <= resolution]
        block_seconds, times = 0.0, series.sample_times()
        columns: Iterable[array[float]] = [series.samples(signal_index)] * 3
        open_row = None
        if fitting_tiers:
            block_seconds, times = TIERS[fitting_tiers[-1]].seconds / self.speedup, series.times(fitting_tiers[-1])
            columns = (series.column(fitting_tiers[-1], signal_index, statistic) for statistic in (MIN, MEDIAN, MAX))
            if until > self.to_unix(series.open_since(fitting_tiers[-1])):
                open_row = series.open_row(fitting_tiers[-1])
        range_slice = self._time_slice(times, since - block_seconds, until)
        rows: Iterable[tuple[float, ...]] = zip(
            times[range_slice], *(column[range_slice] for column in columns), strict=True
        )
        if open_row is not None:
            rows = chain(rows, [(open_row[0], *open_row[2 + 3 * signal_index : 5 + 3 * signal_index])])
        points = (Point(self.to_unix(at), low, median, high) for at, low, median, high in rows if median == median)
        return tuple(point for point in points if since <= point.at + block_seconds and point.at < until)

    def shares(
        self, key: SeriesKey, since: float = 0.0, until: float = inf, resolution: float | None = None
    ) -> tuple[SharesPoint, ...]:
        """Return the shares of a device or process, as `series` does for one signal.

        In samples, what a process has taken since its agent's last report is opaque, as in the ledger.
        """
        signals = SIGNALS if key[1] is None else SIGNALS[:MAX_PROCESS_SIGNALS]
        is_samples = resolution is None or resolution < TIERS[0].seconds
        samples_since = since - LEAD_SECONDS if is_samples else since
        used = self.series(key, "used", samples_since, resolution, until)
        others = {
            signal: {point.at: point.median for point in self.series(key, signal, samples_since, resolution, until)}
            for signal in signals
            if signal not in ("used", "utilization")
        }
        points = (
            shares_of(point, *(others.get(name, {}).get(point.at) for name in _SHARE_SIGNALS), is_device=key[1] is None)
            for point in used
        )
        return (
            tuple(point for point in _without_report_delay(points) if point.at >= since)
            if is_samples
            else tuple(points)
        )

    def machine_shares(
        self, uuids: Iterable[str], since: float = 0.0, until: float = inf, resolution: float | None = None
    ) -> tuple[SharesPoint, ...]:
        """Return the sums of the shares of these devices, at the times of the device with most points."""
        shares_by_device = sorted((self.shares((uuid, None), since, until, resolution) for uuid in uuids), key=len)
        if not shares_by_device or not shares_by_device[-1]:
            return ()
        *others, times = shares_by_device
        starts = [[point.at for point in points] for points in others]
        half_interval = (times[-1].at - times[0].at) / max(1, len(times) - 1) / 2
        sums = []
        for point in times:
            indices = (bisect_right(each, point.at + half_interval) - 1 for each in starts)
            parts = [points[index] for points, index in zip(others, indices, strict=True) if index >= 0]
            sums.append(_sum_of_shares(point, [part for part in parts if point.at - part.at <= 3 * half_interval]))
        return tuple(sums)

    def shares_at(self, at: float, resolution: float | None = None) -> Iterator[tuple[SeriesKey, Series, SharesPoint]]:
        """Yield the shares of all devices and of the processes on them at a Unix time, in samples or in blocks as
        `series` does. A process that ended later is one of them while its series is kept.
        """
        series: Iterable[tuple[SeriesKey, Series]] = (
            *(((uuid, None), each) for uuid, each in self.devices.items()),
            *self._ended.items(),
            *self.processes.items(),
        )
        is_samples = resolution is None or resolution < TIERS[0].seconds
        for key, each in series:
            since = at - GAP_RATIO * each.sample_interval / self.speedup if is_samples else at
            points = self.shares(key, since, nextafter(at, inf), resolution) if at < self.to_unix(each.ended_at) else ()
            if points:
                yield key, each, points[-1]

    def _time_slice(self, times: array[float], since: float, until: float) -> slice:
        """Return where the times between two Unix times are, with some second around them."""
        return slice(bisect_left(times, self._from_unix(since) - 1), bisect_right(times, self._from_unix(until) + 1))

    def age_seconds(self, key: SeriesKey) -> float:
        """Return the seconds of this clock since the first sample of the device or process; 0 if it is unknown."""
        series = self._find(key)
        return 0.0 if series is None else self.now - series.started

    def coarse_series(self) -> Iterator[CoarseSeries]:
        """Yield all series to be stored when the daemon stops. Snapshots may be added between two of them."""
        for uuid in tuple(self.devices):
            if uuid in self.devices:
                yield self._coarse((uuid, None), self.devices[uuid])
        for key in tuple(self.processes):
            if key in self.processes:
                yield self._coarse(key, self.processes[key])
        yield from tuple(self._awaited.values())

    def restore(self, series: Iterable[CoarseSeries]) -> None:
        """Restore series: each when its device or process has a sample again within ten minutes."""
        self._awaited.update(((each.device_uuid, process_key(each.pid, each.start_ticks)), each) for each in series)

    def _make_series(self, key: SeriesKey, min_signals: int, max_signals: int) -> Series:
        self._series_made += 1
        # Blocks of different series close at different times, so no tick closes all of them.
        phase = float(self._series_made * 7 % 60)
        stored = self._awaited.pop(key, None)
        widths = [len(record) for record in stored.records] if stored is not None else []
        if stored is None or widths not in [[signals] * len(TIERS) for signals in range(min_signals, max_signals + 1)]:
            return Series(min_signals, self.now, phase, self._max_samples)
        series = Series(widths[0], self.now, phase, self._max_samples)
        series.started = min(self.now, self._from_unix(stored.born_at))
        width = 2 + 3 * series.signals
        blocks = (
            [self._from_unix(row[0]), *(nan if value is None else value for value in row[1:])]
            for row in stored.blocks
            if len(row) == width and row[0] is not None and row[0] < self.taken_at
        )
        series.restore(blocks, [[-inf if value is None else value for value in record] for record in stored.records])
        return series

    def _from_unix(self, unix: float) -> float:
        return self.now - (self.taken_at - unix) * self.speedup

    def _find(self, key: SeriesKey) -> Series | None:
        uuid, process = key
        if process is None:
            return self.devices.get(uuid)
        return self.processes.get((uuid, process)) or self._ended.get((uuid, process))

    def _coarse(self, key: SeriesKey, series: Series) -> CoarseSeries:
        records = tuple(
            tuple(
                # Blocks of the longest tier are stored themselves.
                _finite_or_none(peak if tier == QUARTER_HOUR else max(peak, highest(series.column(tier, signal))))
                for signal, peak in enumerate(series.past_peaks[tier])
            )
            for tier in range(len(TIERS))
        )
        blocks = tuple((self.to_unix(at), *map(_finite_or_none, row)) for at, row in series.tiers[QUARTER_HOUR].rows())
        uuid, process = key
        return CoarseSeries(
            device_uuid=uuid,
            pid=process.pid if process else None,
            start_ticks=process.start_ticks if process else None,
            born_at=self.to_unix(series.started),
            records=records,
            blocks=blocks,
        )


_SHARE_SIGNALS: tuple[HistorySignal, ...] = ("live", "held", "stranded", "unattributed", "opaque")


def shares_of(
    point: Point,
    live: float | None,
    held: float | None,
    stranded: float | None,
    unattributed: float | None,
    opaque: float | None,
    *,
    is_device: bool,
) -> SharesPoint:
    """Divide the used bytes into shares. The overhead takes the difference of the medians of a block.

    ``is_device``: a device. A process is opaque as a whole while its live bytes are unknown.
    """
    used = point.median
    held_in_pools = held if live is not None and held is not None else None
    if not is_device:
        opaque = used if held_in_pools is None else None
    stranded = None if held_in_pools is None else min(stranded or 0.0, max(0.0, held_in_pools - (live or 0.0)))
    cached = None if held_in_pools is None else max(0.0, held_in_pools - (live or 0.0) - (stranded or 0.0))
    remaining = max(0.0, used - (held_in_pools or 0.0) - (unattributed or 0.0) - (opaque or 0.0))
    overhead = None if held_in_pools is None else remaining
    return SharesPoint(point.at, point.low, point.high, used, live, cached, stranded, overhead, opaque, unattributed)


MAX_REPORT_AGE_SECONDS = 1.5
"""Maximum age of a report in real seconds: agents report once a second."""
LEAD_SECONDS = 10.0
"""Time before a range whose samples show what the overhead was at its beginning."""


def _without_report_delay(points: Iterable[SharesPoint]) -> Iterator[SharesPoint]:
    """Yield the samples, with what was taken from the driver since a report as opaque and not as overhead.

    At the time of a report, the driver's count was one of those of the last ``MAX_REPORT_AGE_SECONDS``, unless it has
    fallen and risen between two samples.
    """
    window: deque[SharesPoint] = deque()
    known_overhead: float | None = None
    for point in points:
        window.append(point)
        while len(window) > 1 and window[1].at <= point.at - MAX_REPORT_AGE_SECONDS:
            window.popleft()
        overhead = point.overhead
        if overhead is None or known_overhead is None:
            known_overhead = overhead
            yield point
            continue
        counts, claimed = [each.used for each in window], point.used - overhead
        known_overhead = min(known_overhead, max(counts) - claimed)
        known_overhead = max(known_overhead, min(min(counts) - claimed, *(each.overhead or 0.0 for each in window)))
        yield (
            point._replace(overhead=known_overhead, opaque=(point.opaque or 0.0) + overhead - known_overhead)
            if known_overhead < overhead
            else point
        )


def _sum_of_shares(point: SharesPoint, others: Iterable[SharesPoint]) -> SharesPoint:
    low, high, used, *shares = zip(*(each[1:] for each in (point, *others)), strict=True)
    parts = [[value for value in share if value is not None] for share in shares]
    return SharesPoint(point.at, sum(low), sum(high), sum(used), *(sum(values) if values else None for values in parts))


def _finite_or_none(value: float) -> float | None:
    return value if isfinite(value) else None


MAX_SAMPLES = 900
MIN_SAMPLE_DISTANCE_SECONDS = 0.75
"""Minimum distance of two samples; a closer one is dropped."""
GAP_RATIO = 3.0
"""Number of usual distances for which a sample is valid if no other one follows."""
MIN_AVERAGE_DISTANCE_SECONDS = 1.0
"""Minimum distance of two samples on average, with which those that are kept cover 15 minutes at any interval."""
ACCELERATED_DISTANCE_SECONDS = 4.0
"""Distance of two samples in accelerated time: `gpumond demo` takes five readings a second, each 4 s apart."""


class HistoryTier(NamedTuple):
    seconds: int
    rows: int


TIERS = (HistoryTier(15, 240), HistoryTier(60, 240), HistoryTier(300, 144), HistoryTier(900, 96))
MINUTE, FIVE_MINUTES, QUARTER_HOUR = 1, 2, 3
"""Indices in TIERS."""
MIN, MEDIAN, MAX = 0, 1, 2
"""Statistics of a block, by their index."""


class HistoryRows:
    """The newest ``capacity`` rows: a time, and ``width`` numbers with seven digits.

    New rows are packed when they are read, since that takes less time for a quarter of a minute than for each.
    """

    def __init__(self, width: int, capacity: int) -> None:
        self.width = width
        self._capacity = capacity
        self._times = array("d")
        self._data = array("f")
        self._head = 0
        self._new: list[Sequence[float]] = []

    def __len__(self) -> int:
        self._pack()
        return len(self._times)

    @property
    def size_bytes(self) -> int:
        """Size in bytes, including the arrays' spare capacity."""
        self._pack()
        return self._times.__sizeof__() + self._data.__sizeof__()

    def append(self, row: Sequence[float]) -> None:
        """Append a row, its time first. It replaces the oldest if there are enough."""
        self._new.append(row)

    def times(self, count: int) -> array[float]:
        """Return the times of the last ``count`` rows, or all if there are fewer, the oldest first."""
        self._pack()
        return self._newest(self._times, 1, 0, count)

    def column(self, index: int, count: int) -> array[float]:
        """Return one number of each of the last ``count`` rows."""
        self._pack()
        return self._newest(self._data, self.width, index, count)

    def newest_rows(self, count: int) -> array[float]:
        """Return the numbers of the last ``count`` rows, concatenated."""
        self._pack()
        head, length = self._head * self.width, min(count, len(self._times)) * self.width
        if head >= length:
            return self._data[head - length : head]
        return self._data[len(self._data) - (length - head) :] + self._data[:head]

    def rows(self) -> Iterator[tuple[float, array[float]]]:
        """Yield time and numbers of each row, the oldest first."""
        flat = self.newest_rows(self._capacity)
        for number, at in enumerate(self.times(self._capacity)):
            yield at, flat[number * self.width : (number + 1) * self.width]

    def next_replaced(self) -> array[float]:
        """Return the numbers of the row that the next one replaces; empty if it replaces none."""
        self._pack()
        full = len(self._times) == self._capacity
        return self._data[self._head * self.width : (self._head + full) * self.width]

    def widen(self, count: int) -> None:
        """Add numbers to all rows, which are unknown so far."""
        flat, old, wide = self.newest_rows(self._capacity), self.width, self.width + count
        self._times, self._head = self.times(self._capacity), 0
        self._data = array("f", (nan,)) * (len(self._times) * wide)
        for index in range(old):
            self._data[index::wide] = flat[index::old]
        self.width = wide

    def _pack(self) -> None:
        if not self._new:
            return
        new, self._new = self._new, []
        while new:
            spare_rows = self._capacity - len(self._times)
            part = new[: spare_rows or self._capacity - self._head]
            del new[: len(part)]
            begin = len(self._times) if spare_rows else self._head
            end, width = begin + len(part), self.width
            self._times[begin:end] = array("d", [row[0] for row in part])
            self._data[begin * width : end * width] = array("f", [*chain.from_iterable([row[1:] for row in part])])
            if not spare_rows:
                self._head = end % self._capacity
            elif len(self._times) == self._capacity:  # drop the spare capacity of arrays that grow
                self._times, self._data = array("d", self._times), array("f", self._data)

    def _newest(self, data: array[float], width: int, index: int, count: int) -> array[float]:
        head, count = self._head, min(count, len(self._times))
        if head >= count:
            return data[(head - count) * width + index : head * width : width]
        begin = len(self._times) - (count - head)
        return data[begin * width + index :: width] + data[index : head * width : width]


class Series:
    """Samples and blocks of one device or process. Times are those of the History's clock.

    A series has as many signals as its longest row: further ones are unknown, and take no memory. ``name``: the
    program's name, empty if it is unknown.
    """

    def __init__(self, signals: int, started: float, phase: float, max_samples: int = MAX_SAMPLES) -> None:
        self.signals = signals
        self.name = ""
        self.started = started
        self.ended_at = inf
        self.rows = HistoryRows(signals, max_samples)
        self._next_sample_at = -inf
        self.tiers = tuple(HistoryRows(1 + 3 * signals, tier.rows) for tier in TIERS)
        self.past_peaks = [[-inf] * signals for _ in TIERS]
        """Highest median of each tier and signal among the blocks that are no longer kept."""
        self._phase = phase
        self._block_ends = [self._block_end(started, tier) for tier in TIERS]
        self._samples_added = 0
        self._samples_at_close = [0, 0]
        """Numbers of samples when the last block of 15 s, and the last minute, closed."""
        self._minutes_since_close = [0, 0]
        """Numbers of minutes since the last block of 5 minutes, and of 15 minutes, closed."""

    def add(self, row: Sequence[float]) -> int:
        """Add the row (time, signals …). Returns the number of tiers, from the shortest on, of which a block
        has closed.
        """
        at = row[0]
        if at < self._next_sample_at:
            return 0
        self._next_sample_at = max(
            self._next_sample_at + MIN_AVERAGE_DISTANCE_SECONDS, at + MIN_SAMPLE_DISTANCE_SECONDS
        )
        closed = 0
        if at >= self._block_ends[0]:
            closed = self._close(at)
        missing = self.signals + 1 - len(row)
        if missing > 0:
            row = (*row, *[nan] * missing)
        elif missing:
            self._widen(-missing)
        self.rows.append(row)
        self._samples_added += 1
        return closed

    def column(self, tier: int, signal: int, statistic: int = MEDIAN, count: int = MAX_SAMPLES) -> array[float]:
        """Return one number of each of the newest ``count`` closed blocks, oldest first; NaN where it is unknown."""
        rows = self.tiers[tier]
        if signal >= self.signals:
            return array("f", (nan,)) * min(count, len(rows))
        return rows.column(1 + 3 * signal + statistic, count)

    def times(self, tier: int, count: int = MAX_SAMPLES) -> array[float]:
        return self.tiers[tier].times(count)

    def counts(self, tier: int, count: int = MAX_SAMPLES) -> array[float]:
        return self.tiers[tier].column(0, count)

    @property
    def sample_interval(self) -> float:
        """The usual seconds between two samples."""
        times = self.sample_times()
        return (
            max(MIN_AVERAGE_DISTANCE_SECONDS, (times[-1] - times[0]) / (len(times) - 1))
            if len(times) > 1
            else MIN_AVERAGE_DISTANCE_SECONDS
        )

    def open_since(self, tier: int) -> float:
        """Return when the block that has not closed yet began."""
        return self._block_ends[tier] - TIERS[tier].seconds

    def open_row(self, tier: int) -> list[float] | None:
        """Return the row of the block that has not closed yet; None if it has no sample."""
        begin = self.open_since(tier)
        count = sum(1 for at in self.rows.times(MAX_SAMPLES) if at >= begin)
        return [begin, *_summary_of_samples(self.rows.newest_rows(count), self.signals)] if count else None

    def samples(self, signal: int, count: int | None = None) -> array[float]:
        return self.rows.column(signal, count or len(self.rows))

    def sample_times(self) -> array[float]:
        return self.rows.times(len(self.rows))

    def restore(self, blocks: Iterable[Sequence[float]], past_peaks: Sequence[Sequence[float]]) -> None:
        for block in blocks:
            self.tiers[QUARTER_HOUR].append(block)
        self.past_peaks = [list(peaks) for peaks in past_peaks]

    def _widen(self, count: int) -> None:
        self.signals += count
        self.rows.widen(count)
        for rows, peaks in zip(self.tiers, self.past_peaks, strict=True):
            rows.widen(3 * count)
            peaks += [-inf] * count

    def _block_end(self, at: float, tier: HistoryTier) -> float:
        return (floor((at - self._phase) / tier.seconds) + 1) * tier.seconds + self._phase

    def _close(self, at: float) -> int:
        closed = 0
        for tier_index, tier in enumerate(TIERS):
            if at < self._block_ends[tier_index]:
                break
            begin = self._block_ends[tier_index] - tier.seconds
            if tier_index <= MINUTE:
                count = self._samples_added - self._samples_at_close[tier_index]
                self._samples_at_close[tier_index] = self._samples_added
                summary = _summary_of_samples(self.rows.newest_rows(count), self.signals) if count else None
            else:
                count, self._minutes_since_close[tier_index - 2] = self._minutes_since_close[tier_index - 2], 0
                summary = _summary_of_blocks(self.tiers[MINUTE].newest_rows(count), self.signals) if count else None
            if summary is not None:
                self._append(tier_index, begin, summary)
                if tier_index == MINUTE:
                    self._minutes_since_close[0] += 1
                    self._minutes_since_close[1] += 1
            self._block_ends[tier_index] = self._block_end(at, tier)
            closed = tier_index + 1
        return closed

    def _append(self, tier: int, at: float, row: Sequence[float]) -> None:
        rows, peaks = self.tiers[tier], self.past_peaks[tier]
        for signal, median in enumerate(rows.next_replaced()[1 + MEDIAN :: 3]):
            if median > peaks[signal]:
                peaks[signal] = median
        rows.append((at, *row))


def _summary_of_samples(flat: array[float], signals: int) -> list[float]:
    summary, total = [len(flat) / signals], sum(flat)
    for signal in range(signals):
        values = flat[signal::signals]
        column = sorted(values if total == total else _without_nan(values))
        summary += (column[0], _median_of_sorted(column), column[-1]) if column else (nan, nan, nan)
    return summary


def _summary_of_blocks(flat: array[float], signals: int) -> list[float]:
    width = 1 + 3 * signals
    summary = [sum(flat[::width])]
    for column in range(1, width, 3):
        medians = _sorted_without_nan(flat[column + MEDIAN :: width])
        if medians:
            lows, highs = flat[column + MIN :: width], flat[column + MAX :: width]
            summary += (min(_without_nan(lows)), _median_of_sorted(medians), max(_without_nan(highs)))
        else:
            summary += (nan, nan, nan)
    return summary


def _sorted_without_nan(values: array[float]) -> list[float]:
    total = sum(values)
    return sorted(values if total == total else _without_nan(values))


def _without_nan(values: Iterable[float]) -> Iterator[float]:
    return (value for value in values if value == value)


def _median_of_sorted(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def highest(values: Iterable[float]) -> float:
    return max(_without_nan(values), default=-inf)
