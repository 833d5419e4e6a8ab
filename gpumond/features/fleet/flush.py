"""``gpumond fleet flush``, ``sleep`` and ``wake``: plan from the frames of several machines; in waves, flush programs,
release the memory of serving engines, or wake these; and print one table of receipts.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import secrets
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, add_option, confirm, option_type, parse_duration
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.facts.flush import MAX_REASON_LENGTH, Operation
from gpumond.facts.pools import DEFAULT_STEPS, ENGINE_STEP, STEPS, with_option_names
from gpumond.facts.units import parse_size, plural, size_text
from gpumond.features.fleet import discovery
from gpumond.features.fleet.connection import Client, Machine, Machines, run_each
from gpumond.features.fleet.discovery import (
    DEFAULT_CONCURRENCY,
    SNAPSHOT_TIME_METRIC,
    Instance,
    Prometheus,
    QueriedProcess,
    UnreadMachine,
    list_machines,
    lookback_seconds,
    make_client,
    make_prometheus,
    matching_machines,
    processes_by_instance,
    read_frames,
    unread_machines,
)
from gpumond.features.fleet.plan import (
    Criteria,
    FleetLimits,
    PlannedFlush,
    engine_availability,
    parse_max_unavailable,
    plan_flushes,
    plan_waves,
    refuse_beyond_limits,
    replicas_by_service,
    split_canary,
)
from gpumond.host.machine import MACHINE_NAME
from gpumond.view.frame import frame_of, receipts_of
from gpumond.view.text import printable, size_or_dash, table

FLUSHES_ROUTE = "/api/v1/flushes"
MAY_SLEEP_OUTCOMES = frozenset(("freed", "partial", "timeout", "failed"))
"""Outcomes of a serving engine that may sleep now."""
MARGIN_SECONDS = 15.0
"""Time that a daemon takes for a flush in addition to the program's time limit: the driver's count settles."""
ENGINE_EXTRA_SECONDS = 400.0
"""Further time for a serving engine: its requests are observed, it loads a model, and the driver's count settles."""
REFUSAL_STATUSES = (404, 409, 429)
"""The process has ended, is being flushed, or was flushed a moment ago; or too many flushes by this caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    """``timeout_seconds`` is for each program. Without ``steps``, the daemon performs its default steps.
    ``wake``: serving engines are woken.

    At most ``concurrency`` requests are sent at a time, and none after ``max_failures`` failures. ``canary``: the first
    wave must release what its receipts promise before the next one starts.
    """

    steps: tuple[str, ...] = ()
    force: bool = False
    timeout_seconds: float = 30.0
    max_failures: int = 1
    wake: bool = False
    concurrency: int = DEFAULT_CONCURRENCY
    canary: bool = False
    operation: Operation | None = None


async def query_processes(prometheus: Prometheus, expression: str) -> Mapping[Instance, Mapping[int, QueriedProcess]]:
    """Return the processes that a query names, as `processes_by_instance` does. Raises DiscoveryError, ConfigError."""
    age_seconds = lookback_seconds(expression)
    samples = await prometheus.query(expression)
    scrapes = await prometheus.query(SNAPSHOT_TIME_METRIC, samples[0].at) if samples else ()
    return processes_by_instance(samples, scrapes, age_seconds)


def processes_by_machine(
    machines: Machines, processes: Mapping[Instance, Mapping[int, QueriedProcess]]
) -> tuple[Sequence[tuple[Machine, Mapping[int, QueriedProcess]]], list[UnreadMachine]]:
    """Return the machines of a query's instances, and the instances without an address."""
    machine_processes: dict[Machine, dict[int, QueriedProcess]] = {}  # several instances may be names of one machine
    unlisted: list[UnreadMachine] = []
    clusters = Counter(instance for _, instance in processes)
    for (cluster, instance), instance_processes in processes.items():
        try:
            machine = machines.machine_of(instance, cluster)
            if clusters[instance] > 1 and "cluster" not in dict(machine.labels):
                raise DiscoveryError(
                    "machines in several clusters have this name; add the label cluster to those in your list"
                )
            machine_processes.setdefault(machine, {}).update(instance_processes)
        except DiscoveryError as error:
            unlisted.append(UnreadMachine(f"{cluster}/{instance}" if cluster else instance, None, str(error)))
    return [*machine_processes.items()], unlisted


