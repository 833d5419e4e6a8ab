"""Frames, and the events between them."""

from __future__ import annotations

from typing import Any

from gpumond.events import Event, EventState, advance_events
from gpumond.facts.frame import Frame, Ledger, Verdict
from gpumond.facts.snapshot import DeviceReading
from tests.helpers.values import make_device, make_snapshot

UUID = "GPU-a"


def make_frame(*devices: DeviceReading, verdicts: tuple[Verdict, ...] = (), **fields: Any) -> Frame:
    return Frame(make_snapshot(*(devices or (make_device(UUID),)), **fields), Ledger(), verdicts)


def between(*frames: Frame, **last: Any) -> list[Event]:
    """Return the events of the last frame."""
    watch, events = EventState(), ()
    for frame in frames[:-1]:
        watch, _ = advance_events(watch, frame)
    _, events = advance_events(watch, frames[-1], **last)
    return list(events)
