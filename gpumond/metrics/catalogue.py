"""The catalogue: every metric that follows from a Frame, rendered anew for each one.

Nothing is kept between frames, so a device, process or pool that is gone is gone from the next
scrape, and a value that is unknown is an absent series. To add a metric, add a Family.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from gpumond.metrics import devices, programs
from gpumond.metrics.family import Family, Kind, Row
from gpumond.model.conditions import OF_DEVICES, conditions
from gpumond.model.frame import Frame
from gpumond.model.pools import HostPool, PoolUsage
from gpumond.model.snapshot import DeviceReading, ProcessUsage

PROCESSES_PER_DEVICE = 50


def pool_family(name: str, value: Callable[[PoolUsage], float | None], help: str, kind: Kind = "gauge") -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
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


def _held(pool: PoolUsage) -> int | None:
    return pool.held_bytes if pool.held_known else None


def _stranded(pool: PoolUsage) -> int | None:
    return pool.stranded_bytes if pool.held_known else None


def _reclaimable(pool: PoolUsage) -> int | None:
    """Where the library does not tell what it holds, it is known only that nothing is reclaimable."""
    known = pool.held_known or pool.reclaimable.exactness == "not_releasable"
    return pool.reclaimable.likely if known else None


def _ledger(frame: Frame) -> Iterator[Row]:
    index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
    sums: Counter[tuple[str, str, str, str]] = Counter()
    for line in frame.ledger.lines:
        sums[line.device_uuid, index[line.device_uuid], line.workload, line.share] += line.used_bytes
    yield from sums.items()


def _overcount(frame: Frame) -> Iterator[Row]:
    index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
    for entry in frame.ledger.overcounts:
        yield (entry.device_uuid, index[entry.device_uuid]), entry.overcount_bytes


def top_processes(device: DeviceReading) -> tuple[list[ProcessUsage], list[ProcessUsage]]:
    """The processes that get series of their own, largest first, and the rest, whose bytes are summed."""
    ordered = sorted(device.processes or (), key=lambda process: -(process.used_bytes or 0))
    return ordered[:PROCESSES_PER_DEVICE], ordered[PROCESSES_PER_DEVICE:]


def _process_used(frame: Frame) -> Iterator[Row]:
    for device in frame.snapshot.devices:
        shown, rest = top_processes(device)
        for process in shown:
            yield (device.uuid, str(device.index), str(process.pid)), process.used_bytes
        if rest:
            used = sum(process.used_bytes or 0 for process in rest)
            yield (device.uuid, str(device.index), "other"), used


def _process_info(frame: Frame) -> Iterator[Row]:
    workloads = {(report.pid, report.start_ticks): report.workload for report in frame.snapshot.reports}
    seen: set[int] = set()
    for device in frame.snapshot.devices:
        for process in top_processes(device)[0]:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            workload = workloads.get((process.pid, process.start_ticks or 0), "")
            user = process.user or ("" if process.uid is None else str(process.uid))
            labels = (str(process.pid), process.comm or "", user, workload, process.container or "")
            names = (process.container_name or "", process.pod_name or "", process.pod_namespace or "")
            yield (*labels, *names), 1


def _verdicts(frame: Frame) -> Iterator[Row]:
    index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
    for verdict in frame.verdicts:
        yield (verdict.device_uuid, index.get(verdict.device_uuid, ""), str(verdict.pid or ""), verdict.kind), 1


def _time_to_oom(frame: Frame) -> Iterator[Row]:
    """The least, where several verdicts on a process say so."""
    index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
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
    yield (source.reason,), float(source.up)


def _conditions(frame: Frame) -> Iterator[Row]:
    index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
    for uuid, kind in conditions(frame.snapshot):
        if uuid is not None:
            yield (uuid, index[uuid], kind), 1


def _private(frame: Frame) -> Iterator[Row]:
    yield (), frame.snapshot.private_pid_namespace


def _process_utilization(frame: Frame) -> Iterator[Row]:
    for device in frame.snapshot.devices:
        for process in top_processes(device)[0]:
            yield (device.uuid, str(device.index), str(process.pid)), process.utilization_ratio


def _driver_info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    versions = (source.driver_version, source.library_version, source.cuda_version)
    if any(versions):
        yield (source.name, *(version or "" for version in versions)), 1


FAMILIES: tuple[Family, ...] = (  # what there is of each program comes last: a page that is full leaves that out
    *devices.FAMILIES,
    Family(
        "gpumond_memory_bytes",
        "gauge",
        "The ledger: used memory by share (live, cached, stranded, overhead, opaque, unclaimed) and workload. "
        "Sums per device to gpumond_device_memory_used_bytes + gpumond_memory_overcount_bytes.",
        ("uuid", "gpu", "workload", "share"),
        _ledger,
    ),
    Family(
        "gpumond_memory_overcount_bytes",
        "gauge",
        "By how much agents and driver disagree, being read moments apart.",
        ("uuid", "gpu"),
        _overcount,
    ),
    Family(
        "gpumond_process_memory_used_bytes",
        "gauge",
        f"Memory of a process on a device according to the driver; beyond the {PROCESSES_PER_DEVICE} largest "
        'of a device the rest is pid="other".',
        ("uuid", "gpu", "pid"),
        _process_used,
    ),
    Family(
        "gpumond_process_utilization_ratio",
        "gauge",
        "How busy the process kept the busiest of the device's engines lately; of the processes that have "
        "gpumond_process_memory_used_bytes, where the driver tells it of each.",
        ("uuid", "gpu", "pid"),
        _process_utilization,
    ),
    Family(
        "gpumond_process_info",
        "gauge",
        "Descriptive labels of a process that has gpumond_process_memory_used_bytes.",
        ("pid", "comm", "user", "workload", "container", "container_name", "pod_name", "pod_namespace"),
        _process_info,
    ),
    Family(
        "gpumond_verdict",
        "gauge",
        "1 for each verdict that stands.",
        ("uuid", "gpu", "pid", "kind"),
        _verdicts,
    ),
    Family(
        "gpumond_time_to_oom_seconds",
        "gauge",
        "Time until the memory is full if it goes on growing as it does.",
        ("uuid", "gpu", "pid"),
        _time_to_oom,
    ),
    Family("gpumond_alerts", "gauge", "Active alerts.", ("rule", "phase"), _alerts),
    Family(
        "gpumond_agents", "gauge", "Programs with an agent that use a device or have used one.", ("workload",), _agents
    ),
    Family(
        "gpumond_driver_up",
        "gauge",
        "1 if the devices can be read; else 0, and reason says in one word why.",
        ("reason",),
        _driver_up,
    ),
    Family(
        "gpumond_driver_responsive",
        "gauge",
        "0 while a driver call is overdue, else 1.",
        (),
        lambda frame: [((), float(frame.snapshot.source.responsive))],
    ),
    Family(
        "gpumond_driver_info",
        "gauge",
        "Versions of the driver, of its library, and of the newest CUDA that it serves.",
        ("source", "driver_version", "library_version", "cuda_version"),
        _driver_info,
    ),
    Family(
        "gpumond_device_condition",
        "gauge",
        f"1 for each thing that bounds what the device's numbers mean: {', '.join(sorted(OF_DEVICES))}.",
        ("uuid", "gpu", "condition"),
        _conditions,
    ),
    Family(
        "gpumond_private_pid_namespace",
        "gauge",
        "1 if the daemon has pids of its own, so that those which the driver lists may mean other processes; else 0.",
        (),
        _private,
    ),
    Family(
        "gpumond_snapshot_timestamp_seconds",
        "gauge",
        "When the facts of this frame were taken.",
        (),
        lambda frame: [((), frame.snapshot.taken_at)],
    ),
    Family(
        "gpumond_agent_report_age_seconds", "gauge", "Age of the agent's report in this frame.", ("pid",), _report_age
    ),
    pool_family("live_bytes", lambda p: p.live_bytes, "Memory that the allocator has handed out to the program."),
    pool_family(
        "peak_live_bytes",
        lambda p: p.peak_live_bytes,
        "The most live memory so far, as the allocator marks it; the program may reset the mark.",
    ),
    pool_family(
        "held_bytes",
        _held,
        "Memory that the allocator has taken from the driver; absent where its library does not tell.",
    ),
    pool_family("reclaimable_bytes", _reclaimable, "Memory that a flush would most probably return."),
    pool_family("stranded_bytes", _stranded, "Memory held and free that no flush returns: fragmentation, or an arena."),
    pool_family(
        "spillable_bytes", lambda p: p.spillable_bytes, "Live memory that the step spill would move to the host."
    ),
    pool_family("ooms_total", lambda p: p.ooms, "Out-of-memory errors of the allocator.", "counter"),
    pool_family(
        "retries_total", lambda p: p.retries, "Allocations that succeeded only after a flush of the cache.", "counter"
    ),
    pool_family(
        "device_allocations_total",
        lambda p: p.device_allocations,
        "Allocations that the allocator made at the driver.",
        "counter",
    ),
    pool_family("device_frees_total", lambda p: p.device_frees, "Allocations that the allocator gave back.", "counter"),
    pool_family(
        "thrashes_total",
        lambda p: p.thrashes,
        "Flushes whose bytes the program took from the driver again at once.",
        "counter",
    ),
    host_pool_family(
        "live_bytes", lambda p: p.live_bytes, "Pinned host memory that an allocator has handed out. Not device memory."
    ),
    host_pool_family(
        "held_bytes", lambda p: p.held_bytes, "Pinned host memory that an allocator holds. Not device memory."
    ),
    *programs.FAMILIES,
)
