"""How much of an NVIDIA device each process used lately, as the driver samples it.

Each of its samples (a fifth of a second on an H200) goes to one process, so that on a busy device one that runs for
some milliseconds now and then may be missed for ten seconds and more.

Covers: compute, memory, encoder and decoder of a whole device. Does not cover: MIG instances and virtual machines'
parts of a device, of which drivers do not tell it.
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
"""More samples than a device has contexts."""

NO_SAMPLES = "not_found"
"""The kind of failure by which a driver says that no process has used the device."""


def _samples(handle: Any, since: int) -> list[Any]:
    """One sample for each process that used the device since then. The binding's own function asks twice, and takes an
    idle device for an error."""
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
        """The driver's time of the last sample, in microseconds, by UUID."""

    def ask(self, device: Device, tally: Tally) -> Mapping[int, float] | None:
        """Ratios by pid since the question before, of the busiest engine; a pid that is not there ran nothing.

        None if the driver does not say. Raises Lost.
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
