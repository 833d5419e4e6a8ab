"""Processes that keep a device open although its driver lists no memory for them.

They are searched for while a device has more used memory than the visible processes own. Memory of a process that has
exited is often kept by a child, a debugger or a service with an open device node. This is a fact and not a verdict: a
service may have a reason to keep it open.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from glob import glob

from gpumond.model.snapshot import DeviceReading, ProcessUsage
from gpumond.sources.process.device_nodes import OpenDeviceNodes
from gpumond.sources.process.procfs import ProcessTable

SCAN_SECONDS = 30.0
UNCLAIMED_RATIO = 0.05
"""Minimum fraction of a device's memory without an owner."""

MAX_HOLDERS = 32
"""Maximum number of processes listed per device."""

Life = tuple[int, int | None]


class DeviceHolders:
    """Search for holders. ``proc`` and ``sys`` replace /proc and /sys; ``own`` is a pid to exclude."""

    def __init__(
        self,
        proc: str = "/proc",
        sys: str = "/sys",
        clock: Callable[[], float] = time.monotonic,
        own: int | None = None,
    ) -> None:
        self._proc, self._sys, self._clock = proc, sys, clock
        self._own = os.getpid() if own is None else own
        self._descriptors = OpenDeviceNodes(("/dev/nvidia", "/dev/dri/renderD"), proc, turns=1)
        self._table = ProcessTable(proc)
        self._next_scan = float("-inf")
        self._open: dict[str, list[Life]] = {}
        """Processes by PCI address."""

    def add(self, devices: Sequence[DeviceReading]) -> Sequence[DeviceReading]:
        """Return the devices; those with unclaimed memory include their holders as processes."""
        suspects = {device.uuid for device in devices if device.parent_uuid is None and _unclaimed(device)}
        if not suspects:
            return devices
        if self._clock() >= self._next_scan:
            self._open = self._scan()
            self._next_scan = self._clock() + SCAN_SECONDS
        identities = self._table.read(pid for holders in self._open.values() for pid, _ in holders)

        def held(device: DeviceReading) -> DeviceReading:
            listed = {p.pid for d in devices if device.uuid in (d.uuid, d.parent_uuid) for p in d.processes or ()}
            holders = tuple(
                ProcessUsage(pid=pid, used_bytes=None, kinds=("holder",), **identities[pid]._asdict())
                for pid, start_ticks in self._open.get(_address(device.pci_bus_id), ())
                if pid not in listed and start_ticks is not None and identities[pid].start_ticks == start_ticks
            )
            return replace(device, processes=(*(device.processes or ()), *holders[:MAX_HOLDERS])) if holders else device

        return [held(device) if device.uuid in suspects else device for device in devices]

    def _scan(self) -> dict[str, list[Life]]:
        addresses = {**_nvidia(self._proc), **_drm(self._sys)}
        found = {pid: nodes for pid, nodes in self._descriptors.read().items() if pid != self._own}
        identities = self._table.read(found)
        holders: dict[str, list[Life]] = {}
        for pid, nodes in found.items():
            for address in {addresses[node.path] for node in nodes if node.path in addresses}:
                holders.setdefault(address, []).append((pid, identities[pid].start_ticks))
        return holders


def _unclaimed(device: DeviceReading) -> bool:
    used = [process.used_bytes for process in device.processes or ()]
    if not device.size_bytes or device.used_bytes is None or device.unified or None in used:
        return False
    return device.used_bytes - sum(filter(None, used)) > UNCLAIMED_RATIO * device.size_bytes


def _nvidia(proc: str) -> Mapping[str, str]:
    """Return PCI addresses by device node; the numbers of the nodes are not NVML's indices."""
    return {
        f"/dev/nvidia{minor}": _address(os.path.basename(os.path.dirname(path)))
        for path in glob(f"{proc}/driver/nvidia/gpus/*/information")
        for minor in re.findall(r"^Device Minor:\s*(\d+)", _text(path), re.MULTILINE)
    }


def _drm(sys: str) -> Mapping[str, str]:
    return {
        f"/dev/dri/{os.path.basename(path)}": _address(os.path.basename(os.path.realpath(f"{path}/device")))
        for path in glob(f"{sys}/class/drm/renderD*")
    }


def _address(pci_bus_id: str) -> str:
    """Return the address in the format of sysfs; NVML has a longer domain in capitals."""
    return pci_bus_id[-12:].lower()


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
