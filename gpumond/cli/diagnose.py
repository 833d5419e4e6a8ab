"""``gpumond diagnose FILE``: verdicts on a recorded log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from io import TextIOWrapper

from gpumond.cli import DONE
from gpumond.cli.diagnose_report import Findings
from gpumond.diagnosis import Diagnosis, diagnose
from gpumond.errors import ConfigError
from gpumond.importers import READERS, snapshots
from gpumond.importers.reader import open_lines
from gpumond.importers.rows import Remarks
from gpumond.importers.transitions import Change, Changes
from gpumond.model.snapshot import Snapshot
from gpumond.model.units import level, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a log, gzip or not; - is standard input")
    parser.add_argument("--format", choices=("auto", *READERS), default="auto", help="auto tells by the first line")
    parser.add_argument("--size", metavar="BYTES", help="capacity of each device, where the log does not tell: 80GiB")
    parser.add_argument("--interval", metavar="SECONDS", help="from reading to reading, for a log without timestamps")
    parser.add_argument("--json", action="store_true", help="one object a line for each onset and each end")


def run(arguments: argparse.Namespace) -> int:
    size = _positive("--size", arguments.size, level)
    interval = _positive("--interval", arguments.interval, seconds)
    lines = open_lines(arguments.file)
    remarks = Remarks(lines.name)
    read = snapshots(lines, arguments.format, remarks, None if size is None else int(size), interval)
    findings = None if arguments.json else Findings()
    try:
        sized = _follow(read, findings)
    finally:
        for remark in remarks:
            print(f"gpumond: {lines.name}: {remark}", file=sys.stderr)
    if not sized:
        print(
            f"gpumond: {lines.name}: the log does not tell the capacity, so there is no time to OOM and no pressure;"
            " give it with --size BYTES",
            file=sys.stderr,
        )
    if findings is not None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        print("\n".join(findings.report()))
    return DONE


def _follow(read: Iterable[Snapshot], findings: Findings | None) -> bool:
    """Whether the capacity of every device was known."""
    diagnosis, changes = Diagnosis(), Changes()
    unsized: set[str] = set()
    for snapshot in read:
        diagnosis = diagnose(diagnosis, snapshot)
        unsized.update(device.uuid for device in snapshot.devices if device.size_bytes is None and device.up)
        for change in changes.follow(diagnosis.verdicts, snapshot.taken_at):
            if findings is None:
                print(_line(change), flush=True)
            else:
                findings.add(change, snapshot.elapsed_seconds)
        if findings is not None:
            findings.see(snapshot)
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
        raise ConfigError(f"{option} {text!r}: expected more than nothing")
    return value
