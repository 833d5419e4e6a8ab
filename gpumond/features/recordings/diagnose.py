"""``gpumond diagnose FILE``: print verdicts on a recorded log."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from gpumond.cli.arguments import DONE, add_option, positive_type, print_error
from gpumond.cli.progress import with_progress
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import duration_text, parse_seconds_argument, parse_size_argument, plural, size_text
from gpumond.facts.verdicts import PATTERN_NAMES
from gpumond.features.recordings.csv_log import live_and_held_bytes
from gpumond.features.recordings.formats import FORMATS, snapshots
from gpumond.features.recordings.reader import Remarks, open_lines, time_text
from gpumond.features.recordings.snapshots import UNKNOWN_PID
from gpumond.view import html_report
from gpumond.view.text import ChartCurve, draw_chart, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="log file, optionally compressed with gzip; - is standard input")
    add_option(
        parser,
        "--format",
        "your log's format (auto: detected from its first line)",
        choices=("auto", *sorted(each.name for each in FORMATS)),
        default="auto",
    )
    add_option(
        parser,
        "--size SIZE",
        "size of each GPU, if your log doesn't contain it, such as 80GiB",
        type=positive_type(parse_size_argument),
    )
    add_option(
        parser,
        "--interval DURATION",
        "time between readings, if your log has no timestamps",
        type=positive_type(parse_seconds_argument),
    )
    add_option(parser, "--json", "print one JSON object per line, for each verdict that begins or ends")
    add_option(parser, "--html FILE", "write a report with charts to this HTML file", type=Path)


def run(arguments: argparse.Namespace) -> int:
    html_report.check_report_path(arguments.html)
    lines = open_lines(arguments.file)
    remarks = Remarks(lines.name)
    log_snapshots = snapshots(lines, arguments.format, remarks, arguments.size, arguments.interval)
    findings = Findings() if arguments.html is not None or not arguments.json else None
    try:
        all_sizes_known = _diagnose_snapshots(log_snapshots, findings, arguments.json)
    finally:
        lines.close()
        for remark in remarks:
            print_error(f"gpumond: {lines.name}: {remark}")
    if not all_sizes_known:
        print(
            f"gpumond: {lines.name}: the log doesn't contain the GPU's size, so time to full and memory pressure are"
            " unknown; pass it with --size SIZE",
            file=sys.stderr,
        )
    if findings is not None and arguments.html is not None:
        html_report.write_report(arguments.html, findings.html(lines.name, list(remarks)))
    if findings is not None and not arguments.json:
        print("\n".join(findings.report()))
    return DONE


def _diagnose_snapshots(log_snapshots: Iterable[Snapshot], findings: Findings | None, as_json: bool) -> bool:
    """Diagnose the snapshots and report changes. Returns True if the capacity of every device is known."""
    diagnosis, changes = Diagnosis(), VerdictChanges()
    without_size: set[str] = set()
    for snapshot in with_progress(log_snapshots, "snapshots read"):
        diagnosis = diagnose(diagnosis, snapshot)
        without_size.update(device.uuid for device in snapshot.devices if device.size_bytes is None and device.up)
        for change in changes.update(diagnosis.verdicts, snapshot.taken_at):
            if as_json:
                print(_json_line(change), flush=True)
            if findings is not None:
                findings.add(change, snapshot.elapsed_seconds)
        if findings is not None:
            findings.add_snapshot(snapshot)
    return not without_size


def _json_line(change: VerdictChange) -> str:
    verdict = change.verdict
    evidence = dict(verdict.evidence)
    return json.dumps(
        {
            "time": change.at,
            "uuid": verdict.device_uuid,
            "pid": verdict.pid,
            "kind": verdict.kind,
            "onset": change.onset,
            "slope_bytes_per_second": evidence.get("slope_bytes_per_second"),
            "time_to_full_seconds": verdict.time_to_full_seconds,
            "evidence": evidence,
        }
    )


VerdictKey = tuple[str, ProcessKey | None, str]


class VerdictChange(NamedTuple):
    """The start (``onset``) or end of a verdict, at ``at`` (Unix seconds)."""

    at: float
    onset: bool
    verdict: Verdict


class VerdictChanges:
    """Tracker of verdicts by device, process and kind. Verdicts on pools without a pid are attributed to the device."""

    def __init__(self) -> None:
        self._active: dict[VerdictKey, Verdict] = {}

    def update(self, verdicts: Iterable[Verdict], at: float) -> Iterator[VerdictChange]:
        """Return the changes since the previous snapshot, ends first."""
        now: dict[VerdictKey, Verdict] = {}
        for verdict in verdicts:
            if verdict.pid == UNKNOWN_PID:
                summary = verdict.summary.replace(f" (pid {UNKNOWN_PID})", "")
                verdict = replace(verdict, pid=None, start_ticks=None, summary=summary)
            now.setdefault((verdict.device_uuid, verdict.process, verdict.kind), verdict)
        before, self._active = self._active, now
        for key, verdict in before.items():
            if key not in now:
                yield VerdictChange(at, False, verdict)
        for key, verdict in now.items():
            if key not in before:
                yield VerdictChange(at, True, verdict)


MAX_SERIES = 1000
MAX_CHANGES = 40
MAX_CHARTS = 24

SeriesKey = tuple[str, ProcessKey | None]


@dataclass(slots=True)
class _ChartSeries:
    name: str
    curve: ChartCurve = field(default_factory=ChartCurve)
    size_bytes: float | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    """The highest value of each measure, the one of the curve first."""
    changes: list[tuple[VerdictChange, float]] = field(default_factory=list)
    omitted_changes: int = 0

    def add(self, at: float, live: int | None, used: int | None) -> None:
        """Add a point. The curve shows the live bytes, as the verdicts do; the used bytes until these are known."""
        if live is not None and "live" not in self.peaks:
            self.curve, self.peaks = ChartCurve(), {"live": live, **self.peaks}
        charted_bytes = live if "live" in self.peaks else used
        if charted_bytes is not None:
            self.curve.add(at, charted_bytes)
        for measure, value in (("live", live), ("used", used)):
            if value is not None:
                self.peaks[measure] = max(value, self.peaks.get(measure, 0))

    @property
    def has_finding(self) -> bool:
        return any(change.verdict.kind not in PATTERN_NAMES for change, _ in self.changes)


class Findings:
    """The report on one log: a chart and the verdicts of each series, then a summary.

    Memory is bounded: beyond the limits, series and verdicts are only counted.
    """

    def __init__(self) -> None:
        self._series: dict[SeriesKey, _ChartSeries] = {}
        self._uncharted_keys: set[SeriesKey] = set()
        self._verdict_counts: Counter[str] = Counter()
        self._first: Snapshot | None = None
        self._last: Snapshot | None = None
        self._snapshot_count = 0

    def add_snapshot(self, snapshot: Snapshot) -> None:
        self._first = self._first or snapshot
        self._last = snapshot
        self._snapshot_count += 1
        now = snapshot.elapsed_seconds
        for device in snapshot.devices:
            if device.missed_readings:
                continue
            amounts = live_and_held_bytes(snapshot, device.uuid)
            live = {key: live_bytes for key, (live_bytes, _) in amounts.items() if live_bytes is not None}
            without_pid = next((live_bytes for key, live_bytes in live.items() if key.pid == UNKNOWN_PID), None)
            device_live = without_pid if device.used_bytes is None else None
            name = f"GPU {device.index} {device.name}".rstrip()
            self._add_point((device.uuid, None), "", name, now, device_live, device.used_bytes, device.size_bytes)
            for key, process in device.processes_by_key.items():
                report = snapshot.reports_by_process.get(key)
                workload = report.workload if report else ""
                self._add_point(
                    (device.uuid, key), workload, process.comm or "", now, live.get(key), process.used_bytes
                )

    def add(self, change: VerdictChange, at: float) -> None:
        series = self._series_of((change.verdict.device_uuid, change.verdict.process), "")
        if change.onset:
            self._verdict_counts[change.verdict.kind] += 1
        elif change.verdict.kind == "growing":
            self._verdict_counts["growing"] -= 1  # a suspicion that has ended is not a finding
        if series is not None and len(series.changes) < MAX_CHANGES:
            series.changes.append((change, at))
        elif series is not None:
            series.omitted_changes += 1

    def report(self) -> Iterator[str]:
        """Yield the lines of the text report."""
        for key, series in self._charted_series():
            yield from self._section(key, series)
            yield ""
        yield from self._others_text()
        yield from self._summary()

    def html(self, name: str, remarks: Sequence[str]) -> str:
        """Return the report as an HTML document. ``remarks``: messages about ignored parts of the log."""
        parts = [html_report.paragraph(line) for line in (*self._summary(), *self._others_text(), *remarks)]
        for key, series in self._charted_series():
            marks = [(at, change.verdict.kind) for change, at in series.changes if _is_finding(change)]
            parts.append(html_report.heading(", ".join(_title(key, series))))
            parts.append(html_report.curve(series.curve.points(), series.size_bytes, marks))
            if rows := list(_change_rows(series)):
                parts.append(html_report.table(("TIME", "VERDICT", "RESULT"), rows))
        return html_report.html_page(f"Memory in {name}", parts)

    def _charted_series(self) -> Iterator[tuple[SeriesKey, _ChartSeries]]:
        """Yield the series that have a chart: those with findings first, then devices, in the order of their names."""
        by_importance = sorted(
            self._series.items(), key=lambda entry: (not entry[1].has_finding, entry[0][1] is not None)
        )
        charted_keys = {key for key, _ in by_importance[:MAX_CHARTS]}
        for key, series in sorted(self._series.items(), key=lambda entry: (entry[0][0], entry[0][1] or ())):
            if key in charted_keys:
                yield key, series

    def _others_text(self) -> Iterator[str]:
        others = len(self._series) - min(MAX_CHARTS, len(self._series)) + len(self._uncharted_keys)
        if others:
            yield f"{others} more series" if self._uncharted_keys else f"{others} more series without a finding"

    def _section(self, key: SeriesKey, series: _ChartSeries) -> Iterator[str]:
        yield printable("  ".join(_title(key, series)))
        yield from draw_chart(
            series.curve, series.size_bytes, [at for change, at in series.changes if _is_finding(change)]
        )
        for at, kind, outcome in _change_rows(series):
            yield printable(f"  {at}{at and '  '}{kind}{outcome and kind and ': '}{outcome}")

    def _summary(self) -> Iterator[str]:
        if self._first is None or self._last is None:
            return
        elapsed = self._last.elapsed_seconds - self._first.elapsed_seconds
        devices = sum(process is None for _, process in self._series)
        yield (
            f"{plural(self._snapshot_count, 'reading')} over {duration_text(elapsed)}: {plural(devices, 'device')}, "
            f"{plural(len(self._series) - devices + len(self._uncharted_keys), 'process')}"
        )
        counts = sorted(self._verdict_counts.items())
        findings = [f"{count} {kind}" for kind, count in counts if count and kind not in PATTERN_NAMES]
        yield f"found: {', '.join(findings)}" if findings else "found: nothing that requires action"

    def _add_point(
        self,
        key: SeriesKey,
        workload: str,
        name: str,
        at: float,
        live: int | None,
        used: int | None,
        size_bytes: int | None = None,
    ) -> None:
        """Add a point of a series, which is named after its workload once that is known."""
        series = None if live is None and used is None else self._series_of(key, name)
        if series is not None:
            series.name, series.size_bytes = workload or series.name or name, size_bytes
            series.add(at, live, used)

    def _series_of(self, key: SeriesKey, name: str) -> _ChartSeries | None:
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                self._uncharted_keys.add(key)
                return None
            series = self._series[key] = _ChartSeries(name)
        return series


def _title(key: SeriesKey, series: _ChartSeries) -> list[str]:
    uuid, process = key
    pid = f" pid {process.pid}" if process else ""
    peaks = ", ".join(f"{size_text(peak)} {measure}" for measure, peak in series.peaks.items())
    chart_note = f" (the chart shows {next(iter(series.peaks))} memory)" if len(series.peaks) > 1 else ""
    return [part for part in (uuid + pid, series.name, peaks and f"peak {peaks}{chart_note}") if part]


def _is_finding(change: VerdictChange) -> bool:
    return change.onset and change.verdict.kind not in PATTERN_NAMES


def _change_rows(series: _ChartSeries) -> Iterator[tuple[str, str, str]]:
    """Yield time, kind and result of each change."""
    for change, _ in series.changes:
        yield time_text(change.at), change.verdict.kind, change.verdict.summary if change.onset else "ended"
    if series.omitted_changes:
        yield "", "", f"and {series.omitted_changes} more"
