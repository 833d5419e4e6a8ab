"""AMD or Intel device and its files in sysfs, by driver.

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
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from typing import NamedTuple

from gpumond.devices import INTEL_INTEGRATED
from gpumond.devices.validation import IMPOSSIBLE, MemoryCounts, FaultCounter
from gpumond.facts.errors import FaultKind
from gpumond.facts.messages import clean

DRIVERS = {"amdgpu": "amd", "i915": "intel", "xe": "intel"}
"""Vendor by kernel driver."""

PCI_IDS = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")

_ABSENT = {errno.ENOENT, errno.EOPNOTSUPP, errno.ENODATA, errno.EINVAL}
"""Errors that drivers return for a sensor that the device does not have."""


class _Gauge(NamedTuple):
    """Value from the first existing file in the device's directory; integers up to ``limit``."""

    field: str
    files: tuple[str, ...]
    limit: int
    per: float = 1.0


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
        unique = (self._read_text("device/unique_id") or "").removeprefix("0x").lower()
        self.unique_id = unique if re.fullmatch(r"[0-9a-f]{1,32}", unique) and unique.strip("0") else None
        self.uuid = f"AMD-{self.unique_id}" if self.unique_id else f"DRM-pci-{pci_bus_id}"
        # The host memory of an integrated AMD GPU counts as device memory, because the host cannot use it.
        self.unified = self.vendor == "intel" and pci_bus_id == INTEL_INTEGRATED
        watchers = glob(f"{directory}/device/hwmon/hwmon*")
        own = [watcher for watcher in watchers if (_content(f"{watcher}/name") or "").strip() == driver]
        self._hwmon = (own or watchers or [f"{directory}/device/hwmon"])[0]

    @property
    def render_node(self) -> str | None:
        return next((node for node in sorted(self.nodes) if node.startswith("renderD")), None)

    def name(self, pci_ids: tuple[str, ...] = PCI_IDS) -> str:
        """Return the name from the driver, else from the PCI ID database, else the numeric IDs."""
        vendor, device = (((self._read_text(f"device/{file}") or "0x?")[2:]) for file in ("vendor", "device"))
        listed = next(filter(None, (_listed(path, vendor, device) for path in pci_ids)), None)
        return clean(self._read_text("device/product_name") or listed or f"{self.vendor} {vendor}:{device}")

    def asleep(self) -> bool:
        """Return True if the kernel has powered the device down; reading it would power it up."""
        return self._read_text("device/power/runtime_status") == "suspended"

    def memory(self, tally: FaultCounter) -> MemoryCounts:
        if self.driver == "amdgpu":
            size, used = (self._number(f"device/mem_info_vram_{word}", 2**63, tally) for word in ("total", "used"))
            free = size - used if size is not None and used is not None and used <= size else None
            return MemoryCounts(size, used, free)
        tiles = [self._number(os.path.relpath(tile, self._directory), 2**63, tally) for tile in self._tiles()]
        size = sum(tile for tile in tiles if tile) or self._number("lmem_total_bytes", 2**63, tally)
        free = self._number("lmem_avail_bytes", 2**63, tally) if size else None
        return MemoryCounts(size, size - free if size and free is not None and free <= size else None, free)

    def sensors(self, tally: FaultCounter) -> dict[str, float]:
        values: dict[str, float] = {}
        for field, files, limit, per in _GAUGES[self.driver]:
            for file in files:
                number = self._number(file, limit, tally)
                if number is not None:
                    values[field] = number / per
                    break
        for field, table in (("sm_clock_hertz", "pp_dpm_sclk"), ("memory_clock_hertz", "pp_dpm_mclk")):
            current = re.search(r"(\d{1,6})mhz \*", (self._read_text(f"device/{table}") or "").lower())
            if field not in values and current:
                values[field] = int(current[1]) * 1e6
        return values

    def _tiles(self) -> list[str]:
        return sorted(glob(f"{self._directory}/device/tile*/physical_vram_size_bytes"))

    def _number(self, file: str, limit: int, tally: FaultCounter) -> int | None:
        path = f"{self._directory}/{file}".replace(f"{self._directory}/HWMON", self._hwmon)
        try:
            text = _content(path)
        except OSError as error:
            tally.add(self.uuid, kind_of(error), f"{file}: {error.strerror}")
            return None
        if text is None:
            return None
        try:
            number = int(text)
        except ValueError:
            number = -1
        if 0 <= number <= limit:
            return number
        tally.add(self.uuid, IMPOSSIBLE, f"{file} {text.strip()[:32]}")
        return None

    def _read_text(self, file: str) -> str | None:
        try:
            text = _content(f"{self._directory}/{file}")
        except OSError:
            return None
        return text.strip() if text else None


def cards(root: str) -> Iterator[DrmDevice]:
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
    return any(cards(sys))


def kind_of(error: OSError) -> FaultKind:
    return "no_permission" if error.errno in (errno.EACCES, errno.EPERM) else "unreadable"


def _content(path: str) -> str | None:
    """Return the content of a file, or None if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def _listed(path: str, vendor: str, device: str) -> str | None:
    """Return the device's name from a pci.ids file, in which a vendor's devices are indented by one tab."""
    here = False
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.startswith(("\t", "#")):
                    here = line.startswith(f"{vendor} ")
                elif here and line.startswith(f"\t{device} "):
                    return line[len(device) + 1 :].strip()
    except OSError:
        pass
    return None


Usages = Mapping[str, Mapping[int, int]]
"""Bytes by PCI address and pid."""


class Kfd:
    """Reader of KFD files. ``root`` replaces /sys."""

    def __init__(self, root: str = "/sys") -> None:
        self._root = f"{root}/class/kfd/kfd"
        self._devices: dict[str, str] = {}

    def read(self) -> Usages:
        usages: dict[str, dict[int, int]] = {}
        for pid, gpu, size in self._used():
            if gpu not in self._devices:
                self._devices = dict(self._topology())
            if gpu in self._devices:
                by_pid = usages.setdefault(self._devices[gpu], {})
                by_pid[pid] = by_pid.get(pid, 0) + size  # partitions of one device are added
        return usages

    def _used(self) -> Iterator[tuple[int, str, int]]:
        for pid in _names(f"{self._root}/proc"):
            for file in _names(f"{self._root}/proc/{pid}"):
                size = _text(f"{self._root}/proc/{pid}/{file}") if file.startswith("vram_") else ""
                if pid.isdecimal() and size.isdecimal():
                    yield int(pid), file.removeprefix("vram_"), int(size)

    def _topology(self) -> Iterator[tuple[str, str]]:
        for node in _names(f"{self._root}/topology/nodes"):
            directory = f"{self._root}/topology/nodes/{node}"
            lines = (line.split() for line in _text(f"{directory}/properties").splitlines())
            properties = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
            where = properties.get("location_id", 0)
            if where:
                bus, device, function = where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7
                address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
                yield _text(f"{directory}/gpu_id"), address


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(65536).strip()
    except OSError:
        return ""  # the process or its queue no longer exists


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
