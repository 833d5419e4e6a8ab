"""Notices of a frame: faults, conditions, alerts and verdicts. No I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, NamedTuple

from gpumond.facts.alerts import AGAIN_SINCE, ENDED_PREFIX
from gpumond.facts.program import IDLE_SECONDS, ProcessKey
from gpumond.facts.units import duration_text, list_text, size_text
from gpumond.facts.verdicts import PATTERN_NAMES, VERDICT_REMEDIES
from gpumond.view.rows import INFO, process_of, severity, sort_by_urgency, time_to_full
from gpumond.view.text import printable_excerpt

Level = Literal["bad", "warn", "note"]

_LEVEL_BY_SEVERITY: dict[int, Level] = {0: "bad", 1: "warn", 2: "note"}


@dataclass(frozen=True, slots=True)
class FrameNotice:
    """A notice. ``kind`` is the part of the title that notices about other subjects have in common; empty if no other
    notice is like it. ``advice``: the next steps, the first one first. ``device_uuid``: the device that it concerns;
    None if it concerns several. ``program`` and ``gpu`` name the subject as the text does. ``full_in``: seconds until a
    GPU is full. ``state``: why an alert informs nobody, such as ``pending``.
    """

    level: Level
    title: str
    text: str
    kind: str = ""
    advice: str = ""
    device_uuid: str | None = None
    program: str = ""
    gpu: str = ""
    full_in: float = inf
    state: str = ""

    @property
    def split_subject(self) -> tuple[str, str]:
        """Return state and subject (program and GPU), and the rest of the text; without a subject, title and text."""
        subject = " on ".join(filter(None, (self.program, self.gpu)))
        rule = self.kind.removeprefix("alert ")
        if not (subject and self.text):
            name = rule if self.text and self.title.startswith("alert ") else self.title
            return name, self.text and f": {self.text}"
        if self.text.startswith(ENDED_PREFIX):
            return subject, f": {rule} {self.text}"
        who = ": ".join(filter(None, (self.state, subject)))
        rest = self.text.removeprefix(self.program or self.gpu)
        if rest == self.text:
            return who, f": {self.text}"
        return who, re.sub(rf" on {self.gpu}\b", "", rest, count=1) if self.program and self.gpu else rest

    @property
    def fact(self) -> str:
        return ": ".join(filter(None, (self.title, self.text)))

    @property
    def steps(self) -> list[str]:
        return steps_of(self.advice)


def steps_of(advice: str) -> list[str]:
    """Return the sentences of a remedy or description: each cause and next step gets its own line."""
    return [*filter(None, advice.split("; "))]


def frame_notices(frame: Mapping[str, Any]) -> Iterator[FrameNotice]:
    source, gpus = frame["snapshot"]["source"], {}
    for device in frame["snapshot"]["devices"]:
        gpus[device["uuid"]] = f"GPU {device['index']}"
    if not source["up"]:
        texts = [f["remedy"] for f in frame["faults"] if (f["source"], f["kind"]) == (source["name"], source["reason"])]
        released = source["reason"] == "released"
        reason = printable_excerpt(source["reason"], 40)
        title = "detached from the driver for maintenance" if released else f"no GPU can be read ({reason})"
        yield FrameNotice("note" if released else "bad", title, _with_remedy(source["detail"], *texts[:1]))
    elif not gpus:
        yield FrameNotice("warn", "no GPU found", "the driver lists no GPUs")
    for fault in frame["faults"]:
        if source["up"] or (fault["source"], fault["kind"]) != (source["name"], source["reason"]):
            where = gpus.get(fault["device_uuid"], fault["device_uuid"] or fault["source"])
            yield FrameNotice(
                "warn",
                printable_excerpt(f"{where}: {fault['kind']}", 80),
                _with_remedy(fault["detail"], fault["remedy"]),
                printable_excerpt(fault["kind"], 40),
                device_uuid=fault["device_uuid"],
            )
    for condition in frame["conditions"]:
        where = gpus.get(condition["device_uuid"], condition["device_uuid"] or "this machine")
        text = _with_remedy(condition.get("detail", ""), condition["remedy"])
        title, kind = printable_excerpt(f"{where}: {condition['kind']}", 80), printable_excerpt(condition["kind"], 40)
        yield FrameNotice("note", title, text, kind, device_uuid=condition["device_uuid"])


def _with_remedy(detail: str, remedy: str = "") -> str:
    """Append the remedy to a detail that does not already contain it."""
    parts = (detail,) if remedy in detail else (detail, remedy)
    return printable_excerpt(": ".join(part for part in parts if part), 400)


def alert_notices(frame: Mapping[str, Any]) -> Iterator[FrameNotice]:
    """Yield alerts, the most urgent first, without those that only inform and aren't firing yet."""
    for alert, full_in in sort_by_urgency(frame["alerts"], frame["verdicts"]):
        firing = alert["phase"] == "firing"
        if not firing and severity(alert) == INFO:
            continue
        since = alert["fired_at"] if firing and alert["fired_at"] is not None else alert["active_at"]
        age = f"for {duration_text(max(0.0, frame['snapshot']['taken_at'] - since))}"
        silenced = ", silenced" if alert.get("silenced_by") else ""
        rule = printable_excerpt(alert["rule"], 60)
        texts = dict(alert["annotations"])
        text, advice = (printable_excerpt(texts.get(name, ""), 400) for name in ("summary", "description"))
        text, again, returned = text.partition(AGAIN_SINCE)
        if again:
            age = f"again since {returned}"
        over = text.startswith(ENDED_PREFIX)
        phase = "" if over else f" {'firing' if firing else 'pending'} {age}"
        title = f"{rule}{phase}{silenced}"
        state = f"{'' if firing else 'pending'}{silenced}".removeprefix(", ")
        level: Level = _LEVEL_BY_SEVERITY[severity(alert)] if firing and not silenced and not over else "note"
        kind, uuid = f"alert {rule}{'' if firing else ' pending'}{silenced}", dict(alert["labels"]).get("uuid")
        yield FrameNotice(level, title, text, kind, advice, uuid, *_subject(frame, alert, uuid), full_in, state)


