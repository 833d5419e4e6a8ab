"""Catalogue of the metrics that derive from a Frame.

No state is kept between frames: the series of a device, process or pool that no longer exists are absent from the next
scrape, and an unknown value is an absent series. To add a metric, add a Family.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from gpumond.facts.frame import Frame
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.snapshot import NO_DEVICE
from gpumond.facts.verdicts import KINDS, SHAPES
from gpumond.metrics import devices, engines, programs
from gpumond.metrics.families import Family, Kind, Row
from gpumond.tick.conditions import OF_DEVICES, conditions

PROCESSES_PER_DEVICE = 50


def pool_family(name: str, value: Callable[[PoolUsage], float | None], help: str, kind: Kind = "gauge") -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        index = frame.snapshot.gpu_labels
        for report in frame.snapshot.reports:
            for pool in report.pools:
                labels = (pool.device_uuid, index.get(pool.device_uuid, ""), str(report.pid), report.workload)
                yield (*labels, pool.allocator), value(pool)

    return Family(f"gpumond_pool_{name}", kind, help, ("uuid", "gpu", "pid", "workload", "allocator"), rows)


def host_pool_family(name: str, value: Callable[[HostPool], float], help: str) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for report in frame.snapshot.reports:
            for pool in report.host_pools:
                yield (str(report.pid), report.workload, pool.allocator), value(pool)

    return Family(f"gpumond_host_pool_{name}", "gauge", help, ("pid", "workload", "allocator"), rows)


def _reclaimable(pool: PoolUsage) -> int | None:
    """Return the reclaimable bytes. If the library does not report its held bytes, only "not releasable" is known."""
    known = (pool.held_known and pool.live_bytes is not None) or pool.reclaimable.exactness == "not_releasable"
    return pool.reclaimable.likely if known else None


def _ledger(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    sums: Counter[tuple[str, str, str, str]] = Counter()
    for line in frame.ledger.lines:
        sums[line.device_uuid, index[line.device_uuid], line.workload, line.share] += line.used_bytes
    yield from sums.items()


def _overcount(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    for entry in frame.ledger.overcounts:
        yield (entry.device_uuid, index[entry.device_uuid]), entry.overcount_bytes


def _process_used(frame: Frame) -> Iterator[Row]:
    for device, processes in frame.processes_by_size:
        for process in processes[:PROCESSES_PER_DEVICE]:
            yield (device.uuid, str(device.index), str(process.pid)), process.used_bytes
        if len(processes) > PROCESSES_PER_DEVICE:
            used = sum(process.used_bytes or 0 for process in processes[PROCESSES_PER_DEVICE:])
            yield (device.uuid, str(device.index), "other"), used


def _process_limit(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    for (uuid, key), limit_bytes in frame.snapshot.limits.items():
        yield (uuid, index.get(uuid, ""), str(key.pid)), limit_bytes


def _process_soft_limit(frame: Frame) -> Iterator[Row]:
    quotas = frame.snapshot.quotas_by_process
    for device, processes in frame.processes_by_size if quotas else ():
        for process in processes[:PROCESSES_PER_DEVICE]:
            if process.key in quotas:
                yield (device.uuid, str(device.index), str(process.pid)), quotas[process.key].soft_bytes


def _process_reserve_shortage(frame: Frame) -> Iterator[Row]:
    shortages = frame.snapshot.reserve_shortages
    for device, processes in frame.processes_by_size if shortages else ():
        for process in processes[:PROCESSES_PER_DEVICE]:
            if (device.uuid, process.key) in shortages:
                row = device.uuid, str(device.index), str(process.pid)
                yield row, shortages[device.uuid, process.key]


def _process_info(frame: Frame) -> Iterator[Row]:
    reports = frame.snapshot.reports_by_process
    seen: set[int] = set()  # the label: several series for one pid would break joins
    for _, processes in frame.processes_by_size:
        for process in processes[:PROCESSES_PER_DEVICE]:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            report = reports.get(process.key)
            workload = report.workload if report else ""
            user = process.user or ("" if process.uid is None else str(process.uid))
            labels = (str(process.pid), process.comm or "", user, workload, process.container or "")
            names = (process.container_name, process.pod_name, process.pod_namespace, process.pod_uid)
            place = (report.rank, report.world_size, report.job) if report else (None, None, "")
            owner = (process.unit, process.slurm_job, *("" if number is None else str(number) for number in place))
            yield (*labels, *(name or "" for name in (*names, *owner))), 1


def _verdicts(frame: Frame) -> Iterator[Row]:
    """Yield the verdicts except shapes: each program has one at any time, and a new series for each change."""
    index = frame.snapshot.gpu_labels
    for verdict in frame.verdicts:
        if verdict.kind not in SHAPES:
            yield (verdict.device_uuid, index.get(verdict.device_uuid, ""), str(verdict.pid or ""), verdict.kind), 1


def _time_to_oom(frame: Frame) -> Iterator[Row]:
    """Yield the lowest estimate if several verdicts apply to the same process."""
    index = frame.snapshot.gpu_labels
    times: dict[tuple[str, str, str], float] = {}
    for verdict in frame.verdicts:
        if (seconds := verdict.time_to_oom_seconds) is not None:
            labels = (verdict.device_uuid, index.get(verdict.device_uuid, ""), str(verdict.pid or ""))
            times[labels] = min(seconds, times.get(labels, seconds))
    yield from times.items()


def _alerts(frame: Frame) -> Iterator[Row]:
    yield from Counter((alert.rule, alert.phase) for alert in frame.alerts).items()


def _agents(frame: Frame) -> Iterator[Row]:
    yield from Counter((report.workload,) for report in frame.snapshot.reports if report.uses_device).items()


def _report_age(frame: Frame) -> Iterator[Row]:
    ages: defaultdict[str, float] = defaultdict(float)
    for report in frame.snapshot.reports:
        ages[str(report.pid)] = max(ages[str(report.pid)], report.age_seconds)
    for pid, age in ages.items():
        yield (pid,), age


def _driver_up(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    yield (), None if source.reason == NO_DEVICE else float(source.up)


def _driver_down_reason(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    if not source.up:
        yield (source.reason,), 1


def _conditions(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    for uuid, kind in dict.fromkeys((each.device_uuid, each.kind) for each in conditions(frame.snapshot)):
        if uuid is not None:
            yield (uuid, index[uuid], kind), 1


def _private(frame: Frame) -> Iterator[Row]:
    yield (), frame.snapshot.private_pid_namespace


def _process_utilization(frame: Frame) -> Iterator[Row]:
    for device, processes in frame.processes_by_size:
        for process in processes[:PROCESSES_PER_DEVICE]:
            yield (device.uuid, str(device.index), str(process.pid)), process.utilization_ratio


def _driver_info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    versions = (source.driver_version, source.library_version, source.cuda_version)
    if any(versions):
        yield (source.name, *(version or "" for version in versions)), 1


FAMILIES: tuple[Family, ...] = (  # Families of programs are last: a page at the series limit drops these first.
    *devices.FAMILIES,
    Family(
        "gpumond_memory_bytes",
        "gauge",
        "Used memory by workload and share (live, cached, stranded, overhead, opaque, unclaimed). Overhead is what no "
        "supported allocator reports: the CUDA context, libraries, NCCL, CUDA graphs, imported memory. "
        "The sum per device is gpumond_device_memory_used_bytes + gpumond_memory_overcount_bytes.",
        ("uuid", "gpu", "workload", "share"),
        _ledger,
    ),
    Family(
        "gpumond_memory_overcount_bytes",
        "gauge",
        "Bytes by which the lines exceed the driver's value: for a moment, because agents and driver are read at "
        "different times; for longer, because processes share memory (CUDA IPC, VMM) that the driver counts for each.",
        ("uuid", "gpu"),
        _overcount,
    ),
    Family(
        "gpumond_process_memory_used_bytes",
        "gauge",
        f"Device memory used by the process, as reported by the driver. Processes beyond the {PROCESSES_PER_DEVICE} "
        'largest of a device are summed as pid="other".',
        ("uuid", "gpu", "pid"),
        _process_used,
    ),
    Family(
        "gpumond_process_limit_bytes",
        "gauge",
        "Limit of the process on the device: the lowest that one of its allocators has. Absent without a limit.",
        ("uuid", "gpu", "pid"),
        _process_limit,
    ),
    Family(
        "gpumond_process_soft_limit_bytes",
        "gauge",
        "Lowest soft limit of the quotas that match the process. Exported for processes that have "
        "gpumond_process_memory_used_bytes; absent without a soft limit.",
        ("uuid", "gpu", "pid"),
        _process_soft_limit,
    ),
    Family(
        "gpumond_process_reserve_shortage_bytes",
        "gauge",
        "Bytes of the reserve of the process's quotas that it does not use and that are not free on the device. "
        "Exported for processes that have gpumond_process_memory_used_bytes; absent without a reserve, and while the "
        "free memory is unknown.",
        ("uuid", "gpu", "pid"),
        _process_reserve_shortage,
    ),
    Family(
        "gpumond_process_utilization_ratio",
        "gauge",
        "Recent utilization of the device's busiest engine by the process. Exported for processes that have "
        "gpumond_process_memory_used_bytes, if the driver reports utilization per process.",
        ("uuid", "gpu", "pid"),
        _process_utilization,
    ),
    Family(
        "gpumond_process_info",
        "gauge",
        "Labels that describe a process that has gpumond_process_memory_used_bytes.",
        (
            *("pid", "comm", "user", "workload", "container", "container_name"),
            *("pod_name", "pod_namespace", "pod_uid", "unit", "slurm_job", "rank", "world_size", "job_id"),
        ),
        _process_info,
    ),
    Family(
        "gpumond_verdict",
        "gauge",
        "1 for each active verdict, except shapes of healthy curves, which /api/v1/verdicts contains. Kinds: "
        f"{', '.join(kind.name for kind in KINDS if not kind.is_shape)}.",
        ("uuid", "gpu", "pid", "kind"),
        _verdicts,
    ),
    Family(
        "gpumond_time_to_oom_seconds",
        "gauge",
        "Estimated time until the device memory is full at the current rate of growth.",
        ("uuid", "gpu", "pid"),
        _time_to_oom,
    ),
    Family("gpumond_alerts", "gauge", "Number of active alerts by rule and phase.", ("rule", "phase"), _alerts),
    Family(
        "gpumond_agents",
        "gauge",
        "Number of programs with an agent that use, or have used, a device.",
        ("workload",),
        _agents,
    ),
    *engines.FAMILIES,
    Family(
        "gpumond_driver_up",
        "gauge",
        "1 if the devices can be read, else 0. Absent on a machine without a device.",
        (),
        _driver_up,
    ),
    Family(
        "gpumond_driver_down_reason",
        "gauge",
        "1 for the reason why the devices cannot be read: starting, released, no_device (the machine has none), or the "
        "kind of a fault. Absent while they can be read.",
        ("reason",),
        _driver_down_reason,
    ),
    Family(
        "gpumond_driver_responsive",
        "gauge",
        "0 while a driver call exceeds its deadline, else 1.",
        (),
        lambda frame: [((), float(frame.snapshot.source.responsive))],
    ),
    Family(
        "gpumond_driver_info",
        "gauge",
        "Versions of the driver, of its library, and of the newest CUDA release that it supports.",
        ("source", "driver_version", "library_version", "cuda_version"),
        _driver_info,
    ),
    Family(
        "gpumond_device_condition",
        "gauge",
        f"1 for each condition that limits the accuracy of the device's values: {', '.join(sorted(OF_DEVICES))}.",
        ("uuid", "gpu", "condition"),
        _conditions,
    ),
    Family(
        "gpumond_private_pid_namespace",
        "gauge",
        "1 if the daemon runs in its own PID namespace, where the driver's pids may refer to other processes; else 0.",
        (),
        _private,
    ),
    Family(
        "gpumond_snapshot_timestamp_seconds",
        "gauge",
        "Unix time at which the snapshot was taken.",
        (),
        lambda frame: [((), frame.snapshot.taken_at)],
    ),
    Family(
        "gpumond_agent_report_age_seconds", "gauge", "Age of the agent's most recent report.", ("pid",), _report_age
    ),
    pool_family(
        "live_bytes",
        lambda p: p.live_bytes,
        "Memory that the allocator has allocated to the program. Absent if nothing counts it.",
    ),
    pool_family(
        "live_allocations",
        lambda p: p.live_allocations,
        "Allocations that the program has not freed. Absent if the allocator does not count them.",
    ),
    pool_family(
        "peak_live_bytes",
        lambda p: p.peak_live_bytes,
        "Peak live memory, as recorded by the allocator; the program may reset it.",
    ),
    pool_family(
        "held_bytes",
        lambda pool: pool.held_bytes if pool.held_known else None,
        "Memory that the allocator has reserved from the driver; absent if its library does not report it.",
    ),
    pool_family("reclaimable_bytes", _reclaimable, "Memory that a flush is expected to release."),
    pool_family(
        "stranded_bytes",
        lambda pool: pool.stranded_bytes if pool.held_known and pool.live_bytes is not None else None,
        "Free memory in the pool that a flush cannot release: fragmentation, or an arena.",
    ),
    pool_family(
        "spillable_bytes", lambda p: p.spillable_bytes, "Live memory that the flush step spill would move to the host."
    ),
    pool_family(
        "unmapped_bytes",
        lambda p: p.unmapped_bytes,
        "Memory that the allocator counts while its pages are released (sleep mode). It is not part of used, live or "
        "held memory. Absent if it is unknown.",
    ),
    pool_family("ooms_total", lambda p: p.ooms, "Out-of-memory errors raised by the allocator.", "counter"),
    pool_family(
        "retries_total",
        lambda p: p.retries,
        "Allocations that succeeded only after the allocator flushed its cache.",
        "counter",
    ),
    pool_family(
        "device_allocations_total",
        lambda p: p.device_allocations,
        "Memory allocations that the allocator requested from the driver.",
        "counter",
    ),
    pool_family(
        "device_frees_total",
        lambda p: p.device_frees,
        "Memory allocations that the allocator returned to the driver.",
        "counter",
    ),
    pool_family(
        "thrashes_total",
        lambda p: p.thrashes,
        "Flushes whose released memory the program immediately reallocated from the driver.",
        "counter",
    ),
    host_pool_family(
        "live_bytes", lambda p: p.live_bytes, "Pinned host memory allocated to the program. This is not device memory."
    ),
    host_pool_family(
        "held_bytes", lambda p: p.held_bytes, "Pinned host memory held by the allocator. This is not device memory."
    ),
    *programs.FAMILIES,
)
