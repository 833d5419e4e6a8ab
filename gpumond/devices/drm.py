"""AMD and Intel devices (amdgpu, i915, xe), read from kernel files without vendor libraries or daemons.

Memory, sensors and clocks are read from sysfs, the memory of an Intel device with a query, usage from /proc/PID/fdinfo
and, for ROCm, from KFD. fdinfo has the keys and units of Documentation/gpu/drm-usage-stats.rst of the kernel: amdgpu
has the region ``vram`` and engine times in nanoseconds; i915 ``local0`` and nanoseconds; xe ``vram0`` and both busy and
total cycles.

Without CAP_SYS_PTRACE, the kernel shows fdinfo of the daemon's own user only. Other processes' memory is then
unattributed, utilization that derives from their busy time is absent, and a fault reports this. A device that the
kernel has powered down is listed without values. Does not cover partitions of an MI300.

Files: Documentation/gpu/amdgpu, Documentation/ABI/testing/sysfs-driver-intel-*-hwmon of the kernel.

``uuid`` is ``AMD-`` and the device's unique_id if it has one, else ``DRM-pci-`` and its PCI address, which identifies
the slot rather than the device.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from glob import glob
from typing import Any, NamedTuple

from gpumond.devices import INTEL_INTEGRATED, may_have_gpu
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
from gpumond.devices.process.procfs import DeviceNode, OpenDeviceNodes, ProcessIdentity, ProcessTable
from gpumond.facts.errors import FaultKind, SourceUnavailable, remedy
from gpumond.facts.messages import MAX_INTEGER, printable_text
from gpumond.facts.snapshot import NO_DEVICE, DeviceReading, ProcessUsage, Reading, Sensors
from gpumond.facts.units import plural
from gpumond.host.machine import read_or_empty

DRIVERS = {"amdgpu": "amd", "i915": "intel", "xe": "intel"}
"""Vendor by kernel driver."""

PCI_IDS = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")

_ABSENT_SENSOR_ERRORS = {errno.ENOENT, errno.EOPNOTSUPP, errno.ENODATA, errno.EINVAL}
"""Errors that drivers return for a sensor that the device does not have."""


class _Gauge(NamedTuple):
    """Value from the first existing file in the device's directory; integers up to ``limit``."""

    field: str
    files: tuple[str, ...]
    limit: int
    divisor: float = 1.0


_HERTZ = 100_000_000_000
_MEGAHERTZ = 100_000
_MICROWATTS = 10**11
_GAUGES: dict[str, tuple[_Gauge, ...]] = {
    "amdgpu": (
        _Gauge("gpu_utilization_ratio", ("device/gpu_busy_percent",), 100, 100),
        _Gauge("memory_controller_utilization_ratio", ("device/mem_busy_percent",), 100, 100),
        _Gauge("sm_clock_hertz", ("HWMON/freq1_input",), _HERTZ),
        _Gauge("memory_clock_hertz", ("HWMON/freq2_input",), _HERTZ),
        _Gauge("gpu_temperature_celsius", ("HWMON/temp1_input", "HWMON/temp2_input"), 250_000, 1e3),
        _Gauge("memory_temperature_celsius", ("HWMON/temp3_input",), 250_000, 1e3),
        _Gauge("power_watts", ("HWMON/power1_average", "HWMON/power1_input"), _MICROWATTS, 1e6),
        _Gauge("power_limit_watts", ("HWMON/power1_cap",), _MICROWATTS, 1e6),
        _Gauge("fan_speed_ratio", ("HWMON/pwm1",), 255, 255),
    ),
    "i915": (
        _Gauge("sm_clock_hertz", ("gt/gt0/rps_act_freq_mhz", "gt_act_freq_mhz"), _MEGAHERTZ, 1e-6),
        _Gauge("gpu_temperature_celsius", ("HWMON/temp1_input",), 250_000, 1e3),
        _Gauge("power_limit_watts", ("HWMON/power1_max",), _MICROWATTS, 1e6),
        _Gauge("energy_joules", ("HWMON/energy1_input",), 2**63, 1e6),
    ),
    "xe": (
        _Gauge("sm_clock_hertz", ("device/tile0/gt0/freq0/act_freq",), _MEGAHERTZ, 1e-6),
        _Gauge("gpu_temperature_celsius", ("HWMON/temp2_input",), 250_000, 1e3),
        _Gauge("memory_temperature_celsius", ("HWMON/temp3_input",), 250_000, 1e3),
        _Gauge("power_limit_watts", ("HWMON/power1_max",), _MICROWATTS, 1e6),
        _Gauge("energy_joules", ("HWMON/energy1_input", "HWMON/energy2_input"), 2**63, 1e6),
    ),
}


