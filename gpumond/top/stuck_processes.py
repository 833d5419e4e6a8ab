"""Processes that hold device memory without using it, and the remedy for each.

gpumond ends no process; that is the operator's decision. Kinds in ``LIKELY_MEANT`` may be intended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpumond.model.process import IDLE_SECONDS, ProcessKey
from gpumond.model.units import duration, human

REMEDIES = {
    "gone": "this process is not visible here: wait, the driver may still be cleaning up; if the entry remains, "
    "look for its children among the holders, or reset the device once it is unused (nvidia-smi --gpu-reset)",
    "zombie": "the process has ended, but its parent has not collected its status: end or restart the parent "
    "(ps -o ppid= -p {pid})",
    "uninterruptible": "the process waits in the kernel, often in the driver, and no signal ends it: if this lasts, "
    "check the kernel log (dmesg), then reset the device or reboot",
    "stopped": "the process is stopped and keeps its memory: kill -CONT {pid} resumes it, kill {pid} ends it",
    "holder": "the process keeps the device open while memory has no owner: check if its program is dead "
    "(ps -fp {pid}); kill {pid} ends it",
    "orphaned": "its parent has ended, and no service manager runs it (nohup has the same effect): if it is not "
    "needed, kill {pid} ends it",
    "idle": "the process is idle and keeps its memory: gpumond flush --pid {pid} releases its cache if it runs "
    "the agent; kill {pid} ends it",
}
LIKELY_MEANT = ("orphaned", "idle")
IDLE_BYTES = 1 << 30
"""Smaller amounts are ignored: a context alone takes half as much."""


class Stuck(NamedTuple):
    pid: int
    kind: str
    what: str
    remedy: str


def stuck(processes: Iterable[Mapping[str, Any]]) -> Iterator[Stuck]:
    """Yield the stuck ones of the API's processes. A process on several devices is yielded once."""
    named: set[ProcessKey] = set()
    for process in processes:
        kind = _kind(process)
        key = ProcessKey(process["pid"], process.get("start_ticks"))
        if kind is None or key in named:
            continue
        named.add(key)
        where = next((f" in {word} {process[key]}" for word, key in _PLACES if process[key]), "")
        used = process["used_bytes"]
        held = "" if used is None else f", {human(used)}"
        program = process["workload"] or process["comm"] or "unknown program"
        more = ", orphaned" if kind == "holder" and process.get("orphaned") else ""
        lately = f" for {duration(process['idle_seconds'])}" if _is_idle(process) else ""
        word = "idle" if kind == "idle" else _WORDS.get(kind, kind)
        idle = lately if kind == "idle" or not lately else f", idle{lately}"
        what = f"pid {process['pid']} ({program}{where}) is {word}{more}{idle}{held}"
        yield Stuck(process["pid"], kind, what, REMEDIES[kind].format(pid=process["pid"]))


def _kind(process: Mapping[str, Any]) -> str | None:
    """Return the most severe kind that applies to the process."""
    if "holder" in process["kinds"]:
        return "holder"
    if process["state"] in REMEDIES:
        return str(process["state"])
    if process.get("orphaned"):
        return "orphaned"
    return "idle" if _is_idle(process) else None


def _is_idle(process: Mapping[str, Any]) -> bool:
    return (process.get("idle_seconds") or 0) >= IDLE_SECONDS and (process["used_bytes"] or 0) >= IDLE_BYTES


_WORDS = {"holder": "a holder of the device that the driver does not list", "zombie": "a zombie"}
_PLACES = (
    ("pod", "pod_name"),
    ("container", "container_name"),
    ("container", "container"),
    ("Slurm job", "slurm_job"),
    ("unit", "unit"),
)
