"""Responses of Prometheus' ``/api/v1/query_range``: one series for each instance, device and process.

The result of an expression has no metric name and is taken as used bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings.reader import Lines, LogRow, Remarks, label
from gpumond.features.recordings.snapshots import Format, from_rows

MAX_CHARACTERS = 256 * 1024**2
METRICS: Mapping[str, tuple[str, float]] = {
    "": ("used", 1),
    "gpumond_device_memory_used_bytes": ("used", 1),
    "gpumond_device_memory_size_bytes": ("size", 1),
    "gpumond_device_gpu_utilization_ratio": ("utilization", 1),
    "gpumond_process_memory_used_bytes": ("used", 1),
    "gpumond_pool_live_bytes": ("live", 1),
    "gpumond_pool_held_bytes": ("held", 1),
    "DCGM_FI_DEV_FB_USED": ("used", MIB),
    "DCGM_FI_DEV_FB_FREE": ("free", MIB),
    "DCGM_FI_DEV_FB_RESERVED": ("reserved", MIB),
    "DCGM_FI_DEV_FB_TOTAL": ("size", MIB),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization", 0.01),
    "DCGM_FI_DEV_FB_USED_BYTES": ("used", 1),
    "DCGM_FI_DEV_FB_FREE_BYTES": ("free", 1),
    "DCGM_FI_DEV_FB_RESERVED_BYTES": ("reserved", 1),
    "DCGM_FI_DEV_FB_CAPACITY_BYTES": ("size", 1),
    "DCGM_FI_DEV_GPU_UTIL_RATIO": ("utilization", 1),
    "nvidia_smi_memory_used_bytes": ("used", 1),
    "nvidia_smi_memory_total_bytes": ("size", 1),
    "nvidia_smi_memory_free_bytes": ("free", 1),
    "nvidia_smi_memory_reserved_bytes": ("reserved", 1),
    "nvidia_smi_utilization_gpu_ratio": ("utilization", 1),
    "gpu_memory_used_MiB": ("used", MIB),
    "gpu_memory_total_MiB": ("size", MIB),
    "gpu_memory_free_MiB": ("free", MIB),
    "gpu_utilization_Percentage": ("utilization", 0.01),
    "process_gpu_memory_MiB": ("used", MIB),
    **{
        name: (kind, 1)
        for quantity, unit, kind in (
            ("memory.usage", "_bytes", "used"),
            ("memory.limit", "_bytes", "size"),
            ("utilization", "_ratio", "utilization"),
        )
        for name in (
            f"hw_gpu_{quantity.replace('.', '_')}{unit}",
            f"hw.gpu.{quantity}{unit}",
            f"hw.gpu.{quantity}",
        )
    },
}
"""Meaning and unit of the series of gpumond, dcgm-exporter, nvidia_gpu_exporter, nvitop-exporter and OpenTelemetry.

Prometheus writes the names of OpenTelemetry with underscores and units, with units only, or unchanged, as its
``translation_strategy`` says.
"""

REMEDY = (
    "expected the JSON of /api/v1/query_range, such as: curl -G PROMETHEUS/api/v1/query_range --data-urlencode"
    " 'query=DCGM_FI_DEV_FB_USED' -d start=… -d end=… -d step=15"
)
INSTANCES = ("instance", "Hostname", "hostname", "host_name", "host.name")
UUIDS = ("uuid", "UUID", "gpu_uuid", "hw_id", "hw.id")
NAMES = ("modelName", "devicename", "hw_name", "hw.name")
TASKS = ("hw_gpu_task", "hw.gpu.task")
"""Labels of the engine that a utilization describes; ``general`` is the whole device."""
INDICES = ("gpu", "index", "minor_number", "device")
SUMMED = ("live", "held")
"""Fields that are summed, because a process may have several allocators."""

Key = tuple[str, str, int | None]


@dataclass(slots=True)
class _Series:
    index: int | None
    name: str
    points: dict[float, dict[str, float]] = field(default_factory=dict)


def rows(lines: Lines, remarks: Remarks, interval: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a response. Raises ConfigError."""
    table: dict[Key, _Series] = {}
    sources: dict[tuple[Key, str], str] = {}
    for entry in _matrix(lines):
        labels = entry["metric"]
        metric = str(labels.get("__name__", ""))
        if metric not in METRICS:
            remarks.note(metric, f"the series {metric[:80]} don't describe device memory; they are ignored")
            continue
        kind, factor = METRICS[metric]
        if _label(labels, TASKS) not in ("", "general"):
            continue
        pid = labels.get("pid", "")
        if pid and not (pid.isdecimal() and len(pid) <= 10):
            remarks.note("other", "series that aggregate processes (pid other) are ignored")
            continue
        key = (_label(labels, INSTANCES), _device(labels), int(pid) if pid else None)
        index = _label(labels, INDICES)
        name = "" if pid else _label(labels, NAMES)
        series = table.setdefault(key, _Series(int(index) if index.isdecimal() and len(index) < 5 else None, name))
        if sources.setdefault((key, kind), metric) == metric:
            _add(lines.name, series, kind, factor, entry["values"], _series_name(key))
    _fill_sizes(table)
    yield from _in_order(table, remarks)
    if not remarks.rows:
        known = ", ".join(name for name, (kind, _) in METRICS.items() if kind == "used" and name)
        raise ConfigError(
            f"{lines.name}: no memory-usage series found; query one of {known}, or an expression based on one"
        )


