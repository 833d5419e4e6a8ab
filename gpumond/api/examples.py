"""Example values for the OpenAPI document: one device, one program, its flush."""

from __future__ import annotations

from gpumond.engine.events import Event
from gpumond.model.frame import Alert, Ledger, Line, Overcount, Verdict
from gpumond.model.pools import Expected, Held, PoolUsage, Receipt, Reclaimable, StepResult
from gpumond.model.program import AppliedLimit, ByteChange, Dump, Program, ScopeDevice, ScopeUsage, StepUsage
from gpumond.model.sensors import Sensors
from gpumond.model.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot, SourceState
from gpumond.model.units import GIB as GIB
from gpumond.store.audit_chain import follow

UUID = "GPU-5a3c9a52-6f1e-4e0c-9b0a-2f8f6f7d1c11"
TAKEN_AT = 1_790_000_000.0

PROCESS = ProcessUsage(4242, 81_234_567, 78 * GIB, ("compute",), "python", 1000)
DEVICE = DeviceReading(
    UUID,
    0,
    "NVIDIA H100 80GB HBM3",
    "nvidia",
    "00000000:1B:00.0",
    None,
    80 * GIB,
    78 * GIB,
    GIB,
    GIB,
    processes=(PROCESS,),
    sensors=Sensors(0.97, 0.61, 1.98e9, 2.619e9, 64.0, 612.0, 8.1e9),
)
POOL = PoolUsage(
    "torch", UUID, 31 * GIB, 76 * GIB, Reclaimable(40 * GIB, 40 * GIB, 40 * GIB), 5 * GIB, ooms=0, retries=3
)
PROGRAM = Program(
    (ScopeUsage("epoch/forward", 120, 0, 1, 0, (ScopeDevice(UUID, ByteChange(0), ByteChange(0), 33 * GIB, True),)),),
    StepUsage(120, 2.5, 0.0, 31 * GIB, 5 * GIB, 1),
)
REPORT = AgentReport(4242, 81_234_567, 1000, "train", 0.4, ("torch 2.13.0",), "allow", (POOL,), PROGRAM)
SNAPSHOT = Snapshot(
    7,
    TAKEN_AT,
    6.0,
    SourceState("nvml", True, True, driver_version="580.159.03", library_version="13.580.159.03"),
    (DEVICE,),
    (REPORT,),
)
LEDGER = Ledger(
    (
        Line(UUID, "live", 31 * GIB, 4242, "train"),
        Line(UUID, "cached", 40 * GIB, 4242, "train"),
        Line(UUID, "stranded", 5 * GIB, 4242, "train"),
        Line(UUID, "overhead", 2 * GIB, 4242, "train"),
        Line(UUID, "unclaimed", 0),
    ),
    (Overcount(UUID, 0),),
)
ALERT = Alert(
    "device-nearly-full",
    "firing",
    (("alertname", "device-nearly-full"), ("gpu", "0"), ("severity", "warning"), ("uuid", UUID)),
    (("summary", "0 NVIDIA H100 80GB HBM3: 78.0 GiB of 80.0 GiB used; a flush would return 40.0 GiB"),),
    0.975,
    TAKEN_AT - 300,
    TAKEN_AT - 240,
)
VERDICT = Verdict(
    UUID,
    4242,
    "leak",
    TAKEN_AT - 900,
    (("slope_bytes_per_second", 559_240.0),),
    3840.0,
    "train (pid 4242) keeps 32.0 MiB more each minute; at this rate GPU 0 is full in 1 h 4 min",
)
RECEIPT = Receipt(
    pid=4242,
    workload="train",
    device_uuid=UUID,
    allocator="torch",
    outcome="freed",
    reason="",
    expected=Expected(40 * GIB, 40 * GIB, 40 * GIB, "exact"),
    released_bytes=40 * GIB,
    driver_released_bytes=40 * GIB,
    before=Held(76 * GIB, 31 * GIB, 40 * GIB, 78 * GIB),
    after=Held(36 * GIB, 31 * GIB, 0, 38 * GIB),
    steps=(StepResult("ipc", 0, 0.0001), StepResult("cache", 40 * GIB, 0.21)),
    raced=False,
    requested_by="token",
    started_at=TAKEN_AT,
    duration_seconds=0.34,
    planned=Expected(41 * GIB, 41 * GIB, 41 * GIB, "exact"),
)
AUDIT_ENTRY = follow(None, TAKEN_AT, "token", "rule.delete", {"name": "device-nearly-full"})
EVENT = Event(
    1_790_000_000_017,
    TAKEN_AT,
    "oom",
    UUID,
    4242,
    "train",
    "train (pid 4242) ran out of memory on GPU 0 in epoch/forward when it asked for 2.0 GiB: "
    "31.0 GiB live, 40.0 GiB cached, 5.0 GiB stranded",
    (
        ("number", 1),
        ("seen", "scope"),
        ("scope", "epoch/forward"),
        ("request_bytes", 2 * GIB),
        ("live_bytes", 31 * GIB),
    ),
)
APPLIED_LIMIT = AppliedLimit("torch", UUID, 20 * GIB, True)
DUMP = Dump("torch", "/home/ada/.local/state/gpumond/snapshots/train-4242-1790000000.pickle", 7_340_032)
