"""``gpumond fleet audit``: show the audit entries of several machines in one table, such as those of one operation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, add_option, print_result
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import caller_text
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.discovery import read_each, select_machines, unread_machines
from gpumond.view.audit import audit_sentence
from gpumond.view.frame import checked_as
from gpumond.view.text import table, time_text

AUDIT_ROUTE = "/api/v1/audit"


@dataclass(frozen=True, slots=True)
class _AuditEntry:
    """The fields of an entry whose types are known; its detail is any JSON value."""

    seq: int
    at: float
    actor: str
    action: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--operation ID", "only the entries of one `gpumond fleet` command, by the ID that it printed")
    add_option(
        parser, "--limit N", "number of entries per machine, most recent last (default: 100)", type=int, default=100
    )


async def run(arguments: argparse.Namespace) -> int:
    if arguments.limit < 1:
        raise ConfigError("--limit must be above 0")
    client, machines = await select_machines(arguments)
    query = {"limit": str(arguments.limit)} | ({"operation": arguments.operation} if arguments.operation else {})

    async def read(machine: Machine) -> list[dict[str, Any]]:
        return entries_of(machine, await client.get(machine, f"{AUDIT_ROUTE}?{urlencode(query)}"))

    answers = await read_each(machines, read, arguments.parallel)
    missing = unread_machines(machines, answers)
    entries = [entry for answer in answers if isinstance(answer, list) for entry in answer]
    entries.sort(key=lambda entry: entry["at"])
    document = {"entries": entries, "missing": [each._asdict() for each in missing]}
    print_result(arguments, document, lambda: "\n\n".join((_entry_table(entries), *map(str, missing))))
    if missing:
        return FAILED
    return DONE if entries else NOTHING_TO_DO


def entries_of(machine: Machine, answer: object) -> list[dict[str, Any]]:
    """Return the entries of a machine with its name. Raises DaemonError if the answer is of another form."""
    checked = checked_as(tuple[_AuditEntry, ...], answer, "audit")
    details = [each.get("detail") for each in answer] if isinstance(answer, list) else []
    return [
        {"machine": machine.name, **entry, "detail": detail} for entry, detail in zip(checked, details, strict=True)
    ]


def _entry_table(entries: Sequence[dict[str, Any]]) -> str:
    if not entries:
        return "no entry"
    rows = [
        (
            each["machine"],
            time_text(each["at"]),
            caller_text(each["actor"]),
            audit_sentence(each["action"], each["detail"]),
        )
        for each in entries
    ]
    return table(("MACHINE", "AT", "BY", "ENTRY"), rows)
