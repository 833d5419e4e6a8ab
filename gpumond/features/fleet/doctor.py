"""``gpumond fleet doctor``: print the problems of several machines, each once, with its remedy: machines that do not
answer, faults, conditions, and differences of versions, configurations and rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, print_result
from gpumond.facts.errors import DaemonError
from gpumond.facts.units import plural
from gpumond.features.fleet.connection import Client, Machine
from gpumond.features.fleet.discovery import read_frames, select_machines
from gpumond.features.fleet.status import Build, MachineStatus, differences, most_frequent, read_builds, status_of_frame
from gpumond.view.frame import frame_of
from gpumond.view.text import printable

NO_RESPONSE = "check that gpumond runs there (systemctl status gpumond), and its address, certificate and token"
NO_AGENT = "start them with `gpumond run`, or set GPUMOND_AGENT=1 in their environment; only then can they be flushed"
DIFFERENCES = {
    "version": ("another version of gpumond", "install the same version of gpumond on all machines"),
    "config": ("another configuration", "compare the configuration files; `systemctl reload gpumond` loads a new one"),
    "rules": ("other rules", "compare `gpumond rules list`, which also shows rules created through the API"),
}
"""Subject and remedy of each aspect of `drift.Build`."""


@dataclass(frozen=True, slots=True)
class FleetFinding:
    """``state``: ``bad`` for a problem, ``note`` for a limit. ``subject`` is the same on all machines that have it."""

    machine: str
    state: Literal["bad", "note"]
    subject: str
    detail: str
    remedy: str


async def examine(client: Client, machines: Sequence[Machine], parallel: int) -> list[FleetFinding]:
    """Return the findings on all machines, in their order."""

    def convert(machine: Machine, answer: object) -> list[FleetFinding]:
        frame = frame_of(answer)
        return [*_of_status(status_of_frame(machine, answer)), *_of_frame(machine, frame)]

    findings: list[FleetFinding] = []
    answering: list[Machine] = []
    for machine, answer in zip(machines, await read_frames(client, machines, convert, parallel), strict=True):
        if isinstance(answer, DaemonError):
            findings.append(FleetFinding(machine.name, "bad", str(answer), machine.url, NO_RESPONSE))
        else:
            answering.append(machine)
            findings += answer
    builds = await read_builds(client, answering, parallel)
    return [*findings, *_of_builds({machine.name: each for machine, each in zip(answering, builds, strict=True)})]


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


def _of_builds(builds: Mapping[str, Build | DaemonError]) -> Iterator[FleetFinding]:
    """Yield the machines whose version, configuration or rules are not the most frequent ones."""
    known = {name: each for name, each in builds.items() if isinstance(each, Build)}
    most = most_frequent(known.values())
    for aspect, (subject, remedy) in DIFFERENCES.items():
        for name, build in known.items():
            if aspect in differences(build, most):
                detail = f"{getattr(build, aspect) or 'unknown'}; most machines have {most[aspect]}"
                yield FleetFinding(name, "note", subject, detail, remedy)


MARKS = {"note": "note", "bad": "FAIL"}
NAMES_SHOWN = 5


async def run(arguments: argparse.Namespace) -> int:
    client, machines = await select_machines(arguments)
    findings = await examine(client, machines, arguments.parallel)
    nothing = f"no problem found on {plural(len(machines), 'machine')}"
    print_result(arguments, [asdict(finding) for finding in findings], lambda: "\n".join(_lines(findings)) or nothing)
    if any(finding.state == "bad" for finding in findings):
        return FAILED
    return DONE if machines else NOTHING_TO_DO


def _lines(findings: Sequence[FleetFinding]) -> Iterator[str]:
    for finding, names in by_subject(findings):
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        detail = f" ({finding.detail})" if len(names) == 1 and finding.detail else ""
        yield printable(f"{MARKS[finding.state]}  {finding.subject}: {', '.join(names[:NAMES_SHOWN])}{more}{detail}")
        yield printable(f"      -> {finding.remedy}")
