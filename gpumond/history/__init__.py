"""Bounded history of each device and each process life. No I/O.

A *life* is one process on one device. Each device and each life has the newest 900
samples, at most one a second, and blocks (minimum, median, maximum, number of samples):

    block    15 s   1 min   5 min   15 min
    kept       1 h     4 h    12 h     24 h

Medians of 15 s and 1 min are those of the samples, of 5 and 15 min those of the minutes. A block closes by time: it
exists if it has at least one sample; a gap has no block.

Memory: a row of samples is 8 bytes for its time and for each signal, a row of blocks 8 bytes for its time, its count
and three for each signal. A life (3 signals) needs 900 x 32 + 720 x 88 = 92 kB, a device (5 signals) 900 x 48 + 720 x
136 = 141 kB: 55 MB for 64 devices and 500 lives, which is 53 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite, nan
from typing import Literal, NamedTuple

from gpumond.history.series import MAX, MEDIAN, MIN, QUARTER, SAMPLES, TIERS, Series, highest
from gpumond.model.process import ProcessKey, process_key
from gpumond.model.snapshot import Snapshot

Signal = Literal["used", "live", "held", "utilization", "unclaimed"]
SIGNALS: tuple[Signal, ...] = ("used", "live", "held", "utilization", "unclaimed")
"""Signals in bytes; the utilisation is a ratio. Live and held are reported by agents and summed over their pools."""
USED, LIVE, HELD, UTILIZATION, UNCLAIMED = range(5)
LIFE_SIGNALS = 3
"""Number of signals of a life: the first three."""

MAX_LIVES = 1000
"""Maximum number of lives with a history; a further program is observed without one."""
MAX_ENDED = 32
"""Number of ended lives that are kept, the newest."""
AWAITED_SECONDS = 600.0
"""Time that a restored life waits for its process."""

Life = tuple[str, ProcessKey]
"""Device UUID and process"""

SeriesKey = tuple[str, ProcessKey | None]
"""A life, or a device as a whole without a process"""


class Point(NamedTuple):
    """One block, or one sample, that begins at ``at`` (unix time)."""

    at: float
    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coarse:
    """Series of one device (``pid`` None) or life in the form that the store keeps.

    ``blocks`` are rows of the 15-minute tier: unix time, count, then minimum, median, maximum of each signal;
    ``records`` the highest median of each signal in each tier so far. Unknown is None.
    """

    device_uuid: str
    pid: int | None
    start_ticks: int | None
    born_at: float
    records: tuple[tuple[float | None, ...], ...]
    blocks: tuple[tuple[float | None, ...], ...]


class History:
    """Series of all devices and lives, extended by each snapshot.

    Time is the snapshots' monotonic clock, times ``pace``. Unix times are derived from the newest snapshot, so that
    a step of the wall clock moves no sample relative to another.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace
        self.now = -inf
        self.taken_at = 0.0
        self.devices: dict[str, Series] = {}
        self.lives: dict[Life, Series] = {}
        self._ended: dict[Life, Series] = {}
        self._awaited: dict[SeriesKey, Coarse] = {}
        self._awaited_until = inf
        self._born = 0

    def unix(self, at: float) -> float:
        """Convert a time of this clock to unix time."""
        return self.taken_at - (self.now - at) / self.pace

    def begin(self, snapshot: Snapshot) -> bool:
        """Advance the clock. Returns False, and nothing may be added, if the snapshot is not newer than the last."""
        now = snapshot.elapsed_seconds * self.pace
        if now <= self.now:
            return False
        self.now, self.taken_at = now, snapshot.taken_at
        if self._awaited:
            self._awaited_until = min(self._awaited_until, now + AWAITED_SECONDS * self.pace)
            if now > self._awaited_until:
                self._awaited.clear()
        return True

    def device(self, uuid: str) -> Series:
        """Return the series of a device; create it if necessary."""
        series = self.devices.get(uuid)
        if series is None:
            series = self.devices[uuid] = self._series((uuid, None), len(SIGNALS))
        return series

    def life(self, life: Life) -> Series | None:
        """Return the series of a life; create it if necessary. None if there are too many."""
        series = self.lives.get(life)
        if series is None and len(self.lives) < MAX_LIVES:
            series = self.lives[life] = self._series(life, LIFE_SIGNALS)
        return series

    def end(self, life: Life) -> None:
        """Mark a life as ended. Its series is kept for some time."""
        series = self.lives.pop(life, None)
        if series is not None:
            self._ended.pop(life, None)
            self._ended[life] = series
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def forget(self, uuid: str) -> None:
        """Remove a device that no longer exists."""
        self.devices.pop(uuid, None)

    def newest(self, device_uuid: str, pid: int) -> ProcessKey | None:
        """Return the newest process with this pid that has or had a life on the device."""
        for lives in (self.lives, self._ended):
            for uuid, process in reversed(lives):
                if (uuid, process.pid) == (device_uuid, pid):
                    return process
        return None

    def series(
        self, key: SeriesKey, signal: Signal, since: float = 0.0, resolution: float | None = None
    ) -> tuple[Point, ...]:
        """Return samples (resolution None or below 15 s) or the longest blocks that are not longer than
        ``resolution``.

        ``since`` is unix time. Times at which the signal was unknown are left out. The last block is the one that
        has not closed yet. Empty if the device, life or signal is unknown.
        """
        found = self._find(key)
        place = SIGNALS.index(signal)
        if found is None or place >= found.signals:
            return ()
        fitting = [i for i, tier in enumerate(TIERS) if resolution is not None and tier.seconds <= resolution]
        if not fitting:
            values = found.samples(place)
            rows: Iterable[tuple[float, ...]] = zip(found.sample_times(), values, values, values, strict=True)
        else:
            columns = (found.column(fitting[-1], place, kind) for kind in (MIN, MEDIAN, MAX))
            rows = zip(found.times(fitting[-1]), *columns, strict=True)
            running = found.running(fitting[-1])
            if running is not None:
                rows = chain(rows, [(running[0], *running[2 + 3 * place : 5 + 3 * place])])
        points = (Point(self.unix(at), low, median, high) for at, low, median, high in rows if median == median)
        return tuple(point for point in points if point.at >= since)

    def age(self, key: SeriesKey) -> float:
        """Return the seconds of this clock since the device or life was first seen; 0 if it is unknown."""
        found = self._find(key)
        return 0.0 if found is None else self.now - found.born

    def coarse(self) -> Iterator[Coarse]:
        """Yield all series to be stored when the daemon stops. Snapshots may be added between two of them."""
        for uuid in tuple(self.devices):
            if uuid in self.devices:
                yield self._coarse((uuid, None), self.devices[uuid])
        for life in tuple(self.lives):
            if life in self.lives:
                yield self._coarse(life, self.lives[life])
        yield from tuple(self._awaited.values())

    def restore(self, coarse: Iterable[Coarse]) -> None:
        """Restore series: each when its device or life is seen again within ten minutes."""
        self._awaited.update(((one.device_uuid, process_key(one.pid, one.start_ticks)), one) for one in coarse)

    def _series(self, key: SeriesKey, signals: int) -> Series:
        self._born += 1
        # Blocks of different series close at different times, so that no tick closes all of them.
        phase = float(self._born * 7 % 60)
        kept = self._awaited.pop(key, None)
        if kept is None or [len(record) for record in kept.records] != [signals] * len(TIERS):
            return Series(signals, self.now, phase)
        series = Series(signals, self.now, phase)
        series.born = min(self.now, self._moment(kept.born_at))
        width = 2 + 3 * signals
        blocks = (
            [self._moment(row[0]), *(nan if value is None else value for value in row[1:])]
            for row in kept.blocks
            if len(row) == width and row[0] is not None and row[0] < self.taken_at
        )
        series.restore(blocks, [[-inf if value is None else value for value in record] for record in kept.records])
        return series

    def _moment(self, unix: float) -> float:
        return self.now - (self.taken_at - unix) * self.pace

    def _find(self, key: SeriesKey) -> Series | None:
        uuid, process = key
        if process is None:
            return self.devices.get(uuid)
        return self.lives.get((uuid, process)) or self._ended.get((uuid, process))

    def _coarse(self, key: SeriesKey, series: Series) -> Coarse:
        records = tuple(
            tuple(
                # Blocks of the longest tier are stored themselves.
                _known(record if place == QUARTER else max(record, highest(series.column(place, signal))))
                for signal, record in enumerate(series.records[place])
            )
            for place in range(len(TIERS))
        )
        width = 2 + 3 * series.signals
        flat = series.tiers[QUARTER].newest(SAMPLES)
        rows = (flat[i : i + width] for i in range(0, len(flat), width))
        blocks = tuple((self.unix(row[0]), *map(_known, row[1:])) for row in rows)
        uuid, process = key
        return Coarse(
            device_uuid=uuid,
            pid=process.pid if process else None,
            start_ticks=process.start_ticks if process else None,
            born_at=self.unix(series.born),
            records=records,
            blocks=blocks,
        )


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
