"""Activity of an NVIDIA device's units between two slow readings, from NVML's GPM (Hopper and later).

The hardware counts continuously, so that short kernels are included; a reading takes 2 to 9 ms. Does not cover MIG
instances, which require separate samples, and devices before Hopper, for which only DCGM has such values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pynvml

from gpumond.model.units import MIB
from gpumond.sources.inventory import Device, EnumerationFailed, Unsupported
from gpumond.sources.nvml.library import Library
from gpumond.sources.validation import IMPOSSIBLE, Tally


class _Metric(NamedTuple):
    """Field of Sensors, NVML's number of the metric, its largest value, and its scale."""

    field: str
    number: int
    limit: float
    factor: float


_RATES = 10_000_000
"""Limit in MiB per second, above the rate of any device."""

METRICS = (
    _Metric("graphics_engine_active_ratio", 1, 100, 0.01),
    _Metric("sm_active_ratio", 2, 100, 0.01),
    _Metric("sm_occupancy_ratio", 3, 100, 0.01),
    _Metric("tensor_active_ratio", 5, 100, 0.01),
    _Metric("dram_active_ratio", 10, 100, 0.01),
    _Metric("nvlink_receive_bytes_per_second", 60, _RATES, MIB),
    _Metric("nvlink_transmit_bytes_per_second", 61, _RATES, MIB),
)


def _is_supported(handle: Any) -> bool:
    return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


def _sample(handle: Any) -> Any:
    sample = pynvml.nvmlGpmSampleAlloc()
    try:
        return pynvml.nvmlGpmSampleGet(handle, sample)
    except pynvml.NVMLError:
        pynvml.nvmlGpmSampleFree(sample)
        raise


def _between(before: Any, after: Any) -> list[tuple[int, float]]:
    """Return the return code and value of each of METRICS."""
    question = pynvml.c_nvmlGpmMetricsGet_t()
    question.version, question.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
    question.sample1, question.sample2 = before, after
    for place, metric in enumerate(METRICS):
        question.metrics[place].metricId = metric.number
    pynvml.nvmlGpmMetricsGet(question)
    return [(answer.nvmlReturn, answer.value) for answer in question.metrics[: len(METRICS)]]


class Profile:
    """Latest sample of each device, or None if the device provides none."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._last: dict[str, Any] = {}

    def ask(self, device: Device, tally: Tally) -> dict[str, float]:
        """Return values of Sensors since the previous call; none at the first call. Raises DeviceLost."""
        try:
            if device.uuid not in self._last and not self._library.query((_is_supported,), device.handle):
                self._last[device.uuid] = None
            before = self._last.get(device.uuid)
            if device.uuid in self._last and before is None:
                return {}
            self._last[device.uuid] = after = self._library.query((_sample,), device.handle)
            if before is None:
                return {}
            try:
                return _values(device.uuid, self._library.query((_between,), before, after), tally)
            finally:
                self._free(before)
        except Unsupported:
            self._last[device.uuid] = None
        except EnumerationFailed as failure:
            if (
                failure.kind == "no_permission"
            ):  # profiling is limited to administrators here: not a fault of the device
                self._last[device.uuid] = None
            else:
                tally.add(device.uuid, failure.kind, f"GPM: {failure}")
        return {}

    def forget(self, uuid: str) -> None:
        sample = self._last.pop(uuid, None)
        if sample is not None:
            self._free(sample)

    def _free(self, sample: Any) -> None:
        try:
            pynvml.nvmlGpmSampleFree(sample)
        except pynvml.NVMLError:
            pass  # the driver is unloaded, and has freed the sample


def _values(uuid: str, answers: list[tuple[int, float]], tally: Tally) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric, (code, value) in zip(METRICS, answers, strict=True):
        if code != pynvml.NVML_SUCCESS:
            continue
        if 0 <= value <= metric.limit:
            values[metric.field] = value * metric.factor
        else:  # includes NaN
            tally.add(uuid, IMPOSSIBLE, f"{metric.field} {value}")
    return values
