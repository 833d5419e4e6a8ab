"""NVIDIA devices, through the driver's library NVML. Only the files in this package import pynvml.

Covers memory and processes of devices and MIG instances, read together with their sensors and Xid errors.

Does not cover enumeration and the meaning of return codes (library.py), impossible values (impossible_values.py),
hanging calls and crashes of the library (child/supervisor.py).
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pynvml

from gpumond.devices import NO_INDEX, ReadProgress
from gpumond.devices.impossible_values import (
    IMPOSSIBLE,
    DriverUsage,
    FaultCollector,
    ListedProcess,
    MemoryCounts,
    process_usages,
    valid_memory,
    valid_usages,
)
from gpumond.devices.nvml.library import (
    MAX_LISTED_PROCESSES,
    PROCESS_LISTS,
    Device,
    DeviceLost,
    EnumerationFailed,
    Functions,
    Inventory,
    Library,
    ProcessEntry,
    QueryFailed,
    Unsupported,
    functions,
)
from gpumond.devices.nvml.sensors import SensorReader
from gpumond.devices.process.metadata import limitable_cgroup
from gpumond.devices.process.procfs import ProcessIdentity, ProcessTable
from gpumond.facts.errors import FaultKind, ReturnCode
from gpumond.facts.messages import MAX_INTEGER, printable_text
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import (
    MAX_MISSED_READINGS,
    CgroupLimit,
    CgroupLimitChange,
    DeviceReading,
    Reading,
    Sensors,
    XidErrors,
)
from gpumond.host.machine import read_or_empty

MAX_EVENTS_PER_READING = 256
"""Number of events fetched in one reading; the others are fetched at the next."""

RETRY_SECONDS = 10.0


class XidEvents:
    """Subscription to Xid events, which are fetched at each reading without waiting.

    NVML queues events for a registered process. The counts start with this process; the supervisor adds the counts of
    successive children, so a restart does not reset them. ``wall`` is Unix time, ``clock`` monotonic seconds.
    """

    def __init__(self, library: Library, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._library, self._clock, self._wall = library, clock, wall
        self._event_set: Any = None
        self._uuids: dict[int | None, str] = {}
        """UUIDs of subscribed devices by the address behind their handle; a lost device may still send events."""
        self._registered: set[str] = set()
        self._retry_at = float("-inf")
        self._subscription_faults = FaultCollector()
        self._counts: dict[tuple[str, int], XidErrors] = {}

    @property
    def counts(self) -> tuple[XidErrors, ...]:
        return tuple(self._counts.values())

    def is_registered(self, device: Device) -> bool | None:
        return True if device.uuid in self._registered else None

    def listen(self, devices: Iterable[Device]) -> None:
        """Subscribe to the events of new and returned devices."""
        present = {device.uuid: device for device in devices if device.handle is not None}
        self._registered &= present.keys()
        if self._clock() < self._retry_at:
            return
        self._subscription_faults = FaultCollector()
        new = [
            device for uuid, device in present.items() if uuid not in self._registered and device.parent_uuid is None
        ]
        try:
            self._event_set = self._event_set or (self._library.query(functions("nvmlEventSetCreate")) if new else None)
        except QueryFailed as refusal:
            self._fail(None, refusal)
            return
        for device in new:
            self._library.set_index(device.index)
            arguments = (device.handle, pynvml.nvmlEventTypeXidCriticalError, self._event_set)
            try:
                self._library.query(functions("nvmlDeviceRegisterEvents"), *arguments)
            except QueryFailed as refusal:
                self._fail(device.uuid, refusal)
            else:
                self._uuids[_handle_address(device.handle)] = device.uuid
                self._registered.add(device.uuid)

    def fetch(self, faults: FaultCollector) -> None:
        """Count the events since the last call."""
        for _ in range(MAX_EVENTS_PER_READING if self._uuids else 0):
            try:
                event = self._library.query(functions("nvmlEventSetWait_v2"), self._event_set, 0)
            except QueryFailed as refusal:
                if refusal.kind != "timeout":
                    self._fail(None, refusal)
                    self.close()  # one lost device may invalidate the whole set
                break
            uuid = self._uuids.get(_handle_address(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                key = (uuid, int(event.eventData))
                before = self._counts.get(key)
                self._counts[key] = XidErrors(*key, (before.count if before else 0) + 1, self._wall())
        faults.extend(self._subscription_faults)

    def close(self) -> None:
        if self._event_set is not None:
            event_set, self._event_set = self._event_set, None
            self._uuids.clear()
            self._registered.clear()
            with suppress(pynvml.NVMLError):  # the driver is already unloaded
                pynvml.nvmlEventSetFree(event_set)

    def _fail(self, uuid: str | None, refusal: QueryFailed) -> None:
        self._retry_at = self._clock() + RETRY_SECONDS
        if not isinstance(refusal, Unsupported):
            self._subscription_faults.add(uuid, refusal.kind, f"Xid events: {refusal}")


def _handle_address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


NO_LIMIT = 2**64 - 1
CGROUPS = "/sys/fs/cgroup"
CGROUPS_SECONDS = 30.0
"""Interval after which the cgroups of processes are read again."""
LIMIT_REFUSED: FaultKind = "limit_refused"


class _MemoryLimits(ctypes.Structure):
    """nvmlGetMemoryLimits_v1_t, with which nvmlSetMemoryLimits_v1_t agrees except for the last field."""

    _fields_ = (
        ("cgroup", ctypes.c_char_p),
        ("soft", ctypes.c_ulonglong),
        ("hard", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _limits_function(name: str) -> Functions:
    """Return the library's function; older bindings have none."""

    def call(handle: Any, limits: _MemoryLimits) -> None:
        code = pynvml._nvmlGetFunctionPointer(name)(handle, ctypes.byref(limits))
        if code:
            raise pynvml.NVMLError(code)

    return (call,)


