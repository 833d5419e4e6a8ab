"""The observed state of a machine: devices, processes, agents' reports and faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

from gpumond.facts.engines import EngineReading
from gpumond.facts.errors import FaultKind, ReturnCode
from gpumond.facts.fast_dataclass import fast_dataclass
from gpumond.facts.pools import FlushPolicy, HostPool, PoolUsage
from gpumond.facts.program import EMPTY_PROGRAM, MAX_PID, Ending, HasProcessKey, PoolLimit, ProcessKey, Program
from gpumond.facts.quota import EffectiveQuota, GrantedRequest
from gpumond.facts.suspension import MemoryHolder, SuspendedProgram

THROTTLE_REASONS: tuple[str, ...] = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clocks_setting",
    "board_limit",
    "reliability",
)
"""Reasons for which a clock is not at its maximum; nvidia-smi's names, in the order of NVML's bits."""


MAX_SHOWN_HOLDERS = 3

VIRTUALIZATION_MODES = ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga")
"""``vgpu``: a part of a device, in a virtual machine; ``host_*``: the host of such machines. In NVML's order."""

ADDRESSING_MODES = ("none", "hmm", "ats")
"""Shared addresses of device and host: none, by software, or by hardware that keeps both coherent. In NVML's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """Measurements and settings of a device, and its hardware's error counters.

    The ECC counters start when the driver is loaded (volatile) or with the device's lifetime (aggregate).
    ``performance_state`` is 0 (fastest) to 15. ``throttle_reasons`` are the active ones of ``THROTTLE_REASONS``.
    ``xid_events`` is True if the driver reports Xid errors as they occur. ``numa_node``: the host's NUMA node
    that is the device's memory; ``file_cache_bytes``: the kernel's file cache there.
    """

    gpu_utilization_ratio: float | None = None
    memory_controller_utilization_ratio: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    gpu_temperature_celsius: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    encoder_utilization_ratio: float | None = None
    decoder_utilization_ratio: float | None = None
    sm_clock_max_hertz: float | None = None
    memory_clock_max_hertz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    performance_state: int | None = None
    memory_temperature_celsius: float | None = None
    slowdown_temperature_celsius: float | None = None
    shutdown_temperature_celsius: float | None = None
    power_limit_watts: float | None = None
    fan_speed_ratio: float | None = None
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    bar1_size_bytes: int | None = None
    bar1_used_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_receive_bytes_per_second: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    pcie_replays: int | None = None
    ecc_corrected_volatile: int | None = None
    ecc_corrected_aggregate: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    retired_pages_single_bit: int | None = None
    retired_pages_double_bit: int | None = None
    retired_pages_pending: bool | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    remapped_rows_pending: bool | None = None
    remapped_rows_failed: bool | None = None
    nvlink_crc_flit_errors: int | None = None
    nvlink_crc_data_errors: int | None = None
    nvlink_replay_errors: int | None = None
    nvlink_recovery_errors: int | None = None
    xid_events: bool | None = None
    virtualization_mode: str | None = None
    addressing_mode: str | None = None
    numa_node: int | None = None
    file_cache_bytes: int | None = None
    graphics_engine_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None


NO_SENSORS = Sensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimit:
    """The driver's memory limits for one cgroup on one device, in bytes; None for no limit.

    ``cgroup``: its path in the unified hierarchy. ``pids``: its processes on the device. Allocations that exceed
    ``limit_bytes`` fail; up to ``guaranteed_bytes``, they succeed (NVML: soft limit). ``used_bytes``: what its
    processes use together, None without a limit.
    """

    cgroup: str
    pids: tuple[int, ...]
    limit_bytes: int | None = None
    guaranteed_bytes: int | None = None
    used_bytes: int | None = None

    @property
    def is_limited(self) -> bool:
        return self.limit_bytes is not None or self.guaranteed_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimitChange:
    """A change of a cgroup's limit, which the driver makes only while the limit is ``before_bytes``. None: no limit."""

    device_uuid: str
    cgroup: str
    limit_bytes: int | None
    before_bytes: int | None


