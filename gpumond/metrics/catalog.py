"""Catalogue of the metrics that derive from a Frame.

No state is kept between frames: the series of a device, process or pool that no longer exists are absent from the next
scrape, and an unknown value is an absent series. To add a metric, add a Quantity or a Family; one that rules compare
too is in `gpumond.quantities`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import Frame
from gpumond.facts.messages import printable_text
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.program import Program, ScopeDevice, ScopeUsage, StepUsage
from gpumond.facts.shares import SHARE_MEANINGS, SHARES
from gpumond.facts.snapshot import THROTTLE_REASONS, DeviceReading, ProcessUsage, Snapshot, XidErrors
from gpumond.facts.verdicts import PATTERN_NAMES, VERDICT_KINDS
from gpumond.metrics import owners
from gpumond.quantities.device_quantities import (
    DEVICE_IDLE,
    DEVICE_UP,
    DRIVER_RESPONSIVE,
    DRIVER_UP,
    MEMORY_QUANTITIES,
    SENSOR_QUANTITIES,
    SHARED_FAMILIES,
)
from gpumond.quantities.program_quantities import (
    ENGINE_QUANTITIES,
    ENGINE_USED,
    HOST_POOL_QUANTITIES,
    POOL_QUANTITIES,
    PROCESS_USED,
    PROCESS_UTILIZATION,
    PROGRAM_QUANTITIES,
    REPORT_AGE,
    STEP_QUANTITIES,
)
from gpumond.quantities.quantity import Quantity, attribute_quantity
from gpumond.tick.reading_conditions import DEVICE_CONDITIONS, conditions

LabelValues = tuple[str, ...]
"""In the order of the family's labels."""
Row = tuple[LabelValues, float | None]
"""A row whose value is None is omitted."""


MetricKind = Literal["gauge", "counter"]


RowReader = Callable[[Frame], Iterable[Row]]


class Family(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...]
    rows: RowReader

    @property
    def kind(self) -> MetricKind:
        return "counter" if self.name.endswith(TOTAL) else "gauge"


TOTAL = "_total"

Subject = TypeVar("Subject")
LabeledSubjects = Callable[[Frame], Iterable[tuple[LabelValues, Subject]]]
"""The subjects of one kind in a frame, such as its pools, each with its label values."""


def families(
    prefix: str, labels: tuple[str, ...], subjects: LabeledSubjects[Subject], quantities: Iterable[Quantity[Subject]]
) -> Iterator[Family]:
    """Yield the families of quantities in their order; consecutive ones of one name share a family."""
    subjects = _cached_per_frame(subjects)
    for name, group in groupby(quantities, lambda quantity: quantity.family_name):
        members = tuple(group)
        if name and members[0].labels:
            names = (*labels, *members[0].labels)
            yield Family(f"{prefix}{name}", SHARED_FAMILIES[name], names, partial(_shared_rows, subjects, members))
        elif name:
            (quantity,) = members
            yield family_of(prefix, labels, quantity, partial(_rows, subjects, quantity.export or quantity.read))


def family_of(prefix: str, labels: tuple[str, ...], quantity: Quantity[Any], rows: RowReader, note: str = "") -> Family:
    """Return the family of a quantity whose rows are not one for each subject."""
    return Family(f"{prefix}{quantity.family_name}", quantity.help + note, labels, rows)


def _cached_per_frame(subjects: LabeledSubjects[Subject]) -> LabeledSubjects[Subject]:
    """Return a function that keeps the subjects of the last frame, which all families of these subjects read."""
    cached: tuple[Frame | None, Collection[tuple[LabelValues, Subject]]] = None, ()

    def read(frame: Frame) -> Collection[tuple[LabelValues, Subject]]:
        nonlocal cached
        if frame is not cached[0]:
            cached = frame, tuple(subjects(frame))
        return cached[1]

    return read


def _rows(subjects: LabeledSubjects[Subject], read: Callable[[Subject], float | None], frame: Frame) -> Iterable[Row]:
    return [(labels, read(subject)) for labels, subject in subjects(frame)]


def _shared_rows(
    subjects: LabeledSubjects[Subject], quantities: Iterable[Quantity[Subject]], frame: Frame
) -> Iterator[Row]:
    for labels, subject in subjects(frame):
        for quantity in quantities:
            yield (*labels, *quantity.labels.values()), quantity.read(subject)