class DrmDevice:
    """DRM device. ``directory`` is /sys/class/drm/cardN, or that of its render node if it has no card node."""

    def __init__(self, directory: str, nodes: frozenset[str], pci_bus_id: str, driver: str) -> None:
        self._directory = directory
        self.nodes, self.pci_bus_id, self.driver = nodes, pci_bus_id, driver
        self.vendor = DRIVERS[driver]
        unique = self._text("device/unique_id").removeprefix("0x").lower()
        self.unique_id = unique if re.fullmatch(r"[0-9a-f]{1,32}", unique) and unique.strip("0") else None
        self.uuid = f"AMD-{self.unique_id}" if self.unique_id else f"DRM-pci-{pci_bus_id}"
        # The host memory of an integrated AMD GPU counts as device memory, because the host cannot use it.
        self.unified = self.vendor == "intel" and pci_bus_id == INTEL_INTEGRATED
        hwmons = glob(f"{directory}/device/hwmon/hwmon*")
        own_hwmons = [hwmon for hwmon in hwmons if read_or_empty(f"{hwmon}/name").strip() == driver]
        self._hwmon = (own_hwmons or hwmons or [f"{directory}/device/hwmon"])[0]

    @property
    def render_node(self) -> str | None:
        return next((node for node in sorted(self.nodes) if node.startswith("renderD")), None)

    def name(self, pci_ids: tuple[str, ...] = PCI_IDS) -> str:
        """Return the name from the driver, else from the PCI ID database, else the numeric IDs."""
        vendor, device = ((self._text(f"device/{file}") or "0x?")[2:] for file in ("vendor", "device"))
        listed = next(filter(None, (_name_in_pci_ids(path, vendor, device) for path in pci_ids)), None)
        return printable_text(self._text("device/product_name") or listed or f"{self.vendor} {vendor}:{device}")

    def is_powered_down(self) -> bool:
        """Return True if the kernel has powered the device down; reading it would power it up."""
        return self._text("device/power/runtime_status") == "suspended"

    def memory(self, faults: FaultCollector) -> MemoryCounts:
        if self.driver == "amdgpu":
            size, used = (self._number(f"device/mem_info_vram_{word}", 2**63, faults) for word in ("total", "used"))
            free = size - used if size is not None and used is not None and used <= size else None
            return MemoryCounts(size, used, free)
        tiles = [self._number(os.path.relpath(tile, self._directory), 2**63, faults) for tile in self._tiles()]
        size = sum(tile for tile in tiles if tile) or self._number("lmem_total_bytes", 2**63, faults)
        free = self._number("lmem_avail_bytes", 2**63, faults) if size else None
        return MemoryCounts(size, size - free if size and free is not None and free <= size else None, free)

    def sensors(self, faults: FaultCollector) -> dict[str, float]:
        values: dict[str, float] = {}
        for field, files, limit, divisor in _GAUGES[self.driver]:
            for file in files:
                number = self._number(file, limit, faults)
                if number is not None:
                    values[field] = number / divisor
                    break
        for field, table in (("sm_clock_hertz", "pp_dpm_sclk"), ("memory_clock_hertz", "pp_dpm_mclk")):
            current = re.search(r"(\d{1,6})mhz \*", self._text(f"device/{table}").lower())
            if field not in values and current:
                values[field] = int(current[1]) * 1e6
        return values

    def _tiles(self) -> list[str]:
        return sorted(glob(f"{self._directory}/device/tile*/physical_vram_size_bytes"))

    def _number(self, file: str, limit: int, faults: FaultCollector) -> int | None:
        path = f"{self._directory}/{file}".replace(f"{self._directory}/HWMON", self._hwmon)
        try:
            with open(path, encoding="utf-8", errors="replace") as content:
                text = content.read(4096)
        except OSError as error:
            if error.errno not in _ABSENT_SENSOR_ERRORS:
                faults.add(self.uuid, fault_kind_of(error), f"{file}: {error.strerror}")
            return None
        try:
            number = int(text)
        except ValueError:
            number = -1
        if 0 <= number <= limit:
            return number
        faults.add(self.uuid, IMPOSSIBLE, f"{file} {text.strip()[:32]}")
        return None

    def _text(self, file: str) -> str:
        return read_or_empty(f"{self._directory}/{file}").strip()


