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
from gpumond.features.recordings.reader import LogLines, LogRow, Remarks, sanitize_name
from gpumond.features.recordings.snapshots import Format, snapshot_reader

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
INSTANCE_LABELS = ("instance", "Hostname", "hostname", "host_name", "host.name")
UUID_LABELS = ("uuid", "UUID", "gpu_uuid", "hw_id", "hw.id")
NAME_LABELS = ("modelName", "devicename", "hw_name", "hw.name")
TASK_LABELS = ("hw_gpu_task", "hw.gpu.task")
"""Labels of the engine that a utilization describes; ``general`` is the whole device."""
INDEX_LABELS = ("gpu", "index", "minor_number", "device")
SUMMED_FIELDS = ("live", "held")
"""Fields that are summed, because a process may have several allocators."""

SeriesKey = tuple[str, str, int | None]


@dataclass(slots=True)
class _Series:
    index: int | None
    name: str
    points: dict[float, dict[str, float]] = field(default_factory=dict)


def rows(lines: LogLines, remarks: Remarks, interval_seconds: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a response. Raises ConfigError."""
    series_by_key: dict[SeriesKey, _Series] = {}
    metrics: dict[tuple[SeriesKey, str], str] = {}
    for entry in _parse_matrix(lines):
        labels = entry["metric"]
        metric = str(labels.get("__name__", ""))
        if metric not in METRICS:
            remarks.note(metric, f"the series {metric[:80]} don't describe device memory; they are ignored")
            continue
        field_name, factor = METRICS[metric]
        if _first_label(labels, TASK_LABELS) not in ("", "general"):
            continue
        pid = labels.get("pid", "")
        if pid and not (pid.isdecimal() and len(pid) <= 10):
            remarks.note("other", "series that aggregate processes (pid other) are ignored")
            continue
        key = (_first_label(labels, INSTANCE_LABELS), _device(labels), int(pid) if pid else None)
        index = _first_label(labels, INDEX_LABELS)
        name = "" if pid else _first_label(labels, NAME_LABELS)
        series = series_by_key.setdefault(
            key, _Series(int(index) if index.isdecimal() and len(index) < 5 else None, name)
        )
        if metrics.setdefault((key, field_name), metric) == metric:
            _add_points(lines.name, series, field_name, factor, entry["values"], _series_name(key))
    _fill_sizes(series_by_key)
    yield from _sorted_rows(series_by_key, remarks)
    if not remarks.rows:
        used_metrics = ", ".join(name for name, (field_name, _) in METRICS.items() if field_name == "used" and name)
        raise ConfigError(
            f"{lines.name}: no memory-usage series found; query one of {used_metrics}, or an expression based on one"
        )


def _parse_matrix(lines: LogLines) -> list[dict[str, Any]]:
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
    if not isinstance(result, list) or not all(map(_is_series, result)):
        raise ConfigError(f"{lines.name}, line 1: not a matrix of series; {REMEDY}")
    return result


def _is_series(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("values"), list):
        return False
    labels = entry.get("metric")
    return isinstance(labels, dict) and all(isinstance(value, str) for value in labels.values())


def _add_points(
    log_name: str, series: _Series, field_name: str, factor: float, values: list[Any], series_name: str
) -> None:
    for entry in values:
        try:
            at, value = float(entry[0]), float(entry[1]) * factor
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            raise ConfigError(f"{log_name}: {series_name}: {str(entry)[:60]} isn't [time, value]; {REMEDY}") from None
        if not (0 <= value < 2**53 and 0 <= at < 2**53):
            continue
        point = series.points.setdefault(at, {})
        if field_name in SUMMED_FIELDS:
            point[field_name] = point.get(field_name, 0.0) + value
        elif point.setdefault(field_name, value) != value:
            raise ConfigError(
                f"{log_name}: there are two different series of {series_name}; combine them with: max by "
                "(instance, uuid, pid) (…)"
            )


def _fill_sizes(series_by_key: Mapping[SeriesKey, _Series]) -> None:
    """Compute used from size and free, or size from used and free, if only two of them are in the response."""
    for series in series_by_key.values():
        for point in series.points.values():
            if "free" in point:
                unused_bytes = point["free"] + point.get("reserved", 0.0)
                if "size" in point:
                    point.setdefault("used", max(0.0, point["size"] - unused_bytes))
                elif "used" in point:
                    point["size"] = point["used"] + unused_bytes


def _sorted_rows(series_by_key: Mapping[SeriesKey, _Series], remarks: Remarks) -> Iterator[LogRow]:
    instances: dict[str, set[str]] = {}
    for instance, device, _ in series_by_key:
        instances.setdefault(device, set()).add(instance)
    keys = sorted(
        (
            at,
            device if len(instances[device]) == 1 or not instance else sanitize_name(f"{instance} {device}"),
            -1 if pid is None else pid,
            key,
        )
        for key in series_by_key
        for instance, device, pid in (key,)
        for at in series_by_key[key].points
    )
    for at, device, _, key in keys:
        series, pid = series_by_key[key], key[2]
        point = series.points[at]
        if "used" in point or "live" in point:
            remarks.rows += 1
            used, size, live, held = (
                int(point[field_name]) if field_name in point else None
                for field_name in ("used", "size", "live", "held")
            )
            utilization = point.get("utilization")
            utilization = utilization if utilization is None or utilization <= 1 else None
            yield LogRow(0, at, device, pid, used, size, live, held, utilization, series.index, series.name)


def _first_label(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((sanitize_name(labels[name]) for name in names if labels.get(name)), "")


def _device(labels: Mapping[str, str]) -> str:
    uuid, index = _first_label(labels, UUID_LABELS), _first_label(labels, INDEX_LABELS)
    mig_instance = _first_label(labels, ("GPU_I_ID",))
    device = uuid or (f"gpu{index}" if index.isdigit() else index) or "gpu"
    return f"{device}/{mig_instance}" if mig_instance else device


def _series_name(key: SeriesKey) -> str:
    instance, device, pid = key
    return " ".join(part for part in (instance, device, "" if pid is None else f"pid {pid}") if part)


def _is_json(first_line: str) -> bool:
    return re.match(r"\{|\[\s*([\[{\"\d]|$)", first_line) is not None


FORMAT = Format("prometheus", _is_json, snapshot_reader(rows, lists_all_processes=True))