DEVICE_LABELS = ("uuid", "gpu")


def labeled_devices(frame: Frame) -> Iterator[tuple[LabelValues, DeviceReading]]:
    for device in frame.snapshot.devices:
        yield (device.uuid, str(device.index)), device


def _device_info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    for device in frame.snapshot.devices:
        labels = (device.name, device.vendor, device.pci_bus_id, device.parent_uuid or "", source.driver_version or "")
        yield (device.uuid, str(device.index), *labels), 1


def _throttle(frame: Frame) -> Iterator[Row]:
    for labels, device in labeled_devices(frame):
        active = device.sensors.throttle_reasons
        for reason in THROTTLE_REASONS if active is not None else ():
            yield (*labels, reason), reason in (active or ())


def _compute_mode(frame: Frame) -> Iterator[Row]:
    for labels, device in labeled_devices(frame):
        if device.sensors.compute_mode is not None:
            yield (*labels, device.sensors.compute_mode), 1


def _xid_rows(read: Callable[[XidErrors], float]) -> Callable[[Frame], Iterator[Row]]:
    def rows(frame: Frame) -> Iterator[Row]:
        gpu_labels = frame.snapshot.gpu_labels
        for errors in frame.snapshot.xids:
            yield (errors.device_uuid, gpu_labels.get(errors.device_uuid, ""), str(errors.xid)), read(errors)

    return rows


def _device_faults(frame: Frame) -> Iterator[Row]:
    gpu_labels = frame.snapshot.gpu_labels
    for uuid, kind in {(fault.device_uuid, fault.kind) for fault in frame.snapshot.faults}:
        if uuid is not None:
            yield (uuid, gpu_labels.get(uuid, ""), kind), 1


def _device_count(frame: Frame) -> Iterator[Row]:
    devices = frame.snapshot.devices
    yield ("up",), sum(device.up for device in devices)
    yield ("down",), sum(not device.up for device in devices)


XID_ERRORS = Family(
    "gpumond_device_xid_errors_total",
    "Xid errors that the driver has reported to the daemon, including those of devices that are now lost.",
    ("uuid", "gpu", "xid"),
    _xid_rows(lambda errors: errors.count),
)


THROTTLE = Family(
    "gpumond_device_throttle",
    "1 while the driver reduces the clocks for this reason (one of NVML's clocks event reasons, such as gpu_idle).",
    (*DEVICE_LABELS, "reason"),
    _throttle,
)
COMPUTE_MODE = Family(
    "gpumond_device_compute_mode", "1 for the current compute mode.", (*DEVICE_LABELS, "mode"), _compute_mode
)


def _sensors() -> Iterator[Family]:
    """Yield the families of the sensors that are numbers, and after related ones those that are names."""
    for each in families("gpumond_device_", DEVICE_LABELS, labeled_devices, SENSOR_QUANTITIES):
        yield each
        if each.name == "gpumond_device_performance_state":
            yield THROTTLE
        elif each.name == "gpumond_device_persistence_mode":
            yield COMPUTE_MODE


METRIC_ONLY_QUANTITIES: tuple[Quantity[DeviceReading], ...] = (
    Quantity(
        "memory_unified",
        "1 if the device uses host memory. Its size and free memory are then the host's, and its used memory is the "
        "sum over its processes.",
        lambda device: float(device.unified) if device.size_bytes is not None else None,
        is_boolean=True,
    ),
)
"""Quantities that rules do not compare."""

DEVICE_FAMILIES: tuple[Family, ...] = (
    Family(
        "gpumond_device_info",
        "Device metadata; the value is always 1. MIG instances have a parent_uuid; the parent's values include theirs.",
        ("uuid", "gpu", "name", "vendor", "pci_bus_id", "parent_uuid", "driver_version"),
        _device_info,
    ),
    *families("gpumond_device_", DEVICE_LABELS, labeled_devices, (DEVICE_IDLE, DEVICE_UP)),
    Family(
        "gpumond_device_fault",
        "1 for each current fault of the device, by kind: why a value can't be read, or why the device is lost.",
        ("uuid", "gpu", "kind"),
        _device_faults,
    ),
    *families("gpumond_device_", DEVICE_LABELS, labeled_devices, (*MEMORY_QUANTITIES, *METRIC_ONLY_QUANTITIES)),
    *_sensors(),
    XID_ERRORS,
    Family(
        "gpumond_device_xid_last_seen_timestamp_seconds",
        "Unix time at which the driver last reported this Xid error.",
        ("uuid", "gpu", "xid"),
        _xid_rows(lambda errors: errors.last_seen_at),
    ),
    Family(
        "gpumond_devices",
        "Number of devices by state (up, down). A device that falls off the bus is still counted.",
        ("state",),
        _device_count,
    ),
)