def drm_devices(root: str) -> Iterator[DrmDevice]:
    """Yield the devices of the supported drivers by PCI address; all nodes of a device are one device."""
    nodes: dict[str, list[str]] = {}
    for entry in glob(f"{root}/class/drm/*[0-9]"):
        if re.fullmatch(r"(card|renderD)\d+", os.path.basename(entry)):
            nodes.setdefault(os.path.realpath(f"{entry}/device"), []).append(entry)
    for device, entries in sorted(nodes.items(), key=lambda item: os.path.basename(item[0])):
        driver = os.path.basename(os.path.realpath(f"{device}/driver"))
        if driver in DRIVERS and os.path.exists(f"{device}/vendor"):
            yield DrmDevice(min(entries), frozenset(map(os.path.basename, entries)), os.path.basename(device), driver)


def detect(sys: str) -> bool:
    """Return True if the machine has such a device."""
    return any(drm_devices(sys))


def fault_kind_of(error: OSError) -> FaultKind:
    return "no_permission" if error.errno in (errno.EACCES, errno.EPERM) else "unreadable"


def _name_in_pci_ids(path: str, vendor: str, device: str) -> str | None:
    """Return the device's name from a pci.ids file, in which a vendor's devices are indented by one tab."""
    is_vendor = False
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith(("\t", "#")):
                is_vendor = line.startswith(f"{vendor} ")
            elif is_vendor and line.startswith(f"\t{device} "):
                return line[len(device) + 1 :].strip()
    return None


BytesByProcess = Mapping[str, Mapping[int, int]]
"""Bytes by PCI address and pid."""


class Kfd:
    """Reader of KFD files. ``root`` replaces /sys."""

    def __init__(self, root: str = "/sys") -> None:
        self._root = f"{root}/class/kfd/kfd"
        self._devices: dict[str, str] = {}

    def read(self) -> BytesByProcess:
        usages: dict[str, dict[int, int]] = {}
        for pid, gpu, size in self._used():
            if gpu not in self._devices:
                self._devices = dict(self._topology())
            if gpu in self._devices:
                by_pid = usages.setdefault(self._devices[gpu], {})
                by_pid[pid] = by_pid.get(pid, 0) + size  # partitions of one device are added
        return usages

    def _used(self) -> Iterator[tuple[int, str, int]]:
        for pid in _directory_names(f"{self._root}/proc"):
            for file in _directory_names(f"{self._root}/proc/{pid}"):
                size = read_or_empty(f"{self._root}/proc/{pid}/{file}").strip() if file.startswith("vram_") else ""
                if pid.isdecimal() and size.isdecimal():
                    yield int(pid), file.removeprefix("vram_"), int(size)

    def _topology(self) -> Iterator[tuple[str, str]]:
        for node in _directory_names(f"{self._root}/topology/nodes"):
            directory = f"{self._root}/topology/nodes/{node}"
            lines = (line.split() for line in read_or_empty(f"{directory}/properties").splitlines())
            properties = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
            location = properties.get("location_id", 0)
            if location:
                bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
                address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
                yield read_or_empty(f"{directory}/gpu_id").strip(), address


def _directory_names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


