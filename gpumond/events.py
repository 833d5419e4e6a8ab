"""Events: the changes between two frames. No I/O.

Events are for readers and for programs that react; counters, alerts and the audit record everything that must not be
lost. Ids increase, also over a restart of the daemon, and so does ``at``: the time of the frame that published the
event. The time of an earlier occurrence is in the details, the onset of a verdict in the summary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from gpumond.diagnosis.advice import advice_texts, context_of
from gpumond.diagnosis.failed_allocation import FailedAllocation
from gpumond.diagnosis.sentences import program_text
from gpumond.facts.alerts import ALERT_WAS, ENDED_PREFIX
from gpumond.facts.frame import Alert, Frame, Verdict
from gpumond.facts.pools import Receipt
from gpumond.facts.program import AllocationSite, Call, Ending, LiveClasses, Oom, OomPool, ProcessKey, location_text
from gpumond.facts.quota import GrantedRequest, QueuedRequest, only_free_clause
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.facts.suspension import SuspensionReceipt, largest_programs
from gpumond.facts.units import caller_text, clock_text, duration_text, size_text
from gpumond.facts.verdicts import PATTERN_NAMES
from gpumond.host.tasks import Broadcast

EventKind = Literal[
    "agent-connected",
    "agent-disconnected",
    "process-ended",
    "oom",
    "flush",
    "wait",
    "grant",
    "suspend",
    "resume",
    "alert-fired",
    "alert-resolved",
    "verdict-began",
    "verdict-ended",
    "device-lost",
    "device-back",
    "xid",
]

EVENT_MARKS: Mapping[EventKind, str] = {
    "oom": "✕",
    "xid": "✕",
    "device-lost": "○",
    "device-back": "●",
    "flush": "▼",
    "suspend": "■",
    "resume": "►",
    "process-ended": "○",
    "alert-fired": "▲",
    "verdict-began": "◆",
    "grant": "●",
    "wait": "○",
    "agent-connected": "●",
    "agent-disconnected": "○",
    "verdict-ended": "◇",
    "alert-resolved": "△",
}
"""Signs of events on the time axis of a chart, from blocks that all systems' fonts have. Of several events with one
cause, the first kind tells most.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change. ``at`` is the time of publication, ``summary`` one sentence, ``details`` are for programs;
    unknown is None.
    """

    id: int
    at: float
    kind: EventKind
    device_uuid: str | None
    pid: int | None
    start_ticks: int | None = None
    workload: str
    summary: str
    details: Details = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventState:
    """State that one frame passes to the next.

    ``ooms``: number of the last OOM snapshot that was reported, for each process that is or was connected. OOM
    snapshots from before ``since`` were reported by a previous daemon. ``departed``: workloads of agents that have
    disconnected, whose processes may end later.
    """

    last_id: int = 0
    since: float = 0.0
    frame: Frame | None = None
    ooms: Mapping[ProcessKey, int] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    departed: Mapping[ProcessKey, str] = field(default_factory=dict)


MAX_REMEMBERED = 4096


def advance_events(
    before: EventState,
    frame: Frame,
    raised: Sequence[Alert] = (),
    resolved: Sequence[Alert] = (),
    receipts: Sequence[Receipt] = (),
    exited_reports: Sequence[AgentReport] = (),
    suspensions: Sequence[SuspensionReceipt] = (),
) -> tuple[EventState, tuple[Event, ...]]:
    """Return the events of one tick, and the state for the next one.

    ``exited_reports``: the last reports of agents that have disconnected; they are in no frame, and some ended out of
    memory.
    """
    reported = dict(before.ooms)
    lost = set(before.lost)
    reports = frame.snapshot.reports_by_process
    earlier = before.frame.snapshot.reports_by_process if before.frame else {}
    now_departed = {key: report.workload for key, report in earlier.items() if key not in reports and report.workload}
    departed = (
        dict(list({**before.departed, **now_departed}.items())[-MAX_REMEMBERED:]) if now_departed else before.departed
    )
    drafts: list[Event] = [
        *_devices(before.frame, frame, lost),
        *_xids(before.frame, frame),
        *_agents(earlier, reports, frame.snapshot),
        *_process_ends(before.frame, frame, departed),
        *(
            event
            for process, report in (*((report.key, report) for report in exited_reports), *reports.items())
            if report.program.ooms or any(pool.ooms for pool in report.pools)
            for event in _ooms(report, before.frame, frame, reported, before.since)
        ),
        *(_flush(receipt, frame) for receipt in receipts if receipt.outcome != "planned"),
        *(_suspension(receipt, before.frame, frame) for receipt in suspensions),
        *_requests(before.frame, frame),
        *_verdicts(before.frame, frame, departed),
        *(_alert("alert-fired", alert) for alert in raised),
        *(_alert("alert-resolved", alert) for alert in resolved),
    ]
    at = frame.snapshot.taken_at
    events = tuple(replace(event, id=before.last_id + number, at=at) for number, event in enumerate(drafts, 1))
    ooms = dict(list(reported.items())[-MAX_REMEMBERED:])
    return EventState(
        last_id=before.last_id + len(events),
        since=before.since,
        frame=frame,
        ooms=ooms,
        lost=frozenset(lost),
        departed=departed,
    ), events


def _unnumbered_event(
    kind: EventKind,
    summary: str,
    device_uuid: str | None = None,
    process: ProcessKey | None = None,
    workload: str = "",
    details: Details = (),
) -> Event:
    """Make an event without its number and time."""
    return Event(
        id=0,
        at=0.0,
        kind=kind,
        device_uuid=device_uuid,
        pid=process.pid if process else None,
        start_ticks=process.start_ticks if process else None,
        workload=workload,
        summary=summary,
        details=details,
    )


def _report_event(
    report: AgentReport, kind: EventKind, summary: str, device_uuid: str | None = None, details: Details = ()
) -> Event:
    return _unnumbered_event(kind, summary, device_uuid, report.key, report.workload, details)


def _devices(before: Frame | None, frame: Frame, lost: set[str]) -> Iterator[Event]:
    previous = before.snapshot.devices_by_uuid if before else {}
    current = frame.snapshot.devices_by_uuid
    for uuid, device in previous.items():
        if device.up and (uuid not in current or not current[uuid].up):
            lost.add(uuid)
            faults = [fault.detail for fault in frame.snapshot.faults if fault.device_uuid in (None, uuid)]
            why = f": {faults[0]}" if faults else ""
            summary = f"GPU {device.index} can't be read{why}"
            yield _unnumbered_event("device-lost", summary, device_uuid=uuid)
    for uuid, device in current.items():
        if device.up and uuid in lost:
            lost.discard(uuid)
            summary = f"GPU {device.index} can be read again"
            yield _unnumbered_event("device-back", summary, device_uuid=uuid)


def _xids(before: Frame | None, frame: Frame) -> Iterator[Event]:
    previous = {(xid.device_uuid, xid.xid): xid.count for xid in (before.snapshot.xids if before else ())}
    for xid in frame.snapshot.xids:
        increase = xid.count - previous.get((xid.device_uuid, xid.xid), 0)
        if increase > 0:
            summary = f"{_gpu_name(frame, xid.device_uuid)} reported Xid error {xid.xid}"
            details: Details = (("xid", xid.xid), ("count", increase), ("occurred_at", xid.last_seen_at))
            yield _unnumbered_event("xid", summary, device_uuid=xid.device_uuid, details=details)


ENDINGS: Mapping[Ending | None, str] = {
    "error": " after an unhandled error",
    "out-of-memory": " after an unhandled out-of-memory error",
}


def _agents(
    previous: Mapping[ProcessKey, AgentReport], current: Mapping[ProcessKey, AgentReport], snapshot: Snapshot
) -> Iterator[Event]:
    endings = {end.key: end.ending for end in snapshot.ends}
    for process, report in current.items():
        if report.uses_device and (process not in previous or not previous[process].uses_device):
            summary = f"{_program_name(report)} connected: {', '.join(report.frameworks) or 'no framework yet'}"
            yield _report_event(report, "agent-connected", summary)
    for process, report in previous.items():
        if report.uses_device and process not in current:
            held = sum(pool.held_bytes for pool in report.pools if pool.inside is None)
            ending = endings.get(process)
            summary = (
                f"{_program_name(report)} disconnected{ENDINGS.get(ending, '')}; its allocators held {size_text(held)}"
            )
            details: Details = (("held_bytes", held), *((("ending", ending),) if ending else ()))
            yield _report_event(report, "agent-disconnected", summary, details=details)


def _process_ends(before: Frame | None, frame: Frame, departed: Mapping[ProcessKey, str]) -> Iterator[Event]:
    """Yield the ends of processes that held memory. A crash has the event of its verdict."""
    snapshot = frame.snapshot
    for device in before.snapshot.devices if before else ():
        device_now = snapshot.device(device.uuid)
        if device_now is None or device_now.missed_readings or device_now.processes is None:
            continue
        gone_processes = device.processes_by_key.keys() - device_now.processes_by_key.keys()
        names = _workloads_and_names(before, departed) if gone_processes else {}
        crashed = {each.process for each in frame.verdicts if each.kind == "crash" and each.device_uuid == device.uuid}
        for process in sorted(gone_processes - crashed, key=attrgetter("pid")):
            held = device.processes_by_key[process].used_bytes
            if not held or snapshot.may_contain(process):
                continue
            workload, name = names.get(process, ("", ""))
            who, where = program_text(name, process.pid, ""), _gpu_name(frame, device.uuid)
            yield _unnumbered_event(
                "process-ended",
                f"{who} has exited; it used {size_text(held)} on {where}",
                device_uuid=device.uuid,
                process=process,
                workload=workload,
                details=(("held_bytes", held),),
            )


def _ooms(
    report: AgentReport, before: Frame | None, frame: Frame, reported: dict[ProcessKey, int], since: float
) -> Iterator[Event]:
    process = report.key
    if not report.program.ooms:
        earlier = before.snapshot.reports_by_process.get(process) if before else None
        if earlier is not None:
            yield from _counted_ooms(report, earlier, frame)
        return
    last_number = reported.pop(process, 0)  # moved to the end: the newest processes are kept
    snapshots = [oom for oom in report.program.ooms if oom.number > last_number]
    reported[process] = max([last_number, *(oom.number for oom in snapshots)])
    for oom in snapshots:
        if oom.at >= since:
            limit = FailedAllocation(oom, report, before or frame).limit_reached_bytes
            details = (*oom_details(oom, limit), *_advice(report, oom, frame))
            yield _report_event(report, "oom", _oom_summary(report, oom, frame, limit), oom.device_uuid, details)


def _advice(report: AgentReport, oom: Oom, frame: Frame) -> Details:
    uuids = {pool.device_uuid for pool in oom.pools} if oom.device_uuid is None else {oom.device_uuid}
    if len(uuids) != 1:
        return ()
    context = replace(context_of(report, uuids.pop(), frame.snapshot), oom=oom)
    clauses = advice_texts(context)
    return (("advice", "; ".join(clauses)),) if clauses else ()


def _counted_ooms(report: AgentReport, before: AgentReport, frame: Frame) -> Iterator[Event]:
    """Yield the out-of-memory errors of an agent that sends no OOM snapshots."""
    counts = {(pool.allocator, pool.device_uuid): pool.ooms for pool in before.pools}
    for pool in report.pools:
        count = counts.get((pool.allocator, pool.device_uuid))
        if count is not None and pool.ooms is not None and pool.ooms > count:
            summary = f"{_program_name(report)} ran out of memory on {_gpu_name(frame, pool.device_uuid)}"
            details: Details = (("seen", "counter"),)
            if pool.live_bytes is not None:
                cached = max(0, pool.held_bytes - pool.live_bytes - pool.stranded_bytes)
                amounts = (("live_bytes", pool.live_bytes), ("cached_bytes", cached))
                details += (*amounts, ("stranded_bytes", pool.stranded_bytes))
            yield _report_event(report, "oom", summary, pool.device_uuid, details)


def _oom_summary(report: AgentReport, oom: Oom, frame: Frame, limit: int | None) -> str:
    where = "" if oom.device_uuid is None else f" on {_gpu_name(frame, oom.device_uuid)}"
    request = "" if oom.request_bytes is None else f" when it requested {size_text(oom.request_bytes)}"
    scope = f" in the scope {oom.scope}" if oom.scope else ""
    line = program_line_clause(oom.stack)
    later = " a moment later" if oom.seen == "counter" else ""  # the program may have freed memory since its error
    return f"{_program_name(report)} {oom_text(oom, limit)}{where}{scope}{line}{request}: {amounts_text(oom)}{later}"


def _user_names(frame: Frame) -> dict[int, str]:
    """Return the names of root and of the users whose processes use a device."""
    processes = (each for device in frame.snapshot.devices for each in device.processes or ())
    return {0: "root"} | {each.uid: each.user for each in processes if each.uid is not None and each.user}


def _flush(receipt: Receipt, frame: Frame) -> Event:
    name = program_text(receipt.workload, receipt.pid, "")
    where = f" on {_gpu_name(frame, receipt.device_uuid)}" if receipt.device_uuid else ""
    released = f", {receipt.allocator} released {size_text(receipt.released_bytes)}" if receipt.allocator else ""
    why = f" ({receipt.reason})" if receipt.reason else ""
    caller = caller_text(receipt.requested_by, receipt.requested_for, _user_names(frame).get)
    summary = f"flush of {name}{where} by {caller}: {receipt.outcome}{released}{why}"
    details: Details = (
        ("outcome", receipt.outcome),
        ("allocator", receipt.allocator or ""),
        ("released_bytes", receipt.released_bytes),
        ("requested_by", receipt.requested_by),
        ("duration_seconds", receipt.duration_seconds),
        ("started_at", receipt.started_at),
    )
    return _unnumbered_event(
        "flush",
        summary,
        device_uuid=receipt.device_uuid,
        process=ProcessKey(receipt.pid, receipt.start_ticks),
        workload=receipt.workload,
        details=details,
    )


def _suspension(receipt: SuspensionReceipt, before: Frame | None, frame: Frame) -> Event:
    suspended = (each for either in (frame, before) if either for each in either.snapshot.suspended_programs)
    memory = next((each.memory for each in suspended if each.key == receipt.key), ())
    uuid = memory[0].device_uuid if len(memory) == 1 else None
    where = f" on {_gpu_name(frame, uuid)}" if uuid else ""
    size = f", {size_text(receipt.expected_bytes)}" if receipt.expected_bytes is not None else ""
    why = f": {receipt.reason}" if receipt.reason else ""
    who = f"{receipt.workload or 'a program'} (pid {receipt.pid}{size})"
    by = caller_text(receipt.requested_by, receipt.requested_for, _user_names(frame).get)
    values = (
        ("outcome", receipt.outcome),
        ("expected_bytes", receipt.expected_bytes),
        ("released_bytes", receipt.released_bytes),
        ("host_bytes", receipt.host_bytes),
        ("requested_by", receipt.requested_by),
        ("requested_for", receipt.requested_for or None),
        ("duration_seconds", receipt.duration_seconds),
        ("started_at", receipt.started_at),
    )
    return _unnumbered_event(
        receipt.action,
        f"{who}{where} was {receipt.outcome} by {by}{why}"
        if receipt.outcome in ("suspended", "resumed")
        else f"request by {by} to {receipt.action} {who}{where}: {receipt.outcome}{why}",
        device_uuid=uuid,
        process=receipt.key,
        workload=receipt.workload,
        details=tuple((name, value) for name, value in values if value is not None),
    )


WAIT_SECONDS = 3.0
"""Time for which a request waits before it is an event: a resumption without a wait asks for two seconds."""


def _waiting(frame: Frame) -> set[str]:
    return {each.id for each in frame.queue if frame.snapshot.taken_at - each.since >= WAIT_SECONDS}


def _requests(before: Frame | None, frame: Frame) -> Iterator[Event]:
    """Yield the requests for memory that wait or are granted now, and weren't before."""
    at = frame.snapshot.taken_at
    waited = {each.id: each for each in (before.queue if before else ())}
    waiting_before = _waiting(before) if before else set()
    granted = {each.id for each in (before.grants if before else ())}
    for request in frame.queue:
        if request.id in _waiting(frame) - waiting_before:
            where, holders = _gpu_name(frame, request.device_uuid), [*map(str, request.holders)]
            held = f"; {largest_programs(where, holders)}" if holders else ""
            summary = f"{_requester(request)} is waiting for {size_text(request.need_bytes)} on {where}{held}"
            yield _request_event("wait", summary, request, (("occurred_at", request.since),))
    for grant in frame.grants:
        if grant.id not in granted:
            queued = waited.get(grant.id)
            after = f" after {duration_text(at - queued.since)}" if queued else ""
            where = _gpu_name(frame, grant.device_uuid)
            summary = f"{_requester(grant)} was granted {size_text(grant.need_bytes)} of {where}"
            seconds: Details = (("waited_seconds", at - queued.since),) if queued else ()
            device = frame.snapshot.device(grant.device_uuid)
            short = only_free_clause(grant.unused_bytes, device.free_bytes if device else None)
            yield _request_event("grant", f"{summary}{after}{short}", grant, seconds)


