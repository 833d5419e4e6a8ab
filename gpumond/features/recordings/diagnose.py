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

from gpumond.cli.arguments import DONE, option, positive, print_error
from gpumond.cli.progress import with_progress
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import duration_text, plural, seconds_argument, size_argument, size_text
from gpumond.facts.verdicts import PATTERNS
from gpumond.features.recordings.csv_log import amounts_of
from gpumond.features.recordings.formats import FORMATS, snapshots
from gpumond.features.recordings.reader import Remarks, day_and_time, open_lines
from gpumond.features.recordings.snapshots import NAMELESS
from gpumond.view import html_report
from gpumond.view.text import ChartCurve, draw_chart, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="log file, optionally compressed with gzip; - is standard input")
    option(
        parser,
        "--format",
        "your log's format (auto: detected from its first line)",
        choices=("auto", *sorted(each.name for each in FORMATS)),
        default="auto",
    )
    option(
        parser,
        "--size SIZE",
        "size of each GPU, if your log doesn't contain it, such as 80GiB",
        type=positive(size_argument),
    )
    option(
        parser,
        "--interval DURATION",
        "time between readings, if your log has no timestamps",
        type=positive(seconds_argument),
    )
    option(parser, "--json", "print one JSON object per line, for each verdict that begins or ends")
    option(parser, "--html FILE", "write a report with charts to this HTML file", type=Path)


def run(arguments: argparse.Namespace) -> int:
    html_report.check_report_path(arguments.html)
    lines = open_lines(arguments.file)
    remarks = Remarks(lines.name)
    read = snapshots(lines, arguments.format, remarks, arguments.size, arguments.interval)
    findings = Findings() if arguments.html is not None or not arguments.json else None
    try:
        sized = _diagnose(read, findings, arguments.json)
    finally:
        lines.close()
        for remark in remarks:
            print_error(f"gpumond: {lines.name}: {remark}")
    if not sized:
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


def _diagnose(read: Iterable[Snapshot], findings: Findings | None, as_json: bool) -> bool:
    """Diagnose the snapshots and report changes. Returns True if the capacity of every device is known."""
    diagnosis, changes = Diagnosis(), VerdictChanges()
    unsized: set[str] = set()
    for snapshot in with_progress(read, "snapshots read"):
        diagnosis = diagnose(diagnosis, snapshot)
        unsized.update(device.uuid for device in snapshot.devices if device.size_bytes is None and device.up)
        for change in changes.update(diagnosis.verdicts, snapshot.taken_at):
            if as_json:
                print(_line(change), flush=True)
            if findings is not None:
                findings.add(change, snapshot.elapsed_seconds)
        if findings is not None:
            findings.add_snapshot(snapshot)
    return not unsized


def _line(change: VerdictChange) -> str:
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
            if verdict.pid == NAMELESS:
                summary = verdict.summary.replace(f" (pid {NAMELESS})", "")
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

Key = tuple[str, ProcessKey | None]