Ioctl = Callable[[int, int, bytearray, bool], int]
DEVICE_MEMORY = 1
_MAX_ANSWER = 65536

_I915_QUERY, _I915_REGIONS = 0xC0106479, 4
_I915_ITEM = struct.Struct("=QiIQ")
_I915_REGION = struct.Struct("=HHIQQ64x")
_XE_QUERY, _XE_REGIONS = 0xC0286440, 1
_XE_ASK = struct.Struct("=QIIQ16x")
_XE_REGION = struct.Struct("=HHIQQ64x")


def intel_memory(driver: str, node: str, ioctl: Ioctl = fcntl.ioctl) -> MemoryCounts:
    """Return the memory counts. All are None without device memory; used and free are None without permission.

    Raises OSError.
    """
    descriptor = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        regions = list((_xe if driver == "xe" else _i915)(descriptor, ioctl))
    finally:
        os.close(descriptor)
    size = sum(region[0] for region in regions)
    used = sum(region[1] for region in regions)
    if not size:
        return MemoryCounts()
    return MemoryCounts(size, used, size - used) if 0 < used <= size else MemoryCounts(size)


def _i915(descriptor: int, ioctl: Ioctl) -> Iterator[tuple[int, int]]:
    def ask(length: int, address: int) -> int:
        item = ctypes.create_string_buffer(_I915_ITEM.pack(_I915_REGIONS, length, 0, address), _I915_ITEM.size)
        ioctl(descriptor, _I915_QUERY, bytearray(struct.pack("=IIQ", 1, 0, ctypes.addressof(item))), True)
        return int(_I915_ITEM.unpack(item.raw)[1])

    for memory_class, _, _, size, free in _regions(_answer(ask), 16, _I915_REGION):
        if memory_class == DEVICE_MEMORY and free <= size:
            yield size, size - free


def _xe(descriptor: int, ioctl: Ioctl) -> Iterator[tuple[int, int]]:
    def ask(length: int, address: int) -> int:
        query = bytearray(_XE_ASK.pack(0, _XE_REGIONS, length, address))
        ioctl(descriptor, _XE_QUERY, query, True)
        return int(_XE_ASK.unpack(query)[2])

    for memory_class, _, _, size, used in _regions(_answer(ask), 8, _XE_REGION):
        if memory_class == DEVICE_MEMORY:
            yield size, used


def _answer(ask: Callable[[int, int], int]) -> bytes:
    """Return the response: the first call returns its length, the second its content."""
    length = ask(0, 0)
    if not 0 < length <= _MAX_ANSWER:
        return b""
    buffer = ctypes.create_string_buffer(length)
    ask(length, ctypes.addressof(buffer))
    return buffer.raw


