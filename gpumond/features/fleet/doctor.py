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
from gpumond.features.fleet.status import (
    Deployment,
    MachineStatus,
    differing_fields,
    majority_of,
    read_deployments,
    status_of_frame,
)
from gpumond.view.frame import frame_of
from gpumond.view.text import printable

NO_RESPONSE_REMEDY = "check that gpumond runs there (systemctl status gpumond), and its address, certificate and token"
NO_AGENT_REMEDY = (
    "start them with `gpumond run`, or set GPUMOND_AGENT=1 in their environment; only then can they be flushed"
)
DRIFT_FINDINGS = {
    "version": ("another version of gpumond", "install the same version of gpumond on all machines"),
    "config": ("another configuration", "compare the configuration files; `systemctl reload gpumond` loads a new one"),
    "rules": ("other rules", "compare `gpumond rules list`, which also shows rules created through the API"),
}
"""Subject and remedy of each field of `Deployment` that is compared."""


@dataclass(frozen=True, slots=True)
class FleetFinding:
    """``state``: ``bad`` for a problem, ``note`` for a limit. ``subject`` is the same on all machines that have it."""

    machine: str
    state: Literal["bad", "note"]
    subject: str
    detail: str
    remedy: str


async def examine(client: Client, machines: Sequence[Machine], concurrency: int) -> list[FleetFinding]:
    """Return the findings on all machines, in their order."""

    def convert(machine: Machine, answer: object) -> list[FleetFinding]:
        frame = frame_of(answer)
        return [*_agent_findings(status_of_frame(machine, answer)), *_frame_findings(machine, frame)]

    findings: list[FleetFinding] = []
    answering: list[Machine] = []
    for machine, answer in zip(machines, await read_frames(client, machines, convert, concurrency), strict=True):
        if isinstance(answer, DaemonError):
            findings.append(FleetFinding(machine.name, "bad", str(answer), machine.url, NO_RESPONSE_REMEDY))
        else:
            answering.append(machine)
            findings += answer
    deployments = await read_deployments(client, answering, concurrency)
    return [
        *findings,
        *_drift_findings({machine.name: each for machine, each in zip(answering, deployments, strict=True)}),
    ]


def findings_by_subject(findings: Iterable[FleetFinding]) -> list[tuple[FleetFinding, list[str]]]:
    """Return one finding of each subject with the names of its machines; problems first, then the most frequent."""
    groups: dict[tuple[str, str, str], tuple[FleetFinding, list[str]]] = {}
    for each in findings:
        names = groups.setdefault((each.state, each.subject, each.remedy), (each, []))[1]
        if each.machine not in names[-1:]:
            names.append(each.machine)
    return sorted(groups.values(), key=lambda group: (group[0].state, -len(group[1])))


def _agent_findings(status: MachineStatus) -> Iterator[FleetFinding]:
    without_agent = (status.programs or 0) - (status.agents or 0)
    if without_agent:
        detail = f"{without_agent} of {status.programs}"
        yield FleetFinding(status.machine, "note", "programs without an agent", detail, NO_AGENT_REMEDY)


def _frame_findings(machine: Machine, frame: Mapping[str, Any]) -> Iterator[FleetFinding]:
    states: Mapping[str, Literal["bad", "note"]] = {"faults": "bad", "conditions": "note"}
    for name, state in states.items():
        for entry in frame[name]:
            detail = ", ".join(str(text) for text in (entry["device_uuid"], entry["detail"]) if text)
            yield FleetFinding(machine.name, state, str(entry["kind"]), detail, str(entry["remedy"]))


def _drift_findings(deployments: Mapping[str, Deployment | DaemonError]) -> Iterator[FleetFinding]:
    """Yield the machines whose version, configuration or rules are not the most frequent ones."""
    answered = {name: each for name, each in deployments.items() if isinstance(each, Deployment)}
    majority = majority_of(answered.values())
    for field, (subject, remedy) in DRIFT_FINDINGS.items():
        for name, deployment in answered.items():
            if field in differing_fields(deployment, majority):
                detail = f"{getattr(deployment, field) or 'unknown'}; most machines have {majority[field]}"
                yield FleetFinding(name, "note", subject, detail, remedy)


MARKS = {"note": "note", "bad": "FAIL"}
MAX_LISTED_NAMES = 5


async def run(arguments: argparse.Namespace) -> int:
    client, machines = await select_machines(arguments)
    findings = await examine(client, machines, arguments.parallel)
    no_problem = f"no problem found on {plural(len(machines), 'machine')}"
    print_result(
        arguments, [asdict(finding) for finding in findings], lambda: "\n".join(_lines(findings)) or no_problem
    )
    if any(finding.state == "bad" for finding in findings):
        return FAILED
    return DONE if machines else NOTHING_TO_DO


def _lines(findings: Sequence[FleetFinding]) -> Iterator[str]:
    for finding, names in findings_by_subject(findings):
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        detail = f" ({finding.detail})" if len(names) == 1 and finding.detail else ""
        yield printable(
            f"{MARKS[finding.state]}  {finding.subject}: {', '.join(names[:MAX_LISTED_NAMES])}{more}{detail}"
        )
        yield printable(f"      -> {finding.remedy}")
