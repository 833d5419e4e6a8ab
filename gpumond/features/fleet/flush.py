"""``gpumond fleet flush``, ``sleep`` and ``wake``: plan from the frames of several machines; in waves, flush programs,
release the memory of serving engines, or wake these; and print one table of receipts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gpumond.cli.arguments import duration, value
from gpumond.cli.exits import DONE, FAILED, NOTHING_TO_DO, WRONG_USE
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.facts.pools import ALL_STEPS, ENGINE_STEP
from gpumond.facts.units import byte_size, counted
from gpumond.features.fleet import discovery
from gpumond.features.fleet.connection import Client
from gpumond.features.fleet.discovery import chosen, listed, make_client, make_prometheus, progress, read_frames
from gpumond.features.fleet.machines import Machine, Machines
from gpumond.features.fleet.prometheus import SCRAPES, Named, Prometheus, data_seconds, named
from gpumond.features.fleet.selection import Criteria, PlannedFlush, select
from gpumond.view.frame import CheckedFrame, receipts_of
from gpumond.view.text import safe, size, table

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

    named_on = dict(machines)

    def convert(machine: Machine, frame: CheckedFrame) -> list[PlannedFlush]:
        return select(machine, frame, criteria, named_on[machine])

    answers = await read_frames(client, list(named_on), convert, parallel, done)
    planned: list[PlannedFlush] = []
    missing: list[Missing] = []
    for machine, answer in zip(named_on, answers, strict=True):
        if isinstance(answer, DaemonError):
            missing.append(Missing(machine.name, machine.url, str(answer)))
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


MAX_PARALLEL = 8
"""Processes of a wave, by default."""
ENGINES = ("sleep", "wake")
"""Commands that select serving engines only."""


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options of ``flush``, ``sleep`` or ``wake``."""
    selection = parser.add_argument_group("selection", "at least one is required; a process must match all of them")
    selection.add_argument(
        "--query", metavar="PROMQL", help="processes that a query returns (labels instance, pid and uuid)"
    )
    selection.add_argument("--workload", metavar="PATTERN", help="processes of matching workloads, such as 'train-*'")
    selection.add_argument("--user", metavar="PATTERN", help="processes of matching users")
    if what in ENGINES:
        selection.add_argument(
            "--engine", metavar="PATTERN", help="matching serving engines that the configuration declares"
        )
        parser.set_defaults(step=[ENGINE_STEP])
    else:
        parser.set_defaults(engine=None)
        parser.add_argument(
            "--step",
            action="append",
            choices=ALL_STEPS,
            metavar="STEP",
            help=f"flush step to run, repeatable: {', '.join(ALL_STEPS)}; {ENGINE_STEP} can't be combined",
        )
    if what == "wake":
        parser.set_defaults(min_reclaimable=0)
    else:
        parser.add_argument(
            "--min-reclaimable",
            type=value(byte_size),
            metavar="SIZE",
            default=0,
            help="skip processes that would release less than SIZE",
        )
    parser.add_argument("--force", action="store_true", help="flush even during the cooldown after the previous flush")
    parser.add_argument("--dry-run", action="store_true", help="print what would be flushed, and flush nothing")
    parser.add_argument("--yes", action="store_true", help=f"{what} without asking for confirmation")
    parser.add_argument(
        "--max-parallel",
        type=int,
        default=MAX_PARALLEL,
        metavar="N",
        help="maximum number of processes flushed at a time; ranks of one workload are never split "
        f"(default: {MAX_PARALLEL})",
    )
    parser.add_argument("--max-failures", type=int, default=1, metavar="N", help="stop after N failures (default: 1)")
    parser.add_argument(
        "--flush-timeout",
        type=duration,
        default=30.0,
        metavar="DURATION",
        help="time limit for each program (default: 30s)",
    )
    discovery.add_arguments(parser)


