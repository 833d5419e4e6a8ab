"""GPUs on the PCI bus, with or without a driver. Classes and vendors: pci.ids."""

from __future__ import annotations

import os
from pathlib import Path

DISPLAY, ACCELERATOR = "0x03", "0x1200"
NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
INTEL_INTEGRATED = "0000:00:02.0"
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
