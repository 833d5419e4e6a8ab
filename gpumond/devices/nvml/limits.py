"""Limits of device memory by cgroup, which NVIDIA's driver keeps from version 615 on.

Written from NVIDIA's reference of nvmlDeviceGetMemoryLimits_v1 and nvmlDeviceSetMemoryLimits_v1, and tested with a fake
driver; not verified on hardware. Within a limited cgroup, nvmlDeviceGetMemoryInfo_v2 describes what that cgroup can use
instead of the device.

Does not cover which limits are set (features/quotas/cgroups.py).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from gpumond.devices.nvml.library import Device, EnumerationFailed, Functions, Library, Unsupported
from gpumond.devices.plausibility import FaultCounter
from gpumond.devices.process.metadata import limitable_cgroup
from gpumond.devices.process.procfs import read_text
from gpumond.facts.errors import FaultKind
from gpumond.facts.messages import clean
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import CgroupLimit, CgroupLimitChange

NO_LIMIT = 2**64 - 1
CGROUPS = "/sys/fs/cgroup"
FORGET_SECONDS = 30.0
"""Interval after which the cgroups of processes are read again."""
REFUSED: FaultKind = "limit_refused"


class _Limits(ctypes.Structure):
    """nvmlGetMemoryLimits_v1_t, with which nvmlSetMemoryLimits_v1_t agrees except for the last field."""

    _fields_ = (
        ("cgroup", ctypes.c_char_p),
        ("soft", ctypes.c_ulonglong),
        ("hard", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _function(name: str) -> Functions:
    """Return the library's function; older bindings have none."""

    def call(handle: Any, limits: _Limits) -> None:
        code = pynvml._nvmlGetFunctionPointer(name)(handle, ctypes.byref(limits))
        if code:
            raise pynvml.NVMLError(code)

    return (call,)


_GET, _SET = (_function(f"nvmlDevice{verb}MemoryLimits_v1") for verb in ("Get", "Set"))


class CgroupLimits:
    """Limits of the cgroups of processes. ``supported`` is False as soon as the driver is known to lack them."""

    def __init__(self, library: Library, clock: Callable[[], float], proc: str) -> None:
        self._library, self._clock, self._proc = library, clock, proc
        self.supported = True
        self._cgroups: dict[ProcessKey, str | None] = {}
        self._forget_at = float("-inf")
        self._refused: dict[tuple[str, str], str] = {}
        """Refused changes, by device and cgroup, until one of them is made."""

    def partition(self, device: Device, counted_bytes: int, size_bytes: int) -> int | None:
        """Return the bytes that the daemon's own cgroup can use, if the driver limits it.

        ``counted_bytes``: size of the device by nvmlDeviceGetMemoryInfo_v2, ``size_bytes`` by its first version, which
        no limit changes.
        """
        own = limitable_cgroup(read_text(f"{self._proc}/self/cgroup")) or ""
        limits = self._get(device, own)
        hard = NO_LIMIT if limits is None else limits.hard
        if counted_bytes == size_bytes and hard >= size_bytes and not (limits and limits.soft):
            return None
        return min(counted_bytes, hard)

    def read(self, device: Device, processes: Iterable[ProcessKey]) -> tuple[CgroupLimit, ...]:
        """Return the limits of the cgroups of a device's processes, those without a limit included."""
        if self._clock() >= self._forget_at:
            self._cgroups.clear()
            self._forget_at = self._clock() + FORGET_SECONDS
        pids: defaultdict[str, list[int]] = defaultdict(list)
        for process in processes:
            if process not in self._cgroups:
                self._cgroups[process] = limitable_cgroup(read_text(f"{self._proc}/{process.pid}/cgroup"))
            if cgroup := self._cgroups[process]:
                pids[cgroup].append(process.pid)
        return tuple(self._limit(device, cgroup, tuple(pids[cgroup])) for cgroup in sorted(pids)) if pids else ()

    def change(self, device: Device, changes: Iterable[CgroupLimitChange], tally: FaultCounter) -> None:
        """Make the changes of a device whose cgroups still have the limits that the changes expect."""
        for change in changes:
            if change.device_uuid != device.uuid:
                continue
            key = change.device_uuid, change.cgroup
            self._refused.pop(key, None)
            present = self._limit(device, change.cgroup, ())
            if present.limit_bytes != change.before_bytes or present.guaranteed_bytes is not None:
                continue
            hard = NO_LIMIT if change.limit_bytes is None else change.limit_bytes
            try:
                self._library.query(_SET, device.handle, _Limits(_path(change.cgroup), 0, hard, 0))
            except (EnumerationFailed, Unsupported) as refusal:
                self._refused[key] = f"{clean(change.cgroup)}: {refusal}"
        for (uuid, _), detail in self._refused.items():
            if uuid == device.uuid:
                tally.add(uuid, REFUSED, detail)

    def _limit(self, device: Device, cgroup: str, pids: tuple[int, ...]) -> CgroupLimit:
        found = self._get(device, cgroup)
        hard = NO_LIMIT if found is None else found.hard
        limit = hard if hard < (device.size_bytes or NO_LIMIT) else None
        soft = found.soft or None if found else None
        used = found.used if found and (limit is not None or soft) and found.used < 2**62 else None
        return CgroupLimit(cgroup=cgroup, pids=pids, limit_bytes=limit, guaranteed_bytes=soft, used_bytes=used)

    def _get(self, device: Device, cgroup: str) -> _Limits | None:
        """Return the limits, None if the driver does not know any. Raises DeviceLost."""
        limits = _Limits(_path(cgroup), 0, NO_LIMIT, 0)
        try:
            self._library.query(_GET, device.handle, limits)
        except Unsupported as refusal:  # some drivers answer "not supported" for a cgroup that never had a limit
            self.supported = self.supported and refusal.kind != "function_not_found"
            return None
        except EnumerationFailed:
            return None
        return limits


def _path(cgroup: str) -> bytes:
    return f"{CGROUPS}{cgroup}".encode("utf-8", "surrogateescape")
