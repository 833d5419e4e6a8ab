"""The key of `gpumond top` that silences an alert."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.agents import GIB
from tests.helpers.frames import FakeDaemon, fake_daemon, make_frame
from tests.helpers.screens import top
from tests.helpers.values import make_device, make_process

pytestmark = pytest.mark.slow
MAY_SILENCE = (422, {"detail": "body.matchers: required, but not given"})
"""The answer to an empty request."""
FRAME = make_frame(make_device(used_bytes=3 * GIB, processes=(make_process(42, 3 * GIB, comm="notebook"),)))


def alert(rule: str, pid: int | None, **labels: str) -> dict[str, Any]:
    return {
        "rule": rule,
        "phase": "firing",
        "labels": [["uuid", "GPU-a"], *map(list, labels.items())],
        "annotations": [["summary", f"{rule} for a test"]],
        "value": 1.0,
        "active_at": 1e6,
        "pid": pid,
        "start_ticks": None if pid is None else 100,
    }


def silences(fake: FakeDaemon) -> list[Any]:
    """The silences that were requested, without the questions whether they would be allowed."""
    return [body for path, body in fake.requests if path == "/api/v1/silences" and body]


def test_key_shift_s_silences_the_chosen_alert_with_the_typed_reason():
    with fake_daemon(FRAME) as fake, top(fake.url, size=(100, 24)) as session:
        full = alert("memory-pressure", None)
        leak = alert("leak", 42, workload="notebook")
        fake.answers["/api/v1/alerts"] = (200, [full, alert("idle", 42) | {"silenced_by": ["0f"]}, leak])
        fake.answers["/api/v1/silences"] = (201, {"silence": {"id": "0123456789abcdef"}})
        session.shows("notebook")
        session.press("S")
        session.shows("leak firing: leak for a test", "memory-pressure firing", "Choose", without="idle")
        session.press("down", "enter")
        session.shows("memory-pressure firing", "Silence rule=memory-pressure uuid=GPU-a for 1 h?", without="leak")
        session.press("escape", "S")
        session.shows("leak firing", "memory-pressure firing")
        session.press("j", "k", "enter")
        session.shows("leak for a test", "Silence rule=leak workload=notebook for 1 h?", without="pressure")
        session.press(*"known, nqy", "backspace", "down")
        session.shows("Silence rule=leak", "reason: known, nq", "Yes, silence", without="nqy")
        session.press("enter")
        session.shows("silence 0123456789abcdef of rule=leak workload=notebook for 1 h;", "silence delete")
        session.shows(f"GPUMOND_URL={fake.url}")
        (sent,) = silences(fake)
        matchers = [("rule", "leak"), ("workload", "notebook")]
        assert sent["matchers"] == [{"name": name, "operator": "=", "value": value} for name, value in matchers]
        assert (sent["for_seconds"], sent["reason"]) == (3600, "known, nq")
        session.press("q")
        session.shows("no history yet")


def test_alerts_of_other_programs_are_the_most_urgent_first_and_ended_ones_last():
    with fake_daemon(FRAME) as fake, top(fake.url, size=(100, 24)) as session:
        past = alert("fragmentation", 7) | {"annotations": [["summary", "ended at 04:00:49 UTC"]]}
        error = alert("out-of-memory", 8, severity="critical")
        fake.answers |= {"/api/v1/alerts": (200, [past, alert("idle", 9), error]), "/api/v1/silences": MAY_SILENCE}
        session.shows("notebook")
        session.press("S")
        screen = session.shows("out-of-memory firing", "idle firing", "fragmentation ended at")
        places = [screen.index(rule) for rule in ("out-of-memory firing", "idle firing", "fragmentation ended at")]
        assert places == sorted(places)


def test_silence_requires_a_reason():
    with fake_daemon(FRAME) as fake, top(fake.url) as session:
        fake.answers |= {"/api/v1/alerts": (200, [alert("leak", 42)]), "/api/v1/silences": MAY_SILENCE}
        session.shows("notebook")
        session.press("S")
        session.shows("Silence rule=leak uuid=GPU-a for 1 h?", "reason:  required")
        session.press(" ", "enter")
        session.shows("not silenced: type a reason", "Silence rule=leak")
        session.press("x")
        session.shows("reason:  x", without="not silenced")
        session.press("escape")
        session.shows("no history yet")
        assert not silences(fake)


def test_silence_that_is_refused_states_why_and_keeps_the_reason():
    with fake_daemon(FRAME) as fake, top(fake.url) as session:
        fake.answers["/api/v1/alerts"] = (200, [alert("leak", 42)])
        fake.answers["/api/v1/silences"] = MAY_SILENCE
        session.shows("notebook")
        session.press("S")
        session.shows("Silence rule=leak uuid=GPU-a for 1 h?")
        fake.answers["/api/v1/silences"] = (409, {"detail": "you have 100 silences"})
        session.press(*"known", "enter")
        session.shows("reason: known", "not silenced: you have 100 silences", "Silence rule=leak uuid=GPU-a for 1 h?")
        fake.answers["/api/v1/silences"] = (201, {"silence": {"id": "0123456789abcdef"}})
        session.press("enter")
        session.shows("silence 0123456789abcdef of rule=leak")
        assert [each["reason"] for each in silences(fake)] == ["known", "known"]
        session.press("escape")
        fake.answers["/api/v1/alerts"] = (200, [])
        session.press("S")
        session.shows("no alert to silence")


def test_user_who_may_not_silence_is_asked_for_no_reason():
    with fake_daemon(FRAME) as fake, top(fake.url) as session:
        fake.answers["/api/v1/alerts"] = (200, [alert("leak", 42)])
        fake.answers["/api/v1/silences"] = (401, {"detail": "a token is required"})
        session.shows("notebook")
        session.press("S")
        session.shows("you can't silence alerts: ", "GPUMOND_TOKEN", without="reason")
