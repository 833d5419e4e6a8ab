"""Fleet: which machines waste, leak, fill?"""

from __future__ import annotations

from gpumond.top.bars import COLOURS
from grafana.frames import board, happened, machine
from grafana.parts import (
    ANY,
    BAD,
    FULL,
    WARNING,
    Column,
    Query,
    figure,
    leads_to,
    ledger,
    listing,
    ranking,
    runbook_of,
    series,
)
from grafana.queries import FLEET, ORDINARY, happening, or_none, share, whole, with_program

USED = f"gpumond_device_memory_used_bytes{{{FLEET}}}"
SIZE = f"gpumond_device_memory_size_bytes{{{FLEET}}}"
BY_DEVICE = "sum by (instance, gpu, uuid)"

TO_DEVICE = leads_to("device", machine="__field.labels.instance", device="__field.labels.uuid")
MACHINE = Column("instance", "Machine", leads_to("device", machine="__value.raw"))
DEVICE = Column("uuid", "Device", leads_to("device", machine='__data.fields["Machine"]', device="__value.raw"))
WORKLOAD = Column(
    "workload", "Workload", leads_to("workload", machine='__data.fields["Machine"]', workload="__value.raw")
)
GPU, PID = Column("gpu", "GPU"), Column("pid", "PID")

GLANCE = [
    figure(
        "Devices up",
        "Devices that respond to their driver, MIG instances included.",
        "short",
        f'sum(gpumond_devices{{{FLEET}, state="up"}})',
    ),
    figure(
        "Devices lost",
        "Known devices that do not respond: off the bus, or they or their driver are being reset.",
        "short",
        f'sum(gpumond_devices{{{FLEET}, state="down"}})',
        levels=ANY,
        runbooks=("device-lost",),
    ),
    figure(
        "Daemons down",
        "Daemons of the job gpumond that Prometheus cannot scrape.",
        "short",
        f'count(up{{job="gpumond", {FLEET}}} == 0) or count(up{{job="gpumond", {FLEET}}}) * 0',
        levels=ANY,
        runbooks=("daemon-down",),
    ),
    figure(
        "Used",
        "Share of all memory that is used, as reported by the drivers.",
        "percentunit",
        f"sum({whole(USED)}) / sum({whole(SIZE)})",
        levels=FULL,
        runbooks=("device-nearly-full",),
    ),
    figure(
        "Reclaimable",
        "Unused cache of programs; a flush releases it.",
        "bytes",
        f"sum({whole(share('cached', FLEET))})",
        runbooks=("reclaimable-waste",),
    ),
    figure(
        "Unclaimed",
        "Used memory that is owned by no visible process.",
        "bytes",
        f"sum({whole(share('unclaimed', FLEET))})",
        runbooks=("orphan-memory",),
    ),
    figure(
        "Leaks",
        "Programs with a verdict of leak.",
        "short",
        or_none(f'sum(gpumond_verdict{{{FLEET}, kind="leak"}})', FLEET),
        levels=ANY,
        runbooks=("leak",),
    ),
    figure(
        "Alerts firing",
        "Firing alerts of the daemons' rules.",
        "short",
        or_none(f'sum(gpumond_alerts{{{FLEET}, phase="firing"}})', FLEET),
        levels=((1, WARNING), (10, BAD)),
    ),
]

OVER_TIME = [
    ledger(
        "Memory of the fleet",
        "The ledgers of all devices. The shares sum to used memory. MIG instances are included in their device.",
        FLEET,
        Query(f"sum({whole(SIZE)})", "size"),
        instances=False,
    ),
    series(
        "Alerts firing, by rule",
        "Firing alerts of the daemons' rules over time.",
        "short",
        Query(f'sum by (rule) (gpumond_alerts{{{FLEET}, phase="firing"}})', "{{rule}}"),
        height=11,
        stacked=True,
    ),
]

GIVEN_BACK = [
    series(
        "Given back, by machine",
        "Memory that flushes released, according to receipts.",
        "bytes",
        Query(happening("gpumond_flush_released_bytes_total", "instance", FLEET), "{{instance}}"),
        bars=True,
        stacked=True,
        runbooks=("reclaimable-waste",),
    ),
    series(
        "Given back, by workload",
        "Memory that flushes of each workload released, according to receipts.",
        "bytes",
        Query(happening("gpumond_workload_flush_released_bytes_total", "workload", FLEET), "{{workload}}"),
        bars=True,
        stacked=True,
        runbooks=("reclaimable-waste",),
    ),
    series(
        "Receipts by outcome",
        "Receipts of all machines, one per pool, by outcome.",
        "short",
        Query(happening("gpumond_flushes_total", "outcome", FLEET), "{{outcome}}"),
        bars=True,
        stacked=True,
    ),
]