def _matrix(lines: Lines) -> list[dict[str, Any]]:
    text = lines.remaining_text(MAX_CHARACTERS)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(f"{lines.name}, line {line}: not JSON, or truncated ({error}); {REMEDY}") from None
    if isinstance(answer, dict) and answer.get("status") == "error":
        raise ConfigError(f"{lines.name}, line 1: Prometheus returned an error: {str(answer.get('error'))[:200]}")
    data = answer.get("data", answer) if isinstance(answer, dict) else {"result": answer}
    kind = data.get("resultType", "matrix") if isinstance(data, dict) else "?"
    if kind != "matrix":
        raise ConfigError(f"{lines.name}, line 1: the result is an instant query's {kind!s:.20}; {REMEDY}")
    result = data.get("result")
    if not isinstance(result, list) or not all(map(_well_formed, result)):
        raise ConfigError(f"{lines.name}, line 1: not a matrix of series; {REMEDY}")
    return result


def _well_formed(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("values"), list):
        return False
    labels = entry.get("metric")
    return isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())


def _add(name: str, series: _Series, kind: str, factor: float, values: list[Any], shown: str) -> None:
    for entry in values:
        try:
            at, value = float(entry[0]), float(entry[1]) * factor
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            raise ConfigError(f"{name}: {shown}: {str(entry)[:60]} isn't [time, value]; {REMEDY}") from None
        if not (0 <= value < 2**53 and 0 <= at < 2**53):
            continue
        point = series.points.setdefault(at, {})
        if kind in SUMMED:
            point[kind] = point.get(kind, 0.0) + value
        elif point.setdefault(kind, value) != value:
            raise ConfigError(
                f"{name}: two different series of {shown}; combine them with: max by (instance, uuid, pid) (…)"
            )


def _fill_sizes(table: Mapping[Key, _Series]) -> None:
    """Compute used from size and free, or size from used and free, if only two of them are in the response."""
    for series in table.values():
        for point in series.points.values():
            if "free" in point:
                rest = point["free"] + point.get("reserved", 0.0)
                if "size" in point:
                    point.setdefault("used", max(0.0, point["size"] - rest))
                elif "used" in point:
                    point["size"] = point["used"] + rest


def _in_order(table: Mapping[Key, _Series], remarks: Remarks) -> Iterator[LogRow]:
    instances: dict[str, set[str]] = {}
    for instance, device, _ in table:
        instances.setdefault(device, set()).add(instance)
    everything = sorted(
        (
            at,
            device if len(instances[device]) == 1 or not instance else label(f"{instance} {device}"),
            -1 if pid is None else pid,
            key,
        )
        for key in table
        for instance, device, pid in (key,)
        for at in table[key].points
    )
    for at, device, _, key in everything:
        series, pid = table[key], key[2]
        point = series.points[at]
        if "used" in point or "live" in point:
            remarks.rows += 1
            used, size, live, held = (
                int(point[kind]) if kind in point else None for kind in ("used", "size", "live", "held")
            )
            load = point.get("utilization")
            load = load if load is None or load <= 1 else None
            yield LogRow(0, at, device, pid, used, size, live, held, load, series.index, series.name)


def _label(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((label(labels[name]) for name in names if labels.get(name)), "")


def _device(labels: Mapping[str, str]) -> str:
    uuid, index = _label(labels, UUIDS), _label(labels, INDICES)
    part = _label(labels, ("GPU_I_ID",))
    return (uuid or (f"gpu{index}" if index.isdigit() else index) or "gpu") + (f"/{part}" if part else "")


def _series_name(key: Key) -> str:
    instance, device, pid = key
    return " ".join(part for part in (instance, device, "" if pid is None else f"pid {pid}") if part)


def _is_json(first: str) -> bool:
    return re.match(r"\{|\[\s*([\[{\"\d]|$)", first) is not None


FORMAT = Format("prometheus", _is_json, from_rows(rows, complete=True))