def _requester(request: QueuedRequest | GrantedRequest) -> str:
    return request.workload or "a program" if request.pid is None else program_text(request.workload, request.pid, "")


def _request_event(
    kind: EventKind, summary: str, request: QueuedRequest | GrantedRequest, details: Details = ()
) -> Event:
    process = None if request.pid is None else ProcessKey(request.pid, None)
    common: Details = (("request", request.id), ("need_bytes", request.need_bytes))
    user: Details = (("user", request.user),) if request.user else ()
    return _unnumbered_event(kind, summary, request.device_uuid, process, request.workload, (*common, *user, *details))


def _verdicts(before: Frame | None, frame: Frame, departed: Mapping[ProcessKey, str]) -> Iterator[Event]:
    previous, now = _verdicts_by_key(before), _verdicts_by_key(frame)
    kinds: tuple[tuple[EventKind, Mapping[object, Verdict], Mapping[object, Verdict]], ...] = (
        ("verdict-began", now, previous),
        ("verdict-ended", previous, now),
    )
    at = frame.snapshot.taken_at
    for kind, verdicts, counterparts in kinds:
        for key, verdict in verdicts.items():
            if key in counterparts or verdict.kind in (*PATTERN_NAMES, "growing"):  # suspected only: it comes and goes
                continue
            names, process = _workloads_and_names(frame), verdict.process
            workload, name = names.get(process) or _workloads_and_names(before, departed).get(process) or ("", "")
            who = _who_on_device(
                program_text(name, process.pid, "") if process else "", _gpu_name(frame, verdict.device_uuid)
            )
            if kind == "verdict-began":
                summary = _sentence_with_onset(verdict, who, at)
            else:
                gone = ", because the process has exited" if process and process not in names else ""
                ended = "is no longer shown" if verdict.kind in MOMENTARY_VERDICTS else "ended"
                summary = f"{verdict.kind} {ended}: {who}{gone}"
            details: Details = (("verdict", verdict.kind), ("since", verdict.since), *verdict.evidence)
            yield _unnumbered_event(
                kind,
                summary,
                device_uuid=verdict.device_uuid,
                process=verdict.process,
                workload=workload,
                details=details,
            )


