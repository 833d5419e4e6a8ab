"""Recordings in the format of Chrome traces, which Perfetto shows next to those of torch.profiler. No I/O.

Times are unix microseconds. Each program has a track of its shares on each device; flushes, out-of-memory errors and
verdicts are instants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumond.facts.snapshot import Snapshot
from gpumond.tick.ledger import attribute
from gpumond.view.text import safe

KINDS = frozenset(("flush", "oom", "verdict-began", "verdict-ended", "alert-fired", "process-ended"))
"""Events that are instants of a trace."""
MICROSECONDS = 1e6
Entry = dict[str, Any]


def counters(snapshot: Snapshot) -> Iterator[Entry]:
    """Yield the values of all tracks at one snapshot: bytes by share, of each program and of the rest of a device."""
    at = snapshot.taken_at * MICROSECONDS
    gpus = snapshot.gpu_labels
    tracks: dict[tuple[int, str], dict[str, int]] = {}
    for line in attribute(snapshot).lines:
        name = f"GPU {gpus.get(line.device_uuid, '?')} memory"
        own = tracks.setdefault((line.pid or 0, name), {})
        own[line.share] = own.get(line.share, 0) + line.used_bytes
    for (pid, name), shares in tracks.items():
        yield {"ph": "C", "pid": pid, "name": name, "ts": at, "args": shares}


def names(snapshot: Snapshot, known: set[int]) -> Iterator[Entry]:
    """Yield the names of the programs that are not ``known`` yet, and add these."""
    found = {0: "devices"} | {
        line.pid: f"{line.workload or 'process'} (gpumond)"
        for line in attribute(snapshot).lines
        if line.pid is not None
    }
    for pid, name in found.items():
        if pid not in known:
            known.add(pid)
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": safe(name)}}


def instants(events: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yield the events of a daemon that a trace shows."""
    for event in events:
        if event["kind"] in KINDS:
            yield {
                "ph": "i",
                "s": "g",
                "pid": event["pid"] or 0,
                "tid": 0,
                "name": event["kind"],
                "ts": event["at"] * MICROSECONDS,
                "args": {"summary": safe(event["summary"])},
            }
