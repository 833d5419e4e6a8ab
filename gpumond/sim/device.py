"""A simulated device: a directory in which processes allocate bytes that exist only as numbers.

    DIRECTORY/card.json             constant properties
    DIRECTORY/used                  its flock guards the device; a sum of bytes that is never below the true one
    DIRECTORY/processes/PID-TICKS   bytes held by one process, and the sensor values that it publishes
    DIRECTORY/orphans/PID-TICKS     bytes without an owner, until the file is removed
    DIRECTORY/locked/PID-TICKS      this process is locked: its calls wait
    DIRECTORY/suspended/PID-TICKS   this process is suspended: not listed, without bytes, and its calls wait

An ended process holds nothing: the next reader of the device removes its file. All users of a device must be in one PID
namespace, and be the same user.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpumond.facts.errors import GpumondError, ProtocolError
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Sensors
from gpumond.facts.units import MIB
from gpumond.host.machine import ENDED_STATES, read_head, read_process_stat

RECORD_BYTES = 128
BUSY_CELSIUS, BUSY_WATTS = 40.0, 300.0
"""Temperature and power that a process adds to the device at full utilization."""
WAIT_POLL_SECONDS = 0.01
"""Time between two looks of a suspended process whether it was resumed."""


class OutOfMemory(MemoryError):
    """The device has too few free bytes."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The properties of a device. ``context_bytes``: the cost of every process before it allocates anything.

    The idle values are those of an unused device; the values that processes publish are added to them.
    ``can_suspend``: `SimDriver` suspends its programs.
    """

    uuid: str
    index: int
    name: str
    size_bytes: int
    reserved_bytes: int = 0
    context_bytes: int = 256 * MIB
    idle_celsius: float | None = None
    idle_watts: float | None = None
    can_suspend: bool = False


class DamagedDeviceError(GpumondError):
    """The device's directory is missing, or contains invalid data."""


