"""Conversion of a frame from ``GET /api/v1/frame`` to a view. Pure.

All numbers of a view are from one frame. Text from programs is sanitized here, once, for all terminal output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpumond.view.frame import CheckedFrame, frame_of
from gpumond.view.notices import FrameNotice, alerts, notices, once, stuck, verdicts
from gpumond.view.queue import waiting
from gpumond.view.rows import DeviceRow, Key, ProcessRow, cached, devices, plain, process_of, processes, reclaimable

PLACE_END = "|"
"""The end of the place of a daemon in a UUID of a merged view. No driver uses it in a UUID."""


@dataclass(frozen=True, slots=True)
class View:
    """Rows and notices of one frame. ``notices`` concern the readings themselves (faults, conditions, a source that is
    down), ``stuck`` processes that block memory. ``reclaimable_bytes`` is what a flush of all programs would release;
    None without agents.
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


def view(answer: object) -> View:
    """Convert a response to a view. Raises DaemonError if the response is not a frame."""
    frame = frame_of(answer)
    snapshot, lines = frame["snapshot"], frame["ledger"]["lines"]
    about_itself = tuple(notices(frame))
    refusing = {process_of(report) for report in snapshot["reports"] if report["flush_policy"] == "never"}
    return View(
        seq=int(snapshot["seq"]),
        taken_at=float(snapshot["taken_at"]),
        interval_seconds=snapshot["elapsed_seconds"] / max(1, snapshot["seq"]),
        source=plain(snapshot["source"]["name"], 20),
        up=bool(snapshot["source"]["up"]),
        devices=tuple(devices(frame, refusing)),
        processes=tuple(processes(frame)),
        notices=(*about_itself, *_queue(frame)),
        alerts=tuple(once(alerts(frame), about_itself)),
        verdicts=tuple(verdicts(frame["verdicts"])),
        stuck=tuple(
            FrameNotice("warn", plain(e.what), plain(e.remedy, 400), e.kind) for e in stuck(frame["processes"])
        ),
        agents=len(snapshot["reports"]),
        reclaimable_bytes=reclaimable(lines, refusing),
        refused_bytes=sum(line["used_bytes"] for line in cached(lines) if process_of(line) in refusing),
    )


def _queue(frame: CheckedFrame) -> Iterator[FrameNotice]:
    index = {device["uuid"]: f"GPU {device['index']}" for device in frame["snapshot"]["devices"]}
    for uuid, sentence in waiting(frame):
        yield FrameNotice("note", f"waiting on {index.get(uuid, uuid)}", sentence, "waiting")


def device_of(view: View | None, uuid: str | None) -> DeviceRow | None:
    """Return the device, None if it no longer exists."""
    return next((device for device in view.devices if device.uuid == uuid), None) if view else None


def neighbor(view: View, uuid: str | None, step: int) -> str | None:
    """Return the device ``step`` places after the selected one. All devices (None) are one place in the order."""
    places: list[str | None] = [None, *(device.uuid for device in view.devices)]
    at = places.index(uuid) if uuid in places else 0
    return places[(at + step) % len(places)]


def at_index(view: View, index: int) -> str | None:
    """Return the first device with that index. Instances (MIG) have the index of their device."""
    return next((device.uuid for device in view.devices if device.index == index), None)


def processes_on(view: View, uuid: str | None) -> tuple[ProcessRow, ...]:
    """Return the processes on a device and its instances; all processes without a device."""
    if uuid is None:
        return view.processes
    uuids = {uuid, *(device.uuid for device in view.devices if device.parent_uuid == uuid)}
    return tuple(row for row in view.processes if row.key[0] in uuids)


def of_device(view: View, uuid: str | None) -> View:
    """Return the view of one device and its instances; of all devices without a device."""
    if uuid is None:
        return view
    devices = tuple(device for device in view.devices if uuid in (device.uuid, device.parent_uuid))
    return replace(view, devices=devices, processes=processes_on(view, uuid))


def key_of(device: DeviceRow) -> Key:
    """Return the key of the history of a whole device."""
    return device.uuid, None


def merged(views: Sequence[tuple[str, View | None]]) -> View:
    """Return one view of several daemons, each with its name. Those without a view are absent.

    Devices, processes and notices state the name. A UUID begins with the place of its daemon in ``views``, see
    ``place_of``: two daemons can state the same, as those of simulated devices do.
    """
    all_views = [_named(place, name, each) for place, (name, each) in enumerate(views) if each is not None]
    known = [each.reclaimable_bytes for each in all_views if each.reclaimable_bytes is not None]
    return View(
        seq=max((each.seq for each in all_views), default=0),
        taken_at=max((each.taken_at for each in all_views), default=0.0),
        interval_seconds=max((each.interval_seconds for each in all_views), default=0.0),
        source=", ".join(dict.fromkeys(each.source for each in all_views)),
        up=any(each.up for each in all_views),
        devices=tuple(device for each in all_views for device in each.devices),
        processes=tuple(row for each in all_views for row in each.processes),
        notices=tuple(notice for each in all_views for notice in each.notices),
        alerts=tuple(notice for each in all_views for notice in each.alerts),
        verdicts=tuple(notice for each in all_views for notice in each.verdicts),
        stuck=tuple(notice for each in all_views for notice in each.stuck),
        agents=sum(each.agents for each in all_views),
        reclaimable_bytes=sum(known) if known else None,
        refused_bytes=sum(each.refused_bytes for each in all_views),
    )


def _named(place: int, name: str, view: View) -> View:
    def about(notices: Iterable[FrameNotice]) -> tuple[FrameNotice, ...]:
        return tuple(replace(notice, text=f"{name}: {notice.text}") for notice in notices)

    def uuid(own: str) -> str:
        return f"{place}{PLACE_END}{own}"

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
        notices=about(view.notices),
        alerts=about(view.alerts),
        verdicts=about(view.verdicts),
        stuck=about(view.stuck),
    )


def place_of(uuid: str) -> tuple[int, str]:
    """Return the place of the daemon, and its own UUID, of a device in a merged view."""
    place, _, own = uuid.partition(PLACE_END)
    return int(place), own
