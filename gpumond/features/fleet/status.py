"""``gpumond fleet status``: show the state of each machine, from its frame."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO
from gpumond.facts.errors import DaemonError
from gpumond.facts.units import counted
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.discovery import progress, read_frames, selected
from gpumond.view.frame import frame_of
from gpumond.view.text import safe, size, table


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


async def run(arguments: argparse.Namespace) -> int:
    client, machines = await selected(arguments)
    with progress(len(machines), "machines read") as done:
        answers = await read_frames(client, machines, of_frame, arguments.parallel, done)
    states = [
        MachineStatus(machine=machine.name, url=machine.url, problem=str(answer))
        if isinstance(answer, DaemonError)
        else answer
        for machine, answer in zip(machines, answers, strict=True)
    ]
    if arguments.json:
        print(json.dumps([asdict(state) for state in states], indent=2))
    else:
        print("\n\n".join(filter(None, (status_table(states), missing(states), summary(states)))))
    if not states:
        return NOTHING_TO_DO
    return FAILED if any(state.problem for state in states) else DONE


def of_frame(machine: Machine, answer: object) -> MachineStatus:
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
        version=_version(str(frame["version"]), frame.get("revision")),
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


def _version(version: str, revision: object) -> str:
    """Return the version with the beginning of the commit, if the daemon knows it."""
    if not isinstance(revision, str) or not revision:
        return version
    commit, *modified = revision.split("-", 1)
    return f"{version}+{'-'.join([commit[:9], *modified])}"


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of the known sizes; None if none is known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def status_table(states: Sequence[MachineStatus]) -> str:
    """Return a table of the machines that answer; empty without one."""
    header = ("MACHINE", "VERSION", "DRIVER", ">GPUS", ">SIZE", ">USED", ">RECLAIMABLE", ">AGENTS", "FAULTS", "ALERTS")
    rows = [[*_row(state)] for state in states if not state.problem]
    return table(header, rows) if rows else ""


def missing(states: Sequence[MachineStatus]) -> str:
    """Return a line for each machine that does not answer, with the reason."""
    return "\n".join(safe(f"missing {each.machine} ({each.url}): {each.problem}") for each in states if each.problem)


def summary(states: Sequence[MachineStatus]) -> str:
    """Return totals: the machines that answer, the programs with an agent, and the versions."""
    known = [state for state in states if not state.problem]
    if not states:
        return "no machine is listed"
    programs, agents = (sum(getattr(state, name) or 0 for state in known) for name in ("programs", "agents"))
    versions = Counter(state.version for state in known).most_common()
    parts = [f"{len(known)} of {counted(len(states), 'machine')} answer"]
    if programs:
        parts.append(f"{agents} of {counted(programs, 'program')} have an agent")
    if len(versions) > 1:
        parts.append("versions " + ", ".join(f"{version} ({number})" for version, number in versions))
    return safe("; ".join(parts))


def _row(state: MachineStatus) -> Iterator[str]:
    up = "" if state.devices == state.devices_up else f"{state.devices_up} of "
    yield from (state.machine, state.version or "-", state.driver_version or "-", f"{up}{state.devices}")
    yield from (size(state.size_bytes), size(state.used_bytes), size(state.reclaimable_bytes))
    yield f"{state.agents} of {state.programs}"
    yield from (_counts(state.faults), _counts(state.alerts))


def _counts(names: Mapping[str, int] | None) -> str:
    numbered = (name if number == 1 else f"{name} ({number})" for name, number in (names or {}).items())
    return ", ".join(numbered) or "-"