_GET_LIMITS, _SET_LIMITS = (_limits_function(f"nvmlDevice{verb}MemoryLimits_v1") for verb in ("Get", "Set"))


class CgroupLimits:
    """Limits of device memory by cgroup, which NVIDIA's driver enforces from version 615 on.

    ``supported`` is False as soon as the driver is known to lack them.

    Written from NVIDIA's reference of nvmlDeviceGetMemoryLimits_v1 and nvmlDeviceSetMemoryLimits_v1, and tested with a
    fake driver; not verified on hardware. Within a limited cgroup, nvmlDeviceGetMemoryInfo_v2 describes what that
    cgroup can use instead of the device. features/quotas/cgroups.py decides which limits are set.
    """

    def __init__(self, library: Library, clock: Callable[[], float], proc: str) -> None:
        self._library, self._clock, self._proc = library, clock, proc
        self.supported = True
        self._cgroups: dict[ProcessKey, str | None] = {}
        self._forget_at = float("-inf")
        self._refused: dict[tuple[str, str], str] = {}
        """Refused changes, by device and cgroup, until one of them is made."""

    def partition_bytes(self, device: Device, counted_bytes: int, size_bytes: int) -> int | None:
        """Return the bytes that the daemon's own cgroup can use, if the driver limits it.

        ``counted_bytes``: size of the device by nvmlDeviceGetMemoryInfo_v2, ``size_bytes`` by its first version, which
        no limit changes.
        """
        own_cgroup = limitable_cgroup(read_or_empty(f"{self._proc}/self/cgroup")) or ""
        limits = self._get(device, own_cgroup)
        hard = NO_LIMIT if limits is None else limits.hard
        if counted_bytes == size_bytes and hard >= size_bytes and not (limits and limits.soft):
            return None
        return min(counted_bytes, hard)

    def read(self, device: Device, processes: Iterable[ProcessKey]) -> tuple[CgroupLimit, ...]:
        """Return the limits of the cgroups of a device's processes, those without a limit included."""
        if self._clock() >= self._forget_at:
            self._cgroups.clear()
            self._forget_at = self._clock() + CGROUPS_SECONDS
        pids: defaultdict[str, list[int]] = defaultdict(list)
        for process in processes:
            if process not in self._cgroups:
                self._cgroups[process] = limitable_cgroup(read_or_empty(f"{self._proc}/{process.pid}/cgroup"))
            if cgroup := self._cgroups[process]:
                pids[cgroup].append(process.pid)
        return tuple(self._limit(device, cgroup, tuple(pids[cgroup])) for cgroup in sorted(pids)) if pids else ()

    def change(self, device: Device, changes: Iterable[CgroupLimitChange], faults: FaultCollector) -> None:
        """Make the changes of a device whose cgroups still have the limits that the changes expect."""
        for change in changes:
            if change.device_uuid != device.uuid:
                continue
            key = change.device_uuid, change.cgroup
            self._refused.pop(key, None)
            current = self._limit(device, change.cgroup, ())
            if current.limit_bytes != change.before_bytes or current.guaranteed_bytes is not None:
                continue
            hard = NO_LIMIT if change.limit_bytes is None else change.limit_bytes
            try:
                self._library.query(_SET_LIMITS, device.handle, _MemoryLimits(_cgroup_path(change.cgroup), 0, hard, 0))
            except (EnumerationFailed, Unsupported) as refusal:
                self._refused[key] = f"{printable_text(change.cgroup)}: {refusal}"
        for (uuid, _), detail in self._refused.items():
            if uuid == device.uuid:
                faults.add(uuid, LIMIT_REFUSED, detail)

    def _limit(self, device: Device, cgroup: str, pids: tuple[int, ...]) -> CgroupLimit:
        limits = self._get(device, cgroup)
        hard = NO_LIMIT if limits is None else limits.hard
        limit = hard if hard < (device.size_bytes or NO_LIMIT) else None
        soft = limits.soft or None if limits else None
        used = limits.used if limits and (limit is not None or soft) and limits.used < 2**62 else None
        return CgroupLimit(cgroup=cgroup, pids=pids, limit_bytes=limit, guaranteed_bytes=soft, used_bytes=used)

    def _get(self, device: Device, cgroup: str) -> _MemoryLimits | None:
        """Return the limits, None if the driver does not know any. Raises DeviceLost."""
        limits = _MemoryLimits(_cgroup_path(cgroup), 0, NO_LIMIT, 0)
        try:
            self._library.query(_GET_LIMITS, device.handle, limits)
        except Unsupported as refusal:  # some drivers answer "not supported" for a cgroup that never had a limit
            self.supported = self.supported and refusal.kind != "function_not_found"
            return None
        except EnumerationFailed:
            return None
        return limits


