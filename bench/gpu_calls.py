"""Cost of each call of the driver in a reading, on a real device with programs.

    python -m bench.gpu_calls [--programs 48] [--seconds 60] [--save]

It reads once a second for that time, as the collector process does, with programs of ``bench.cuda_program`` without
agents. A call is named by its function and its last argument; ``ask`` reads a list of processes. No binding can save
the CPU time in the kernel.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from bench.peers import card_setting
from bench.result import publish, spread
from gpumond.devices.nvml.source import NvmlSource
from gpumond.devices.process.metadata import ProcessMetadata


class Calls:
    """Durations of each call, and the CPU seconds of all."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu_seconds = 0.0

    def timed(self, query: Any) -> Any:
        def timed_query(functions: Any, *arguments: Any) -> Any:
            names = {getattr(function, "__name__", "") for function in functions}
            last = next((str(each) for each in reversed(arguments) if isinstance(each, int)), "")
            before, began = time.thread_time(), time.perf_counter()
            try:
                return query(functions, *arguments)
            finally:
                self.seconds[f"{min(names)} {last}".strip()].append(time.perf_counter() - began)
                self.cpu_seconds += time.thread_time() - before

        return timed_query


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    calls, owners, source = Calls(), ProcessMetadata(), NvmlSource()
    readings: dict[str, list[float]] = {"driver and process files": [], "process metadata": []}
    with tempfile.TemporaryDirectory() as name, card_setting(Path(name), wanted.programs, with_agents=False):
        source.open()
        source.read()
        source._library.query = calls.timed(source._library.query)  # type: ignore[method-assign]
        began = due = time.monotonic()
        before = getrusage(RUSAGE_SELF)
        while due < began + wanted.seconds:
            first = time.perf_counter()
            reading = source.read()
            second = time.perf_counter()
            owners.complete(reading, {})
            readings["driver and process files"].append(second - first)
            readings["process metadata"].append(time.perf_counter() - second)
            due += 1
            time.sleep(max(0.0, due - time.monotonic()))
        after, count = getrusage(RUSAGE_SELF), len(readings["process metadata"])
        source.close()
    publish(
        "gpu_calls",
        {
            "programs": wanted.programs,
            "driver": reading.driver_version,
            "devices": [device.name for device in reading.devices],
            "processes": [len(device.processes or ()) for device in reading.devices],
            "reading": {name: spread(own) for name, own in readings.items()},
            "cpu_ms_a_reading": {
                "user": (after.ru_utime - before.ru_utime) * 1e3 / count,
                "kernel": (after.ru_stime - before.ru_stime) * 1e3 / count,
                "in_calls": calls.cpu_seconds * 1e3 / count,
            },
            "calls": {
                name: {"a_reading": len(own) / count, "ms_a_reading": sum(own) * 1e3 / count, **spread(own)}
                for name, own in sorted(calls.seconds.items(), key=lambda item: -sum(item[1]))
            },
        },
    )


if __name__ == "__main__":
    main()