@dataclass(slots=True)
class _Series:
    name: str
    curve: ChartCurve = field(default_factory=ChartCurve)
    top: float | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    """The highest value of each measure, the one of the curve first."""
    changes: list[tuple[VerdictChange, float]] = field(default_factory=list)
    left_out: int = 0

    def add(self, elapsed: float, live: int | None, used: int | None) -> None:
        """Add a point. The curve shows the live bytes, as the verdicts do; the used bytes until these are known."""
        if live is not None and "live" not in self.peaks:
            self.curve, self.peaks = ChartCurve(), {"live": live, **self.peaks}
        shown = live if "live" in self.peaks else used
        if shown is not None:
            self.curve.add(elapsed, shown)
        for measure, value in (("live", live), ("used", used)):
            if value is not None:
                self.peaks[measure] = max(value, self.peaks.get(measure, 0))

    @property
    def found(self) -> bool:
        return any(change.verdict.kind not in PATTERNS for change, _ in self.changes)


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
        for device in snapshot.devices:
            if device.missed_readings:
                continue
            live = {key: own for key, (own, _) in amounts_of(snapshot, device.uuid).items() if own is not None}
            nameless = next((own for key, own in live.items() if key.pid == NAMELESS), None)
            known = nameless if device.used_bytes is None else None
            name = f"GPU {device.index} {device.name}".rstrip()
            self._point((device.uuid, None), "", name, elapsed, known, device.used_bytes, device.size_bytes)
            for key, process in device.processes_by_key.items():
                report = snapshot.reports_by_process.get(key)
                workload = report.workload if report else ""
                self._point(
                    (device.uuid, key), workload, process.comm or "", elapsed, live.get(key), process.used_bytes
                )

    def add(self, change: VerdictChange, elapsed: float) -> None:
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
        for key, series in self._charted_series():
            yield from self._section(key, series)
            yield ""
        yield from self._others()
        yield from self._summary()

    def html(self, name: str, remarks: Sequence[str]) -> str:
        """Return the report as an HTML document. ``remarks``: messages about ignored parts of the log."""
        parts = [html_report.paragraph(line) for line in (*self._summary(), *self._others(), *remarks)]
        for key, series in self._charted_series():
            marks = [(elapsed, change.verdict.kind) for change, elapsed in series.changes if _is_finding(change)]
            parts.append(html_report.heading(", ".join(_title(key, series))))
            parts.append(html_report.curve(series.curve.points(), series.top, marks))
            if rows := list(_rows(series)):
                parts.append(html_report.table(("TIME", "VERDICT", "RESULT"), rows))
        return html_report.html_page(f"Memory in {name}", parts)

    def _charted_series(self) -> Iterator[tuple[Key, _Series]]:
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
        yield printable("  ".join(_title(key, series)))
        yield from draw_chart(series.curve, series.top, [at for change, at in series.changes if _is_finding(change)])
        for at, kind, outcome in _rows(series):
            yield printable(f"  {at}{at and '  '}{kind}{outcome and kind and ': '}{outcome}")

    def _summary(self) -> Iterator[str]:
        if self._first is None or self._last is None:
            return
        passed = self._last.elapsed_seconds - self._first.elapsed_seconds
        devices = sum(process is None for _, process in self._series)
        yield (
            f"{plural(self._count, 'reading')} over {duration_text(passed)}: {plural(devices, 'device')}, "
            f"{plural(len(self._series) - devices + len(self._unseen), 'process')}"
        )
        findings = [f"{count} {kind}" for kind, count in sorted(self._kinds.items()) if count and kind not in PATTERNS]
        yield f"found: {', '.join(findings)}" if findings else "found: nothing that requires action"

    def _point(
        self,
        key: Key,
        workload: str,
        name: str,
        elapsed: float,
        live: int | None,
        used: int | None,
        top: int | None = None,
    ) -> None:
        """Add a point of a series, which is named after its workload once that is known."""
        series = None if live is None and used is None else self._get(key, name)
        if series is not None:
            series.name, series.top = workload or series.name or name, top
            series.add(elapsed, live, used)

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
    peaks = ", ".join(f"{size_text(peak)} {measure}" for measure, peak in series.peaks.items())
    shown = f" (the chart shows {next(iter(series.peaks))} memory)" if len(series.peaks) > 1 else ""
    return [part for part in (uuid + pid, series.name, peaks and f"peak {peaks}{shown}") if part]


def _is_finding(change: VerdictChange) -> bool:
    return change.onset and change.verdict.kind not in PATTERNS


def _rows(series: _Series) -> Iterator[tuple[str, str, str]]:
    """Yield time, kind and result of each change."""
    for change, _ in series.changes:
        yield day_and_time(change.at), change.verdict.kind, change.verdict.summary if change.onset else "ended"
    if series.left_out:
        yield "", "", f"and {series.left_out} more"
