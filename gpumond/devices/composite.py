"""All devices of a machine: NVIDIA's through NVML, AMD's and Intel's through DRM.

A source that cannot be opened is a fault and is retried; the devices of the other are available meanwhile. A source
that fails later raises, because a driver's library can only be reloaded in a new process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumond.devices import AUTOMATIC, DeviceSource, ProgressReporter, ReadProgress, load, may_have_gpu
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.remedies import remedy
from gpumond.facts.snapshot import NO_DEVICE, DeviceReading, Fault, Reading

RETRY_SECONDS = 30.0


class CompositeSource:
    name = "all"

    def __init__(
        self,
        sources: Sequence[DeviceSource] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sys: str = "/sys",
    ) -> None:
        self._sources = [load(spec.name) for spec in AUTOMATIC] if sources is None else sources
        self._clock, self._sys = clock, sys
        self._missing: dict[str, SourceUnavailable] = {}
        self._retry_at = float("-inf")
        self._indices: dict[str, int] = {}

    def set_progress(self, progress: ReadProgress) -> None:
        for source in self._sources:
            if isinstance(source, ProgressReporter):
                source.set_progress(progress)

    def open(self) -> None:
        self._missing = {source.name: SourceUnavailable("starting", "") for source in self._sources}
        self._open_missing()
        if len(self._missing) == len(self._sources):
            if not may_have_gpu(self._sys):
                raise SourceUnavailable(NO_DEVICE, f"this machine has no GPU: {remedy(NO_DEVICE)}")
            raise next(iter(self._missing.values()))

    def read(self) -> Reading:
        if self._missing and self._clock() >= self._retry_at:
            self._open_missing()
        readings = [source.read() for source in self._sources if source.name not in self._missing]
        faults = [fault for reading in readings for fault in reading.faults]
        faults += (Fault(name, error.reason, None, str(error)) for name, error in self._missing.items())
        first = next((reading for reading in readings if reading.library_version), readings[0])
        return replace(
            first,
            devices=tuple(self._numbered([device for reading in readings for device in reading.devices])),
            faults=tuple(faults),
            driver_version=", ".join(reading.driver_version for reading in readings if reading.driver_version) or None,
        )

    def close(self) -> None:
        for source in self._sources:
            if source.name not in self._missing:
                source.close()

    def _open_missing(self) -> None:
        self._retry_at = self._clock() + RETRY_SECONDS
        for source in self._sources:
            if source.name in self._missing:
                try:
                    source.open()
                    del self._missing[source.name]
                except SourceUnavailable as error:
                    self._missing[source.name] = error

    def _numbered(self, devices: Sequence[DeviceReading]) -> Sequence[DeviceReading]:
        """Keep the indices of NVML devices; assign each other device the next free index, permanently."""
        taken = {device.index for device in devices if device.vendor == "nvidia"}
        numbered = []
        for device in devices:
            if device.vendor != "nvidia":
                index = self._indices.get(device.uuid, device.index)
                used = {*taken, *(number for uuid, number in self._indices.items() if uuid != device.uuid)}
                while index in used:
                    index += 1
                self._indices[device.uuid] = index
                device = replace(device, index=index)
            numbered.append(device)
        return numbered
