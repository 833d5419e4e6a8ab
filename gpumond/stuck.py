"""Processes that keep device memory from others and will not give it back by themselves; and what to do. Pure.

gpumond ends no process: that is for people to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpumond.units import human

MENDS = {
    "gone": "no such process is visible here: wait, the driver may still be taking it down; if it stays, "
    "look for its children among the holders, else reset the device (nvidia-smi --gpu-reset) once nothing uses it",
    "zombie": "it has ended, its parent does not take notice: end or restart the parent (ps -o ppid= -p {pid})",
    "uninterruptible": "it waits in the kernel, often in the driver, and no signal ends it: if it stays so, "
    "look at the kernel's log (dmesg), then reset the device or reboot",
    "stopped": "it was stopped and keeps its memory: kill -CONT {pid} lets it go on, kill {pid} ends it",
    "holder": "it keeps the device open while memory has no owner: see if it is a left-over of a dead program "
    "(ps -fp {pid}); to end it: kill {pid}",
}


class Stuck(NamedTuple):
    pid: int
    what: str
    mend: str


def stuck(processes: Iterable[Mapping[str, Any]]) -> Iterator[Stuck]:
    """Of the processes as the API has them; a process on several devices is named once."""
    named: set[int] = set()
    for process in processes:
        kind = "holder" if "holder" in process["kinds"] else process["state"]
        if kind not in MENDS or process["pid"] in named:
            continue
        named.add(process["pid"])
        where = next((f" in {word} {process[key]}" for word, key in _PLACES if process[key]), "")
        used = process["used_bytes"]
        held = "" if used is None else f", {human(used)}"
        program = process["workload"] or process["comm"] or "unknown program"
        what = f"pid {process['pid']} ({program}{where}) is {_WORDS.get(kind, kind)}{held}"
        yield Stuck(process["pid"], what, MENDS[kind].format(pid=process["pid"]))


_WORDS = {"holder": "a holder without an entry in the driver's list", "zombie": "a zombie"}
_PLACES = (
    ("pod", "pod_name"),
    ("container", "container_name"),
    ("container", "container"),
    ("Slurm job", "slurm_job"),
    ("unit", "unit"),
)
