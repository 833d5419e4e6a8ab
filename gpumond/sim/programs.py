"""The demo's programs, as processes that run the agent and share one simulated device.

    python -m gpumond.sim.programs {training,serving,leak,fragmentation,idle,finetune,pretrain} --device DIR

A program is a generator: it allocates and frees a little, then yields the seconds until it continues. It restarts when
the device is full, and may end. Sizes are shares of the device, chosen for 24 GiB; the first four together hold 50 to
78% of it, `idle` and `finetune` run out of memory together, and `pretrain` does not fit beside `idle`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from random import Random

from gpumond import agent
from gpumond.sim.allocator import ProgramMemory, Tensor
from gpumond.sim.device import OutOfMemory, SimDevice

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


SimProgram = Callable[[ProgramMemory, Random], Iterator[float]]


def training(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Run steps whose activations rise and fall; some are followed by an evaluation that leaves a large cache."""
    for kind in ("parameters", "gradients", "optimizer", "optimizer"):
        memory.allocate(0.02, kind)
        yield 0.5
    for steps in chain([4], repeat(20)):
        for _ in range(steps):
            memory.set_utilization(random.uniform(0.45, 0.6))
            activations = []
            for _ in range(6):
                activations.append(memory.allocate(0.01))
                yield random.uniform(0.4, 0.6)
            while activations:
                memory.free(activations.pop())
                yield 0.3
            agent.step()
        batches = []
        for _ in range(3):
            batches.append(memory.allocate(0.04))
            yield 1.0
        memory.free(*batches)


MAX_REQUESTS = 16