def _verdicts_by_key(frame: Frame | None) -> Mapping[object, Verdict]:
    verdicts = frame.verdicts if frame else ()
    return {(verdict.device_uuid, verdict.process, verdict.kind): verdict for verdict in verdicts}


def _sentence_with_onset(verdict: Verdict, who: str, at: float) -> str:
    """Return the verdict's sentence, with its onset if that was before now."""
    summary = verdict.summary or f"{who}: {verdict.kind}"
    states_onset = at - verdict.since < 1.0 or "since " in summary
    word = "at" if verdict.kind in MOMENTARY_VERDICTS else "since"
    return summary if states_onset else f"{summary} ({word} {clock_text(verdict.since, at)})"


def _workloads_and_names(
    frame: Frame | None, departed: Mapping[ProcessKey, str] = {}
) -> Mapping[ProcessKey | None, tuple[str, str]]:
    """Return workload and name of every process in the frame: the name is the workload or the command's name."""
    names: dict[ProcessKey | None, tuple[str, str]] = {}
    if frame is None:
        return names
    for device in frame.snapshot.devices:
        names.update(
            (key, (departed.get(key, ""), departed.get(key) or process.comm or ""))
            for key, process in device.processes_by_key.items()
        )
    for key, report in frame.snapshot.reports_by_process.items():
        names[key] = (report.workload, report.workload or names.get(key, ("", ""))[1])
    return names


