"""Answers of daemons, checked in one place for the command line, `top` and `fleet`: typed, finite, bounded values.

A daemon may run on another machine, be of another version, or not be gpumond. What was checked here has every key of
its type, `FullFrame` for a frame, with values of the types of its fields; the rest of the code relies on that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, replace
from math import isfinite
from typing import Any, get_args

from gpumond.facts.errors import UNKNOWN_PATH_PREFIX, DaemonError
from gpumond.facts.frame import FullFrame
from gpumond.facts.messages import to_json
from gpumond.facts.pools import Receipt
from gpumond.facts.typed_json import Mismatch, Validator
from gpumond.facts.units import duration_text, size_text
from gpumond.view.notices import (
    FrameNotice,
    alert_notices,
    blank_repeated_texts,
    frame_notices,
    stuck_processes,
    verdict_notices,
)
from gpumond.view.rows import (
    DeviceRow,
    ProcessRow,
    SubjectKey,
    cached_lines,
    device_rows,
    earlier_requests,
    grant_sentences,
    holders_sentence,
    process_of,
    process_rows,
    reclaimable_bytes,
    request_advice,
    requester,
    requests_ahead,
)
from gpumond.view.text import printable, printable_excerpt

FRAME_ROUTE = "/api/v1/frame"
MALFORMED = "the server isn't gpumond, or has an incompatible version"
OLDER = (
    "the server doesn't know this request; check the path in --url (or the daemon is older than this command, or isn't "
    "gpumond)"
)
MAX_FRAME_BYTES = 8 << 20
MAX_INTEGER = 2**63
MAX_NUMBER = 1e100
"""Numbers are smaller: sums and differences of them are finite."""
MAX_DIGITS = 19
"""Digits of the integers below 2**63."""
MAX_DETAIL_LENGTH = 300
MAX_TEXT_LENGTH = 4096
"""Longer texts are cut."""


class CheckedFrame(dict[str, Any]):
    """The JSON object of a frame. Keys that this version does not know are absent."""


def decode_response(status: int, body: bytes) -> Any:
    """Return the JSON of a 2xx, or None. Raises DaemonError, with the problem document of other statuses."""
    accepted = 200 <= status < 300
    try:
        content = _DECODER.decode(body.decode()) if body else None
    except (ValueError, RecursionError):
        content = None
        if accepted:
            raise DaemonError("the response isn't JSON with finite numbers") from None
    if accepted:
        return content
    problem = content if isinstance(content, dict) else {}
    detail = " ".join(str(problem.get("detail") or problem.get("error") or "").split())
    if status == 404 and detail.startswith((UNKNOWN_PATH_PREFIX, "Not Found")):  # others name what does not exist
        detail = OLDER
    raise DaemonError(f"{detail:.{MAX_DETAIL_LENGTH}}", status, problem)


def _short_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS + digits.startswith("-"):
        raise ValueError("too many digits")
    return int(digits)


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError("not finite")
    return number


_DECODER = json.JSONDecoder(parse_int=_short_integer, parse_float=_finite, parse_constant=_finite)


def frame_of(answer: object) -> CheckedFrame:
    """Return a frame with the types of `FullFrame`. Raises DaemonError if the answer is not a frame.

    Missing values have their defaults, and those that may be unknown are None: an earlier version did not state them.
    """
    return answer if isinstance(answer, CheckedFrame) else CheckedFrame(checked_as(FullFrame, answer, "frame"))


def receipts_of(answer: object) -> list[dict[str, Any]]:
    """Return the receipts of an answer to a flush. Raises DaemonError if it has none."""
    receipts = answer.get("receipts") if isinstance(answer, Mapping) else None
    found: list[dict[str, Any]] = checked_as(tuple[Receipt, ...], receipts, "receipts")
    return found


def checked_as(hint: Any, answer: object, name: str) -> Any:
    """Return the JSON of a type. Raises DaemonError, with the name and the path of a value that has another type."""
    try:
        return VALIDATOR.converter(hint)(answer)
    except Mismatch as mismatch:
        expected = mismatch.expected or "a value"
        raise DaemonError(f"{MALFORMED} ({name}{mismatch.path}: expected {expected})") from None


def _default(field: Field[Any], hint: object) -> object:
    """Return the JSON of a field's default, which no reader changes; MISSING without one."""
    if field.default is not MISSING:
        return json.loads(to_json(field.default))
    return None if type(None) in get_args(hint) else MISSING


