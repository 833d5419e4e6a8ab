"""Device: what does one device hold, who holds it, and how is it?"""

from __future__ import annotations

from grafana.columns import PID
from grafana.frames import Marks, alerts, board, device, flushes, happened, machine, ooms
from grafana.parts import (
    ALL_WELL,
    ANY,
    BAD,
    GOOD,
    WARNING,
    YES,
    Column,
    Query,
    figure,
    leads_to,
    ledger,
    listing,
    series,
    states,
)
from grafana.queries import DEVICE, MACHINE, PROCESS, named, processes, share, with_labels


def of(name: str, more: str = "") -> str:
    return f"gpumond_device_{name}{{{DEVICE}{more}}}"


WORKLOAD = leads_to("workload", machine="machine", workload="__value.raw")
HOT = ((80, WARNING), (90, BAD))
SOON = ((600, WARNING), (3600, GOOD))

GLANCE = [
    figure(
        "Up",
        "Up if the device responds to its driver; otherwise its values aren't shown.",
        "short",
        f"max({of('up')})",
        levels=ALL_WELL,
        below=BAD,
        text={"1": "up", "0": "down"},
        runbooks=("device-lost",),
    ),
    figure(
        "Used",
        "Fraction of the device's memory in use, as reported by the driver.",
        "percentunit",
        f"max({of('memory_used_bytes')} / {of('memory_size_bytes')})",
        runbooks=("device-nearly-full",),
    ),
    figure(
        "Reclaimable",
        "The programs' unused cache; a flush of the device releases it.",
        "bytes",
        f"sum({share('cached', DEVICE)})",
        runbooks=("reclaimable-waste",),
    ),
    figure(
        "Stranded",
        "Memory that is held but free, and that a flush can't release: fragmentation.",
        "bytes",
        f"sum({share('stranded', DEVICE)})",
        runbooks=("fragmentation",),
    ),
    figure(
        "Unattributed",
        "Used memory that belongs to no visible process.",
        "bytes",
        f"sum({share('unattributed', DEVICE)})",
        runbooks=("orphan-memory",),
    ),
    figure(
        "Time to full",
        "Time until the device is full at the current growth rate; unknown without a growing program.",
        "s",
        f"min(gpumond_time_to_full_seconds{{{DEVICE}}})",
        levels=SOON,
        below=BAD,
        runbooks=("leak",),
    ),
    figure(
        "Idle for",
        "Time since a kernel last ran on the device.",
        "s",
        f"max({of('idle_seconds')})",
        runbooks=("idle-holder",),
    ),
    figure(
        "Faults",
        "Active faults of the device: values that can't be read.",
        "short",
        f"sum({of('fault')}) or max({of('up')}) * 0",
        levels=ANY,
    ),
]

LEDGER = [
    ledger(
        "Ledger",
        "Memory by share. The areas sum to used memory as reported by the driver, plus the overcount if agents and "
        "driver disagree. The upper line is the size.",
        DEVICE,
        Query(f"max({of('memory_used_bytes')})", "used by the driver's count"),
        Query(f"max({of('memory_size_bytes')})", "size"),
        runbooks=("device-nearly-full", "reclaimable-waste", "fragmentation", "orphan-memory"),
    ),
    series(
        "By workload",
        "Used memory by workload; no agent: programs without an agent, and unattributed memory.",
        "bytes",
        Query(named(f"sum by (workload) (gpumond_memory_bytes{{{DEVICE}}})"), "{{workload}}"),
        height=11,
        stacked=True,
    ),
]