MPS_SERVER = "nvidia-cuda-mps"
"""Beginning of the command name of an MPS server, nvidia-cuda-mps-server: the kernel keeps 15 characters."""
MAX_MISSED_READINGS = 3
"""Number of consecutive readings without a device after which its values are withheld."""


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage(HasProcessKey):
    """One process on one device, as the driver lists it; all other facts about the process come from /proc.

    ``start_ticks`` is None if /proc doesn't know the pid (the process has exited, or is in another PID namespace).
    ``used_bytes`` is None if the driver doesn't report it. A process of the kind ``holder`` isn't listed by the driver,
    but has the device open while much of the device's memory has no owner. ``state``: alive, stopped, uninterruptible
    (for seconds in a system call that no signal ends), zombie (exited, and not yet waited for by its parent), or gone
    (the driver lists a pid that no longer exists). ``utilization_ratio``: recent use of the device's busiest hardware
    unit, if the driver reports it by process. ``idle_seconds``: observed time without work on the device. ``orphaned``:
    its parent has exited and no service manager supervises it; None if unknown. ``command``: the program, with the
    script or module that it runs if it is a Python interpreter; it never contains other arguments.
    """

    pid: int
    start_ticks: int | None
    used_bytes: int | None
    kinds: tuple[str, ...] = ()
    comm: str | None = None
    uid: int | None = None
    user: str | None = None
    command: str | None = None
    container: str | None = None
    container_name: str | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None
    pod_uid: str | None = None
    unit: str | None = None
    slurm_job: str | None = None
    state: str | None = None
    utilization_ratio: float | None = None
    orphaned: bool | None = None
    idle_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class DeviceReading:
    """One device at one moment.

    ``used_bytes`` excludes ``reserved_bytes``, the memory that the driver reserves for itself, if the driver reports
    it. ``processes`` is None if the driver has no process list. If ``unified``, the device uses the host's memory:
    ``size_bytes`` is the machine's memory, ``free_bytes`` what the kernel could still allocate, and ``used_bytes`` the
    sum over the processes, so the three don't add up. Only MIG instances have a ``gpu_instance_id``.
    ``missed_readings`` counts consecutive ticks without new values; the values are then those of the last good reading,
    and all None from ``MAX_MISSED_READINGS`` on. ``up`` is False as soon as a read of the device fails; a late reading
    doesn't change it. ``idle_seconds``: observed time without work on the device. ``source`` names its source if there
    may be several. ``cgroup_limits``: limits on its processes' cgroups, if the driver supports them.
    ``partition_bytes``: how much the driver lets the daemon's own cgroup use, if it limits that.
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
    missed_readings: int = 0
    up: bool = True
    gpu_instance_id: int | None = None
    idle_seconds: float | None = None
    source: str = ""
    cgroup_limits: tuple[CgroupLimit, ...] = ()
    partition_bytes: int | None = None

    @cached_property
    def processes_by_key(self) -> Mapping[ProcessKey, ProcessUsage]:
        """The listed processes; empty if the driver lists none."""
        return {process.key: process for process in self.processes or ()}

    @cached_property
    def used_by_process(self) -> Mapping[ProcessKey, int | None]:
        """The driver's count of each process that it lists, in bytes; None where the count is unknown.

        A process that only keeps the device open is not among them.
        """
        return {key: each.used_bytes for key, each in self.processes_by_key.items() if "holder" not in each.kinds}

    @property
    def usable_bytes(self) -> int | None:
        """The device's memory without what the driver reserves for itself."""
        return None if self.size_bytes is None else self.size_bytes - (self.reserved_bytes or 0)

    @property
    def current_free_bytes(self) -> int | None:
        """The free bytes of a current reading; None after a failed or missed one."""
        if self.missed_readings or not self.up:
            return None
        if self.free_bytes is not None:
            return self.free_bytes
        if self.usable_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.usable_bytes - self.used_bytes)

    @cached_property
    def has_mps_server(self) -> bool:
        return any("mps" in each.kinds or (each.comm or "").startswith(MPS_SERVER) for each in self.processes or ())


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure to read. ``device_uuid`` is None if it concerns the whole source."""

    source: str
    kind: FaultKind | ReturnCode
    device_uuid: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class XidErrors:
    """Count of one Xid error on one device since the daemon started, and the time of the last one."""

    device_uuid: str
    xid: int
    count: int
    last_seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The values of one source at one moment. ``xids`` remain after the device that reported them is removed."""

    devices: tuple[DeviceReading, ...] = ()
    faults: tuple[Fault, ...] = ()
    driver_version: str | None = None
    library_version: str | None = None
    cuda_version: str | None = None
    xids: tuple[XidErrors, ...] = ()