def blank_repeated_texts(candidates: Iterable[FrameNotice], others: Collection[FrameNotice]) -> Iterator[FrameNotice]:
    """Remove texts that repeat an earlier notice."""
    for candidate in candidates:
        again = any(other.text and other.text in candidate.text for other in others)
        yield replace(candidate, text="") if again else candidate


def verdict_notices(frame: Mapping[str, Any]) -> Iterator[FrameNotice]:
    """Yield the verdicts that require attention and of which no alert informs, the most urgent first."""
    alerted = {(alert["rule"], dict(alert["labels"]).get("uuid"), alert["pid"]) for alert in frame["alerts"]}

    def is_new(verdict: Mapping[str, Any]) -> bool:
        return (verdict["kind"], verdict["device_uuid"], verdict["pid"]) not in alerted

    found = (each for each in frame["verdicts"] if each["kind"] not in PATTERN_NAMES and is_new(each))
    for verdict in sorted(found, key=lambda each: (time_to_full(each), each["since"])):
        level: Level = "note" if verdict["kind"] in ("growing", "memory-freed") else "warn"
        kind = printable_excerpt(verdict["kind"], 40)
        pid = "PID" if verdict["pid"] is None else str(verdict["pid"])
        advice = VERDICT_REMEDIES.get(verdict["kind"], "").replace("PID", pid)
        text, uuid = printable_excerpt(verdict["summary"], 400), verdict["device_uuid"]
        yield FrameNotice(level, kind, text, kind, advice, uuid, *_subject(frame, verdict, uuid), time_to_full(verdict))


def _subject(frame: Mapping[str, Any], value: Mapping[str, Any], uuid: str | None) -> tuple[str, str]:
    """Return the program and the GPU that an alert or a verdict concerns, each empty if there is none."""
    gpu = next((f"GPU {each['index']}" for each in frame["snapshot"]["devices"] if each["uuid"] == uuid), "")
    key = process_of(value)
    of_process = (each for each in frame["processes"] if key and each["pid"] == key.pid and process_of(each) == key)
    name = printable_excerpt(next((each["workload"] or each["comm"] for each in of_process), None) or "", 64)
    pid = f"pid {value['pid']}" if key else ""
    return f"{name} ({pid})" if name else pid, gpu


