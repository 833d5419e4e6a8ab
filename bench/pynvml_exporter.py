"""A minimal exporter of the driver's values, for ``bench.peers``: pynvml and prometheus-client.

python -m bench.pynvml_exporter PORT

Once a second it reads memory, utilization, power, temperature, clocks and the processes of each device. It exports
neither the owner of a process nor an error of the driver, and it ends at the first one.
"""

from __future__ import annotations

import sys
import time

import pynvml as nvml
from prometheus_client import CollectorRegistry, Gauge, start_http_server

DEVICE_GAUGES = (
    "memory_used_bytes",
    "memory_size_bytes",
    "utilization_ratio",
    "memory_utilization_ratio",
    "power_watts",
    "temperature_celsius",
    "sm_clock_hertz",
    "memory_clock_hertz",
)


def values(handle: object) -> tuple[float, ...]:
    memory, rates = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetUtilizationRates(handle)
    return (
        memory.used,
        memory.total,
        rates.gpu / 100,
        rates.memory / 100,
        nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
    )


def main() -> None:
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    registry = CollectorRegistry()
    gauges = [Gauge(f"gpu_{name}", name, ["gpu"], registry=registry) for name in DEVICE_GAUGES]
    of_process = Gauge("gpu_process_memory_used_bytes", "memory of a process", ["gpu", "pid"], registry=registry)
    listed: set[tuple[str, str]] = set()
    start_http_server(int(sys.argv[1]), "127.0.0.1", registry)
    due = time.monotonic()
    while True:
        seen = set()
        for index, handle in enumerate(handles):
            gpu = str(index)
            for gauge, value in zip(gauges, values(handle), strict=True):
                gauge.labels(gpu).set(value)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory is not None:
                    of_process.labels(gpu, str(process.pid)).set(process.usedGpuMemory)
                    seen.add((gpu, str(process.pid)))
        for ended in listed - seen:
            of_process.remove(*ended)
        listed = seen
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