STARTING: Literal["starting"] = "starting"
"""Reason while a source has not yet answered for the first time."""

NO_DEVICE: Literal["no_device"] = "no_device"
"""Reason on a machine without a device: there is no driver that could be up."""

RELEASED: Literal["released"] = "released"
"""Reason while the driver is released on request: all values are unknown, and this isn't a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """State of the source of device readings. ``reason`` is one word, and empty while the source is up."""

    name: str
    up: bool
    responsive: bool
    reason: FaultKind | ReturnCode | Literal[""] = ""
    detail: str = ""
    driver_version: str | None = None
    library_version: str | None = None
    cuda_version: str | None = None


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport(HasProcessKey):
    """The newest report of one process. ``pid``, ``start_ticks`` and ``uid`` come from the kernel.

    If the process is in a PID namespace that the daemon can't see, ``pid`` is the number of its connection, which is
    above ``MAX_PID``, and ``start_ticks`` is None. ``uses_device``: it holds device memory, or has held some; a data
    loader's worker or a launcher never does. ``limits``: its pools' limits. ``allows_limit``: the daemon may set them.
    ``admission``: ID of the request for memory with which it was started, or empty. ``rank``, ``world_size`` and
    ``job`` come from the launcher of a job with several processes; ``job`` identifies it on all machines, such as
    ``slurm/4711``, or is empty. ``account``: its Slurm account, or empty. ``suspended``: see Suspension.
    ``suspendable``: the program lets the daemon suspend it. ``resume_signals``: number of SIGCONT signals that the
    agent has received. ``can_suspend``: nothing prevents a suspension that a user requests. ``may_suspend``: in
    addition, it has been idle for long enough to be suspended when another program needs memory. ``components``: what
    the agent has seen in the program that takes memory outside its pools.
    """

    pid: int
    start_ticks: int | None
    uid: int
    workload: str
    age_seconds: float
    frameworks: tuple[str, ...]
    flush_policy: FlushPolicy
    pools: tuple[PoolUsage, ...]
    program: Program = EMPTY_PROGRAM
    host_pools: tuple[HostPool, ...] = ()
    uses_device: bool = True
    limits: tuple[PoolLimit, ...] = ()
    allows_limit: bool = False
    admission: str = ""
    rank: int | None = None
    world_size: int | None = None
    job: str = ""
    account: str = ""
    suspended: bool = False
    components: tuple[str, ...] = ()
    suspendable: bool = False
    resume_signals: int = 0
    can_suspend: bool = False
    may_suspend: bool = False

    @property
    def has_pid(self) -> bool:
        """False if ``pid`` is the number of a connection."""
        return self.pid <= MAX_PID


@dataclass(frozen=True, slots=True)
class ProcessEnd(HasProcessKey):
    """A program whose agent announced its end, and the kind of the end."""

    pid: int
    start_ticks: int | None
    ending: Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessClaim(HasProcessKey):
    """One process's claim on one device that exceeds the driver's count or, for one pool, the device's size.

    ``ticks``: number of consecutive ticks. ``unmapped_bytes``: the part that is therefore counted as unmapped.
    ``allocator`` is empty if the claim covers all pools.
    """

    pid: int
    start_ticks: int | None
    device_uuid: str
    workload: str
    claimed_bytes: int
    limit_bytes: int
    ticks: int
    unmapped_bytes: int = 0
    allocator: str = ""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A process with an agent that had memory on a device, and that the driver no longer lists there.

    ``usage`` is what the driver last listed, ``unattributed_bytes`` what it then counted for no process, and ``since``
    the first snapshot without it. Until it is ``confirmed``, the process may have closed its CUDA context, or be about
    to exit.
    """

    device_uuid: str
    usage: ProcessUsage
    unattributed_bytes: int
    since: float
    confirmed: bool = False

    @property
    def process(self) -> ProcessKey:
        return self.usage.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead(HasProcessKey):
    """The overhead of one process on one device over time: what is known about its parts.

    ``began_at``: the first snapshot that lists the process. ``parts``: names and bytes, in the order in which they
    appeared. ``components``: those that its agent has reported; the bytes of the ``unsettled`` ones, the last of which
    appeared at ``changed_at``, are unknown. ``settled_bytes``: the overhead when neither the driver's count nor the
    held bytes were changing.
    """

    device_uuid: str
    pid: int
    start_ticks: int | None
    began_at: float
    parts: tuple[tuple[str, int], ...] = ()
    components: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    changed_at: float = 0.0
    counted_bytes: int = 0
    held_bytes: int = 0
    settled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessQuota(HasProcessKey):
    """The quotas of one process, which apply on each device that it uses."""

    pid: int
    start_ticks: int | None
    quota: EffectiveQuota