MAX_PROCESSES_PER_DEVICE = 50
PROCESS_LABELS = ("uuid", "gpu", "pid")


def labeled_processes(frame: Frame) -> Iterator[tuple[LabelValues, ProcessUsage]]:
    """Yield the largest processes of each device."""
    for device, usages in frame.processes_by_size:
        for process in usages[:MAX_PROCESSES_PER_DEVICE]:
            yield (device.uuid, str(device.index), str(process.pid)), process


def labeled_pools(frame: Frame) -> Iterator[tuple[LabelValues, PoolUsage]]:
    gpu_labels = frame.snapshot.gpu_labels
    for report in frame.snapshot.reports:
        pid = str(report.pid)
        for pool in report.pools:
            uuid = pool.device_uuid
            yield (uuid, gpu_labels.get(uuid, ""), pid, report.workload, pool.allocator), pool


def labeled_host_pools(frame: Frame) -> Iterator[tuple[LabelValues, HostPool]]:
    for report in frame.snapshot.reports:
        for pool in report.host_pools:
            yield (str(report.pid), report.workload, pool.allocator), pool


def labeled_programs(frame: Frame) -> Iterator[tuple[LabelValues, Program]]:
    for report in frame.snapshot.reports:
        yield (str(report.pid), report.workload), report.program


def labeled_steps(frame: Frame) -> Iterator[tuple[LabelValues, StepUsage]]:
    for labels, program in labeled_programs(frame):
        if program.step is not None:
            yield labels, program.step


def labeled_scopes(frame: Frame) -> Iterator[tuple[LabelValues, ScopeUsage]]:
    for labels, program in labeled_programs(frame):
        for scope in program.scopes:
            yield (*labels, scope.name), scope


def labeled_scope_devices(frame: Frame) -> Iterator[tuple[LabelValues, ScopeDevice]]:
    gpu_labels = frame.snapshot.gpu_labels
    for labels, scope in labeled_scopes(frame):
        for device in scope.devices:
            yield (device.device_uuid, gpu_labels.get(device.device_uuid, ""), *labels), device


def _process_used(frame: Frame) -> Iterator[Row]:
    for device, processes in frame.processes_by_size:
        for process in processes[:MAX_PROCESSES_PER_DEVICE]:
            yield (device.uuid, str(device.index), str(process.pid)), process.used_bytes
        if len(processes) > MAX_PROCESSES_PER_DEVICE:
            used_bytes = sum(process.used_bytes or 0 for process in processes[MAX_PROCESSES_PER_DEVICE:])
            yield (device.uuid, str(device.index), "other"), used_bytes


def _process_limit(frame: Frame) -> Iterator[Row]:
    gpu_labels = frame.snapshot.gpu_labels
    for (uuid, key), limit_bytes in frame.snapshot.limits.items():
        yield (uuid, gpu_labels.get(uuid, ""), str(key.pid)), limit_bytes


def _cgroup_rows(field: str) -> RowReader:
    """Return the rows of one value of all cgroups with a limit."""

    def rows(frame: Frame) -> Iterator[Row]:
        for device in frame.snapshot.devices:
            for each in device.cgroup_limits:
                if each.is_limited:
                    yield (device.uuid, str(device.index), printable_text(each.cgroup)), getattr(each, field)

    return rows


def _process_soft_limit(frame: Frame) -> Iterator[Row]:
    quotas = frame.snapshot.quotas_by_process
    for labels, process in labeled_processes(frame) if quotas else ():
        if process.key in quotas:
            yield labels, quotas[process.key].soft_limit_bytes


def _process_reserve_shortage(frame: Frame) -> Iterator[Row]:
    shortages = frame.snapshot.reserve_shortages
    for labels, process in labeled_processes(frame) if shortages else ():
        if (labels[0], process.key) in shortages:
            yield labels, shortages[labels[0], process.key]