def _alert(kind: EventKind, alert: Alert) -> Event:
    labels, annotations = dict(alert.labels), dict(alert.annotations)
    pid, workload = labels.get("pid", ""), labels.get("workload", "")
    process = alert.process or (ProcessKey(int(pid), None) if pid.isdecimal() else None)
    who = _who_on_device(program_text(workload, process.pid, "") if process else workload, _device_name(labels))
    summary = annotations.get("summary") or f"{alert.rule}: {who}".removesuffix(": ")
    if kind == "alert-resolved" and ALERT_WAS not in summary:
        summary = f"{alert.rule} resolved{ALERT_WAS}{summary}"
    elif kind == "alert-resolved" and summary.startswith(ENDED_PREFIX):
        summary = f"{alert.rule} {summary}"
    details: Details = (("rule", alert.rule), ("value", alert.value), *alert.labels)
    return _unnumbered_event(
        kind, summary, device_uuid=labels.get("uuid"), process=process, workload=workload, details=details
    )


def _device_name(labels: Mapping[str, str]) -> str:
    return f"GPU {labels['gpu']}" if labels.get("gpu") else labels.get("uuid", "")


def _who_on_device(who: str, device: str) -> str:
    return " on ".join(part for part in (who, device) if part)


def _program_name(report: AgentReport) -> str:
    return f"{report.workload or 'a program'} (pid {report.pid})"