async def read_plan(
    client: Client,
    machines: Sequence[tuple[Machine, Mapping[int, QueriedProcess] | None]],
    criteria: Criteria,
    concurrency: int,
) -> tuple[list[PlannedFlush], list[UnreadMachine], list[tuple[str, bool]]]:
    """Return the processes that match on the machines' present frames, the machines that do not answer, and the
    serving engines of the others, as `engine_availability` does.

    Nothing is changed. With each machine: the processes that a query names on it, or None without a query.
    """

    queried = dict(machines)

    def convert(machine: Machine, answer: object) -> tuple[list[PlannedFlush], list[tuple[str, bool]]]:
        frame = frame_of(answer)
        return plan_flushes(machine, frame, criteria, queried[machine]), engine_availability(frame)

    answers = await read_frames(client, list(queried), convert, concurrency)
    planned: list[PlannedFlush] = []
    engines: list[tuple[str, bool]] = []
    for answer in answers:
        if not isinstance(answer, DaemonError):
            planned += answer[0]
            engines += answer[1]
    return planned, unread_machines(queried, answers), engines


async def flush_waves(
    client: Client, waves: Sequence[Sequence[PlannedFlush]], options: FlushOptions
) -> list[ProcessResult]:
    """Flush wave after wave and return a result for each process, in order.

    With a canary, the first job of the next wave replaces one that was refused, since nothing was done.
    """
    runner = _WaveRunner(client, options)
    results: list[ProcessResult] = []
    remaining, wave_number, canary_done = [*waves], 0, not options.canary
    while remaining:
        wave_number += 1
        wave_results = await runner.flush(remaining.pop(0), wave_number)
        results += wave_results
        if not canary_done and not runner.stop_reason:
            runner.stop_reason = _canary_problem(wave_results)
            canary_done = any(result.result != "refused" for result in wave_results)
            remaining = remaining if canary_done else split_canary(remaining)
    return results


def _canary_problem(results: Sequence[ProcessResult]) -> str:
    """Return why no more flushes follow the canary, or an empty string."""
    for result in results:
        if result.result == "failed":
            return "the flushes stopped after the first one failed"
        for receipt in result.receipts:
            promised_bytes = receipt["expected"]["low"] if receipt["expected"] else 0
            is_useless = receipt["outcome"] == "partial" or (receipt["outcome"] == "nothing" and result.planned.engine)
            if (is_useless or receipt["released_bytes"] < promised_bytes) and not receipt["raced"]:
                shortfall = (
                    f"it released {size_text(receipt['released_bytes'])} of the {size_text(promised_bytes)} expected"
                )
                return f"the flushes stopped after the first one: {receipt['reason'] or shortfall}"
    return ""


class _WaveRunner:
    """The requests of one command. ``stop_reason``: the reason why no more are sent, or an empty string."""

    def __init__(self, client: Client, options: FlushOptions) -> None:
        self._client, self._options = client, options
        self._failures = 0
        self.stop_reason = ""

    async def flush(self, wave: Sequence[PlannedFlush], number: int) -> list[ProcessResult]:
        """Flush the processes of a wave at the same time."""
        flushes_on_machine = Counter(planned.machine.url for planned in wave)

        async def flush_process(planned: PlannedFlush) -> ProcessResult:
            return await self._flush_process(planned, number, flushes_on_machine[planned.machine.url])

        return await run_each(wave, flush_process, self._options.concurrency)

    async def _flush_process(self, planned: PlannedFlush, wave: int, flushes_on_machine: int) -> ProcessResult:
        if self.stop_reason:
            return ProcessResult(planned=planned, result="skipped", wave=wave, reason=self.stop_reason)
        result = await _request_flush(self._client, planned, wave, self._options, flushes_on_machine)
        self._failures += result.result == "failed"
        if self._failures >= self._options.max_failures:
            self.stop_reason = f"the flushes stopped after {self._failures} failed"
        return result


async def _request_flush(
    client: Client,
    planned: PlannedFlush,
    wave: int,
    options: FlushOptions,
    flushes_on_machine: int,
) -> ProcessResult:
    """Flush one process, if it is still the one of the plan, or one serving engine. The daemon flushes what shares a
    device one after the other; ``flushes_on_machine`` is the number of the wave's flushes on its machine.
    """
    seconds_per_flush = options.timeout_seconds + MARGIN_SECONDS + (ENGINE_EXTRA_SECONDS if planned.engine else 0.0)
    try:
        answer = await client.post(
            planned.machine,
            FLUSHES_ROUTE,
            request_body(planned, options),
            flushes_on_machine * seconds_per_flush + client.timeout_seconds,
        )
        return receipts_result(planned, wave, receipts_of(answer))
    except DaemonError as error:
        return _error_result(planned, wave, error)


