"""The screen, with its keys pressed, over a daemon that a test plays."""

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
from gpumond.top.connection import RemarksPanel
from gpumond.top.devices import Devices
from tests.top.frames import Played, a_busy_frame, a_frame, playing
from tests.top.screens import lines, text

PLANNED: dict[str, Any] = {"pid": 10, "workload": "train", "allocator": "torch", "driver_released_bytes": None}
PLANNED |= {"expected": {"low": 12 * GIB, "likely": 12 * GIB, "high": 12 * GIB}, "released_bytes": 0}
PLANNED |= {"outcome": "planned", "reason": "", "raced": False, "duration_seconds": 0.5}
PLAN = {"id": "1", "receipts": [PLANNED], "released_bytes": 0}
FREED = PLANNED | {"outcome": "freed", "released_bytes": 12 * GIB, "driver_released_bytes": 12 * GIB}
PROOF = {"id": "2", "receipts": [FREED], "released_bytes": 12 * GIB}


@pytest.fixture
def played() -> Iterator[Played]:
    with playing(a_busy_frame()) as daemon:
        yield daemon


def on_screen(
    played: Played, act: Callable[[Top, Pilot[None]], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    async def run() -> None:
        top = Top(Daemon(played.url), monochrome=True)
        async with top.run_test(size=size) as pilot:
            await act(top, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], top: Top, *words: str, without: str = "") -> str:
    end = time.monotonic() + 15
    while True:
        await pilot.pause(0.05)
        seen = text(top)
        if all(word in seen for word in words) and not (without and without in seen):
            return seen
        assert time.monotonic() < end, f"{words} did not come, or {without!r} stays:\n{seen}"


def test_a_screen_of_80_by_24_shows_the_ledger_the_processes_and_the_keys(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        seen = await until(pilot, top, "train", "python", "Quit")
        assert "H100  50.0 GiB of 80.0 GiB  62%" in seen
        for part in ("# live 20.0 GiB", "+ cached 12.0 GiB", "x stranded 6.0 GiB", "= overhead 2.0 GiB"):
            assert part in seen
        assert "? opaque 10.0 GiB" in seen
        assert "#" * 20 + "+" * 12 + "x" * 6 + "=" * 2 + "?" * 10 + "." * 30 in seen
        assert "a flush of all programs would release about 12.0 GiB" in seen
        assert max(len(line.rstrip()) for line in lines(top)) <= 80
        assert len(lines(top)) <= 24
        for key in ("Sort", "Reverse", "Filter", "Flush", "Details", "Alerts", "Quit"):
            assert key in lines(top)[-1]

    on_screen(played, act)


def test_keys_sort_and_reverse(played: Played):
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

    on_screen(played, act)


def test_a_filter_hides_what_it_does_not_name_until_escape(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        await pilot.press("slash", *"ada", "enter")
        await until(pilot, top, "python", without="train")
        await pilot.press("escape")
        await until(pilot, top, "python", "train")

    on_screen(played, act)


def test_the_cursor_stays_with_its_process_while_rows_change_places(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "python")
        await pilot.press("down")
        await until(pilot, top, "python (pid 11)")
        processes = (
            make_process(11, 39 * GIB, comm="python"),
            make_process(12, 40 * GIB, comm="new"),
            make_process(13, 41 * GIB),
        )
        played.show(a_frame(make_device(used_bytes=80 * GIB, processes=processes), seq=2))
        await until(pilot, top, "new", "python (pid 11)", without="train")
        await pilot.press("d")
        await until(pilot, top, "python (pid 11) on GPU 0", "39.0 GiB")

    on_screen(played, act)


def test_details_say_all_that_is_known_and_follow_the_frames(played: Played):
    verdict = Verdict(
        device_uuid="GPU-a",
        pid=10,
        start_ticks=100,
        kind="leak",
        since=5.0,
        summary="train keeps 1.0 GiB more each minute",
    )
    played.show(a_busy_frame(verdicts=(verdict,)))
    points = [{"at": 999_700.0 + at, "low": GIB, "median": GIB, "high": at * GIB} for at in range(1, 41)]
    played.answers["/api/v1/history"] = (200, {"points": points})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train (pid 10) used in the last 4 min 59 s: 1.0 GiB to 40.0 GiB")
        await pilot.press("enter")
        await until(pilot, top, "train keeps 1.0 GiB more each minute", "frameworks torch 2.13.0", "flush allowed")
        played.show(a_frame(make_device(), seq=2))
        await until(pilot, top, "pid 10 no longer uses a device")
        await pilot.press("escape")
        await until(pilot, top, "no process uses a device")

    on_screen(played, act)


def test_a_flush_shows_the_plan_asks_and_then_shows_the_receipt(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        played.answers["/api/v1/flushes"] = (200, PLAN)
        await pilot.press("f")
        await until(pilot, top, "train (pid 10) torch would release about 12.0 GiB", "Flush? y: yes")
        assert [body["dry_run"] for path, body in played.asked if path == "/api/v1/flushes"] == [True]
        played.answers["/api/v1/flushes"] = (200, PROOF)
        await pilot.press("y")
        await until(pilot, top, "freed, 12.0 GiB of 12.0 GiB expected", "released 12.0 GiB")
        await pilot.press("y")
        asked = [(body["target"], body["dry_run"]) for path, body in played.asked if path == "/api/v1/flushes"]
        assert asked == [({"pid": 10}, True), ({"pid": 10}, False)]
        await pilot.press("escape")
        await until(pilot, top, "train", without="released")

    on_screen(played, act)


@pytest.mark.parametrize("key", ["escape", "n", "q"])
def test_nothing_is_flushed_without_a_yes(played: Played, key: str):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        played.answers["/api/v1/flushes"] = (200, PLAN)
        await pilot.press("F")
        await until(pilot, top, "every program with an agent", "Flush? y: yes")
        await pilot.press(key)
        await until(pilot, top, "train", without="Flush?")
        await pilot.press("y")
        bodies = [body for path, body in played.asked if path == "/api/v1/flushes"]
        assert [(body["target"], body["dry_run"]) for body in bodies] == [({"all": True}, True)]

    on_screen(played, act)


def test_flush_without_releasable_memory_is_not_offered(played: Played):
    none = PLANNED | {"expected": {"low": 0, "likely": 0, "high": 0}}
    played.answers["/api/v1/flushes"] = (200, {"id": "1", "receipts": [none], "released_bytes": 0})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        await pilot.press("g")
        await until(pilot, top, "every program on GPU 0", "would release nothing", "Nothing to release.")
        await pilot.press("y")
        await pilot.pause()
        assert [body["target"] for path, body in played.asked if path == "/api/v1/flushes"] == [{"device": "GPU-a"}]

    on_screen(played, act)


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "no agent matches"), (401, "GPUMOND_TOKEN"), (409, "already under way"), (429, "flushed a moment ago")],
)
def test_refusal_is_shown(played: Played, status: int, said: str):
    detail = "this wants a token" if status == 401 else said
    played.answers["/api/v1/flushes"] = (status, {"detail": detail})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        await pilot.press("f")
        await until(pilot, top, "not flushed", said)

    on_screen(played, act)


def test_timed_out_programs_do_not_hide_receipts_of_others(played: Played):
    late = FREED | {"pid": 11, "workload": "late", "outcome": "timeout", "released_bytes": 0, "reason": "no answer"}
    problem = PROOF | {"detail": "no answer in time from pid 11", "receipts": [FREED, late]}

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        played.answers["/api/v1/flushes"] = (200, PLAN)
        await pilot.press("F")
        await until(pilot, top, "Flush? y: yes")
        played.answers["/api/v1/flushes"] = (504, problem)
        await pilot.press("y")
        await until(pilot, top, "freed, 12.0 GiB", "late (pid 11) torch: timeout", "released 12.0 GiB")

    on_screen(played, act)


def test_a_daemon_that_is_gone_is_said_its_numbers_are_withdrawn_and_come_back(played: Played):
    frame = played.answers["/api/v1/frame"]

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "50.0 GiB of 80.0 GiB")
        played.answers["/api/v1/frame"] = (500, {"detail": "it broke"})
        await until(pilot, top, "THE DAEMON DOES NOT RESPOND", "it broke", "50.0 GiB of 80.0 GiB")
        await until(pilot, top, "THE DAEMON DOES NOT RESPOND", "not shown", without="50.0 GiB")
        assert "train" not in text(top)
        played.answers["/api/v1/frame"] = frame
        await until(pilot, top, "50.0 GiB of 80.0 GiB", "train", without="DOES NOT ANSWER")

    on_screen(played, act)