def group_by_kind(notices: Iterable[FrameNotice]) -> list[list[FrameNotice]]:
    """Return the notices of each kind together, in the order of the first of each kind."""
    kinds: dict[object, list[FrameNotice]] = {}
    for index, notice in enumerate(notices):
        kinds.setdefault((notice.kind, notice.level) if notice.kind else index, []).append(notice)
    return list(kinds.values())


STUCK_REMEDIES = {
    "gone": "wait: the driver may still be cleaning up; if the entry remains, look for the process's children among "
    "those that have the GPU open, or reset the GPU once it is unused (gpumond detach-driver --for 5m, then nvidia-smi "
    "--gpu-reset)",
    "zombie": "stop or restart its parent (ps -o ppid= -p {pid}), which hasn't collected the status of the exited "
    "process",
    "uninterruptible": "check the kernel log (dmesg), then reset the GPU or reboot if this persists: no signal can "
    "terminate a process that waits in the kernel",
    "stopped": "it keeps its memory while stopped; resume it with kill -CONT {pid}, or terminate it with kill {pid}",
    "holder": "it has the GPU open, and part of the GPU's memory belongs to no listed process; inspect it with ps -fp "
    "{pid}, and if you don't need it, kill {pid}",
    "orphaned": "its parent has exited (as with nohup), and no service manager runs it; if you don't need it, kill "
    "{pid}",
    "idle": "if it runs the agent, release its cache with gpumond flush --pid {pid}; if you don't need it, kill {pid}",
}
USUALLY_INTENDED = ("orphaned", "idle")
IDLE_BYTES = 1 << 30
"""Smaller amounts are ignored: a context alone takes half as much."""


class StuckProcess(NamedTuple):
    pid: int
    kind: str
    sentence: str
    remedy: str
    device_uuid: str | None


def stuck_processes(processes: Iterable[Mapping[str, Any]]) -> Iterator[StuckProcess]:
    """Yield the stuck ones of the API's processes. A process on several devices is yielded once, without a device."""
    named: set[ProcessKey] = set()
    each_process = [(process, ProcessKey(process["pid"], process.get("start_ticks"))) for process in processes]
    devices = Counter(key for _, key in each_process)
    for process, key in each_process:
        kind = _stuck_kind(process)
        if kind is None or key in named:
            continue
        named.add(key)
        where = next((f" in {word} {process[key]}" for word, key in _CONTAINER_FIELDS if process[key]), "")
        used = process["used_bytes"]
        program = process["workload"] or process["comm"] or "unknown program"
        states = [] if kind == "idle" else [_STATE_TEXTS.get(kind, f"is {kind}")]
        if kind == "holder" and process.get("orphaned"):
            states.append(_STATE_TEXTS["orphaned"])
        if _is_idle(process):
            states.append(f"has been idle for {duration_text(process['idle_seconds'])}")
        if used is not None:
            states.append(f"uses {size_text(used)}")
        what = f"pid {process['pid']} ({program}{where}) {list_text(states)}"
        uuid = process["device_uuid"] if devices[key] == 1 else None
        yield StuckProcess(process["pid"], kind, what, STUCK_REMEDIES[kind].format(pid=process["pid"]), uuid)


def _stuck_kind(process: Mapping[str, Any]) -> str | None:
    """Return the most severe kind that applies to the process."""
    if "holder" in process["kinds"]:
        return "holder"
    if process["state"] in STUCK_REMEDIES:
        return str(process["state"])
    if process.get("orphaned"):
        return "orphaned"
    return "idle" if _is_idle(process) else None


def _is_idle(process: Mapping[str, Any]) -> bool:
    return (process.get("idle_seconds") or 0) >= IDLE_SECONDS and (process["used_bytes"] or 0) >= IDLE_BYTES


_STATE_TEXTS = {
    "holder": "is not listed by the driver but has the GPU open",
    "orphaned": "has lost its parent",
    "uninterruptible": "is in uninterruptible sleep",
    "zombie": "is a zombie",
}
_CONTAINER_FIELDS = (
    ("pod", "pod_name"),
    ("container", "container_name"),
    ("container", "container"),
    ("Slurm job", "slurm_job"),
    ("unit", "unit"),
)