def request_body(planned: PlannedFlush, options: FlushOptions) -> dict[str, Any]:
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
    if options.operation is not None:
        body["operation"] = asdict(options.operation)
    return body


def _error_result(planned: PlannedFlush, wave: int, error: DaemonError) -> ProcessResult:
    with suppress(DaemonError):
        if error.problem.get("receipts"):  # a 504: a program did not answer in time
            return receipts_result(planned, wave, receipts_of(error.problem), str(error))
    has_exited = error.status == 404 and not planned.engine
    reason = "the process has exited, or has no agent anymore" if has_exited else with_option_names(str(error))
    result: ResultKind = "refused" if error.status in REFUSAL_STATUSES else "failed"
    return ProcessResult(planned=planned, result=result, wave=wave, reason=reason)


ResultKind = Literal["flushed", "refused", "failed", "skipped"]
"""``flushed``: the daemon returned receipts. ``refused``: nothing was done, for a reason of the program or the daemon.
``failed``: the daemon or the program gave no complete answer. ``skipped``: the flushes stopped before it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """Result for one process. ``wave`` counts from 1. ``receipts`` are those of its daemon."""

    planned: PlannedFlush
    result: ResultKind
    wave: int
    reason: str = ""
    receipts: tuple[Mapping[str, Any], ...] = ()

    @property
    def released_bytes(self) -> int:
        return sum(int(receipt["released_bytes"]) for receipt in self.receipts)


def receipts_result(
    planned: PlannedFlush, wave: int, receipts: Sequence[Mapping[str, Any]], reason: str = ""
) -> ProcessResult:
    """Return the result for one process from the receipts that its daemon returned."""
    outcomes = {str(receipt["outcome"]) for receipt in receipts}
    result: ResultKind = "flushed"
    if outcomes & {"failed", "timeout"} or not outcomes:
        result, reason = "failed", reason or ("" if outcomes else "the daemon returned no receipt")
    elif outcomes <= {"refused"}:
        result = "refused"
    return ProcessResult(planned=planned, result=result, wave=wave, reason=reason, receipts=tuple(receipts))


DEFAULT_KEEP = 1
"""Replicas of a service that are not put to sleep, by default."""
ENGINE_COMMANDS = ("sleep", "wake")
"""Commands that select serving engines only."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of ``flush``, ``sleep`` or ``wake``."""
    selection = parser.add_argument_group(
        "selection",
        "pass at least one of these, --machine and --label; a process must match all that you pass",
    )
    add_option(
        selection,
        "--query PROMQL",
        "processes in this query's result; its series must have the labels instance and pid",
    )
    add_option(selection, "--workload PATTERN", "processes of matching workloads, such as 'train-*'")
    add_option(selection, "--user PATTERN", "processes of matching users")
    parser.set_defaults(engine=None, step=None, min_reclaimable=0, keep=DEFAULT_KEEP, max_unavailable=None, force=False)
    if command in ENGINE_COMMANDS:
        add_option(selection, "--engine PATTERN", "serving engines whose name in the configuration matches")
    else:
        add_option(
            parser,
            "--step STEP",
            f"flush step to run, repeatable: {', '.join(STEPS)} (default: {', '.join(DEFAULT_STEPS)})",
            action="append",
            choices=STEPS,
        )
    if command != "wake":
        add_option(
            parser,
            "--min-reclaimable SIZE",
            "skip engines that use less than SIZE"
            if command == "sleep"
            else "skip processes that would release less than SIZE",
            type=option_type(parse_size),
        )
    if command == "sleep":
        add_option(
            parser,
            "--keep N",
            f"how many engines of each name stay awake across all listed machines (default: {DEFAULT_KEEP})",
            type=int,
        )
        add_option(
            parser,
            "--max-unavailable N|P%",
            "how many engines of each name may be unavailable at once (default: all but --keep)",
            type=option_type(parse_max_unavailable),
        )
    if command != "wake":
        force = "release even if the last release got no response" if command == "sleep" else "ignore the cooldown"
        add_option(parser, "--force", force)
    add_option(parser, "--dry-run", "print the plan, and change nothing")
    add_option(parser, "--yes", "don't ask for confirmation")
    add_option(
        parser,
        "--max-parallel N",
        "change at most N processes at the same time (a wave); a job's ranks share a wave (default: 8)",
        type=int,
        default=8,
    )
    add_option(parser, "--max-machines N", "change at most N machines (default: all)", type=int)
    add_option(
        parser,
        "--no-canary",
        "start with a full wave instead of one process or job",
        dest="canary",
        action="store_false",
    )
    add_option(parser, "--max-failures N", "stop after N failures (default: 1)", type=int, default=1)
    add_option(parser, "--reason TEXT", "your reason or ticket, for each machine's audit log", default="")
    add_option(
        parser,
        "--flush-timeout DURATION",
        "time limit for each process (default: 30s)",
        type=parse_duration,
        default=30.0,
    )
    discovery.add_arguments(parser)