class SimDevice:
    """One device. ``spec`` and ``read`` raise DamagedDeviceError."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def spec(self) -> DeviceSpec:
        try:
            return from_json(DeviceSpec, (self.directory / "card.json").read_bytes())
        except (OSError, ProtocolError) as error:
            raise DamagedDeviceError(f"{self.directory / 'card.json'}: {error}") from error

    def attach(self) -> Context:
        """Return this process's context on the device, the same one until it is closed. Raises OutOfMemory."""
        key = str(self.directory.resolve())
        with _contexts_lock:
            context = _contexts.get(key)
            if context is None:
                context = _contexts[key] = Context(self, key)
            return context

    def read(self) -> DeviceReading:
        """Return a driver's reading: the living processes in order of pid, and their sums."""
        spec = self.spec()
        try:
            with self._open_locked() as lock:
                records = self._recount(lock)
        except (OSError, ValueError, TypeError) as error:
            raise DamagedDeviceError(f"{self.directory}: {error}") from error
        used = sum(record.used_bytes for record in records) + self._orphan_bytes()
        return DeviceReading(
            uuid=spec.uuid,
            index=spec.index,
            name=spec.name,
            vendor="sim",
            size_bytes=spec.size_bytes,
            used_bytes=used,
            free_bytes=spec.size_bytes - spec.reserved_bytes - used,
            reserved_bytes=spec.reserved_bytes,
            processes=tuple(
                ProcessUsage(
                    pid=record.pid,
                    start_ticks=record.start_ticks,
                    used_bytes=record.used_bytes,
                    kinds=("compute",),
                    utilization_ratio=record.sensors[0],
                )
                for record in records
            ),
            sensors=_sum_sensors(spec, [record.sensors for record in records]),
        )

    def suspend(self, pid: int) -> None:
        """Suspend a process as cuCheckpointProcessCheckpoint does: its bytes are free, and its next call waits."""
        self._mark("suspended", pid)

    def resume(self, pid: int) -> None:
        """Return the bytes of a suspended process to it. Raises OutOfMemory, and then changes nothing."""
        spec, process_bytes = self.spec(), self.held_bytes(pid)
        with self._open_locked() as lock:
            used = sum(record.used_bytes for record in self._recount(lock)) + self._orphan_bytes()
            if used + process_bytes > spec.size_bytes - spec.reserved_bytes:
                raise OutOfMemory(f"{process_bytes / MIB:.2f} MiB don't fit on {spec.uuid}")
            (self.directory / "suspended" / _process_file_name(pid)).unlink()
            _write_sum(lock, used + process_bytes)

    def lock(self, pid: int) -> None:
        """Let the calls of a process wait."""
        self._mark("locked", pid)

    def unlock(self, pid: int) -> None:
        (self.directory / "locked" / _process_file_name(pid)).unlink(missing_ok=True)

    def is_marked(self, kind: Literal["processes", "locked", "suspended"], pid: int) -> bool:
        """Return whether the process has this file: see the top of this module."""
        return (self.directory / kind / _process_file_name(pid)).exists()

    def held_bytes(self, pid: int) -> int:
        """Return the bytes of a process, also those that it will have again when it is resumed."""
        return int(json.loads(read_head(str(self.directory / "processes" / _process_file_name(pid))))[0])

    def _mark(self, kind: str, pid: int) -> None:
        (self.directory / kind).mkdir(exist_ok=True)
        (self.directory / kind / _process_file_name(pid)).touch()

    @contextmanager
    def _open_locked(self) -> Iterator[int]:
        """Open and lock the device's lock file."""
        lock = os.open(self.directory / "used", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _recount(self, lock: int) -> list[_Record]:
        """Return every running process, remove the files of ended ones, and correct the sum. The lock must be held."""
        records = []
        directory, suspended = str(self.directory / "processes"), self._list_files("suspended")
        for name in os.listdir(directory):
            pid, _, ticks = name.partition("-")
            path = f"{directory}/{name}"
            if start_if_running(int(pid)) == int(ticks):
                if name in suspended:
                    continue
                used_bytes, *sensors = json.loads(read_head(path))
                records.append(_Record(int(pid), int(ticks), used_bytes, sensors))
            else:
                os.unlink(path)
        records.sort(key=lambda record: record.pid)
        _write_sum(lock, sum(record.used_bytes for record in records) + self._orphan_bytes())
        return records

    def _orphan_bytes(self) -> int:
        directory = f"{self.directory}/orphans"
        return sum(int(json.loads(read_head(f"{directory}/{name}"))[0]) for name in self._list_files("orphans"))

    def _list_files(self, kind: str) -> Sequence[str]:
        try:
            return os.listdir(f"{self.directory}/{kind}")
        except FileNotFoundError:
            return ()


class Context:
    """The bytes of one process on a device: created by ``attach``, counted until closed or the process ends."""

    def __init__(self, device: SimDevice, key: str) -> None:
        self.device = device
        self.spec = device.spec()
        self.used_bytes = 0
        self._key = key
        self._sensors = Sensors()
        self._capacity_bytes = self.spec.size_bytes - self.spec.reserved_bytes
        self._thread_lock = threading.Lock()
        pid = os.getpid()
        self._path = device.directory / "processes" / f"{pid}-{start_if_running(pid)}"
        self._lock_file = os.open(device.directory / "used", os.O_RDWR | os.O_CLOEXEC)
        self._record_file = -1
        try:
            self.allocate(self.spec.context_bytes)
        except BaseException:
            self._forget()
            raise

    def allocate(self, size_bytes: int) -> None:
        """Allocate bytes. Raises OutOfMemory, and then changes nothing."""
        with self._locked_device() as lock:
            used = _read_sum(lock)
            if used + size_bytes > self._capacity_bytes:
                self.device._recount(lock)
                used = _read_sum(lock)
            if used + size_bytes > self._capacity_bytes:
                raise OutOfMemory(
                    f"tried to allocate {size_bytes / MIB:.2f} MiB on {self.spec.uuid}: "
                    f"{self._capacity_bytes / MIB:.2f} MiB in total, "
                    f"{max(0, self._capacity_bytes - used) / MIB:.2f} MiB free"
                )
            # the sum first: a kill between the two writes leaves too high a sum, which a recount corrects
            _write_sum(lock, used + size_bytes)
            self.used_bytes += size_bytes
            self._write_record()

    def wait(self) -> None:
        """Return when this process is neither locked nor suspended."""
        marks = [f"{self.device.directory}/{kind}/{self._path.name}" for kind in ("locked", "suspended")]
        while any(map(os.path.exists, marks)):
            time.sleep(WAIT_POLL_SECONDS)

    def free(self, size_bytes: int) -> None:
        with self._locked_device() as lock:
            if size_bytes > self.used_bytes - self.spec.context_bytes:
                raise ValueError(
                    f"can't free {size_bytes} bytes: {self.used_bytes - self.spec.context_bytes} are allocated"
                )
            self.used_bytes -= size_bytes
            self._write_record()
            _write_sum(lock, _read_sum(lock) - size_bytes)

    def publish(self, sensors: Sensors) -> None:
        """Set this process's part of the device's utilization, temperature and power."""
        with self._locked_device():
            self._sensors = sensors
            self._write_record()

    def set_utilization(self, ratio: float) -> None:
        """Publish a utilization, and the temperature and power that it causes."""
        self.publish(
            Sensors(
                gpu_utilization_ratio=ratio,
                gpu_temperature_celsius=ratio * BUSY_CELSIUS,
                power_watts=ratio * BUSY_WATTS,
            )
        )

    def close(self) -> None:
        """Return all bytes. The context must not be used afterwards."""
        with _contexts_lock:
            _contexts.pop(self._key, None)
        with self._locked_device() as lock:
            os.unlink(self._path)
            _write_sum(lock, _read_sum(lock) - self.used_bytes)
            self._forget()

    def abandon(self) -> Path:
        """Leave all bytes on the device without an owner, as a driver may when a program is killed.

        Removal of the returned file frees them. The context must not be used afterwards.
        """
        with _contexts_lock:
            _contexts.pop(self._key, None)
        orphan = self.device.directory / "orphans" / self._path.name
        with self._locked_device():
            orphan.parent.mkdir(exist_ok=True)
            self._path.rename(orphan)
            self._forget()
        return orphan

    @contextmanager
    def _locked_device(self) -> Iterator[int]:
        self.wait()
        with self._thread_lock:  # an flock does not exclude threads that share its descriptor
            if self._lock_file < 0:
                raise ValueError(
                    "this context is closed, or belongs to the parent of this process; call attach() again"
                )
            lock = self._lock_file
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield lock
            finally:
                if self._lock_file >= 0:
                    fcntl.flock(lock, fcntl.LOCK_UN)

    def _write_record(self) -> None:
        sensors = self._sensors
        record = (self.used_bytes, sensors.gpu_utilization_ratio, sensors.gpu_temperature_celsius, sensors.power_watts)
        text = json.dumps(record).encode().ljust(RECORD_BYTES)
        if self._record_file < 0:
            self._record_file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.pwrite(self._record_file, text, 0)

    def _forget(self) -> None:
        for descriptor in (self._lock_file, self._record_file):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock_file = self._record_file = -1


def create(directory: str | os.PathLike[str], spec: DeviceSpec) -> SimDevice:
    """Create an empty device in a directory that does not exist yet."""
    device = SimDevice(directory)
    (device.directory / "processes").mkdir(parents=True)
    (device.directory / "used").write_bytes(b"0".ljust(RECORD_BYTES))
    draft = device.directory / "card.json.new"
    draft.write_bytes(to_json(spec))
    draft.rename(device.directory / "card.json")
    return device


def simulated_devices(root: str | os.PathLike[str]) -> list[SimDevice]:
    """Return the devices in the directories below ``root``, damaged ones included, in order of their names."""
    return [SimDevice(path.parent) for path in sorted(Path(root).glob("*/card.json"))]


RUNNING, LOCKED, CHECKPOINTED = range(3)
"""Numbers of CUprocessState."""
RESTORE_POLL_SECONDS = 0.1
"""Time between two looks of a restore whether its memory is free."""


class SimDriver:
    """The driver of simulated devices, for checkpoint processes: the states of cuCheckpointProcess*.

    The copy takes no time, and its bytes exist only as numbers. A program that uses several devices is suspended on all
    of them. ``devices``: those below ``root`` that the process uses, and whose programs can be suspended.
    """

    def __init__(self, root: str | os.PathLike[str], pid: int) -> None:
        """Raises DamagedDeviceError."""
        devices = (device for device in simulated_devices(root) if device.is_marked("processes", pid))
        self.devices: list[SimDevice] = [device for device in devices if device.spec().can_suspend]

    def init(self) -> str:
        return ""

    def state(self, pid: int) -> tuple[int, str]:
        if any(device.is_marked("suspended", pid) for device in self.devices):
            return CHECKPOINTED, ""
        return (LOCKED if any(device.is_marked("locked", pid) for device in self.devices) else RUNNING), ""

    def lock(self, pid: int, milliseconds: int) -> str:
        for device in self.devices:
            device.lock(pid)
        return ""

    def checkpoint(self, pid: int) -> str:
        for device in self.devices:
            device.suspend(pid)
        return ""

    def restore(self, pid: int) -> str:
        """Wait until all memory is free, or the process has ended. With CUDA, the program would be lost."""
        while read_process_stat("/proc", pid) is not None and self.state(pid)[0] == CHECKPOINTED:
            for device in self.devices:
                if device.is_marked("suspended", pid):
                    with suppress(OutOfMemory):
                        device.resume(pid)
            if self.state(pid)[0] == CHECKPOINTED:
                time.sleep(RESTORE_POLL_SECONDS)
        return ""

    def unlock(self, pid: int) -> str:
        for device in self.devices:
            device.unlock(pid)
        return ""

    def resident_bytes(self, pid: int) -> int | None:
        return sum(device.held_bytes(pid) for device in self.devices if device.is_marked("suspended", pid))


def start_if_running(pid: int) -> int | None:
    """Return the start of a process in clock ticks after boot; None if it has ended or is a zombie."""
    stat = read_process_stat("/proc", pid)
    return None if stat is None or stat.state in ENDED_STATES else stat.start_ticks


@dataclass(frozen=True, slots=True)
class _Record:
    pid: int
    start_ticks: int
    used_bytes: int
    sensors: list[float | None]
    """Utilization ratio, degrees Celsius, watts."""


def _sum_sensors(spec: DeviceSpec, published: list[list[float | None]]) -> Sensors:
    idle = [None, spec.idle_celsius, spec.idle_watts]
    columns = ([value for value in column if value is not None] for column in zip(idle, *published, strict=True))
    utilization, celsius, watts = (sum(values) if values else None for values in columns)
    return Sensors(
        gpu_utilization_ratio=None if utilization is None else min(1.0, utilization),
        gpu_temperature_celsius=celsius,
        power_watts=watts,
    )


def _process_file_name(pid: int) -> str:
    return f"{pid}-{start_if_running(pid)}"


def _read_sum(lock: int) -> int:
    return int(os.pread(lock, RECORD_BYTES, 0))


def _write_sum(lock: int, used_bytes: int) -> None:
    os.pwrite(lock, b"%-*d" % (RECORD_BYTES, used_bytes), 0)


_contexts: dict[str, Context] = {}
_contexts_lock = threading.Lock()


def _after_fork() -> None:
    """Discard all contexts in a forked child: it attaches by itself, and must not write to its parent's file."""
    global _contexts_lock
    _contexts_lock = threading.Lock()
    for context in _contexts.values():
        context._forget()
        context._thread_lock = threading.Lock()
    _contexts.clear()


os.register_at_fork(after_in_child=_after_fork)
