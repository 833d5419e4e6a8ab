"""Program for the dashboards: named scopes, steps, and an allocation that fails now and then.

python -m tests.grafana.program WORKLOAD [DEVICE]
"""

from __future__ import annotations

import sys
import time

from gpumond import agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB, OutOfMemory, SimDevice


def main(workload: str, device: str = "") -> None:
    agent.start(workload=workload)
    allocator = CachingAllocator(SimDevice(device)) if device else None
    while True:
        if allocator:
            passes(allocator)
        agent.step()
        time.sleep(1.5)


def passes(allocator: CachingAllocator) -> None:
    with agent.scope("epoch"):
        for name in ("forward", "backward"):
            with agent.scope(name):
                allocator.free(allocator.malloc(64 * MIB))
    try:
        allocator.malloc(1 << 40)
    except OutOfMemory:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