async def run(arguments: argparse.Namespace) -> int:
    criteria, options, limits = _criteria(arguments), _options(arguments), _limits(arguments)
    client = make_client(arguments)
    prometheus = make_prometheus(arguments)
    if arguments.query and prometheus is None:
        raise ConfigError("--query requires --prometheus")
    processes = await query_processes(prometheus, arguments.query) if prometheus and arguments.query else None
    machines = await list_machines(arguments, prometheus)
    missing: list[UnreadMachine] = []
    selected: list[tuple[Machine, Mapping[int, QueriedProcess] | None]]
    if processes is None:
        selected = [(machine, None) for machine in matching_machines(arguments, machines.all)]
    else:
        queried, missing = processes_by_machine(machines, processes)
        matching = set(matching_machines(arguments, [machine for machine, _ in queried]))
        selected = [(machine, machine_processes) for machine, machine_processes in queried if machine in matching]
    planned, unread, engines = await read_plan(client, selected, criteria, arguments.parallel)
    missing += unread
    services = None
    if criteria.engines_only and not criteria.wake:
        selected_machines = {machine for machine, _ in selected}
        others = [machine for machine in machines.all if machine not in selected_machines]
        for answer in await read_frames(
            client, others, lambda _, frame: engine_availability(frame), arguments.parallel
        ):
            engines += [] if isinstance(answer, DaemonError) else answer
        services = replicas_by_service(engines)
    planned = refuse_beyond_limits(planned, limits, services)
    accepted = [each for each in planned if not each.refusal]
    operation = options.operation if accepted and not arguments.dry_run else None
    waves = plan_waves(accepted, arguments.max_parallel, options.canary)
    fleet_flush = _FleetFlush(planned, waves, missing, criteria, operation)
    if not arguments.json:
        print(fleet_flush.plan_text(), flush=True)
    if operation is not None:
        if not arguments.yes:
            confirm(_question(criteria), "nothing was flushed")
        fleet_flush.results = await flush_waves(client, waves, options)
        if not arguments.json:
            print(f"\n{receipt_table(fleet_flush.results)}")
            if fleet_flush.may_sleep:
                words = ("gpumond", "fleet", "undo", *discovery.listing_options(arguments), operation.id)
                print(f"to undo: {printable(shlex.join(words))}")
    if arguments.json:
        print(json.dumps(fleet_flush.document(), indent=2))
    return fleet_flush.exit_code(arguments.dry_run)


def _criteria(arguments: argparse.Namespace) -> Criteria:
    names = ("query", "workload", "user", "engine", "machine", "label")
    if not any(getattr(arguments, name) for name in names):
        engine = ", --engine" if arguments.what in ENGINE_COMMANDS else ""
        raise ConfigError(f"no processes are selected; pass --query, --workload, --user{engine}, --machine or --label")
    return Criteria(
        workload=arguments.workload,
        user=arguments.user,
        engine=arguments.engine,
        engines_only=arguments.what in ENGINE_COMMANDS,
        wake=arguments.what == "wake",
        min_reclaimable_bytes=int(arguments.min_reclaimable),
    )


def _limits(arguments: argparse.Namespace) -> FleetLimits:
    if arguments.max_machines is not None and arguments.max_machines < 1:
        raise ConfigError("--max-machines must be above 0")
    if arguments.keep < 0:
        raise ConfigError("--keep must not be negative")
    return FleetLimits(
        max_machines=arguments.max_machines, keep=arguments.keep, max_unavailable=arguments.max_unavailable
    )


