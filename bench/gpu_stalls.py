"""On a real device: delay of training steps by reports. Steps take a few milliseconds, with 25 reports a second.

The agent records the times at which it worked. A report's delay is the time of the steps that it overlaps, less the
median of the four next steps without a report. The same is computed for times half-way between two reports, when the
agent sleeps: the difference is caused by reports. This is done for a load that the device limits, and for one that the
launch of kernels limits, in the thread that shares the interpreter with the agent.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.result import publish
from gpumond.agent import session
from tests.helpers.running import RunningDaemon, until

REPORT_SECONDS = 0.04
SECONDS_WITH, SECONDS_ALONE = 40.0, 2.0
LOADS = {"card is the limit": 64, "launches are the limit": 1}
"""Sequences of 512 in a batch."""
NEIGHBORS = 2
"""Steps without a report, before and after, with which a step is compared."""
STALL_MS = 1.0

Span = tuple[float, float]
WORK: list[Span] = []
"""Times at which the agent made and sent a report, from its waking to its sleeping."""
CPU: list[float] = []
"""Processor seconds of its thread during these times."""
COLLECTIONS: list[Span] = []
"""Times at which Python's garbage collector ran, in any thread."""


class ObservedSession(session.Session):
    _awake = _used = 0.0

    def _wait(self) -> bool:
        arrived = super()._wait()
        self._awake, self._used = time.perf_counter(), time.thread_time()
        return arrived

    def run_once(self) -> None:
        due = self._report_at
        super().run_once()
        if self._report_at != due:
            WORK.append((self._awake, time.perf_counter()))
            CPU.append(time.thread_time() - self._used)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "loads":
        print(json.dumps({name: load(batch) for name, batch in LOADS.items()}))
        return
    with tempfile.TemporaryDirectory() as directory:
        daemon = RunningDaemon(Path(directory) / "daemon", "--source", "nvml")
        until(lambda: daemon.request("/-/ready")[0] == 200, 60)
        command = [sys.executable, "-m", "bench.gpu_stalls", "loads"]
        done = subprocess.run(command, env=daemon.environ, capture_output=True, text=True, timeout=300)
        daemon.stop()
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    publish("gpu_stalls", json.loads(done.stdout.splitlines()[-1]))


def load(batch: int) -> dict[str, Any]:
    """One transformer block, forward, backward and step of the optimizer."""
    import torch

    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-4)
    data = torch.randn(batch, 512, 512, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        block(data).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(50):
        step()
    return measure(step)


def measure(step: Callable[[], None], with_agent: float = SECONDS_WITH, alone: float = SECONDS_ALONE) -> dict[str, Any]:
    from gpumond import agent

    without = timed(step, alone)
    session.REPORT_SECONDS = REPORT_SECONDS
    session.Session = ObservedSession  # type: ignore[misc]
    agent.start(workload="bench")
    timed(step, 1.0)  # it connects, and makes its first report
    WORK.clear(), CPU.clear(), COLLECTIONS.clear()
    gc.callbacks.append(collecting)
    steps = timed(step, with_agent)
    agent.stop()
    gc.callbacks.remove(collecting)
    reports, cpu = list(WORK), list(CPU)
    between_reports = [(begin + REPORT_SECONDS / 2, end + REPORT_SECONDS / 2) for begin, end in reports]
    each, none = delays(steps, reports, reports), delays(steps, between_reports, reports)
    with_report, with_none = list(each.values()), list(none.values())
    return {
        "steps": len(steps),
        "step_ms": round(1e3 * statistics.median(end - begin for begin, end in steps), 3),
        "step_ms_alone": round(1e3 * statistics.median(end - begin for begin, end in without), 3),
        "reports": len(reports),
        "work_of_a_report_ms": spread([1e3 * (end - begin) for begin, end in reports]),
        "cpu_of_a_report_ms": spread([1e3 * seconds for seconds in cpu]),
        "cpu_of_pytorchs_statistics_ms": spread(statistics_alone()),
        "delay_ms_of_a_report": spread(with_report),
        "delay_ms_of_none": spread(with_none),
        "reports_that_delay_over_1_ms": sum(delay > STALL_MS for delay in with_report),
        "instants_without_that_delay_over_1_ms": sum(delay > STALL_MS for delay in with_none),
        "of_none_that_would_with_a_reports_work": round(
            sum(delay + 1e3 * (end - begin) > STALL_MS for delay in with_none for begin, end in reports) / len(reports)
        ),
        "collections": {
            "n": len(COLLECTIONS),
            "in_reports": sum(any(a < end and begin < b for begin, end in reports) for a, b in COLLECTIONS),
            "longest_ms": round(1e3 * max((b - a for a, b in COLLECTIONS), default=0.0), 3),
        },
        "longest_ms": [
            {
                "delay": round(each[number], 2),
                "work": round(1e3 * (reports[number][1] - reports[number][0]), 2),
                "cpu": round(1e3 * cpu[number], 2),
            }
            for number in sorted(each, key=each.__getitem__, reverse=True)[:5]
        ],
        "median_difference_ms": round(statistics.median(with_report) - statistics.median(with_none), 4),
        "max_difference_ms": round(max(with_report) - max(with_none), 4),
    }


def collecting(phase: str, info: dict[str, int]) -> None:
    now = time.perf_counter()
    if phase == "start":
        COLLECTIONS.append((now, now))
    else:
        COLLECTIONS[-1] = (COLLECTIONS[-1][0], now)


def statistics_alone(times: int = 20) -> list[float]:
    """Return the milliseconds that PyTorch needs for the statistics of one device, called as seldom as for reports."""
    import torch

    found = []
    for _ in range(times):
        time.sleep(REPORT_SECONDS)
        began = time.thread_time()
        torch._C._cuda_memoryStats(0)
        found.append(1e3 * (time.thread_time() - began))
    return found


def timed(step: Callable[[], None], seconds: float) -> list[Span]:
    steps, now = [], time.perf_counter()
    end = now + seconds
    while now < end:
        began = now
        step()
        now = time.perf_counter()
        steps.append((began, now))
    return steps


def delays(steps: Sequence[Span], spans: Sequence[Span], reports: Sequence[Span]) -> dict[int, float]:
    """Return the milliseconds by which the steps that a span overlaps took longer than the steps next to them, by span.

    A span that overlaps the steps of another report is omitted.
    """
    begins, ends = [begin for begin, _ in steps], [end for _, end in steps]

    def touched(span: Span) -> range:
        return range(bisect_right(ends, span[0]), bisect_left(begins, span[1]))

    busy: dict[int, int] = {}
    for number, report in enumerate(reports):
        for index in touched(report):
            busy[index] = number
    clean = [index for index in range(len(steps)) if index not in busy]
    found = {}
    for number, span in enumerate(spans):
        own = touched(span)
        others = {busy[index] for index in own if index in busy} - ({number} if spans is reports else set())
        earlier, later = bisect_left(clean, own.start), bisect_left(clean, own.stop)
        around = clean[max(0, earlier - NEIGHBORS) : earlier] + clean[later : later + NEIGHBORS]
        if not own or others or len(around) < 2 * NEIGHBORS:
            continue
        usual = statistics.median(ends[index] - begins[index] for index in around)
        found[number] = 1e3 * sum(ends[index] - begins[index] - usual for index in own)
    return found


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    at = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[round(share * (len(ordered) - 1))], 4) for name, share in at.items()}


if __name__ == "__main__":
    main()