def _process_info(frame: Frame) -> Iterator[Row]:
    reports = frame.snapshot.reports_by_process
    pids: set[int] = set()  # the label: several series for one pid would break joins
    for _, processes in frame.processes_by_size:
        for process in processes[:MAX_PROCESSES_PER_DEVICE]:
            if process.pid in pids:
                continue
            pids.add(process.pid)
            report = reports.get(process.key)
            workload = report.workload if report else ""
            user = process.user or ("" if process.uid is None else str(process.uid))
            labels = (str(process.pid), process.comm or "", user, workload, process.container or "")
            names = (process.container_name, process.pod_name, process.pod_namespace, process.pod_uid)
            rank = (report.rank, report.world_size, report.job) if report else (None, None, "")
            job = (process.unit, process.slurm_job, *("" if number is None else str(number) for number in rank))
            yield (*labels, *(name or "" for name in (*names, *job))), 1


def _report_age(frame: Frame) -> Iterator[Row]:
    ages: defaultdict[str, float] = defaultdict(float)
    for report in frame.snapshot.reports:
        ages[str(report.pid)] = max(ages[str(report.pid)], report.age_seconds)
    for pid, age in ages.items():
        yield (pid,), age


SCOPE_DEVICE_QUANTITIES: tuple[Quantity[ScopeDevice], ...] = (
    attribute_quantity(
        "retained_bytes",
        "Growth of live memory within the measured scope, summed over all entries; negative if memory was freed.",
    ),
    attribute_quantity("peak_bytes", "Peak live memory within the measured scope."),
)
SCOPE_QUANTITIES: tuple[Quantity[ScopeUsage], ...] = (
    attribute_quantity("entries", "Number of times the measured scope was entered.", "entries_total"),
    attribute_quantity(
        "retries",
        "Allocations within the measured scope that succeeded only after the allocator had emptied its cache.",
        "retries_total",
    ),
    attribute_quantity("ooms", "Entries of the measured scope that ended with an out-of-memory error.", "ooms_total"),
)

PROCESS_FAMILIES: tuple[Family, ...] = (
    family_of(
        "gpumond_process_",
        PROCESS_LABELS,
        PROCESS_USED,
        _process_used,
        f' Processes beyond the {MAX_PROCESSES_PER_DEVICE} largest of a device are summed as pid="other".',
    ),
    Family(
        "gpumond_process_limit_bytes",
        "Lowest limit that applies to the process on this device: its allocators' or its cgroup's.",
        PROCESS_LABELS,
        _process_limit,
    ),
    Family(
        "gpumond_process_soft_limit_bytes",
        "Lowest soft limit of the quotas that match the process.",
        PROCESS_LABELS,
        _process_soft_limit,
    ),
    Family(
        "gpumond_process_reserve_shortage_bytes",
        "The part of the process's unused reserve that isn't free on the device.",
        PROCESS_LABELS,
        _process_reserve_shortage,
    ),
    *(
        Family(f"gpumond_cgroup_memory_{name}_bytes", text, ("uuid", "gpu", "cgroup"), _cgroup_rows(f"{name}_bytes"))
        for name, text in (
            ("limit", "Memory that the driver lets this cgroup's processes allocate, in total."),
            ("guaranteed", "Memory that the driver guarantees to this cgroup's processes, in total."),
            ("used", "Memory that this cgroup's processes use, as the driver counts it against the limit."),
        )
    ),
    *families("gpumond_process_", PROCESS_LABELS, labeled_processes, (PROCESS_UTILIZATION,)),
    Family(
        "gpumond_process_info",
        "Process metadata; the value is always 1.",
        (
            *("pid", "comm", "user", "workload", "container", "container_name"),
            *("pod_name", "pod_namespace", "pod_uid", "unit", "slurm_job", "rank", "world_size", "job_id"),
        ),
        _process_info,
    ),
)

