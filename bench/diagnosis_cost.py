"""Processor time of diagnosis in a tick, and its memory, with 8 devices, 64 programs on each, and 24 hours of history.

The history consists of a sample in five minutes, then of one in a second for a quarter of an hour.
"""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path

from bench.result import publish, spread
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.snapshot import Sensors, Snapshot
from gpumond.facts.units import MIB
from gpumond.tick.claims import complete_lists
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

DEVICES, PROCESSES = 8, 512
BLOCKS, BLOCK_SECONDS = 288, 300
SECONDS, TIMED = 1000, 500
COLLECT_EVERY = 10


def one_snapshot(tick: int, now: float) -> Snapshot:
    moved = (tick * 37 % 64) << 20
    pids = range(1000, 1000 + PROCESSES)
    devices = tuple(
        make_device(
            f"GPU-{device}",
            index=device,
            used_bytes=64 * GIB + moved,
            processes=tuple(make_process(pid, 8 * GIB + moved) for pid in pids if pid % DEVICES == device),
            sensors=Sensors(gpu_utilization_ratio=0.5),
        )
        for device in range(DEVICES)
    )
    reports = tuple(
        make_report(pid, (make_pool(f"GPU-{pid % DEVICES}", live=6 * GIB + moved, cached=GIB),), workload=f"w{pid % 8}")
        for pid in pids
    )
    return make_snapshot(*devices, seq=tick + 1, elapsed_seconds=1.0 + now, taken_at=now, reports=reports)


def main() -> None:
    gc.freeze()
    gc.disable()  # as the daemon does, which collects between ticks
    diagnosis, seconds = Diagnosis(), list[float]()
    snapshot = one_snapshot(0, 0.0)
    empty = resident_bytes()
    begin = BLOCKS * BLOCK_SECONDS
    times = [*range(0, begin, BLOCK_SECONDS), *range(begin, begin + SECONDS)]
    for tick, now in enumerate(times):
        snapshot = one_snapshot(tick, now)
        observe(snapshot)
        began = time.thread_time()
        diagnosis = diagnose(diagnosis, snapshot)
        seconds.append(time.thread_time() - began)
        if tick % COLLECT_EVERY == 0:
            gc.collect()
    figures: dict[str, object] = {
        "devices": DEVICES,
        "processes": PROCESSES,
        "history_hours": BLOCKS * BLOCK_SECONDS / 3600,
        "memory_mib": round((resident_bytes() - empty) / MIB, 1),
        "verdicts": len(diagnosis.verdicts),
    }
    publish("diagnosis_cost", figures | spread(seconds[-TIMED:]))


def observe(snapshot: Snapshot) -> None:
    """Compute the indexes of the devices, as the observation of a tick does before its diagnosis."""
    complete_lists(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
    assert all(device.counts for device in snapshot.devices)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
