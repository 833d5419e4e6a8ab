"""Examples in the OpenAPI document: one device, one program, its flush."""

from __future__ import annotations

from dataclasses import replace

from gpumond.events import Event
from gpumond.facts.engines import EngineModel, EngineProcess, EngineReading
from gpumond.facts.frame import Alert, Frame, GrowthLine, Ledger, LedgerLine, Overcount, RuledOutCause, Verdict
from gpumond.facts.pools import ExpectedRelease, PoolBytes, PoolUsage, Receipt, Reclaimable, StepResult
from gpumond.facts.program import (
    AllocationSite,
    AppliedLimit,
    ByteChange,
    Call,
    Dump,
    LiveClasses,
    Program,
    ScopeDevice,
    ScopeUsage,
    StepUsage,
)
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Sensors, Snapshot, SourceState
from gpumond.facts.units import GIB as GIB
from gpumond.serve.full_frame import holdings
from gpumond.store.audit import AuditEntry

UUID = "GPU-5a3c9a52-6f1e-4e0c-9b0a-2f8f6f7d1c11"
TAKEN_AT = 1_790_000_000.0
START_TICKS = 81_234_567

PROCESS = ProcessUsage(
    pid=4242,
    start_ticks=START_TICKS,
    used_bytes=78 * GIB,
    kinds=("compute",),
    comm="python",
    uid=1000,
    command="python train.py",
)
DEVICE = DeviceReading(
    uuid=UUID,
    index=0,
    name="NVIDIA H100 80GB HBM3",
    vendor="nvidia",
    pci_bus_id="00000000:1B:00.0",
    parent_uuid=None,
    size_bytes=80 * GIB,
    used_bytes=78 * GIB,
    free_bytes=GIB,
    reserved_bytes=GIB,
    processes=(PROCESS,),
    sensors=Sensors(
        gpu_utilization_ratio=0.97,
        memory_controller_utilization_ratio=0.61,
        sm_clock_hertz=1.98e9,
        memory_clock_hertz=2.619e9,
        gpu_temperature_celsius=64.0,
        power_watts=612.0,
        energy_joules=8.1e9,
    ),
)
POOL = PoolUsage(
    allocator="torch",
    device_uuid=UUID,
    live_bytes=31 * GIB,
    held_bytes=76 * GIB,
    reclaimable=Reclaimable(40 * GIB, 40 * GIB, 40 * GIB),
    stranded_bytes=5 * GIB,
    ooms=0,
    retries=3,
)
PROGRAM = Program(
    scopes=(
        ScopeUsage(
            name="epoch/forward",
            entries=120,
            ooms=0,
            retries=1,
            unmeasured=0,
            devices=(ScopeDevice(UUID, ByteChange(0), ByteChange(0), 33 * GIB, True),),
        ),
    ),
    step=StepUsage(
        steps=120, steps_per_second=2.5, retained_bytes=0.0, live_bytes=31 * GIB, stranded_bytes=5 * GIB, retries=1
    ),
)
REPORT = AgentReport(
    pid=4242,
    start_ticks=START_TICKS,
    uid=1000,
    workload="train",
    age_seconds=0.4,
    frameworks=("torch 2.13.0",),
    flush_policy="allow",
    pools=(POOL,),
    program=PROGRAM,
)
ENGINE = EngineReading(
    name="chat",
    kind="vllm",
    up=True,
    age_seconds=3.1,
    models=(EngineModel("Qwen/Qwen3-8B"),),
    running=0,
    waiting=0,
    kv_cache_used_ratio=0.04,
    sleeping=False,
    paused=False,
    idle_seconds=920.0,
    processes=(EngineProcess(4242, START_TICKS),),
    uid=1000,
    methods=("kv_cache",),
)
SNAPSHOT = Snapshot(
    seq=7,
    taken_at=TAKEN_AT,
    elapsed_seconds=6.0,
    source=SourceState(
        name="nvml", up=True, responsive=True, driver_version="580.159.03", library_version="13.580.159.03"
    ),
    devices=(DEVICE,),
    reports=(REPORT,),
    engines=(ENGINE,),
)
LEDGER = Ledger(
    (
        LedgerLine(
            device_uuid=UUID, share="live", used_bytes=31 * GIB, pid=4242, start_ticks=START_TICKS, workload="train"
        ),
        LedgerLine(
            device_uuid=UUID, share="cached", used_bytes=40 * GIB, pid=4242, start_ticks=START_TICKS, workload="train"
        ),
        LedgerLine(
            device_uuid=UUID, share="stranded", used_bytes=5 * GIB, pid=4242, start_ticks=START_TICKS, workload="train"
        ),
        LedgerLine(
            device_uuid=UUID, share="overhead", used_bytes=2 * GIB, pid=4242, start_ticks=START_TICKS, workload="train"
        ),
        LedgerLine(device_uuid=UUID, share="unattributed", used_bytes=0),
    ),
    (Overcount(UUID, 0),),
)
HOLDING = replace(*holdings(Frame(SNAPSHOT, LEDGER)), started_at=TAKEN_AT - 3600, idle_seconds=0.0)
ALERT = Alert(
    rule="reclaimable-waste",
    phase="firing",
    labels=(("alertname", "reclaimable-waste"), ("gpu", "0"), ("severity", "warning"), ("uuid", UUID)),
    annotations=(
        (
            "summary",
            "GPU 0 (NVIDIA H100 80GB HBM3) is 98% full, and 40.0 GiB of its memory is unused cache; the largest cache "
            "belongs to train (pid 4242, 40.0 GiB)",
        ),
        ("description", "to release the cache: gpumond flush --device 0"),
    ),
    value=0.5,
    active_at=TAKEN_AT - 300,
    fired_at=TAKEN_AT - 240,
)
VERDICT = Verdict(
    device_uuid=UUID,
    pid=4242,
    start_ticks=START_TICKS,
    kind="leak",
    since=TAKEN_AT - 900,
    evidence=(("slope_bytes_per_second", 559_240.0),),
    time_to_full_seconds=3840.0,
    summary="train (pid 4242) is leaking about 32 MiB/min on GPU 0 (since 13:58:20 UTC); at this rate, "
    "GPU 0 will be full in about 65 min",
    form="linear",
    fit=GrowthLine(
        points=tuple((TAKEN_AT - 60 * ago, 33 * GIB - 33_554_400.0 * ago) for ago in (3, 2, 1)),
        at=TAKEN_AT - 60,
        level_bytes=33.0 * GIB - 33_554_400,
        slope_bytes_per_second=559_240.0,
        slope_low_bytes_per_second=552_100.0,
        slope_high_bytes_per_second=566_300.0,
        band_bytes=4_200_000.0,
        full_at=TAKEN_AT + 3840.0,
        full_at_earliest=TAKEN_AT + 3784.0,
        full_at_latest=TAKEN_AT + 3897.0,
        ruled_out=(RuledOutCause("warm-up", "last half's slope relative to the first half's", 0.99),),
    ),
)
RECEIPT = Receipt(
    pid=4242,
    start_ticks=START_TICKS,
    workload="train",
    device_uuid=UUID,
    allocator="torch",
    outcome="freed",
    reason="",
    expected=ExpectedRelease(40 * GIB, 40 * GIB, 40 * GIB, "exact"),
    released_bytes=40 * GIB,
    driver_released_bytes=40 * GIB,
    before=PoolBytes(76 * GIB, 31 * GIB, 40 * GIB, 78 * GIB),
    after=PoolBytes(36 * GIB, 31 * GIB, 0, 38 * GIB),
    steps=(StepResult("ipc", 0, 0.0001), StepResult("cache", 40 * GIB, 0.21)),
    raced=False,
    requested_by="token",
    started_at=TAKEN_AT,
    duration_seconds=0.34,
    planned=ExpectedRelease(41 * GIB, 41 * GIB, 41 * GIB, "exact"),
)
AUDIT_ENTRY = AuditEntry(1, TAKEN_AT, "token", "rule.delete", {"name": "large-training"})
EVENT = Event(
    id=1_790_000_000_017,
    at=TAKEN_AT,
    kind="oom",
    device_uuid=UUID,
    pid=4242,
    start_ticks=START_TICKS,
    workload="train",
    summary="train (pid 4242) ran out of memory on GPU 0 in the scope epoch/forward when it requested 2.0 GiB: "
    "31.0 GiB live, 40.0 GiB cached, 5.0 GiB stranded",
    details=(
        ("number", 1),
        ("seen", "scope"),
        ("scope", "epoch/forward"),
        ("request_bytes", 2 * GIB),
        ("live_bytes", 31 * GIB),
    ),
)
APPLIED_LIMIT = AppliedLimit("torch", UUID, 20 * GIB, True)
DUMP = Dump("torch", "/home/research/.local/state/gpumond/snapshots/train-4242-1790000000.pickle", 7_340_032, id=1)
LIVE_CLASSES = LiveClasses(
    allocator="torch",
    device_uuid=UUID,
    live_bytes=40 * GIB,
    parameters_bytes=4 * GIB,
    gradients_bytes=4 * GIB,
    optimizer_bytes=8 * GIB,
    buffers_bytes=0,
    tensors_bytes=2 * GIB,
    activations_bytes=22 * GIB,
)
SITE = AllocationSite(
    12 * GIB, 96, (Call("/home/research/train.py", 31, "step"), Call("/home/research/train.py", 50, "main"))
)
