"""``gpumond fleet undo``: undo what an operation has changed on several machines, as their audit logs record it, where
the state that it set is still the present one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, add_option, confirm
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.flush import OPERATION_ID
from gpumond.facts.pools import ENGINE_STEP
from gpumond.facts.units import caller_text, plural, size_text
from gpumond.features.fleet import discovery
from gpumond.features.fleet.audit import AUDIT_ROUTE, entries_of
from gpumond.features.fleet.connection import Client, Machine, run_each
from gpumond.features.fleet.discovery import UnreadMachine, read_each, unread_machines
from gpumond.features.fleet.flush import ENGINE_EXTRA_SECONDS, FLUSHES_ROUTE, caller_name, new_operation_id
from gpumond.view.audit import audit_sentence
from gpumond.view.frame import CheckedFrame, frame_of, receipts_of
from gpumond.view.text import table, time_text

AGENTS_ROUTE, SILENCES_ROUTE, RESUMPTIONS_ROUTE = "/api/v1/agents", "/api/v1/silences", "/api/v1/resumptions"
MAX_ENTRIES = 10_000
RESUME_TIMEOUT_SECONDS = 600.0
_ENGINE_TARGET = re.compile(r"workload (.+?)(?: \(uid \d+\))?")
_RESULT_ACTIONS = ("flush.receipts", "flush.refused", "flush.interrupted", "silence.expire", "resume.receipt")
"""Actions of entries that state the result of another one, or that undo one."""

UndoKind = Literal["wake", "limit", "silence", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoStep:
    """What undoes one entry. ``subject``: the name of an engine, the id of a silence or the pid of a program.

    ``before``: the limits in bytes by device that the program had, ``limit_bytes`` the limit that it was given, None if
    it was removed, on ``device``, None for all. ``problem``: why it cannot be undone; the other fields are then empty.
    """

    entry: Mapping[str, Any]
    kind: UndoKind | None = None
    subject: str = ""
    start_ticks: int | None = None
    device: str | None = None
    limit_bytes: int | None = None
    before: Mapping[str, int] | None = None
    problem: str = ""

    @property
    def text(self) -> str:
        if self.kind == "wake":
            return f"wake the engine {self.subject}"
        if self.kind == "silence":
            return f"end the silence {self.subject}"
        if self.kind == "resume":
            return f"resume pid {self.subject}"
        if self.kind == "limit":
            before = ", ".join(f"{size_text(size)} on {uuid}" for uuid, size in (self.before or {}).items())
            return f"limit pid {self.subject} to {before}" if before else f"remove the limit of pid {self.subject}"
        return ""


class UndoResult(NamedTuple):
    """The result of one step: ``undone``, ``refused`` or ``failed``, and the reason for the last two."""

    step: UndoStep
    result: str
    reason: str


def undo_steps(entries: Iterable[Mapping[str, Any]], operation: str) -> list[UndoStep]:
    """Return what undoes the entries of an operation on one machine, the newest first."""
    steps = []
    for entry in sorted(entries, key=lambda each: -each["at"]):
        detail = entry["detail"]
        if not isinstance(detail, Mapping) or detail.get("operation") != operation:
            continue
        try:
            step = _undo_step(entry, detail)
        except KeyError:
            step = UndoStep(entry=entry, problem="its entry in the audit log was shortened")
        if step is not None:
            steps.append(step)
    return steps


def _undo_step(entry: Mapping[str, Any], detail: Mapping[str, Any]) -> UndoStep | None:
    """Return what undoes an entry, None for one that states a result only."""
    action = str(entry["action"])
    if action == "flush.request":
        engine = _ENGINE_TARGET.fullmatch(str(detail.get("target", "")))
        if detail.get("steps") != [ENGINE_STEP] or engine is None:
            return UndoStep(
                entry=entry, problem="a flush has released caches, which programs fill again as they need them"
            )
        if detail.get("wake"):
            return UndoStep(entry=entry, problem="an engine that was woken serves requests; use gpumond fleet sleep")
        return UndoStep(entry=entry, kind="wake", subject=engine[1])
    if action == "agent.limit" and "before" in detail:
        return UndoStep(
            entry=entry,
            kind="limit",
            subject=str(detail["pid"]),
            start_ticks=detail["start_ticks"],
            device=detail["device"],
            limit_bytes=detail["limit_bytes"],
            before=detail["before"],
        )
    if action == "silence.create":
        return UndoStep(entry=entry, kind="silence", subject=str(detail["id"]))
    if action == "suspend.receipt":
        if detail.get("outcome") != "suspended":
            return None
        return UndoStep(entry=entry, kind="resume", subject=str(detail["pid"]), start_ticks=detail["start_ticks"])
    if action in _RESULT_ACTIONS or action.endswith(".answer"):
        return None
    return UndoStep(entry=entry, problem="gpumond fleet undo can't undo this kind of change")


def outdated_reason(step: UndoStep, frame: CheckedFrame) -> str:
    """Return why the state that a limit has set is not the present one, or an empty string."""
    key = (int(step.subject), step.start_ticks)
    reports = [each for each in frame["snapshot"]["reports"] if (each["pid"], each["start_ticks"]) == key]
    if not reports:
        return "the program has exited"
    present = [
        each for each in reports[0]["limits"] if step.device in (None, each["device_uuid"]) and not each["quota"]
    ]
    unchanged = {each["limit_bytes"] for each in present} == ({step.limit_bytes} if step.limit_bytes else set())
    return "" if unchanged else "the limit has been changed since"


async def undo(client: Client, machine: Machine, step: UndoStep) -> str:
    """Undo one step, and return why it was not done, or an empty string. Raises DaemonError."""
    if step.kind == "limit":
        if reason := outdated_reason(step, await client.frame(machine, frame_of)):
            return reason
        path = f"{AGENTS_ROUTE}/{step.subject}/limit"
        await client.post(machine, path, {"limit_bytes": None, "device": step.device}, client.timeout_seconds)
        for uuid, size in (step.before or {}).items():
            await client.post(machine, path, {"limit_bytes": size, "device": uuid}, client.timeout_seconds)
        return ""
    if step.kind == "silence":
        await client.delete(machine, f"{SILENCES_ROUTE}/{quote(step.subject, safe='')}")
        return ""
    if step.kind == "resume":
        suspended = await client.get(machine, "/api/v1/suspensions")
        if not any((str(each["pid"]), each["start_ticks"]) == (step.subject, step.start_ticks) for each in suspended):
            return "the program isn't suspended anymore"
        answer = await client.post(
            machine, RESUMPTIONS_ROUTE, {"target": {"pid": int(step.subject)}}, RESUME_TIMEOUT_SECONDS
        )
        refused = [each for each in answer["receipts"] if each["outcome"] != "resumed"]
        return str(refused[0]["reason"] or refused[0]["outcome"]) if refused else ""
    body = {"target": {"workload": step.subject}, "steps": [ENGINE_STEP], "wake": True}
    receipts = receipts_of(await client.post(machine, FLUSHES_ROUTE, body, ENGINE_EXTRA_SECONDS))
    return "; ".join(str(each["reason"] or each["outcome"]) for each in receipts if each["outcome"] != "woken")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    discovery.add_arguments(parser)
    parser.add_argument("operation", metavar="OPERATION", help="the ID that the `gpumond fleet` command printed")
    add_option(parser, "--dry-run", "print the plan, and change nothing")
    add_option(parser, "--yes", "don't ask for confirmation")


async def run(arguments: argparse.Namespace) -> int:
    if not re.match(OPERATION_ID, arguments.operation):
        raise ConfigError(
            "OPERATION: expected the ID that a `gpumond fleet` command printed: 1 to 64 characters from A-Z, a-z, 0-9, "
            "., _ and -"
        )
    if arguments.json and not (arguments.yes or arguments.dry_run):
        raise ConfigError("--json requires --yes or --dry-run")
    client, machines = await discovery.select_machines(arguments)
    query = urlencode({"limit": MAX_ENTRIES, "operation": arguments.operation})

    async def read(machine: Machine) -> list[UndoStep]:
        return undo_steps(entries_of(machine, await client.get(machine, f"{AUDIT_ROUTE}?{query}")), arguments.operation)

    answers = await read_each(machines, read, arguments.parallel)
    missing = unread_machines(machines, answers)
    plan = {machine: answer for machine, answer in zip(machines, answers, strict=True) if isinstance(answer, list)}
    plan = {machine: steps for machine, steps in plan.items() if steps}
    possible = [(machine, step) for machine, steps in plan.items() for step in steps if step.kind]
    if not arguments.json:
        texts = (_plan_table(plan), "\n".join(map(str, missing)), _total_text(possible))
        print("\n\n".join(filter(None, texts)), flush=True)
    results: dict[Machine, list[UndoResult]] = {}
    if possible and not arguments.dry_run:
        if not arguments.yes:
            confirm("Undo these changes?", "nothing was undone")
        undo_client = replace(client, operation=new_operation_id())
        if not arguments.json:
            print(f"\noperation {undo_client.operation} by {caller_name()}", flush=True)

        async def undo_all(machine: Machine) -> list[UndoResult]:
            return [await _undo_result(undo_client, machine, step) for step in plan[machine] if step.kind]

        results = dict(zip(plan, await run_each(plan, undo_all, arguments.parallel), strict=True))
        if not arguments.json:
            print(f"\n{_result_table(results)}")
    if arguments.json:
        print(json.dumps(_document(plan, missing, results), indent=2))
    outcomes = {each.result for machine_results in results.values() for each in machine_results}
    if missing or "failed" in outcomes:
        return FAILED
    return DONE if "undone" in outcomes or (possible and arguments.dry_run) else NOTHING_TO_DO


async def _undo_result(client: Client, machine: Machine, step: UndoStep) -> UndoResult:
    """Undo one step, and return its result."""
    try:
        reason = await undo(client, machine, step)
        return UndoResult(step, "refused" if reason else "undone", reason)
    except (KeyError, TypeError, ValueError):
        return UndoResult(step, "failed", "the response isn't from a compatible gpumond daemon")
    except DaemonError as error:
        gone = error.status in (404, 409)
        return UndoResult(step, "refused" if gone else "failed", str(error))


def _plan_table(plan: Mapping[Machine, Sequence[UndoStep]]) -> str:
    rows = [
        (
            machine.name,
            time_text(step.entry["at"]),
            caller_text(str(step.entry["actor"])),
            audit_sentence(str(step.entry["action"]), step.entry["detail"]),
            step.text or "-",
            step.problem,
        )
        for machine, steps in plan.items()
        for step in steps
    ]
    if not rows:
        return "no machine's audit log has an entry for this operation"
    return table(("MACHINE", "AT", "BY", "ENTRY", "UNDO", "REASON"), rows)


def _total_text(possible: Sequence[tuple[Machine, UndoStep]]) -> str:
    machines = plural(len({machine for machine, _ in possible}), "machine")
    return f"{plural(len(possible), 'change')} on {machines} can be undone" if possible else "nothing can be undone"


def _result_table(results: Mapping[Machine, Sequence[UndoResult]]) -> str:
    rows = [
        (machine.name, each.step.text, each.result, each.reason)
        for machine, machine_results in results.items()
        for each in machine_results
    ]
    return table(("MACHINE", "UNDO", "RESULT", "REASON"), rows)


def _document(
    plan: Mapping[Machine, Sequence[UndoStep]],
    missing: Sequence[UnreadMachine],
    results: Mapping[Machine, Sequence[UndoResult]],
) -> dict[str, Any]:
    return {
        "plan": [
            {"machine": machine.name, "entry": step.entry, "undo": step.text or None, "reason": step.problem}
            for machine, steps in plan.items()
            for step in steps
        ],
        "missing": [each._asdict() for each in missing],
        "results": [
            {"machine": machine.name, "undo": each.step.text, "result": each.result, "reason": each.reason}
            for machine, machine_results in results.items()
            for each in machine_results
        ],
    }
