"""``gpumond diagnose FILE``: print verdicts on a recorded log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from pathlib import Path

from gpumond.cli import DONE, html_report, print_error
from gpumond.cli.findings import Findings
from gpumond.diagnosis import Diagnosis, diagnose
from gpumond.errors import ConfigError
from gpumond.importers import READERS, Change, Changes, snapshots
from gpumond.importers.reader import open_lines
from gpumond.importers.rows import Remarks
from gpumond.model.snapshot import Snapshot
from gpumond.model.units import level, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="log file, optionally compressed with gzip; - is standard input")
    parser.add_argument(
        "--format",
        choices=("auto", *READERS),
        default="auto",
        help="format of the log (auto: detected from its first line)",
    )
    parser.add_argument("--size", metavar="SIZE", help="capacity of each device, for a log without it, such as 80GiB")
    parser.add_argument("--interval", metavar="DURATION", help="time between readings, for a log without timestamps")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line for each start and end of a verdict"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with charts to this HTML file")


def run(arguments: argparse.Namespace) -> int:
    size = _positive("--size", arguments.size, level)
    interval = _positive("--interval", arguments.interval, seconds)
    html_report.check(arguments.html)
    lines = open_lines(arguments.file)
    remarks = Remarks(lines.name)
    read = snapshots(lines, arguments.format, remarks, None if size is None else int(size), interval)
    findings = Findings() if arguments.html is not None or not arguments.json else None
    try:
        sized = _diagnose(read, findings, arguments.json)
    finally:
        for remark in remarks:
            print_error(f"gpumond: {lines.name}: {remark}")
    if not sized:
        print(
            f"gpumond: {lines.name}: the log has no device capacity, so time to OOM and memory pressure are unknown;"
            " pass the capacity with --size BYTES",
            file=sys.stderr,
        )
    if findings is not None and arguments.html is not None:
        html_report.write(arguments.html, findings.html(lines.name, list(remarks)))
    if findings is not None and not arguments.json:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        print("\n".join(findings.report()))
    return DONE


def _diagnose(read: Iterable[Snapshot], findings: Findings | None, as_json: bool) -> bool:
    """Diagnose the snapshots and report changes. Returns True if the capacity of every device is known."""
    diagnosis, changes = Diagnosis(), Changes()
    unsized: set[str] = set()
    for snapshot in read:
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


def _line(change: Change) -> str:
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
            "time_to_oom_seconds": verdict.time_to_oom_seconds,
            "evidence": evidence,
        }
    )


def _positive(option: str, text: str | None, read: Callable[[object], float]) -> float | None:
    if text is None:
        return None
    try:
        value = read(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None
    if value <= 0:
        raise ConfigError(f"{option} {text!r}: expected a value above 0")
    return value