def _integer(value: Any) -> int:
    if type(value) is not int or not -MAX_INTEGER < value < MAX_INTEGER:
        raise Mismatch("an integer between -2^63 and 2^63")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < MAX_NUMBER:  # no NaN
        raise Mismatch("a number below 1e100")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Mismatch("text")
    return value if len(value) <= MAX_TEXT_LENGTH else value[:MAX_TEXT_LENGTH]


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise Mismatch("true or false")
    return value


VALIDATOR = Validator(
    scalars={int: _integer, float: _number, str: _text, bool: _flag},
    literal=lambda allowed: _text,  # a newer version may have more of them
    default=_default,
    record=lambda cls, found: found,
    sequence=list,
)
"""Checks answers: the result is JSON again, with the default of each field that is absent."""


NOTICE_FIELDS = ("notices", "alerts", "verdicts", "stuck")
DAEMON_SEPARATOR = "|"
"""The end of the place of a daemon in a UUID of a merged view. No driver uses it in a UUID."""


@dataclass(frozen=True, slots=True)
class FrameView:
    """Rows and notices of one frame.

    ``notices`` concern the readings themselves (faults, conditions, a source that is down), ``stuck`` processes that
    block memory. ``reclaimable_bytes`` is what a flush of all programs would release; None without agents.
    ``only_device``: the device, as in ``--device``, if the view is that of one device; ``problems_elsewhere``: the
    number of alerts and problems on the other ones.
    """

    seq: int
    taken_at: float
    interval_seconds: float
    source: str
    up: bool
    devices: tuple[DeviceRow, ...]
    processes: tuple[ProcessRow, ...]
    notices: tuple[FrameNotice, ...]
    alerts: tuple[FrameNotice, ...]
    verdicts: tuple[FrameNotice, ...]
    stuck: tuple[FrameNotice, ...]
    agents: int
    reclaimable_bytes: int | None
    refused_bytes: int
    only_device: str = ""
    problems_elsewhere: int = 0

    @property
    def problems(self) -> Iterator[FrameNotice]:
        """Yield the verdicts that are problems, and not only suspicions or news."""
        return (each for each in self.verdicts if each.level != "note")


MAX_SHOWN_NAMES = 3


def frame_view(answer: object) -> FrameView:
    """Convert a response to a view. Raises DaemonError if the response is not a frame."""
    frame = frame_of(answer)
    snapshot, lines = frame["snapshot"], frame["ledger"]["lines"]
    reading_notices = tuple(frame_notices(frame))
    refusing = {process_of(report) for report in snapshot["reports"] if report["flush_policy"] == "never"}
    return FrameView(
        seq=int(snapshot["seq"]),
        taken_at=float(snapshot["taken_at"]),
        interval_seconds=snapshot["elapsed_seconds"] / max(1, snapshot["seq"]),
        source=printable_excerpt(snapshot["source"]["name"], 20),
        up=bool(snapshot["source"]["up"]),
        devices=tuple(device_rows(frame, refusing)),
        processes=tuple(process_rows(frame)),
        notices=(*reading_notices, *_queue_notices(frame), *_grant_notices(frame), *_notices_without_memory(frame)),
        alerts=tuple(blank_repeated_texts(alert_notices(frame), reading_notices)),
        verdicts=tuple(verdict_notices(frame)),
        stuck=tuple(
            FrameNotice(
                "warn",
                printable_excerpt(process.sentence),
                "",
                process.kind,
                printable_excerpt(process.remedy, 400),
                process.device_uuid,
            )
            for process in stuck_processes(frame["processes"])
        ),
        agents=len(snapshot["reports"]),
        reclaimable_bytes=reclaimable_bytes(lines, refusing),
        refused_bytes=sum(line["used_bytes"] for line in cached_lines(lines) if process_of(line) in refusing),
    )


