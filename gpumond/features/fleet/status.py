"""State of each machine, from its frame. `of_frame` does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumond.facts.errors import DaemonError
from gpumond.features.fleet.connection import Client, run_each
from gpumond.features.fleet.machines import Machine
from gpumond.view.frame import frame_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """One machine. ``problem`` is the reason why its daemon does not answer; the rest is then None or empty.

    ``programs`` use a device, ``agents`` of them have an agent. ``returnable_bytes``: cached bytes of programs that
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
    returnable_bytes: int | None = None
    programs: int | None = None
    agents: int | None = None
    faults: Mapping[str, int] | None = None
    alerts: Mapping[str, int] | None = None


async def statuses(
    client: Client, machines: Sequence[Machine], parallel: int, done: Callable[[], None]
) -> list[MachineStatus]:
    """Return the state of each machine, in their order."""

    async def one(machine: Machine) -> MachineStatus:
        try:
            return of_frame(machine, await client.frame(machine))
        except DaemonError as error:
            return MachineStatus(machine=machine.name, url=machine.url, problem=str(error))

    return await run_each(machines, one, parallel, done)


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
        returnable_bytes=sum(cached),
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
