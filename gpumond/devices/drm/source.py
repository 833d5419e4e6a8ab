"""AMD and Intel devices (amdgpu, i915, xe), read from kernel files without vendor libraries or daemons.

Memory, sensors and clocks are read from sysfs, the memory of an Intel device with a query, usage from /proc/PID/fdinfo
and, for ROCm, from KFD. fdinfo has the keys and units of Documentation/gpu/drm-usage-stats.rst of the kernel: amdgpu
has the region ``vram`` and engine times in nanoseconds; i915 ``local0`` and nanoseconds; xe ``vram0`` and both busy and
total cycles.

Without CAP_SYS_PTRACE, the kernel shows fdinfo of the daemon's own user only. Other processes' memory is then
unattributed, utilization that derives from their busy time is absent, and a fault reports this. A device that the kernel
has powered down is listed without values. Does not cover partitions of an MI300.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpumond.devices import may_have_gpu
from gpumond.devices.drm.devices import DrmDevice, Kfd, cards, intel_memory, kind_of
from gpumond.devices.process.device_nodes import Node, OpenDeviceNodes
from gpumond.devices.process.procfs import ProcessOwner, ProcessTable
from gpumond.devices.validation import Listed, MemoryCounts, FaultCounter, Usage, memory, processes, usages
from gpumond.facts.errors import SourceUnavailable
from gpumond.facts.messages import MAX_INTEGER
from gpumond.facts.remedies import remedy
from gpumond.facts.sensors import Sensors
from gpumond.facts.snapshot import NO_DEVICE, DeviceReading, ProcessUsage, Reading

_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_LOCAL = re.compile(r"drm-(resident|memory|total)-((?:vram|local)\d*)")
"""Regions in device memory; ``system``, ``gtt`` and ``cpu`` are host memory."""
_COMPUTE = {"compute", "ccs"}
_GRAPHICS = {"gfx", "render", "rcs"}


class EngineTime(NamedTuple):
    """Busy time of an engine: cycles out of ``total``, or nanoseconds if ``total`` is None."""

    busy: int
    total: int | None = None
    capacity: int = 1


class Client(NamedTuple):
    """DRM client. ``id`` is the same for all descriptors of a client, in any process."""

    id: int
    driver: str
    pci_bus_id: str | None
    used_bytes: int | None
    engines: Mapping[str, EngineTime]

    @property
    def kinds(self) -> tuple[str, ...]:
        busy = {name for name, engine in self.engines.items() if engine.busy}
        return tuple(kind for kind, names in (("compute", _COMPUTE), ("graphics", _GRAPHICS)) if busy & names)


def client(text: str) -> Client | None:
    """Return the client, or None without an ID: its memory could otherwise be counted twice."""
    values = dict(_pair(line) for line in text.splitlines())
    number = _number(values.get("drm-client-id", ""))
    if "drm-driver" not in values or number is None:
        return None
    return Client(number, values["drm-driver"], values.get("drm-pdev"), _used(values), _engines(values))


def utilization(before: Mapping[int, Client], now: Mapping[int, Client], seconds: float) -> float:
    """Return the busy fraction of the busiest engine, over the clients present at both times."""
    shares: defaultdict[str, float] = defaultdict(float)
    for number, client in now.items():
        for name, engine in client.engines.items():
            earlier = before[number].engines.get(name) if number in before else None
            if earlier is None:
                continue
            whole = seconds * 1e9
            if engine.total is not None:
                whole = engine.total - (earlier.total or 0)
            if whole > 0:
                # The counters may temporarily decrease.
                shares[name] += max(0, engine.busy - earlier.busy) / whole / engine.capacity
    return min(1.0, max(shares.values(), default=0.0))


def _used(values: Mapping[str, str]) -> int | None:
    """Return resident bytes. Kernels before 6.5 report ``memory``, and some only the requested size."""
    sizes: dict[str, dict[str, int]] = {}
    for key, value in values.items():
        match = _LOCAL.fullmatch(key)
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


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def _bytes(value: str) -> int | None:
    number, _, unit = value.partition(" ")
    count = _number(number)
    size = None if count is None or unit not in _UNITS else count * _UNITS[unit]
    return size if size is not None and size < MAX_INTEGER else None


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else None


Shared = Mapping[tuple[str, int], Mapping[int, Client]]
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
        self._busy: tuple[float, dict[str, dict[int, Client]]] = (0.0, {})
        self._energy: dict[str, tuple[float, float]] = {}

    def open(self) -> None:
        if not any(cards(self._sys)):
            reason = "no_driver" if may_have_gpu(self._sys, self._dev) else NO_DEVICE
            raise SourceUnavailable(reason, f"no amdgpu, i915 or xe device in /sys/class/drm: {remedy(reason)}")

    def close(self) -> None:
        pass  # nothing stays open between two readings

    def read(self) -> Reading:
        tally, now = FaultCounter(), self._clock()
        present = {card.uuid: card for card in cards(self._sys)}
        for card in present.values():
            self._seen.setdefault(card.uuid, (len(self._seen), card.name()))
        awake = {card.uuid for card in present.values() if not card.asleep()}
        shared = self._shared(card for card in present.values() if card.uuid in awake)
        compute = self._kfd.read()
        pids = {pid for by_pid in shared.values() for pid in by_pid}
        identities = self._table.read(pids.union(*compute.values()))
        clients = _owned(shared, identities)
        devices = []
        for card in present.values():
            if card.uuid not in awake:
                devices.append(self._device(card, MemoryCounts(), None, Sensors()))
                continue
            size = self._memory(card, tally)
            own = clients.get(card.pci_bus_id, {})
            rocm = compute.get(card.pci_bus_id, {})
            by_pid = self._usages(card, size, own, rocm, tally)
            used_by = {pid: ratio for pid, ratio in self._used_by(card, own, now) if pid not in rocm}
            listed = None if by_pid is None else processes(by_pid, identities, used_by)
            working = {number: entry for number, (_, entry) in own.items()}
            devices.append(self._device(card, size, listed, self._sensors(card, working, now, tally)))
            if self._descriptors.hidden:
                detail = f"{self._descriptors.hidden} processes of other users cannot be inspected"
                tally.add(card.uuid, "processes_hidden", detail)
        for uuid in self._seen.keys() - present.keys():
            tally.add(
                uuid, "lost", f"device {self._seen[uuid][0]} {self._seen[uuid][1]} is missing from /sys/class/drm"
            )
        self._busy = now, {pci: {n: entry for n, (_, entry) in own.items()} for pci, own in clients.items()}
        devices.sort(key=lambda device: device.index)
        return Reading(
            devices=tuple(devices), faults=tally.faults(self.name), driver_version=f"Linux {os.uname().release}"
        )

    def _device(
        self, card: DrmDevice, size: MemoryCounts, processes: tuple[ProcessUsage, ...] | None, sensors: Sensors
    ) -> DeviceReading:
        index, name = self._seen[card.uuid]
        return DeviceReading(
            uuid=card.uuid,
            index=index,
            name=name,
            vendor=card.vendor,
            pci_bus_id=card.pci_bus_id,
            size_bytes=size.size_bytes,
            used_bytes=size.used_bytes,
            free_bytes=size.free_bytes,
            unified=card.unified,
            processes=processes,
            sensors=sensors,
            source=self.name,
        )

    def _memory(self, card: DrmDevice, tally: FaultCounter) -> MemoryCounts:
        counts = card.memory(tally)
        if card.vendor == "intel" and counts.used_bytes is None and card.render_node:
            try:
                queried = self._query(card.driver, f"{self._dev}/dri/{card.render_node}")
            except OSError as error:
                tally.add(card.uuid, kind_of(error), f"memory: {error.strerror}")
            else:
                counts = queried if queried.size_bytes else counts
                if queried.size_bytes and queried.used_bytes is None:
                    tally.add(card.uuid, "no_permission", "used memory: the driver requires CAP_PERFMON")
        return memory(tally, card.uuid, counts)

    def _sensors(self, card: DrmDevice, clients: Mapping[int, Client], now: float, tally: FaultCounter) -> Sensors:
        values: dict[str, Any] = {**card.sensors(tally)}
        before, known = self._busy
        if "gpu_utilization_ratio" not in values and before and not self._descriptors.hidden and now > before:
            values["gpu_utilization_ratio"] = utilization(known.get(card.pci_bus_id, {}), clients, now - before)
        if (energy := values.get("energy_joules")) is not None:
            joules, at = self._energy.get(card.uuid, (energy, now))
            self._energy[card.uuid] = energy, now
            if now > at and energy >= joules:
                values["power_watts"] = (energy - joules) / (now - at)
        return Sensors(**values)

    def _used_by(
        self, card: DrmDevice, own: Mapping[int, tuple[int, Client]], now: float
    ) -> Iterator[tuple[int, float]]:
        """Yield each process's share of device time since the previous reading.

        Processes that use KFD are excluded, because no file reports their work.
        """
        before, known = self._busy
        earlier = known.get(card.pci_bus_id, {})
        for pid in {pid for pid, _ in own.values()} if now > before else ():
            clients = {number: entry for number, (owner, entry) in own.items() if owner == pid}
            if any(entry.engines and number in earlier for number, entry in clients.items()):
                yield pid, utilization(earlier, clients, now - before)

    def _shared(self, awake: Iterable[DrmDevice]) -> Shared:
        by_node = {f"/dev/dri/{node}": card for card in awake for node in card.nodes}
        by_address = {card.pci_bus_id: card for card in by_node.values()}
        shared: dict[tuple[str, int], dict[int, Client]] = {}
        for pid, nodes in self._descriptors.read().items():
            for node in nodes:
                entry = self._client(pid, node) if node.path in by_node else None
                if entry is None:
                    continue
                # In a container the node may have the name of another device.
                card = by_address.get(entry.pci_bus_id) if entry.pci_bus_id else by_node[node.path]
                if card is not None and card.driver == entry.driver:
                    shared.setdefault((card.pci_bus_id, entry.id), {})[pid] = entry
        return shared

    def _client(self, pid: int, node: Node) -> Client | None:
        try:
            with open(f"{self._proc}/{pid}/fdinfo/{node.descriptor}", encoding="ascii", errors="replace") as file:
                return client(file.read(16384))
        except OSError:
            return None  # closed in the meantime, or not readable

    def _usages(
        self,
        card: DrmDevice,
        size: MemoryCounts,
        own: Mapping[int, tuple[int, Client]],
        compute: Mapping[int, int],
        tally: FaultCounter,
    ) -> dict[int, Usage] | None:
        """Return the usage per pid. A process's clients are added; the KFD count is part of that sum, or larger if
        fdinfo is hidden."""
        limit = size.size_bytes or MAX_INTEGER - 1
        listed = (
            Listed(kind, (number, 0), pid, entry.used_bytes)
            for number, (pid, entry) in own.items()
            for kind in entry.kinds or ("graphics",)
        )
        by_pid = usages(tally, card.uuid, listed, limit, self._pid_max)
        rocm = usages(
            tally, card.uuid, (Listed("compute", (0, 0), *entry) for entry in compute.items()), limit, self._pid_max
        )
        if by_pid is None or rocm is None:
            return None
        for pid, usage in rocm.items():
            total = by_pid.setdefault(pid, usage)
            total.used_bytes = max(total.used_bytes or 0, usage.used_bytes or 0)
            total.kinds = tuple(sorted({*total.kinds, *usage.kinds}))
        return by_pid


def _owned(shared: Shared, identities: Mapping[int, ProcessOwner]) -> dict[str, dict[int, tuple[int, Client]]]:
    """Return the owner of each client by PCI address and ID: the oldest process that shares its descriptor."""
    owned: dict[str, dict[int, tuple[int, Client]]] = {}
    for (address, number), by_pid in shared.items():
        pid = min(by_pid, key=lambda pid: (identities[pid].start_ticks or MAX_INTEGER, pid))
        owned.setdefault(address, {})[number] = (pid, by_pid[pid])
    return owned
