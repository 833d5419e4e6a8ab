"""Processes that keep device memory from others and will not give it back by themselves; and what to do. Pure.

gpumond ends no process: that is for people to decide. Those that are ``LIKELY_MEANT`` may be as somebody wants them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpumond.model.units import duration, human

REMEDIES = {
    "gone": "no such process is visible here: wait, the driver may still be taking it down; if it stays, "
    "look for its children among the holders, else reset the device (nvidia-smi --gpu-reset) once nothing uses it",
    "zombie": "it has ended, its parent does not take notice: end or restart the parent (ps -o ppid= -p {pid})",
    "uninterruptible": "it waits in the kernel, often in the driver, and no signal ends it: if it stays so, "
    "look at the kernel's log (dmesg), then reset the device or reboot",
    "stopped": "it was stopped and keeps its memory: kill -CONT {pid} lets it go on, kill {pid} ends it",
    "holder": "it keeps the device open while memory has no owner: see if it is a left-over of a dead program "
    "(ps -fp {pid}); to end it: kill {pid}",
    "orphaned": "whoever started it is gone, and no service manager keeps it (so it is with nohup, too): if nobody "
    "waits for it, kill {pid} ends it",
    "idle": "it runs nothing and keeps its memory: gpumond flush --pid {pid} returns its cache, if it has an agent; "
    "kill {pid} ends it",
}
LIKELY_MEANT = ("orphaned", "idle")
IDLE_SECONDS = 1800.0
"""As the rule idle-holder."""
IDLE_BYTES = 1 << 30
"""Less keeps nothing from others that matters: a context alone takes half of it."""


class Stuck(NamedTuple):
    pid: int
    kind: str
    what: str
    remedy: str


def stuck(processes: Iterable[Mapping[str, Any]]) -> Iterator[Stuck]:
    """Of the processes as the API has them; a process on several devices is named once."""
    named: set[int] = set()
    for process in processes:
        kind = _kind(process)
        if kind is None or process["pid"] in named:
            continue
        named.add(process["pid"])
        where = next((f" in {word} {process[key]}" for word, key in _PLACES if process[key]), "")
        used = process["used_bytes"]
        held = "" if used is None else f", {human(used)}"
        program = process["workload"] or process["comm"] or "unknown program"
        more = ", left by whoever started it" if kind == "holder" and process.get("orphaned") else ""
        lately = f" for {duration(process['idle_seconds'])}" if _is_idle(process) else ""
        word = "idle" if kind == "idle" else _WORDS.get(kind, kind)
        idle = lately if kind == "idle" or not lately else f", idle{lately}"
        what = f"pid {process['pid']} ({program}{where}) is {word}{more}{idle}{held}"
        yield Stuck(process["pid"], kind, what, REMEDIES[kind].format(pid=process["pid"]))


def _kind(process: Mapping[str, Any]) -> str | None:
    """The gravest of what it is."""
    if "holder" in process["kinds"]:
        return "holder"
    if process["state"] in REMEDIES:
        return str(process["state"])
    if process.get("orphaned"):
        return "orphaned"
    return "idle" if _is_idle(process) else None


def _is_idle(process: Mapping[str, Any]) -> bool:
    return (process.get("idle_seconds") or 0) >= IDLE_SECONDS and (process["used_bytes"] or 0) >= IDLE_BYTES


_WORDS = {"holder": "a holder without an entry in the driver's list", "zombie": "a zombie"}
_PLACES = (
    ("pod", "pod_name"),
    ("container", "container_name"),
    ("container", "container"),
    ("Slurm job", "slurm_job"),
    ("unit", "unit"),
)
