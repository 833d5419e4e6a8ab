"""Messages of ``/api/v1/live``: bytes and CPU time of the complete frame and of the changes, by size of the machine.

python -m bench.live [--save]

Each process has an agent. In a second, all sensors, ages of reports and times without work change; the memory of one
process in ten (steady) or of all processes (busy) changes. The CPU time is that of one message, for all readers.
"""

from __future__ import annotations

import random
import statistics
import time

from pydantic_core import to_json

from bench.result import publish
from gpumond.facts.frame import Frame, FullFrame
from gpumond.facts.snapshot import Sensors
from gpumond.facts.units import MIB
from gpumond.serve.full_frame import full_frame
from gpumond.serve.live import FULL_FRAME_ADAPTER, encode_message, frame_changes, live_frame
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

SIZES = ((1, 4), (8, 64), (64, 50))
"""Devices, and processes of each."""
FRAMES = 20


class Machine:
    """A machine whose values change from frame to frame."""

    def __init__(self, devices: int, processes: int, changing: float) -> None:
        self._rng = random.Random(1)
        self._devices, self._changing = devices, changing
        self._live = {(device, 1 + device * processes + i): GIB for device in range(devices) for i in range(processes)}
        self._seq = 0

    def next(self) -> FullFrame:
        return live_frame(full_frame(self.frame()))

    def frame(self) -> Frame:
        rng, self._seq = self._rng, self._seq + 1
        for key in self._live:
            if rng.random() < self._changing:
                self._live[key] = GIB + rng.randrange(512) * MIB
        devices, reports = [], []
        for index in range(self._devices):
            own = {pid: live for (device, pid), live in self._live.items() if device == index}
            processes = tuple(
                make_process(
                    pid,
                    live + GIB,
                    comm="python3",
                    user="train",
                    utilization_ratio=rng.randrange(100) / 100,
                    idle_seconds=self._seq + rng.random() if pid % 5 == 0 else 0.0,
                )
                for pid, live in own.items()
            )
            sensors = Sensors(
                gpu_utilization_ratio=rng.random(),
                power_watts=400 + 100 * rng.random(),
                gpu_temperature_celsius=float(rng.randrange(50, 80)),
                energy_joules=1e9 * rng.random(),
            )
            used = sum(process.used_bytes or 0 for process in processes)
            device = make_device(f"GPU-{index}", index=index, used_bytes=used, processes=processes, sensors=sensors)
            devices.append(device)
            for pid, live in own.items():
                pools = (make_pool(f"GPU-{index}", live=live, cached=GIB // 2),)
                reports.append(make_report(pid, pools, workload=f"w{pid % 8}", age_seconds=rng.random()))
        snapshot = make_snapshot(*devices, seq=self._seq, taken_at=1e9 + self._seq, reports=tuple(reports))
        return Frame(snapshot, make_ledger(snapshot))


def measure(devices: int, processes: int, changing: float) -> dict[str, float]:
    machine = Machine(devices, processes, changing)
    before = machine.next()
    began = time.process_time()
    whole = encode_message(0, "frame", FULL_FRAME_ADAPTER.dump_json(before), b"[]")
    whole_seconds = time.process_time() - began
    sizes, seconds = [], []
    for _ in range(FRAMES):
        after = machine.next()
        began = time.process_time()
        body = to_json(frame_changes(before, after), inf_nan_mode="null")
        message = encode_message(0, "changes", body, b"[]")
        seconds.append(time.process_time() - began)
        sizes.append(len(message.compressed))
        before = after
    return {
        "frame_bytes": len(whole.plain),
        "frame_compressed_bytes": len(whole.compressed),
        "frame_milliseconds": round(1000 * whole_seconds, 2),
        "changes_compressed_bytes": int(statistics.median(sizes)),
        "changes_milliseconds": round(1000 * statistics.median(seconds), 2),
    }


def main() -> None:
    figures: dict[str, object] = {
        f"{devices} x {processes}": {
            "steady": measure(devices, processes, 0.1),
            "busy": measure(devices, processes, 1.0),
        }
        for devices, processes in SIZES
    }
    publish("live", figures)


if __name__ == "__main__":
    main()
