"""Access to libnvidia-ml through pynvml, one query at a time, and the inventory of its devices.

Covers the meaning of return codes, functions missing from the library or its binding, and process lists of any length.
Does not cover the choice of queries (source.py, sensors.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import pynvml

from gpumond.devices import ReadProgress
from gpumond.devices.impossible_values import FaultCollector
from gpumond.devices.nvml import load_error, not_loadable
from gpumond.facts.errors import FaultKind, ReturnCode, SourceUnavailable, remedy
from gpumond.facts.messages import printable_text
from gpumond.host.machine import read_or_empty

EXCLUDED: FaultKind = "skipped"
"""Kind of the fault for an excluded device, on which the driver hangs or crashes."""

RESCAN_SECONDS = 10.0
RETRY_SECONDS = 1.0
"""Interval of enumeration while a device is lost; it doubles from RETRY_SECONDS up to RESCAN_SECONDS."""

KIND_BY_RETURN_CODE: dict[int, ReturnCode] = {
    getattr(pynvml, name): ReturnCode(name.removeprefix("NVML_ERROR_").lower())
    for name in dir(pynvml)
    if name.startswith("NVML_ERROR_")
}
"""Fault kind by return code."""

_CAUSES = {
    "library_not_found": "libnvidia-ml.so.1 wasn't found",
    "driver_not_loaded": "the NVIDIA kernel module isn't loaded",
    "uninitialized": "the NVIDIA driver was unloaded",
    "no_permission": "no permission to use the NVIDIA driver",
    "device_access_lost": "the kernel refuses access to /dev/nvidiactl, because the container's device rules are gone "
    "(systemctl daemon-reload removes them)",
}

MAX_LISTED_PROCESSES = 4096
"""Limit of a process list. No device has that many contexts, each of which uses tens of MiB; a longer list is
invalid."""

_FATAL_KINDS = {
    "library_not_found",
    "driver_not_loaded",
    "uninitialized",
    "lib_rm_version_mismatch",
    "device_access_lost",
}
_LOST_KINDS = {"gpu_is_lost", "gpu_not_found"}
_MISSING_FUNCTION_KINDS = {"function_not_found", "argument_version_mismatch", "deprecated"}
_INSUFFICIENT_SIZE: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
_PROCESS_ENTRY = struct.Struct("@IQII")
"""nvmlProcessInfo_v2_t: pid, bytes, GPU instance, compute instance."""

Functions = tuple[Callable[..., Any], ...]
ProcessEntry = tuple[int, int, int, int]
"""Entry of a process list: pid, bytes, GPU instance, compute instance."""


def functions(*names: str) -> Functions:
    """Return the binding's functions for one query, best first; older bindings lack some."""
    return tuple(getattr(pynvml, name) for name in names if hasattr(pynvml, name))


def undecoded_function(name: str) -> Functions:
    """Return the function inside the binding's wrapper, without its strict decoding of text."""
    function = getattr(pynvml, name)
    return (getattr(function, "__wrapped__", function),)


def _lister(name: str) -> Callable[..., list[ProcessEntry]]:
    """Return a function for one of the binding's process lists that makes one call into reused memory.

    The binding's own function first queries the length, then the list, and creates an object per entry: a list that
    grows in between fails, it makes two calls, and takes 2 microseconds per entry instead of 0.1.
    """

    def ask(handle: Any, entries: bytearray) -> list[ProcessEntry]:
        function = pynvml._nvmlGetFunctionPointer(name)
        count = ctypes.c_uint(MAX_LISTED_PROCESSES)
        code = function(handle, ctypes.byref(count), (ctypes.c_char * len(entries)).from_buffer(entries))
        if code == 0 and count.value > MAX_LISTED_PROCESSES:
            code = _INSUFFICIENT_SIZE
        if code:
            raise pynvml.NVMLError(code)
        return list(_PROCESS_ENTRY.iter_unpack(memoryview(entries)[: count.value * _PROCESS_ENTRY.size]))

    return ask


