"""Problems of several machines, each with its remedy: machines that do not answer, faults, conditions and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpumond.facts.errors import DaemonError
from gpumond.features.fleet.connection import Client, run_each
from gpumond.features.fleet.machines import Machine
from gpumond.features.fleet.status import MachineStatus, of_frame

NO_ANSWER = "check that gpumond runs there (systemctl status gpumond), and its address, certificate and token"
NO_AGENT = "start them with `gpumond run`, or set GPUMOND_AGENT=1 in their environment; only then can they be flushed"
ANOTHER_VERSION = "install the same version of gpumond on all machines"


@dataclass(frozen=True, slots=True)
class FleetFinding:
    """``state``: ``bad`` for a problem, ``note`` for a limit. ``subject`` is the same on all machines that have it."""

    machine: str
    state: Literal["bad", "note"]
    subject: str
    detail: str
    remedy: str


async def examine(
    client: Client, machines: Sequence[Machine], parallel: int, done: Callable[[], None] = lambda: None
) -> list[FleetFinding]:
    """Return the findings on all machines, in their order."""

    async def one(machine: Machine) -> tuple[MachineStatus | None, list[FleetFinding]]:
        try:
            frame = await client.frame(machine)
            state = of_frame(machine, frame)
            return state, [*_of_status(state), *_of_frame(machine, frame)]
        except DaemonError as error:
            return None, [FleetFinding(machine.name, "bad", str(error), machine.url, NO_ANSWER)]

    answers = await run_each(machines, one, parallel, done)
    found = [finding for _, own in answers for finding in own]
    return [*found, *_of_versions([state for state, _ in answers if state is not None])]


def by_subject(findings: Iterable[FleetFinding]) -> list[tuple[FleetFinding, list[str]]]:
    """Return one finding of each subject with the names of its machines; problems first, then the most frequent."""
    groups: dict[tuple[str, str, str], tuple[FleetFinding, list[str]]] = {}
    for each in findings:
        names = groups.setdefault((each.state, each.subject, each.remedy), (each, []))[1]
        if each.machine not in names[-1:]:
            names.append(each.machine)
    return sorted(groups.values(), key=lambda group: (group[0].state, -len(group[1])))


def _of_status(state: MachineStatus) -> Iterator[FleetFinding]:
    without = (state.programs or 0) - (state.agents or 0)
    if without:
        detail = f"{without} of {state.programs}"
        yield FleetFinding(state.machine, "note", "programs without an agent", detail, NO_AGENT)


def _of_frame(machine: Machine, frame: Mapping[str, Any]) -> Iterator[FleetFinding]:
    states: Mapping[str, Literal["bad", "note"]] = {"faults": "bad", "conditions": "note"}
    for name, state in states.items():
        for entry in frame[name]:
            about = ", ".join(str(text) for text in (entry["device_uuid"], entry["detail"]) if text)
            yield FleetFinding(machine.name, state, str(entry["kind"]), about, str(entry["remedy"]))


def _of_versions(states: Sequence[MachineStatus]) -> Iterator[FleetFinding]:
    """Yield the machines whose version is not the most frequent one."""
    usual = Counter(state.version for state in states).most_common(1)
    for state in states:
        if state.version != usual[0][0]:
            detail = f"{state.version}; most machines have {usual[0][0]}"
            yield FleetFinding(state.machine, "note", "another version of gpumond", detail, ANOTHER_VERSION)
