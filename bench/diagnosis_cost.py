"""Processor time of diagnosis in a tick with 64 devices and 500 processes.

tests/tick/test_history.py measures its memory.
"""

from __future__ import annotations

import gc
import time

from bench.result import publish, spread
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.snapshot import Sensors, Snapshot
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

DEVICES, PROCESSES, TICKS, WARM = 64, 500, 900, 400
COLLECT_EVERY = 10


def one_snapshot(tick: int, every: float = 1.0) -> Snapshot:
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
    now = tick * every
    return make_snapshot(*devices, seq=tick + 1, elapsed_seconds=1.0 + now, taken_at=now, reports=reports)


def main() -> None:
    gc.freeze()
    gc.disable()  # as the daemon does, which collects between ticks
    diagnosis, seconds = Diagnosis(), []
    for tick in range(TICKS):
        snapshot = one_snapshot(tick)
        began = time.thread_time()
        diagnosis = diagnose(diagnosis, snapshot)
        seconds.append(time.thread_time() - began)
        if tick % COLLECT_EVERY == 0:
            gc.collect()
    kept = {"verdicts": len(diagnosis.verdicts)}
    publish(
        "diagnosis_cost",
        {"devices": DEVICES, "processes": PROCESSES, **kept, **spread(seconds[WARM:])},
    )


if __name__ == "__main__":
    main()
