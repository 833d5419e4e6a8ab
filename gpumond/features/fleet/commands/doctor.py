"""``gpumond fleet doctor``: print the problems of several machines, each once, with its remedy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from gpumond.cli.exits import DONE, FAILED, NOTHING_TO_DO
from gpumond.facts.units import counted
from gpumond.features.fleet.commands.machines import chosen, listed, make_client, make_prometheus, progress
from gpumond.features.fleet.doctor import FleetFinding, by_subject, examine
from gpumond.view.text import safe

MARKS = {"note": "note", "bad": "BAD "}
NAMES_SHOWN = 5


async def run(arguments: argparse.Namespace) -> int:
    client = make_client(arguments)
    machines = await listed(arguments, client, make_prometheus(arguments))
    found = chosen(arguments, machines.all)
    with progress(len(found), "machines read") as done:
        findings = await examine(client, found, arguments.parallel, done)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_lines(findings)) or f"no problem found on {counted(len(found), 'machine')}")
    if any(finding.state == "bad" for finding in findings):
        return FAILED
    return DONE if found else NOTHING_TO_DO


def _lines(findings: Sequence[FleetFinding]) -> Iterator[str]:
    for finding, names in by_subject(findings):
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        detail = f" ({finding.detail})" if len(names) == 1 and finding.detail else ""
        yield safe(f"{MARKS[finding.state]}  {finding.subject}: {', '.join(names[:NAMES_SHOWN])}{more}{detail}")
        yield safe(f"      -> {finding.remedy}")