POOLS = [
    series(
        "Reclaimable, by process",
        "Memory that a flush of the process would most likely release, by pool.",
        "bytes",
        Query(
            f"max by (workload, pid, allocator) (gpumond_pool_reclaimable_bytes{{{DEVICE}}})",
            "{{workload}} ({{pid}}) {{allocator}}",
        ),
        runbooks=("reclaimable-waste",),
    ),
    series(
        "Reserved and disagreement",
        "Memory that the driver reserves, and the difference between agents and driver, read at different times.",
        "bytes",
        Query(f"max({of('memory_reserved_bytes')})", "reserved"),
        Query(f"max(gpumond_memory_overcount_bytes{{{DEVICE}}})", "overcount"),
    ),
    series(
        "Out of memory",
        "Failed allocations in each interval, and those that succeeded only after the allocator emptied its cache.",
        "short",
        Query(f"round(sum(increase(gpumond_pool_ooms_total{{{DEVICE}}}[$__rate_interval])))", "out of memory"),
        Query(f"round(sum(increase(gpumond_pool_retries_total{{{DEVICE}}}[$__rate_interval])))", "retries"),
        bars=True,
        stacked=True,
        colors={"out of memory": BAD, "retries": WARNING},
        runbooks=("out-of-memory", "allocation-retries"),
    ),
]

LABELS = "workload, comm, user"


def of_processes(metric: str) -> str:
    """Return a metric of the processes on the device, with labels of the processes."""
    value = f"max by ({PROCESS}) (gpumond_process_{metric}{{{DEVICE}}})"
    return f"max by (pid, {LABELS}) ({with_labels(value, LABELS, processes(MACHINE, LABELS))})"


HOLDERS = [
    listing(
        "Processes",
        "Processes with memory on the device, as reported by the driver, and their utilization if it is available.",
        (
            Column("workload", "Workload", WORKLOAD),
            PID,
            Column("comm", "Command"),
            Column("user", "User"),
        ),
        Query(of_processes("memory_used_bytes"), "Used", "bytes"),
        Query(of_processes("utilization_ratio"), "Busy", "percentunit"),
        sort="Used",
        width=12,
    ),
    listing(
        "Pools",
        "Memory held by allocators. A pool that allocates from another pool has a row, but is excluded from sums.",
        (Column("workload", "Workload", WORKLOAD), PID, Column("allocator", "Allocator")),
        *(
            Query(
                f"max by (workload, pid, allocator) (gpumond_pool_{name}_bytes{{{DEVICE}}})", name.capitalize(), "bytes"
            )
            for name in ("held", "live", "reclaimable", "stranded")
        ),
        sort="Held",
        width=12,
    ),
]

SLOWDOWN = of("temperature_limit_celsius", ', limit="slowdown"')
SHUTDOWN = of("temperature_limit_celsius", ', limit="shutdown"')
THROTTLE = of("throttle", ', reason!="gpu_idle"')
ECC = of("ecc_errors_total", ', scope="volatile"')

UNMAPPED = [
    series(
        "Unmapped, by process",
        "Memory that an allocator counts while its pages are released (sleep mode). It isn't part of used memory.",
        "bytes",
        Query(
            f"max by (workload, pid, allocator) (gpumond_pool_unmapped_bytes{{{DEVICE}}})",
            "{{workload}} ({{pid}}) {{allocator}}",
        ),
        width=24,
    ),
]

SENSORS = [
    series(
        "Activity",
        "Utilization. GPU: a kernel ran; memory controller: memory was read or written. Multiprocessors, "
        "tensor cores and memory bandwidth are counted by the hardware (Hopper and later).",
        "percentunit",
        Query(f"max({of('gpu_utilization_ratio')})", "GPU"),
        Query(f"max({of('memory_controller_utilization_ratio')})", "memory controller"),
        Query(f"max({of('sm_active_ratio')})", "multiprocessors"),
        Query(f"max({of('tensor_active_ratio')})", "tensor cores"),
        Query(f"max({of('dram_active_ratio')})", "memory bandwidth"),
        most=1,
    ),
    series(
        "Temperature",
        "Temperature by sensor; dashed: the limits at which the hardware slows down and shuts down.",
        "celsius",
        Query(f"max by (sensor) ({of('temperature_celsius')})", "{{sensor}}"),
        Query(f"max({SLOWDOWN})", "slowdown"),
        Query(f"max({SHUTDOWN})", "shutdown"),
        limits=("slowdown", "shutdown"),
    ),
    series(
        "Power",
        "Power draw of the device; dashed: the enforced limit.",
        "watt",
        Query(f"max({of('power_watts')})", "power"),
        Query(f"max({of('power_limit_watts')})", "limit"),
        limits=("limit",),
    ),
    series(
        "Clocks",
        "Clocks of multiprocessors and memory; dashed: their maximum.",
        "hertz",
        Query(f"max({of('sm_clock_hertz')})", "multiprocessors"),
        Query(f"max({of('memory_clock_hertz')})", "memory"),
        Query(f"max({of('sm_clock_max_hertz')})", "multiprocessors, highest"),
        Query(f"max({of('memory_clock_max_hertz')})", "memory, highest"),
        limits=("multiprocessors, highest", "memory, highest"),
    ),
    series(
        "Traffic",
        "PCIe: sampled over 20 ms every ten seconds. NVLink: all links, counted by the hardware (Hopper and later).",
        "binBps",
        Query(f"max({of('pcie_receive_bytes_per_second')})", "PCIe, to the device"),
        Query(f"max({of('pcie_transmit_bytes_per_second')})", "PCIe, from the device"),
        Query(f"max({of('nvlink_receive_bytes_per_second')})", "NVLink, to the device"),
        Query(f"max({of('nvlink_transmit_bytes_per_second')})", "NVLink, from the device"),
    ),
    series(
        "Fan",
        "Target speed as a fraction of the maximum; passively cooled devices have no fan.",
        "percentunit",
        Query(f"max({of('fan_speed_ratio')})", "fan"),
    ),
]