def _notices_without_memory(frame: CheckedFrame) -> Iterator[FrameNotice]:
    """Yield a notice about the workloads that run the agent, and neither use a device nor are suspended."""
    on_device = {process["workload"] for process in frame["processes"]}
    waiting = {request["workload"] for request in frame["queue"]}
    suspended = {program["workload"] for program in frame["snapshot"].get("suspended_programs") or ()}
    reported = {report["workload"] for report in frame["snapshot"]["reports"]}
    others = reported - on_device - waiting - suspended - {""}
    names = [printable_excerpt(name, 40) for name in sorted(others)]
    if names:
        more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
        text = f"connected, without GPU memory: {', '.join(names[:MAX_SHOWN_NAMES])}{more}"
        yield FrameNotice("note", text, "")


def _queue_notices(frame: CheckedFrame) -> Iterator[FrameNotice]:
    """Yield a notice about each request for memory that waits."""
    gpus = {device["uuid"]: f"GPU {device['index']}" for device in frame["snapshot"]["devices"]}
    for request in frame["queue"]:
        who = requester(request)
        before = f", {requests_ahead(request['ahead'], earlier_requests(frame, request))}" if request["ahead"] else ""
        lasted = duration_text(max(0.0, frame["snapshot"]["taken_at"] - request["since"]))
        device = gpus.get(request["device_uuid"], request["device_uuid"])
        sentence = printable(
            f"{who} has been waiting {lasted} for {size_text(request['need_bytes'])} on "
            f"{device}{before}{_missing_text(request)}"
        ) + (f"; {holders}" if (holders := holders_sentence(request, device)) else "")
        advice = request_advice(frame, request)
        text = f"{sentence}; {advice}" if advice else sentence
        yield FrameNotice("note", "waiting", text, "waiting", device_uuid=request["device_uuid"], program=who)


def _grant_notices(frame: CheckedFrame) -> Iterator[FrameNotice]:
    """Yield a notice about each grant whose memory isn't all held yet."""
    return (
        FrameNotice("note", "granted", sentence, "granted", device_uuid=grant["device_uuid"])
        for grant, sentence in zip(frame.get("grants") or (), grant_sentences(frame), strict=True)
    )


def _missing_text(request: Mapping[str, Any]) -> str:
    """Return what is missing for a request; empty if earlier requests claim more than there is."""
    need, available, missing = (request[f"{name}_bytes"] for name in ("need", "available", "missing"))
    if not missing or (request["ahead"] and available is not None and available < 0):
        return ""
    flushed = 0 if available is None else need - available - missing
    after = f"flushes would release {size_text(flushed)}, " if flushed > 0 else ""
    room = "" if available is None else f"{size_text(max(0, available))} is available, {after}and "
    return f"; {room}{size_text(missing)} {'would still be' if after else 'is'} missing"


def device_of(view: FrameView | None, uuid: str | None) -> DeviceRow | None:
    """Return the device, None if it no longer exists."""
    return next((device for device in view.devices if device.uuid == uuid), None) if view else None


def neighbor_uuid(view: FrameView, uuid: str | None, step: int) -> str | None:
    """Return the device ``step`` places after the selected one. All devices (None) are one place in the order."""
    uuids: list[str | None] = [None, *(device.uuid for device in view.devices)]
    at = uuids.index(uuid) if uuid in uuids else 0
    return uuids[(at + step) % len(uuids)]


def device_at_index(view: FrameView, index: int) -> str | None:
    """Return the first device with that index. Instances (MIG) have the index of their device."""
    return next((device.uuid for device in view.devices if device.index == index), None)


def processes_on(view: FrameView, uuid: str | None) -> tuple[ProcessRow, ...]:
    """Return the processes on a device and its instances; all processes without a device."""
    if uuid is None:
        return view.processes
    uuids = {uuid, *(device.uuid for device in view.devices if device.parent_uuid == uuid)}
    return tuple(row for row in view.processes if row.key[0] in uuids)