def _gpu_name(frame: Frame, uuid: str) -> str:
    device = frame.snapshot.device(uuid)
    return uuid if device is None else f"GPU {device.index}"


SHOWN_CALLS, SHOWN_THREAD_CALLS, SHOWN_THREADS = 8, 3, 4
SHOWN_SCOPES, SHOWN_CLASSES, SHOWN_SITES = 8, 8, 4
MAX_CALL_CHARACTERS = 200
"""Longest text of a call: an agent may send any."""
LIBRARY_PATHS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/gpumond/sim/device.py",
    "/gpumond/sim/allocator.py",
    "<",
)
"""Parts of the names of files that are not the program's own, unless these end with one of ``PROGRAM_PATHS``."""
PROGRAM_PATHS = ("<string>", "<stdin>", "/gpumond/sim/programs.py")

END_EVENT: EventKind = "process-ended"
"""Kind of the event from which clients know the earlier processes of a workload."""

REPEAT_SECONDS: dict[EventKind, int] = {"oom": 60}
"""Seconds after an event of a kind within which another one of the same cause is a repeat."""

MOMENTARY_VERDICTS = ("crash", "memory-freed")
"""Kinds of verdicts on what happened at one moment; they're shown for some time."""

CONSEQUENCES: Mapping[EventKind, tuple[EventKind, ...]] = {
    "process-ended": ("agent-disconnected", "verdict-ended", "alert-resolved"),
    "agent-disconnected": ("verdict-ended", "alert-resolved"),
    "alert-fired": ("verdict-began",),
    "verdict-ended": ("alert-resolved",),
}
"""Kinds of events that are listed under an event of the same process, because they follow from it or have its rule."""

