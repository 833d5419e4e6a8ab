"""Eight ranks of a job, with a simulated device each, flushed together: no two at the same time, and the cost of
waiting.

A hook makes the flush of each rank take ``STALL`` seconds, like a real one with a cache of tens of gigabytes. A rank
that is stopped during its flush costs its time limit once, for any number of ranks.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.result import publish
from gpumond.sim.device import MIB, DeviceSpec, create
from tests.helpers.running import RunningDaemon, until

RANKS, ROUNDS, STALL = 8, 5, 0.1

RANK = """
import os, sys, time
import gpumond.agent
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import SimDevice, MIB
allocator = CachingAllocator(SimDevice(sys.argv[1]))

@gpumond.agent.on_flush
def stall():
    began = time.monotonic()
    time.sleep(float(sys.argv[2]))
    print(began, time.monotonic(), flush=True)

gpumond.agent.start(workload=f"rank{os.environ['RANK']}")
while True:
    allocator.free(allocator.malloc(500 * MIB))
    time.sleep(0.5)
"""


def spans(logs: list[Path]) -> list[tuple[float, float]]:
    lines = [line.split() for log in logs for line in log.read_text().splitlines()]
    return sorted((float(began), float(ended)) for began, ended in lines)


def overlaps(found: list[tuple[float, float]]) -> int:
    return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(found))


def main() -> None:
    with TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        cards = directory / "cards"
        for rank in range(RANKS):
            create(
                cards / str(rank),
                DeviceSpec(uuid=f"GPU-rank{rank}", index=rank, name="simulated", size_bytes=1024 * MIB),
            )
        config = directory / "gpumond.yaml"
        config.write_text("flush_cooldown: 0\n")
        serve = ("--config", str(config), "--source", "sim")
        daemon = RunningDaemon(directory / "daemon", *serve, environ={"GPUMOND_SIM_DIR": str(cards)})
        stack.callback(daemon.stop)
        ranks, logs = [], [directory / f"log{rank}" for rank in range(RANKS)]
        for rank, log in enumerate(logs):
            environ = {**os.environ, "GPUMOND_SOCKET": str(daemon.socket), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            command = [sys.executable, "-c", RANK, str(cards / str(rank)), str(STALL)]
            ranks.append(stack.enter_context(subprocess.Popen(command, env=environ, stdout=log.open("w"))))
            stack.callback(ranks[-1].kill)
        until(lambda: daemon.request("/-/ready")[0] == 200)
        until(lambda: len([agent for agent in daemon.get("agents") if agent["pools"]]) == RANKS)
        order = {"target": {"all": True}, "steps": ["hooks", "cache"]}
        seconds, outcomes = [], []
        for _ in range(ROUNDS):
            time.sleep(1.5)
            started = time.monotonic()
            outcomes += [receipt["outcome"] for receipt in daemon.flush(**order)[1]["receipts"]]
            seconds.append(time.monotonic() - started)
        found = spans(logs)
        os.kill(ranks[3].pid, signal.SIGSTOP)
        started = time.monotonic()
        stopped = daemon.flush(**order, timeout_seconds=2)[1]["receipts"]
        stopped_seconds = time.monotonic() - started
        os.kill(ranks[3].pid, signal.SIGCONT)
        publish(
            "ranks",
            {
                "ranks": RANKS,
                "flushes": len(found),
                "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
                "at_the_same_instant": overlaps(found),
                "stall_seconds_each": STALL,
                "seconds_for_all": round(sorted(seconds)[ROUNDS // 2], 2),
                "one_stopped": sorted(receipt["outcome"] for receipt in stopped),
                "one_stopped_seconds_for_all": round(stopped_seconds, 2),
            },
        )


if __name__ == "__main__":
    main()
