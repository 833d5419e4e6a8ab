"""Device metrics with the names, labels and units of dcgm-exporter, for its existing dashboards and rules.

Covers the exporter's default families that NVML can answer, ECC and retired pages, FB_TOTAL, and PROF_* from NVML's GPM
(Hopper and later) and PCIe counters. If all processes on a device belong to one container, the device has the labels
``pod``, ``namespace`` and ``container``, as with dcgm-exporter's Kubernetes mapping. dcgm-exporter reports the pod to
which the device is assigned; gpumond reports the pod that uses it.

Does not cover the families in ``LEFT_OUT``.

Names: etc/default-counters.csv of github.com/NVIDIA/dcgm-exporter at 4.5.3-4.8.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Literal, NamedTuple

from prometheus_client.core import Metric

from gpumond.host.machine_name import MACHINE_NAME
from gpumond.model.frame import Frame
from gpumond.model.sensors import Sensors
from gpumond.model.snapshot import DeviceReading
from gpumond.model.units import MIB

VENDORS = ("nvidia", "sim")


class DcgmFamily(NamedTuple):
    """Family whose samples are ``value`` times ``factor``; with ``memory``, MIG instances replace their GPU.

    DCGM's counters are exported as untyped, because prometheus_client requires counter names to end in ``_total``.
    """

    name: str
    help: str
    value: Callable[[DeviceReading], float | None]
    factor: float = 1
    memory: bool = False
    kind: Literal["gauge", "untyped"] = "gauge"


def _sensor(name: str, help: str, value: Callable[[Sensors], float | None], factor: float = 1) -> DcgmFamily:
    return DcgmFamily(f"DCGM_FI_DEV_{name}", help, lambda device: value(device.sensors), factor)


def _counter(name: str, help: str, value: Callable[[Sensors], float | None], factor: float = 1) -> DcgmFamily:
    return _sensor(name, help, value, factor)._replace(kind="untyped")


def _profiled(name: str, help: str, field: str) -> DcgmFamily:
    return DcgmFamily(f"DCGM_FI_PROF_{name}", help, attrgetter(f"sensors.{field}"))


def _memory(name: str, help: str, value: Callable[[DeviceReading], int | None]) -> DcgmFamily:
    return DcgmFamily(f"DCGM_FI_DEV_FB_{name}", help, value, 1 / MIB, memory=True)


FAMILIES = (
    _sensor("SM_CLOCK", "SM clock frequency (in MHz).", lambda s: s.sm_clock_hertz, 1e-6),
    _sensor("MEM_CLOCK", "Memory clock frequency (in MHz).", lambda s: s.memory_clock_hertz, 1e-6),
    _sensor("MEMORY_TEMP", "Memory temperature (in C).", lambda s: s.memory_temperature_celsius),
    _sensor("GPU_TEMP", "GPU temperature (in C).", lambda s: s.gpu_temperature_celsius),
    _sensor("POWER_USAGE", "Power draw (in W).", lambda s: s.power_watts),
    _counter("TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded (in mJ).", lambda s: s.energy_joules, 1e3),
    _counter("PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", lambda s: s.pcie_replays),
    _sensor("GPU_UTIL", "GPU utilization (in %).", lambda s: s.gpu_utilization_ratio, 100),
    _sensor("MEM_COPY_UTIL", "Memory utilization (in %).", lambda s: s.memory_controller_utilization_ratio, 100),
    _sensor("ENC_UTIL", "Encoder utilization (in %).", lambda s: s.encoder_utilization_ratio, 100),
    _sensor("DEC_UTIL", "Decoder utilization (in %).", lambda s: s.decoder_utilization_ratio, 100),
    _memory("FREE", "Framebuffer memory free (in MiB).", lambda d: d.free_bytes),
    _memory("USED", "Framebuffer memory used (in MiB).", lambda d: d.used_bytes),
    _memory("RESERVED", "Framebuffer memory reserved (in MiB).", lambda d: d.reserved_bytes),
    _memory("TOTAL", "Framebuffer memory total (in MiB).", lambda d: d.size_bytes),
    _counter("ECC_SBE_VOL_TOTAL", "Single-bit volatile ECC errors.", lambda s: s.ecc_corrected_volatile),
    _counter("ECC_DBE_VOL_TOTAL", "Double-bit volatile ECC errors.", lambda s: s.ecc_uncorrected_volatile),
    _counter("ECC_SBE_AGG_TOTAL", "Single-bit persistent ECC errors.", lambda s: s.ecc_corrected_aggregate),
    _counter("ECC_DBE_AGG_TOTAL", "Double-bit persistent ECC errors.", lambda s: s.ecc_uncorrected_aggregate),
    _counter("RETIRED_SBE", "Retired pages due to single-bit errors.", lambda s: s.retired_pages_single_bit),
    _counter("RETIRED_DBE", "Retired pages due to double-bit errors.", lambda s: s.retired_pages_double_bit),
    _counter("RETIRED_PENDING", "Pages pending retirement.", lambda s: s.retired_pages_pending),
    _counter(
        "UNCORRECTABLE_REMAPPED_ROWS",
        "Remapped rows for uncorrectable errors.",
        lambda s: s.remapped_rows_uncorrectable,
    ),
    _counter(
        "CORRECTABLE_REMAPPED_ROWS", "Remapped rows for correctable errors.", lambda s: s.remapped_rows_correctable
    ),
    _sensor("ROW_REMAP_FAILURE", "Whether remapping of rows has failed.", lambda s: s.remapped_rows_failed),
    _profiled("GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", "graphics_engine_active_ratio"),
    _profiled("SM_ACTIVE", "Ratio of the SMs that have work.", "sm_active_ratio"),
    _profiled("SM_OCCUPANCY", "Ratio of the warps resident on the SMs.", "sm_occupancy_ratio"),
    _profiled("PIPE_TENSOR_ACTIVE", "Ratio of time the tensor cores are active.", "tensor_active_ratio"),
    _profiled("DRAM_ACTIVE", "Ratio of the memory bandwidth that is used.", "dram_active_ratio"),
    _profiled(
        "PCIE_TX_BYTES", "Traffic to the host over PCIe (in bytes per second).", "pcie_transmit_bytes_per_second"
    ),
    _profiled(
        "PCIE_RX_BYTES", "Traffic from the host over PCIe (in bytes per second).", "pcie_receive_bytes_per_second"
    ),
    _profiled("NVLINK_TX_BYTES", "Traffic sent over NVLink (in bytes per second).", "nvlink_transmit_bytes_per_second"),
    _profiled(
        "NVLINK_RX_BYTES", "Traffic received over NVLink (in bytes per second).", "nvlink_receive_bytes_per_second"
    ),
)


LEFT_OUT: Mapping[str, str] = {
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "requires DCGM's own sampling; use PROF_NVLINK_TX_BYTES and _RX_BYTES",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE, _FP32_ACTIVE, _FP16_ACTIVE, _INT_ACTIVE": "only the tensor pipe is read",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "licences are not read",
    "DCGM_FI_DEV_POWER_VIOLATION and the other violations": "use the active reasons in gpumond_device_throttle",
}
"""Families of dcgm-exporter's lists that are not exported, and the reasons."""