PROCESS_LISTS: tuple[tuple[str, Functions], ...] = tuple(
    (kind, tuple(_lister(f"nvmlDeviceGet{word}RunningProcesses_{version}") for version in ("v3", "v2")))
    for kind, word in (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute"))
)


class QueryFailed(Exception):
    """Query without an answer. ``kind`` is the kind of the fault."""

    def __init__(self, kind: FaultKind | ReturnCode, detail: str = "") -> None:
        super().__init__(detail or kind.replace("_", " "))
        self.kind = kind


class EnumerationFailed(QueryFailed):
    """Temporary failure of an enumeration."""


class Unsupported(QueryFailed):
    """Query that the device, the driver or its binding does not support."""


class DeviceLost(QueryFailed):
    """Device that no longer responds."""


class Library:
    """NVML library. Failures raise QueryFailed, or SourceUnavailable if the driver cannot be used at all."""

    def __init__(self, proc: str = "/proc", open_node: Callable[[str, int], int] = os.open) -> None:
        self._proc = proc
        self._open_node = open_node
        self.progress = ReadProgress()
        self._entries = bytearray(MAX_LISTED_PROCESSES * _PROCESS_ENTRY.size)
        self._initialized = False

    def set_index(self, index: int) -> None:
        """Set the index of the device that the following queries concern, for the supervisor."""
        self.progress.set_index(index)

    def open(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            kind = self._kind_of(error)
            # The binding reports every loader error as a library that was not found.
            if kind == "library_not_found" and (reason := load_error()):
                raise not_loadable(reason) from error
            raise self._unavailable(kind) from error
        self._initialized = True

    def close(self) -> None:
        if self._initialized:
            self._initialized = False
            with suppress(pynvml.NVMLError):  # the driver is already unloaded
                pynvml.nvmlShutdown()

    def version(self, name: str) -> str | None:
        try:
            return _text(undecoded_function(name)[0]())
        except pynvml.NVMLError:
            return None

    def cuda_version(self) -> str | None:
        """Return the newest CUDA version that the driver supports."""
        try:
            number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        except pynvml.NVMLError:
            return None
        return f"{number // 1000}.{number % 1000 // 10}"

    # Enumeration of devices: each call returns a new handle.

    def count(self) -> int:
        return int(self.query(functions("nvmlDeviceGetCount")))

    def handle(self, index: int) -> Any:
        return self.query(functions("nvmlDeviceGetHandleByIndex"), index)

    def uuid(self, handle: Any) -> str:
        return _text(self.query(undecoded_function("nvmlDeviceGetUUID"), handle))

    def name(self, handle: Any) -> str:
        return _text(self.query(undecoded_function("nvmlDeviceGetName"), handle))

    def pci_bus_id(self, handle: Any) -> str:
        # The binding decodes the text when the field is accessed, so that must be part of the query.
        return _text(self.query((lambda handle: pynvml.nvmlDeviceGetPciInfo_v3(handle).busId,), handle))

    def gpu_instance_id(self, handle: Any) -> int | None:
        try:
            return int(self.query(functions("nvmlDeviceGetGpuInstanceId"), handle))
        except (EnumerationFailed, Unsupported):
            return None

    def instances(self, handle: Any) -> Iterator[Any]:
        """Yield the handles of the device's MIG instances."""
        mode, _pending = self.query(functions("nvmlDeviceGetMigMode"), handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for position in range(self.query(functions("nvmlDeviceGetMaxMigDeviceCount"), handle)):
            try:
                yield self.query(functions("nvmlDeviceGetMigDeviceHandleByIndex"), handle, position)
            except EnumerationFailed as failure:
                if failure.kind != "not_found":
                    raise

    def process_list(self, lister: Functions, handle: Any) -> list[ProcessEntry]:
        """Return the entries of one of PROCESS_LISTS."""
        entries: list[ProcessEntry] = self.query(lister, handle, self._entries)
        return entries

    def query(self, functions: Functions, *arguments: Any) -> Any:
        """Return the answer of the first function that both binding and library have."""
        for function in functions:
            try:
                return function(*arguments)
            except pynvml.NVMLError as error:
                kind = self._kind_of(error)
                if kind in _MISSING_FUNCTION_KINDS:
                    continue
                if kind in _FATAL_KINDS:
                    raise self._unavailable(kind) from error
                if kind in _LOST_KINDS:
                    raise DeviceLost(kind) from error
                raise (Unsupported if kind == "not_supported" else EnumerationFailed)(kind) from error
            except Exception as error:
                # A malformed answer (such as undecodable text) affects only this query.
                raise EnumerationFailed("unreadable", f"{type(error).__name__}: {error}") from error
        raise Unsupported(ReturnCode("function_not_found"))

    def _kind_of(self, error: pynvml.NVMLError) -> FaultKind | ReturnCode:
        kind = KIND_BY_RETURN_CODE.get(error.value, ReturnCode(f"error_{error.value}"))
        return "device_access_lost" if kind in ("unknown", "no_permission") and self._access_lost() else kind

    def _access_lost(self) -> bool:
        """Return True if the kernel returns EPERM (not EACCES), which it does without a container's device rules."""
        try:
            os.close(self._open_node("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return error.errno == errno.EPERM
        return False

    def _unavailable(self, kind: FaultKind | ReturnCode) -> SourceUnavailable:
        if kind != "lib_rm_version_mismatch":
            cause = _CAUSES.get(kind, f"NVML doesn't start ({kind.replace('_', ' ')})")
            return SourceUnavailable(kind, f"{cause}: {remedy(kind)}")
        number = re.search(r"\d+\.\d+(\.\d+)?", read_or_empty(f"{self._proc}/driver/nvidia/version"))
        return SourceUnavailable(
            kind,
            f"the loaded kernel module is {number.group() if number else 'unknown'}, the NVML library "
            f"{self.version('nvmlSystemGetNVMLVersion') or 'unknown'}, because the driver was upgraded on a running "
            f"system: {remedy(kind)}",
        )


def _text(value: bytes | str) -> str:
    return printable_text(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)


@dataclass
class Device:
    """Device or MIG instance. ``handle`` is None while it is lost, and ``lost_kind`` is then the kind of the fault."""

    uuid: str
    index: int
    parent_uuid: str | None = None
    name: str = ""
    pci_bus_id: str = ""
    handle: Any = None
    lost_kind: FaultKind | ReturnCode | Literal[""] = ""
    memory_version: int | None = None
    memory_failures: int = 0
    size_bytes: int | None = None
    gpu_instance_id: int | None = None


class Inventory:
    """Known devices, which are enumerated repeatedly. ``faults`` are those of the last scan.

    A device that is lost or no longer enumerated remains as a fault until it returns, or until another device is at its
    PCI address. A MIG instance that is missing has been destroyed, and is removed. The handle of a lost device is never
    used again.
    """

    def __init__(self, driver: Library) -> None:
        self._driver = driver
        self._devices: dict[str, Device] = {}
        self._excluded: Mapping[int, str] = {}
        self._next_scan_at = float("-inf")
        self._retry_seconds = 0.0
        self.faults = FaultCollector()

    def devices(self) -> list[Device]:
        """Return the devices; each instance follows its parent."""
        return sorted(self._devices.values(), key=lambda device: (device.index, device.parent_uuid is not None))

    def refresh(self, now: float, excluded_uuids: Mapping[int, str]) -> None:
        """Scan if the interval has passed, or if a device has been lost. ``excluded_uuids``: UUIDs by index."""
        if self._excluded.keys() - excluded_uuids.keys():
            self._retry_seconds = 0.0  # a device may be queried again: at once
        self._excluded = excluded_uuids
        for device in self._devices.values():
            excluded_uuid = excluded_uuids.get(device.index, "")
            if device.handle is not None and excluded_uuid in (device.uuid, device.parent_uuid):
                self.mark_lost(device, EXCLUDED)
        if not self._incomplete():
            self._retry_seconds = 0.0
        elif not self._retry_seconds:
            self._retry_seconds, self._next_scan_at = RETRY_SECONDS, now
        if now >= self._next_scan_at:
            self._scan()
            self._next_scan_at = now + (self._retry_seconds or RESCAN_SECONDS)
            self._retry_seconds = min(2 * self._retry_seconds, RESCAN_SECONDS)

    def mark_lost(self, device: Device, kind: FaultKind | ReturnCode) -> None:
        for lost in (device, *self._instances(device)):
            lost.handle, lost.lost_kind = None, kind

    def _incomplete(self) -> bool:
        return bool(self.faults) or any(device.handle is None for device in self._devices.values())

    def _scan(self) -> None:
        self.faults = FaultCollector()
        try:
            count = self._driver.count()
        except QueryFailed as refusal:
            self.faults.add(None, refusal.kind, f"device count: {refusal}")
            return
        enumerated: set[str] = set()
        for index in range(count):
            if index in self._excluded:
                uuid = self._excluded[index]
                self.mark_lost(self._devices.setdefault(uuid, Device(uuid, index)), EXCLUDED)
                enumerated.add(uuid)
                continue
            self._driver.set_index(index)
            try:
                handle = self._driver.handle(index)
                uuid = self._driver.uuid(handle)
            except QueryFailed as refusal:
                enumerated |= self._record_refusal(index, refusal)
                continue
            enumerated.add(uuid)
            device = self._devices.setdefault(uuid, Device(uuid, index))
            device.index, device.handle = index, handle
            try:
                self._describe(device)
                self._scan_instances(device)
            except DeviceLost as lost:
                self.mark_lost(device, lost.kind)
        for device in self._devices.values():
            if device.parent_uuid is None and device.uuid not in enumerated and device.handle is not None:
                self.mark_lost(device, "vanished")
        self._remove_replaced(enumerated)

    def _remove_replaced(self, enumerated: Collection[str]) -> None:
        """Remove lost devices, with their instances, at whose PCI address another device is enumerated."""
        roots = [device for device in self._devices.values() if device.parent_uuid is None and device.pci_bus_id]
        occupied = {device.pci_bus_id for device in roots if device.uuid in enumerated and device.handle is not None}
        for device in roots:
            if device.uuid not in enumerated and device.pci_bus_id in occupied:
                for gone in (device, *self._instances(device)):
                    del self._devices[gone.uuid]

    def _record_refusal(self, index: int, refusal: QueryFailed) -> set[str]:
        """Return the known device at an index that does not return its UUID: the device that had this index, if any."""
        affected = [device for device in self._devices.values() if (device.index, device.parent_uuid) == (index, None)]
        for device in affected:
            if isinstance(refusal, DeviceLost):
                self.mark_lost(device, refusal.kind)
        if not affected or not isinstance(refusal, DeviceLost):
            uuid = affected[0].uuid if affected else None
            self.faults.add(uuid, refusal.kind, f"device {index}: {refusal}")
        return {device.uuid for device in affected}

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
