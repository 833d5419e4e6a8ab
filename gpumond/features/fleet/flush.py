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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, WRONG_USE, duration, value
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.facts.pools import ALL_STEPS, ENGINE_STEP
from gpumond.facts.program import TICKS_PER_SECOND
from gpumond.facts.units import byte_size, counted, human
from gpumond.features.fleet import discovery
from gpumond.features.fleet.connection import Client, Machine, Machines
from gpumond.features.fleet.discovery import (
    SCRAPES,
    Named,
    Prometheus,
    chosen,
    data_seconds,
    listed,
    make_client,
    make_prometheus,
    named,
    progress,
    read_frames,
)
from gpumond.view.frame import CheckedFrame, frame_of, receipts_of
from gpumond.view.text import safe, size, table

Key = tuple[int, int | None]
"""Pid and start of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """A process must match each pattern, such as ``train-*``, that is not None. An engine is named by ``engine``, and
    has the workload and the users of its processes; ``workload`` may also be its name.

    With ``engines``, engines are selected instead of processes; with ``wake``, those to wake. What would release fewer
    than ``min_reclaimable_bytes`` is not flushed.
    """

    workload: str | None = None
    user: str | None = None
    engine: str | None = None
    engines: bool = False
    wake: bool = False
    min_reclaimable_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFlush:
    """One process, or one serving engine, and the bytes that a flush would release. With a ``refusal``, the reason, it
    is not flushed.

    ``start_ticks`` is None only with a refusal. ``engine`` is the name of an engine, which is also its ``workload``;
    ``pid`` is then that of its first process, 0 without one.
    """

    machine: Machine = field(repr=False)
    pid: int
    start_ticks: int | None = None
    workload: str = ""
    user: str = ""
    engine: str = ""
    low_bytes: int = 0
    likely_bytes: int = 0
    high_bytes: int = 0
    refusal: str = ""


def select(
    machine: Machine, answer: object, criteria: Criteria, named: Mapping[int, Named] | None
) -> list[PlannedFlush]:
    """Return what matches on a machine. Raises DaemonError if ``answer`` is not a frame.

    ``named``: the processes that a query names; None without a query.
    """
    frame = frame_of(answer)
    processes: dict[int, _Process] = {}
    for each in _processes(frame):
        if each.report or each.pid not in processes:
            processes[each.pid] = each
    if criteria.engines:
        return [*_select_engines(machine, frame["snapshot"]["engines"], processes, criteria, named)]
    return [*_select(machine, processes, criteria, named)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """``used_bytes``: on all devices, as far as the driver counts it."""

    pid: int
    start_ticks: int | None
    started_at: float | None
    user: str
    uuids: frozenset[str]
    used_bytes: int
    report: Mapping[str, Any] | None

    @property
    def workload(self) -> str:
        return str(self.report["workload"]) if self.report else ""


def _select(
    machine: Machine, processes: Mapping[int, _Process], criteria: Criteria, named: Mapping[int, Named] | None
) -> Iterator[PlannedFlush]:
    for pid in sorted(processes if named is None else named):
        process = processes.get(pid)
        if process is None:
            yield PlannedFlush(machine=machine, pid=pid, refusal="the process has ended")
        elif named is None and not process.uuids:
            continue  # a launcher, which uses no device
        elif _matches((process.workload,), criteria.workload) and _matches((process.user,), criteria.user):
            yield _planned(machine, process, criteria, named[pid] if named is not None else None)


def _matches(texts: Iterable[str], pattern: str | None) -> bool:
    return pattern is None or any(fnmatchcase(text, pattern) for text in texts)


def _planned(machine: Machine, process: _Process, criteria: Criteria, named: Named | None) -> PlannedFlush:
    pools = process.report["pools"] if process.report else []
    low, likely, high = (sum(int(pool["reclaimable"][name]) for pool in pools) for name in ("low", "likely", "high"))
    return PlannedFlush(
        machine=machine,
        pid=process.pid,
        start_ticks=process.start_ticks,
        workload=process.workload,
        user=process.user,
        low_bytes=low,
        likely_bytes=likely,
        high_bytes=high,
        refusal=_refusal(process, likely, criteria, named),
    )


def _refusal(process: _Process, likely_bytes: int, criteria: Criteria, named: Named | None) -> str:
    """Return the reason for which a process is not flushed, or an empty string."""
    if named is not None and (other := _other(process, named)):
        return other
    if process.report is None:
        return "it has no agent"
    if process.start_ticks is None:
        return "its start is unknown"
    if process.report["flush_policy"] == "never":
        return "its agent allows no flush"
    return _too_few(likely_bytes, criteria)


def _too_few(likely_bytes: int, criteria: Criteria) -> str:
    if likely_bytes >= criteria.min_reclaimable_bytes:
        return ""
    least = human(criteria.min_reclaimable_bytes)
    return f"{human(likely_bytes)} is reclaimable, less than the {least} requested"


def _other(process: _Process, named: Named) -> str:
    """Return the reason why a process is, or may be, another one than the query names."""
    if process.started_at is None:
        return "its start is unknown, so that it may be another process than the query names"
    if process.started_at > named.ran_at:
        return "it started after the data that the query reads: the pid was reused"
    if named.workloads and process.workload not in named.workloads:
        return f"its workload is {process.workload or 'unknown'}, not {', '.join(sorted(named.workloads))}"
    if named.uuids and not named.uuids & process.uuids:
        return f"it does not use {', '.join(sorted(named.uuids))}"
    return ""


def _select_engines(
    machine: Machine,
    engines: Iterable[Mapping[str, Any]],
    processes: Mapping[int, _Process],
    criteria: Criteria,
    named: Mapping[int, Named] | None,
) -> Iterator[PlannedFlush]:
    rest = set(named or ())
    for engine in engines:
        name = str(engine["name"])
        keys = {(each["pid"], each["start_ticks"]) for each in engine["processes"]}
        own = [processes[pid] for pid in sorted(processes) if (pid, processes[pid].start_ticks) in keys]
        meant = own if named is None else [each for each in own if each.pid in named]
        rest -= {each.pid for each in own}
        workloads, users = (name, *(each.workload for each in own)), [each.user for each in own]
        chosen = _matches((name,), criteria.engine) and _matches(workloads, criteria.workload)
        if not chosen or not _matches(users, criteria.user) or (named is not None and not meant):
            continue
        others = [] if named is None else [_other(each, named[each.pid]) for each in meant]
        used = 0 if criteria.wake else sum(each.used_bytes for each in own)
        yield PlannedFlush(
            machine=machine,
            pid=own[0].pid if own else 0,
            start_ticks=own[0].start_ticks if own else None,
            workload=name,
            user=own[0].user if own else "",
            engine=name,
            likely_bytes=used,
            high_bytes=used,
            refusal=next(filter(None, others), "") or _engine_refusal(engine, bool(own), used, criteria),
        )
    for pid in sorted(rest):
        reason = "it belongs to no declared serving engine" if pid in processes else "the process has ended"
        yield PlannedFlush(machine=machine, pid=pid, refusal=reason)


def _engine_refusal(engine: Mapping[str, Any], has_processes: bool, used_bytes: int, criteria: Criteria) -> str:
    """Return the reason for which an engine is not flushed or woken, or an empty string. The daemon checks more."""
    if not engine["up"]:
        return f"it does not answer: {engine['problem']}"
    if criteria.wake:
        return "it does not sleep" if engine["asleep"] is False and not engine.get("paused") else ""
    if not engine["methods"]:
        return "its declaration does not allow it; add allow: [engine]"
    if engine["asleep"]:
        return "it is already asleep"
    active = (engine["running"] or 0) + (engine["waiting"] or 0)
    if active:
        return f"it has {active} running or waiting requests"
    if not has_processes:
        return str(engine["processes_problem"]) or "no process of its server is on a device"
    return _too_few(used_bytes, criteria)


def _processes(frame: Mapping[str, Any]) -> Iterator[_Process]:
    """Yield each process that uses a device or has an agent, once."""
    snapshot = frame["snapshot"]
    uptime = snapshot["uptime_seconds"]
    boot = None if uptime is None else float(snapshot["taken_at"]) - float(uptime)
    reports: dict[Key, Any] = {(report["pid"], report["start_ticks"]): report for report in snapshot["reports"]}
    users: dict[Key, str] = {}
    used: dict[Key, int] = {}
    uuids: dict[Key, set[str]] = {key: set() for key in reports}
    for each in frame["processes"]:
        key = (int(each["pid"]), each["start_ticks"])
        uuids.setdefault(key, set()).add(str(each["device_uuid"]))
        users[key] = users.get(key) or str(each["user"] or ("" if each["uid"] is None else each["uid"]))
        used[key] = used.get(key, 0) + (each["used_bytes"] or 0)
    for key, report in reports.items():
        uuids[key] |= {str(pool["device_uuid"]) for pool in report["pools"]}
        users[key] = users.get(key) or str(report["uid"])
    for key, own in uuids.items():
        pid, start_ticks = key
        yield _Process(
            pid=pid,
            start_ticks=start_ticks,
            started_at=None if start_ticks is None or boot is None else boot + start_ticks / TICKS_PER_SECOND,
            user=users[key],
            uuids=frozenset(own),
            used_bytes=used.get(key, 0),
            report=reports.get(key),
        )


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
    flushes = _Flushes(planned, waves(due, arguments.max_parallel), missing, criteria)
    if not arguments.json:
        print(flushes.plan_text(), flush=True)
    if due and not arguments.dry_run:
        if not arguments.yes and not _confirmed(criteria):
            print("gpumond: nothing was flushed; pass --yes to skip the confirmation", file=sys.stderr)
            return WRONG_USE
        with progress(len(due), "requests answered") as done:
            flushes.results = await carry_out(client, flushes.order, options, done)
        if not arguments.json:
            print(f"\n{receipt_table(flushes.results)}")
    if arguments.json:
        print(json.dumps(flushes.document(), indent=2))
    return flushes.exit_code(arguments.dry_run)


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


@dataclass(slots=True)
class _Flushes:
    """What is planned, in which order, and the results so far."""

    planned: Sequence[PlannedFlush]
    order: Sequence[Sequence[PlannedFlush]]
    missing: Sequence[Missing]
    criteria: Criteria
    results: Sequence[ProcessResult] = ()

    def plan_text(self) -> str:
        noun = "engine" if self.criteria.engines else "program"
        nothing = f"no {noun} would be {'woken' if self.criteria.wake else 'flushed'}"
        missing = "\n".join(safe(f"missing {each.machine}: {each.problem}") for each in self.missing)
        table = plan_table(self.planned, self.order) if self.planned else ""
        return "\n\n".join(filter(None, (table, missing, self._total(noun) if self.order else nothing)))

    def _total(self, noun: str) -> str:
        due = [each for wave in self.order for each in wave]
        low, likely, high = (sum(getattr(each, f"{name}_bytes") for each in due) for name in ("low", "likely", "high"))
        between = "" if low == high else f", between {size(low)} and {size(high)}"
        machines = counted(len({each.machine.url for each in due}), "machine")
        what = f"{counted(len(due), noun)} on {machines} in {counted(len(self.order), 'wave')}"
        if self.criteria.wake:
            return f"{what} would be woken"
        return f"a flush of {what} would release {size(likely)}{between}"

    def document(self) -> dict[str, Any]:
        numbers = {id(each): number for number, wave in enumerate(self.order, start=1) for each in wave}
        sizes = ("low_bytes", "likely_bytes", "high_bytes", "refusal")
        result = ("wave", "result", "reason", "receipts", "released_bytes")
        return {
            "plan": [_fields(each, *SUBJECT, *sizes) | {"wave": numbers.get(id(each))} for each in self.planned],
            "missing": [each._asdict() for each in self.missing],
            "results": [
                _fields(each.planned, *SUBJECT) | {name: getattr(each, name) for name in result}
                for each in self.results
            ],
            "released_bytes": sum(each.released_bytes for each in self.results),
        }

    def exit_code(self, dry_run: bool) -> int:
        """Return FAILED after a failure, NOTHING_TO_DO if nothing was, or would be, released or woken."""
        if self.missing or any(each.result in ("failed", "skipped") for each in self.results):
            return FAILED
        woken = any(receipt["outcome"] == "woken" for each in self.results for receipt in each.receipts)
        effective = woken or any(each.released_bytes for each in self.results)
        if dry_run:
            effective = any(self.criteria.wake or each.high_bytes for each in self.planned if not each.refusal)
        return DONE if effective else NOTHING_TO_DO


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


SUBJECT = ("pid", "start_ticks", "workload", "user", "engine")


def _fields(planned: PlannedFlush, *names: str) -> dict[str, Any]:
    return {"machine": planned.machine.name} | {name: getattr(planned, name) for name in names}
