"""The line or scope that keeps the memory of a leak, in the summary of its verdict. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpumond.facts.frame import Verdict
from gpumond.facts.program import Program, Retainer
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import human

SHOWN = 2
MAX_PLACE = 240
"""Longest text of a line: an agent may send any."""


def with_retainers(verdicts: Iterable[Verdict], snapshot: Snapshot) -> tuple[Verdict, ...]:
    """Append to each leak of a program what keeps its memory, as far as its agent has found it."""
    return tuple(_with_retainers(verdict, snapshot) if verdict.kind == "leak" else verdict for verdict in verdicts)


def _with_retainers(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    report = None if verdict.process is None else snapshot.reports_by_process.get(verdict.process)
    text = "" if report is None else kept_by(report.program)
    return replace(verdict, summary=f"{verdict.summary}; {text}") if text else verdict


def kept_by(program: Program) -> str:
    """Return the lines that keep memory, else the scope that keeps most; empty if neither is known."""
    if program.retainers:
        return "kept by " + ", ".join(map(_line, program.retainers[:SHOWN]))
    kept = {
        scope.name: sum(device.kept_bytes for device in scope.devices)
        for scope in program.scopes
        if scope.entries > 1 and sum(device.last_kept_bytes for device in scope.devices) > 0  # not a set-up
    }
    name = max(kept, key=lambda name: kept[name], default="")
    return f"the scope {name} keeps {human(kept[name])}" if kept.get(name, 0) > 0 else ""


def _line(retainer: Retainer) -> str:
    name = f"{retainer.name} in " if retainer.name else ""
    place = f"{name}{retainer.function} at {retainer.file}:{retainer.line}"
    return f"{place[-MAX_PLACE:]} ({retainer.tensors} tensors in 20 s)"
