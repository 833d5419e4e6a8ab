"""NVIDIA devices, through the driver's library NVML. The only file that imports pynvml.

Covers: memory, processes and sensors of devices and MIG instances, and what NVML's errors mean.
Does not cover: which devices there are (roster.py), answers that cannot be true (plausible.py), calls
that never return and crashes of the library (collector.py), the size of memory shared with the host.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from gpumond.errors import SourceUnavailable
from gpumond.model import MISSED_LIMIT, DeviceReading, ProcessUsage, Reading, Sensors
from gpumond.sources.plausible import IMPOSSIBLE, Listed, Memory, Tally, Usage, memory, usages
from gpumond.sources.processes import Identity, ProcessTable
from gpumond.sources.roster import Device, Failed, Lost, Roster, Unsupported
from gpumond.wire import MAX_INTEGER, clean

GROWTH_RETRIES = 4
"""How often a process list that outgrew its buffer is asked for."""

KINDS: dict[int, str] = {
    getattr(pynvml, name): name.removeprefix("NVML_ERROR_").lower()
    for name in dir(pynvml)
    if name.startswith("NVML_ERROR_")
}
"""The fault kind of every return code."""

MENDS = {
    "library_not_found": "libnvidia-ml.so.1 was not found: install the NVIDIA driver or, in a container, "
    "start it with the NVIDIA container toolkit (--gpus all)",
    "driver_not_loaded": "the NVIDIA kernel module is not loaded: load it (modprobe nvidia) or install the driver",
    "uninitialized": "the NVIDIA driver was unloaded: it is opened anew once it is back",
    "no_permission": "no permission to use the NVIDIA driver: give this user read and write access to /dev/nvidia*",
    "device_access_lost": "the kernel refuses access to /dev/nvidiactl: the container's device rules are gone "
    "(systemctl daemon-reload does that); recreate the container with CDI or explicit --device options",
}

_FATAL = {"library_not_found", "driver_not_loaded", "uninitialized", "lib_rm_version_mismatch", "device_access_lost"}
_LOST = {"gpu_is_lost", "gpu_not_found"}
_SUPERSEDED = {"function_not_found", "argument_version_mismatch", "deprecated"}

Functions = tuple[Callable[..., Any], ...]


def _functions(*names: str) -> Functions:
    """The binding's functions for one question, best first; older bindings lack some."""
    return tuple(getattr(pynvml, name) for name in names if hasattr(pynvml, name))


def _undecoded(name: str) -> Functions:
    """The binding's wrapper decodes text strictly; what it wraps does not decode."""
    function = getattr(pynvml, name)
    return (getattr(function, "__wrapped__", function),)


