"""Functions of NVML with the fields that they fill, and codes with the conditions that they lead to."""

from __future__ import annotations

SLOW_FUNCTIONS = {
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_joules"},
    "nvmlDeviceGetEncoderUtilization": {"encoder_utilization_ratio"},
    "nvmlDeviceGetDecoderUtilization": {"decoder_utilization_ratio"},
    "nvmlDeviceGetPerformanceState": {"performance_state"},
    "nvmlDeviceGetFieldValues": {
        "memory_temperature_celsius",
        "nvlink_crc_flit_errors",
        "nvlink_crc_data_errors",
        "nvlink_replay_errors",
        "nvlink_recovery_errors",
    },
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetFanSpeed": {"fan_speed_ratio"},
    "nvmlDeviceGetPersistenceMode": {"persistence_mode"},
    "nvmlDeviceGetComputeMode": {"compute_mode"},
    "nvmlDeviceGetBAR1MemoryInfo": {"bar1_size_bytes", "bar1_used_bytes"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetPcieThroughput": {"pcie_receive_bytes_per_second", "pcie_transmit_bytes_per_second"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie_replays"},
    "nvmlDeviceGetTotalEccErrors": {
        f"ecc_{kind}_{scope}" for kind in ("corrected", "uncorrected") for scope in ("volatile", "aggregate")
    },
    "nvmlDeviceGetRetiredPages": {"retired_pages_single_bit", "retired_pages_double_bit"},
    "nvmlDeviceGetRetiredPagesPendingStatus": {"retired_pages_pending"},
    "nvmlDeviceGetRemappedRows": {
        f"remapped_rows_{what}" for what in ("correctable", "uncorrectable", "pending", "failed")
    },
}


ONCE_FUNCTIONS = {
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_max_hertz", "memory_clock_max_hertz"},
    "nvmlDeviceGetTemperatureThreshold": {"slowdown_temperature_celsius", "shutdown_temperature_celsius"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation_max"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_width_max"},
    "nvmlDeviceGetVirtualizationMode": {"virtualization_mode"},
    "nvmlDeviceGetAddressingMode": {"addressing_mode"},
    "nvmlDeviceGetNumaNodeId": {"numa_node"},
}


CODES = [*range(1, 31), 999]


DRIVER_GONE = {1, 9, 12, 18}


LOST = {15, 28}


SUPERSEDED = {13, 25, 26}


UNSUPPORTED = {3, *SUPERSEDED}
