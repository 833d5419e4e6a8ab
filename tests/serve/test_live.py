"""Stream of frames, without a server: what readers receive, and how often it is computed."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gpumond.facts.frame import Frame, FullFrame, Ledger
from gpumond.facts.snapshot import Sensors
from gpumond.serve.full_frame import full_frame
from gpumond.serve.live import HEARTBEAT_SECONDS, MAX_KEPT_MESSAGES, FrameStream, live_frame
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_process, make_report, make_snapshot
from tests.serve.application import View, ask, serving
from tests.serve.event_reader import Reader
from tests.serve.live_frames import as_json, changes_as_json, random_frame, random_wholes


def owner(frame: Any, path: str) -> tuple[Any, str]:
    *part, name = path.split(".")
    return (frame[part[0]] if part else frame), name


def apply(frame: Any, found: Any) -> None:
    """Apply changes as the documentation of the route describes."""
    for path, value in found["values"].items():
        table, name = owner(frame, path)
        table[name] = value
    for path, table_changes in found["tables"].items():
        table, name = owner(frame, path)
        if "rows" in table_changes:
            added = iter(table_changes["added"])
            table[name] = [next(added) if row < 0 else table[name][row] for row in table_changes["rows"]]
        for path_in_row, (places, values) in table_changes.get("cells", {}).items():
            *way, field = path_in_row.split(".")
            for place, value in zip(places, values, strict=True):
                target = table[name][place]
                for key in way:
                    target = target[int(key) if key.isdecimal() else key]
                target[field] = value


@pytest.mark.parametrize("seed", range(20))
def test_changes_make_each_frame_of_the_previous_one(seed: int):
    wholes = random_wholes(seed)
    shown = as_json(wholes[0])
    for before, after in pairwise(wholes):
        apply(shown, changes_as_json(before, after))
        assert shown == as_json(after)


def test_idle_times_are_sent_in_whole_seconds():
    def whole(age: float) -> FullFrame:
        snapshot = make_snapshot(make_device(processes=(make_process(7, GIB, idle_seconds=age),)))
        return full_frame(Frame(snapshot, make_ledger(snapshot)))

    def after(age: float) -> Any:
        return changes_as_json(live_frame(whole(0.12)), live_frame(whole(age)))

    assert after(0.93)["tables"] == {}
    assert after(1.26)["tables"]["processes"]["cells"] == {"idle_seconds": [[0], [1]]}


def test_change_in_an_object_is_that_of_its_field():
    def whole(watts: float) -> FullFrame:
        device = make_device("GPU-0", sensors=Sensors(power_watts=watts))
        return full_frame(Frame(make_snapshot(device), Ledger()))

    tables = changes_as_json(whole(100.0), whole(110.0))["tables"]
    assert tables == {"snapshot.devices": {"cells": {"sensors.power_watts": [[0], [110.0]]}}}


@pytest.mark.parametrize("seed", range(5))
def test_stream_omits_what_the_table_of_processes_has(seed: int):
    rng = random.Random(seed)
    whole = full_frame(random_frame(rng, 1))
    sent = live_frame(whole)
    assert all(line.pid is None for line in sent.ledger.lines)
    assert not sent.snapshot.reports
    for line in whole.ledger.lines:
        own = [each for each in whole.processes if each.device_uuid == line.device_uuid and each.pid == line.pid]
        assert line.pid is None or [getattr(each, f"{line.share}_bytes") for each in own] == [line.used_bytes]


def test_stream_has_the_reports_of_workloads_without_gpu_memory():
    device = make_device("GPU-0", used_bytes=GIB, processes=(make_process(10, GIB),))
    reports = (
        make_report(10, (), workload="train"),
        make_report(11, (), workload="train"),
        make_report(12, (), workload="lm"),
    )
    sent = live_frame(full_frame(Frame(make_snapshot(device, reports=reports), Ledger())))
    assert [report.pid for report in sent.snapshot.reports] == [12]


def test_unchanged_frame_has_no_changes():
    (whole, *_) = random_wholes(1)
    assert changes_as_json(whole, replace(whole)) == {"values": {}, "tables": {}}


class LiveView(View):
    """A daemon whose next frame is taken by the test."""

    def __init__(self) -> None:
        super().__init__(random_frame(random.Random(1), 1))
        self._taken = asyncio.Event()

    def take(self, frame: Frame) -> None:
        self.frame = frame
        self.events.publish(frame, (), ())
        self._taken.set()
        self._taken = asyncio.Event()

    async def await_frame(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._taken.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True


def messages(received: bytes) -> list[tuple[str, Any]]:
    """Return the kind and the content of each message; comments are left out."""
    found = []
    for message in received.decode().split("\n\n"):
        if message.startswith("event: "):
            kind, _, data = message.partition("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def shown_frame(received: bytes) -> Any:
    """Return the frame that the messages lead to."""
    frame: Any = None
    for kind, content in messages(received):
        content.pop("events")
        if kind == "frame":
            frame = content
        else:
            apply(frame, content)
    return frame


async def until(found: Callable[[], object]) -> None:
    for _ in range(2000):
        if found():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in time")


Scene = Callable[[LiveView, Callable[..., Reader], FrameStream], Coroutine[Any, Any, None]]


def with_readers(scene: Scene, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
    async def run() -> None:
        view = LiveView()
        app = serving(view)
        app.state.live = FrameStream(view, heartbeat_seconds)
        task = asyncio.create_task(app.state.live.run())
        readers: list[Reader] = []

        def connect(**headers: str) -> Reader:
            readers.append(Reader(app, path="/api/v1/live", **headers))
            return readers[-1]

        await scene(view, connect, app.state.live)
        for reader in readers:
            reader.disconnect.set()
            await reader.task
        task.cancel()
        assert app.state.event_streams.used == 0

    asyncio.run(run())


def test_reader_receives_a_frame_then_changes_and_events():
    async def scene(view: LiveView, connect: Callable[..., Reader], _: FrameStream) -> None:
        rng, reader = random.Random(2), connect()
        await until(lambda: messages(reader.received))
        for seq in range(2, 8):
            view.take(random_frame(rng, seq))
            await until(lambda seq=seq: len(messages(reader.received)) == seq)
            assert view.frame is not None
            assert shown_frame(reader.received) == as_json(live_frame(full_frame(view.frame)))
        kinds, contents = zip(*messages(reader.received), strict=True)
        assert kinds == ("frame", *["changes"] * 6)
        published = [event.id for event in view.events.newest()]
        assert [event["id"] for content in contents for event in content["events"]] == published != []

    with_readers(scene)


def test_compressed_stream_equals_the_plain_one():
    async def scene(view: LiveView, connect: Callable[..., Reader], _: FrameStream) -> None:
        plain, packed = connect(), connect(accept_encoding="gzip, br")
        await until(lambda: messages(plain.received) and packed.received)
        for seq in range(2, 6):
            view.take(random_frame(random.Random(seq), seq))
            await until(lambda seq=seq: len(messages(plain.received)) == seq)

        def unpacked() -> bytes:
            return zlib.decompressobj(31).decompress(bytes(packed.received))

        await until(lambda: messages(unpacked()) == messages(plain.received))
        assert unpacked().startswith(b"retry: 3000\n\n")

    with_readers(scene)


def test_changes_are_computed_once_and_only_for_readers():
    async def scene(view: LiveView, connect: Callable[..., Reader], frames: FrameStream) -> None:
        view.take(random_frame(random.Random(2), 2))
        await asyncio.sleep(0.05)
        assert frames.number == 0
        readers = [connect(accept_encoding="gzip") for _ in range(5)]
        await until(lambda: all(reader.received for reader in readers))
        number = frames.number
        for seq in range(3, 6):
            sizes = [len(reader.received) for reader in readers]
            view.take(random_frame(random.Random(seq), seq))
            await until(lambda sizes=sizes: all(len(r.received) > s for r, s in zip(readers, sizes, strict=True)))
        assert frames.number == number + 3

    with_readers(scene)


def test_slow_reader_receives_a_frame_in_place_of_changes_that_are_no_longer_kept():
    async def scene(view: LiveView, connect: Callable[..., Reader], _: FrameStream) -> None:
        slow, quick = connect(), connect()
        await until(lambda: messages(slow.received) and messages(quick.received))
        slow.blocked = asyncio.Event()
        for seq in range(2, MAX_KEPT_MESSAGES + 5):
            view.take(random_frame(random.Random(seq), seq))
            await until(lambda seq=seq: len(messages(quick.received)) == seq)
        slow.blocked.set()
        await until(lambda: [kind for kind, _ in messages(slow.received)].count("frame") == 2)
        assert shown_frame(slow.received) == shown_frame(quick.received)

    with_readers(scene)


def test_reader_receives_comments_while_no_frame_is_taken():
    async def scene(view: LiveView, connect: Callable[..., Reader], _: FrameStream) -> None:
        reader = connect()
        await until(lambda: reader.received.count(b": alive\n\n") > MAX_KEPT_MESSAGES + 1)
        late = connect()
        await until(lambda: messages(late.received))
        view.take(random_frame(random.Random(2), 2))
        await until(lambda: len(messages(late.received)) == 2)
        assert shown_frame(late.received) == shown_frame(reader.received)

    with_readers(scene, heartbeat_seconds=0.01)


def test_stream_before_the_first_frame_is_refused():
    answer = ask(View(frame=None), "/api/v1/live")
    assert answer.status_code == 503
