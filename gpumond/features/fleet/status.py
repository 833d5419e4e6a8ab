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

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, add_option, print_result
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.frame import FaultWithRemedy
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

STATUS_ROUTE = "/api/v1/status"
NOT_LOADED = "not_loaded"
"""Kind of the fault of a configuration that could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DaemonStatus:
    """What is read of a daemon's status; None: an earlier version did not state it."""

    version: str
    revision: str | None
    config_hash: str | None
    rules_hash: str | None
    faults: tuple[FaultWithRemedy, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a daemon runs: its version with the commit, the hashes of its settings and rules, and where its
    configuration file is invalid, if it could not be loaded. None: unknown.
    """

    version: str
    config: str | None
    rules: str | None
    not_loaded: str = ""


COMPARED_FIELDS = {"version": "VERSION", "config": "CONFIGURATION", "rules": "RULES"}
"""Attributes of `Deployment` that are compared, each with its column."""


def version_with_commit(version: str, revision: object) -> str:
    """Return the version with the beginning of the commit, if the daemon knows it."""
    if not isinstance(revision, str) or not revision:
        return version
    commit, *modified = revision.split("-", 1)
    return f"{version}+{'-'.join([commit[:9], *modified])}"


def deployment_of(answer: object) -> Deployment:
    """Return what a daemon runs, from its status. Raises DaemonError."""
    status = checked_as(_DaemonStatus, answer, "status")
    failed = (each["detail"] or "unknown place" for each in status["faults"] if each["kind"] == NOT_LOADED)
    return Deployment(
        version=version_with_commit(status["version"], status["revision"]),
        config=status["config_hash"],
        rules=status["rules_hash"],
        not_loaded=next(failed, ""),
    )


async def read_deployments(
    client: Client, machines: Sequence[Machine], concurrency: int
) -> list[Deployment | DaemonError]:
    """Return what each machine's daemon runs, or why it is unknown."""

    async def read(machine: Machine) -> Deployment:
        return deployment_of(await client.get(machine, STATUS_ROUTE))

    return await read_each(machines, read, concurrency)


def majority_of(deployments: Iterable[Deployment]) -> Mapping[str, str | None]:
    """Return the most frequent value of each field; None without a known one."""
    all_deployments = [*deployments]
    majority: dict[str, str | None] = {}
    for name in COMPARED_FIELDS:
        counts = Counter(value for value in (getattr(each, name) for each in all_deployments) if value is not None)
        majority[name] = counts.most_common(1)[0][0] if counts else None
    return majority


def differing_fields(deployment: Deployment, majority: Mapping[str, str | None]) -> list[str]:
    """Return the fields in which a daemon differs from most."""
    return [name for name in COMPARED_FIELDS if getattr(deployment, name) != majority[name]]


async def _print_drift(arguments: argparse.Namespace, client: Client, machines: Sequence[Machine]) -> int:
    """Print the machines that differ. Return FAILED if one does, or does not answer."""
    answers = await read_deployments(client, machines, arguments.parallel)
    pairs = zip(machines, answers, strict=True)
    deployments = {machine: answer for machine, answer in pairs if isinstance(answer, Deployment)}
    unread = unread_machines(machines, answers)
    majority = majority_of(deployments.values())
    differing = {
        machine: deployment
        for machine, deployment in deployments.items()
        if deployment.not_loaded or differing_fields(deployment, majority)
    }
    document = {
        "most": majority,
        "differing": [
            {"machine": machine.name, **asdict(deployment), "differences": differing_fields(deployment, majority)}
            for machine, deployment in differing.items()
        ],
        "missing": [each._asdict() for each in unread],
    }
    print_result(
        arguments, document, lambda: "\n\n".join(filter(None, _drift_texts(deployments, differing, unread, majority)))
    )
    if not machines:
        return NOTHING_TO_DO
    return FAILED if unread or differing else DONE


def _drift_texts(
    deployments: Mapping[Machine, Deployment],
    differing: Mapping[Machine, Deployment],
    unread: Sequence[UnreadMachine],
    majority: Mapping[str, str | None],
) -> Iterator[str]:
    header = ("MACHINE", *COMPARED_FIELDS.values(), "FAILED RELOAD")
    rows = [("most machines", *(majority[name] or "unknown" for name in COMPARED_FIELDS), "")]
    for machine, deployment in differing.items():
        values = (
            (getattr(deployment, name) or "unknown") if name in differing_fields(deployment, majority) else "same"
            for name in COMPARED_FIELDS
        )
        rows.append((machine.name, *values, deployment.not_loaded))
    yield table(header, rows) if deployments else ""
    yield "\n".join(map(str, unread))
    verb = "differs" if len(differing) == 1 else "differ"
    yield (
        f"{len(differing)} of {plural(len(deployments), 'reachable machine')} {verb}"
        if differing
        else (
            f"{plural(len(deployments), 'machine')} with the same version, configuration and rules"
            if deployments
            else ""
        )
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


SORT_KEYS: Mapping[str, Callable[[MachineStatus], Any]] = {
    "name": lambda status: status.machine,
    "version": lambda status: status.version or "",
    "gpus": lambda status: -(status.devices or 0),
    "size": lambda status: -(status.size_bytes or 0),
    "used": lambda status: -(status.used_bytes or 0),
    "free": lambda status: (status.used_bytes or 0) - (status.size_bytes or 0),
    "reclaimable": lambda status: -(status.reclaimable_bytes or 0),
    "programs": lambda status: -(status.programs or 0),
    "faults": lambda status: -sum((status.faults or {}).values()),
    "alerts": lambda status: -sum((status.alerts or {}).values()),
}
"""Orders of the machines, each with its key; numbers in descending order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--problems", "show only machines with a fault, a firing alert or a GPU that isn't up")
    add_option(
        parser,
        "--sort COLUMN",
        f"order of the machines: {', '.join(SORT_KEYS)} (default: as listed)",
        choices=tuple(SORT_KEYS),
    )
    add_option(parser, "--limit N", "show at most N machines (default: all)", type=int)
    add_option(parser, "--drift", "show the machines whose version, configuration or rules differ from the majority")


async def run(arguments: argparse.Namespace) -> int:
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError("--limit must be above 0")
    if arguments.drift and (arguments.problems or arguments.sort or arguments.limit):
        raise ConfigError("--drift can't be combined with --problems, --sort or --limit")
    client, machines = await select_machines(arguments)
    if arguments.drift:
        return await _print_drift(arguments, client, machines)
    answers = await read_frames(client, machines, status_of_frame, arguments.parallel)
    statuses = [
        MachineStatus(machine=machine.name, url=machine.url, problem=str(answer))
        if isinstance(answer, DaemonError)
        else answer
        for machine, answer in zip(machines, answers, strict=True)
    ]
    shown = shown_machines(statuses, arguments.problems, arguments.sort, arguments.limit)
    hidden = len(statuses) - len(shown)
    unread = "\n".join(map(str, unread_machines(machines, answers)))
    parts = (status_table(shown), f"{plural(hidden, 'machine')} not shown" if hidden else "", unread, summary(statuses))
    print_result(arguments, [asdict(status) for status in shown], lambda: "\n\n".join(filter(None, parts)))
    if not statuses:
        return NOTHING_TO_DO
    return FAILED if any(status.problem for status in statuses) else DONE


def shown_machines(
    statuses: Sequence[MachineStatus], problems: bool = False, sort: str | None = None, limit: int | None = None
) -> list[MachineStatus]:
    """Return the machines that are shown: at most ``limit`` of those that answer, and all others."""
    answering = [status for status in statuses if not status.problem and (not problems or has_problem(status))]
    if sort is None:
        shown = {(status.machine, status.url) for status in answering[:limit]}
        return [status for status in statuses if status.problem or (status.machine, status.url) in shown]
    return [*sorted(answering, key=SORT_KEYS[sort])[:limit], *(status for status in statuses if status.problem)]


def has_problem(status: MachineStatus) -> bool:
    return bool(status.problem or status.faults or status.alerts or status.devices != status.devices_up)


def status_of_frame(machine: Machine, answer: object) -> MachineStatus:
    """Return the state that a frame describes. Raises DaemonError if it is not a frame."""
    frame = frame_of(answer)
    snapshot, devices = frame["snapshot"], frame["snapshot"]["devices"]
    source = snapshot["source"]
    reports = {(report["pid"], report["start_ticks"]): report for report in snapshot["reports"]}
    processes = [each for each in frame["processes"] if "holder" not in each["kinds"]]
    programs = {(each["pid"], each["start_ticks"]) for each in processes}
    refusing_flushes = {key for key, report in reports.items() if report["flush_policy"] == "never"}
    cached_bytes = (
        each["cached_bytes"] or 0 for each in processes if (each["pid"], each["start_ticks"]) not in refusing_flushes
    )
    uuids = {device["uuid"] for device in devices}
    whole_devices = [device for device in devices if device["parent_uuid"] not in uuids]
    faults = Counter(str(fault["kind"]) for fault in frame["faults"])
    if not source["up"] and source["reason"]:
        faults.setdefault(str(source["reason"]), 1)
    return MachineStatus(
        machine=machine.name,
        url=machine.url,
        version=version_with_commit(str(frame["version"]), frame.get("revision")),
        driver_version=source["driver_version"],
        devices=len(devices),
        devices_up=sum(bool(device["up"]) for device in devices),
        size_bytes=_sum_known(device["size_bytes"] for device in whole_devices),
        used_bytes=_sum_known(device["used_bytes"] for device in whole_devices),
        reclaimable_bytes=sum(cached_bytes),
        programs=len(programs),
        agents=len(programs & reports.keys()),
        faults=dict(faults),
        alerts=dict(Counter(str(alert["rule"]) for alert in frame["alerts"] if alert["phase"] == "firing")),
    )


def _sum_known(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of the known sizes; None if none is known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def status_table(statuses: Sequence[MachineStatus]) -> str:
    """Return a table of the machines that answer; empty without one."""
    header = ("MACHINE", "VERSION", "DRIVER", ">GPUS", ">SIZE", ">USED", ">RECLAIMABLE", ">AGENTS", "FAULTS", "ALERTS")
    rows = [[*_status_row(status)] for status in statuses if not status.problem]
    return table(header, rows) if rows else ""


def summary(statuses: Sequence[MachineStatus]) -> str:
    """Return totals: the machines that answer, their devices and memory, programs with an agent, alerts, versions."""
    answering = [status for status in statuses if not status.problem]
    if not statuses:
        return "no machine is listed, or none matches --machine and --label"
    programs, agents = (sum(getattr(status, name) or 0 for status in answering) for name in ("programs", "agents"))
    versions = Counter(status.version for status in answering).most_common()
    parts = [f"{len(answering)} of {plural(len(statuses), 'machine')} reachable"]
    if answering:
        up, devices = (sum(getattr(status, name) or 0 for status in answering) for name in ("devices_up", "devices"))
        used, capacity, reclaimable = (
            _sum_known(getattr(status, f"{name}_bytes") for status in answering)
            for name in ("used", "size", "reclaimable")
        )
        parts.append(f"{up} of {plural(devices, 'GPU')} up, {size_or_dash(used)} of {size_or_dash(capacity)} used")
        parts.append(f"{size_or_dash(reclaimable)} reclaimable")
    if programs:
        parts.append(f"{agents} of {plural(programs, 'program')} {'has' if programs == 1 else 'have'} an agent")
    if alerts := Counter(name for status in answering for name in (status.alerts or {})):
        parts.append("machines with alerts: " + ", ".join(f"{name} ({count})" for name, count in alerts.most_common()))
    if len(versions) > 1:
        parts.append("versions: " + ", ".join(f"{version} ({count})" for version, count in versions))
    return printable("; ".join(parts))


def _status_row(status: MachineStatus) -> Iterator[str]:
    up = "" if status.devices == status.devices_up else f"{status.devices_up} of "
    yield from (status.machine, status.version or "-", status.driver_version or "-", f"{up}{status.devices}")
    yield from (
        size_or_dash(status.size_bytes),
        size_or_dash(status.used_bytes),
        size_or_dash(status.reclaimable_bytes),
    )
    yield f"{status.agents} of {status.programs}"
    yield from (_counts_text(status.faults), _counts_text(status.alerts))


def _counts_text(counts: Mapping[str, int] | None) -> str:
    texts = (name if count == 1 else f"{name} ({count})" for name, count in (counts or {}).items())
    return ", ".join(texts) or "-"