def _regions(answer: bytes, header: int, region: struct.Struct) -> Iterator[tuple[int, ...]]:
    count = struct.unpack_from("=I", answer)[0] if len(answer) >= header else 0
    return region.iter_unpack(answer[header : header + min(count, (len(answer) - header) // region.size) * region.size])


_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_DEVICE_REGION = re.compile(r"drm-(resident|memory|total)-((?:vram|local)\d*)")
"""Regions in device memory; ``system``, ``gtt`` and ``cpu`` are host memory."""
_COMPUTE_ENGINES = {"compute", "ccs"}
_GRAPHICS_ENGINES = {"gfx", "render", "rcs"}


class EngineTime(NamedTuple):
    """Busy time of an engine: cycles out of ``total``, or nanoseconds if ``total`` is None."""

    busy: int
    total: int | None = None
    capacity: int = 1


class DrmClient(NamedTuple):
    """DRM client. ``id`` is the same for all descriptors of a client, in any process."""

    id: int
    driver: str
    pci_bus_id: str | None
    used_bytes: int | None
    engines: Mapping[str, EngineTime]

    @property
    def kinds(self) -> tuple[str, ...]:
        busy = {name for name, engine in self.engines.items() if engine.busy}
        return tuple(
            kind for kind, names in (("compute", _COMPUTE_ENGINES), ("graphics", _GRAPHICS_ENGINES)) if busy & names
        )


def parse_client(text: str) -> DrmClient | None:
    """Return the client, or None without an ID: its memory could otherwise be counted twice."""
    values = dict(_key_and_value(line) for line in text.splitlines())
    number = _number(values.get("drm-client-id", ""))
    if "drm-driver" not in values or number is None:
        return None
    return DrmClient(number, values["drm-driver"], values.get("drm-pdev"), _resident_bytes(values), _engines(values))


def utilization(before: Mapping[int, DrmClient], after: Mapping[int, DrmClient], seconds: float) -> float:
    """Return the busy fraction of the busiest engine, over the clients present at both times."""
    shares: defaultdict[str, float] = defaultdict(float)
    for number, client in after.items():
        for name, engine in client.engines.items():
            earlier = before[number].engines.get(name) if number in before else None
            if earlier is None:
                continue
            total = seconds * 1e9
            if engine.total is not None:
                total = engine.total - (earlier.total or 0)
            if total > 0:
                # The counters may temporarily decrease.
                shares[name] += max(0, engine.busy - earlier.busy) / total / engine.capacity
    return min(1.0, max(shares.values(), default=0.0))


def _resident_bytes(values: Mapping[str, str]) -> int | None:
    """Return resident bytes. Kernels before 6.5 report ``memory``, and some only the requested size."""
    sizes: dict[str, dict[str, int]] = {}
    for key, value in values.items():
        match = _DEVICE_REGION.fullmatch(key)
        size = _bytes(value) if match else None
        if match and size is not None:
            sizes.setdefault(match[2], {})[match[1]] = size
    if not sizes:
        return None
    return sum(
        next(kinds[kind] for kind in ("resident", "memory", "total") if kind in kinds) for kinds in sizes.values()
    )


def _engines(values: Mapping[str, str]) -> dict[str, EngineTime]:
    engines: dict[str, EngineTime] = {}
    for key, value in values.items():
        for prefix in ("drm-engine-", "drm-cycles-"):
            name = key.removeprefix(prefix)
            busy = _number(value.removesuffix(" ns")) if name != key else None
            total = _number(values.get(f"drm-total-cycles-{name}", ""))
            if busy is None or (prefix == "drm-cycles-" and total is None) or name.startswith("capacity-"):
                continue
            capacity = _number(values.get(f"drm-engine-capacity-{name}", "")) or 1
            engines[name] = EngineTime(busy, total if prefix == "drm-cycles-" else None, capacity)
    return engines


def _key_and_value(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def _bytes(value: str) -> int | None:
    number, _, unit = value.partition(" ")
    count = _number(number)
    size = None if count is None or unit not in _UNITS else count * _UNITS[unit]
    return size if size is not None and size < MAX_INTEGER else None


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else None


ClientsByProcess = Mapping[tuple[str, int], Mapping[int, DrmClient]]
"""Processes that have a client open, by PCI address and client ID."""


class DrmSource:
    """Source for DRM devices. ``sys``, ``proc`` and ``dev`` replace /sys, /proc and /dev."""

    name = "drm"

    def __init__(
        self,
        sys: str = "/sys",
        proc: str = "/proc",
        dev: str = "/dev",
        clock: Callable[[], float] = time.monotonic,
        query: Callable[[str, str], MemoryCounts] = intel_memory,
    ) -> None:
        self._sys, self._proc, self._dev, self._clock, self._query = sys, proc, dev, clock, query
        self._descriptors = OpenDeviceNodes(("/dev/dri/",), proc)
        self._table = ProcessTable(proc)
        self._pid_max = self._table.pid_max()
        self._kfd = Kfd(sys)
        self._seen: dict[str, tuple[int, str]] = {}
        """Index and name of every device that was present once; it is reported as lost if it disappears."""
        self._busy: tuple[float, dict[str, dict[int, DrmClient]]] = (0.0, {})
        self._energy: dict[str, tuple[float, float]] = {}

    def open(self) -> None:
        if not any(drm_devices(self._sys)):
            reason = "no_driver" if may_have_gpu(self._sys, self._dev) else NO_DEVICE
            raise SourceUnavailable(reason, f"no amdgpu, i915 or xe device in /sys/class/drm: {remedy(reason)}")

    def close(self) -> None:
        pass  # nothing stays open between two readings

    def read(self) -> Reading:
        faults, now = FaultCollector(), self._clock()
        present = {device.uuid: device for device in drm_devices(self._sys)}
        for device in present.values():
            self._seen.setdefault(device.uuid, (len(self._seen), device.name()))
        awake = {device.uuid for device in present.values() if not device.is_powered_down()}
        clients_by_process = self._clients_by_process(device for device in present.values() if device.uuid in awake)
        compute = self._kfd.read()
        pids = {pid for by_pid in clients_by_process.values() for pid in by_pid}
        identities = self._table.read(pids.union(*compute.values()))
        clients = _clients_with_pids(clients_by_process, identities)
        devices = []
        for device in present.values():
            if device.uuid not in awake:
                devices.append(self._device(device, MemoryCounts(), None, Sensors()))
                continue
            memory = self._memory(device, faults)
            with_pids = clients.get(device.pci_bus_id, {})
            rocm = compute.get(device.pci_bus_id, {})
            by_pid = self._usages(device, memory, with_pids, rocm, faults)
            utilization_by_pid = {pid: ratio for pid, ratio in self._used_by(device, with_pids, now) if pid not in rocm}
            listed = None if by_pid is None else process_usages(by_pid, identities, utilization_by_pid)
            by_id = {number: client for number, (_, client) in with_pids.items()}
            devices.append(self._device(device, memory, listed, self._sensors(device, by_id, now, faults)))
            if self._descriptors.hidden:
                detail = f"{plural(self._descriptors.hidden, 'process')} of other users can't be inspected"
                faults.add(device.uuid, "processes_hidden", detail)
        for uuid in self._seen.keys() - present.keys():
            faults.add(
                uuid, "lost", f"device {self._seen[uuid][0]} {self._seen[uuid][1]} is missing from /sys/class/drm"
            )
        self._busy = now, {pci: {n: client for n, (_, client) in each.items()} for pci, each in clients.items()}
        devices.sort(key=lambda device: device.index)
        return Reading(
            devices=tuple(devices), faults=faults.of_source(self.name), driver_version=f"Linux {os.uname().release}"
        )

    def _device(
        self, device: DrmDevice, memory: MemoryCounts, processes: tuple[ProcessUsage, ...] | None, sensors: Sensors
    ) -> DeviceReading:
        index, name = self._seen[device.uuid]
        return DeviceReading(
            uuid=device.uuid,
            index=index,
            name=name,
            vendor=device.vendor,
            pci_bus_id=device.pci_bus_id,
            size_bytes=memory.size_bytes,
            used_bytes=memory.used_bytes,
            free_bytes=memory.free_bytes,
            unified=device.unified,
            processes=processes,
            sensors=sensors,
            source=self.name,
        )

    def _memory(self, device: DrmDevice, faults: FaultCollector) -> MemoryCounts:
        counts = device.memory(faults)
        if device.vendor == "intel" and counts.used_bytes is None and device.render_node:
            try:
                queried = self._query(device.driver, f"{self._dev}/dri/{device.render_node}")
            except OSError as error:
                faults.add(device.uuid, fault_kind_of(error), f"memory: {error.strerror}")
            else:
                counts = queried if queried.size_bytes else counts
                if queried.size_bytes and queried.used_bytes is None:
                    faults.add(device.uuid, "no_permission", "used memory: the driver requires CAP_PERFMON")
        return valid_memory(faults, device.uuid, counts)

    def _sensors(
        self, device: DrmDevice, clients: Mapping[int, DrmClient], now: float, faults: FaultCollector
    ) -> Sensors:
        values: dict[str, Any] = {**device.sensors(faults)}
        before, clients_before = self._busy
        if "gpu_utilization_ratio" not in values and before and not self._descriptors.hidden and now > before:
            values["gpu_utilization_ratio"] = utilization(
                clients_before.get(device.pci_bus_id, {}), clients, now - before
            )
        if (energy := values.get("energy_joules")) is not None:
            joules, at = self._energy.get(device.uuid, (energy, now))
            self._energy[device.uuid] = energy, now
            if now > at and energy >= joules:
                values["power_watts"] = (energy - joules) / (now - at)
        return Sensors(**values)

    def _used_by(
        self, device: DrmDevice, with_pids: Mapping[int, tuple[int, DrmClient]], now: float
    ) -> Iterator[tuple[int, float]]:
        """Yield each process's share of device time since the previous reading.

        Processes that use KFD are excluded, because no file reports their work.
        """
        before, clients_before = self._busy
        earlier = clients_before.get(device.pci_bus_id, {})
        for pid in {pid for pid, _ in with_pids.values()} if now > before else ():
            clients = {number: client for number, (client_pid, client) in with_pids.items() if client_pid == pid}
            if any(client.engines and number in earlier for number, client in clients.items()):
                yield pid, utilization(earlier, clients, now - before)

    def _clients_by_process(self, awake: Iterable[DrmDevice]) -> ClientsByProcess:
        by_node = {f"/dev/dri/{node}": device for device in awake for node in device.nodes}
        by_address = {device.pci_bus_id: device for device in by_node.values()}
        clients: dict[tuple[str, int], dict[int, DrmClient]] = {}
        for pid, nodes in self._descriptors.read().items():
            for node in nodes:
                client = self._client(pid, node) if node.path in by_node else None
                if client is None:
                    continue
                # In a container the node may have the name of another device.
                device = by_address.get(client.pci_bus_id) if client.pci_bus_id else by_node[node.path]
                if device is not None and device.driver == client.driver:
                    clients.setdefault((device.pci_bus_id, client.id), {})[pid] = client
        return clients

    def _client(self, pid: int, node: DeviceNode) -> DrmClient | None:
        try:
            with open(f"{self._proc}/{pid}/fdinfo/{node.descriptor}", encoding="ascii", errors="replace") as file:
                return parse_client(file.read(16384))
        except OSError:
            return None  # closed in the meantime, or not readable

    def _usages(
        self,
        device: DrmDevice,
        memory: MemoryCounts,
        clients: Mapping[int, tuple[int, DrmClient]],
        compute: Mapping[int, int],
        faults: FaultCollector,
    ) -> dict[int, DriverUsage] | None:
        """Return the usage per pid. A process's clients are added; the KFD count is part of that sum, or larger if
        fdinfo is hidden."""
        size_bytes = memory.size_bytes or MAX_INTEGER - 1
        listed = (
            ListedProcess(kind, (number, 0), pid, client.used_bytes)
            for number, (pid, client) in clients.items()
            for kind in client.kinds or ("graphics",)
        )
        by_pid = valid_usages(faults, device.uuid, listed, size_bytes, self._pid_max)
        rocm = valid_usages(
            faults,
            device.uuid,
            (ListedProcess("compute", (0, 0), *entry) for entry in compute.items()),
            size_bytes,
            self._pid_max,
        )
        if by_pid is None or rocm is None:
            return None
        for pid, usage in rocm.items():
            total = by_pid.setdefault(pid, usage)
            total.used_bytes = max(total.used_bytes or 0, usage.used_bytes or 0)
            total.kinds = tuple(sorted({*total.kinds, *usage.kinds}))
        return by_pid


def _clients_with_pids(
    clients_by_process: ClientsByProcess, identities: Mapping[int, ProcessIdentity]
) -> dict[str, dict[int, tuple[int, DrmClient]]]:
    """Return each client by PCI address and ID, with the pid of the oldest process that shares its descriptor."""
    clients: dict[str, dict[int, tuple[int, DrmClient]]] = {}
    for (address, number), by_pid in clients_by_process.items():
        pid = min(by_pid, key=lambda pid: (identities[pid].start_ticks or MAX_INTEGER, pid))
        clients.setdefault(address, {})[number] = (pid, by_pid[pid])
    return clients
