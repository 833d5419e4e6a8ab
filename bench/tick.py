"""One tick of 8 devices with 64 processes each, all with an agent, under the built-in rules and four others.

Calm: hardly any alert. Storm: every rule fires for each of its subjects, and every value changes.
"""

from __future__ import annotations

import gc
import time

from bench.result import publish, spread
from gpumond.facts.alerts import Rule, RuleScope
from gpumond.facts.snapshot import AgentReport, Reading, SourceState
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.settings import QUANTITIES
from gpumond.tick.observe import observe
from tests.helpers.agents import GIB
from tests.helpers.values import TickState, advance, make_device, make_pool, make_process, make_report

DEVICES, PROCESSES, OWN_RULES, TICKS = 8, 64, 4, 300
CALM, STORM = 60 * GIB, 0
COLLECT_EVERY = 10
SOURCE_STATE = SourceState(name="bench", up=True, responsive=True)


def rules(level: float) -> tuple[Rule, ...]:
    """Return the built-in rules, and others over every scope that compare bytes with a level."""
    scopes: tuple[RuleScope, ...] = ("process", "pool", "workload", "device")
    values = {scope: next(name for name in QUANTITIES[scope] if name.endswith("_bytes")) for scope in scopes}
    own = (
        Rule(name=f"bench-{i}", scope=scopes[i % 4], value=values[scopes[i % 4]], above=level) for i in range(OWN_RULES)
    )
    return (*BUILT_IN, *own)


def facts(tick: int, processes: int = PROCESSES) -> tuple[Reading, tuple[AgentReport, ...]]:
    """Return the reading and the reports of one tick, with this number of processes on each device."""
    pids = [[1 + device * processes + i for i in range(processes)] for device in range(DEVICES)]
    reading = Reading(
        devices=tuple(
            make_device(
                f"GPU-{device}",
                index=device,
                used_bytes=70 * GIB,
                processes=tuple(make_process(pid, GIB + tick) for pid in pids[device]),
            )
            for device in range(DEVICES)
        )
    )
    reports = tuple(
        make_report(pid, (make_pool(f"GPU-{device}", live=GIB // 2 + tick, cached=GIB // 4),), workload=f"w{pid % 8}")
        for device in range(DEVICES)
        for pid in pids[device]
    )
    return reading, reports


def measure(active: tuple[Rule, ...]) -> dict[str, object]:
    memory, snapshot, seconds = TickState(), None, []
    for tick in range(TICKS):
        reading, reports = facts(tick)
        began = time.perf_counter()
        snapshot = observe(snapshot, SOURCE_STATE, reading, reports, float(tick), float(tick))
        result = advance(memory, active, snapshot)
        seconds.append(time.perf_counter() - began)
        memory = result.memory
        if tick % COLLECT_EVERY == 0:
            gc.collect()
    return {"alerts": len(result.frame.alerts), **spread(seconds)}


def main() -> None:
    gc.freeze()
    gc.disable()
    size = {"devices": DEVICES, "processes": DEVICES * PROCESSES, "rules": len(BUILT_IN) + OWN_RULES}
    publish("tick", {**size, "calm": measure(rules(CALM)), "storm": measure(rules(STORM))})


if __name__ == "__main__":
    main()