def _options(arguments: argparse.Namespace) -> FlushOptions:
    if arguments.max_parallel < 1 or arguments.max_failures < 1:
        raise ConfigError("--max-parallel and --max-failures must be above 0")
    if len(arguments.reason) > MAX_REASON_LENGTH:
        raise ConfigError(f"--reason must have at most {MAX_REASON_LENGTH} characters")
    if not 0 < arguments.flush_timeout <= 600:
        raise ConfigError("--flush-timeout must be above 0 and at most 10m")
    if arguments.json and not (arguments.yes or arguments.dry_run):
        raise ConfigError("--json requires --yes or --dry-run")
    return FlushOptions(
        steps=tuple(arguments.step or ()),
        force=arguments.force,
        timeout_seconds=arguments.flush_timeout,
        max_failures=arguments.max_failures,
        wake=arguments.what == "wake",
        concurrency=arguments.parallel,
        canary=arguments.canary,
        operation=Operation(new_operation_id(), arguments.reason, caller_name()),
    )


def new_operation_id() -> str:
    """Return the id of a new operation, which begins with the time (UTC)."""
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def caller_name() -> str:
    """Return the name of the user and the machine that this command runs on; the daemons cannot verify it."""
    try:
        user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid {os.getuid()}"
    return f"{user}@{MACHINE_NAME}"[:MAX_REASON_LENGTH]


def _question(criteria: Criteria) -> str:
    action = "Wake these engines" if criteria.wake else "Release the memory of these engines"
    return f"{action if criteria.engines_only else 'Flush these processes'}?"


@dataclass(slots=True)
class _FleetFlush:
    """What is planned, in which order, and the results so far."""

    planned: Sequence[PlannedFlush]
    waves: Sequence[Sequence[PlannedFlush]]
    missing: Sequence[UnreadMachine]
    criteria: Criteria
    operation: Operation | None
    results: Sequence[ProcessResult] = ()

    def plan_text(self) -> str:
        noun = "engine" if self.criteria.engines_only else "process"
        released = "no engine would release memory" if self.criteria.engines_only else "no process would be flushed"
        nothing = "no engine would be woken" if self.criteria.wake else released
        missing = "\n".join(map(str, self.missing))
        table = plan_table(self.planned, self.waves) if self.planned else ""
        operation = f"operation {self.operation.id}" if self.operation else ""
        return "\n\n".join(filter(None, (table, missing, self._total_text(noun) if self.waves else nothing, operation)))

    def _total_text(self, noun: str) -> str:
        accepted = [each for wave in self.waves for each in wave]
        low, high = sum(each.low_bytes for each in accepted), sum(each.high_bytes for each in accepted)
        likely = [each.likely_bytes for each in accepted if each.likely_bytes is not None]
        parts = [size_or_dash(sum(likely))] if len(likely) == len(accepted) else []
        parts += [f"between {size_or_dash(low)} and {size_or_dash(high)}"] if low != high or not parts else []
        machines = plural(len({each.machine.url for each in accepted}), "machine")
        flushed = f"{plural(len(accepted), noun)} on {machines} in {plural(len(self.waves), 'wave')}"
        if self.criteria.wake:
            return f"{flushed} would be woken"
        return f"a flush of {flushed} would release {', '.join(parts)}"

    def document(self) -> dict[str, Any]:
        numbers = {id(each): number for number, wave in enumerate(self.waves, start=1) for each in wave}
        sizes = ("low_bytes", "likely_bytes", "high_bytes", "refusal")
        result = ("wave", "result", "reason", "receipts", "released_bytes")
        return {
            "plan": [_fields(each, *SUBJECT_FIELDS, *sizes) | {"wave": numbers.get(id(each))} for each in self.planned],
            "operation": self.operation.id if self.operation else None,
            "missing": [each._asdict() for each in self.missing],
            "results": [
                _fields(each.planned, *SUBJECT_FIELDS) | {name: getattr(each, name) for name in result}
                for each in self.results
            ],
            "released_bytes": sum(each.released_bytes for each in self.results),
        }

    @property
    def may_sleep(self) -> bool:
        """Whether an engine may sleep now."""
        outcomes = (receipt["outcome"] for each in self.results for receipt in each.receipts)
        return self.criteria.engines_only and not self.criteria.wake and not MAY_SLEEP_OUTCOMES.isdisjoint(outcomes)

    def exit_code(self, dry_run: bool) -> int:
        """Return FAILED after a failure, NOTHING_TO_DO if nothing was, or would be, released or woken."""
        if self.missing or any(each.result in ("failed", "skipped") for each in self.results):
            return FAILED
        woken = any(receipt["outcome"] == "woken" for each in self.results for receipt in each.receipts)
        effective = woken or any(each.released_bytes for each in self.results)
        if dry_run:
            effective = any(self.criteria.wake or each.high_bytes for each in self.planned if not each.refusal)
        return DONE if effective else NOTHING_TO_DO


