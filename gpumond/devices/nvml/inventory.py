"""Inventory of a driver's devices: enumerates them repeatedly, and remembers those that were present.

A device that is lost or no longer enumerated remains as a fault until it returns. A MIG instance that is missing has
been destroyed, and is removed. The handle of a lost device is never used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gpumond.devices.validation import Tally
from gpumond.facts.errors import FaultKind, ReturnCode

LEFT_OUT: FaultKind = "left_out"
"""Kind of the fault for an excluded device, on which the driver hangs or crashes."""

RESCAN_SECONDS = 10.0
RETRY_SECONDS = 1.0
"""Interval of enumeration while a device is lost; it doubles from RETRY_SECONDS up to RESCAN_SECONDS."""


class Refusal(Exception):
    """Query without an answer. ``kind`` is the kind of the fault."""

    def __init__(self, kind: FaultKind | ReturnCode, detail: str = "") -> None:
        super().__init__(detail or kind.replace("_", " "))
        self.kind = kind


class EnumerationFailed(Refusal):
    """Temporary failure of an enumeration."""


class Unsupported(Refusal):
    """Query that the device, the driver or its binding does not support."""


class DeviceLost(Refusal):
    """Device that no longer responds."""


class Enumerator(Protocol):
    """Enumeration of devices. Each call returns a new handle. Each method raises Refusal."""

    def at(self, index: int) -> None:
        """Set the index of the device that the following queries concern."""

    def count(self) -> int: ...
    def handle(self, index: int) -> Any: ...
    def uuid(self, handle: Any) -> str: ...
    def name(self, handle: Any) -> str: ...
    def pci_bus_id(self, handle: Any) -> str: ...
    def instances(self, handle: Any) -> Iterable[Any]:
        """Return the handles of the device's MIG instances."""


@dataclass
class Device:
    """Device or MIG instance. ``handle`` is None while it is lost, and ``lost`` is then the kind of the fault."""

    uuid: str
    index: int
    parent_uuid: str | None = None
    name: str = ""
    pci_bus_id: str = ""
    handle: Any = None
    lost: FaultKind | ReturnCode | Literal[""] = ""
    memory_version: int | None = None
    memory_failures: int = 0
    size_bytes: int | None = None
    gpu_instance_id: int | None = None


class Inventory:
    """Known devices. ``faults`` are those of the last scan."""

    def __init__(self, driver: Enumerator) -> None:
        self._driver = driver
        self._devices: dict[str, Device] = {}
        self._left_out: Mapping[int, str] = {}
        self._next_scan = float("-inf")
        self._retry_seconds = 0.0
        self.faults = Tally()

    def devices(self) -> list[Device]:
        """Return the devices; each instance follows its parent."""
        return sorted(self._devices.values(), key=lambda device: (device.index, device.parent_uuid is not None))

    def refresh(self, now: float, leave_out: Mapping[int, str]) -> None:
        """Scan if the interval has passed, or if a device has been lost. ``leave_out``: UUIDs by index."""
        if self._left_out.keys() - leave_out.keys():
            self._retry_seconds = 0.0  # a device may be queried again: at once
        self._left_out = leave_out
        for device in self._devices.values():
            left_out = leave_out.get(device.index, "")
            if device.handle is not None and left_out in (device.uuid, device.parent_uuid):
                self.lose(device, LEFT_OUT)
        if not self._incomplete():
            self._retry_seconds = 0.0
        elif not self._retry_seconds:
            self._retry_seconds, self._next_scan = RETRY_SECONDS, now
        if now >= self._next_scan:
            self._scan()
            self._next_scan = now + (self._retry_seconds or RESCAN_SECONDS)
            self._retry_seconds = min(2 * self._retry_seconds, RESCAN_SECONDS)

    def lose(self, device: Device, kind: FaultKind | ReturnCode) -> None:
        for lost in (device, *self._instances(device)):
            lost.handle, lost.lost = None, kind

    def _incomplete(self) -> bool:
        return bool(self.faults) or any(device.handle is None for device in self._devices.values())

    def _scan(self) -> None:
        self.faults = Tally()
        try:
            count = self._driver.count()
        except Refusal as refusal:
            self.faults.add(None, refusal.kind, f"device count: {refusal}")
            return
        enumerated: set[str] = set()
        for index in range(count):
            if index in self._left_out:
                uuid = self._left_out[index]
                self.lose(self._devices.setdefault(uuid, Device(uuid, index)), LEFT_OUT)
                enumerated.add(uuid)
                continue
            self._driver.at(index)
            try:
                handle = self._driver.handle(index)
                uuid = self._driver.uuid(handle)
            except Refusal as refusal:
                enumerated |= self._refused(index, refusal)
                continue
            enumerated.add(uuid)
            device = self._devices.setdefault(uuid, Device(uuid, index))
            device.index, device.handle = index, handle
            try:
                self._describe(device)
                self._scan_instances(device)
            except DeviceLost as lost:
                self.lose(device, lost.kind)
        for device in self._devices.values():
            if device.parent_uuid is None and device.uuid not in enumerated and device.handle is not None:
                self.lose(device, "vanished")

    def _refused(self, index: int, refusal: Refusal) -> set[str]:
        """Return the known device at an index that does not return its UUID: the device that had this index, if any."""
        known = [device for device in self._devices.values() if (device.index, device.parent_uuid) == (index, None)]
        for device in known:
            if isinstance(refusal, DeviceLost):
                self.lose(device, refusal.kind)
        if not known or not isinstance(refusal, DeviceLost):
            uuid = known[0].uuid if known else None
            self.faults.add(uuid, refusal.kind, f"device {index}: {refusal}")
        return {device.uuid for device in known}

    def _describe(self, device: Device) -> None:
        for field, ask in (("name", self._driver.name), ("pci_bus_id", self._driver.pci_bus_id)):
            if not getattr(device, field):
                try:
                    setattr(device, field, ask(device.handle))
                except EnumerationFailed as failure:
                    self.faults.add(device.uuid, failure.kind, f"{field}: {failure}")
                except Unsupported:
                    pass

    def _scan_instances(self, parent: Device) -> None:
        try:
            handles = {self._driver.uuid(handle): handle for handle in self._driver.instances(parent.handle)}
        except Unsupported:
            handles = {}
        except EnumerationFailed as failure:
            self.faults.add(parent.uuid, failure.kind, f"MIG instances: {failure}")
            return
        for gone in {device.uuid for device in self._instances(parent)} - handles.keys():
            del self._devices[gone]
        for uuid, handle in handles.items():
            device = self._devices.setdefault(uuid, Device(uuid, parent.index, parent.uuid))
            device.index, device.handle, device.pci_bus_id = parent.index, handle, parent.pci_bus_id
            self._describe(device)

    def _instances(self, parent: Device) -> list[Device]:
        return [device for device in self._devices.values() if device.parent_uuid == parent.uuid]
