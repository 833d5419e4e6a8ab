"""Processes that keep a device open though its driver lists no memory of theirs.

They are looked for while more of a device is used than visible processes own: what a dead program left behind
is often kept by a child, a debugger or a service that has the device node open. A fact, not a verdict: a
service may have good reason to.
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
"""More than that part of a device has to be without an owner."""

MAX_HOLDERS = 32
"""More of a device are not listed."""

Life = tuple[int, int | None]


class DeviceHolders:
    """``proc`` and ``sys`` are directories with the shapes of /proc and /sys; ``own`` is the pid to leave out."""

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
        """By PCI address."""

    def add(self, devices: Sequence[DeviceReading]) -> Sequence[DeviceReading]:
        """The devices, those with unclaimed memory with their holders among the processes."""
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
                ProcessUsage(pid, start_ticks, None, ("holder",), *identities[pid][1:])
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
    """PCI address by device node; the nodes' numbers are not NVML's indices."""
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
    """As sysfs writes it: NVML has a longer domain, in capitals."""
    return pci_bus_id[-12:].lower()


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