def plan_table(planned: Sequence[PlannedFlush], waves: Sequence[Sequence[PlannedFlush]]) -> str:
    """Return the selected processes with the bytes that a flush would release, wave by wave, then the refused ones."""
    bounded = any(not each.low_bytes == each.likely_bytes == each.high_bytes for each in planned if not each.refusal)
    bounds = (">AT LEAST", ">AT MOST") if bounded else ()
    header = ("MACHINE", ">PID", "PROGRAM", "USER", ">WAVE", ">WOULD RELEASE", *bounds, "REASON")
    waved = [(str(number), each) for number, wave in enumerate(waves, start=1) for each in wave]
    rows = []
    for number, each in [*waved, *(("-", each) for each in planned if each.refusal)]:
        sizes = (each.likely_bytes, each.low_bytes, each.high_bytes)[: 1 + len(bounds)]
        size_cells = ["-" if each.refusal else size_or_dash(value) for value in sizes]
        rows.append([*_subject_cells(each), each.user or "-", number, *size_cells, each.refusal])
    return _table_with_notes(header, rows)


MAX_REASON_CHARACTERS = 60
"""Characters of a reason that a table shows; a longer one is below it, once."""


def _table_with_notes(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose last column is a reason."""
    notes: dict[str, str] = {}
    short_rows = []
    for *cells, reason in rows:
        if len(reason) > MAX_REASON_CHARACTERS:
            reason = notes.setdefault(reason, f"[{len(notes) + 1}]")
        short_rows.append([*cells, reason])
    return "\n".join([table(header, short_rows), *(printable(f"{mark} {reason}") for reason, mark in notes.items())])


def _subject_cells(planned: PlannedFlush) -> list[str]:
    return [planned.machine.name, str(planned.pid or "-"), planned.workload or "-"]


def receipt_table(results: Sequence[ProcessResult]) -> str:
    """Return one table of the receipts of all machines: the bytes of the allocators, and those of the driver."""
    counts = (">EXPECTED", ">RELEASED", ">DRIVER", ">TOOK")
    header = ("MACHINE", ">PID", "PROGRAM", "ALLOCATOR", ">WAVE", "OUTCOME", *counts, "REASON")
    rows = [row for each in results for row in _receipt_rows(each)]
    kinds = Counter(each.result for each in results)
    others = "".join(f", {kinds[kind]} {kind}" for kind in ("refused", "failed", "skipped") if kinds[kind])
    released = size_or_dash(sum(each.released_bytes for each in results))
    return f"{_table_with_notes(header, rows)}\n\n{released} released{others}"


def _receipt_rows(each: ProcessResult) -> Iterator[list[str]]:
    subject = _subject_cells(each.planned)
    if not each.receipts:
        yield [*subject, "-", str(each.wave), each.result, "-", "-", "-", "-", each.reason]
    for receipt in each.receipts:
        expected = receipt["expected"]
        yield [
            *subject,
            str(receipt.get("allocator") or "-"),
            str(each.wave),
            str(receipt["outcome"]),
            size_or_dash(expected["likely"] if expected else None),
            size_or_dash(receipt["released_bytes"]),
            size_or_dash(receipt["driver_released_bytes"]),
            f"{receipt.get('duration_seconds', 0.0):.2f} s",
            with_option_names(str(receipt.get("reason", ""))),
        ]


SUBJECT_FIELDS = ("pid", "start_ticks", "workload", "user", "engine", "job")


def _fields(planned: PlannedFlush, *names: str) -> dict[str, Any]:
    return {"machine": planned.machine.name} | {name: getattr(planned, name) for name in names}
