"""Recent utilization of an NVIDIA device by process, from the driver's samples.

Each sample (200 ms on an H200) is attributed to one process. On a busy device, a process that occasionally runs for
some milliseconds may be missed for ten seconds and more.

Covers compute, memory, encoder and decoder of a whole device. Does not cover MIG instances and parts of a device in
virtual machines, for which drivers report no samples.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import pynvml

from gpumond.sources.inventory import Device, EnumerationFailed, Unsupported
from gpumond.sources.nvml.library import Library
from gpumond.sources.validation import IMPOSSIBLE, Tally

LONGEST = 1024
"""Upper limit of samples, above the number of contexts of a device."""

NO_SAMPLES = "not_found"
"""Kind of the failure by which a driver reports that no process has used the device."""


def _samples(handle: Any, since: int) -> list[Any]:
    """Return one sample per process that has used the device since ``since``.

    The binding's own function makes two calls, and treats an idle device as an error.
    """
    function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization")
    count, samples = ctypes.c_uint(LONGEST), (pynvml.c_nvmlProcessUtilizationSample_t * LONGEST)()
    code = function(handle, samples, ctypes.byref(count), ctypes.c_ulonglong(since))
    if code:
        raise pynvml.NVMLError(code)
    return list(samples[: min(count.value, LONGEST)])


class ProcessActivity:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._since: dict[str, int] = {}
        """Driver time of the last sample in microseconds, by UUID."""

    def ask(self, device: Device, tally: Tally) -> Mapping[int, float] | None:
        """Return the utilization of the busiest engine by pid since the previous query; absent pids were idle.

        Returns None if the driver does not report it. Raises DeviceLost.
        """
        try:
            samples = self._library.query((_samples,), device.handle, self._since.get(device.uuid, 0))
        except Unsupported:
            return None
        except EnumerationFailed as failure:
            if failure.kind == NO_SAMPLES:
                return {}
            tally.add(device.uuid, failure.kind, f"utilization of processes: {failure}")
            return None
        self._since[device.uuid] = max((sample.timeStamp for sample in samples), default=0)
        ratios: dict[int, float] = {}
        for sample in samples:
            percent = max(sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil)
            if percent > 100:
                tally.add(device.uuid, IMPOSSIBLE, f"utilization {percent} of pid {sample.pid}")
                return None
            ratios[sample.pid] = max(percent / 100, ratios.get(sample.pid, 0.0))
        return ratios