_MEMORY = _functions("nvmlDeviceGetMemoryInfo")
_MEMORY_ARGUMENTS = {2: (pynvml.nvmlMemory_v2,), 1: ()}
_LISTS = tuple(
    (kind, _functions(f"nvmlDeviceGet{word}RunningProcesses_v3", f"nvmlDeviceGet{word}RunningProcesses_v2"))
    for kind, word in (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute"))
)


class _Sensor(NamedTuple):
    """One query for fields of Sensors: whole numbers up to ``limit``, and what to multiply and divide them by."""

    functions: Functions
    arguments: tuple[int, ...]
    fields: tuple[str, ...]
    limit: int
    times: int = 1
    per: int = 1


_CLOCK = _functions("nvmlDeviceGetClockInfo")
_TEMPERATURE = _functions("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
_UTILIZATION = ("gpu_utilization_ratio", "memory_controller_utilization_ratio")
_SENSORS = (
    _Sensor(_functions("nvmlDeviceGetUtilizationRates"), (), _UTILIZATION, 100, per=100),
    _Sensor(_CLOCK, (pynvml.NVML_CLOCK_SM,), ("sm_clock_hertz",), 100_000, times=1_000_000),
    _Sensor(_CLOCK, (pynvml.NVML_CLOCK_MEM,), ("memory_clock_hertz",), 100_000, times=1_000_000),
    _Sensor(_TEMPERATURE, (pynvml.NVML_TEMPERATURE_GPU,), ("gpu_temperature_celsius",), 250),
    _Sensor(_functions("nvmlDeviceGetPowerUsage"), (), ("power_watts",), 100_000_000, per=1000),
    _Sensor(_functions("nvmlDeviceGetTotalEnergyConsumption"), (), ("energy_joules",), MAX_INTEGER - 1, per=1000),
)


class NvmlSource:
    """``clock`` is monotonic seconds, ``proc`` a directory with the shape of /proc."""

    name = "nvml"

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        proc: str = "/proc",
        open_node: Callable[[str, int], int] = os.open,
    ) -> None:
        self._clock = clock
        self._table = ProcessTable(proc)
        self._pid_max = self._table.pid_max()
        self._library = _Library(proc, open_node)
        self._roster = Roster(self._library)
        self._versions: tuple[str | None, str | None] = (None, None)

    def open(self) -> None:
        self._library.open()
        self._roster = Roster(self._library)
        self._versions = (
            self._library.version("nvmlSystemGetDriverVersion"),
            self._library.version("nvmlSystemGetNVMLVersion"),
        )

    def close(self) -> None:
        self._library.close()

    def read(self) -> Reading:
        """Raises SourceUnavailable when the driver itself is gone: only a new process can load it again."""
        self._roster.refresh(self._clock())
        tally = Tally()
        tally.extend(self._roster.faults)
        observed: list[tuple[DeviceReading, dict[int, Usage] | None]] = []
        for device in self._roster.devices():
            if device.handle is not None:
                try:
                    observed.append((self._observe(device, tally), self._usages(device, tally)))
                    continue
                except Lost as lost:
                    self._roster.lose(device, lost.kind)
            tally.add(device.uuid, device.lost, f"device {device.index} {device.name}".rstrip())
        identities = self._table.read(pid for _, by_pid in observed for pid in by_pid or ())
        devices = (
            reading if by_pid is None else replace(reading, processes=tuple(_processes(by_pid, identities)))
            for reading, by_pid in observed
        )
        return Reading(tuple(devices), tally.faults(self.name), *self._versions)

    def _observe(self, device: Device, tally: Tally) -> DeviceReading:
        """Everything but the processes."""
        size, used, free, reserved = self._memory(device, tally)
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
            sensors=self._sensors(device, tally) if device.parent_uuid is None else Sensors(),
        )

    def _memory(self, device: Device, tally: Tally) -> Memory:
        """A device whose memory fails for good is lost; an instance at once, as it was probably taken away."""
        try:
            info = self._memory_info(device)
        except Unsupported:
            return Memory()
        except Failed as failure:
            device.memory_failures += 1
            if device.memory_failures >= MISSED_LIMIT or device.parent_uuid is not None:
                raise Lost(failure.kind) from failure
            tally.add(device.uuid, failure.kind, f"memory: {failure}")
            return Memory()
        device.memory_failures = 0
        said = Memory(info.total, info.used, info.free, getattr(info, "reserved", None))
        checked = memory(tally, device.uuid, said)
        device.size_bytes = checked.size_bytes or device.size_bytes
        return checked

    def _memory_info(self, device: Device) -> Any:
        """Version 1 counts what the driver reserves as used, so a device stays with the version it began with."""
        for version in (2, 1) if device.memory_version is None else (device.memory_version,):
            try:
                info = self._library.query(_MEMORY, device.handle, *_MEMORY_ARGUMENTS[version])
            except Unsupported:
                continue
            device.memory_version = version
            return info
        raise Unsupported("not_supported")

    def _usages(self, device: Device, tally: Tally) -> dict[int, Usage] | None:
        listed: list[Listed] | None = None
        for kind, functions in _LISTS:
            try:
                entries = self._library.listing(functions, device.handle)
            except Unsupported:
                continue
            except Failed as failure:
                tally.add(device.uuid, failure.kind, f"{kind} processes: {failure}")
                return None
            listed = listed or []
            listed += (
                Listed(kind, (entry.gpuInstanceId, entry.computeInstanceId), entry.pid, entry.usedGpuMemory)
                for entry in entries
            )
        if listed is None:
            return None
        return usages(tally, device.uuid, listed, device.size_bytes or MAX_INTEGER - 1, self._pid_max)

    def _sensors(self, device: Device, tally: Tally) -> Sensors:
        values: dict[str, float] = {}
        for sensor in _SENSORS:
            try:
                answer = self._library.query(sensor.functions, device.handle, *sensor.arguments)
            except Unsupported:
                continue
            except Failed as failure:
                tally.add(device.uuid, failure.kind, f"{sensor.fields[0]}: {failure}")
                continue
            numbers = (answer,) if isinstance(answer, int) else (answer.gpu, answer.memory)
            for field, number in zip(sensor.fields, numbers, strict=True):
                if 0 <= number <= sensor.limit:
                    values[field] = number * sensor.times / sensor.per
                else:
                    tally.add(device.uuid, IMPOSSIBLE, f"{field} {number}")
        return Sensors(**values)