class Owner(NamedTuple):
    """Whom a program belongs to; unknown parts are empty. The agent states workload and Slurm account."""

    workload: str = ""
    user: str = ""
    pod_namespace: str = ""
    slurm_account: str = ""

    def without_workload(self) -> Owner:
        return Owner("", self.user, self.pod_namespace, self.slurm_account)


def owner_of(process: ProcessUsage | None, report: AgentReport | None) -> Owner:
    uid = process.uid if process else report.uid if report else None
    user = process.user if process else None
    return Owner(
        report.workload if report else "",
        user or ("" if uid is None else str(uid)),
        (process.pod_namespace if process else None) or "",
        report.account if report else "",
    )


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached properties
class Snapshot:
    """All facts of one tick. They aren't simultaneous: every report carries its age.

    ``private_pid_namespace``: the daemon can't see the host's processes, whose pids the driver may list. ``ends``: the
    programs that have exited since the previous snapshot. ``excesses``: agents' claims that exceed a limit. ``quotas``:
    the quotas of each process that one matches. ``suspensions``: processes that are suspended, or may be.
    ``overheads``: the overhead of processes with an agent. ``suspended_programs``: programs that gpumond has suspended.
    ``uptime_seconds``: time since the machine started, from which ``start_ticks`` count.
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
    ends: tuple[ProcessEnd, ...] = ()
    excesses: tuple[ExcessClaim, ...] = ()
    engines: tuple[EngineReading, ...] = ()
    uptime_seconds: float | None = None
    quotas: tuple[ProcessQuota, ...] = ()
    suspensions: tuple[Suspension, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    suspended_programs: tuple[SuspendedProgram, ...] = ()

    @cached_property
    def overheads_by_process(self) -> Mapping[tuple[str, ProcessKey], Overhead]:
        """By device and process."""
        return {(each.device_uuid, each.process): each for each in self.overheads}

    @cached_property
    def possibly_suspended(self) -> frozenset[ProcessKey]:
        """The processes that are suspended, or may be: nothing follows from their absence."""
        return frozenset(each.process for each in self.suspensions) | self.unresponsive

    @cached_property
    def unresponsive(self) -> frozenset[ProcessKey]:
        """The processes that execute nothing: they are suspended, or are being suspended or resumed."""
        by_gpumond = (each.key for each in self.suspended_programs)
        return frozenset((*by_gpumond, *(each.process for each in self.suspensions if each.confirmed)))

    @cached_property
    def devices_by_uuid(self) -> Mapping[str, DeviceReading]:
        return {device.uuid: device for device in self.devices}

    @cached_property
    def gpu_labels(self) -> Mapping[str, str]:
        """By UUID: the value of the label ``gpu``, the index of the device."""
        return {device.uuid: str(device.index) for device in self.devices}

    @cached_property
    def reports_by_process(self) -> Mapping[ProcessKey, AgentReport]:
        return {report.key: report for report in self.reports}

    @cached_property
    def owners(self) -> Mapping[ProcessKey, Owner]:
        """The owner of each process that a device lists or whose agent has used a device."""
        reports, tables = self.reports_by_process, [device.processes_by_key for device in self.devices]
        owners = {key: owner_of(process, reports.get(key)) for table in tables for key, process in table.items()}
        unlisted = (key for key, report in reports.items() if report.uses_device and key not in owners)
        return {**owners, **{key: owner_of(None, reports[key]) for key in unlisted}}

    @cached_property
    def quotas_by_process(self) -> Mapping[ProcessKey, EffectiveQuota]:
        """The quotas of each process that one matches."""
        return {each.key: each.quota for each in self.quotas}

    @cached_property
    def reports_by_device(self) -> Mapping[str, Sequence[AgentReport]]:
        """The reports with a pool on each device."""
        reports: dict[str, list[AgentReport]] = {}
        for report in self.reports:
            for uuid in {pool.device_uuid for pool in report.pools}:
                reports.setdefault(uuid, []).append(report)
        return reports

    def used_by(self, key: ProcessKey, device: DeviceReading) -> int | None:
        """Return the driver's count for a process, else the bytes that its allocators hold; None if it holds none."""
        process = device.processes_by_key.get(key)
        if process is not None and process.used_bytes is not None:
            return process.used_bytes
        report = self.reports_by_process.get(key)
        pools = report.pools if report else ()
        held = [pool.held_bytes for pool in pools if pool.device_uuid == device.uuid and pool.inside is None]
        return sum(held) if held else None

    def reclaimable_from(self, report: AgentReport, device: DeviceReading) -> int:
        """Return the bytes that a flush of a program would return on a device, without those of its reserve."""
        pools = [pool for pool in report.pools if pool.device_uuid == device.uuid and pool.inside is None]
        quota = self.quotas_by_process.get(report.key)
        reserve = 0 if quota is None else quota.reserve_bytes or 0
        held = self.used_by(report.key, device) or 0
        return min(sum(pool.reclaimable.likely for pool in pools), max(0, held - reserve))

    def holders(
        self, device_uuid: str, excluded: ProcessKey | None, grants: Iterable[GrantedRequest] = ()
    ) -> tuple[MemoryHolder, ...]:
        """Return who holds or is granted most of a device, at most three programs."""
        device = self.device(device_uuid)
        if device is None:
            return ()
        holders = []
        for key, usage in device.processes_by_key.items():
            if usage.used_bytes and key != excluded:
                report = self.reports_by_process.get(key)
                name = (report.workload if report else "") or usage.comm or ""
                holders.append(MemoryHolder(key.pid, name, usage.used_bytes))
        for grant in grants:
            if grant.device_uuid == device_uuid and (excluded is None or grant.pid != excluded.pid):
                new = MemoryHolder(grant.pid, grant.workload, 0)
                holder = next((each for each in holders if each.pid == grant.pid), new)
                holders = [each for each in holders if each is not holder]
                holders.append(replace(holder, granted_bytes=holder.granted_bytes + grant.unused_bytes))
        return tuple(sorted(holders, key=lambda each: -each.used_bytes - each.granted_bytes)[:MAX_SHOWN_HOLDERS])

    @cached_property
    def unused_reserves(self) -> Mapping[str, Mapping[ProcessKey, int]]:
        """By device: the unused bytes of each quota's reserve, at the oldest process that has it and uses the device.

        The processes of one quota share its reserve; the others have 0.
        """
        quotas = [(key, quota) for key, quota in self.quotas_by_process.items() if quota.reserve_bytes is not None]
        quotas.sort(key=lambda each: (each[0].start_ticks or 0, each[0].pid))
        by_device: dict[str, dict[ProcessKey, int]] = {}
        for device in self.devices if quotas else ():
            present = {*device.processes_by_key, *(r.key for r in self.reports_by_device.get(device.uuid, ()))}
            oldest: dict[str, ProcessKey] = {}
            unused: dict[ProcessKey, int] = {}
            for key, quota in quotas:
                used = self.used_by(key, device) if key in present else None
                if used is not None:
                    oldest_key = oldest.setdefault(quota.reserve_quota, key)
                    unused.setdefault(key, quota.reserve_bytes or 0 if oldest_key == key else 0)
                    unused[oldest_key] -= used
            if unused:
                by_device[device.uuid] = {key: max(0, size) for key, size in unused.items()}
        return by_device

    @cached_property
    def reserve_shortages(self) -> Mapping[tuple[str, ProcessKey], int]:
        """By device and process: the bytes of the process's reserve that it does not use and that are not free.

        Reserves on one device share its free bytes: each process has the shortage of all reserves, but not more than
        the unused part of its own. Absent while the free bytes of the device are unknown.
        """
        shortages: dict[tuple[str, ProcessKey], int] = {}
        for uuid, unused in self.unused_reserves.items():
            free = self.devices_by_uuid[uuid].current_free_bytes
            if free is not None:
                shortage = max(0, sum(unused.values()) - free)
                shortages.update({(uuid, key): min(size, shortage) for key, size in unused.items()})
        return shortages

    @cached_property
    def limits(self) -> Mapping[tuple[str, ProcessKey], int]:
        """The limit in bytes of each process on each device: the lowest of its pools and of its cgroup."""
        limits: dict[tuple[str, ProcessKey], int] = {}
        for report in self.reports:
            for each in report.limits:
                key = each.device_uuid, report.key
                limits[key] = min(each.limit_bytes, limits.get(key, each.limit_bytes))
        for device in self.devices:
            limits_by_pid = {pid: each.limit_bytes for each in device.cgroup_limits for pid in each.pids}
            for process in device.processes_by_key if limits_by_pid else ():
                if (limit := limits_by_pid.get(process.pid)) is not None:
                    limits[device.uuid, process] = min(limit, limits.get((device.uuid, process), limit))
        return limits

    @cached_property
    def engine_devices(self) -> tuple[tuple[EngineReading, frozenset[str]], ...]:
        """Each serving engine with the devices that its processes use."""
        tables = {device.uuid: device.processes_by_key for device in self.devices}
        return tuple(
            (engine, frozenset(uuid for uuid, table in tables.items() if any(p.key in table for p in engine.processes)))
            for engine in self.engines
        )

    def used_by_engine(self, engine: EngineReading) -> Iterator[tuple[DeviceReading, int]]:
        """Yield each device with the driver's count of the engine's processes, if it counts one of them."""
        for device in self.devices:
            listed = device.processes_by_key
            used = (listed[each.key].used_bytes for each in engine.processes if each.key in listed)
            sizes = [size for size in used if size is not None]
            if sizes:
                yield device, sum(sizes)

    def device(self, uuid: str) -> DeviceReading | None:
        return self.devices_by_uuid.get(uuid)

    def may_contain(self, process: ProcessKey) -> bool:
        """Return False if no process that a driver lists or whose agent reports may be this one."""
        tables = chain((self.reports_by_process,), (device.processes_by_key for device in self.devices))
        if process.start_ticks is None:
            return any(process.may_be(key) for table in tables for key in table)
        return any(process in table or ProcessKey(process.pid, None) in table for table in tables)
