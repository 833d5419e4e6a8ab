"""`gpumond top` in a terminal with 8 devices and 512 processes: CPU time, memory, start, and end after a key."""

from __future__ import annotations

import os
import threading
import time
from statistics import median
from typing import Any

from bench.result import publish
from gpumond.facts.snapshot import Sensors
from tests.helpers.agents import GIB
from tests.helpers.frames import FakeDaemon, fake_daemon, make_frame
from tests.helpers.screens import Session, top
from tests.helpers.values import make_device, make_pool, make_process, make_report

DEVICES, PROCESSES, SECONDS, RUNS = 8, 64, 30, 10
SIZES = ((80, 24), (160, 50))


def frame(seq: int) -> dict[str, Any]:
    """Return a frame in which all processes have changed since the one before."""
    devices, reports = [], []
    for index in range(DEVICES):
        pids = range(10_000 + index * PROCESSES, 10_000 + (index + 1) * PROCESSES)
        processes = tuple(
            make_process(pid, GIB + ((seq * pid) % 512 << 20), user="research", comm="python3") for pid in pids
        )
        uuid, used = f"GPU-{index}", sum(process.used_bytes or 0 for process in processes)
        sensors = Sensors(gpu_utilization_ratio=0.9, gpu_temperature_celsius=60.0, power_watts=500.0)
        devices.append(
            make_device(
                uuid,
                index=index,
                name="NVIDIA H200",
                size_bytes=141 * GIB,
                used_bytes=used,
                free_bytes=141 * GIB - used,
                sensors=sensors,
                processes=processes,
            )
        )
        reports += [make_report(pid, (make_pool(uuid, live=GIB // 2, cached=GIB // 4),)) for pid in pids]
    return make_frame(*devices, reports=tuple(reports), seq=seq, taken_at=1_000_000.0 + seq, elapsed_seconds=float(seq))


def wait_for_word(session: Session, word: str) -> None:
    while word not in session.written:
        session.read_once()


def start_and_end_seconds(fake: FakeDaemon) -> tuple[float, float]:
    """Return the seconds until the first row and from the key ``q`` to the end of the process."""
    began = time.monotonic()
    with top(fake.url) as session:
        wait_for_word(session, "train")
        first = time.monotonic() - began
        pressed = time.monotonic()
        session.press("q")
        while session.process.poll() is None:
            session.read_once(0.001)
        return first, time.monotonic() - pressed


def steady(fake: FakeDaemon, frames: list[dict[str, Any]], size: tuple[int, int]) -> dict[str, float]:
    ended = threading.Event()

    def change() -> None:
        number = 0
        while not ended.wait(1.0):
            number += 1
            fake.show(frames[number % len(frames)])

    with top(fake.url, size=size) as session:
        wait_for_word(session, "train")
        thread = threading.Thread(target=change)
        thread.start()
        pid, ticks = session.process.pid, os.sysconf("SC_CLK_TCK")
        before, began = _cpu_ticks(pid), time.monotonic()
        while time.monotonic() < began + SECONDS:
            session.read_once()
        ratio = (_cpu_ticks(pid) - before) / ticks / (time.monotonic() - began)
        ended.set()
        thread.join()
        with open(f"/proc/{pid}/status") as status:
            kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        return {"core_percent": round(100 * ratio, 1), "memory_mib": round(kib / 1024, 1)}


def _cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    frames = [frame(seq) for seq in range(1, 5)]
    with fake_daemon(frames[0]) as fake:
        runs = [start_and_end_seconds(fake) for _ in range(RUNS)]
        firsts, ends = ([run[at] for run in runs] for at in (0, 1))
        figures: dict[str, object] = {
            "processes": DEVICES * PROCESSES,
            "first_row_seconds": {"median": round(median(firsts), 3), "max": round(max(firsts), 3)},
            "end_after_key_seconds": {"median": round(median(ends), 3), "max": round(max(ends), 3)},
        }
        for size in SIZES:
            figures[f"{size[0]} x {size[1]}"] = steady(fake, frames, size)
    publish("terminal", figures)


if __name__ == "__main__":
    main()
