"""Sensors of NVIDIA devices, each queried at an interval that suits its cost and rate of change.

Cheap queries of fast-changing values are made at every reading, the others every SLOW_SECONDS: on an H200, PCIe
throughput takes the driver 20 ms per direction, and energy 11 ms. Constant values are queried until they have been read
once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pynvml

from gpumond.devices.impossible_values import IMPOSSIBLE, FaultCollector
from gpumond.devices.nvml.library import (
    Device,
    DeviceLost,
    EnumerationFailed,
    Functions,
    Library,
    Unsupported,
    functions,
)
from gpumond.facts.errors import FaultKind, ReturnCode
from gpumond.facts.messages import MAX_INTEGER
from gpumond.facts.snapshot import ADDRESSING_MODES, THROTTLE_REASONS, VIRTUALIZATION_MODES
from gpumond.facts.units import MIB

SLOW_SECONDS = 10.0
SLOW_BUDGET_SECONDS = 0.25
"""Time that one reading spends on slow queries; the next reading continues with the next device."""

COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
MAX_VALUE = MAX_INTEGER - 1


class FieldQuery(NamedTuple):
    """One query for fields of Sensors: integers up to ``limit``, their conversion, and the value that means absent."""

    functions: Functions
    fields: tuple[str, ...]
    limit: int
    arguments: tuple[Any, ...] = ()
    meaning: Callable[[int], Any] = int
    unknown: int | None = None


def _divide_by(divisor: int) -> Callable[[int], float]:
    return lambda number: number / divisor


_from_percent, _from_milli, _from_kilo, _from_mega = (
    _divide_by(100),
    _divide_by(1000),
    (1000).__mul__,
    (1_000_000).__mul__,
)


def _reasons(mask: int) -> tuple[str, ...]:
    return tuple(reason for bit, reason in enumerate(THROTTLE_REASONS) if mask >> bit & 1)


def _utilization(handle: Any) -> tuple[int, int]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _bar1(handle: Any) -> tuple[int, int]:
    info = pynvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    return info.bar1Total, info.bar1Used


def _retired_pages(handle: Any, cause: int) -> int:
    return len(pynvml.nvmlDeviceGetRetiredPages(handle, cause))


def _remapped_rows(handle: Any, part: slice) -> tuple[int, ...]:
    return tuple(pynvml.nvmlDeviceGetRemappedRows(handle)[part])


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a field's value by its value type."""


def _field_value(handle: Any, number: int) -> int:
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [number])
    if value.nvmlReturn:
        raise pynvml.NVMLError(value.nvmlReturn)
    return int(getattr(value.value, _MEMBERS[value.valueType]))


