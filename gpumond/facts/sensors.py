"""Measurements of a device other than its memory. Base units; unknown is None."""

from __future__ import annotations

from dataclasses import dataclass

THROTTLE_REASONS: tuple[str, ...] = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clocks_setting",
    "board_limit",
    "reliability",
)
"""Reasons for which a clock is not at its maximum; nvidia-smi's names, in the order of NVML's bits."""


VIRTUALIZATION_MODES = ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga")
"""``vgpu``: a part of a device, in a virtual machine; ``host_*``: the host of such machines. In NVML's order."""

ADDRESSING_MODES = ("none", "hmm", "ats")
"""Shared addresses of device and host: none, by software, or by hardware that keeps both coherent. In NVML's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """Measurements and settings of a device, and its hardware's error counters.

    The ECC counters start when the driver is loaded (volatile) or with the device's lifetime (aggregate).
    ``performance_state`` is 0 (fastest) to 15. ``throttle_reasons`` are the active ones of ``THROTTLE_REASONS``.
    ``xid_events`` is True while the driver reports Xid errors when they occur. ``numa_node``: the host's NUMA node
    that is the device's memory; ``file_cache_bytes``: the kernel's file cache there.
    """

    gpu_utilization_ratio: float | None = None
    memory_controller_utilization_ratio: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    gpu_temperature_celsius: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    encoder_utilization_ratio: float | None = None
    decoder_utilization_ratio: float | None = None
    sm_clock_max_hertz: float | None = None
    memory_clock_max_hertz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    performance_state: int | None = None
    memory_temperature_celsius: float | None = None
    slowdown_temperature_celsius: float | None = None
    shutdown_temperature_celsius: float | None = None
    power_limit_watts: float | None = None
    fan_speed_ratio: float | None = None
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    bar1_size_bytes: int | None = None
    bar1_used_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_receive_bytes_per_second: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    pcie_replays: int | None = None
    ecc_corrected_volatile: int | None = None
    ecc_corrected_aggregate: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    retired_pages_single_bit: int | None = None
    retired_pages_double_bit: int | None = None
    retired_pages_pending: bool | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    remapped_rows_pending: bool | None = None
    remapped_rows_failed: bool | None = None
    nvlink_crc_flit_errors: int | None = None
    nvlink_crc_data_errors: int | None = None
    nvlink_replay_errors: int | None = None
    nvlink_recovery_errors: int | None = None
    xid_events: bool | None = None
    virtualization_mode: str | None = None
    addressing_mode: str | None = None
    numa_node: int | None = None
    file_cache_bytes: int | None = None
    graphics_engine_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None


NO_SENSORS = Sensors()