def view_of_device(view: FrameView, uuid: str | None) -> FrameView:
    """Return the view of one device and its instances; of all devices without a device.

    Its notices are those about these devices, about the one that an instance is a part of, and about no single device.
    """
    if uuid is None:
        return view
    devices = tuple(device for device in view.devices if uuid in (device.uuid, device.parent_uuid))
    device_row = next((device for device in devices if device.uuid == uuid), None)
    processes = processes_on(view, uuid)
    refused = (row.shares["cached"] or 0 for row in processes if row.flush_policy == "never" and row.key[0] == uuid)
    concerned = {None, device_row.parent_uuid if device_row else None, *(device.uuid for device in devices)}
    notices: dict[str, Any] = {
        field: tuple(each for each in getattr(view, field) if each.device_uuid in concerned) for field in NOTICE_FIELDS
    }
    return replace(
        view,
        **notices,
        problems_elsewhere=sum(each.device_uuid not in concerned for each in (*view.alerts, *view.problems)),
        devices=devices,
        processes=processes,
        reclaimable_bytes=device_row.reclaimable_bytes if device_row else None,
        refused_bytes=sum(refused),
        only_device="" if device_row is None else device_row.uuid if device_row.parent_uuid else str(device_row.index),
    )


def view_of_programs(view: FrameView, names: Iterable[str]) -> FrameView:
    """Return the view of the processes with these names or pids, of their devices, and what concerns them."""
    processes = tuple(row for row in view.processes if {row.program, str(row.pid)} & {*names})
    uuids = {row.key[0] for row in processes}
    programs = {f"{row.program} (pid {row.pid})" for row in processes}
    notices: dict[str, Any] = {
        field: tuple(each for each in getattr(view, field) if each.program in programs) for field in NOTICE_FIELDS
    }
    devices = tuple(device for device in view.devices if device.uuid in uuids)
    return replace(view, **notices, devices=devices, processes=processes, reclaimable_bytes=None, problems_elsewhere=0)


def history_key_of(device: DeviceRow) -> SubjectKey:
    """Return the key of the history of a whole device."""
    return device.uuid, None


def merge_views(views: Sequence[tuple[str, FrameView | None]]) -> FrameView:
    """Return one view of several daemons, each with its name. Those without a view are absent.

    Devices, processes and notices state the name. A UUID begins with the place of its daemon in ``views``, see
    ``split_merged_uuid``: two daemons can state the same, as those of simulated devices do.
    """
    all_views = [_prefix_view(index, name, each) for index, (name, each) in enumerate(views) if each is not None]
    sizes = [each.reclaimable_bytes for each in all_views if each.reclaimable_bytes is not None]
    return FrameView(
        seq=max((each.seq for each in all_views), default=0),
        taken_at=max((each.taken_at for each in all_views), default=0.0),
        interval_seconds=max((each.interval_seconds for each in all_views), default=0.0),
        source=", ".join(dict.fromkeys(each.source for each in all_views)),
        up=any(each.up for each in all_views),
        **{
            name: tuple(entry for each in all_views for entry in getattr(each, name))
            for name in ("devices", "processes", *NOTICE_FIELDS)
        },
        agents=sum(each.agents for each in all_views),
        reclaimable_bytes=sum(sizes) if sizes else None,
        refused_bytes=sum(each.refused_bytes for each in all_views),
        only_device="",
        problems_elsewhere=0,
    )


def _prefix_view(index: int, name: str, view: FrameView) -> FrameView:
    def prefixed(notices: Iterable[FrameNotice]) -> tuple[FrameNotice, ...]:
        return tuple(
            replace(
                notice,
                text=f"{name}: {notice.text}",
                program=notice.program and f"{name}: {notice.program}",
                gpu=notice.gpu if notice.program or not notice.gpu else f"{name}: {notice.gpu}",
                device_uuid=notice.device_uuid and uuid(notice.device_uuid),
            )
            for notice in notices
        )

    def uuid(daemon_uuid: str) -> str:
        return f"{index}{DAEMON_SEPARATOR}{daemon_uuid}"

    notices: dict[str, Any] = {field: prefixed(getattr(view, field)) for field in NOTICE_FIELDS}

    return replace(
        view,
        devices=tuple(
            replace(
                device, uuid=uuid(device.uuid), parent_uuid=device.parent_uuid and uuid(device.parent_uuid), host=name
            )
            for device in view.devices
        ),
        processes=tuple(
            replace(row, key=(uuid(row.key[0]), row.key[1]), gpu=f"{name}:{row.gpu}") for row in view.processes
        ),
        **notices,
    )


def split_merged_uuid(uuid: str) -> tuple[int, str]:
    """Return the place of the daemon, and its own UUID, of a device in a merged view."""
    index, _, daemon_uuid = uuid.partition(DAEMON_SEPARATOR)
    return int(index), daemon_uuid
