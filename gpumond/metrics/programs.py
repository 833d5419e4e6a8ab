"""Metric families of processes, and of what their agents report: pools, scopes, steps, handled out-of-memory errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

from gpumond.facts.frame import Frame
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.program import Program, ScopeDevice, ScopeUsage, StepUsage
from gpumond.facts.snapshot import ProcessUsage
from gpumond.metrics.families import Family, Row, families, family
from gpumond.quantities.table import (
    HOST_POOL,
    POOL,
    PROCESS_USED,
    PROCESS_UTILIZATION,
    PROGRAM,
    REPORT_AGE,
    STEP,
    Quantity,
)

PROCESSES_PER_DEVICE = 50
PROCESS_LABELS = ("uuid", "gpu", "pid")

Labels = tuple[str, ...]


def processes(frame: Frame) -> Iterator[tuple[Labels, ProcessUsage]]:
    """Yield the largest processes of each device."""
    for device, usages in frame.processes_by_size:
        for process in usages[:PROCESSES_PER_DEVICE]:
            yield (device.uuid, str(device.index), str(process.pid)), process


def pools(frame: Frame) -> Iterator[tuple[Labels, PoolUsage]]:
    index = frame.snapshot.gpu_labels
    for report in frame.snapshot.reports:
        pid = str(report.pid)
        for pool in report.pools:
            uuid = pool.device_uuid
            yield (uuid, index.get(uuid, ""), pid, report.workload, pool.allocator), pool


def host_pools(frame: Frame) -> Iterator[tuple[Labels, HostPool]]:
    for report in frame.snapshot.reports:
        for pool in report.host_pools:
            yield (str(report.pid), report.workload, pool.allocator), pool


def programs(frame: Frame) -> Iterator[tuple[Labels, Program]]:
    for report in frame.snapshot.reports:
        yield (str(report.pid), report.workload), report.program


def steps(frame: Frame) -> Iterator[tuple[Labels, StepUsage]]:
    for labels, program in programs(frame):
        if program.step is not None:
            yield labels, program.step


def scopes(frame: Frame) -> Iterator[tuple[Labels, ScopeUsage]]:
    for labels, program in programs(frame):
        for scope in program.scopes:
            yield (*labels, scope.name), scope


def scope_devices(frame: Frame) -> Iterator[tuple[Labels, ScopeDevice]]:
    index = frame.snapshot.gpu_labels
    for labels, scope in scopes(frame):
        for device in scope.devices:
            yield (device.device_uuid, index.get(device.device_uuid, ""), *labels), device


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
                yield (device.uuid, str(device.index), str(process.pid)), quotas[process.key].soft_limit_bytes


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


def _report_age(frame: Frame) -> Iterator[Row]:
    ages: defaultdict[str, float] = defaultdict(float)
    for report in frame.snapshot.reports:
        ages[str(report.pid)] = max(ages[str(report.pid)], report.age_seconds)
    for pid, age in ages.items():
        yield (pid,), age


SCOPE_DEVICE: tuple[Quantity[ScopeDevice], ...] = (
    Quantity(
        "retained_bytes",
        "bytes",
        "Live memory after the scope minus before it, summed over all entries; negative if the scope freed memory.",
        attrgetter("retained_bytes"),
    ),
    Quantity("peak_bytes", "bytes", "Peak live memory within the scope.", attrgetter("peak_bytes")),
)
SCOPE: tuple[Quantity[ScopeUsage], ...] = (
    Quantity("entries_total", "count", "Number of times the scope was entered.", attrgetter("entries")),
    Quantity(
        "retries_total", "count", "Cache flushes by the allocators themselves within the scope.", attrgetter("retries")
    ),
    Quantity("ooms_total", "count", "Entries of the scope that ended with an out-of-memory error.", attrgetter("ooms")),
)

OF_PROCESSES: tuple[Family, ...] = (
    family(
        "gpumond_process_",
        PROCESS_LABELS,
        PROCESS_USED,
        _process_used,
        f' Processes beyond the {PROCESSES_PER_DEVICE} largest of a device are summed as pid="other".',
    ),
    Family(
        "gpumond_process_limit_bytes",
        "gauge",
        "Lowest allocator limit of the process on this device, in bytes; absent if none.",
        PROCESS_LABELS,
        _process_limit,
    ),
    Family(
        "gpumond_process_soft_limit_bytes",
        "gauge",
        "Lowest soft limit of the quotas that match the process. Exported for processes that have "
        "gpumond_process_memory_used_bytes; absent without a soft limit.",
        PROCESS_LABELS,
        _process_soft_limit,
    ),
    Family(
        "gpumond_process_reserve_shortage_bytes",
        "gauge",
        "Bytes of the reserve of the process's quotas that it does not use and that are not free on the device. "
        "Exported for processes that have gpumond_process_memory_used_bytes; absent without a reserve, and while the "
        "free memory is unknown.",
        PROCESS_LABELS,
        _process_reserve_shortage,
    ),
    *families("gpumond_process_", PROCESS_LABELS, processes, (PROCESS_UTILIZATION,)),
    Family(
        "gpumond_process_info",
        "gauge",
        "Process metadata, for processes with gpumond_process_memory_used_bytes; the value is always 1.",
        (
            *("pid", "comm", "user", "workload", "container", "container_name"),
            *("pod_name", "pod_namespace", "pod_uid", "unit", "slurm_job", "rank", "world_size", "job_id"),
        ),
        _process_info,
    ),
)

OF_REPORTS: tuple[Family, ...] = (
    family("gpumond_", ("pid",), REPORT_AGE, _report_age),
    *families("gpumond_pool_", ("uuid", "gpu", "pid", "workload", "allocator"), pools, POOL),
    *families("gpumond_", ("pid", "workload", "allocator"), host_pools, HOST_POOL),
    *families("gpumond_scope_", ("uuid", "gpu", "pid", "workload", "scope"), scope_devices, SCOPE_DEVICE),
    *families("gpumond_scope_", ("pid", "workload", "scope"), scopes, SCOPE),
    *families("gpumond_", ("pid", "workload"), steps, STEP),
    *families("gpumond_", ("pid", "workload"), programs, PROGRAM),
)