def test_a_daemon_that_hangs_blocks_neither_the_keys_nor_the_end(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train")
        played.answers["/api/v1/frame"] = None
        await until(pilot, top, "THE DAEMON DOES NOT RESPOND", "no response for")
        await pilot.press("a")
        await until(pilot, top, "Retrying every second.")

    on_screen(played, act)
    assert not played.over.is_set()


def test_a_frame_that_is_not_followed_by_another_is_stale(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, "train", without="NO NEW FRAME")
        await until(pilot, top, "NO NEW FRAME FOR", "the daemon responds, but produces no new frame")

    on_screen(played, act)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (503, {"detail": "the first reading is under way; try again in a second"}, "STARTING"),
        (200, {"status": "ok"}, "the server is not gpumond"),
        (200, [1, 2], "the server is not gpumond"),
        (200, a_frame(), "no device found"),
        (200, a_busy_frame(reports=()), "no program runs the agent"),
    ],
    ids=["starting", "another service", "a list", "no GPU", "no agent"],
)
def test_problems_are_shown(played: Played, status: int, answer: Any, said: str):
    played.answers["/api/v1/frame"] = (status, answer)

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, said)

    on_screen(played, act)


def test_an_answer_may_come_before_there_is_a_screen_to_show_it_on(played: Played):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        Devices().show(top.shown, True, "GPU-a")
        RemarksPanel().show(top.shown, top.link, 0.0)

    on_screen(played, act)


NASTY = "[bold]x[/bold]\x1b[2J\x1b]0;owned\x07‮⁦\n\r\tend" + "W" * 4096


def test_names_of_programs_are_shown_as_text_and_change_nothing(played: Played):
    device = make_device(name=NASTY, used_bytes=GIB, processes=(make_process(10, GIB, comm=NASTY, user=NASTY),))
    verdict = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=5.0, summary=NASTY)
    played.show(a_frame(device, verdicts=(verdict,)))
    nasty = PLANNED | {"workload": NASTY, "reason": NASTY, "outcome": "refused"}
    played.answers["/api/v1/flushes"] = (200, {"id": "1", "receipts": [nasty], "released_bytes": 0})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        for keys in ((), ("d",), ("escape", "a"), ("escape", "F")):
            await pilot.press(*keys)
            seen = await until(pilot, top, "[bold]x[/bold]�[2J" if keys[-1:] != ("F",) else "refused")
            assert not [character for character in seen if not character.isprintable() and character != "\n"]
            assert "owned�" in seen or keys == ()

    on_screen(played, act, (120, 40))


def test_the_example_of_the_api_is_a_receipt_that_can_be_shown(played: Played):

    receipt = TypeAdapter(type(RECEIPT)).dump_python(RECEIPT, mode="json")
    assert receipt.keys() >= PLANNED.keys()
