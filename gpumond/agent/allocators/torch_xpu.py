"""PyTorch's XPU allocator (Intel; 2.6 and later). Builds with it have no CUDA.

A PyTorch that has not initialized XPU, or did so before this process was forked, is not queried. The allocator frees in
one context for all devices, which its initialization created; the adapter creates none. The statistics do not contain
the cached bytes in partly used segments, so the bytes that a flush returns are an interval. It includes expandable
segments and the pools of graphs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import AllocatorAdapter, FlushRefused
from gpumond.agent.allocators.mempools import caching_pool
from gpumond.agent.allocators.torch_formulas import current_value
from gpumond.facts.pools import PoolUsage


class XpuAdapter(AllocatorAdapter):
    name = "torch"
    flush_step = "cache"

    def __init__(self, torch: Any, sysfs: str = "/sys") -> None:
        self._torch, self._xpu, self._c, self._sysfs = torch, torch.xpu, torch._C, sysfs
        self._uuids: dict[int, str | None] = {}
        if graph := getattr(torch.xpu, "XPUGraph", None):  # 2.11
            cuda.watch_captures(graph)

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Read the devices. Tiles that PyTorch shows as separate devices make one pool, since they are one device."""
        if not self._xpu.is_initialized():
            return ()
        pools: dict[str, list[tuple[int, int]]] = {}
        for ordinal in range(self._device_count()):
            stats = self._c._xpu_memoryStats(ordinal)
            live, held = (current_value(stats, f"{name}_bytes") for name in ("allocated", "reserved"))
            uuid = self._uuid(ordinal) if held else None
            if uuid is not None:
                pools.setdefault(uuid, []).append((live, held))
        return tuple(caching_pool("torch", uuid, *map(sum, zip(*parts, strict=True))) for uuid, parts in pools.items())

    def check(self) -> None:
        if not self._xpu.is_initialized():
            forked = self._xpu._is_in_bad_fork()
            raise FlushRefused(
                "XPU was initialized before this process was forked" if forked else "XPU isn't initialized"
            )
        if cuda.is_capturing():
            raise FlushRefused("an XPU graph is being captured")

    def release(self) -> tuple[int, str]:
        """Empty the cache, after the device's queues are empty, as PyTorch itself does when memory is short."""
        held = self._held_bytes()
        self._xpu.empty_cache()
        return held - self._held_bytes(), ""

    def _device_count(self) -> int:
        return len(self._xpu.default_generators)  # device_count() may query the driver

    def _held_bytes(self) -> int:
        stats = map(self._c._xpu_memoryStats, range(self._device_count()))
        return sum(current_value(each, "reserved_bytes") for each in stats)

    def _uuid(self, ordinal: int) -> str | None:
        if ordinal not in self._uuids:
            self._uuids[ordinal] = intel_device_uuid(self._xpu.get_device_properties(ordinal), self._sysfs)
        return self._uuids[ordinal]


def adapter() -> XpuAdapter | None:
    """Return None for a build without XPU, which has the module all the same."""
    torch = sys.modules["torch"]
    return XpuAdapter(torch) if getattr(torch._C, "_has_xpu", False) else None


INTEL_VENDOR_ID = 0x8086


def amd_device_uuid(properties: Any, sysfs: str = "/sys") -> str | None:
    """Return the UUID of an AMD device. ROCm writes the sixteen digits of the unique id as text into the sixteen bytes
    of the UUID, if the device has a unique id.
    """
    digits = _uuid(properties).decode("ascii", "replace").lower()
    if re.fullmatch("[0-9a-f]{16}", digits) and digits.strip("0"):
        return f"AMD-{digits}"
    parts = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    address_parts = [part for part in parts if isinstance(part, int)]
    if len(address_parts) < 3:
        return None
    address = "{:04x}:{:02x}:{:02x}.0".format(*address_parts)
    unique = _read_text(f"{sysfs}/bus/pci/devices/{address}/unique_id").removeprefix("0x").lower()
    return f"AMD-{unique}" if re.fullmatch("[0-9a-f]{1,32}", unique) and unique.strip("0") else f"DRM-pci-{address}"


def intel_device_uuid(properties: Any, sysfs: str = "/sys") -> str | None:
    """Return the UUID of an Intel device.

    Intel's drivers build the UUID from numbers of two bytes (vendor, device, revision, PCI domain), the bus, device and
    function of the address, and the number of the tile. Some devices have a UUID of another form: such a device is
    identified if no other device of its model is in the machine.
    """
    uuid, device_id = _uuid(properties), getattr(properties, "device_id", None)
    vendor, device, _, domain = (int.from_bytes(uuid[offset : offset + 2], "little") for offset in (0, 2, 4, 6))
    if len(uuid) == 16 and vendor == INTEL_VENDOR_ID and device_id in (None, device):
        address = f"{domain:04x}:{uuid[8]:02x}:{uuid[9]:02x}.{uuid[10]:x}"
        return f"DRM-pci-{address}" if Path(f"{sysfs}/bus/pci/devices/{address}").exists() else None
    same_model = {
        file.parent.resolve().name
        for file in map(Path, glob(f"{sysfs}/class/drm/*/device/device"))
        if _read_hexadecimal(file) == device_id and _read_hexadecimal(file.with_name("vendor")) == INTEL_VENDOR_ID
    }
    return f"DRM-pci-{same_model.pop()}" if device_id is not None and len(same_model) == 1 else None


def _uuid(properties: Any) -> bytes:
    """Return the sixteen bytes; empty if PyTorch does not report them."""
    uuid = getattr(properties, "uuid", None)
    try:
        return bytes.fromhex(str(uuid).replace("-", ""))
    except ValueError:
        return b""


def _read_hexadecimal(path: Path) -> int | None:
    try:
        return int(_read_text(str(path)), 16)
    except ValueError:
        return None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""
