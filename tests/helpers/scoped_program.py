"""Program with simulated allocators that executes lines of its input and has scopes, steps and errors."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 1 << 20


WORKLOAD = 'team/llama:70b@"é" {lr=0.1}'


PROGRAM = """
import sys
import gpumond.agent as agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory, DeviceSpec, create
allocators = [
    CachingAllocator(create(f"DIRECTORY/card{n}", DeviceSpec(f"GPU-simulated{n or ''}", n, "sim", 1024 * MIB)))
    for n in range(DEVICES)
]
for allocator in allocators:
    allocator.malloc(50 * MIB)
def suppressed(call):
    try:
        call()
    except OutOfMemory:
        pass
agent.start(workload=WORKLOAD, allow_limit=ALLOW)
for line in sys.stdin:
    exec(line)
    print("did", line, end="", flush=True)
"""


def program(directory: Path, allow_limit: bool = False, devices: int = 1) -> str:
    code = PROGRAM.replace("DIRECTORY", os.fspath(directory)).replace("DEVICES", str(devices))
    return code.replace("ALLOW", str(allow_limit)).replace("WORKLOAD", repr(WORKLOAD))


def attempt(call: str) -> str:
    """Line that makes the call and ignores its error."""
    return f"suppressed(lambda: {call})"
