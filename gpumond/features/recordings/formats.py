"""Conversion of recorded logs to the snapshots that a daemon would have taken, and the changes of verdicts over them.

The result depends on the file only.

To add a format: write a function here that converts ``Lines`` to snapshots, and add it to ``READERS``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from gpumond.facts.errors import ConfigError, ProtocolError
from gpumond.facts.frame import Verdict
from gpumond.facts.messages import from_json
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import Snapshot
from gpumond.features.recordings import csv_log, gpu_z, nvidia_smi, prometheus, scrolling
from gpumond.features.recordings.reader import Lines
from gpumond.features.recordings.snapshots import NAMELESS, Remarks, SnapshotBuilder, moment

Reader = Callable[[Lines, Remarks, int | None, float | None], Iterator[Snapshot]]


def _nvidia_smi(lines: Lines, remarks: Remarks, size: int | None, interval: float | None) -> Iterator[Snapshot]:
    return SnapshotBuilder(remarks, size, complete=True).snapshots(nvidia_smi.rows(lines, remarks, interval))


def _csv(lines: Lines, remarks: Remarks, size: int | None, interval: float | None) -> Iterator[Snapshot]:
    return SnapshotBuilder(remarks, size).snapshots(csv_log.rows(lines, remarks))


def _dcgm(lines: Lines, remarks: Remarks, size: int | None, interval: float | None) -> Iterator[Snapshot]:
    numbered = ((lines.number, line) for line in lines if lines.whole)
    return SnapshotBuilder(remarks, size).snapshots(scrolling.rows(numbered, remarks, interval))


def _gpu_z(lines: Lines, remarks: Remarks, size: int | None, interval: float | None) -> Iterator[Snapshot]:
    return SnapshotBuilder(remarks, size).snapshots(gpu_z.rows(lines, remarks))


def _prometheus(lines: Lines, remarks: Remarks, size: int | None, interval: float | None) -> Iterator[Snapshot]:
    return SnapshotBuilder(remarks, size, complete=True).snapshots(prometheus.rows(lines, remarks))


def _gpumond(lines: Lines, remarks: Remarks, size: int | None, interval: float | None) -> Iterator[Snapshot]:
    """Yield the snapshots of a recording of ``gpumond record``, one in each line.

    After a restart of the daemon, elapsed seconds continue from the last snapshot.
    """
    last: Snapshot | None = None
    offset = 0.0
    for line in lines:
        try:
            snapshot = from_json(Snapshot, line.encode())
        except ProtocolError as error:
            if lines.whole:
                remarks.skip(lines.number, str(error))
            continue
        remarks.rows += 1
        if last is not None:
            if (snapshot.seq, snapshot.taken_at) == (last.seq, last.taken_at):
                remarks.duplicates += 1
                continue
            if snapshot.elapsed_seconds + offset <= last.elapsed_seconds:
                remarks.note(
                    "back", f"line {lines.number}: the daemon was restarted; time continues from the last snapshot"
                )
                passed = max(1.0, snapshot.taken_at - last.taken_at)
                offset = last.elapsed_seconds + passed - snapshot.elapsed_seconds
        if offset:
            snapshot = replace(snapshot, elapsed_seconds=snapshot.elapsed_seconds + offset)
        last = snapshot
        yield _sized(snapshot, size)


def _sized(snapshot: Snapshot, size_bytes: int | None) -> Snapshot:
    if size_bytes is None or all(device.size_bytes is not None for device in snapshot.devices):
        return snapshot
    sized = (d if d.size_bytes is not None else replace(d, size_bytes=size_bytes) for d in snapshot.devices)
    return replace(snapshot, devices=tuple(sized))


READERS: Mapping[str, Reader] = {
    "nvidia-smi": _nvidia_smi,
    "csv": _csv,
    "prometheus": _prometheus,
    "dcgm": _dcgm,
    "gpu-z": _gpu_z,
    "gpumond": _gpumond,
}


def snapshots(
    lines: Lines, format_name: str, remarks: Remarks, size: int | None = None, interval: float | None = None
) -> Iterator[Snapshot]:
    """Yield the snapshots of a log. ``size``: capacity in bytes of devices without one. Raises ConfigError."""
    name = detect(lines) if format_name == "auto" else format_name
    yield from READERS[name](lines, remarks, size, interval)
    if lines.cut_short:
        remarks.note("cut", "the compressed file is truncated; it was read as far as possible")
    remarks.check()


def detect(lines: Lines) -> str:
    """Detect the format of a log from its first line. Raises ConfigError."""
    first = lines.first().strip()
    if not first:
        raise ConfigError(f"{lines.name}: the log is empty")
    if first[0] in "{[":
        return "gpumond" if _is_snapshot(first) else "prometheus"
    if gpu_z.starts(first):
        return "gpu-z"
    if scrolling.is_dcgmi(first):
        return "dcgm"
    if scrolling.starts(first):
        return "nvidia-smi"
    columns, named = nvidia_smi.header(first), csv_log.names(first)
    if named and named.keys() & {"used_bytes", "live_bytes"}:
        return "csv"
    if columns and (", " in first or "." in first or columns.keys() & {"used", "free"}):
        return "nvidia-smi"
    return "csv" if named or (", " not in first and _starts_with_a_time(first)) else "nvidia-smi"


def _starts_with_a_time(line: str) -> bool:
    try:
        moment(line.split(csv_log.delimiter(line))[0].strip())
    except ValueError:
        return False
    return True


def _is_snapshot(line: str) -> bool:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and {"seq", "elapsed_seconds"} <= body.keys()


Key = tuple[str, ProcessKey | None, str]


class Change(NamedTuple):
    """The start (``onset``) or end of a verdict, at ``at`` (Unix seconds)."""

    at: float
    onset: bool
    verdict: Verdict


class Changes:
    """Tracker of verdicts by device, process and kind. Verdicts on pools without a pid are assigned to the device."""

    def __init__(self) -> None:
        self._held: dict[Key, Verdict] = {}

    def update(self, verdicts: Iterable[Verdict], at: float) -> Iterator[Change]:
        """Return the changes since the previous snapshot, ends first."""
        now: dict[Key, Verdict] = {}
        for verdict in verdicts:
            if verdict.pid == NAMELESS:
                summary = verdict.summary.replace(f" (pid {NAMELESS})", "")
                verdict = replace(verdict, pid=None, start_ticks=None, summary=summary)
            now.setdefault((verdict.device_uuid, verdict.process, verdict.kind), verdict)
        before, self._held = self._held, now
        for key, verdict in before.items():
            if key not in now:
                yield Change(at, False, verdict)
        for key, verdict in now.items():
            if key not in before:
                yield Change(at, True, verdict)

    @property
    def held(self) -> tuple[Verdict, ...]:
        """The active verdicts."""
        return tuple(self._held.values())
