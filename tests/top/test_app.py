"""The screen and its keys, over a fake daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter
from textual.pilot import Pilot

from gpumond.api.examples import RECEIPT
from gpumond.cli.top import Daemon
from gpumond.model.frame import Verdict
from gpumond.testing import GIB, make_device, make_process
from gpumond.top.app import Top
from gpumond.top.connection import NoticesPanel
from gpumond.top.devices import Devices
from tests.top.frames import FakeDaemon, busy_frame, fake_daemon, make_frame
from tests.top.screens import lines, text

PLANNED: dict[str, Any] = {"pid": 10, "workload": "train", "allocator": "torch", "driver_released_bytes": None}
PLANNED |= {"expected": {"low": 12 * GIB, "likely": 12 * GIB, "high": 12 * GIB}, "released_bytes": 0}
PLANNED |= {"outcome": "planned", "reason": "", "raced": False, "duration_seconds": 0.5}
PLAN = {"id": "1", "receipts": [PLANNED], "released_bytes": 0}
FREED = PLANNED | {"outcome": "freed", "released_bytes": 12 * GIB, "driver_released_bytes": 12 * GIB}
RECEIPT_TEXT = {"id": "2", "receipts": [FREED], "released_bytes": 12 * GIB}


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon(busy_frame()) as daemon:
        yield daemon


def on_screen(
    fake: FakeDaemon, act: Callable[[Top, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    async def run() -> None:
        top = Top(Daemon(fake.url), monochrome=True)
        async with top.run_test(size=size) as pilot:
            await act(top, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], top: Top, *words: str, without: str = "") -> str:
    end = time.monotonic() + 15
    while True:
        await pilot.pause(0.05)
        screen = text(top)
        if all(word in screen for word in words) and not (without and without in screen):
            return screen
        assert time.monotonic() < end, f"{words} did not come, or {without!r} stays:\n{screen}"


def test_screen_of_80_by_24_shows_ledger_processes_and_keys(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        screen = await until(pilot, top, "train", "python", "Quit")
        assert "H100  50.0 GiB of 80.0 GiB  62%" in screen
        for part in ("# live 20.0 GiB", "+ cached 12.0 GiB", "x stranded 6.0 GiB", "= overhead 2.0 GiB"):
            assert part in screen
        assert "? opaque 10.0 GiB" in screen
        assert "#" * 20 + "+" * 12 + "x" * 6 + "=" * 2 + "?" * 10 + "." * 30 in screen
        assert "a flush of all programs would release about 12.0 GiB" in screen
        assert max(len(line.rstrip()) for line in lines(top)) <= 80
        assert len(lines(top)) <= 24
        for key in ("Sort", "Reverse", "Filter", "Flush", "Details", "Alerts", "Quit"):
            assert key in lines(top)[-1]

    on_screen(fake, act)


def test_keys_sort_and_reverse(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        def programs() -> list[str]:
            return [
                word for line in lines(top) for word in line.split() if word in ("train", "python") and "GiB" in line
            ]

        await until(pilot, top, "USED↓", "train")
        assert programs()[:2] == ["train", "python"]
        await pilot.press("r")
        await until(pilot, top, "USED↑")
        assert programs()[:2] == ["python", "train"]
        await pilot.press("s")
        await until(pilot, top, "CACHED↓")
        assert programs()[:2] == ["train", "python"]

    on_screen(fake, act)


def test_filter_hides_other_rows_until_escape(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        await pilot.press("slash", *"research", "enter")
        await until(pilot, top, "python", without="train")
        await pilot.press("escape")
        await until(pilot, top, "python", "train")

    on_screen(fake, act)


def test_cursor_stays_with_its_process_while_rows_move(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "python")
        await pilot.press("down")
        await until(pilot, top, "python (pid 11)")
        processes = (
            make_process(11, 39 * GIB, comm="python"),
            make_process(12, 40 * GIB, comm="new"),
            make_process(13, 41 * GIB),
        )
        fake.show(make_frame(make_device(used_bytes=80 * GIB, processes=processes), seq=2))
        await until(pilot, top, "new", "python (pid 11)", without="train")
        await pilot.press("d")
        await until(pilot, top, "python (pid 11) on GPU 0", "39.0 GiB")

    on_screen(fake, act)


def test_details_show_all_values_and_follow_the_frames(fake: FakeDaemon):
    verdict = Verdict(
        device_uuid="GPU-a",
        pid=10,
        start_ticks=100,
        kind="leak",
        since=5.0,
        summary="train has grown by 1.0 GiB each minute",
    )
    fake.show(busy_frame(verdicts=(verdict,)))
    points = [{"at": 999_700.0 + at, "low": GIB, "median": GIB, "high": at * GIB} for at in range(1, 41)]
    fake.answers["/api/v1/history"] = (200, {"points": points})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train (pid 10) used in the last 4 min 59 s: 1.0 GiB to 40.0 GiB")
        await pilot.press("enter")
        await until(pilot, top, "train has grown by 1.0 GiB each minute", "frameworks torch 2.13.0", "flush allowed")
        fake.show(make_frame(make_device(), seq=2))
        await until(pilot, top, "pid 10 no longer uses a device")
        await pilot.press("escape")
        await until(pilot, top, "no process uses a device")

    on_screen(fake, act)


def test_flush_shows_the_plan_asks_for_confirmation_and_shows_the_receipt(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        await pilot.press("f")
        await until(pilot, top, "train (pid 10) torch would release about 12.0 GiB", "Flush? y: yes")
        assert [body["dry_run"] for path, body in fake.requests if path == "/api/v1/flushes"] == [True]
        fake.answers["/api/v1/flushes"] = (200, RECEIPT_TEXT)
        await pilot.press("y")
        await until(pilot, top, "freed, 12.0 GiB of 12.0 GiB expected", "released 12.0 GiB")
        await pilot.press("y")
        asked = [(body["target"], body["dry_run"]) for path, body in fake.requests if path == "/api/v1/flushes"]
        process = {"pid": 10, "start_ticks": 100}
        assert asked == [(process, True), (process, False)]
        await pilot.press("escape")
        await until(pilot, top, "train", without="released")

    on_screen(fake, act)


@pytest.mark.parametrize("key", ["escape", "n", "q"])
def test_flush_requires_a_confirmation(fake: FakeDaemon, key: str):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        await pilot.press("F")
        await until(pilot, top, "every program with an agent", "Flush? y: yes")
        await pilot.press(key)
        await until(pilot, top, "train", without="Flush?")
        await pilot.press("y")
        bodies = [body for path, body in fake.requests if path == "/api/v1/flushes"]
        assert [(body["target"], body["dry_run"]) for body in bodies] == [({"all": True}, True)]

    on_screen(fake, act)


def test_flush_without_releasable_memory_is_not_offered(fake: FakeDaemon):
    none = PLANNED | {"expected": {"low": 0, "likely": 0, "high": 0}}
    fake.answers["/api/v1/flushes"] = (200, {"id": "1", "receipts": [none], "released_bytes": 0})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        await pilot.press("g")
        await until(pilot, top, "every program on GPU 0", "would release nothing", "Nothing to release.")
        await pilot.press("y")
        await pilot.pause()
        assert [body["target"] for path, body in fake.requests if path == "/api/v1/flushes"] == [{"device": "GPU-a"}]

    on_screen(fake, act)


@pytest.mark.parametrize(
    ("status", "text_shown"),
    [(404, "no agent matches"), (401, "GPUMOND_TOKEN"), (409, "already in progress"), (429, "flushed a moment ago")],
)
def test_refusal_is_shown(fake: FakeDaemon, status: int, text_shown: str):
    detail = "this requires a token" if status == 401 else text_shown
    fake.answers["/api/v1/flushes"] = (status, {"detail": detail})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        await pilot.press("f")
        await until(pilot, top, "not flushed", text_shown)

    on_screen(fake, act)


def test_timed_out_programs_do_not_hide_receipts_of_others(fake: FakeDaemon):
    late = FREED | {"pid": 11, "workload": "late", "outcome": "timeout", "released_bytes": 0, "reason": "no answer"}
    problem = RECEIPT_TEXT | {"detail": "no answer in time from pid 11", "receipts": [FREED, late]}

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        await pilot.press("F")
        await until(pilot, top, "Flush? y: yes")
        fake.answers["/api/v1/flushes"] = (504, problem)
        await pilot.press("y")
        await until(pilot, top, "freed, 12.0 GiB", "late (pid 11) torch: timeout", "released 12.0 GiB")

    on_screen(fake, act)


def test_values_are_withdrawn_while_the_daemon_is_gone(fake: FakeDaemon):
    frame = fake.answers["/api/v1/frame"]

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "50.0 GiB of 80.0 GiB")
        fake.answers["/api/v1/frame"] = (500, {"detail": "it broke"})
        await until(pilot, top, "THE DAEMON DOES NOT RESPOND", "it broke", "50.0 GiB of 80.0 GiB")
        await until(pilot, top, "THE DAEMON DOES NOT RESPOND", "not shown", without="50.0 GiB")
        assert "train" not in text(top)
        fake.answers["/api/v1/frame"] = frame
        await until(pilot, top, "50.0 GiB of 80.0 GiB", "train", without="DOES NOT ANSWER")

    on_screen(fake, act)


def test_hanging_daemon_blocks_neither_keys_nor_exit(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        fake.answers["/api/v1/frame"] = None
        await until(pilot, top, "THE DAEMON DOES NOT RESPOND", "no response for")
        await pilot.press("a")
        await until(pilot, top, "Retrying every second.")

    on_screen(fake, act)
    assert not fake.over.is_set()


def test_frame_without_a_successor_is_stale(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train", without="NO NEW FRAME")
        await until(pilot, top, "NO NEW FRAME FOR", "the daemon responds, but produces no new frame")

    on_screen(fake, act)


@pytest.mark.parametrize(
    ("status", "answer", "text_shown"),
    [
        (503, {"detail": "the first reading is in progress; retry in a second"}, "STARTING"),
        (200, {"status": "ok"}, "the server is not gpumond"),
        (200, [1, 2], "the server is not gpumond"),
        (200, make_frame(), "no device found"),
        (200, busy_frame(reports=()), "no program runs the agent"),
    ],
    ids=["starting", "another service", "a list", "no GPU", "no agent"],
)
def test_problems_are_shown(fake: FakeDaemon, status: int, answer: Any, text_shown: str):
    fake.answers["/api/v1/frame"] = (status, answer)

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, text_shown)

    on_screen(fake, act)


def test_answer_before_the_screen_is_mounted_is_shown(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        Devices().show(top.shown, True, "GPU-a")
        NoticesPanel().show(top.shown, top.link, 0.0)

    on_screen(fake, act)


HOSTILE = "[bold]x[/bold]\x1b[2J\x1b]0;owned\x07‮⁦\n\r\tend" + "W" * 4096


def test_names_of_programs_are_shown_as_plain_text(fake: FakeDaemon):
    device = make_device(name=HOSTILE, used_bytes=GIB, processes=(make_process(10, GIB, comm=HOSTILE, user=HOSTILE),))
    verdict = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=5.0, summary=HOSTILE)
    fake.show(make_frame(device, verdicts=(verdict,)))
    nasty = PLANNED | {"workload": HOSTILE, "reason": HOSTILE, "outcome": "refused"}
    fake.answers["/api/v1/flushes"] = (200, {"id": "1", "receipts": [nasty], "released_bytes": 0})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        for keys in ((), ("d",), ("escape", "a"), ("escape", "F")):
            await pilot.press(*keys)
            screen = await until(pilot, top, "[bold]x[/bold]�[2J" if keys[-1:] != ("F",) else "refused")
            assert not [character for character in screen if not character.isprintable() and character != "\n"]
            assert "owned�" in screen or keys == ()

    on_screen(fake, act, (120, 40))


def test_example_receipt_of_the_api_can_be_shown(fake: FakeDaemon):

    receipt = TypeAdapter(type(RECEIPT)).dump_python(RECEIPT, mode="json")
    assert receipt.keys() >= PLANNED.keys()
