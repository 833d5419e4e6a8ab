"""``gpumond fleet flush``, ``sleep`` and ``wake``: flush programs on several machines, release the memory of serving
engines, or wake these, and print one table of receipts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.cli.arguments import duration
from gpumond.cli.exits import DONE, FAILED, NOTHING_TO_DO, WRONG_USE
from gpumond.facts.errors import ConfigError
from gpumond.facts.pools import ALL_STEPS, ENGINE_STEP
from gpumond.facts.units import counted, level
from gpumond.features.fleet.commands import machines as fleet_machines
from gpumond.features.fleet.commands.machines import chosen, listed, make_client, make_prometheus, progress
from gpumond.features.fleet.flush import (
    FlushOptions,
    Missing,
    ProcessResult,
    carry_out,
    located,
    named_processes,
    plan,
    waves,
)
from gpumond.features.fleet.machines import Machine
from gpumond.features.fleet.prometheus import Named
from gpumond.features.fleet.selection import Criteria, PlannedFlush
from gpumond.view.text import safe, size, table

MAX_PARALLEL = 8
"""Processes of a wave, by default."""
ENGINES = ("sleep", "wake")
"""Verbs that select serving engines only."""


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options of ``flush``, ``sleep`` or ``wake``."""
    selection = parser.add_argument_group("selection", "what matches all of these options; at least one")
    selection.add_argument(
        "--query", metavar="PROMQL", help="processes of the series of a query, by their labels instance, pid and uuid"
    )
    selection.add_argument("--workload", metavar="PATTERN", help="processes of workloads such as 'train-*'")
    selection.add_argument("--user", metavar="PATTERN", help="processes of users with such a name")
    if what in ENGINES:
        selection.add_argument("--engine", metavar="PATTERN", help="declared serving engines with such a name")
        parser.set_defaults(step=[ENGINE_STEP])
    else:
        parser.set_defaults(engine=None)
        parser.add_argument(
            "--step",
            action="append",
            choices=ALL_STEPS,
            metavar="STEP",
            help=f"step to perform, repeatable: {', '.join(ALL_STEPS)}; {ENGINE_STEP} only alone",
        )
    if what == "wake":
        parser.set_defaults(min_reclaimable="0")
    else:
        parser.add_argument("--min-reclaimable", metavar="SIZE", default="0", help="skip what would release less")
    parser.add_argument("--force", action="store_true", help="flush even during the cooldown after the previous flush")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; change nothing")
    parser.add_argument("--yes", action="store_true", help=f"{what} without confirmation")
    parser.add_argument(
        "--max-parallel",
        type=int,
        default=MAX_PARALLEL,
        metavar="N",
        help=f"processes that are flushed at the same time; those of one workload always are (default: {MAX_PARALLEL})",
    )
    parser.add_argument(
        "--max-failures", type=int, default=1, metavar="N", help="start no further wave after N failures (default: 1)"
    )
    parser.add_argument(
        "--flush-timeout",
        type=duration,
        default=30.0,
        metavar="DURATION",
        help="time limit for each program (default: 30s)",
    )
    fleet_machines.add_arguments(parser)


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
            print("gpumond: nothing was flushed; --yes confirms without a question", file=sys.stderr)
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
        raise ConfigError(f"no processes are selected: use --query, --workload, --user{engine} or --machine")
    try:
        least = int(level(arguments.min_reclaimable))
    except ValueError as error:
        raise ConfigError(f"--min-reclaimable {arguments.min_reclaimable!r:.80}: {error}") from None
    steps = arguments.step or ()
    if ENGINE_STEP in steps and set(steps) != {ENGINE_STEP}:
        raise ConfigError(f"--step {ENGINE_STEP} selects serving engines, and cannot be combined with other steps")
    return Criteria(
        workload=arguments.workload,
        user=arguments.user,
        engine=arguments.engine,
        engines=ENGINE_STEP in steps,
        wake=arguments.what == "wake",
        min_reclaimable_bytes=least,
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
    return table(header, ([*_plan_row(number, each)] for number, each in [*waved, *_refused(planned)]))


def _refused(planned: Sequence[PlannedFlush]) -> list[tuple[str, PlannedFlush]]:
    return [("-", each) for each in planned if each.refusal]


def _plan_row(wave: str, each: PlannedFlush) -> Iterator[str]:
    yield from (each.machine.name, str(each.pid or "-"), each.workload or "-", each.user or "-", wave)
    sizes = (each.likely_bytes, each.low_bytes, each.high_bytes)
    yield from ("-" if each.refusal else size(number) for number in sizes)
    yield each.refusal


def receipt_table(results: Sequence[ProcessResult]) -> str:
    """Return one table of the receipts of all machines: the bytes of the allocators, and those of the driver."""
    counts = (">EXPECTED", ">RELEASED", ">DRIVER", ">SECONDS")
    header = ("MACHINE", ">PID", "PROGRAM", "ALLOCATOR", ">WAVE", "OUTCOME", *counts, "REASON")
    rows = [row for each in results for row in _receipt_rows(each)]
    number = {name: sum(each.result == name for each in results) for name in ("refused", "failed", "skipped")}
    rest = "".join(f", {count} {name}" for name, count in number.items() if count)
    return f"{table(header, rows)}\n\n{size(sum(each.released_bytes for each in results))} released{rest}"


def _receipt_rows(each: ProcessResult) -> Iterator[list[str]]:
    planned = each.planned
    subject = [planned.machine.name, str(planned.pid or "-"), planned.workload or "-"]
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
    return {
        "plan": [_subject(each) | _sizes(each) | {"wave": numbers.get(id(each))} for each in planned],
        "missing": [each._asdict() for each in missing],
        "results": [
            _subject(each.planned)
            | {"wave": each.wave, "result": each.result, "reason": each.reason, "receipts": each.receipts}
            | {"released_bytes": each.released_bytes}
            for each in results
        ],
        "released_bytes": sum(each.released_bytes for each in results),
    }


def _subject(each: PlannedFlush) -> dict[str, Any]:
    names = ("pid", "start_ticks", "workload", "user", "engine")
    return {"machine": each.machine.name} | {name: getattr(each, name) for name in names}


def _sizes(each: PlannedFlush) -> dict[str, Any]:
    return {name: getattr(each, name) for name in ("low_bytes", "likely_bytes", "high_bytes", "refusal")}


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
