"""Flushes on several machines: read the frames, plan, and flush in waves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gpumond.facts.errors import DaemonError, DiscoveryError
from gpumond.facts.pools import ENGINE_STEP
from gpumond.features.fleet.connection import Client, run_each
from gpumond.features.fleet.machines import Machine, Machines
from gpumond.features.fleet.prometheus import SCRAPES, Named, Prometheus, data_seconds, named
from gpumond.features.fleet.selection import Criteria, PlannedFlush, select
from gpumond.view.frame import receipts_of

FLUSHES = "/api/v1/flushes"
MARGIN_SECONDS = 15.0
"""Time that a daemon takes for a flush in addition to the program's time limit: the driver's count settles."""
ENGINE_SECONDS = 400.0
"""Further time for a serving engine: its requests are observed, it loads a model, and the driver's count settles."""
REFUSALS = (404, 409, 429)
"""The process has ended, is being flushed, or was flushed a moment ago; or too many flushes by this caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    """``timeout_seconds`` is for each program. Without ``steps``, the daemon performs its default steps.
    ``wake``: serving engines are woken.

    The flushes stop before the next wave after ``max_failures`` failures.
    """

    steps: tuple[str, ...] = ()
    force: bool = False
    timeout_seconds: float = 30.0
    max_failures: int = 1
    wake: bool = False


class Missing(NamedTuple):
    """A machine that was not read, with the reason. Its processes are unknown."""

    machine: str
    url: str | None
    problem: str


async def named_processes(prometheus: Prometheus, expression: str) -> Mapping[str, Mapping[int, Named]]:
    """Return the processes that a query names, by instance and pid. Raises DiscoveryError, ConfigError."""
    age = data_seconds(expression)
    samples = await prometheus.query(expression)
    scrapes = await prometheus.query(SCRAPES, samples[0].at) if samples else ()
    return named(samples, scrapes, age)


def located(
    machines: Machines, processes: Mapping[str, Mapping[int, Named]]
) -> tuple[Sequence[tuple[Machine, Mapping[int, Named]]], list[Missing]]:
    """Return the machines of a query's instances, and the instances without an address."""
    found: dict[Machine, dict[int, Named]] = {}  # several instances may be names of one machine
    missing: list[Missing] = []
    for instance, own in processes.items():
        try:
            found.setdefault(machines.address_of(instance), {}).update(own)
        except DiscoveryError as error:
            missing.append(Missing(instance, None, str(error)))
    return [*found.items()], missing


async def plan(
    client: Client,
    machines: Sequence[tuple[Machine, Mapping[int, Named] | None]],
    criteria: Criteria,
    parallel: int,
    done: Callable[[], None] = lambda: None,
) -> tuple[list[PlannedFlush], list[Missing]]:
    """Return the processes that match on the machines' present frames, and the machines that do not answer.

    Nothing is changed. With each machine: the processes that a query names on it, or None without a query.
    """

    async def one(item: tuple[Machine, Mapping[int, Named] | None]) -> list[PlannedFlush] | Missing:
        machine, own = item
        try:
            return select(machine, await client.frame(machine), criteria, own)
        except DaemonError as error:
            return Missing(machine.name, machine.url, str(error))

    planned: list[PlannedFlush] = []
    missing: list[Missing] = []
    for answer in await run_each(machines, one, parallel, done):
        if isinstance(answer, Missing):
            missing.append(answer)
        else:
            planned += answer
    return planned, missing


async def carry_out(
    client: Client,
    waves: Sequence[Sequence[PlannedFlush]],
    options: FlushOptions,
    done: Callable[[], None] = lambda: None,
) -> list[ProcessResult]:
    """Flush wave after wave and return a result for each process, in order. All processes of a wave are flushed at
    the same time.
    """
    results: list[ProcessResult] = []
    failures = 0
    for number, wave in enumerate(waves, start=1):
        if failures >= options.max_failures:
            reason = f"the flushes stopped after {failures} failed"
            results += [ProcessResult(planned=one, result="skipped", wave=number, reason=reason) for one in wave]
            continue
        on_machine = Counter(one.machine.url for one in wave)
        calls = (_flush(client, one, number, options, on_machine[one.machine.url], done) for one in wave)
        ended = await asyncio.gather(*calls)
        failures += sum(one.result == "failed" for one in ended)
        results += ended
    return results