class _Library:
    """libnvidia-ml through pynvml: a failure is a Refusal or, where nothing works any more, SourceUnavailable."""

    def __init__(self, proc: str, open_node: Callable[[str, int], int]) -> None:
        self._proc = proc
        self._open_node = open_node
        self._initialized = False

    def open(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise self._unavailable(self._kind_of(error)) from error
        self._initialized = True

    def close(self) -> None:
        if self._initialized:
            self._initialized = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                pass  # the driver is gone already

    def version(self, name: str) -> str | None:
        try:
            return _text(_undecoded(name)[0]())
        except pynvml.NVMLError:
            return None

    def count(self) -> int:
        return int(self.query(_functions("nvmlDeviceGetCount")))

    def handle(self, index: int) -> Any:
        return self.query(_functions("nvmlDeviceGetHandleByIndex"), index)

    def uuid(self, handle: Any) -> str:
        return _text(self.query(_undecoded("nvmlDeviceGetUUID"), handle))

    def name(self, handle: Any) -> str:
        return _text(self.query(_undecoded("nvmlDeviceGetName"), handle))

    def pci_bus_id(self, handle: Any) -> str:
        # The binding decodes the text when the field is read, so that has to be part of the query.
        return _text(self.query((lambda handle: pynvml.nvmlDeviceGetPciInfo_v3(handle).busId,), handle))

    def instances(self, handle: Any) -> Iterator[Any]:
        mode, _pending = self.query(_functions("nvmlDeviceGetMigMode"), handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for position in range(self.query(_functions("nvmlDeviceGetMaxMigDeviceCount"), handle)):
            try:
                yield self.query(_functions("nvmlDeviceGetMigDeviceHandleByIndex"), handle, position)
            except Failed as failure:
                if failure.kind != "not_found":
                    raise

    def listing(self, functions: Functions, handle: Any) -> Sequence[Any]:
        """The binding asks for the size, then for the list, which may have grown in between."""
        for _ in range(GROWTH_RETRIES):
            try:
                entries: Sequence[Any] = self.query(functions, handle)
                return entries
            except Failed as failure:
                if failure.kind != "insufficient_size":
                    raise
        raise Failed("insufficient_size", f"grew {GROWTH_RETRIES} times while it was read")

    def query(self, functions: Functions, *arguments: Any) -> Any:
        """The answer of the first function that both binding and library have."""
        for function in functions:
            try:
                return function(*arguments)
            except pynvml.NVMLError as error:
                kind = self._kind_of(error)
                if kind in _SUPERSEDED:
                    continue
                if kind in _FATAL:
                    raise self._unavailable(kind) from error
                if kind in _LOST:
                    raise Lost(kind) from error
                raise (Unsupported if kind == "not_supported" else Failed)(kind) from error
            except Exception as error:
                # Whatever the binding makes of a broken answer (undecodable text, say) costs this answer only.
                raise Failed("unreadable", f"{type(error).__name__}: {error}") from error
        raise Unsupported("function_not_found")

    def _kind_of(self, error: pynvml.NVMLError) -> str:
        kind = KINDS.get(error.value, f"error_{error.value}")
        return "device_access_lost" if kind in ("unknown", "no_permission") and self._access_lost() else kind

    def _access_lost(self) -> bool:
        """EPERM (not EACCES) is what the kernel answers once a container's device rules are gone."""
        try:
            os.close(self._open_node("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return error.errno == errno.EPERM
        return False

    def _unavailable(self, kind: str) -> SourceUnavailable:
        if kind != "lib_rm_version_mismatch":
            return SourceUnavailable(kind, MENDS.get(kind, f"NVML does not start: {kind.replace('_', ' ')}"))
        try:
            module = Path(self._proc, "driver/nvidia/version").read_text(errors="replace")
        except OSError:
            module = ""
        number = re.search(r"\d+\.\d+(\.\d+)?", module)
        return SourceUnavailable(
            kind,
            f"the loaded kernel module is {number.group() if number else 'unknown'}, the NVML library "
            f"{self.version('nvmlSystemGetNVMLVersion') or 'unknown'}: the driver was upgraded under a running "
            "system; reboot, or stop all users of the GPU and reload the module",
        )


def _processes(by_pid: Mapping[int, Usage], identities: Mapping[int, Identity]) -> Iterator[ProcessUsage]:
    for pid, usage in sorted(by_pid.items()):
        start_ticks, comm, uid, user = identities[pid]
        yield ProcessUsage(pid, start_ticks, usage.used_bytes, usage.kinds, comm, uid, user)


def _text(value: bytes | str) -> str:
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)