def _cgroup_path(cgroup: str) -> bytes:
    return f"{CGROUPS}{cgroup}".encode("utf-8", "surrogateescape")


UNKNOWN_SIZE = 2**64 - 1
"""Value that NVML returns for unknown sizes."""

EMPTY_LISTS_SECONDS = 3.0
"""Time for which the empty lists of graphics and MPS processes are not read again on a device that has not changed. A
process that begins or ends changes the device's used memory. With 48 programs on an H200, a list takes 0.9 ms."""

_MEMORY = functions("nvmlDeviceGetMemoryInfo")
_MEMORY_ARGUMENTS = {2: (pynvml.nvmlMemory_v2,), 1: ()}


class _ProcessLists(NamedTuple):
    """The process lists of a device, and its size and used memory when they were read."""

    lists: list[tuple[str, list[ProcessEntry]]]
    memory: tuple[int | None, int | None]
    read_at: float
    usages: dict[int, DriverUsage]

    def others_are_empty(self) -> bool:
        return not any(entries for _, entries in self.lists[1:])


class NvmlSource:
    """Source for NVIDIA devices.

    ``clock`` is monotonic seconds, ``wall`` Unix time; ``proc`` and ``sys`` replace /proc and /sys.
    """

    name = "nvml"

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        proc: str = "/proc",
        open_node: Callable[[str, int], int] = os.open,
        wall: Callable[[], float] = time.time,
        sys: str = "/sys",
    ) -> None:
        self._clock, self._sys = clock, sys
        self._proc = proc
        self._table = ProcessTable(proc)
        self._pid_max = self._table.pid_max()
        self._library = Library(proc, open_node)
        self._inventory = Inventory(self._library)
        self._sensors = SensorReader(self._library, clock)
        self._limits = CgroupLimits(self._library, clock, proc)
        self._events = XidEvents(self._library, clock, wall)
        self._versions: tuple[str | None, str | None, str | None] = (None, None, None)
        self._lists: dict[str, _ProcessLists] = {}
        """The last valid process lists by UUID."""

    def open(self) -> None:
        self._library.open()
        self._inventory = Inventory(self._library)
        self._sensors = SensorReader(self._library, self._clock)
        self._versions = (
            self._library.version("nvmlSystemGetDriverVersion"),
            self._library.version("nvmlSystemGetNVMLVersion"),
            self._library.cuda_version(),
        )

    def set_progress(self, progress: ReadProgress) -> None:
        self._library.progress = progress

    def close(self) -> None:
        self._events.close()
        self._library.close()

    def read(self) -> Reading:
        """Read all devices. Raises SourceUnavailable if the driver is unloaded: it can only be reloaded in a new
        process."""
        self._inventory.refresh(self._clock(), self._library.progress.excluded)
        faults = FaultCollector()
        faults.extend(self._inventory.faults)
        present = self._inventory.devices()
        self._sensors.refresh(present, self._inventory.mark_lost)
        self._events.listen(present)
        observed: list[tuple[Device, DeviceReading, dict[int, DriverUsage] | None]] = []
        for device in present:
            if device.handle is not None:
                self._library.set_index(device.index)
                try:
                    reading = self._observe(device, faults)
                    observed.append((device, reading, self._usages(device, reading.used_bytes, faults)))
                    continue
                except DeviceLost as lost:
                    self._inventory.mark_lost(device, lost.kind)
                    self._sensors.forget(device)
            faults.add(device.uuid, device.lost_kind or "unknown", f"device {device.index} {device.name}".rstrip())
        self._library.set_index(NO_INDEX)
        self._events.fetch(faults)  # last, so a hang or a crash before it loses no events
        identities = self._table.read(pid for _, _, by_pid in observed for pid in by_pid or ())
        self._library.progress.process_stats = self._table.process_stats
        devices = tuple(
            self._with_limits(
                device,
                self._with_processes(
                    reading, by_pid, identities, self._sensors.utilization_by_pid(device, by_pid or ())
                ),
                faults,
            )
            for device, reading, by_pid in observed
        )
        self._library.set_index(NO_INDEX)
        present_uuids = {device.uuid for device in devices}
        self._lists = {uuid: lists for uuid, lists in self._lists.items() if uuid in present_uuids}
        driver, library, cuda = self._versions
        return Reading(
            devices=devices,
            faults=faults.of_source(self.name),
            driver_version=driver,
            library_version=library,
            cuda_version=cuda,
            xids=self._events.counts,
        )

    def _observe(self, device: Device, faults: FaultCollector) -> DeviceReading:
        """Return the device without its processes."""
        (size, used, free, reserved), unified, partition = self._memory(device, faults)
        values = self._sensors.read(device, faults) if device.parent_uuid is None else {}
        if (node := values.get("numa_node")) is not None and values.get("addressing_mode") == "ats":
            values["file_cache_bytes"] = file_cache_bytes(node, self._sys)
        if device.parent_uuid is not None and device.gpu_instance_id is None:
            device.gpu_instance_id = self._library.gpu_instance_id(device.handle)
        return DeviceReading(
            uuid=device.uuid,
            index=device.index,
            name=device.name,
            vendor="nvidia",
            pci_bus_id=device.pci_bus_id,
            parent_uuid=device.parent_uuid,
            size_bytes=size,
            used_bytes=used,
            free_bytes=free,
            reserved_bytes=reserved,
            unified=unified,
            sensors=Sensors(**values, xid_events=self._events.is_registered(device)),
            gpu_instance_id=device.gpu_instance_id,
            source=self.name,
            partition_bytes=partition,
        )

    def _memory(self, device: Device, faults: FaultCollector) -> tuple[MemoryCounts, bool, int | None]:
        """Return the memory counts, True if they are the host's, and the size of the daemon's own partition, if any.

        A device whose memory permanently cannot be read is lost; an instance at once, because it has probably been
        destroyed.
        """
        try:
            info, partition = self._memory_info(device), None
            if device.memory_version == 2 and device.parent_uuid is None and self._limits.supported:
                device_info = self._library.query(_MEMORY, device.handle)
                partition = self._limits.partition_bytes(device, info.total, device_info.total)
                info = info if partition is None else device_info
        except Unsupported:
            shared = shared_memory(device.name, self._proc)
            device.size_bytes = shared.size_bytes if shared else device.size_bytes
            return shared or MemoryCounts(), shared is not None, None
        except EnumerationFailed as failure:
            device.memory_failures += 1
            if device.memory_failures >= MAX_MISSED_READINGS or device.parent_uuid is not None:
                raise DeviceLost(failure.kind) from failure
            faults.add(device.uuid, failure.kind, f"memory: {failure}")
            return MemoryCounts(), False, None
        device.memory_failures = 0
        counts = MemoryCounts(info.total, info.used, info.free, getattr(info, "reserved", None))
        checked = valid_memory(faults, device.uuid, counts)
        device.size_bytes = checked.size_bytes or device.size_bytes
        return checked, False, partition

    def _memory_info(self, device: Device) -> Any:
        """Return the memory information. Version 1 counts reserved memory as used, so a device never changes its
        version."""
        for version in (2, 1) if device.memory_version is None else (device.memory_version,):
            try:
                info = self._library.query(_MEMORY, device.handle, *_MEMORY_ARGUMENTS[version])
            except Unsupported:
                continue
            if info.total == 0:
                break  # some drivers return 0 for "not supported"
            device.memory_version = version
            return info
        raise Unsupported(ReturnCode("not_supported"))

    def _usages(self, device: Device, used_bytes: int | None, faults: FaultCollector) -> dict[int, DriverUsage] | None:
        now, memory, before = self._clock(), (device.size_bytes, used_bytes), self._lists.get(device.uuid)
        is_steady = before and used_bytes is not None and before.memory == memory and before.others_are_empty()
        lists: list[tuple[str, list[ProcessEntry]]] = []
        for kind, lister in PROCESS_LISTS:
            if before and is_steady and lists == before.lists[:1] and now < before.read_at + EMPTY_LISTS_SECONDS:
                return before.usages
            try:
                lists.append((kind, self._library.process_list(lister, device.handle)))
            except Unsupported:
                continue
            except EnumerationFailed as failure:
                if failure.kind == "insufficient_size":
                    faults.add(
                        device.uuid,
                        IMPOSSIBLE,
                        f"more than {MAX_LISTED_PROCESSES} {kind} processes",
                        MAX_LISTED_PROCESSES,
                    )
                else:
                    faults.add(device.uuid, failure.kind, f"{kind} processes: {failure}")
                return None
        if not lists:
            return None
        if before and (before.lists, before.memory[0]) == (lists, device.size_bytes):
            self._lists[device.uuid] = before._replace(memory=memory, read_at=now)
            return before.usages
        own_faults = FaultCollector()
        listed = (
            ListedProcess(kind, (gpu_instance, compute_instance), pid, None if used == UNKNOWN_SIZE else used)
            for kind, entries in lists
            for pid, used, gpu_instance, compute_instance in entries
        )
        by_pid = valid_usages(own_faults, device.uuid, listed, device.size_bytes or MAX_INTEGER - 1, self._pid_max)
        faults.extend(own_faults)
        if by_pid is not None and not own_faults:
            self._lists[device.uuid] = _ProcessLists(lists, memory, now, by_pid)
        return by_pid

    def _with_limits(self, device: Device, reading: DeviceReading, faults: FaultCollector) -> DeviceReading:
        """Add the limits of cgroups, after the changes that are due. A device that is lost meanwhile has none."""
        if device.parent_uuid is not None or not self._limits.supported:
            return reading
        self._library.set_index(device.index)
        try:
            self._limits.change(device, self._library.progress.limit_changes, faults)
            return replace(reading, cgroup_limits=self._limits.read(device, reading.processes_by_key))
        except DeviceLost:
            return reading

    def _with_processes(
        self,
        reading: DeviceReading,
        by_pid: Mapping[int, DriverUsage] | None,
        identities: Mapping[int, ProcessIdentity],
        utilization_by_pid: Mapping[int, float],
    ) -> DeviceReading:
        """Add the processes. If the driver does not report the device's memory, used memory is the sum over the
        processes."""
        if by_pid is None:
            return reading
        used = reading.used_bytes
        if reading.unified:
            sizes = [usage.used_bytes for usage in by_pid.values() if usage.used_bytes is not None]
            used = sum(sizes) if len(sizes) == len(by_pid) else None
        return replace(reading, used_bytes=used, processes=process_usages(by_pid, identities, utilization_by_pid))


INTEGRATED = re.compile(r"\b(GB10|Orin|Thor)\b")
"""DGX Spark and Jetson. Other names are not matched: a discrete device without memory information must not show the
host's."""


def shared_memory(name: str, proc: str) -> MemoryCounts | None:
    """Return the host's memory without the device's usage, or None unless ``name`` is an integrated device."""
    memory = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", read_or_empty(f"{proc}/meminfo"), re.MULTILINE))
    if not INTEGRATED.search(name) or len(memory) < 2:
        return None
    return MemoryCounts(int(memory["MemTotal"]) << 10, None, int(memory["MemAvailable"]) << 10, None)


def file_cache_bytes(node: int, sys: str) -> int | None:
    """Return the bytes of page cache in the memory of a NUMA node, or None if the node does not exist."""
    match = re.search(r"FilePages:\s+(\d+) kB", read_or_empty(f"{sys}/devices/system/node/node{node}/meminfo"))
    return int(match[1]) << 10 if match else None
