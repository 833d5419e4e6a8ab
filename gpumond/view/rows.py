"""Rows for the devices, processes and engines of a frame. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from gpumond.facts.program import ProcessKey, process_key
from gpumond.facts.quota import MAX_SHOWN_EARLIER, only_free_clause
from gpumond.facts.shares import SHARES
from gpumond.facts.snapshot import MAX_MISSED_READINGS
from gpumond.facts.suspension import MemoryHolder, largest_programs
from gpumond.facts.units import duration_text, list_text, plural, size_text
from gpumond.facts.verdicts import PATTERN_NAMES, VERDICT_NAMES
from gpumond.view.text import cut, printable_excerpt

Engine = Mapping[str, Any]


def engines_by_process(frame: Mapping[str, Any]) -> dict[ProcessKey, Engine]:
    return {
        ProcessKey(process["pid"], process["start_ticks"]): engine
        for engine in frame["snapshot"].get("engines", ())
        for process in engine["processes"]
    }


def kv_cache_bytes(engine: Engine, max_bytes: int | None) -> int | None:
    """Return the size of the engine's KV cache; None if it is unknown, or cannot be a part of ``max_bytes``."""
    stated = engine.get("kv_cache_bytes")
    return stated if stated and not engine["sleeping"] and stated <= (max_bytes or 0) else None


def kv_cache_share(process: Mapping[str, Any]) -> str:
    """Return the share that contains the KV cache: without an agent all memory of a process is opaque."""
    return "opaque" if process["live_bytes"] is None else "live"


def kv_cache_sentences(frame: Mapping[str, Any]) -> dict[tuple[str, ProcessKey], str]:
    """Return, by device and process, which part of its memory is KV cache and is in use, as far as it is known.

    The size is that of the whole engine, so it is stated only if one process on one device holds it.
    """
    engines = engines_by_process(frame)
    processes = [(each, ProcessKey(each["pid"], each["start_ticks"])) for each in frame["processes"]]
    counts = Counter(engines[key]["name"] for _, key in processes if key in engines)
    found: dict[tuple[str, ProcessKey], str] = {}
    for process, key in processes:
        engine = engines.get(key)
        if engine is None or engine["sleeping"] or engine["kv_cache_used_ratio"] is None:
            continue
        is_alone, share = counts[engine["name"]] == 1, process[f"{kv_cache_share(process)}_bytes"]
        stated = kv_cache_bytes(engine, share) if is_alone else None
        size = "" if stated is None else f"{size_text(stated)}, "
        found[process["device_uuid"], key] = f"KV cache: {size}{engine['kv_cache_used_ratio']:.0%} in use"
    return found


PROCESS_SHARES = ("live", "cached", "stranded", "overhead", "opaque")
"""The shares that a process can have."""

SubjectKey = tuple[str, ProcessKey | None]
"""Device UUID and process; a device as a whole has no process."""