Details = tuple[tuple[str, int | float | str], ...]


def amounts_text(oom: Oom) -> str:
    """Return the live, cached and stranded bytes of the device that was full as text."""
    live, cached, stranded = _sums_of_full_device(oom)
    return f"{size_text(live)} live, {size_text(cached)} cached, {size_text(stranded)} stranded"


def oom_details(oom: Oom, limit: int | None = None) -> Details:
    """Return the known values for the details of an event. ``limit``: the program's own, if it was reached."""
    live, cached, stranded = _sums_of_full_device(oom)
    largest = [pool.largest_free_bytes for pool in _pools_of_full_device(oom) if pool.largest_free_bytes is not None]
    values: list[tuple[str, int | float | str | None]] = [
        ("number", oom.number),
        ("seen", oom.seen),
        ("scope", oom.scope or None),
        ("request_bytes", oom.request_bytes),
        ("limit_bytes", limit),
        ("live_bytes", live),
        ("cached_bytes", cached),
        ("stranded_bytes", stranded),
        ("largest_free_bytes", max(largest, default=None)),
        ("occurred_at", oom.at),
        *((f"retained_bytes {scope.name}", scope.retained_bytes) for scope in oom.scopes),
        ("open_scopes", ", ".join(oom.open_scopes[:SHOWN_SCOPES]) or None),
        *_classes(oom.device_uuid, oom.classes[:SHOWN_CLASSES]),
        *_sites(oom.sites),
        ("line", program_line(oom.stack) or None),
        ("stack", stack_text(oom.stack[:SHOWN_CALLS]) or None),
        *(
            (f"thread {thread.thread}", stack_text(thread.calls[:SHOWN_THREAD_CALLS]))
            for thread in oom.threads[:SHOWN_THREADS]
        ),
    ]
    return tuple((name, value) for name, value in values if value is not None)


