"""Device metrics with the names, labels and units of dcgm-exporter, for its existing dashboards and rules.

Covers the exporter's default families that NVML can answer, ECC and retired pages, FB_TOTAL, and PROF_* from NVML's GPM
(Hopper and later) and PCIe counters. If all processes on a device belong to one container, the device has the labels
``pod``, ``namespace`` and ``container``, as with dcgm-exporter's Kubernetes mapping. dcgm-exporter reports the pod to
which the device is assigned; gpumond reports the pod that uses it.

docs/reference/metrics.md lists the families that it leaves out.

Three dialects: exporter 4.9 renamed fields and the label of the driver version, and changed to base units; exporter
4.8.3 renamed the label ``Hostname``. Names: etc/default-counters.csv of github.com/NVIDIA/dcgm-exporter at 4.5.3-4.8.2
and 4.6.0-4.8.3, release notes of 4.8.3 and 4.9.0, and the field identifiers of DCGM 4.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Literal, NamedTuple

from prometheus_client.core import Metric

from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import DeviceReading
from gpumond.facts.units import MIB
from gpumond.host.machine import MACHINE_NAME

DCGM_VENDORS = ("nvidia", "sim")


class DcgmDialect(NamedTuple):
    """Names of one range of versions of dcgm-exporter."""

    uses_former_names: bool
    """Names and units before exporter 4.9."""
    hostname: str
    driver_version: str
    xid: str


DIALECTS: Mapping[Compat, DcgmDialect] = {
    "dcgm-4.7": DcgmDialect(True, "Hostname", "DCGM_FI_DRIVER_VERSION", "DCGM_FI_DEV_XID_ERRORS"),
    "dcgm-4.8": DcgmDialect(True, "hostname", "DCGM_FI_DRIVER_VERSION", "DCGM_FI_DEV_XID_ERRORS"),
    "dcgm-4.9": DcgmDialect(False, "hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION", "DCGM_FI_DEV_XID_ERROR"),
    "dcgm": DcgmDialect(False, "hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION", "DCGM_FI_DEV_XID_ERROR"),
}
"""``dcgm-4.7`` is also that of exporter 4.8.0 to 4.8.2; ``dcgm`` is the newest."""


class DcgmUnit(NamedTuple):
    """Unit since exporter 4.9, the former unit, and the number of former units in one unit."""

    name: str = ""
    former: str = ""
    factor: float = 1


NO_UNIT = DcgmUnit()
UNITS_BY_SUFFIX: Mapping[str, DcgmUnit] = {
    "_bytes_per_second": DcgmUnit("in bytes per second", "in bytes per second"),
    "_bytes": DcgmUnit("in bytes", "in MiB", 1 / MIB),
    "_hertz": DcgmUnit("in Hz", "in MHz", 1e-6),
    "_celsius": DcgmUnit("in C", "in C"),
    "_watts": DcgmUnit("in W", "in W"),
    "_joules": DcgmUnit("in J", "in mJ", 1e3),
    "_ratio": DcgmUnit("0 to 1", "in %", 100),
}
"""Units by the ends of the names of fields."""


class DcgmFamily(NamedTuple):
    """Family with its name since exporter 4.9 and its former name; ``read`` is in the unit since 4.9.

    If it ``is_per_mig_instance``, MIG instances replace their GPU. DCGM's counters are exported as untyped, because
    prometheus_client requires counter names to end in ``_total``.
    """

    new_name: str
    former_name: str
    meaning: str
    unit: DcgmUnit
    read: Callable[[DeviceReading], float | None]
    is_per_mig_instance: bool = False
    kind: Literal["gauge", "untyped"] = "gauge"

    def name(self, use_former_name: bool) -> str:
        return f"DCGM_FI_{self.former_name if use_former_name else self.new_name}"

    def help(self, use_former_unit: bool) -> str:
        unit = self.unit.former if use_former_unit else self.unit.name
        return f"{self.meaning} ({unit})." if unit else f"{self.meaning}."


def _unit(field: str) -> DcgmUnit:
    return next((unit for suffix, unit in UNITS_BY_SUFFIX.items() if field.endswith(suffix)), NO_UNIT)


def _sensor(new: str, former: str, meaning: str, field: str) -> DcgmFamily:
    return DcgmFamily(f"DEV_{new}", f"DEV_{former}", meaning, _unit(field), attrgetter(f"sensors.{field}"))


def _counter(new: str, former: str, meaning: str, field: str) -> DcgmFamily:
    return _sensor(new, former, meaning, field)._replace(kind="untyped")


def _profiled(new: str, former: str, meaning: str, field: str) -> DcgmFamily:
    """Return a family whose ratios are from 0 to 1 under both names."""
    unit = NO_UNIT if field.endswith("_ratio") else _unit(field)
    return DcgmFamily(f"PROF_{new}", f"PROF_{former}", meaning, unit, attrgetter(f"sensors.{field}"))


def _memory(new: str, former: str, meaning: str, field: str) -> DcgmFamily:
    return DcgmFamily(
        f"DEV_FB_{new}", f"DEV_FB_{former}", meaning, _unit(field), attrgetter(field), is_per_mig_instance=True
    )


FAMILIES = (
    _sensor("SM_CLOCK_HERTZ", "SM_CLOCK", "SM clock frequency", "sm_clock_hertz"),
    _sensor("MEMORY_CLOCK_HERTZ", "MEM_CLOCK", "Memory clock frequency", "memory_clock_hertz"),
    _sensor("MEMORY_TEMP_CELSIUS", "MEMORY_TEMP", "Memory temperature", "memory_temperature_celsius"),
    _sensor("GPU_TEMP_CELSIUS", "GPU_TEMP", "GPU temperature", "gpu_temperature_celsius"),
    _sensor("BOARD_POWER_WATTS", "POWER_USAGE", "Power draw", "power_watts"),
    _counter(
        "GPU_ENERGY_JOULES_TOTAL", "TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded", "energy_joules"
    ),
    _counter("PCIE_REPLAY_TOTAL", "PCIE_REPLAY_COUNTER", "Total number of PCIe retries", "pcie_replays"),
    _sensor("GPU_UTIL_RATIO", "GPU_UTIL", "GPU utilization", "gpu_utilization_ratio"),
    _sensor("MEMORY_UTIL_RATIO", "MEM_COPY_UTIL", "Memory utilization", "memory_controller_utilization_ratio"),
    _sensor("ENC_UTIL_RATIO", "ENC_UTIL", "Encoder utilization", "encoder_utilization_ratio"),
    _sensor("DEC_UTIL_RATIO", "DEC_UTIL", "Decoder utilization", "decoder_utilization_ratio"),
    _memory("FREE_BYTES", "FREE", "Framebuffer memory free", "free_bytes"),
    _memory("USED_BYTES", "USED", "Framebuffer memory used", "used_bytes"),
    _memory("RESERVED_BYTES", "RESERVED", "Framebuffer memory reserved", "reserved_bytes"),
    _memory("CAPACITY_BYTES", "TOTAL", "Framebuffer memory total", "size_bytes"),
    _counter("ECC_SBE_VOL_TOTAL", "ECC_SBE_VOL_TOTAL", "Single-bit volatile ECC errors", "ecc_corrected_volatile"),
    _counter("ECC_DBE_VOL_TOTAL", "ECC_DBE_VOL_TOTAL", "Double-bit volatile ECC errors", "ecc_uncorrected_volatile"),
    _counter("ECC_SBE_AGG_TOTAL", "ECC_SBE_AGG_TOTAL", "Single-bit persistent ECC errors", "ecc_corrected_aggregate"),
    _counter("ECC_DBE_AGG_TOTAL", "ECC_DBE_AGG_TOTAL", "Double-bit persistent ECC errors", "ecc_uncorrected_aggregate"),
    _counter(
        "PAGE_RETIRED_SBE_TOTAL", "RETIRED_SBE", "Retired pages due to single-bit errors", "retired_pages_single_bit"
    ),
    _counter(
        "PAGE_RETIRED_DBE_TOTAL", "RETIRED_DBE", "Retired pages due to double-bit errors", "retired_pages_double_bit"
    ),
    _counter("PAGE_RETIRED_PENDING", "RETIRED_PENDING", "Pages pending retirement", "retired_pages_pending"),
    _counter(
        "ROW_REMAP_UNCORRECTABLE_TOTAL",
        "UNCORRECTABLE_REMAPPED_ROWS",
        "Remapped rows for uncorrectable errors",
        "remapped_rows_uncorrectable",
    ),
    _counter(
        "ROW_REMAP_CORRECTABLE_TOTAL",
        "CORRECTABLE_REMAPPED_ROWS",
        "Remapped rows for correctable errors",
        "remapped_rows_correctable",
    ),
    _sensor("ROW_REMAP_FAILED", "ROW_REMAP_FAILURE", "Whether remapping of rows has failed", "remapped_rows_failed"),
    _profiled(
        "GR_ENGINE_UTIL_RATIO",
        "GR_ENGINE_ACTIVE",
        "Fraction of time during which the graphics engine is active",
        "graphics_engine_active_ratio",
    ),
    _profiled("SM_UTIL_RATIO", "SM_ACTIVE", "Fraction of the SMs that have work", "sm_active_ratio"),
    _profiled(
        "SM_OCCUPANCY_RATIO", "SM_OCCUPANCY", "Resident warps as a fraction of the SMs' maximum", "sm_occupancy_ratio"
    ),
    _profiled(
        "TENSOR_UTIL_RATIO",
        "PIPE_TENSOR_ACTIVE",
        "Fraction of time during which the tensor cores are active",
        "tensor_active_ratio",
    ),
    _profiled("DRAM_UTIL_RATIO", "DRAM_ACTIVE", "Fraction of the memory bandwidth in use", "dram_active_ratio"),
    _profiled("PCIE_TX_BYTES", "PCIE_TX_BYTES", "Traffic to the host over PCIe", "pcie_transmit_bytes_per_second"),
    _profiled("PCIE_RX_BYTES", "PCIE_RX_BYTES", "Traffic from the host over PCIe", "pcie_receive_bytes_per_second"),
    _profiled("NVLINK_TX_BYTES", "NVLINK_TX_BYTES", "Traffic sent over NVLink", "nvlink_transmit_bytes_per_second"),
    _profiled("NVLINK_RX_BYTES", "NVLINK_RX_BYTES", "Traffic received over NVLink", "nvlink_receive_bytes_per_second"),
)


def metrics(frame: Frame, compat: Compat = "dcgm", hostname: str = MACHINE_NAME) -> Iterator[Metric]:
    dialect = DIALECTS[compat]
    use_former_names = dialect.uses_former_names
    devices = {device.uuid: device for device in frame.snapshot.devices if device.vendor in DCGM_VENDORS}
    parents_of_mig_instances = {device.parent_uuid for device in devices.values()}
    machine = {dialect.hostname: hostname, dialect.driver_version: frame.snapshot.source.driver_version or ""}
    labels = {device.uuid: _labels(device, devices, machine) for device in devices.values()}
    for family in FAMILIES:
        name, factor = family.name(use_former_names), family.unit.factor if use_former_names else 1
        metric = Metric(name, family.help(use_former_names), family.kind)
        for device in devices.values():
            value = family.read(device)
            if value is None or (
                device.uuid in parents_of_mig_instances
                if family.is_per_mig_instance
                else device.parent_uuid is not None
            ):
                continue
            metric.add_sample(name, labels[device.uuid], round(value * factor, 6))
        yield metric
    yield _last_xid(dialect.xid, frame, devices.values(), labels)


def _last_xid(
    name: str, frame: Frame, devices: Iterable[DeviceReading], labels: Mapping[str, Mapping[str, str]]
) -> Metric:
    """Return the last Xid per device. 0 means none, and is exported only while Xid events are subscribed."""
    metric = Metric(name, "Value of the last Xid error encountered.", "gauge")
    for device in devices:
        xids = [errors for errors in frame.snapshot.xids if errors.device_uuid == device.uuid]
        if xids or device.sensors.xid_events:
            xid = max(xids, key=lambda errors: errors.last_seen_at).xid if xids else 0
            metric.add_sample(metric.name, {**labels[device.uuid], "err_code": str(xid)}, xid)
    return metric


def _labels(device: DeviceReading, devices: Mapping[str, DeviceReading], machine: Mapping[str, str]) -> dict[str, str]:
    """Return the device's labels. A MIG instance has its GPU's labels plus its profile and instance ID."""
    gpu = devices.get(device.parent_uuid or "", device)
    labels = {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": f"nvidia{gpu.index}",
        "modelName": gpu.name,
        **machine,
    }
    if gpu is not device:
        instance = device.gpu_instance_id
        labels["GPU_I_PROFILE"] = device.name.rpartition("MIG ")[2]
        labels["GPU_I_ID"] = "" if instance is None else str(instance)
    return labels | _pod(device)


def _pod(device: DeviceReading) -> dict[str, str]:
    """Return the pod labels if all processes of the device that run in pods belong to one container."""
    containers = {
        (process.pod_name, process.pod_namespace, process.container_name or "")
        for process in device.processes or ()
        if process.pod_name and process.pod_namespace
    }
    if len(containers) != 1:
        return {}
    pod, namespace, container = next(iter(containers))
    return {"pod": str(pod), "namespace": str(namespace), "container": container}


Compat = Literal["dcgm", "dcgm-4.9", "dcgm-4.8", "dcgm-4.7"]
"""Versions of dcgm-exporter whose names `/metrics` can have."""
