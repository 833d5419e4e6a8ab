"""Quantities of processes, their pools and steps, and serving engines.

One table, from which `/metrics`, the values of rules and both reference pages derive. Each is read from one fact.
Values of rules that need more than that are in the scopes (`device_scope`), and families without a value of rules in
`metrics`. No I/O.
"""

from __future__ import annotations

from operator import attrgetter

from gpumond.facts.engines import NOT_READ, EngineReading
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.program import Program, StepUsage
from gpumond.facts.shares import HELD_MEANING as HELD_MEANING, SHARE_MEANINGS
from gpumond.facts.snapshot import AgentReport, ProcessUsage
from gpumond.quantities.quantity import Quantity, attribute_quantity

PROCESS_USED: Quantity[ProcessUsage] = attribute_quantity(
    "used_bytes", "Device memory used by the process, as reported by the driver.", "memory_used_bytes"
)
PROCESS_UTILIZATION: Quantity[ProcessUsage] = attribute_quantity(
    "utilization_ratio",
    "The process's recent utilization of the hardware unit that it uses most.",
)

REPORT_AGE: Quantity[AgentReport] = attribute_quantity(
    "report_age_seconds", "Age of the agent's most recent report.", "agent_report_age_seconds", field="age_seconds"
)


def _stranded(pool: PoolUsage) -> int | None:
    return None if pool.live_bytes is None else pool.stranded_bytes


def _reported_reclaimable(pool: PoolUsage) -> int | None:
    """Return the reclaimable bytes. If the library does not report its held bytes, only "not releasable" is known."""
    is_known = (pool.held_known and pool.live_bytes is not None) or pool.reclaimable.exactness == "not_releasable"
    return pool.reclaimable.likely if is_known else None


LIVE: Quantity[PoolUsage] = attribute_quantity(
    "live_bytes", SHARE_MEANINGS["live"], rule_note=" Unknown if nothing counts it."
)
HELD: Quantity[PoolUsage] = attribute_quantity(
    "held_bytes",
    HELD_MEANING,
    export=lambda pool: pool.held_bytes if pool.held_known else None,
)
RECLAIMABLE: Quantity[PoolUsage] = attribute_quantity(
    "reclaimable_bytes",
    "Memory that a flush would release, as the agent predicts.",
    export=_reported_reclaimable,
    field="reclaimable.likely",
)
STRANDED = Quantity[PoolUsage](
    "stranded_bytes",
    SHARE_MEANINGS["stranded"],
    _stranded,
    export=lambda pool: _stranded(pool) if pool.held_known else None,
)
UNMAPPED: Quantity[PoolUsage] = attribute_quantity("unmapped_bytes", SHARE_MEANINGS["unmapped"])


POOL_QUANTITIES: tuple[Quantity[PoolUsage], ...] = (
    LIVE,
    attribute_quantity(
        "live_allocations",
        "Allocations that the program hasn't freed.",
    ),
    attribute_quantity("peak_live_bytes", "Peak live memory, as recorded by the allocator; the program may reset it."),
    HELD,
    RECLAIMABLE,
    STRANDED,
    attribute_quantity("spillable_bytes", "Live memory that the spill flush step would move to the host."),
    UNMAPPED,
    attribute_quantity("ooms", "Out-of-memory errors raised by the allocator.", "ooms_total"),
    attribute_quantity(
        "retries", "Allocations that the allocator retried after it had emptied its cache.", "retries_total"
    ),
    attribute_quantity(
        "device_allocations",
        "Memory allocations that the allocator requested from the driver.",
        "device_allocations_total",
        is_counter=True,
    ),
    attribute_quantity(
        "device_frees",
        "Memory allocations that the allocator returned to the driver.",
        "device_frees_total",
        is_counter=True,
    ),
    attribute_quantity(
        "refilled_flushes",
        "Flushes after which the program took back at least half of the released memory within ten seconds.",
        "refilled_flushes_total",
        is_counter=True,
    ),
    attribute_quantity("peak_held_bytes", "Peak held memory, as recorded by the allocator.", family=""),
    attribute_quantity("private_bytes", "Held memory of private pools (CUDA graphs, `MemPool`).", family=""),
)

HOST_POOL_QUANTITIES: tuple[Quantity[HostPool], ...] = tuple(
    attribute_quantity(
        f"host_{name}",
        f"Pinned host memory {meaning}. This isn't device memory.",
        f"host_pool_{name}",
        field=name,
    )
    for name, meaning in (
        ("live_bytes", "that the program has allocated and not freed"),
        ("held_bytes", "that the allocator holds"),
    )
)

