"""Lines of `gpumond events`."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.commands.events import Follower
from gpumond.commands.main import main
from gpumond.view.events import group_events
from tests.helpers.frames import busy_frame, fake_daemon


def event(at: float, kind: str = "oom", limit: int | None = None, pid: int = 10) -> dict[str, Any]:
    return {
        "id": int(at),
        "at": at,
        "kind": kind,
        "device_uuid": "GPU-a",
        "pid": pid,
        "start_ticks": 100,
        "workload": "chat",
        "summary": f"chat (pid {pid}) {kind}",
        "details": [] if limit is None else [["limit_bytes", limit]],
    }


def test_repeats_of_an_out_of_memory_error_are_one_line():
    events = [event(1.0), event(2.0, "flush"), event(3.0), event(4.0, pid=11), event(5.0, limit=1), event(62.0)]
    assert [[one["at"] for one in group] for group in group_events(events)] == [[1.0, 3.0, 62.0], [2.0], [4.0], [5.0]]
    assert len(group_events([event(1.0), event(62.0)])) == 2, "another time"


def test_lines_are_in_the_order_of_their_times():
    noticed_late = event(3.0, pid=11) | {"details": [["occurred_at", 1.0]]}
    assert [group[0]["pid"] for group in group_events([event(2.0), noticed_late])] == [11, 10]


def test_repeats_that_arrive_later_are_one_line_a_minute():
    follower = Follower()

    def printed(now: float, *events: dict[str, Any]) -> list[list[float]]:
        return [[one["at"] for one in group] for group in follower.due(events, now)]

    assert printed(1.0, event(1.0), event(2.0, "flush")) == [[1.0], [2.0]]
    assert printed(30.0, event(30.0), event(31.0, pid=11), event(32.0, "flush")) == [[31.0], [32.0]]
    assert printed(40.0, event(40.0)) == []
    assert printed(61.0) == [[30.0, 40.0]]
    assert printed(62.0) == []


def test_line_has_the_time_when_it_happened(capsys: pytest.CaptureFixture[str]):
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/events"] = (200, [event(5.0, "wait") | {"details": [["occurred_at", 2.0]]}])
        assert main(["events", "--url", fake.url]) == 0
        assert capsys.readouterr().out.startswith("1970-01-01 00:00:02Z  wait ")


def test_line_counts_the_repeats_and_json_has_each(capsys: pytest.CaptureFixture[str]):
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/events"] = (200, [event(1.0), event(2.0, "flush"), event(3.0), event(60.0)])
        assert main(["events", "--limit", "1", "--url", fake.url]) == 0
        assert capsys.readouterr().out == "1970-01-01 00:00:02Z  flush              chat (pid 10) flush\n", "the newest"
        assert main(["events", "--url", fake.url]) == 0
        first, _ = capsys.readouterr().out.splitlines()
        assert first.endswith("chat (pid 10) oom (3 times, the last at 1970-01-01 00:01:00Z)")
        assert first.startswith("1970-01-01 00:00:01Z  out-of-memory ")
        assert main(["events", "--json", "--url", fake.url]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 4
        cause = event(5.0, "alert-fired"), event(5.5, "verdict-began") | {"id": 6}
        fake.answers["/api/v1/events"] = (200, cause)
        assert main(["events", "--url", fake.url]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first == "1970-01-01 00:00:05Z  alert fired        chat (pid 10) alert-fired"
        assert second == f"{'':22}  verdict began    chat (pid 10) verdict-began"


def test_events_of_an_exit_are_one_entry_that_tells_most_first():
    kinds = ("agent-disconnected", "verdict-ended", "process-ended", "alert-resolved")
    groups = group_events([event(float(at), kind) for at, kind in enumerate(kinds)] + [event(9.0, "agent-connected")])
    first = ["process-ended", "agent-disconnected", "verdict-ended", "alert-resolved"]
    assert [[one["kind"] for one in group] for group in groups] == [first, ["agent-connected"]]