ProcessOnDevice = tuple[str, ProcessKey]
"""Device UUID and process"""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device. ``shares`` is empty and ``reclaimable_bytes`` None if its memory is unknown.

    ``state`` is empty without a problem.
    """

    uuid: str
    index: int
    name: str
    pci_bus_id: str
    parent_uuid: str | None
    size_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None
    overcount_bytes: int
    shares: Mapping[str, int]
    unmapped_bytes: int
    reclaimable_bytes: int | None
    state: str
    busy_ratio: float | None
    celsius: float | None
    watts: float | None
    waiting_bytes: int = 0
    """The free memory that requests wait for; they may need more."""
    host: str = ""
    """Name of the daemon, if there are several."""

    @property
    def label(self) -> str:
        """Return the index, after the name of the daemon if there are several."""
        return f"{self.host}:{self.index}" if self.host else str(self.index)


class ProcessSources(NamedTuple):
    """The parts of a frame about a process: itself, the report of its agent and its serving engine, if any."""

    process: Mapping[str, Any]
    report: Mapping[str, Any] | None
    engine: Mapping[str, Any] | None


class HostStats(NamedTuple):
    """What the operating system knows about a process: its command line, seconds since its start, its host memory, and
    its part of one processor (1.0 is one core); None if it is unknown.
    """

    command: str
    age_seconds: float
    resident_bytes: int
    cpu_ratio: float | None


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process on one device. ``verdicts`` are sentences.

    ``container`` is the pod or container. ``overhead_parts``: a text, empty if they are unknown. ``kv_cache``: the
    share that contains the KV cache of a serving engine, and a text about it; None if it is unknown.
    """

    key: ProcessOnDevice
    gpu: str
    pid: int
    program: str
    user: str
    uid: int | None
    container: str
    busy_ratio: float | None
    used_bytes: int | None
    shares: Mapping[str, int | None]
    unmapped_bytes: int | None
    limit_bytes: int | None
    overhead_parts: str
    kv_cache: tuple[str, str] | None
    verdict: str
    status: str
    """What one column says: that the process is suspended or in trouble, its most severe alert or verdict, or how it
    is odd.
    """
    level: str
    """``bad`` with a critical alert, ``warn`` with another alert or a verdict on a problem, else empty."""
    state: str
    flush_policy: str | None
    verdicts: tuple[str, ...]
    sources: ProcessSources
    alert: str = ""
    """The rule of the alert that ``status`` names."""

    @property
    def waste_bytes(self) -> int | None:
        """Return the cached and stranded bytes; None if the caches are unknown."""
        cached = self.shares["cached"]
        return None if cached is None else cached + (self.shares["stranded"] or 0)

    other_problems: int = 0
    """The alerts and verdicts on problems that ``status`` does not name."""
    host: HostStats | None = None
    """Facts of this machine, in `top` if the process runs here."""

    def status_in(self, width: int = 40) -> str:
        """Return the status in at most ``width`` columns, with the number of the others: ``leak +1``."""
        end = f" +{self.other_problems}" if self.other_problems else ""
        return cut(self.status, width - len(end)) + end

    @property
    def is_notable(self) -> bool:
        return bool(self.level)

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of a term and a value. Computed at each call, since few rows need them."""
        return tuple(
            (term, printable_excerpt(value, 120)) for term, value in _details(self.state, *self.sources) if value
        )

    @property
    def search_text(self) -> str:
        """Return the text that the filter searches, in lower case."""
        values = (value for _, value in self.details)
        return " ".join((f"gpu {self.gpu}", str(self.pid), self.program, self.user, self.verdict, *values)).lower()


def cached_lines(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["share"] == "cached"]


def process_of(value: Mapping[str, Any]) -> ProcessKey | None:
    """Return the process of a line, a report, a verdict or a process; None if it concerns a whole device."""
    return process_key(value["pid"], value.get("start_ticks"))


SEVERITIES = {"critical": 0, "page": 0, "info": 2}
CRITICAL, WARNING, INFO = range(3)


def severity(alert: Mapping[str, Any]) -> int:
    return SEVERITIES.get(dict(alert["labels"]).get("severity", ""), WARNING)


def sort_by_urgency(
    alerts: Iterable[Mapping[str, Any]], verdicts: Iterable[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], float]]:
    """Return alerts, each with the seconds until its device is full (infinite if its verdict doesn't predict any).

    Those that fire precede pending ones, and silenced ones are last. Then the severity counts, then these seconds, then
    the time since which an alert fires.
    """
    seconds_left = {(each["kind"], each["device_uuid"], each["pid"]): time_to_full(each) for each in verdicts}
    found = [(each, seconds_left.get((each["rule"], _subject(each)[0], each["pid"]), inf)) for each in alerts]

    def key(pair: tuple[Mapping[str, Any], float]) -> tuple[bool, bool, int, float, float]:
        alert, full_in = pair
        since = alert["fired_at"] or alert["active_at"]
        return bool(alert.get("silenced_by")), alert["phase"] != "firing", severity(alert), full_in, since

    return sorted(found, key=key)


def time_to_full(verdict: Mapping[str, Any]) -> float:
    """Return the seconds until its device is full; infinite if it doesn't predict any."""
    seconds = verdict["time_to_full_seconds"]
    return inf if seconds is None else float(seconds)


def _subject(alert: Mapping[str, Any]) -> SubjectKey:
    return dict(alert["labels"]).get("uuid", ""), process_of(alert)


def reclaimable_bytes(lines: Iterable[Mapping[str, Any]], refusing: Collection[ProcessKey | None]) -> int | None:
    """Return the bytes that a flush would release, processes that refuse excluded. None if no cache is reported."""
    cached = cached_lines(lines)
    return sum(line["used_bytes"] for line in cached if process_of(line) not in refusing) if cached else None


def _bytes_by_share(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of each share, in the order of the shares."""
    found: dict[str, int] = {}
    for line in lines:
        found[line["share"]] = found.get(line["share"], 0) + line["used_bytes"]
    return {share: found[share] for share in SHARES if share in found}


def device_rows(frame: Mapping[str, Any], refusing: Collection[ProcessKey | None]) -> Iterator[DeviceRow]:
    overcounts = {each["device_uuid"]: each["overcount_bytes"] for each in frame["ledger"]["overcounts"]}
    lines_by_device: dict[str, list[Mapping[str, Any]]] = {}
    for line in frame["ledger"]["lines"]:
        lines_by_device.setdefault(line["device_uuid"], []).append(line)
    unmapped: Counter[str] = Counter()
    for process in frame["processes"]:
        unmapped[process["device_uuid"]] += process.get("unmapped_bytes") or 0
    for device in frame["snapshot"]["devices"]:
        lines, sensors = lines_by_device.get(device["uuid"], []), device["sensors"]
        yield DeviceRow(
            uuid=str(device["uuid"]),
            index=int(device["index"]),
            name=printable_excerpt(device["name"], 60),
            pci_bus_id=printable_excerpt(device["pci_bus_id"], 40),
            parent_uuid=device["parent_uuid"],
            size_bytes=device["size_bytes"],
            used_bytes=device["used_bytes"],
            free_bytes=device["free_bytes"],
            reserved_bytes=device["reserved_bytes"],
            overcount_bytes=overcounts.get(device["uuid"], 0),
            shares=_bytes_by_share(lines),
            unmapped_bytes=unmapped[device["uuid"]],
            reclaimable_bytes=reclaimable_bytes(lines, refusing),
            state=_device_state(device, frame["snapshot"]["source"]["reason"]),
            busy_ratio=sensors["gpu_utilization_ratio"],
            celsius=sensors["gpu_temperature_celsius"],
            watts=sensors["power_watts"],
            waiting_bytes=_waiting_bytes(frame, device),
        )


def _waiting_bytes(frame: Mapping[str, Any], device: Mapping[str, Any]) -> int:
    """Return the part of the free memory that requests wait for: what grants and reserves leave of it."""
    uuid = device["uuid"]
    needed, granted = (
        sum(each[name] for each in frame[kind] if each["device_uuid"] == uuid)
        for kind, name in (("queue", "need_bytes"), ("grants", "unused_bytes"))
    )
    left = (device["free_bytes"] or 0) - granted - sum(_unused_reserves(frame, uuid).values())
    return int(max(0, min(needed, left)))


def _device_state(device: Mapping[str, Any], reason: str | None) -> str:
    if reason == "released":
        return "detached: values not shown" if device["used_bytes"] is None else "detached"
    missed = device["missed_readings"]
    readings = plural(missed, "reading")
    if missed >= MAX_MISSED_READINGS:
        return f"no response for {readings}: values not shown"
    if missed:
        return f"values from {readings} ago"
    return "" if device["up"] else "faulty"


def requester(request: Mapping[str, Any]) -> str:
    """Return the program of a request for memory, such as ``train (pid 7, ann)``."""
    pid = "" if request["pid"] is None else f"pid {request['pid']}"
    first, *more = [printable_excerpt(each) for each in (request["workload"], pid, request["user"]) if each] or [
        "a program"
    ]
    return f"{first} ({', '.join(more)})" if more else first


def requests_ahead(ahead: int, earlier: Sequence[Mapping[str, Any]]) -> str:
    """Return which requests precede one, such as ``behind pretrain (20.0 GiB) and 2 more``."""
    named = [each["workload"] or ("a program" if each["pid"] is None else f"pid {each['pid']}") for each in earlier]
    shown = [
        f"{printable_excerpt(name)} ({size_text(each['need_bytes'])})"
        for name, each in zip(named, earlier, strict=True)
    ][:MAX_SHOWN_EARLIER]
    if not shown:
        return f"behind {plural(ahead, 'other request')}"
    if more := ahead - len(shown):
        shown.append(f"{more} more")
    return f"behind {list_text(shown)}"


def claimed_bytes(request: Mapping[str, Any]) -> int | None:
    """Return the available bytes if requests before this one claim all of them; else None."""
    available, claimed = request["available_bytes"], request.get("claimed_bytes") or 0
    return max(0, available + claimed) if claimed and available is not None and available <= 0 else None


def earlier_requests(frame: Mapping[str, Any], request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the requests for the same device whose turn is before, the next one first."""
    queue = (each for each in frame["queue"] if each["device_uuid"] == request["device_uuid"])
    return sorted((each for each in queue if each["ahead"] < request["ahead"]), key=lambda each: int(each["ahead"]))


def queue_position_sentence(frame: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """Return the place of a request in the queue, as a sentence; empty for the first."""
    ahead = request["ahead"]
    before = requests_ahead(ahead, earlier_requests(frame, request))
    room = claimed_bytes(request)
    claim = f"; the available {size_text(room)} is kept for earlier requests" if room else ""
    return f"{requester(request)} is number {ahead + 1} in the queue, {before}{claim}" if ahead else ""


def reserve_sentences(frame: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about each request that waits for a device of which a quota reserves unused memory."""
    gpus = {device["uuid"]: f"GPU {device['index']}" for device in frame["snapshot"]["devices"]}
    for request in frame["queue"]:
        for quota, unused in _unused_reserves(frame, request["device_uuid"]).items():
            gpu = gpus.get(request["device_uuid"], "its GPU")
            yield (
                f"{requester(request)} is waiting for {size_text(request['need_bytes'])} on {gpu}, where the quota "
                f"{printable_excerpt(quota)} reserves {size_text(unused)} that its programs aren't using"
            )


def _unused_reserves(frame: Mapping[str, Any], uuid: str) -> Mapping[str, int]:
    """Return, by quota, the part of its reserve on a device that its processes neither use nor are granted."""
    reserves, used, granted = dict[str, int](), Counter[str](), Counter[str]()
    for process in frame["processes"]:
        quota = process["quota"]
        if process["device_uuid"] == uuid and quota and quota["reserve_bytes"] and process["used_bytes"] is not None:
            reserves[quota["reserve_quota"]] = quota["reserve_bytes"]
            used[quota["reserve_quota"]] += process["used_bytes"]
    quota_of = {each["pid"]: each["quota"]["reserve_quota"] for each in frame["snapshot"]["quotas"]}
    for grant in frame["grants"]:
        if grant["device_uuid"] == uuid:
            granted[quota_of.get(grant["pid"], "")] += grant["need_bytes"]
    unused = {name: size - max(used[name], granted[name]) for name, size in reserves.items()}
    return {name: size for name, size in unused.items() if size > 0}


def holders_sentence(request: Mapping[str, Any], device: str) -> str:
    """Return who holds or is granted most of the device that a request waits for; empty if nobody does."""
    holders = [
        printable_excerpt(str(MemoryHolder(**{name: each[name] for name in MemoryHolder.__slots__})))
        for each in request.get("holders") or ()
    ]
    return largest_programs(device, holders) if holders else ""


def taken_memory_sentences(frame: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about each device of which other programs use memory that belongs to grants or reserves."""
    gpus = {device["uuid"]: device["index"] for device in frame["snapshot"]["devices"]}
    for request in frame["queue"]:
        taken_bytes = -(request["available_bytes"] or 0)
        if taken_bytes > 0 and not request["ahead"]:  # the earlier requests would count as well
            gpu = f"GPU {gpus.get(request['device_uuid'], '?')}"
            yield f"programs on {gpu} use {size_text(taken_bytes)} that is granted to or reserved for other programs"


def request_advice(frame: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """Return what helps a request that waits, as a sentence; empty if nothing is known.

    Another device may have room. A suspended program can be resumed on its own devices only.
    """
    if request["pid"] in {each["pid"] for each in frame["snapshot"].get("suspended_programs") or ()}:
        resumed = f"{requester(request)} will be resumed as soon as it fits"
        return f"{resumed}; to make room, flush, suspend or stop another program on its GPU"
    granted = Counter[str]()
    for grant in frame.get("grants") or ():
        granted[grant["device_uuid"]] += grant["unused_bytes"]
    devices = frame["snapshot"]["devices"]
    split = {device["parent_uuid"] for device in devices} | {request["device_uuid"]}
    free = [
        (device["free_bytes"] - granted[device["uuid"]], -device["index"])
        for device in devices
        if device["uuid"] not in split and device["up"] and device["free_bytes"] is not None
    ]
    size, index = max(free, default=(0, 0))
    if size < request["need_bytes"]:
        return ""
    other = f"GPU {-index} has {size_text(size)} available"
    return f"{other}: to use it, start {requester(request)} with --need-device {-index}"


def waiting_sentences(frame: Mapping[str, Any]) -> Iterator[str]:
    """Yield, for each request that waits, a sentence about the largest programs on its device."""
    gpus = {device["uuid"]: f"GPU {device['index']}" for device in frame["snapshot"]["devices"]}
    for request in frame["queue"]:
        if holders := holders_sentence(request, gpus.get(request["device_uuid"], "its GPU")):
            yield f"{requester(request)} is waiting; {holders}"


def grant_sentences(frame: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about each grant whose memory isn't all held yet."""
    devices = {device["uuid"]: device for device in frame["snapshot"]["devices"]}
    for grant in frame.get("grants") or ():
        device = devices.get(grant["device_uuid"])
        name, free = (f"GPU {device['index']}", device["free_bytes"]) if device else (grant["device_uuid"], None)
        unused = grant["unused_bytes"]
        used = grant["need_bytes"] - unused
        so_far = f"uses {size_text(used)} of it so far" if used else "isn't using it yet"
        granted = f"{size_text(grant['need_bytes'])} of {name} is granted to {requester(grant)}"
        yield f"{granted}, which {so_far}{only_free_clause(unused, free)}"


def suspension_sentence(program: Mapping[str, Any], now: float) -> str:
    """Return the state of a program that gpumond has suspended, such as ``suspended for 2 h; 60.0 GiB on the host;
    needs 61.2 GiB to resume (overhead included)``.
    """
    suspended = duration_text(max(0.0, now - program["since"]))
    since = program.get("resume_since")
    if since is None:
        parts = [f"{_suspension_state(program)} for {suspended}"]
    else:
        parts = [
            f"{_suspension_state(program)} for {duration_text(max(0.0, now - since))}",
            f"suspended for {suspended}",
        ]
    if program["host_bytes"] is not None:
        parts.append(f"{size_text(program['host_bytes'])} on the host")
    parts.append(
        f"needs {size_text(sum(each['used_bytes'] for each in program['memory']))} to resume (overhead included)"
    )
    return "; ".join([*parts, program["reason"]] if program["reason"] else parts)


def _suspension_state(program: Mapping[str, Any]) -> str:
    return "waiting to resume" if program["state"] == "waiting" else str(program["state"])


def suspension_sentences(frame: Mapping[str, Any]) -> dict[ProcessKey | None, str]:
    """Return the sentences of all programs that gpumond has suspended."""
    snapshot = frame["snapshot"]
    programs = snapshot.get("suspended_programs") or ()
    return {process_of(each): suspension_sentence(each, snapshot["taken_at"]) for each in programs}


def _alerts_in_effect(frame: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alerts, except those that outlive their verdict: what they say is over."""
    active = {(each["kind"], each["device_uuid"], process_of(each)) for each in frame["verdicts"]}
    return [
        alert
        for alert in frame["alerts"]
        if alert["rule"] not in VERDICT_NAMES or (alert["rule"], *_subject(alert)) in active
    ]


def _firing_rules(alerts: Iterable[Mapping[str, Any]]) -> dict[SubjectKey, dict[str, int]]:
    """Return the rules of each process's alerts that are firing and not silenced, the most severe first."""
    found: dict[SubjectKey, dict[str, int]] = {}
    for alert in sorted(alerts, key=severity):
        if alert["phase"] == "firing" and not alert.get("silenced_by") and severity(alert) != INFO:
            found.setdefault(_subject(alert), {}).setdefault(alert["rule"], severity(alert))
    return found


def process_rows(frame: Mapping[str, Any]) -> Iterator[ProcessRow]:
    """Yield processes, the one that holds most memory first."""
    suspended = suspension_sentences(frame)
    suspension_states = {
        process_of(each): _suspension_state(each) for each in frame["snapshot"].get("suspended_programs") or ()
    }
    gpus = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    reports = {process_of(report): report for report in frame["snapshot"]["reports"]}
    engines, kv_caches = engines_by_process(frame), kv_cache_sentences(frame)
    verdicts: dict[SubjectKey, list[Mapping[str, Any]]] = {}
    alerts = _alerts_in_effect(frame)
    alerting = {_subject(alert) for alert in alerts if severity(alert) != INFO}
    firing = _firing_rules(alerts)
    for each in sorted(frame["verdicts"], key=lambda verdict: verdict["kind"] in PATTERN_NAMES):
        key = (each["device_uuid"], process_of(each))
        if each["kind"] not in PATTERN_NAMES or key not in alerting:  # an alert refutes a healthy pattern
            verdicts.setdefault(key, []).append(each)
    for process in sorted(frame["processes"], key=lambda process: -(process["used_bytes"] or 0)):
        uuid, pid = process["device_uuid"], int(process["pid"])
        key = (uuid, ProcessKey(pid, process["start_ticks"]))
        report, process_verdicts = reports.get(key[1]), verdicts.get(key, [])
        gpu = gpus.get(uuid, "?")
        program = printable_excerpt(process["workload"] or process["comm"] or "?", 64)
        user = printable_excerpt(process["user"] or ("" if process["uid"] is None else process["uid"]), 32)
        verdict = process_verdicts[0]["kind"] if process_verdicts else ""
        rule, rule_severity = next(iter(firing.get(key, {}).items()), ("", INFO))
        is_notable = bool(verdict) and verdict not in PATTERN_NAMES
        alert = rule if rule_severity == CRITICAL or not is_notable else ""
        verdict_problems = (each["kind"] for each in process_verdicts if each["kind"] not in PATTERN_NAMES)
        problems = {*firing.get(key, ()), *verdict_problems}
        trouble = suspension_states.get(key[1]) or (process["state"] if process["state"] != "alive" else "")
        state = _process_state(process, suspended.get(key[1], ""))
        yield ProcessRow(
            key=key,
            gpu=gpu,
            pid=pid,
            program=program,
            user=user,
            uid=process["uid"],
            container=printable_excerpt(pod_of(process) or process["container_name"] or process["container"] or "", 64),
            busy_ratio=process["utilization_ratio"],
            used_bytes=process["used_bytes"],
            shares={share: process[f"{share}_bytes"] for share in PROCESS_SHARES},
            unmapped_bytes=process.get("unmapped_bytes"),
            limit_bytes=process.get("limit_bytes"),
            overhead_parts=overhead_sentence(process),
            kv_cache=(kv_cache_share(process), kv_caches[key]) if key in kv_caches else None,
            verdict=printable_excerpt(verdict, 20),
            alert="" if trouble else printable_excerpt(alert, 20),
            status=printable_excerpt(trouble or alert or verdict or state.partition(",")[0], 20),
            other_problems=len(problems - {trouble or alert or verdict}),
            level="bad" if rule_severity == CRITICAL else "warn" if is_notable or alert else "",
            state=state,
            flush_policy=report["flush_policy"] if report else None,
            verdicts=tuple(printable_excerpt(each["summary"], 400) for each in process_verdicts),
            sources=ProcessSources(process, report, engines.get(key[1])),
        )


def overhead_sentence(process: Mapping[str, Any]) -> str:
    """Return the parts of the overhead, such as ``context 0.5 GiB, with NCCL 1.2 GiB``; empty if they are unknown."""
    return ", ".join(
        f"{printable_excerpt(name, 60)} {size_text(size)}" for name, size in process.get("overhead_parts") or () if size
    )


def _process_state(process: Mapping[str, Any], suspension: str = "") -> str:
    odd = (
        suspension or (process["state"] if process["state"] != "alive" else None),
        "parent exited" if process["orphaned"] else None,
        "device open" if "holder" in process["kinds"] else None,
        f"{size_text(process['unmapped_bytes'])} unmapped" if process.get("unmapped_bytes") else None,
    )
    return printable_excerpt(", ".join(word for word in odd if word))


def pod_of(process: Mapping[str, Any]) -> str:
    return f"{process['pod_namespace']}/{process['pod_name']}" if process["pod_name"] else ""


def _details(
    state: str, process: Mapping[str, Any], report: Mapping[str, Any] | None, engine: Mapping[str, Any] | None
) -> Iterator[tuple[str, object]]:
    yield "command", process["command"] or process["comm"]
    yield "state", state
    yield "kinds", ", ".join(process["kinds"])
    yield "container", process["container_name"] or process["container"]
    yield "pod", pod_of(process)
    yield "unit", process["unit"]
    yield "Slurm job", process["slurm_job"]
    yield "engine", engine and f"{engine['name']} ({engine['kind']})"
    yield "busy", None if process["utilization_ratio"] is None else f"{process['utilization_ratio']:.0%}"
    yield "limit", None if process.get("limit_bytes") is None else size_text(process["limit_bytes"])
    yield "quota", quota_sentence(process, report)
    shortage = process.get("reserve_shortage_bytes")
    yield "reserve", f"{size_text(shortage)} not available" if shortage else None
    yield "idle for", duration_text(process["idle_seconds"]) if process["idle_seconds"] else None
    if report:
        yield "frameworks", ", ".join(report["frameworks"])
        yield (
            "flush",
            {"allow": "allowed", "step": "at the next step", "never": "not allowed"}.get(report["flush_policy"]),
        )
        yield "reported", f"{report['age_seconds']:.1f} s before the frame"


def quota_sentence(process: Mapping[str, Any], report: Mapping[str, Any] | None) -> str | None:
    """Return the limits that quotas require, each with its quota, the limit in effect, and what is used above the
    soft limit; None without a quota.

    ``report``: that of the process's agent, without which no limit is in effect.
    """
    quota = process.get("quota")
    if quota is None:
        return None
    kinds = (
        ("soft limit", "soft_limit"),
        ("limit", "limit"),
        ("reserve", "reserve"),
        ("cgroup limit", "cgroup_limit"),
    )
    sizes = ((name, quota[f"{kind}_bytes"], quota[f"{kind}_quota"]) for name, kind in kinds)
    used, soft = process.get("used_bytes"), quota["soft_limit_bytes"]
    excess = f"; exceeded by {size_text(used - soft)}" if used and soft and used > soft else ""
    return ", ".join(
        _limit_sentence(process, report, size, quota_name)
        if name == "limit"
        else f"{name} {size_text(size)} ({quota_name}{excess if name == 'soft limit' else ''})"
        for name, size, quota_name in sizes
        if size is not None
    )


def _limit_sentence(process: Mapping[str, Any], report: Mapping[str, Any] | None, required: int, quota: str) -> str:
    """Return the limit in effect where a quota sets one: the program's allocators may have a lower one."""
    if report is None:
        return f"limit {size_text(required)} ({quota}; not in effect: the program has no agent)"
    limits = [each["limit_bytes"] for each in report["limits"] if each["device_uuid"] == process["device_uuid"]]
    if limits and min(limits) != required:
        origin = "set with gpumond limit or by the program"
        return f"limit {size_text(min(limits))} ({origin}; the limit of the {quota} quota is {size_text(required)})"
    if limits:
        return f"limit {size_text(required)} ({quota})"
    reason = "no allocator has applied it" if report["allows_limit"] else "the program doesn't allow limits"
    return f"limit {size_text(required)} ({quota}; not in effect: {reason})"


def limit_sentences(processes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why a process uses more than its limit."""
    for each in processes:
        used, limit, overhead = (each.get(f"{name}_bytes") for name in ("used", "limit", "overhead"))
        if used and limit and overhead and used > limit:
            name = f"the limit of {printable_excerpt(each['workload'] or each['comm'] or '?', 64)} ({size_text(limit)})"
            if used - overhead <= limit:
                yield f"{name} doesn't include its overhead ({size_text(overhead)})"
            else:
                yield f"{name} applies to each allocator's new allocations: it releases nothing"


def difference_sentences(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the figures of a receipt differ."""
    planned, expected = receipt.get("planned"), receipt["expected"]
    if planned and expected and planned != expected:
        yield "the program's memory changed between the plan and the flush"
    if receipt["raced"]:
        yield "the program allocated or freed memory during the flush"
