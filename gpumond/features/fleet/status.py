"""``gpumond fleet status``: show the state of each machine, from its frame.

``--drift`` shows the machines whose version, configuration or rules differ from those of most machines, and those that
could not load their configuration.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, option, print_result
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.frame import StatedFault
from gpumond.facts.units import plural
from gpumond.features.fleet.connection import Client, Machine
from gpumond.features.fleet.discovery import (
    UnreadMachine,
    read_each,
    read_frames,
    select_machines,
    unread_machines,
)
from gpumond.view.frame import checked_as, frame_of
from gpumond.view.text import printable, size_or_dash, table

STATUS = "/api/v1/status"
NOT_LOADED = "not_loaded"
"""Kind of the fault of a configuration that could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """What is read of a daemon's status; None: an earlier version did not state it."""

    version: str
    revision: str | None
    config_hash: str | None
    rules_hash: str | None
    faults: tuple[StatedFault, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """What a daemon runs: its version with the commit, the hashes of its settings and rules, and where its
    configuration file is invalid, if it could not be loaded. None: unknown.
    """

    version: str
    config: str | None
    rules: str | None
    not_loaded: str = ""


ASPECTS = {"version": "VERSION", "config": "CONFIGURATION", "rules": "RULES"}
"""Attributes of `Build` that are compared, each with its column."""


def version_of(version: str, revision: object) -> str:
    """Return the version with the beginning of the commit, if the daemon knows it."""
    if not isinstance(revision, str) or not revision:
        return version
    commit, *modified = revision.split("-", 1)
    return f"{version}+{'-'.join([commit[:9], *modified])}"


def build_of(answer: object) -> Build:
    """Return what a daemon runs, from its status. Raises DaemonError."""
    status = checked_as(_Status, answer, "status")
    failed = (each["detail"] or "unknown place" for each in status["faults"] if each["kind"] == NOT_LOADED)
    return Build(
        version=version_of(status["version"], status["revision"]),
        config=status["config_hash"],
        rules=status["rules_hash"],
        not_loaded=next(failed, ""),
    )


async def read_builds(client: Client, machines: Sequence[Machine], parallel: int) -> list[Build | DaemonError]:
    """Return what each machine's daemon runs, or why it is unknown."""

    async def read(machine: Machine) -> Build:
        return build_of(await client.get(machine, STATUS))

    return await read_each(machines, read, parallel)


def most_frequent(builds: Iterable[Build]) -> Mapping[str, str | None]:
    """Return the most frequent value of each aspect; None without a known one."""
    known = [*builds]
    found: dict[str, str | None] = {}
    for name in ASPECTS:
        counts = Counter(value for value in (getattr(each, name) for each in known) if value is not None)
        found[name] = counts.most_common(1)[0][0] if counts else None
    return found


def differences(build: Build, most: Mapping[str, str | None]) -> list[str]:
    """Return the aspects in which a daemon differs from most."""
    return [name for name in ASPECTS if getattr(build, name) != most[name]]


async def show_differences(arguments: argparse.Namespace, client: Client, machines: Sequence[Machine]) -> int:
    """Print the machines that differ. Return FAILED if one does, or does not answer."""
    answers = await read_builds(client, machines, arguments.parallel)
    read = [*zip(machines, answers, strict=True)]
    builds = {machine: each for machine, each in read if isinstance(each, Build)}
    silent = unread_machines(machines, answers)
    most = most_frequent(builds.values())
    differing = {machine: own for machine, own in builds.items() if own.not_loaded or differences(own, most)}
    document = {
        "most": most,
        "differing": [
            {"machine": machine.name, **asdict(own), "differences": differences(own, most)}
            for machine, own in differing.items()
        ],
        "missing": [each._asdict() for each in silent],
    }
    print_result(arguments, document, lambda: "\n\n".join(filter(None, _texts(builds, differing, silent, most))))
    if not machines:
        return NOTHING_TO_DO
    return FAILED if silent or differing else DONE


def _texts(
    builds: Mapping[Machine, Build],
    differing: Mapping[Machine, Build],
    silent: Sequence[UnreadMachine],
    most: Mapping[str, str | None],
) -> Iterator[str]:
    header = ("MACHINE", *ASPECTS.values(), "FAILED RELOAD")
    rows = [("most machines", *(most[name] or "unknown" for name in ASPECTS), "")]
    for machine, own in differing.items():
        values = ((getattr(own, name) or "unknown") if name in differences(own, most) else "same" for name in ASPECTS)
        rows.append((machine.name, *values, own.not_loaded))
    yield table(header, rows) if builds else ""
    yield "\n".join(map(str, silent))
    yield (
        f"{len(differing)} of {plural(len(builds), 'reachable machine')} differ"
        if differing
        else (f"{plural(len(builds), 'machine')} with the same version, configuration and rules" if builds else "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """One machine. ``problem`` is the reason why its daemon does not answer; the rest is then None or empty.

    ``programs`` use a device, ``agents`` of them have an agent. ``reclaimable_bytes``: cached bytes of programs that
    allow a flush. ``faults``: kinds of faults, ``alerts``: names of rules that fire, each with its number.
    """

    machine: str
    url: str
    problem: str = ""
    version: str | None = None
    driver_version: str | None = None
    devices: int | None = None
    devices_up: int | None = None
    size_bytes: int | None = None
    used_bytes: int | None = None
    reclaimable_bytes: int | None = None
    programs: int | None = None
    agents: int | None = None
    faults: Mapping[str, int] | None = None
    alerts: Mapping[str, int] | None = None


KEYS: Mapping[str, Callable[[MachineStatus], Any]] = {
    "name": lambda state: state.machine,
    "version": lambda state: state.version or "",
    "gpus": lambda state: -(state.devices or 0),
    "size": lambda state: -(state.size_bytes or 0),
    "used": lambda state: -(state.used_bytes or 0),
    "free": lambda state: (state.used_bytes or 0) - (state.size_bytes or 0),
    "reclaimable": lambda state: -(state.reclaimable_bytes or 0),
    "programs": lambda state: -(state.programs or 0),
    "faults": lambda state: -sum((state.faults or {}).values()),
    "alerts": lambda state: -sum((state.alerts or {}).values()),
}
"""Orders of the machines, each with its key; numbers in descending order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--problems", "show only machines with a fault, a firing alert or a GPU that isn't up")
    option(
        parser,
        "--sort COLUMN",
        f"order of the machines: {', '.join(KEYS)} (default: as listed)",
        choices=tuple(KEYS),
    )
    option(parser, "--limit N", "show at most N machines (default: all)", type=int)
    option(parser, "--drift", "show the machines whose version, configuration or rules differ from the majority")


async def run(arguments: argparse.Namespace) -> int:
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError("--limit must be above 0")
    if arguments.drift and (arguments.problems or arguments.sort or arguments.limit):
        raise ConfigError("--drift can't be combined with --problems, --sort or --limit")
    client, machines = await select_machines(arguments)
    if arguments.drift:
        return await show_differences(arguments, client, machines)
    answers = await read_frames(client, machines, status_of_frame, arguments.parallel)
    states = [
        MachineStatus(machine=machine.name, url=machine.url, problem=str(answer))
        if isinstance(answer, DaemonError)
        else answer
        for machine, answer in zip(machines, answers, strict=True)
    ]
    shown = shown_machines(states, arguments.problems, arguments.sort, arguments.limit)
    hidden = len(states) - len(shown)
    silent = "\n".join(map(str, unread_machines(machines, answers)))
    parts = (status_table(shown), f"{plural(hidden, 'machine')} not shown" if hidden else "", silent, summary(states))
    print_result(arguments, [asdict(state) for state in shown], lambda: "\n\n".join(filter(None, parts)))
    if not states:
        return NOTHING_TO_DO
    return FAILED if any(state.problem for state in states) else DONE


def shown_machines(
    states: Sequence[MachineStatus], problems: bool = False, sort: str | None = None, limit: int | None = None
) -> list[MachineStatus]:
    """Return the machines that are shown: at most ``limit`` of those that answer, and all others."""
    answering = [state for state in states if not state.problem and (not problems or has_problem(state))]
    if sort is None:
        kept = {(state.machine, state.url) for state in answering[:limit]}
        return [state for state in states if state.problem or (state.machine, state.url) in kept]
    return [*sorted(answering, key=KEYS[sort])[:limit], *(state for state in states if state.problem)]


def has_problem(state: MachineStatus) -> bool:
    return bool(state.problem or state.faults or state.alerts or state.devices != state.devices_up)


def status_of_frame(machine: Machine, answer: object) -> MachineStatus:
    """Return the state that a frame describes. Raises DaemonError if it is not a frame."""
    frame = frame_of(answer)
    snapshot, devices = frame["snapshot"], frame["snapshot"]["devices"]
    source = snapshot["source"]
    reports = {(report["pid"], report["start_ticks"]): report for report in snapshot["reports"]}
    using = [each for each in frame["processes"] if "holder" not in each["kinds"]]
    programs = {(each["pid"], each["start_ticks"]) for each in using}
    refusing = {key for key, report in reports.items() if report["flush_policy"] == "never"}
    cached = (each["cached_bytes"] or 0 for each in using if (each["pid"], each["start_ticks"]) not in refusing)
    uuids = {device["uuid"] for device in devices}
    whole = [device for device in devices if device["parent_uuid"] not in uuids]
    faults = Counter(str(fault["kind"]) for fault in frame["faults"])
    if not source["up"] and source["reason"]:
        faults.setdefault(str(source["reason"]), 1)
    return MachineStatus(
        machine=machine.name,
        url=machine.url,
        version=version_of(str(frame["version"]), frame.get("revision")),
        driver_version=source["driver_version"],
        devices=len(devices),
        devices_up=sum(bool(device["up"]) for device in devices),
        size_bytes=_sum(device["size_bytes"] for device in whole),
        used_bytes=_sum(device["used_bytes"] for device in whole),
        reclaimable_bytes=sum(cached),
        programs=len(programs),
        agents=len(programs & reports.keys()),
        faults=dict(faults),
        alerts=dict(Counter(str(alert["rule"]) for alert in frame["alerts"] if alert["phase"] == "firing")),
    )


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of the known sizes; None if none is known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def status_table(states: Sequence[MachineStatus]) -> str:
    """Return a table of the machines that answer; empty without one."""
    header = ("MACHINE", "VERSION", "DRIVER", ">GPUS", ">SIZE", ">USED", ">RECLAIMABLE", ">AGENTS", "FAULTS", "ALERTS")
    rows = [[*_row(state)] for state in states if not state.problem]
    return table(header, rows) if rows else ""


def summary(states: Sequence[MachineStatus]) -> str:
    """Return totals: the machines that answer, their devices and memory, programs with an agent, alerts, versions."""
    known = [state for state in states if not state.problem]
    if not states:
        return "no machine is listed, or none matches --machine and --label"
    programs, agents = (sum(getattr(state, name) or 0 for state in known) for name in ("programs", "agents"))
    versions = Counter(state.version for state in known).most_common()
    parts = [f"{len(known)} of {plural(len(states), 'machine')} reachable"]
    if known:
        up, devices = (sum(getattr(state, name) or 0 for state in known) for name in ("devices_up", "devices"))
        used, whole, reclaimable = (
            _sum(getattr(state, f"{name}_bytes") for state in known) for name in ("used", "size", "reclaimable")
        )
        parts.append(f"{up} of {plural(devices, 'GPU')} up, {size_or_dash(used)} of {size_or_dash(whole)} used")
        parts.append(f"{size_or_dash(reclaimable)} reclaimable")
    if programs:
        parts.append(f"{agents} of {plural(programs, 'program')} {'has' if programs == 1 else 'have'} an agent")
    if alerts := Counter(name for state in known for name in (state.alerts or {})):
        parts.append("machines with alerts: " + ", ".join(f"{name} ({count})" for name, count in alerts.most_common()))
    if len(versions) > 1:
        parts.append("versions " + ", ".join(f"{version} ({number})" for version, number in versions))
    return printable("; ".join(parts))


def _row(state: MachineStatus) -> Iterator[str]:
    up = "" if state.devices == state.devices_up else f"{state.devices_up} of "
    yield from (state.machine, state.version or "-", state.driver_version or "-", f"{up}{state.devices}")
    yield from (size_or_dash(state.size_bytes), size_or_dash(state.used_bytes), size_or_dash(state.reclaimable_bytes))
    yield f"{state.agents} of {state.programs}"
    yield from (_counts(state.faults), _counts(state.alerts))


def _counts(names: Mapping[str, int] | None) -> str:
    numbered = (name if number == 1 else f"{name} ({number})" for name, number in (names or {}).items())
    return ", ".join(numbered) or "-"
