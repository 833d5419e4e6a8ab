"""Driver without a device: a C libnvidia-ml.so.1 that answers from a file, and the file's writer.

    driver = FakeDriver(tmp_path, library, devices=machine(8, pids=pids))
    subprocess.Popen([...], env={**os.environ, **driver.env})
    driver.devices[2].used_bytes = 5 << 30
    driver.lose(3)
    driver.write()                   # running programs see it in their next call

The library is chosen at process start, so whatever uses it runs in a subprocess.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

NOT_AVAILABLE = 2**64 - 1
"""Value that NVML returns for unknown sizes."""

NO_INSTANCE = 2**32 - 1
GIB = 1 << 30
MIB = 1 << 20
KINDS = {"compute": 1, "graphics": 2, "mps": 4}
FOREVER = 86400.0


def build(directory: Path) -> Path:
    """Compile the library into ``directory`` and return its path; requires ``cc``."""
    library = directory / "libnvidia-ml.so.1"
    sources = [str(Path(__file__).with_name(name)) for name in ("nvml.c", "sensors.c", "world.c")]
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    flags = ["-std=gnu11", "-O2", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["cc", *flags, *warnings, "-o", str(library), *sources], check=True)
    return library


@dataclass
class Process:
    pid: int
    used_bytes: int = NOT_AVAILABLE
    kinds: tuple[str, ...] = ("compute",)
    gpu_instance: int = NO_INSTANCE
    compute_instance: int = NO_INSTANCE
    utilization: int | None = None
    """Recent utilization in percent; None: no sample."""


@dataclass
class Device:
    """Device or, in ``instances``, MIG instance. A number that is None is not supported.

    ``free_bytes`` None: the rest of total. ``total_bytes`` None: no memory information, as on unified memory. Units are
    NVML's unless the name states them: MHz, mW, mJ, percent, KB/s.
    """

    uuid: str
    name: str = "NVIDIA H200"
    pci_bus_id: str = ""
    total_bytes: int | None = 141 * GIB
    reserved_bytes: int = 512 * MIB
    used_bytes: int = 0
    free_bytes: int | None = None
    minor: int | None = None
    gpu_utilization: int | None = None
    memory_utilization: int | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    max_sm_clock: int | None = 1980
    max_memory_clock: int | None = 3201
    temperature: int | None = None
    power: int | None = None
    power_limit: int | None = 700_000
    energy: int | None = None
    performance_state: int | None = 0
    fan: int | None = None
    ecc_corrected: int | None = 0
    ecc_uncorrected: int | None = 0
    pcie_transmit: int | None = 0
    pcie_receive: int | None = 0
    encoder: int | None = 0
    decoder: int | None = 0
    throttle: int | None = 0
    ecc_corrected_aggregate: int | None = 0
    ecc_uncorrected_aggregate: int | None = 0
    memory_temperature: int | None = None
    slowdown_temperature: int | None = 87
    shutdown_temperature: int | None = 92
    persistence: int | None = 1
    compute_mode: int | None = 0
    bar1_total: int | None = 256 * GIB
    bar1_used: int | None = MIB
    pcie_generation: int | None = 5
    pcie_generation_max: int | None = 5
    pcie_width: int | None = 16
    pcie_width_max: int | None = 16
    pcie_replays: int | None = 0
    retired_single_bit: int | None = None
    retired_double_bit: int | None = None
    retired_pending: int | None = None
    remapped_correctable: int | None = 0
    remapped_uncorrectable: int | None = 0
    remapped_pending: int | None = 0
    remapped_failure: int | None = 0
    nvlink_crc_flit: int | None = None
    nvlink_crc_data: int | None = None
    nvlink_replay: int | None = None
    nvlink_recovery: int | None = None
    process_sampling: int | None = None
    """1 if the driver reports utilization per process."""
    gpm_permille: int | None = None
    """Values of the two samples of a query: see nvmlGpmMetricsGet in sensors.c."""
    partition_total: int | None = None
    """Size and use that a program in a cgroup with a limit sees."""
    partition_used: int | None = None
    virtualization: int | None = None
    addressing: int | None = None
    numa_node: int | None = None
    mig_mode: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    processes: list[Process] = field(default_factory=list)
    instances: list[Device] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    """(type, data) for nvmlEventSetWait: an Xid is (8, xid). Each is returned once per write."""


_TEXTS = ("uuid", "name", "pci_bus_id")
_NUMBERS = tuple(
    entry.name
    for entry in fields(Device)
    if entry.name not in _TEXTS
    and not entry.name.endswith("_bytes")
    and entry.name not in ("processes", "instances", "events")
)


class FakeDriver:
    """Fake driver. Changes to ``devices`` and the faults take effect with ``write``."""

    def __init__(self, directory: Path, library: Path, devices: Sequence[Device] = ()) -> None:
        self.devices = list(devices)
        self.driver_version = "580.65.06"
        self.nvml_version = "13.580.65.06"
        self.cuda_version = 13000
        self.path = directory / "fakenvml.txt"
        self.log = directory / "fakenvml-calls.txt"
        self._limits = directory / "fakenvml.txt.limits"
        self.env = {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")])),
            "FAKENVML_FILE": str(self.path),
        }
        self._faults: list[str] = []
        self._checkpointed: list[tuple[Device, Process]] = []
        self.write()

    def allocate(self, pid: int, size: int, *, managed: bool = False) -> None:
        """Allocate memory of the first device for a process that it lists. ``managed``: the driver counts it as used,
        and for no process.
        """
        device = self.devices[0]
        device.used_bytes += size
        if not managed:
            next(each for each in device.processes if each.pid == pid).used_bytes += size
        self.write()

    def write(self) -> None:
        lines = [
            f"driver_version {self.driver_version}",
            f"nvml_version {self.nvml_version}",
            f"cuda_version {self.cuda_version}",
        ]
        for device in self.devices:
            lines += _describe("device", device)
            for instance in device.instances:
                lines += _describe("instance", instance)
        written = self.path.with_suffix(".new")
        written.write_bytes("\n".join([*lines, *self._faults, ""]).encode("utf-8", "surrogateescape"))
        now = time.time_ns()
        os.utime(written, ns=(now, now))  # the kernel's own timestamp is too coarse to distinguish two quick writes
        written.replace(self.path)

    def limit(self, device: int, cgroup: str, *, soft: int = 0, hard: int = NOT_AVAILABLE, used: int = 0) -> None:
        """Set the limits of a cgroup, as another program would. The driver is of version 615 from the first call on."""
        with self._limits.open("a") as file:
            file.write(f"{self.devices[device].uuid} /sys/fs/cgroup{cgroup} {soft} {hard} {used}\n")

    def limits(self, device: int, cgroup: str) -> tuple[int, int] | None:
        """Return the soft and the hard limit of a cgroup, None if it never had any."""
        lines = (line.split() for line in self._limits.read_text().splitlines())
        name = [self.devices[device].uuid, f"/sys/fs/cgroup{cgroup}"]
        found = [(int(soft), int(hard)) for *key, soft, hard, _ in lines if key == name]
        return found[-1] if found else None

    def checkpoint(self, pid: int) -> None:
        """Suspend a process as cuCheckpointProcessCheckpoint does: it is not listed, and its memory is free."""
        for device in self.devices:
            for process in [each for each in device.processes if each.pid == pid]:
                device.processes.remove(process)
                device.used_bytes -= process.used_bytes
                self._checkpointed.append((device, process))
        self.write()

    def restore(self, pid: int) -> None:
        """Resume a process."""
        for device, process in [each for each in self._checkpointed if each[1].pid == pid]:
            self._checkpointed.remove((device, process))
            device.processes.append(process)
            device.used_bytes += process.used_bytes
        self.write()

    def fail(
        self, function: str, device: int | str | None = None, *, code: int, after: int = 0, times: int = 0
    ) -> None:
        """Make the function return ``code`` after a number of calls since the write, a number of times (0: always).

        ``function`` "*" is every function. ``device`` is an index, a UUID, None for any call, or "stale" for calls with
        an invalid handle.
        """
        self._fault(function, device, "code", code, after, times)

    def missing(self, function: str) -> None:
        """Make the symbol appear missing from the library to pynvml."""
        self.fail(function, code=13)

    def lose(self, device: int | str) -> None:
        """Make the device fall off the bus."""
        self.fail("*", device, code=15)

    def hang(
        self,
        function: str = "*",
        device: int | str | None = None,
        *,
        seconds: float = FOREVER,
        after: int = 0,
        times: int = 0,
    ) -> None:
        self._fault(function, device, "hang", seconds, after, times)

    def crash(
        self, function: str = "*", device: int | str | None = None, *, signal: str = "segv", after: int = 0
    ) -> None:
        """Make the calling process crash. ``signal`` is segv or abort."""
        self._fault(function, device, signal, 0, after, 0)

    def slow(self, microseconds: float, function: str = "*", device: int | str | None = None) -> None:
        """Add this much processor time to every call."""
        self._fault(function, device, "busy", microseconds, 0, 0)

    def heal(self) -> None:
        """Remove all faults at the next write."""
        self._faults.clear()

    def count_calls(self) -> None:
        """Make programs that start from now on log their calls for ``calls``."""
        self.env["FAKENVML_CALLS"] = str(self.log)

    def calls(self) -> Counter[str]:
        """Return the number of calls per function since the last call of this method."""
        counted = Counter(self.log.read_text().split()) if self.log.exists() else Counter[str]()
        self.log.write_bytes(b"")
        return counted

    def _fault(
        self, function: str, device: int | str | None, action: str, value: float, after: int, times: int
    ) -> None:
        selector = "*" if device is None else self.devices[device].uuid if isinstance(device, int) else device
        self._faults.append(f"fault {function} {selector} {action} {value} {after} {times}")


def machine(devices: int, pids: Sequence[int] = ()) -> list[Device]:
    """Return devices with distinct values, with the pids distributed evenly."""
    share = len(pids) // devices
    return [_device(i, pids[i * share : (i + 1) * share]) for i in range(devices)]


def _device(i: int, pids: Sequence[int]) -> Device:
    share = 70 * GIB // max(1, len(pids))
    processes = [
        Process(pid, share + (1 + i) * MIB + j * 65536 + pid, utilization=1 + j % 100) for j, pid in enumerate(pids)
    ]
    return Device(
        uuid=f"GPU-{i:08x}-1111-2222-3333-444455556666",
        pci_bus_id=f"00000000:{0x10 + i:02X}:00.0",
        reserved_bytes=(600 + i) * MIB + 1,
        used_bytes=sum(process.used_bytes for process in processes) + (700 + i) * MIB + 3,
        minor=i,
        gpu_utilization=11 + i,
        memory_utilization=31 + i,
        sm_clock=1200 + i,
        memory_clock=2600 + i,
        temperature=41 + i,
        power=301_001 + i,
        energy=9_000_000_007 + i,
        max_sm_clock=1900 + i,
        max_memory_clock=3100 + i,
        power_limit=600_002 + i,
        performance_state=i % 16,
        fan=51 + i,
        encoder=1 + i,
        decoder=2 + i,
        throttle=0x4 | 0x40 << i % 4,
        memory_temperature=61 + i,
        slowdown_temperature=81 + i,
        shutdown_temperature=91 + i,
        persistence=i % 2,
        compute_mode=i % 4,
        bar1_total=(100 + i) * GIB,
        bar1_used=(3 + i) * MIB,
        pcie_generation=1 + i % 4,
        pcie_generation_max=5 + i % 2,
        pcie_width=1 << i % 4,
        pcie_width_max=16,
        pcie_receive=10_001 + i,
        pcie_transmit=20_002 + i,
        pcie_replays=101 + i,
        ecc_corrected=201 + i,
        ecc_corrected_aggregate=301 + i,
        ecc_uncorrected=401 + i,
        ecc_uncorrected_aggregate=501 + i,
        retired_single_bit=3 + i,
        retired_double_bit=4 + i,
        retired_pending=i % 2,
        remapped_correctable=601 + i,
        remapped_uncorrectable=701 + i,
        remapped_pending=i % 2,
        remapped_failure=(i + 1) % 2,
        nvlink_crc_flit=801 + i,
        nvlink_crc_data=901 + i,
        nvlink_replay=1001 + i,
        nvlink_recovery=1101 + i,
        virtualization=i % 5,
        addressing=i % 3,
        numa_node=100 + i,
        process_sampling=1,
        processes=processes,
    )


def _describe(kind: str, device: Device) -> list[str]:
    lines = [f"{kind} {device.uuid}", f"name {device.name}"]
    if device.pci_bus_id:
        lines.append(f"pci_bus_id {device.pci_bus_id}")
    if device.total_bytes is not None:
        free = device.free_bytes
        if free is None:
            free = max(0, device.total_bytes - device.reserved_bytes - device.used_bytes)
        lines += [f"total {device.total_bytes}", f"reserved {device.reserved_bytes}"]
        lines += [f"used {device.used_bytes}", f"free {free}"]
    numbers = ((key, getattr(device, key)) for key in _NUMBERS)
    lines += [f"{key} {number}" for key, number in numbers if number is not None]
    lines += [f"event {event} {data}" for event, data in device.events]
    # The driver also lists the processes of its instances on the device.
    owners = [device, *device.instances]
    return lines + [_process_line(process) for owner in owners for process in owner.processes]


def _process_line(process: Process) -> str:
    kinds = sum(KINDS[kind] for kind in process.kinds)
    utilization = -1 if process.utilization is None else process.utilization
    instances = f"{process.gpu_instance} {process.compute_instance}"
    return f"process {kinds} {process.pid} {process.used_bytes} {instances} {utilization}"