STEP_QUANTITIES: tuple[Quantity[StepUsage], ...] = (
    attribute_quantity("steps", "Steps that the program has completed.", "steps_total", is_counter=True),
    attribute_quantity("steps_per_second", "Steps per second, over the last 20 measured steps.", ""),
    attribute_quantity(
        "step_retained_bytes",
        "Growth of live memory per step: the trend over the last 20 measured steps.",
        field="retained_bytes",
    ),
    attribute_quantity(
        "step_live_bytes",
        "Live memory at the end of the last measured step; a step is measured at most once a second.",
        field="live_bytes",
    ),
    attribute_quantity(
        "step_stranded_bytes",
        "Stranded memory at the end of the last measured step; a step is measured at most once a second.",
        field="stranded_bytes",
    ),
    attribute_quantity(
        "step_retries",
        "Allocations that succeeded only after the allocator had emptied its cache, since the first step.",
        "step_retries_total",
        is_counter=True,
        field="retries",
    ),
)

PROGRAM_QUANTITIES: tuple[Quantity[Program], ...] = (
    attribute_quantity(
        "oom_retries",
        "Retries by retry_on_oom, with the same or smaller arguments.",
        "oom_retries_total",
        is_counter=True,
    ),
    attribute_quantity(
        "oom_recovered", "Calls that succeeded after a retry by retry_on_oom.", "oom_recovered_total", is_counter=True
    ),
    attribute_quantity(
        "refusals",
        "Commands that the program's agent refused: from an untrusted daemon, malformed, or above the rate limit.",
        "agent_commands_refused_total",
        is_counter=True,
    ),
)

ENGINE_QUANTITIES: tuple[Quantity[EngineReading], ...] = (
    Quantity(
        "up",
        "1 if the serving engine responds, else 0.",
        lambda engine: None if engine.problem == NOT_READ else float(engine.up),
        is_boolean=True,
        rule_note=" Unknown before the first read.",
    ),
    attribute_quantity(
        "kv_cache_used_ratio",
        "Fraction of the engine's KV cache that requests use. The whole cache occupies device memory, used or not.",
    ),
    attribute_quantity(
        "running_requests", "Requests that the engine is processing.", "requests_running", field="running"
    ),
    attribute_quantity(
        "waiting_requests", "Requests waiting in the engine's queue.", "requests_waiting", field="waiting"
    ),
    attribute_quantity("sleeping", "1 if the engine is in sleep mode, else 0.", is_boolean=True),
    attribute_quantity("paused", "1 if the engine is paused, else 0.", is_boolean=True),
    Quantity(
        "out_of_service_seconds",
        "Time since a release, if the engine hasn't returned to service although gpumond tries to wake it.",
        lambda engine: engine.out_of_service_seconds or 0.0,
        note=" Absent otherwise.",
        rule_note=" 0 otherwise.",
        export=attrgetter("out_of_service_seconds"),
    ),
    attribute_quantity(
        "idle_seconds",
        "Time without requests and without GPU activity, as reported by the engine and the driver.",
    ),
    Quantity(
        "models",
        "Number of models that the engine lists as loaded.",
        lambda engine: len(engine.models) if engine.up else None,
        "models_loaded",
        rule_note=" Unknown while it doesn't respond.",
    ),
    attribute_quantity("held_bytes", "Device memory that the engine reports as its own."),
    attribute_quantity("kv_cache_bytes", "Size of the engine's KV cache.", ""),
    attribute_quantity("state_age_seconds", "Age of the engine's latest state.", "", field="age_seconds"),
)

ENGINE_USED = Quantity[int](
    "used_bytes", "Device memory used by the engine's processes, as reported by the driver.", float, "memory_used_bytes"
)
"""Of the driver's counts; `/metrics` has them by device, and rules their sum."""

POOL_COUNTERS = tuple(quantity.name for quantity in POOL_QUANTITIES if quantity.is_counter)
PROGRAM_COUNTERS = (
    *(quantity.name for quantity in STEP_QUANTITIES if quantity.is_counter),
    *(quantity.name for quantity in PROGRAM_QUANTITIES if quantity.is_counter),
)
"""Counters of one subject whose increase within the window of rules is a rule value."""
