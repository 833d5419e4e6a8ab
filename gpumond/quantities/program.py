"""Values of rules on processes from the reports of their agents; unknown without an agent that reports. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import StepUsage
from gpumond.facts.snapshot import AgentReport, DeviceReading
from gpumond.quantities.context import FROM_A_FULL_WINDOW, IN_WINDOW, RuleAttribute, number
from gpumond.quantities.table import Unit
from gpumond.quantities.window import PROGRAM_COUNTERS, RuleWindow, program_counts
from gpumond.tick.claims import outermost


class ProgramRow(Protocol):
    """A row of one process on one device."""

    @property
    def device(self) -> DeviceReading: ...
    @property
    def recent(self) -> RuleWindow: ...
    @property
    def report(self) -> AgentReport | None: ...


ProgramAttribute = RuleAttribute[ProgramRow]


def _pools(name: str, meaning: str, field: Callable[[PoolUsage], int | None]) -> ProgramAttribute:
    """Return a sum over the pools on the device; unknown if no pool has the value."""

    def read(row: ProgramRow) -> float | None:
        if row.report is None:
            return None
        own = (pool for pool in outermost(row.report.pools) if pool.device_uuid == row.device.uuid)
        known = [value for value in map(field, own) if value is not None]
        return float(sum(known)) if known else None

    return RuleAttribute(name, "bytes", f"{meaning}, by all allocators on the device", read)


def _host(name: str, meaning: str, field: str) -> ProgramAttribute:
    value = attrgetter(field)

    def read(row: ProgramRow) -> float | None:
        pools = row.report.host_pools if row.report else ()
        return float(sum(map(value, pools))) if pools else None

    return RuleAttribute(name, "bytes", meaning, read)


def _step(name: str, unit: Unit, meaning: str, field: str) -> ProgramAttribute:
    value: Callable[[StepUsage], float | None] = attrgetter(field)

    def read(row: ProgramRow) -> float | None:
        step = row.report.program.step if row.report else None
        return None if step is None else number(value(step))

    return RuleAttribute(name, unit, meaning, read)


def _counter(name: str, meaning: str) -> tuple[ProgramAttribute, ProgramAttribute]:
    """Return the value of a counter, and that of its increase."""
    position = PROGRAM_COUNTERS.index(name)

    def count(row: ProgramRow) -> float | None:
        return None if row.report is None else number(program_counts(row.report.program)[position])

    def increase(row: ProgramRow) -> float | None:
        history = None if row.report is None else row.recent.programs.get(row.report.key)
        return None if history is None else history.increase(position, count(row), row.recent.elapsed)

    return RuleAttribute(name, "count", meaning, count), RuleAttribute(
        f"{name}_increase", "count", f"{meaning}: increase {IN_WINDOW}; {FROM_A_FULL_WINDOW}", increase
    )


PROGRAM: tuple[ProgramAttribute, ...] = (
    RuleAttribute(
        "report_age_seconds",
        "seconds",
        "age of the newest report of its agent",
        lambda row: None if row.report is None else row.report.age_seconds,
    ),
    _pools("live_bytes", "allocated to the program", lambda pool: pool.live_bytes),
    _pools("held_bytes", "held by its pools", lambda pool: pool.held_bytes),
    _pools("reclaimable_bytes", "bytes that a flush would release", lambda pool: pool.reclaimable.likely),
    _pools("stranded_bytes", "held and free, but not released by a flush", lambda pool: pool.stranded_bytes),
    _pools(
        "unmapped_bytes",
        "counted while their pages are released (sleep mode)",
        lambda pool: pool.unmapped_bytes,
    ),
    _host("host_live_bytes", "pinned host memory that is allocated to the program", "live_bytes"),
    _host("host_held_bytes", "pinned host memory that its pools hold", "held_bytes"),
    *_counter("steps", "steps that the program completed"),
    _step("steps_per_second", "count", "rate of the last steps, in steps per second", "steps_per_second"),
    _step("step_kept_bytes", "bytes", "growth of live memory per step, as the trend over the last steps", "kept_bytes"),
    _step("step_live_bytes", "bytes", "live memory at the end of a step", "live_bytes"),
    _step("step_stranded_bytes", "bytes", "stranded memory at the end of a step", "stranded_bytes"),
    *_counter("step_retries", "flushes by the allocators themselves since the first step"),
    *_counter("oom_retries", "calls that `retry_on_oom` repeated"),
    *_counter("oom_rescues", "calls that succeeded after `retry_on_oom` repeated them"),
    *_counter("refusals", "daemons and commands that its agent refused"),
)