RANKED = [
    ranking(
        "Fullest devices",
        "Used share of the ten fullest devices.",
        "percentunit",
        Query(f"topk(10, {USED} / {SIZE})", "{{instance}} GPU {{gpu}}"),
        levels=FULL,
        most=1,
        link=TO_DEVICE,
        runbooks=("device-nearly-full",),
    ),
    ranking(
        "Most reclaimable",
        "The ten devices on which a flush would release most.",
        "bytes",
        Query(f"topk(10, {BY_DEVICE} ({share('cached', FLEET)}))", "{{instance}} GPU {{gpu}}"),
        colour=COLOURS["cached"],
        link=TO_DEVICE,
        runbooks=("reclaimable-waste",),
    ),
    ranking(
        "Most stranded",
        "The ten devices with most memory that is held but free, and that no flush releases: fragmentation.",
        "bytes",
        Query(f"topk(10, {BY_DEVICE} ({share('stranded', FLEET)}))", "{{instance}} GPU {{gpu}}"),
        colour=COLOURS["stranded"],
        link=TO_DEVICE,
        runbooks=("fragmentation",),
    ),
]


def _pool(name: str) -> str:
    return f"max by (instance, gpu, uuid, workload, pid, allocator) (gpumond_pool_{name}_bytes{{{FLEET}}})"


WASTE = [
    listing(
        "What flushes would return",
        "The 25 pools with most unused memory, including pools that allocate from another pool.",
        (MACHINE, GPU, DEVICE, WORKLOAD, PID, Column("allocator", "Allocator")),
        Query(f"topk(25, {_pool('reclaimable')} > 0)", "Reclaimable", "bytes"),
        sort="Reclaimable",
        runbooks=("reclaimable-waste",),
    ),
    listing(
        "Machines",
        "One row for each machine. MIG instances are included in their device.",
        (MACHINE,),
        Query(f"sum by (instance) ({whole(SIZE)})", "Size", "bytes"),
        Query(f"sum by (instance) ({whole(USED)})", "Used", "bytes"),
        *(
            Query(f"sum by (instance) ({whole(share(name, FLEET))})", name.capitalize(), "bytes")
            for name in ("cached", "stranded", "unclaimed")
        ),
        Query(f'sum by (instance) (gpumond_verdict{{{FLEET}, kind="leak"}})', "Leaks"),
        Query(f'sum by (instance) (gpumond_alerts{{{FLEET}, phase="firing"}})', "Firing"),
        sort="Used",
    ),
]

VERDICT = f'max by (job, instance, gpu, uuid, pid, kind) (gpumond_verdict{{{FLEET}, kind!~"{ORDINARY}"}})'
LEFT = f"max by (job, instance, gpu, uuid, pid) (gpumond_time_to_oom_seconds{{{FLEET}}})"

JUDGED = [
    listing(
        "Verdicts",
        "Verdicts on programs and devices, except ordinary ones.",
        (Column("kind", "Verdict", runbook_of("verdicts")), MACHINE, GPU, DEVICE, WORKLOAD, PID),
        Query(
            "max by (instance, gpu, uuid, workload, pid, kind) "
            f"({with_program(VERDICT, 'workload')} or on (job, instance, uuid, pid, kind) {VERDICT})",
            "Stands",
        ),
        sort="Verdict",
    ),
    listing(
        "Full soon",
        "Time until the device is full at the present rate of growth of the program.",
        (MACHINE, GPU, DEVICE, WORKLOAD, PID),
        Query(
            "max by (instance, gpu, uuid, workload, pid) "
            f"({with_program(LEFT, 'workload')} or on (job, instance, uuid, pid) {LEFT})",
            "Time left",
            "s",
        ),
        sort="Time left",
        ascending=True,
        width=14,
        runbooks=("leak",),
    ),
    listing(
        "Alerts",
        "Active alerts of the daemons' rules, each with a link to its runbook.",
        (MACHINE, Column("rule", "Rule", runbook_of("${__value.raw}")), Column("phase", "Phase")),
        Query(f"sum by (instance, rule, phase) (gpumond_alerts{{{FLEET}}})", "Alerts"),
        sort="Rule",
        ascending=True,
        width=10,
    ),
]

BOARD = board(
    "fleet",
    "Fleet",
    "Machines with unused, leaking or nearly full memory.",
    [machine(several=True)],
    ("At a glance", GLANCE),
    ("Over time", OVER_TIME),
    ("Given back", GIVEN_BACK),
    ("Devices", RANKED),
    ("Where to begin", WASTE),
    ("Verdicts and alerts", JUDGED),
    marks=[happened("Device lost", "red", "device-lost"), happened("Out of memory", "orange", "oom")],
)