def serving(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Serve requests whose number rises and falls in waves; each holds a key-value cache that grows.

    At its limit, it ends the newest request and repeats the allocation.
    """
    memory.allocate(0.06, "parameters")
    requests: list[list[Tensor]] = []

    def end_newest_request(share: float) -> tuple[float] | None:
        if not requests:
            return None
        memory.free(*requests.pop())
        return (share,)

    @agent.retry_on_oom(shrink=end_newest_request, attempts=MAX_REQUESTS + 1)
    def allocate(share: float) -> Tensor:
        return memory.allocate(share, "tensors")

    for tick in count():
        rate = 0.22 + 0.18 * math.sin(tick / 60 - 1.2)
        if random.random() < rate and len(requests) < MAX_REQUESTS:
            requests.append([allocate(random.uniform(0.001, 0.004))])
        if random.random() < len(requests) / 8:
            block = allocate(0.0007)
            if requests:
                random.choice(requests).append(block)
            else:
                memory.free(block)
        if random.random() < len(requests) / 40:
            memory.free(*requests.pop(random.randrange(len(requests))))
        memory.set_utilization(0.02 * len(requests))
        agent.step()
        yield 0.5


AWAY_SECONDS = 480


def idle(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Keep a large model and the results of a few cells, as a notebook does whose user leaves for some minutes."""
    memory.allocate(0.3, "parameters")
    while True:
        results = []
        for _ in range(10):
            results.append(memory.allocate(0.006, "tensors"))
            memory.set_utilization(random.uniform(0.3, 0.5))
            yield 1.0
        memory.set_utilization(0.0)
        yield from repeat(1.0, AWAY_SECONDS)
        os.kill(os.getpid(), signal.SIGCONT)  # resumes it if it is suspended; its next call waits for that
        memory.free(*results)


def finetune(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Search for the largest batch that the device has room for: the last one does not fit beside `idle`."""
    memory.allocate(0.04, "parameters")
    yield 10.0
    for size in (2, 4, 8, 16, 32, 64):
        for _ in range(6):
            memory.set_utilization(random.uniform(0.2, 0.4))
            with agent.scope(f"batch-{size}"):
                batch = memory.allocate(size / 100)
                yield 2.5
            memory.free(batch)
            agent.step()


PRETRAIN_RATIO = 2 / 3
"""What `pretrain` needs: more than `idle` leaves, so little that `finetune` goes on with its smaller batches."""


def pretrain(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Take all its memory at once, as a job does that asked for it, and end after a few epochs."""
    for kind in ("parameters", "gradients", "optimizer", "optimizer"):
        memory.allocate(PRETRAIN_RATIO / 8, kind)
    memory.allocate(PRETRAIN_RATIO / 2)
    for _ in range(100):
        memory.set_utilization(random.uniform(0.5, 0.6))
        agent.step()
        yield 1.0


def leak(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Train, then keep an unneeded tensor in each step, as from an evaluation on; end before the device is full."""
    memory.allocate(0.03, "parameters")
    losses = []
    for step in range(290):
        memory.set_utilization(random.uniform(0.02, 0.08))
        batch = memory.allocate(0.01)
        yield 0.5
        if step >= 40:
            losses.append(memory.allocate(0.0006, "tensors"))
        memory.free(batch)
        agent.step()
        yield 0.5


QUIET_SECONDS = 35.0
"""Time for which `fragmentation` keeps its first blocks: no program has a problem in the demo's first minute."""


def fragmentation(memory: ProgramMemory, random: Random) -> Iterator[float]:
    """Hold constant live bytes in blocks that leave free gaps too small for the next allocations.

    Each generation's blocks are twice as large as the previous one's; of each window of that size in older segments one
    block stays (the program of J. M. Robson, J. ACM 21(3), 1974). The program ends after two rounds, since a restart is
    what helps such a program.
    """
    unit = 1 / 3072
    for _ in range(2):
        generations: list[list[Tensor]] = [[]]
        for _ in range(11):
            generations[0] += _carve(memory, unit, 16)
            yield 0.5
        yield QUIET_SECONDS
        for scale in (2, 4, 8):
            generation: list[Tensor] = []
            spare: list[Tensor] = []
            freed = 0
            for age, blocks in enumerate(generations):
                for block in blocks[1::2]:
                    memory.free(block)
                    freed += 2**age
                    if freed == scale:
                        spare = spare or _carve(memory, scale * unit, 16 // scale)
                        generation.append(spare.pop(0))
                        freed = 0
                        memory.set_utilization(random.uniform(0.05, 0.1))
                        agent.step()
                        yield 0.3 * scale
                del blocks[1::2]
            generations.append(generation)
        yield 20.0
        memory.free_all()
        yield 20.0
        memory.clear()


def _carve(memory: ProgramMemory, share: float, count: int) -> list[Tensor]:
    """Allocate that many neighbors in one segment."""
    memory.free(memory.allocate(count * share))
    return [memory.allocate(share) for _ in range(count)]


PROGRAMS: Mapping[str, SimProgram] = {
    "training": training,
    "serving": serving,
    "leak": leak,
    "fragmentation": fragmentation,
    "idle": idle,
    "finetune": finetune,
    "pretrain": pretrain,
}


def run(program: SimProgram, memory: ProgramMemory, random: Random, pause: Callable[[float], bool]) -> None:
    """Run a program until it ends, or ``pause(seconds)`` returns False."""
    while True:
        try:
            for seconds in program(memory, random):
                if not pause(seconds):
                    return
            return
        except OutOfMemory:
            memory.clear()
            if not pause(5.0):
                return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpumond.sim.programs", description="A program on a simulated device.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--device", required=True, metavar="DIR")
    parser.add_argument("--workload", metavar="NAME", help="name of the workload (default: that of the program)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration", type=float, default=math.inf, metavar="S", help="end after this time in seconds")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="multiply the speed by X")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when PID is no longer the parent process")
    options = parser.parse_args(arguments)
    # Before other threads start, which inherit the mask. See `pause`; the agent counts SIGCONT.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*END_SIGNALS, signal.SIGCONT))
    end = time.monotonic() + options.duration

    def pause(seconds: float) -> bool:
        remaining = end - time.monotonic()
        if remaining <= 0 or options.parent not in (None, os.getppid()):
            return False
        return signal.sigtimedwait(END_SIGNALS, max(0.0, min(seconds / options.speed, remaining))) is None

    name = options.workload or options.program
    agent.start(workload=name, allow_limit=True, suspendable=options.program == "idle")
    memory = ProgramMemory(SimDevice(options.device))
    run(PROGRAMS[options.program], memory, Random(options.seed), pause)
    agent.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