def oom_text(oom: Oom, limit: int | None) -> str:
    """Return what happened. ``limit``: the program's own, if it was reached."""
    if oom.seen == "oom_pool":
        return "has used its out-of-memory pool"
    return "ran out of memory" if limit is None else f"reached its limit of {size_text(limit)}"


def program_line_clause(calls: Sequence[Call]) -> str:
    """Return the program's own line, such as `` in `step` at train.py:31``; empty if it isn't known.

    A line of ``python -c`` isn't in a file: only its function is a place.
    """
    if not program_line(calls):
        return ""
    call = program_calls(calls)[0]
    where = "" if call.function in ("", "<module>") else f" in `{call.function}`"
    return (where if call.file == "<string>" else f"{where} at {location_text(call)}")[-MAX_CALL_CHARACTERS:]


def program_line(calls: Sequence[Call]) -> str:
    """Return the innermost call of the program itself, such as ``train.py:31 step``; empty if there is none."""
    shown = program_calls(calls)
    return call_text(shown[0]) if shown and not _is_library_call(shown[0]) else ""


def program_calls(calls: Sequence[Call]) -> Sequence[Call]:
    """Return the calls from the innermost one of the program itself on; all of them if there is none."""
    begin = next((index for index, call in enumerate(calls) if not _is_library_call(call)), 0)
    return calls[begin:]


def _is_library_call(call: Call) -> bool:
    return not call.file.endswith(PROGRAM_PATHS) and any(part in call.file for part in LIBRARY_PATHS)


def call_text(call: Call) -> str:
    return f"{location_text(call)} {call.function}"[-MAX_CALL_CHARACTERS:]


