"""Recordings of ``gpumond record``: one Snapshot per line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpumond.errors import ProtocolError
from gpumond.importers.reader import Lines
from gpumond.importers.rows import Remarks
from gpumond.model.snapshot import Snapshot
from gpumond.protocol.messages import from_json


def snapshots(lines: Lines, remarks: Remarks, size_bytes: int | None = None) -> Iterator[Snapshot]:
    """Yield the recorded snapshots. After a restart of the daemon, elapsed seconds continue from the last snapshot."""
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
        yield _sized(snapshot, size_bytes)


def _sized(snapshot: Snapshot, size_bytes: int | None) -> Snapshot:
    if size_bytes is None or all(device.size_bytes is not None for device in snapshot.devices):
        return snapshot
    sized = (d if d.size_bytes is not None else replace(d, size_bytes=size_bytes) for d in snapshot.devices)
    return replace(snapshot, devices=tuple(sized))