HEALTH = [
    states(
        "Throttled",
        "Reasons for reduced clocks over time, except idleness.",
        Query(f"max by (reason) ({THROTTLE})", "{{reason}}"),
        {"0": "no", "1": "held down"},
    ),
    listing(
        "Xid errors",
        "Errors that the driver has reported since the daemon started, by number.",
        (Column("xid", "Xid"),),
        Query(f"max by (xid) ({of('xid_errors_total')})", "Count"),
        Query(f"max by (xid) ({of('xid_last_seen_timestamp_seconds')}) * 1000", "Last seen", "dateTimeFromNow"),
        sort="Last seen",
        width=6,
        runbooks=("xid-errors",),
    ),
    listing(
        "Conditions and faults",
        "Permanent limits of the readings, and values that can't be read.",
        (Column("condition", "Condition"), Column("kind", "Fault")),
        Query(f"max by (condition) ({of('condition')})", "Condition holds", text=YES),
        Query(f"max by (kind) ({of('fault')})", "Fault lasts", text=YES),
        sort="Condition",
        width=6,
    ),
    series(
        "ECC and link errors",
        "Memory errors since the driver was loaded, and PCIe and NVLink errors per minute.",
        "short",
        Query(
            f"sum by (kind) (rate({ECC}[$__rate_interval])) * 60",
            "ECC {{kind}}",
        ),
        Query(f"sum(rate({of('pcie_replays_total')}[$__rate_interval])) * 60", "PCIe replays"),
        Query(f"sum by (kind) (rate({of('nvlink_errors_total')}[$__rate_interval])) * 60", "NVLink {{kind}}"),
        width=12,
    ),
    series(
        "Memory replaced",
        "Rows replaced by spare rows (Ampere and later), retired pages (earlier devices).",
        "short",
        Query(f"max by (cause) ({of('remapped_rows')})", "rows, {{cause}}"),
        Query(f"max by (cause) ({of('retired_pages')})", "pages, {{cause}}"),
        width=12,
    ),
]

XIDS = Marks(
    "Xid error",
    "red",
    f"{of('xid_last_seen_timestamp_seconds')} * 1000",
    "Xid {{xid}}",
    value_is_time=True,
)

BOARD = board(
    "device",
    "Device",
    "Memory of one device by program and share, and the health of the device.",
    [machine(several=False), device()],
    ("Overview", GLANCE),
    ("Memory", LEDGER),
    ("Reclaimable memory", POOLS),
    ("Use by processes", HOLDERS),
    ("Unmapped memory", UNMAPPED),
    ("Sensors", SENSORS),
    ("Health", HEALTH),
    marks=[
        XIDS,
        happened("Device lost", "red", "device-lost"),
        ooms(DEVICE),
        flushes(MACHINE, pools=DEVICE),
        alerts(DEVICE),
    ],
    collapsed=("Unmapped memory", "Sensors", "Health"),
    of_machine=True,
)
