"""Sources of device facts. A source has one main method, ``read``, and runs in a child process.

To add one, write ``devices/NAME.py`` with a class that has the members of `DeviceSource`, and add its `SourceSpec` to
``SOURCES``: the setting ``source``, ``gpumond doctor`` and docs/reference/plugins.md derive from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.snapshot import Reading
from gpumond.host.machine import ProcessStart

NOWHERE = -1


class ReadProgress:
    """Progress of a reading: a source that has one reports its current device, and skips the excluded ones."""

    def __init__(self, at: Callable[[int], None] = lambda index: None) -> None:
        self.at = at
        self.leave_out: Mapping[int, str] = {}
        """UUIDs of excluded devices by index."""
        self.process_starts: Mapping[int, ProcessStart] = {}
        """Start data of processes in the reading, if the source has read it."""


class DeviceSource(Protocol):
    name: str

    def open(self) -> None:
        """Open the driver. Raises SourceUnavailable."""

    def read(self) -> Reading:
        """Read all devices. May block. The failure of one device is a Fault in the Reading, not an error."""

    def close(self) -> None: ...


@runtime_checkable
class ProgressReporter(Protocol):
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
        source: type[DeviceSource] = _imported(self.implementation)
        return source

    def detect(self, sys: str) -> bool:
        """Return what the detector does.

        Raises ImportError if the module that the source requires is not installed.
        """
        if self.requires and find_spec(self.requires) is None:
            raise ImportError(f"No module named {self.requires!r}", name=self.requires)
        has_devices: bool = _imported(self.detector)(sys)
        return has_devices


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


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
        "gpumond.devices.drm.source:DrmSource",
        "AMD and Intel devices, through files of the kernel",
        "gpumond.devices.drm.devices:detect",
    ),
    SourceSpec(
        "all", "gpumond.devices.composite:CompositeSource", "devices of all drivers, including those loaded later"
    ),
    SourceSpec("sim", "gpumond.devices.sim:SimSource", "simulated devices, as in `gpumond demo`"),
)
AUTOMATIC = tuple(spec for spec in SOURCES if spec.detector)


def spec_of(name: str) -> SourceSpec:
    """Return the source with this name. Raises ValueError."""
    for spec in SOURCES:
        if spec.name == name:
            return spec
    raise ValueError(f"expected one of {', '.join(spec.name for spec in SOURCES)}")


def load(name: str, progress: ReadProgress | None = None) -> DeviceSource:
    """Return the source with this name. Raises ValueError."""
    source = spec_of(name).type()()
    if progress is not None and isinstance(source, ProgressReporter):
        source.set_progress(progress)
    return source


def detected(sys: str = "/sys") -> list[SourceSpec]:
    """Return the automatic sources that this machine has devices for.

    Raises SourceUnavailable if there is none, with the first reason that a source gives.
    """
    found, errors = [], []
    for spec in AUTOMATIC:
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
