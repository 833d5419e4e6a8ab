"""Names of AMD and Intel devices as the daemon uses them, from the properties that PyTorch reports.

The daemon uses ``AMD-`` and the device's unique id, otherwise ``DRM-pci-`` and its PCI address. Functions return None
if the name is unknown. They read files of sysfs and call no driver.
"""

from __future__ import annotations

import re
from glob import glob
from pathlib import Path
from typing import Any

INTEL = 0x8086


def amd(properties: Any, sys: str = "/sys") -> str | None:
    """Return the name of an AMD device. ROCm writes the sixteen digits of the unique id as text into the sixteen bytes
    of the UUID, if the device has a unique id.
    """
    digits = _uuid(properties).decode("ascii", "replace").lower()
    if re.fullmatch("[0-9a-f]{16}", digits) and digits.strip("0"):
        return f"AMD-{digits}"
    parts = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    numbers = [number for number in parts if isinstance(number, int)]
    if len(numbers) < 3:
        return None
    address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    unique = _contents(f"{sys}/bus/pci/devices/{address}/unique_id").removeprefix("0x").lower()
    return f"AMD-{unique}" if re.fullmatch("[0-9a-f]{1,32}", unique) and unique.strip("0") else f"DRM-pci-{address}"


def intel(properties: Any, sys: str = "/sys") -> str | None:
    """Return the name of an Intel device.

    Intel's drivers build the UUID from numbers of two bytes (vendor, device, revision, PCI domain), the bus, device and
    function of the address, and the number of the tile. Some devices have a UUID of another form: such a device is
    identified if no other device of its model is in the machine.
    """
    uuid, device_id = _uuid(properties), getattr(properties, "device_id", None)
    vendor, device, _, domain = (int.from_bytes(uuid[at : at + 2], "little") for at in (0, 2, 4, 6))
    if len(uuid) == 16 and vendor == INTEL and device_id in (None, device):
        address = f"{domain:04x}:{uuid[8]:02x}:{uuid[9]:02x}.{uuid[10]:x}"
        return f"DRM-pci-{address}" if Path(f"{sys}/bus/pci/devices/{address}").exists() else None
    same_model = {
        file.parent.resolve().name
        for file in map(Path, glob(f"{sys}/class/drm/*/device/device"))
        if _number(file) == device_id and _number(file.with_name("vendor")) == INTEL
    }
    return f"DRM-pci-{same_model.pop()}" if device_id is not None and len(same_model) == 1 else None


def _uuid(properties: Any) -> bytes:
    """Return the sixteen bytes; empty if PyTorch does not report them."""
    uuid = getattr(properties, "uuid", None)
    try:
        return bytes.fromhex(str(uuid).replace("-", ""))
    except ValueError:
        return b""


def _number(path: Path) -> int | None:
    try:
        return int(_contents(str(path)), 16)
    except ValueError:
        return None


def _contents(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""