async def run(arguments: argparse.Namespace) -> int:
    criteria, options = _criteria(arguments), _options(arguments)
    client = make_client(arguments)
    prometheus = make_prometheus(arguments)
    if arguments.query and prometheus is None:
        raise ConfigError("--query requires --prometheus")
    processes = await named_processes(prometheus, arguments.query) if prometheus and arguments.query else None
    machines = await listed(arguments, client, prometheus)
    missing: list[Missing] = []
    selected: list[tuple[Machine, Mapping[int, Named] | None]]
    if processes is None:
        selected = [(machine, None) for machine in chosen(arguments, machines.all)]
    else:
        found, missing = located(machines, processes)
        allowed = set(chosen(arguments, [machine for machine, _ in found]))
        selected = [(machine, own) for machine, own in found if machine in allowed]
    with progress(len(selected), "machines read") as done:
        planned, unread = await plan(client, selected, criteria, arguments.parallel, done)
    missing += unread
    due = [each for each in planned if not each.refusal]
    order = waves(due, arguments.max_parallel)
    if not arguments.json:
        _print_plan(planned, order, missing, criteria)
    results: list[ProcessResult] = []
    if due and not arguments.dry_run:
        if not arguments.yes and not _confirmed(criteria):
            print("gpumond: nothing was flushed; pass --yes to skip the confirmation", file=sys.stderr)
            return WRONG_USE
        with progress(len(due), "requests answered") as done:
            results = await carry_out(client, order, options, done)
        if not arguments.json:
            print(f"\n{receipt_table(results)}")
    if arguments.json:
        print(json.dumps(_document(planned, order, missing, results), indent=2))
    return _exit_code(planned, missing, results, arguments.dry_run, criteria)


def _criteria(arguments: argparse.Namespace) -> Criteria:
    if not (arguments.query or arguments.workload or arguments.user or arguments.engine or arguments.machine):
        engine = ", --engine" if arguments.what in ENGINES else ""
        raise ConfigError(f"no processes selected: use --query, --workload, --user{engine} or --machine")
    steps = arguments.step or ()
    if ENGINE_STEP in steps and set(steps) != {ENGINE_STEP}:
        raise ConfigError(f"--step {ENGINE_STEP} selects serving engines, and cannot be combined with other steps")
    return Criteria(
        workload=arguments.workload,
        user=arguments.user,
        engine=arguments.engine,
        engines=ENGINE_STEP in steps,
        wake=arguments.what == "wake",
        min_reclaimable_bytes=int(arguments.min_reclaimable),
    )


def _options(arguments: argparse.Namespace) -> FlushOptions:
    if arguments.max_parallel < 1 or arguments.max_failures < 1:
        raise ConfigError("--max-parallel and --max-failures must be positive")
    if not 0 < arguments.flush_timeout <= 600:
        raise ConfigError("--flush-timeout must be more than 0 and at most 600")
    if arguments.json and not (arguments.yes or arguments.dry_run):
        raise ConfigError("--json requires --yes or --dry-run")
    return FlushOptions(
        steps=tuple(arguments.step or ()),
        force=arguments.force,
        timeout_seconds=arguments.flush_timeout,
        max_failures=arguments.max_failures,
        wake=arguments.what == "wake",
    )