def metrics(frame: Frame, hostname: str = MACHINE_NAME) -> Iterator[Metric]:
    devices = {device.uuid: device for device in frame.snapshot.devices if device.vendor in VENDORS}
    split = {device.parent_uuid for device in devices.values()}
    version = frame.snapshot.source.driver_version or ""
    labels = {device.uuid: _labels(device, devices, hostname, version) for device in devices.values()}
    for family in FAMILIES:
        metric = Metric(family.name, family.help, family.kind)
        for device in devices.values():
            value = family.value(device)
            if value is None or (device.uuid in split if family.memory else device.parent_uuid is not None):
                continue
            metric.add_sample(family.name, labels[device.uuid], round(value * family.factor, 6))
        yield metric
    yield _last_xid(frame, devices.values(), labels)


def _last_xid(frame: Frame, devices: Iterable[DeviceReading], labels: Mapping[str, Mapping[str, str]]) -> Metric:
    """Return the last XID per device. 0 means none, and is exported only while XID events are subscribed."""
    metric = Metric("DCGM_FI_DEV_XID_ERRORS", "Value of the last XID error encountered.", "gauge")
    for device in devices:
        own = [errors for errors in frame.snapshot.xids if errors.device_uuid == device.uuid]
        if own or device.sensors.xid_events:
            last = max(own, key=lambda errors: errors.last_seen_at).xid if own else 0
            metric.add_sample(metric.name, {**labels[device.uuid], "err_code": str(last)}, last)
    return metric


def _labels(device: DeviceReading, devices: Mapping[str, DeviceReading], hostname: str, version: str) -> dict[str, str]:
    """Return the device's labels. A MIG instance has its GPU's labels plus its profile and instance ID."""
    gpu = devices.get(device.parent_uuid or "", device)
    labels = {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": f"nvidia{gpu.index}",
        "modelName": gpu.name,
        "Hostname": hostname,
        "DCGM_FI_DRIVER_VERSION": version,
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
