"""On a real device: cost of the agent for each step of a training loop, and effect of a flush during it.

One process runs one transformer block, with a batch that fills half of the device; "launch-bound" with one short
sequence, whose step lasts as long as the launches of its kernels. Periods with the agent at 1 Hz and without it
alternate, because clocks and temperature drift. ``mean_increase_ratio`` is the median of the ratios of each period with
the agent to the mean of the two beside it: a report once a second is in the mean of a thousand steps, and not in their
median. ``agent_increase_ratio`` compares within a period, which drifts less: the time that the steps during which the
agent's thread ran, and the step after each, took beyond the mean of their neighbors, divided by the time of all steps;
``agent_increase_error`` is its standard error. ``agent_cpu_ratio`` is the CPU time of the agent's thread divided by
the time of these periods; the loop waits no longer for the interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.result import publish
from tests.helpers.running import RunningDaemon, until

PERIODS = 10
PERIOD_SECONDS = 3.4
NEIGHBORS = 20
"""Steps on each side that tell how long a step takes without a report."""
MODES = ("eager", "graphs", "launch-bound")
FLUSHES = 10
STEPS_AFTER = 3


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in MODES:
        print(json.dumps(loop(sys.argv[1])))
        return
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        daemon = RunningDaemon(Path(directory) / "daemon", "--source", "nvml")
        until(lambda: daemon.request("/-/ready")[0] == 200, 60)
        for mode in MODES:
            command = [sys.executable, "-m", "bench.gpu_training", mode]
            done = subprocess.run(command, env=daemon.environ, capture_output=True, text=True, timeout=280)
            figures[mode] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-600:]
            publish("gpu_training", figures)
        daemon.stop()


def loop(mode: str) -> dict[str, Any]:
    import torch

    from gpumond import agent

    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-4)
    total = torch.cuda.get_device_properties(0).total_memory
    batch = 1 if mode == "launch-bound" else 64
    while True:  # the batch that fills half of the device
        data = torch.randn(batch, 512, 512, device="cuda", dtype=torch.bfloat16)
        _step(block, optimizer, data)
        torch.cuda.synchronize()
        if batch == 1 or torch.cuda.max_memory_reserved() >= total / 2:
            break
        batch *= 2
    step = _capture_step(block, optimizer, data) if mode == "graphs" else lambda: _step(block, optimizer, data)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    times: dict[bool, list[float]] = {True: [], False: []}
    medians: dict[bool, list[float]] = {True: [], False: []}
    means: list[float] = []
    agent_seconds = 0.0
    added: list[float] = []
    for stretch in range(2 * PERIODS + 1):
        on = stretch % 2 == 1
        if on:
            agent.start(workload="bench")
            time.sleep(0.5)
        taken, agent_took = _step_times(step, PERIOD_SECONDS, _agent_clock() if on else None)
        if on:
            agent_seconds += sum(agent_took)
            added += report_overhead(taken, agent_took)
            agent.stop()
        times[on] += taken
        medians[on].append(statistics.median(taken))
        means.append(statistics.fmean(taken))
    plain = statistics.median(times[False])
    increases = [means[n] / statistics.fmean((means[n - 1], means[n + 1])) - 1 for n in range(1, len(means), 2)]
    result = {
        "batch": batch,
        "reserved_ratio": round(torch.cuda.max_memory_reserved() / total, 3),
        "steps_with": len(times[True]),
        "steps_without": len(times[False]),
        "slowest_0.1_percent_ms_with": _slowest(times[True]),
        "slowest_0.1_percent_ms_without": _slowest(times[False]),
        "step_ms_without": round(plain * 1e3, 4),
        "step_ms_with": round(statistics.median(times[True]) * 1e3, 4),
        "median_increase_ratio": round(statistics.median(times[True]) / plain - 1, 6),
        "mean_increase_ratio": round(statistics.median(increases), 6),
        "mean_increase_ratios": [round(value, 6) for value in increases],
        "agent_increase_ratio": round(sum(added) / sum(times[True]), 6),
        "agent_increase_error": round(statistics.stdev(added) * len(added) ** 0.5 / sum(times[True]), 6),
        "reports": len(added),
        "agent_cpu_ratio": round(agent_seconds / sum(times[True]), 6),
        "stretch_medians_ms_with": [round(value * 1e3, 4) for value in medians[True]],
        "stretch_medians_ms_without": [round(value * 1e3, 4) for value in medians[False]],
        "slowest_step_over_median_ms_with": [round((t - plain) * 1e3, 3) for t in sorted(times[True])[-5:]],
        "slowest_step_over_median_ms_without": [round((t - plain) * 1e3, 3) for t in sorted(times[False])[-5:]],
    }
    costs: dict[str, list[float]] = {"nothing": [], "agent.flush": [], "empty_cache": []}
    released = []
    for _ in range(FLUSHES):
        for what in costs:
            torch.cuda.synchronize()
            started = time.perf_counter()
            if what == "agent.flush":
                released.append(sum(receipt.released_bytes for receipt in agent.flush()))
            elif what == "empty_cache":
                torch.cuda.empty_cache()
            for _ in range(STEPS_AFTER):
                step()
            torch.cuda.synchronize()
            costs[what].append(time.perf_counter() - started)
    base = statistics.median(costs["nothing"])
    result["flush_costs_ms"] = {
        what: round((statistics.median(c) - base) * 1e3, 3) for what, c in costs.items() if what != "nothing"
    }
    result["flush_released_mib"] = round(statistics.median(released) / 2**20, 1)
    result["memory"] = _figures_of_each_tool(torch, agent)
    return result


def _step(block: Any, optimizer: Any, data: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    block(data).square().mean().backward()
    optimizer.step()


def _capture_step(block: Any, optimizer: Any, data: Any) -> Any:
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            _step(block, optimizer, data)
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        block(data).square().mean().backward()
        optimizer.step()
    return graph.replay


def report_overhead(taken: Sequence[float], agent_took: Sequence[float]) -> list[float]:
    """Return the seconds that each report of the agent added to the steps.

    Args:
        taken: The seconds of each step.
        agent_took: The CPU seconds of the agent's thread during each step.
    """
    during = {n for n, seconds in enumerate(agent_took) if seconds}
    affected = during | {n + 1 for n in during}
    added = []
    for first in sorted(affected - {n + 1 for n in affected}):
        report = [first]
        while report[-1] + 1 in affected and report[-1] + 1 < len(taken):
            report.append(report[-1] + 1)
        beside = [*range(first - NEIGHBORS, first), *range(report[-1] + 1, report[-1] + 1 + NEIGHBORS)]
        usual = [taken[n] for n in beside if 0 <= n < len(taken) and n not in affected]
        added.append(sum(taken[n] for n in report) - len(report) * statistics.fmean(usual))
    return added


def _step_times(step: Any, seconds: float, agent_clock: int | None) -> tuple[list[float], list[float]]:
    """Return the seconds of each step, and the CPU seconds of the agent's thread during it."""
    import torch

    def agent_seconds() -> float:
        return time.clock_gettime(agent_clock) if agent_clock is not None else 0.0

    taken, agent_took, end = [], [], time.perf_counter() + seconds
    before = agent_seconds()
    while time.perf_counter() < end or len(taken) < 10:
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
        now = agent_seconds()
        agent_took.append(now - before)
        before = now
    return taken, agent_took


def _agent_clock() -> int:
    """Return the clock of the CPU time of the agent's thread."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "gpumond-agent"]
    assert thread.ident
    return time.pthread_getcpuclockid(thread.ident)


def _slowest(taken: list[float]) -> float:
    return round(sorted(taken)[int(len(taken) * 0.999)] * 1e3, 3)


def _figures_of_each_tool(torch: Any, agent: Any) -> dict[str, object]:
    """Return the figures of gpumond, PyTorch and nvidia-smi at the same time."""
    torch.cuda.synchronize()
    (pool,) = agent.report()
    stats = torch.cuda.memory_stats(0)
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    smi = subprocess.run(query, capture_output=True, text=True).stdout
    used = [line.split(", ")[1] for line in smi.splitlines() if line.startswith(f"{os.getpid()},")]
    return {
        "gpumond_live": pool.live_bytes,
        "torch_allocated": stats["allocated_bytes.all.current"],
        "gpumond_held": pool.held_bytes,
        "torch_reserved": stats["reserved_bytes.all.current"],
        "nvidia_smi_mib": used[0] if used else None,
        "nvidia_smi": smi.strip(),
    }


if __name__ == "__main__":
    main()
