"""What the daemon calls an AMD or Intel device, from what PyTorch says of it. Reads files of sysfs; asks no driver.

The daemon takes ``AMD-`` and the card's unique id, else ``DRM-pci-`` and its PCI address. None means: not known.
"""

from __future__ import annotations

import re
from glob import glob
from pathlib import Path
from typing import Any

INTEL = 0x8086


def amd(properties: Any, sys: str = "/sys") -> str | None:
    """ROCm writes the unique id's sixteen digits as text into the sixteen bytes of the UUID, where the card has one."""
    digits = _uuid(properties).decode("ascii", "replace").lower()
    if re.fullmatch("[0-9a-f]{16}", digits) and digits.strip("0"):
        return f"AMD-{digits}"
    said = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    numbers = [number for number in said if isinstance(number, int)]
    if len(numbers) < 3:
        return None
    address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    unique = _said(f"{sys}/bus/pci/devices/{address}/unique_id").removeprefix("0x").lower()
    return f"AMD-{unique}" if re.fullmatch("[0-9a-f]{1,32}", unique) and unique.strip("0") else f"DRM-pci-{address}"


def intel(properties: Any, sys: str = "/sys") -> str | None:
    """Intel's drivers make the UUID of numbers of two bytes (vendor, device, revision, PCI domain), the address's bus,
    device and function, and which part of the card it is. Some cards have one of another make: such a card is known
    if no other of its kind is in the machine."""
    uuid, device_id = _uuid(properties), getattr(properties, "device_id", None)
    vendor, device, _, domain = (int.from_bytes(uuid[at : at + 2], "little") for at in (0, 2, 4, 6))
    if len(uuid) == 16 and vendor == INTEL and device_id in (None, device):
        address = f"{domain:04x}:{uuid[8]:02x}:{uuid[9]:02x}.{uuid[10]:x}"
        return f"DRM-pci-{address}" if Path(f"{sys}/bus/pci/devices/{address}").exists() else None
    alike = {
        card.parent.resolve().name
        for card in map(Path, glob(f"{sys}/class/drm/*/device/device"))
        if _number(card) == device_id and _number(card.with_name("vendor")) == INTEL
    }
    return f"DRM-pci-{alike.pop()}" if device_id is not None and len(alike) == 1 else None


def _uuid(properties: Any) -> bytes:
    """The sixteen bytes; none where PyTorch does not tell them."""
    uuid = getattr(properties, "uuid", None)
    try:
        return bytes.fromhex(str(uuid).replace("-", ""))
    except ValueError:
        return b""


def _number(path: Path) -> int | None:
    try:
        return int(_said(str(path)), 16)
    except ValueError:
        return None


def _said(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""
