"""Keys of `gpumond top` that suspend and resume a program."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame, fake_daemon, make_frame
from tests.helpers.screens import top
from tests.helpers.values import make_device, make_process

pytestmark = pytest.mark.slow
RECEIPT: dict[str, Any] = {
    "action": "suspend",
    "pid": 4242,
    "start_ticks": 7,
    "workload": "notebook",
    "outcome": "planned",
    "requested_by": "uid:1000",
    "started_at": 1e6,
    "state": "running",
    "reason": "",
    "remedy": "",
    "expected_bytes": 3 * GIB,
    "released_bytes": None,
    "host_bytes": None,
    "steps": [],
    "duration_seconds": 0.0,
}
FRAME = make_frame(make_device(used_bytes=3 * GIB, processes=(make_process(4242, 3 * GIB, comm="notebook"),)))


def test_key_z_suspends_after_a_plan_and_a_confirmation():
    with fake_daemon(FRAME) as fake, top(fake.url) as session:
        fake.answers["/api/v1/suspensions"] = (200, {"receipts": [RECEIPT]})
        session.shows("notebook")
        session.press("z")
        session.shows("suspend notebook (pid 4242)", "planned 3.0 GiB", "Suspend it? y: yes")
        done = RECEIPT | {"outcome": "suspended", "released_bytes": 2 * GIB}
        fake.answers["/api/v1/suspensions"] = (200, {"receipts": [done]})
        session.press("y")
        session.shows("suspended 2.0 GiB", without="Suspend it?")
        sent = [body for path, body in fake.requests if path == "/api/v1/suspensions"]
        assert sent == [{"target": {"pid": 4242}, "dry_run": True}, {"target": {"pid": 4242}}]


def test_refused_suspension_shows_the_reason_and_asks_nothing():
    with fake_daemon(FRAME) as fake, top(fake.url) as session:
        refused = RECEIPT | {"outcome": "refused", "reason": "it is busy", "remedy": "try later"}
        fake.answers["/api/v1/suspensions"] = (200, {"receipts": [refused]})
        session.shows("notebook")
        session.press("z")
        session.shows("refused: it is busy; try later", without="Suspend it?")


def test_key_shift_z_resumes_after_a_confirmation():
    with fake_daemon(FRAME) as fake, top(fake.url) as session:
        fake.answers["/api/v1/suspensions"] = (200, [])
        fake.answers["/api/v1/resumptions"] = (404, {"detail": "no matching program is suspended"})
        session.shows("notebook")
        session.press("Z")
        session.shows("notebook (pid 4242) isn't suspended", without="Resume it?")
        session.press("escape")
        fake.answers["/api/v1/suspensions"] = (200, [{"pid": 4242}])
        session.press("Z")
        session.shows("Resume it? y: yes")
        session.press("y")
        session.shows("no matching program is suspended")


def test_keys_of_one_program_say_so_on_a_group():
    with fake_daemon(busy_frame()) as fake, top(fake.url) as session:
        session.shows("train", "python")
        session.press("g", "g")
        session.shows("BY WORKLOAD", "train (1)", "python (1)")
        session.press("x", "x", "w")
        session.shows("w works on one program; Enter opens a group")
        session.press("z")
        session.shows("you can suspend one program at a time; U removes the marks")