def _confirmed(criteria: Criteria) -> bool:
    action = "Wake these engines" if criteria.wake else "Release the memory of these engines"
    print(f"\n{action if criteria.engines else 'Flush these programs'}? [y/N] ", end="", flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print()
    return answer.strip().lower() in ("y", "yes")


def _print_plan(
    planned: Sequence[PlannedFlush],
    order: Sequence[Sequence[PlannedFlush]],
    missing: Sequence[Missing],
    criteria: Criteria,
) -> None:
    parts = [plan_table(planned, order)] if planned else []
    parts.append("\n".join(safe(f"missing {each.machine}: {each.problem}") for each in missing))
    noun = "engine" if criteria.engines else "program"
    nothing = "woken" if criteria.wake else "flushed"
    parts.append(_total(order, noun, criteria.wake) if order else f"no {noun} would be {nothing}")
    print("\n\n".join(filter(None, parts)), flush=True)


def _total(order: Sequence[Sequence[PlannedFlush]], noun: str, wake: bool) -> str:
    due = [each for wave in order for each in wave]
    low, likely, high = (sum(getattr(each, f"{name}_bytes") for each in due) for name in ("low", "likely", "high"))
    between = "" if low == high else f", between {size(low)} and {size(high)}"
    machines = counted(len({each.machine.url for each in due}), "machine")
    what = f"{counted(len(due), noun)} on {machines} in {counted(len(order), 'wave')}"
    return f"{what} would be woken" if wake else f"a flush of {what} would release {size(likely)}{between}"


def plan_table(planned: Sequence[PlannedFlush], order: Sequence[Sequence[PlannedFlush]]) -> str:
    """Return the selected processes with the bytes that a flush would release, wave by wave, then the refused ones."""
    header = ("MACHINE", ">PID", "PROGRAM", "USER", ">WAVE", ">WOULD RELEASE", ">AT LEAST", ">AT MOST", "REASON")
    waved = [(str(number), each) for number, wave in enumerate(order, start=1) for each in wave]
    rows = []
    for number, each in [*waved, *(("-", each) for each in planned if each.refusal)]:
        sizes = (each.likely_bytes, each.low_bytes, each.high_bytes)
        shown = ["-" if each.refusal else size(value) for value in sizes]
        rows.append([*_names(each), each.user or "-", number, *shown, each.refusal])
    return table(header, rows)


def _names(planned: PlannedFlush) -> list[str]:
    return [planned.machine.name, str(planned.pid or "-"), planned.workload or "-"]


def receipt_table(results: Sequence[ProcessResult]) -> str:
    """Return one table of the receipts of all machines: the bytes of the allocators, and those of the driver."""
    counts = (">EXPECTED", ">RELEASED", ">DRIVER", ">SECONDS")
    header = ("MACHINE", ">PID", "PROGRAM", "ALLOCATOR", ">WAVE", "OUTCOME", *counts, "REASON")
    rows = [row for each in results for row in _receipt_rows(each)]
    number = {name: sum(each.result == name for each in results) for name in ("refused", "failed", "skipped")}
    rest = "".join(f", {count} {name}" for name, count in number.items() if count)
    return f"{table(header, rows)}\n\n{size(sum(each.released_bytes for each in results))} released{rest}"


def _receipt_rows(each: ProcessResult) -> Iterator[list[str]]:
    subject = _names(each.planned)
    if not each.receipts:
        yield [*subject, "-", str(each.wave), each.result, "-", "-", "-", "-", each.reason]
    for receipt in each.receipts:
        expected = receipt["expected"]
        yield [
            *subject,
            str(receipt.get("allocator") or "-"),
            str(each.wave),
            str(receipt["outcome"]),
            size(expected["likely"] if expected else None),
            size(receipt["released_bytes"]),
            size(receipt["driver_released_bytes"]),
            f"{receipt.get('duration_seconds', 0.0):.2f}",
            str(receipt.get("reason", "")),
        ]


def _document(
    planned: Sequence[PlannedFlush],
    order: Sequence[Sequence[PlannedFlush]],
    missing: Sequence[Missing],
    results: Sequence[ProcessResult],
) -> dict[str, Any]:
    numbers = {id(each): number for number, wave in enumerate(order, start=1) for each in wave}
    sizes = ("low_bytes", "likely_bytes", "high_bytes", "refusal")
    return {
        "plan": [_fields(each, *SUBJECT, *sizes) | {"wave": numbers.get(id(each))} for each in planned],
        "missing": [each._asdict() for each in missing],
        "results": [
            _fields(each.planned, *SUBJECT)
            | {name: getattr(each, name) for name in ("wave", "result", "reason", "receipts", "released_bytes")}
            for each in results
        ],
        "released_bytes": sum(each.released_bytes for each in results),
    }


SUBJECT = ("pid", "start_ticks", "workload", "user", "engine")


def _fields(planned: PlannedFlush, *names: str) -> dict[str, Any]:
    return {"machine": planned.machine.name} | {name: getattr(planned, name) for name in names}


def _exit_code(
    planned: Sequence[PlannedFlush],
    missing: Sequence[Missing],
    results: Sequence[ProcessResult],
    dry_run: bool,
    criteria: Criteria,
) -> int:
    """Return FAILED if a machine or program failed, NOTHING_TO_DO if nothing was, or would be, released or woken."""
    if missing or any(each.result in ("failed", "skipped") for each in results):
        return FAILED
    woken = any(receipt["outcome"] == "woken" for each in results for receipt in each.receipts)
    effective = woken or any(each.released_bytes for each in results)
    if dry_run:
        effective = any(criteria.wake or each.high_bytes for each in planned if not each.refusal)
    return DONE if effective else NOTHING_TO_DO
