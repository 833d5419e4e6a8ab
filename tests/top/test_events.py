"""The key of `gpumond top` that shows events."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.agents import GIB
from tests.helpers.frames import FakeDaemon, busy_frame, fake_daemon
from tests.helpers.screens import top

pytestmark = pytest.mark.slow
HOUR = 1_000_000.0


def event(id: int, at: float, kind: str, summary: str, **details: Any) -> dict[str, Any]:
    of = {"device_uuid": "GPU-a", "pid": 10, "start_ticks": 100, "workload": "train"}
    return {"id": id, "at": at, "kind": kind, "summary": summary, "details": [*details.items()], **of}


def holding(at: float, pid: int | None, used: float) -> dict[str, Any]:
    known = {"device_uuid": "GPU-a", "pid": pid, "start_ticks": pid, "name": "train" if pid else "", "ended_at": None}
    shares = dict.fromkeys(("live", "cached", "stranded", "overhead", "opaque", "unattributed"))
    return known | {f"{share}_bytes": size for share, size in shares.items()} | {"used_bytes": used * GIB}


def with_events(fake: FakeDaemon) -> None:
    case = {"id": "1000000-10-1", "pid": 10, "start_ticks": 100, "remedy": "flush chat with gpumond flush --pid 11"}
    events = [
        event(1, HOUR, "agent-connected", "train (pid 10) connected: torch"),
        event(2, HOUR + 600, "oom", "train (pid 10) ran out of memory on GPU 0", number=2, occurred_at=HOUR + 599),
        event(3, HOUR + 601, "verdict-began", "train (pid 10) is leaking", verdict="leak"),
        event(4, HOUR + 602, "alert-fired", "train (pid 10) is leaking", rule="leak"),
    ]
    fake.answers["/api/v1/events"] = (200, events)
    fake.answers["/api/v1/oom"] = (200, [case, case | {"start_ticks": 99, "remedy": "another process"}])
    fake.answers["/api/v1/history/moment"] = (200, {"holdings": [holding(0, None, 50), holding(0, 10, 40)]})


def test_key_e_lists_events_the_newest_first_with_what_would_have_prevented_an_error():
    with fake_daemon(busy_frame()) as fake, top(fake.url, size=(100, 24)) as session:
        with_events(fake)
        session.shows("train")
        session.press("e")
        screen = session.shows("events until ", "UTC, newest first", "out-of-memory", "alert fired", "verdict began")
        assert screen.index("ran out of memory") < screen.index("connected: torch")
        assert f"-> flush chat with GPUMOND_URL={fake.url} " in screen
        session.press("down")
        session.shows("train (pid 10) is leaking  +1", without="verdict began")
        session.press("e")
        session.shows("PROGRAM", without="newest first")


def test_right_shows_who_held_what_a_minute_before_the_error_and_left_returns():
    with fake_daemon(busy_frame()) as fake, top(fake.url, size=(100, 24)) as session:
        with_events(fake)
        session.shows("train")
        session.press("e")
        session.shows("newest first")
        session.press("down", "right")
        session.shows("from 1970-01-12 13:55:39Z to 1970-01-12 13:56:39Z", "BEFORE", "AFTER", "CHANGE", "whole GPU")
        fake.answers["/api/v1/history/moment"] = (404, {"detail": "no history for that time"})
        session.press("down")
        session.shows("no history for 1970-01-12 13:46:40Z", "connected: torch")
        session.press("left")
        session.shows("newest first")


def test_events_of_other_devices_are_not_those_of_the_selected_one():
    with fake_daemon(busy_frame()) as fake, top(fake.url, size=(100, 24)) as session:
        with_events(fake)
        fake.answers["/api/v1/events"][1][0]["device_uuid"] = "GPU-b"
        session.shows("train")
        session.press("0", "e")
        session.shows("events of GPU 0 until ", "out-of-memory", without="connected")


def test_without_events_the_panel_says_so():
    with fake_daemon(busy_frame()) as fake, top(fake.url) as session:
        fake.answers |= {"/api/v1/events": (200, []), "/api/v1/oom": (200, [])}
        session.shows("train")
        session.press("e")
        session.shows("no events since the daemon's start")
        session.press("right", "down", "escape")
        session.shows("PROGRAM")