REPORT_FAMILIES: tuple[Family, ...] = (
    family_of("gpumond_", ("pid",), REPORT_AGE, _report_age),
    *families("gpumond_pool_", ("uuid", "gpu", "pid", "workload", "allocator"), labeled_pools, POOL_QUANTITIES),
    *families("gpumond_", ("pid", "workload", "allocator"), labeled_host_pools, HOST_POOL_QUANTITIES),
    *families(
        "gpumond_scope_", ("uuid", "gpu", "pid", "workload", "scope"), labeled_scope_devices, SCOPE_DEVICE_QUANTITIES
    ),
    *families("gpumond_scope_", ("pid", "workload", "scope"), labeled_scopes, SCOPE_QUANTITIES),
    *families("gpumond_", ("pid", "workload"), labeled_steps, STEP_QUANTITIES),
    *families("gpumond_", ("pid", "workload"), labeled_programs, PROGRAM_QUANTITIES),
)


def _ledger(frame: Frame) -> Iterator[Row]:
    gpu_labels = frame.snapshot.gpu_labels
    sums: Counter[tuple[str, str, str, str]] = Counter()
    for line in frame.ledger.lines:
        sums[line.device_uuid, gpu_labels[line.device_uuid], line.workload, line.share] += line.used_bytes
    yield from sums.items()


def _device_shares(frame: Frame) -> Iterator[Row]:
    gpu_labels = frame.snapshot.gpu_labels
    for (uuid, share), size in frame.share_bytes.items():
        yield (uuid, gpu_labels[uuid], share), size


def _overcount(frame: Frame) -> Iterator[Row]:
    gpu_labels = frame.snapshot.gpu_labels
    for entry in frame.ledger.overcounts:
        yield (entry.device_uuid, gpu_labels[entry.device_uuid]), entry.overcount_bytes


def _verdicts(frame: Frame) -> Iterator[Row]:
    """Yield the verdicts except patterns: each program has one at any time, and a new series for each change."""
    gpu_labels = frame.snapshot.gpu_labels
    for verdict in frame.verdicts:
        if verdict.kind not in PATTERN_NAMES:
            yield (
                (verdict.device_uuid, gpu_labels.get(verdict.device_uuid, ""), str(verdict.pid or ""), verdict.kind),
                1,
            )


def _time_to_full(frame: Frame) -> Iterator[Row]:
    """Yield the lowest estimate if several verdicts apply to the same process."""
    gpu_labels = frame.snapshot.gpu_labels
    times: dict[tuple[str, str, str], float] = {}
    for verdict in frame.verdicts:
        if (seconds := verdict.time_to_full_seconds) is not None:
            labels = (verdict.device_uuid, gpu_labels.get(verdict.device_uuid, ""), str(verdict.pid or ""))
            times[labels] = min(seconds, times.get(labels, seconds))
    yield from times.items()


def _alerts(frame: Frame) -> Iterator[Row]:
    alerts = ((alert.rule, dict(alert.labels).get("severity", ""), alert.phase) for alert in frame.alerts)
    yield from Counter(alerts).items()


def labeled_engines(frame: Frame) -> Iterator[tuple[LabelValues, EngineReading]]:
    for engine in frame.snapshot.engines:
        yield (engine.name, engine.kind), engine


def _engine_memory(frame: Frame) -> Iterator[Row]:
    """Yield the driver's count of each engine's processes on each device; unknown if the driver reports none."""
    for engine in frame.snapshot.engines:
        for device, used in frame.snapshot.used_by_engine(engine):
            yield (device.uuid, str(device.index), engine.name, engine.kind), used


def labeled_snapshots(frame: Frame) -> Iterator[tuple[LabelValues, Snapshot]]:
    yield (), frame.snapshot


