"""Snapshots as lines of the CSV format that ``csv_log`` reads: one for each device and for each of its processes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping

from gpumond.importers.csv_log import COLUMNS
from gpumond.model.claims import outermost
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import DeviceReading, Snapshot

HEADER = ",".join(COLUMNS) + "\n"

Amounts = tuple[int | None, int | None]
"""Live bytes of one program on one device, and its held bytes; None if an allocator does not know them."""


def csv_lines(snapshot: Snapshot) -> str:
    """Return the lines of one snapshot. A device without new values has none; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for device in snapshot.devices:
        if not device.missed:
            for cells in _rows(device, _amounts(snapshot, device.uuid)):
                writer.writerow((f"{snapshot.taken_at:.3f}", device.uuid, *cells))
    return text.getvalue()


def _rows(device: DeviceReading, amounts: Mapping[ProcessKey, Amounts]) -> Iterator[tuple[object, ...]]:
    load = device.sensors.gpu_utilization_ratio
    yield None, device.used_bytes, None, None, device.size_bytes, None if load is None else f"{load:.4f}"
    listed = device.processes_by_key
    for key in dict.fromkeys((*listed, *amounts)):
        used = listed[key].used_bytes if key in listed else None
        live, held = amounts.get(key, (None, None))
        if used is not None or live is not None or held is not None:
            yield key.pid, used, live, held, None, None


def _amounts(snapshot: Snapshot, uuid: str) -> dict[ProcessKey, Amounts]:
    found: dict[ProcessKey, Amounts] = {}
    for report in snapshot.reports:
        own = [pool for pool in outermost(report.pools) if pool.device_uuid == uuid]
        if own:
            held = sum(pool.held_bytes for pool in own) if all(pool.held_known for pool in own) else None
            live = [pool.live_bytes for pool in own if pool.live_bytes is not None]
            found[report.key] = sum(live) if len(live) == len(own) else None, held
    return found