_CLOCK = functions("nvmlDeviceGetClockInfo")
_CLOCK_MAX = functions("nvmlDeviceGetMaxClockInfo")
_TEMPERATURE = functions("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
_THRESHOLD = functions("nvmlDeviceGetTemperatureThreshold")
_THROUGHPUT = functions("nvmlDeviceGetPcieThroughput")
_ECC = functions("nvmlDeviceGetTotalEccErrors")
_REASONS = functions("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_MHZ, _CELSIUS, _MILLIWATTS = 100_000, 250, 100_000_000

FAST = (
    FieldQuery(
        (_utilization,), ("gpu_utilization_ratio", "memory_controller_utilization_ratio"), 100, meaning=_from_percent
    ),
    FieldQuery(_CLOCK, ("sm_clock_hertz",), _MHZ, (pynvml.NVML_CLOCK_SM,), _from_mega),
    FieldQuery(_CLOCK, ("memory_clock_hertz",), _MHZ, (pynvml.NVML_CLOCK_MEM,), _from_mega),
    FieldQuery(_TEMPERATURE, ("gpu_temperature_celsius",), _CELSIUS, (pynvml.NVML_TEMPERATURE_GPU,)),
    FieldQuery(functions("nvmlDeviceGetPowerUsage"), ("power_watts",), _MILLIWATTS, meaning=_from_milli),
    FieldQuery(_REASONS, ("throttle_reasons",), 2**32 - 1, meaning=_reasons),
)

SLOW = (
    FieldQuery(functions("nvmlDeviceGetTotalEnergyConsumption"), ("energy_joules",), MAX_VALUE, meaning=_from_milli),
    # Encoder and decoder queries also return their sampling period, which has no field.
    FieldQuery(
        functions("nvmlDeviceGetEncoderUtilization"), ("encoder_utilization_ratio",), 100, meaning=_from_percent
    ),
    FieldQuery(
        functions("nvmlDeviceGetDecoderUtilization"), ("decoder_utilization_ratio",), 100, meaning=_from_percent
    ),
    FieldQuery(functions("nvmlDeviceGetPerformanceState"), ("performance_state",), 15, unknown=32),
    # Devices without this sensor return 0.
    FieldQuery(
        (_field_value,), ("memory_temperature_celsius",), _CELSIUS, (pynvml.NVML_FI_DEV_MEMORY_TEMP,), unknown=0
    ),
    FieldQuery(functions("nvmlDeviceGetEnforcedPowerLimit"), ("power_limit_watts",), _MILLIWATTS, meaning=_from_milli),
    FieldQuery(functions("nvmlDeviceGetFanSpeed"), ("fan_speed_ratio",), 200, meaning=_from_percent),
    FieldQuery(functions("nvmlDeviceGetPersistenceMode"), ("persistence_mode",), 1, meaning=bool),
    FieldQuery(
        functions("nvmlDeviceGetComputeMode"),
        ("compute_mode",),
        len(COMPUTE_MODES) - 1,
        meaning=COMPUTE_MODES.__getitem__,
    ),
    FieldQuery((_bar1,), ("bar1_size_bytes", "bar1_used_bytes"), MAX_VALUE),
    FieldQuery(functions("nvmlDeviceGetCurrPcieLinkGeneration"), ("pcie_generation",), 20, unknown=0),
    FieldQuery(functions("nvmlDeviceGetCurrPcieLinkWidth"), ("pcie_width",), 64, unknown=0),
    FieldQuery(
        _THROUGHPUT, ("pcie_receive_bytes_per_second",), 2**31, (pynvml.NVML_PCIE_UTIL_RX_BYTES,), meaning=_from_kilo
    ),
    FieldQuery(
        _THROUGHPUT, ("pcie_transmit_bytes_per_second",), 2**31, (pynvml.NVML_PCIE_UTIL_TX_BYTES,), meaning=_from_kilo
    ),
    FieldQuery(functions("nvmlDeviceGetPcieReplayCounter"), ("pcie_replays",), 2**32 - 2),
    *(
        FieldQuery(_ECC, (f"ecc_{kind}_{scope}",), MAX_VALUE, (error_type, counter_type))
        for error_type, kind in enumerate(("corrected", "uncorrected"))
        for counter_type, scope in enumerate(("volatile", "aggregate"))
    ),
    *(
        FieldQuery((_retired_pages,), (f"retired_pages_{bits}_bit",), 100_000, (cause,))
        for cause, bits in enumerate(("single", "double"))
    ),
    FieldQuery(functions("nvmlDeviceGetRetiredPagesPendingStatus"), ("retired_pages_pending",), 1, meaning=bool),
    FieldQuery((_remapped_rows,), ("remapped_rows_correctable", "remapped_rows_uncorrectable"), 2**31, (slice(2),)),
    FieldQuery((_remapped_rows,), ("remapped_rows_pending", "remapped_rows_failed"), 1, (slice(2, None),), bool),
    *(
        FieldQuery((_field_value,), (f"nvlink_{what.lower()}_errors",), MAX_VALUE, (number,))
        for what in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
        for number in (getattr(pynvml, f"NVML_FI_DEV_NVLINK_{what}_ERROR_COUNT_TOTAL"),)
    ),
)

ONCE = (
    FieldQuery(_CLOCK_MAX, ("sm_clock_max_hertz",), _MHZ, (pynvml.NVML_CLOCK_SM,), _from_mega),
    FieldQuery(_CLOCK_MAX, ("memory_clock_max_hertz",), _MHZ, (pynvml.NVML_CLOCK_MEM,), _from_mega),
    FieldQuery(_THRESHOLD, ("slowdown_temperature_celsius",), _CELSIUS, (pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,)),
    FieldQuery(_THRESHOLD, ("shutdown_temperature_celsius",), _CELSIUS, (pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,)),
    FieldQuery(functions("nvmlDeviceGetMaxPcieLinkGeneration"), ("pcie_generation_max",), 20, unknown=0),
    FieldQuery(functions("nvmlDeviceGetMaxPcieLinkWidth"), ("pcie_width_max",), 64, unknown=0),
    FieldQuery(
        functions("nvmlDeviceGetVirtualizationMode"),
        ("virtualization_mode",),
        len(VIRTUALIZATION_MODES) - 1,
        meaning=VIRTUALIZATION_MODES.__getitem__,
    ),
    FieldQuery(
        functions("nvmlDeviceGetAddressingMode"),
        ("addressing_mode",),
        len(ADDRESSING_MODES) - 1,
        meaning=ADDRESSING_MODES.__getitem__,
    ),
    FieldQuery(functions("nvmlDeviceGetNumaNodeId"), ("numa_node",), 2**16),
)


@dataclass
class _SlowAnswers:
    """Latest answers of a device to slow queries, and its failed queries."""

    due_at: float = float("-inf")
    values: dict[str, Any] = field(default_factory=dict)
    faults: FaultCollector = field(default_factory=FaultCollector)
    samples: Mapping[int, float] | None = None
    utilization_by_pid: Mapping[int, float] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    unread: tuple[FieldQuery, ...] = ONCE


class SensorReader:
    """Schedule of the queries. ``clock`` is monotonic seconds. A lost device is queried completely after its return."""

    def __init__(self, library: Library, clock: Callable[[], float]) -> None:
        self._library = library
        self._clock = clock
        self._activity, self._profile = ProcessActivity(library), ProfilingSamples(library)
        self._slow_answers: dict[str, _SlowAnswers] = {}

    def refresh(self, devices: Iterable[Device], lose: Callable[[Device, FaultKind | ReturnCode], None]) -> None:
        """Make the slow queries of the devices that are due; ``lose`` is called for those that are lost."""
        present = [device for device in devices if device.handle is not None and device.parent_uuid is None]
        self._slow_answers = {device.uuid: self._slow_answers.get(device.uuid) or _SlowAnswers() for device in present}
        started_at = self._clock()
        for device in sorted(present, key=lambda device: self._slow_answers[device.uuid].due_at):
            answers, now = self._slow_answers[device.uuid], self._clock()
            if answers.due_at > started_at or now - started_at > SLOW_BUDGET_SECONDS:
                return
            self._library.set_index(device.index)
            try:
                self._run_slow_queries(device, answers)
                answers.due_at = now + SLOW_SECONDS
            except DeviceLost as lost:
                lose(device, lost.kind)
                self.forget(device)

    def forget(self, device: Device) -> None:
        self._slow_answers.pop(device.uuid, None)
        self._profile.forget(device.uuid)

    def read(self, device: Device, faults: FaultCollector) -> dict[str, Any]:
        """Return the known values of Sensors. Raises DeviceLost."""
        answers = self._slow_answers.get(device.uuid) or _SlowAnswers()
        values = {**answers.constants, **answers.values}
        for query in FAST:
            self._query(query, device, values, faults)
        faults.extend(answers.faults)
        return values

    def utilization_by_pid(self, device: Device, pids: Iterable[int]) -> Mapping[int, float]:
        """Return the recent utilization by process, without processes that are newer than the query."""
        answers = self._slow_answers.get(device.uuid) or _SlowAnswers()
        if answers.samples is not None:
            answers.utilization_by_pid, answers.samples = {pid: answers.samples.get(pid, 0.0) for pid in pids}, None
        return answers.utilization_by_pid

    def _run_slow_queries(self, device: Device, answers: _SlowAnswers) -> None:
        answers.values, answers.faults = {}, FaultCollector()
        answers.samples, answers.utilization_by_pid = self._activity.utilization_by_pid(device, answers.faults), {}
        answers.values.update(self._profile.ask(device, answers.faults))
        for query in SLOW:
            self._query(query, device, answers.values, answers.faults)
        answers.unread = tuple(
            query for query in answers.unread if not self._query(query, device, answers.constants, answers.faults)
        )

    def _query(self, query: FieldQuery, device: Device, values: dict[str, Any], faults: FaultCollector) -> bool:
        """Store the answer in ``values``. Returns False if a retry may succeed."""
        try:
            answer = self._library.query(query.functions, device.handle, *query.arguments)
        except Unsupported:
            return True
        except EnumerationFailed as failure:
            faults.add(device.uuid, failure.kind, f"{query.fields[0]}: {failure}")
            return False
        numbers = answer if isinstance(answer, (tuple, list)) else (answer,)
        possible = True
        for name, number in zip(query.fields, numbers, strict=False):
            if number == query.unknown:
                continue
            if 0 <= number <= query.limit:
                values[name] = query.meaning(number)
            else:
                possible = False
                faults.add(device.uuid, IMPOSSIBLE, f"{name} {number}")
        return possible


class _GpmMetric(NamedTuple):
    """Field of Sensors, NVML's number of the metric, its largest value, and its scale."""

    field: str
    number: int
    limit: float
    factor: float


_MAX_MIB_PER_SECOND = 10_000_000
"""Limit in MiB per second, above the rate of any device."""

GPM_METRICS = (
    _GpmMetric("graphics_engine_active_ratio", 1, 100, 0.01),
    _GpmMetric("sm_active_ratio", 2, 100, 0.01),
    _GpmMetric("sm_occupancy_ratio", 3, 100, 0.01),
    _GpmMetric("tensor_active_ratio", 5, 100, 0.01),
    _GpmMetric("dram_active_ratio", 10, 100, 0.01),
    _GpmMetric("nvlink_receive_bytes_per_second", 60, _MAX_MIB_PER_SECOND, MIB),
    _GpmMetric("nvlink_transmit_bytes_per_second", 61, _MAX_MIB_PER_SECOND, MIB),
)


def _supports_gpm(handle: Any) -> bool:
    return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


def _gpm_sample(handle: Any) -> Any:
    sample = pynvml.nvmlGpmSampleAlloc()
    try:
        return pynvml.nvmlGpmSampleGet(handle, sample)
    except pynvml.NVMLError:
        pynvml.nvmlGpmSampleFree(sample)
        raise


def _metrics_between(before: Any, after: Any) -> list[tuple[int, float]]:
    """Return the return code and value of each of METRICS."""
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
    request.sample1, request.sample2 = before, after
    for position, metric in enumerate(GPM_METRICS):
        request.metrics[position].metricId = metric.number
    pynvml.nvmlGpmMetricsGet(request)
    return [(answer.nvmlReturn, answer.value) for answer in request.metrics[: len(GPM_METRICS)]]


class ProfilingSamples:
    """Latest sample of each device, or None if the device provides none."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._samples: dict[str, Any] = {}

    def ask(self, device: Device, faults: FaultCollector) -> dict[str, float]:
        """Return values of Sensors since the previous call; none at the first call. Raises DeviceLost."""
        try:
            if device.uuid not in self._samples and not self._library.query((_supports_gpm,), device.handle):
                self._samples[device.uuid] = None
            before = self._samples.get(device.uuid)
            if device.uuid in self._samples and before is None:
                return {}
            self._samples[device.uuid] = after = self._library.query((_gpm_sample,), device.handle)
            if before is None:
                return {}
            try:
                return _gpm_values(device.uuid, self._library.query((_metrics_between,), before, after), faults)
            finally:
                self._free(before)
        except Unsupported:
            self._samples[device.uuid] = None
        except EnumerationFailed as failure:
            if failure.kind == "no_permission":
                self._samples[device.uuid] = None  # profiling is limited to administrators here: no fault of the device
            else:
                faults.add(device.uuid, failure.kind, f"GPM: {failure}")
        return {}

    def forget(self, uuid: str) -> None:
        sample = self._samples.pop(uuid, None)
        if sample is not None:
            self._free(sample)

    def _free(self, sample: Any) -> None:
        with suppress(pynvml.NVMLError):  # the driver is unloaded, and has freed the sample
            pynvml.nvmlGpmSampleFree(sample)


def _gpm_values(uuid: str, answers: list[tuple[int, float]], faults: FaultCollector) -> dict[str, float]:
    values: dict[str, float] = {}
    for metric, (code, value) in zip(GPM_METRICS, answers, strict=True):
        if code != pynvml.NVML_SUCCESS:
            continue
        if 0 <= value <= metric.limit:
            values[metric.field] = value * metric.factor
        else:  # includes NaN
            faults.add(uuid, IMPOSSIBLE, f"{metric.field} {value}")
    return values


MAX_UTILIZATION_SAMPLES = 1024
"""Upper limit of samples, above the number of contexts of a device."""

NO_SAMPLES = "not_found"
"""Kind of the failure by which a driver reports that no process has used the device."""


def _utilization_samples(handle: Any, since: int) -> list[Any]:
    """Return one sample per process that has used the device since ``since``.

    The binding's own function makes two calls, and treats an idle device as an error.
    """
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization")
    count, samples = (
        ctypes.c_uint(MAX_UTILIZATION_SAMPLES),
        (pynvml.c_nvmlProcessUtilizationSample_t * MAX_UTILIZATION_SAMPLES)(),
    )
    code = function(handle, samples, ctypes.byref(count), ctypes.c_ulonglong(since))
    if code:
        raise pynvml.NVMLError(code)
    return list(samples[: min(count.value, MAX_UTILIZATION_SAMPLES)])


class ProcessActivity:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._since: dict[str, int] = {}
        """Driver time of the last sample in microseconds, by UUID."""

    def utilization_by_pid(self, device: Device, faults: FaultCollector) -> Mapping[int, float] | None:
        """Return the utilization of the busiest hardware unit by pid since the previous query; absent pids were idle.

        Returns None if the driver does not report it. Raises DeviceLost.
        """
        try:
            samples = self._library.query((_utilization_samples,), device.handle, self._since.get(device.uuid, 0))
        except Unsupported:
            return None
        except EnumerationFailed as failure:
            if failure.kind == NO_SAMPLES:
                return {}
            faults.add(device.uuid, failure.kind, f"utilization of processes: {failure}")
            return None
        if samples:
            self._since[device.uuid] = max(sample.timeStamp for sample in samples)
        ratios: dict[int, float] = {}
        for sample in samples:
            percent = max(sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil)
            if percent > 100:
                faults.add(device.uuid, IMPOSSIBLE, f"utilization {percent} of pid {sample.pid}")
                return None
            ratios[sample.pid] = max(percent / 100, ratios.get(sample.pid, 0.0))
        return ratios