def _driver_down_reason(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    if not source.up:
        yield (source.reason,), 1


def _conditions(frame: Frame) -> Iterator[Row]:
    gpu_labels = frame.snapshot.gpu_labels
    for uuid, kind in dict.fromkeys((each.device_uuid, each.kind) for each in conditions(frame.snapshot)):
        if uuid is not None:
            yield (uuid, gpu_labels[uuid], kind), 1


def _driver_info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    versions = (source.driver_version, source.library_version, source.cuda_version)
    if any(versions):
        yield (source.name, *(version or "" for version in versions)), 1


labeled_owners = _cached_per_frame(owners.usages)


def labeled_machine(frame: Frame) -> Iterator[tuple[LabelValues, owners.MachineUsage]]:
    return owners.machine_usage(frame, [usage for _, usage in labeled_owners(frame)])


MACHINE_FAMILIES: tuple[Family, ...] = (
    *families("gpumond_machine_", (), labeled_machine, owners.MACHINE_QUANTITIES),
    Family(
        "gpumond_machine_memory_share_bytes",
        "Used memory on the machine's devices, by share.",
        ("share",),
        owners.machine_shares,
    ),
)


OWNER_FAMILIES: tuple[Family, ...] = (
    *families("gpumond_owner_", (*owners.OWNER_LABELS, "model"), labeled_owners, owners.OWNER_QUANTITIES),
    Family(
        "gpumond_owner_verdicts",
        "Number of active verdicts on the owner's programs by kind, except healthy patterns.",
        (*owners.OWNER_LABELS, "kind"),
        owners.verdicts,
    ),
    Family(
        "gpumond_owner_time_to_full_seconds",
        "Lowest gpumond_time_to_full_seconds of the owner's programs.",
        owners.OWNER_LABELS,
        owners.time_to_full,
    ),
)


FAMILIES: tuple[Family, ...] = (  # Families of programs are last: a page at the series limit drops these first.
    *DEVICE_FAMILIES,
    *MACHINE_FAMILIES,
    Family(
        "gpumond_memory_bytes",
        f"Used memory by workload and share ({', '.join(SHARES)}).",
        ("uuid", "gpu", "workload", "share"),
        _ledger,
    ),
    Family(
        "gpumond_device_memory_share_bytes",
        "Used memory of the device by share: gpumond_memory_bytes, summed over workloads.",
        (*DEVICE_LABELS, "share"),
        _device_shares,
    ),
    Family(
        "gpumond_memory_overcount_bytes",
        SHARE_MEANINGS["overcount"],
        ("uuid", "gpu"),
        _overcount,
    ),
    *OWNER_FAMILIES,
    *PROCESS_FAMILIES,
    Family(
        "gpumond_verdict",
        "1 for each active verdict; healthy patterns are only in /api/v1/verdicts. Kinds: "
        f"{', '.join(kind.name for kind in VERDICT_KINDS if not kind.is_pattern)}.",
        ("uuid", "gpu", "pid", "kind"),
        _verdicts,
    ),
    Family(
        "gpumond_time_to_full_seconds",
        "Estimated time until the device memory is full at the current rate of growth.",
        ("uuid", "gpu", "pid"),
        _time_to_full,
    ),
    Family(
        "gpumond_alerts",
        "Number of active alerts by rule, severity and phase.",
        ("rule", "severity", "phase"),
        _alerts,
    ),
    Family(
        "gpumond_agents",
        "Number of processes with an agent that use, or have used, a device.",
        ("workload",),
        lambda frame: Counter((each.workload,) for each in frame.snapshot.reports if each.uses_device).items(),
    ),
    *families("gpumond_engine_", ("engine", "kind"), labeled_engines, ENGINE_QUANTITIES),
    family_of("gpumond_engine_", ("uuid", "gpu", "engine", "kind"), ENGINE_USED, _engine_memory),
    *families("gpumond_", (), labeled_snapshots, (DRIVER_UP,)),
    Family(
        "gpumond_driver_down_reason",
        "1 for the reason why the devices can't be read: starting, released (by gpumond detach-driver), "
        "no_device, or a fault kind such as timeout.",
        ("reason",),
        _driver_down_reason,
    ),
    *families("gpumond_", (), labeled_snapshots, (DRIVER_RESPONSIVE,)),
    Family(
        "gpumond_driver_info",
        "Versions of the driver and its library, and the latest CUDA version that the driver supports.",
        ("source", "driver_version", "library_version", "cuda_version"),
        _driver_info,
    ),
    Family(
        "gpumond_device_condition",
        "1 for each condition that limits the accuracy of the device's values: "
        f"{', '.join(sorted(DEVICE_CONDITIONS))}.",
        ("uuid", "gpu", "condition"),
        _conditions,
    ),
    Family(
        "gpumond_private_pid_namespace",
        "1 if the daemon runs in its own PID namespace, else 0.",
        (),
        lambda frame: [((), frame.snapshot.private_pid_namespace)],
    ),
    Family(
        "gpumond_snapshot_timestamp_seconds",
        "Unix time of the snapshot that these metrics describe.",
        (),
        lambda frame: [((), frame.snapshot.taken_at)],
    ),
    *REPORT_FAMILIES,
)
