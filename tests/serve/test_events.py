"""Stream of events, without a server: recipients, content, and disconnection of slow readers."""

from __future__ import annotations

import asyncio

from gpumond.events import EventLog
from gpumond.facts.frame import Frame, Ledger
from gpumond.serve import live as route
from gpumond.serve.live import MAX_STREAMS
from tests.helpers.values import make_report, make_snapshot
from tests.serve.application import View, ask, serving
from tests.serve.event_reader import Reader


def frame_with_agents(*pids: int) -> Frame:
    return Frame(make_snapshot(reports=tuple(map(make_report, pids))), Ledger())


def test_reader_receives_events_from_its_connection_on():
    async def run() -> None:
        view = View()
        app = serving(view)
        view.events.publish(frame_with_agents(1), (), ())
        reader = Reader(app, accept="text/event-stream")
        await reader.wait(lambda text: text == "retry: 3000\n\n")
        (event,) = view.events.publish(frame_with_agents(1, 2), (), ())
        text = await reader.wait(lambda text: "data:" in text)
        assert f"\n\nid: {event.id}\nevent: agent-connected\ndata: {{" in text
        assert text.endswith("}\n\n")
        assert [published["pid"] for published in reader.events()] == [2]
        reader.disconnect.set()
        await reader.task
        assert app.state.event_streams.used == 0

    asyncio.run(run())


def test_list_begins_after_the_last_event_id():
    view = View()
    events = view.events.publish(frame_with_agents(1, 2, 3), (), ())
    headers = {"Accept": "application/json", "Last-Event-ID": str(events[1].id)}
    assert [event["pid"] for event in ask(view, "/api/v1/events", headers=headers).json()] == [3]
    assert len(ask(view, "/api/v1/events", headers={"Accept": "application/json"}).json()) == 3


def test_returning_reader_receives_missed_events_and_notice_of_gaps():
    async def run() -> None:
        view = View()
        view.events = EventLog(1.0, capacity=3)
        app = serving(view)
        published = view.events.publish(frame_with_agents(1, 2, 3, 4, 5), (), ())
        reader = Reader(app, last_event_id=str(published[3].id))
        await reader.wait(lambda text: "data:" in text)
        assert [event["pid"] for event in reader.events()] == [5]
        assert "no longer kept" not in reader.received.decode()
        late = Reader(app, last_event_id=str(published[0].id))
        assert "no longer kept" in await late.wait(lambda text: text.count("data:") == 3)
        confused = Reader(app, last_event_id="from the start, please")
        await confused.wait(lambda text: "retry" in text)
        assert confused.events() == []
        for each in (reader, late, confused):
            each.disconnect.set()
            await each.task

    asyncio.run(run())


def test_missing_events_are_announced_once():
    async def run() -> None:
        frames = route.event_messages(EventLog(1.0), 5, heartbeat_seconds=0.01)
        published = [await anext(frames) for _ in range(4)]
        assert published[1:] == [b": some events are no longer kept\n\n", b": alive\n\n", b": alive\n\n"]
        await frames.aclose()

    asyncio.run(run())


def test_idle_stream_has_heartbeats():
    async def run() -> None:
        ring = EventLog(1.0)
        frames = route.event_messages(ring, ring.last_id, heartbeat_seconds=0.01)
        assert [await anext(frames) for _ in range(3)] == [b"retry: 3000\n\n", b": alive\n\n", b": alive\n\n"]
        await frames.aclose()

    asyncio.run(run())


def test_stuck_reader_is_disconnected_and_blocks_no_other():
    async def run() -> None:
        view = View()
        app = serving(view)
        app.state.reader_timeout_seconds = 0.05
        slow, quick = Reader(app), Reader(app)
        await slow.wait(lambda text: "retry" in text)
        slow.stuck = True
        for pid in range(1, 300):
            view.events.publish(frame_with_agents(*range(1, pid + 1)), (), ())
        await quick.wait(lambda text: text.count("data:") == 299)
        await asyncio.wait_for(slow.task, 10)
        assert app.state.event_streams.used == 1
        quick.disconnect.set()
        await quick.task

    asyncio.run(run())


def test_streams_of_one_user_exclude_no_other_user():
    async def run() -> None:
        app = serving(View())
        honest = Reader(app, "uid:1001")
        await honest.wait(lambda text: "retry" in text)
        greedy = [Reader(app, "uid:1000") for _ in range(MAX_STREAMS - 1)]
        for reader in greedy:
            await reader.wait(lambda text: "retry" in text)
        another = Reader(app, "uid:1002")
        await another.wait(lambda text: "retry" in text)
        await greedy[0].task
        assert (greedy[0].status, greedy[0].more) == (200, False)
        assert not any(reader.task.done() for reader in (*greedy[1:], honest, another))
        for reader in (*greedy[1:], honest, another):
            reader.disconnect.set()
            await reader.task
        assert app.state.event_streams.used == 0

    asyncio.run(run())


def test_streams_serve_a_hundred_viewers_of_one_address():
    async def run() -> None:
        app = serving(View())
        readers = [Reader(app) for _ in range(100)]
        for reader in readers:
            await reader.wait(lambda text: "retry" in text)
        assert not any(reader.task.done() for reader in readers)
        for reader in readers:
            reader.disconnect.set()
            await reader.task

    asyncio.run(run())


def test_newest_events_are_available_as_a_list():
    view = View()
    view.events.publish(frame_with_agents(1, 2), (), ())
    answer = ask(view, "/api/v1/events", headers={"Accept": "application/json"})
    assert [event["pid"] for event in answer.json()] == [1, 2]
    fields = {"id", "at", "kind", "device_uuid", "pid", "start_ticks", "workload", "summary", "details"}
    assert set(answer.json()[0]) == fields