async def _flush(
    client: Client,
    planned: PlannedFlush,
    wave: int,
    options: FlushOptions,
    on_machine: int,
    done: Callable[[], None],
) -> ProcessResult:
    """Flush one process, if it is still the one of the plan, or one serving engine. The daemon flushes what shares a
    device one after the other; ``on_machine`` is the number of the wave's flushes on its machine.
    """
    each_seconds = options.timeout_seconds + MARGIN_SECONDS + (ENGINE_SECONDS if planned.engine else 0.0)
    try:
        answer = await client.post(
            planned.machine, FLUSHES, request(planned, options), on_machine * each_seconds + client.timeout_seconds
        )
        return result_of(planned, wave, receipts_of(answer))
    except DaemonError as error:
        return _rejected(planned, wave, error)
    finally:
        done()


def request(planned: PlannedFlush, options: FlushOptions) -> dict[str, Any]:
    """Return the body of the request to the daemon."""
    target = {"pid": planned.pid, "start_ticks": planned.start_ticks}
    body: dict[str, Any] = {"target": target, "timeout_seconds": options.timeout_seconds}
    if planned.engine:
        body |= {"target": {"workload": planned.engine}, "steps": [ENGINE_STEP]}
        if options.wake:
            body["wake"] = True
    elif options.steps:
        body["steps"] = options.steps
    if options.force:
        body["force"] = True
    return body


def _rejected(planned: PlannedFlush, wave: int, error: DaemonError) -> ProcessResult:
    with suppress(DaemonError):
        if error.problem.get("receipts"):  # a 504: a program did not answer in time
            return result_of(planned, wave, receipts_of(error.problem), str(error))
    gone = error.status == 404 and not planned.engine
    reason = "the process has ended, or has no agent any more" if gone else str(error)
    result: Result = "refused" if error.status in REFUSALS else "failed"
    return ProcessResult(planned=planned, result=result, wave=wave, reason=reason)


Result = Literal["flushed", "refused", "failed", "skipped"]
"""``flushed``: the daemon returned receipts. ``refused``: nothing was done, for a reason of the program or the daemon.
``failed``: the daemon or the program gave no complete answer. ``skipped``: the flushes stopped before it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """Result for one process. ``wave`` counts from 1. ``receipts`` are those of its daemon."""

    planned: PlannedFlush
    result: Result
    wave: int
    reason: str = ""
    receipts: tuple[Mapping[str, Any], ...] = ()

    @property
    def released_bytes(self) -> int:
        return sum(int(receipt["released_bytes"]) for receipt in self.receipts)


def waves(planned: Iterable[PlannedFlush], max_parallel: int) -> list[list[PlannedFlush]]:
    """Return the processes that are flushed in groups, one wave after the other.

    The processes of one workload and user are in one wave, since the ranks of a job wait for each other; a wave with
    more than ``max_parallel`` processes contains one workload only. Engines and processes without a workload are
    independent.
    """
    groups: dict[tuple[object, ...], list[PlannedFlush]] = {}
    for each in planned:
        alone = (each.machine.url, each.pid, each.engine)
        together = each.workload and not each.engine
        groups.setdefault((each.workload, each.user) if together else alone, []).append(each)
    result: list[list[PlannedFlush]] = []
    for group in groups.values():
        if result and len(result[-1]) + len(group) <= max_parallel:
            result[-1] += group
        else:
            result.append([*group])
    return result


def result_of(
    planned: PlannedFlush, wave: int, receipts: Sequence[Mapping[str, Any]], reason: str = ""
) -> ProcessResult:
    """Return the result for one process from the receipts that its daemon returned."""
    outcomes = {str(receipt["outcome"]) for receipt in receipts}
    result: Result = "flushed"
    if outcomes & {"failed", "timeout"} or not outcomes:
        result, reason = "failed", reason or ("" if outcomes else "the daemon returned no receipt")
    elif outcomes <= {"refused"}:
        result = "refused"
    return ProcessResult(planned=planned, result=result, wave=wave, reason=reason, receipts=tuple(receipts))
