"""Sources of device facts. A source has one main method, ``read``, and runs in a child process.

To add one, write ``devices/NAME.py`` with a class that has the members of `DeviceSource`, and add its `SourceSpec` to
``SOURCES``: the setting ``source``, ``gpumond doctor`` and docs/reference/plugins.md derive from it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol, runtime_checkable

from gpumond.facts.errors import SourceUnavailable, remedy
from gpumond.facts.snapshot import NO_DEVICE, CgroupLimitChange, DeviceReading, Fault, Reading
from gpumond.host.machine import ProcessStat

NO_INDEX = -1


class ReadProgress:
    """Progress of a reading: a source that has one reports its current device, and skips the excluded ones."""

    def __init__(self, set_index: Callable[[int], None] = lambda index: None) -> None:
        self.set_index = set_index
        self.excluded: Mapping[int, str] = {}
        """UUIDs of excluded devices by index."""
        self.limit_changes: Sequence[CgroupLimitChange] = ()
        """Changes to make in this reading."""
        self.process_stats: Mapping[int, ProcessStat] = {}
        """Start data of processes in the reading, if the source has read it."""


class DeviceSource(Protocol):
    name: str

    def open(self) -> None:
        """Open the driver. Raises SourceUnavailable."""

    def read(self) -> Reading:
        """Read all devices. May block. The failure of one device is a Fault in the Reading, not an error."""

    def close(self) -> None: ...


@runtime_checkable
class ResumableSource(Protocol):
    """Source that can continue without a device on which its driver hangs."""

    def set_progress(self, progress: ReadProgress) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source. ``implementation``: the import string of its class.

    ``detector``: the import string of a function that returns True if this machine has such devices, from the path of
    /sys, and raises SourceUnavailable if the driver is installed and cannot be used. With one, ``auto`` and ``all``
    use the source. ``requires``: a module outside the standard library that the source imports.
    """

    name: str
    implementation: str
    devices: str
    detector: str = ""
    requires: str = ""

    def type(self) -> type[DeviceSource]:
        """Import the class."""
        source: type[DeviceSource] = resolve_name(self.implementation)
        return source

    def detect(self, sys: str) -> bool:
        """Return what the detector does. Raises ImportError if the module that the source requires is not installed."""
        if self.requires and find_spec(self.requires) is None:
            raise ImportError(f"No module named {self.requires!r}", name=self.requires)
        has_devices: bool = resolve_name(self.detector)(sys)
        return has_devices


SOURCES = (
    SourceSpec(
        "nvml",
        "gpumond.devices.nvml.source:NvmlSource",
        "NVIDIA devices, through the driver's library",
        "gpumond.devices.nvml:detect",
        "pynvml",
    ),
    SourceSpec(
        "drm",
        "gpumond.devices.drm:DrmSource",
        "AMD and Intel devices, through the kernel's files",
        "gpumond.devices.drm:detect",
    ),
    SourceSpec("all", "gpumond.devices:CompositeSource", "devices of all drivers, including those loaded later"),
    SourceSpec("sim", "gpumond.devices.sim:SimSource", "simulated devices, as in `gpumond demo`"),
)
AUTOMATIC_SOURCES = tuple(spec for spec in SOURCES if spec.detector)


def spec_of(name: str) -> SourceSpec:
    """Return the source with this name. Raises ValueError."""
    for spec in SOURCES:
        if spec.name == name:
            return spec
    raise ValueError(f"expected one of {', '.join(spec.name for spec in SOURCES)}")


def load_source(name: str, progress: ReadProgress | None = None) -> DeviceSource:
    """Return the source with this name. Raises ValueError."""
    source = spec_of(name).type()()
    if progress is not None and isinstance(source, ResumableSource):
        source.set_progress(progress)
    return source


def detect_sources(sys: str = "/sys") -> list[SourceSpec]:
    """Return the automatic sources that this machine has devices for.

    Raises SourceUnavailable if there is none, with the first reason that a source gives.
    """
    found, errors = [], []
    for spec in AUTOMATIC_SOURCES:
        try:
            if spec.detect(sys):
                found.append(spec)
        except SourceUnavailable as error:
            errors.append(error)
    if not found:
        raise (
            errors[0]
            if errors
            else SourceUnavailable(
                "no_driver",
                "no GPU driver found (no libnvidia-ml.so.1, no device of amdgpu, i915 or xe); install the driver, "
                "or run `gpumond demo`, which needs no GPU",
            )
        )
    return found


DISPLAY, ACCELERATOR = "0x03", "0x1200"
NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
INTEL_INTEGRATED = "0000:00:02.0"
"""PCI address of every Intel GPU that is integrated into a processor, and uses host memory."""
DRIVERS = ("nvidia", "nvgpu", "amdgpu", "xe")
"""Kernel modules that are loaded only for a GPU. Not i915, which integrated GPUs use too."""


def may_have_gpu(sys: str = "/sys", dev: str = "/dev") -> bool:
    """Return False if the machine has no GPU: the bus lists none, and no driver is loaded."""
    if any(os.path.isdir(f"{sys}/module/{driver}") for driver in DRIVERS) or os.path.exists(f"{dev}/dxg"):
        return True
    try:
        functions = list(os.scandir(f"{sys}/bus/pci/devices"))
    except OSError:
        return True
    return any(_is_gpu(Path(function.path)) for function in functions)


def _is_gpu(function: Path) -> bool:
    try:
        kind, vendor = ((function / name).read_text().strip() for name in ("class", "vendor"))
    except OSError:
        return False
    if not kind.startswith((DISPLAY, ACCELERATOR)):
        return False
    return vendor in (NVIDIA, AMD) or (vendor == INTEL and function.name != INTEL_INTEGRATED)


RETRY_SECONDS = 30.0


class CompositeSource:
    """All devices of a machine: NVIDIA's through NVML, AMD's and Intel's through DRM.

    A source that cannot be opened is a fault and is retried; the devices of the other are available meanwhile. A source
    that fails later raises, because a driver's library can only be reloaded in a new process.
    """

    name = "all"

    def __init__(
        self,
        sources: Sequence[DeviceSource] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sys: str = "/sys",
    ) -> None:
        self._sources = [load_source(spec.name) for spec in AUTOMATIC_SOURCES] if sources is None else sources
        self._clock, self._sys = clock, sys
        self._missing: dict[str, SourceUnavailable] = {}
        self._retry_at = float("-inf")
        self._indices: dict[str, int] = {}

    def set_progress(self, progress: ReadProgress) -> None:
        for source in self._sources:
            if isinstance(source, ResumableSource):
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
        base = next((reading for reading in readings if reading.library_version), readings[0])
        return replace(
            base,
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
