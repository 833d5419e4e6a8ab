"""One message of each type, with every field."""

from __future__ import annotations

from gpumond.facts import messages
from gpumond.facts.pools import ExpectedRelease, StepResult
from gpumond.facts.program import (
    AllocationSite,
    AppliedLimit,
    ByteChange,
    Call,
    Dump,
    LiveClasses,
    Oom,
    OomPool,
    Program,
    Retainer,
    ScopeDevice,
    ScopeRetained,
    ScopeUsage,
    StepUsage,
    ThreadStack,
)
from tests.helpers.values import make_pool

POOL = make_pool(live=1, cached=2, live_allocations=3, managed=True)


CALL = Call("/home/a/train.py", 31, "train.<locals>.step")


CLASSES = LiveClasses(
    allocator="torch",
    device_uuid="GPU-a",
    live_bytes=21,
    parameters_bytes=1,
    gradients_bytes=2,
    optimizer_bytes=3,
    buffers_bytes=4,
    tensors_bytes=5,
    activations_bytes=None,
    excess_bytes=0,
)


PROGRAM = Program(
    scopes=(
        ScopeUsage(
            name="epoch/forward",
            entries=2,
            ooms=0,
            retries=1,
            unmeasured=0,
            devices=(ScopeDevice("GPU-a", ByteChange(-5), ByteChange(3), 7, True),),
        ),
    ),
    step=StepUsage(steps=3, steps_per_second=1.5, retained_bytes=-0.5, live_bytes=7, stranded_bytes=0, retries=1),
    ooms=(
        Oom(
            number=1,
            at=2.5,
            seen="retry",
            device_uuid="GPU-a",
            request_bytes=5,
            scope="epoch",
            pools=(
                OomPool(
                    allocator="torch",
                    device_uuid="GPU-a",
                    live_bytes=1,
                    cached_bytes=2,
                    stranded_bytes=3,
                    largest_free_bytes=4,
                ),
            ),
            scopes=(ScopeRetained("x", ByteChange(-1)),),
            open_scopes=("epoch",),
            stack=(CALL,),
            omitted_calls=3,
            threads=(ThreadStack("loader", (CALL, CALL)),),
            classes=(CLASSES,),
            sites=(AllocationSite(5, 1, (CALL,)),),
        ),
    ),
    oom_retries=2,
    oom_recovered=1,
    retainers=(Retainer(file="/home/a/train.py", line=31, function="train", name="losses", size_bytes=5, tensors=2),),
)


MESSAGES = [
    messages.Hello("train", "0.1.0", "3.11.7"),
    messages.Hello("train", "0.1.0", "3.11.7", rank=3, world_size=8, job="ray/02000000", account="physics"),
    messages.Report("step", ("torch 2.13.0",), (POOL,)),
    messages.FlushCommand("id", "torch", ("ipc", "cache"), True, 2.5),
    messages.CancelFlush("id"),
    messages.FlushResult(
        "id", "freed", "", (messages.PoolChange(POOL, POOL, ExpectedRelease(0, 1, 2)),), (StepResult("cache", 1, 0.1),)
    ),
    messages.AgentRequest("id", "limit", 5, "GPU-a"),
    messages.AgentResponse("id", "", (AppliedLimit("torch", "GPU-a", None, True),), Dump("torch", "/tmp/x", 7)),
    messages.AgentRequest("id", "fetch", snapshot_id=2, offset=4096),
    messages.AgentRequest("id", "classes", record_seconds=60.0),
    messages.AgentResponse(
        "id",
        dump=Dump("torch", "/tmp/x", 7, id=2),
        classes=(CLASSES,),
        sites=(AllocationSite(5, 1, (CALL,)),),
        unrecorded_bytes=3,
        folded=Dump("torch", "/tmp/x.folded", 7, id=3),
        part=("eJwDAAAAAAE=",),
        part_bytes=0,
        file_bytes=0,
    ),
    messages.Report(program=PROGRAM),
    messages.Goodbye(),
    messages.Goodbye("out-of-memory"),
]
