"""Rules on processes, one for each device that a process is on. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.model.frame import Verdict
from gpumond.model.snapshot import DeviceReading, ProcessUsage
from gpumond.rules import Labels, Subjects
from gpumond.rules.scopes.context import VERDICTS, RuleContext, named, ratio, size, unjudged
from gpumond.rules.verdicts import NOTHING, UNKNOWN, texts, values

NOBODY = ProcessUsage(pid=0, start_ticks=None, used_bytes=None)
"""Owner of memory without a known process."""


class _Process(NamedTuple):
    """One process on one device, or NOBODY: the device as a whole, for memory without a known process."""

    device: DeviceReading
    process: ProcessUsage
    workload: str | None
    """None if it never had an agent."""
    silent: bool
    verdicts: Sequence[Verdict]
    said: Mapping[str, float | None]
    """Values of the verdicts."""


def processes(seen: RuleContext) -> Subjects[_Process]:
    agents, silent, standing = seen.recent.agents, seen.recent.silent, seen.standing
    rows: list[_Process] = []
    for device in seen.snapshot.devices:
        uuid = device.uuid
        for key, process in device.processes_by_key.items():
            gone = key in silent
            verdicts = standing.get((uuid, key), ())
            said = values(verdicts, UNKNOWN if gone else NOTHING)
            workload = agents.get(key)
            name = None if workload is None else workload.name
            rows.append(
                _Process(device=device, process=process, workload=name, silent=gone, verdicts=verdicts, said=said)
            )
        verdicts = standing.get((uuid, None), ())
        said = values(verdicts, unjudged(device))
        rows.append(_Process(device=device, process=NOBODY, workload=None, silent=False, verdicts=verdicts, said=said))
    return Subjects(
        rows=rows,
        values={
            "used_bytes": lambda row: row.process.used_bytes,
            "used_ratio": lambda row: ratio(row.process.used_bytes, row.device.size_bytes),
            "agent_gone": lambda row: None if row.workload is None else float(row.silent),
            **VERDICTS,
        },
        labels=_labels,
        texts=_process_texts,
        programs=lambda row: (row.workload or "", row.process.comm or ""),
        process=lambda row: None if row.process is NOBODY else row.process.key,
    )


def _labels(row: _Process) -> Labels:
    pid = row.process.pid
    return ("gpu", str(row.device.index)), ("pid", str(pid) if pid else ""), ("uuid", row.device.uuid)


def _process_texts(row: _Process) -> dict[str, str]:
    process = row.process
    return {
        **named(row.device),
        **texts(row.verdicts),
        "pid": str(process.pid),
        "comm": process.comm or "unknown program",
        "workload": row.workload or "",
        "used": size(process.used_bytes),
        "state": process.state or "unknown",
    }
