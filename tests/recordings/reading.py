"""Read a log from text to snapshots."""

from __future__ import annotations

import io
from typing import Any

from gpumond.facts.snapshot import Snapshot
from gpumond.features.recordings.formats import snapshots
from gpumond.features.recordings.reader import LogLines, Remarks


def read(log: str | bytes, format_name: str = "auto", **options: Any) -> list[Snapshot]:
    return read_with_notices(log, format_name, **options)[0]


def read_with_notices(log: str | bytes, format_name: str = "auto", **options: Any) -> tuple[list[Snapshot], list[str]]:
    data = log if isinstance(log, bytes) else log.encode()
    remarks = Remarks("log")
    read = list(snapshots(LogLines("log", io.BytesIO(data)), format_name, remarks, **options))
    return read, list(remarks)


def used(read: list[Snapshot], uuid: str) -> list[int | None]:
    return [device.used_bytes for snapshot in read for device in snapshot.devices if device.uuid == uuid]


def elapsed(read: list[Snapshot]) -> list[float]:
    return [round(snapshot.elapsed_seconds, 3) for snapshot in read]