def stack_text(calls: Sequence[Call]) -> str:
    """Return calls in one line, innermost first."""
    return " < ".join(map(call_text, calls))


def _classes(device_uuid: str | None, classes: Sequence[LiveClasses]) -> Iterator[tuple[str, int]]:
    for classes_of_pool in classes:
        if device_uuid in (None, classes_of_pool.device_uuid):
            sizes = (
                ("parameters_bytes", classes_of_pool.parameters_bytes),
                ("gradients_bytes", classes_of_pool.gradients_bytes),
                ("optimizer_bytes", classes_of_pool.optimizer_bytes),
                ("buffers_bytes", classes_of_pool.buffers_bytes),
                ("tensors_bytes", classes_of_pool.tensors_bytes),
                ("activations_bytes", classes_of_pool.activations_bytes),
                ("unclassified_bytes", classes_of_pool.unknown_bytes or None),
            )
            yield from ((f"{classes_of_pool.allocator} {name}", size) for name, size in sizes if size is not None)


def _sites(sites: Sequence[AllocationSite]) -> Iterator[tuple[str, str]]:
    for number, site in enumerate(sites[:SHOWN_SITES], 1):
        yield (
            f"allocation site {number}",
            f"{size_text(site.size_bytes)}: {stack_text(site.calls[:SHOWN_THREAD_CALLS])}",
        )


def _sums_of_full_device(oom: Oom) -> tuple[int, int, int]:
    pools = _pools_of_full_device(oom)
    return (
        sum(pool.live_bytes for pool in pools),
        sum(pool.cached_bytes for pool in pools),
        sum(pool.stranded_bytes for pool in pools),
    )


def _pools_of_full_device(oom: Oom) -> list[OomPool]:
    """Return the pools of the device that was full; all of them if the device is unknown."""
    return [pool for pool in oom.pools if oom.device_uuid in (None, pool.device_uuid)]


MAX_EVENTS = 1000


class EventLog:
    """Log of the newest ``capacity`` events, on one event loop.

    Ids start at 1000 times the Unix time of the daemon's start, so they increase across restarts.
    """

    def __init__(self, started_at: float, capacity: int = MAX_EVENTS) -> None:
        self._state = EventState(last_id=int(started_at) * 1000, since=started_at)
        self._receipts: list[Receipt] = []
        self._suspensions: list[SuspensionReceipt] = []
        self._events: deque[Event] = deque(maxlen=capacity)
        self._published = Broadcast()

    def add_receipt(self, receipt: Receipt) -> None:
        """Record a receipt; its event is published with the next frame."""
        self._receipts.append(receipt)

    def add_suspension_receipt(self, receipt: SuspensionReceipt) -> None:
        """Record the receipt of a suspension or resumption; its event is published with the next frame."""
        self._suspensions.append(receipt)

    def publish(
        self,
        frame: Frame,
        raised: Sequence[Alert] = (),
        resolved: Sequence[Alert] = (),
        exited_reports: Sequence[AgentReport] = (),
    ) -> tuple[Event, ...]:
        """Publish the events between the previous frame and this one."""
        self._state, events = advance_events(
            self._state, frame, raised, resolved, self._receipts, exited_reports, self._suspensions
        )
        self._receipts.clear()
        self._suspensions.clear()
        self._events.extend(events)
        if events:
            self._published.send()
        return events

    @property
    def last_id(self) -> int:
        return self._state.last_id

    def newest(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def after(self, last_id: int) -> tuple[Event, ...]:
        """Return the events after ``last_id`` that are still kept."""
        return tuple(event for event in self._events if event.id > last_id)

    @property
    def before_id(self) -> int:
        """Id of the last event that is no longer kept, or that a previous daemon published."""
        return self._events[0].id - 1 if self._events else self.last_id

    async def wait(self, seconds: float) -> bool:
        """Wait for new events. Returns False on timeout."""
        return await self._published.wait(seconds)
