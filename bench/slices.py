"""One tick on the event loop at once, in slices, or in a thread: its duration, and the wait of other tasks.

The fixture is that of bench.tick under a storm. A task that is always ready represents requests and agents: the wait is
the time between two of its runs, of which the longest of each tick counts.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.result import publish, spread
from bench.tick import STORM, UP, facts, rules
from gpumond.facts.cooperative import Steps, run_to_end
from gpumond.host.event_loop import in_slices
from gpumond.tick.observe import EngineState, advancing, observing

TICKS = 100

Runner = Callable[[Steps[Any]], Awaitable[Any]]


async def at_once(work: Steps[Any]) -> Any:
    return run_to_end(work)


async def in_a_thread(work: Steps[Any]) -> Any:
    return await asyncio.to_thread(run_to_end, work)


async def measure(run: Runner) -> dict[str, object]:
    state, snapshot, active = EngineState(), None, rules(STORM)
    seconds, waits, longest = [], [], 0.0

    async def other() -> None:
        nonlocal longest
        since = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            longest, since = max(longest, time.perf_counter() - since), time.perf_counter()

    task = asyncio.create_task(other())
    for number in range(TICKS):
        reading, reports = facts(number)
        gc.collect()
        await asyncio.sleep(0)
        longest, began = 0.0, time.perf_counter()
        snapshot = await run(observing(snapshot, UP, reading, reports, float(number), float(number)))
        tick = await run(advancing(state, active, snapshot))
        await asyncio.sleep(0)
        seconds.append(time.perf_counter() - began)
        waits.append(longest)
        state = tick.memory
    task.cancel()
    return {"tick": spread(seconds), "longest_wait_of_others": spread(waits)}


def main() -> None:
    gc.freeze()
    gc.disable()
    runners: dict[str, Runner] = {"at_once": at_once, "in_slices": in_slices, "in_a_thread": in_a_thread}
    publish("slices", {name: asyncio.run(measure(runner)) for name, runner in runners.items()})


if __name__ == "__main__":
    main()
