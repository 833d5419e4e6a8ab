"""One moment of a machine, as observed: devices, processes, agents' reports and faults."""

from __future__ import annotations

from dataclasses import dataclass

from gpumond.model.pools import FlushPolicy, HostPool, PoolUsage
from gpumond.model.program import SILENT, Ending, Program
from gpumond.model.sensors import NO_SENSORS, Sensors

MISSED_LIMIT = 3
"""After so many readings without a device, its values are no longer shown."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process on one device, as the driver lists it; identity, comm, uid and what follows come from /proc.

    ``start_ticks`` is None when /proc does not know the pid (it is gone, or in another PID namespace).
    ``used_bytes`` is None where the driver does not say. Kind ``holder`` is a process that the driver does
    not list, but that keeps the device open while much of its memory has no owner.
    ``state``: alive, stopped, uninterruptible (for seconds in a system call that no signal ends), zombie
    (ended, its parent has not taken notice), gone (the driver lists a pid that no longer is).
    ``utilization_ratio``: how busy it kept the busiest of the device's engines lately, where the driver tells that of
    each process. ``idle_seconds``: for how long it ran nothing there, as far as it was watched.
    ``orphaned``: whoever started it is gone, and no service manager keeps it; None where that cannot be told.
    """

    pid: int
    start_ticks: int | None
    used_bytes: int | None
    kinds: tuple[str, ...] = ()
    comm: str | None = None
    uid: int | None = None
    user: str | None = None
    container: str | None = None
    container_name: str | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None
    unit: str | None = None
    slurm_job: str | None = None
    state: str | None = None
    utilization_ratio: float | None = None
    orphaned: bool | None = None
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at one moment.

    ``used_bytes`` excludes what the driver reserves for itself where the driver can tell
    (``reserved_bytes``); ``processes`` is None where the driver lists none at all.
    ``unified`` memory is the host's: its size is that of the machine, ``free_bytes`` what the kernel could still
    give, ``used_bytes`` the sum of the processes, so that the three do not add up.
    ``gpu_instance_id`` is set on MIG instances.
    ``missed`` counts the ticks in a row that brought nothing new: the values are then of the
    last good reading, and all None from ``MISSED_LIMIT`` on. ``up`` is False at once if the device
    was asked and is at fault; a reading that is merely late says nothing against it yet.
    ``idle_seconds``: for how long nothing ran on it, as far as it was watched. ``source``: by which it was read, if
    there may be several.
    """

    uuid: str
    index: int
    name: str = ""
    vendor: str = ""
    pci_bus_id: str = ""
    parent_uuid: str | None = None
    size_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    unified: bool = False
    processes: tuple[ProcessUsage, ...] | None = None
    sensors: Sensors = NO_SENSORS
    missed: int = 0
    up: bool = True
    gpu_instance_id: int | None = None
    idle_seconds: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that could not be observed. ``device_uuid`` is None if it concerns the whole source."""

    source: str
    kind: str
    device_uuid: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class XidErrors:
    """How often a device reported one XID error, and when last, since the daemon began to listen."""

    device_uuid: str
    xid: int
    count: int
    last_seen_at: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What one source says at one moment. ``xids`` outlive the device that reported them."""

    devices: tuple[DeviceReading, ...] = ()
    faults: tuple[Fault, ...] = ()
    driver_version: str | None = None
    library_version: str | None = None
    cuda_version: str | None = None
    xids: tuple[XidErrors, ...] = ()


STARTING = "starting"
"""The reason while a source has not answered for the first time."""

RELEASED = "released"
"""The reason while the driver has been let go of on purpose: nothing is known, and nothing is wrong."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """How the source itself is doing. ``reason`` is one word, empty while it is up."""

    name: str
    up: bool
    responsive: bool
    reason: str = ""
    detail: str = ""
    driver_version: str | None = None
    library_version: str | None = None
    cuda_version: str | None = None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The newest report of one process; pid, start_ticks and uid come from the kernel.

    ``uses_device``: it holds device memory or has held some. A loader's worker or a launcher never does.
    """

    pid: int
    start_ticks: int
    uid: int
    workload: str
    age_seconds: float
    frameworks: tuple[str, ...]
    flush_policy: FlushPolicy
    pools: tuple[PoolUsage, ...]
    program: Program = SILENT
    host_pools: tuple[HostPool, ...] = ()
    uses_device: bool = True


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """A program whose agent said goodbye, and how it ended."""

    pid: int
    start_ticks: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All facts of one tick. Not one instant: every report carries its age.

    ``private_pid_namespace``: the daemon does not see the host's processes, whose pids the driver may list.
    ``ends``: the programs that ended since the snapshot before.
    """

    seq: int
    taken_at: float
    elapsed_seconds: float
    source: SourceState
    devices: tuple[DeviceReading, ...] = ()
    reports: tuple[AgentReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    xids: tuple[XidErrors, ...] = ()
    store_writable: bool | None = None
    private_pid_namespace: bool | None = None
    ends: tuple[ProgramEnd, ...] = ()
