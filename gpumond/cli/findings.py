"""Findings of ``gpumond diagnose`` on one log: curves, verdicts and a summary, as text or HTML. Not a verb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpumond.cli import html_report
from gpumond.cli.chart import ChartCurve, draw
from gpumond.cli.table import safe
from gpumond.importers import Change
from gpumond.importers.builder import NAMELESS
from gpumond.importers.rows import day_and_time
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import Snapshot
from gpumond.model.units import counted, duration, human
from gpumond.model.verdicts import SHAPES

MAX_SERIES = 1000
MAX_CHANGES = 40
MAX_CHARTS = 24

Key = tuple[str, ProcessKey | None]


@dataclass(slots=True)
class _Series:
    name: str
    curve: ChartCurve = field(default_factory=ChartCurve)
    top: float | None = None
    peak: int = 0
    changes: list[tuple[Change, float]] = field(default_factory=list)
    left_out: int = 0

    @property
    def found(self) -> bool:
        return any(change.verdict.kind not in SHAPES for change, _ in self.changes)


class Findings:
    """The report on one log: a chart and the verdicts of each series, then a summary.

    Memory is bounded: beyond the limits, series and verdicts are only counted.
    """

    def __init__(self) -> None:
        self._series: dict[Key, _Series] = {}
        self._unseen: set[Key] = set()
        self._kinds: Counter[str] = Counter()
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None
        self._count = 0

    def add_snapshot(self, snapshot: Snapshot) -> None:
        self._first = self._first or snapshot
        self._last = snapshot
        self._count += 1
        elapsed = snapshot.elapsed_seconds
        held_bytes = {
            (pool.device_uuid, report.key): pool.live_bytes for report in snapshot.reports for pool in report.pools
        }
        for device in snapshot.devices:
            used = device.used_bytes
            if used is None:
                nameless = (
                    held for (uuid, key), held in held_bytes.items() if (uuid, key.pid) == (device.uuid, NAMELESS)
                )
                used = next(nameless, None)
            if used is not None and not device.missed:
                self._point(
                    (device.uuid, None), f"gpu {device.index} {device.name}".rstrip(), elapsed, used, device.size_bytes
                )
            for process_key, process in device.processes_by_key.items():
                held = held_bytes.get((device.uuid, process_key), process.used_bytes)
                if held is not None and not device.missed:
                    self._point((device.uuid, process_key), process.comm or "", elapsed, held, None)

    def add(self, change: Change, elapsed: float) -> None:
        series = self._get((change.verdict.device_uuid, change.verdict.process), "")
        if change.onset:
            self._kinds[change.verdict.kind] += 1
        elif change.verdict.kind == "growing":
            self._kinds["growing"] -= 1  # a suspicion that has ended is not a finding
        if series is not None and len(series.changes) < MAX_CHANGES:
            series.changes.append((change, elapsed))
        elif series is not None:
            series.left_out += 1

    def report(self) -> Iterator[str]:
        """Yield the lines of the text report."""
        for key, series in self._shown():
            yield from self._section(key, series)
            yield ""
        yield from self._others()
        yield from self._summary()

    def html(self, name: str, remarks: Sequence[str]) -> str:
        """Return the report as an HTML document. ``remarks``: messages about ignored parts of the log."""
        parts = [html_report.paragraph(line) for line in (*self._summary(), *self._others(), *remarks)]
        for key, series in self._shown():
            found = [(elapsed, change) for change, elapsed in series.changes]
            marks = [(elapsed, change.verdict.kind) for elapsed, change in found if _is_finding(change)]
            parts.append(html_report.heading(", ".join(_title(key, series))))
            parts.append(html_report.curve(series.curve.points(), series.top, marks))
            rows: list[tuple[str, str, str]] = [
                (day_and_time(change.at), change.verdict.kind, _outcome(change)) for _, change in found
            ]
            if series.left_out:
                rows.append(("", "", f"and {series.left_out} more"))
            if rows:
                parts.append(html_report.table(("TIME", "VERDICT", "RESULT"), rows))
        return html_report.page(f"Memory in {name}", parts)

    def _shown(self) -> Iterator[tuple[Key, _Series]]:
        """Yield the series that have a chart: those with findings first, then devices, in the order of their names."""
        chosen = sorted(self._series.items(), key=lambda entry: (not entry[1].found, entry[0][1] is not None))
        shown = {key for key, _ in chosen[:MAX_CHARTS]}
        for key, series in sorted(self._series.items(), key=lambda entry: (entry[0][0], entry[0][1] or ())):
            if key in shown:
                yield key, series

    def _others(self) -> Iterator[str]:
        others = len(self._series) - min(MAX_CHARTS, len(self._series)) + len(self._unseen)
        if others:
            yield f"{others} more series without a finding" if not self._unseen else f"{others} more series"

    def _section(self, key: Key, series: _Series) -> Iterator[str]:
        yield safe("  ".join(_title(key, series)))
        yield from draw(series.curve, series.top, [at for change, at in series.changes if _is_finding(change)])
        for change, _ in series.changes:
            outcome = _outcome(change)
            yield safe(f"  {day_and_time(change.at)}  {change.verdict.kind}{outcome and ': '}{outcome}")
        if series.left_out:
            yield f"  and {series.left_out} more"

    def _summary(self) -> Iterator[str]:
        if self._first is None or self._last is None:
            return
        passed = self._last.elapsed_seconds - self._first.elapsed_seconds
        devices = sum(process is None for _, process in self._series)
        yield (
            f"{counted(self._count, 'reading')} over {duration(passed)}: {counted(devices, 'device')}, "
            f"{len(self._series) - devices + len(self._unseen)} processes"
        )
        found = [f"{count} {kind}" for kind, count in sorted(self._kinds.items()) if count and kind not in SHAPES]
        yield f"found: {', '.join(found)}" if found else "found: nothing that requires action"

    def _point(self, key: Key, name: str, elapsed: float, value: int, top: int | None) -> None:
        series = self._get(key, name)
        if series is not None:
            series.curve.add(elapsed, value)
            series.name = series.name or name
            series.top, series.peak = top, max(series.peak, value)

    def _get(self, key: Key, name: str) -> _Series | None:
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                self._unseen.add(key)
                return None
            series = self._series[key] = _Series(name)
        return series


def _title(key: Key, series: _Series) -> list[str]:
    uuid, process = key
    pid = f" pid {process.pid}" if process else ""
    return [part for part in (uuid + pid, series.name, f"peak {human(series.peak)}") if part]


def _is_finding(change: Change) -> bool:
    return change.onset and change.verdict.kind not in SHAPES


def _outcome(change: Change) -> str:
    return change.verdict.summary if change.onset else "ended"
