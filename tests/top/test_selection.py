"""Selection of one device: its processes, its history, its flush."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from gpumond.cli.top import Daemon
from gpumond.testing import GIB, make_device, make_pool, make_process, make_report
from gpumond.top.app import Top
from gpumond.top.view import at_index, neighbour, processes_on, view
from tests.top.frames import FakeDaemon, fake_daemon, make_frame
from tests.top.screens import lines, text

NAMES = ("alpha", "beta", "gamma")


def three(count: int = 3, **fields: Any) -> dict[str, Any]:
    """Device N has one program; the second one's has an agent."""
    devices = [
        make_device(
            f"GPU-{index}",
            index=index,
            name=f"H10{index}",
            used_bytes=(index + 1) * GIB,
            processes=(make_process(10 + index, (index + 1) * GIB, comm=NAMES[index % 3]),),
        )
        for index in range(count)
    ]
    report = make_report(11, (make_pool("GPU-1", live=GIB),), workload="beta")
    return make_frame(*devices, reports=(report,), **fields)


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon(three()) as daemon:
        points = [{"at": 100.0 + 10 * at, "low": GIB, "median": GIB, "high": GIB} for at in range(5)]
        daemon.answers["/api/v1/history"] = (200, {"points": points})
        yield daemon


def on_screen(fake: FakeDaemon, act: Callable[[Top, Pilot[None]], Awaitable[None]], size: tuple[int, int]) -> None:
    async def run() -> None:
        top = Top(Daemon(fake.url), monochrome=True)
        async with top.run_test(size=size) as pilot:
            await act(top, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], top: Top, condition: Callable[[str], bool]) -> str:
    for _ in range(300):
        await pilot.pause(0.05)
        if condition(text(top)):
            return text(top)
    raise AssertionError(f"it did not come:\n{text(top)}")


def table(seen: str) -> set[str]:
    """Return the programs that have a row."""
    return {name for name in NAMES if any(name in line.split()[:3] for line in seen.splitlines())}


def test_arrows_select_devices_and_escape_shows_all(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, lambda seen: table(seen) == set(NAMES))
        for key, name in (("right", "alpha"), ("right", "beta"), ("right", "gamma"), ("left", "beta")):
            await pilot.press(key)
            await until(pilot, top, lambda seen, name=name: table(seen) == {name})  # type: ignore[misc]
        await pilot.press("escape")
        await until(pilot, top, lambda seen: table(seen) == set(NAMES))
        await pilot.press("left")
        await until(pilot, top, lambda seen: table(seen) == {"gamma"})
        await pilot.press("right")
        await until(pilot, top, lambda seen: table(seen) == set(NAMES))

    on_screen(fake, act, (100, 40))


def test_digit_selects_the_device_of_that_index(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, lambda seen: table(seen) == set(NAMES))
        await pilot.press("1")
        await until(pilot, top, lambda seen: table(seen) == {"beta"})
        await pilot.press("9")  # this device does not exist
        await pilot.pause(0.2)
        assert table(text(top)) == {"beta"}

    on_screen(fake, act, (100, 40))


def test_history_is_that_of_the_selected_device_or_process(fake: FakeDaemon):
    def history_requests() -> list[str]:
        return [path for path, _ in fake.queries if "history" in path]

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, lambda seen: "gamma (pid 12) used in" in seen)
        await pilot.press("1")
        await until(pilot, top, lambda seen: "GPU 1 H101 used in" in seen)
        assert "uuid=GPU-1" in history_requests()[-1]
        assert "pid=" not in history_requests()[-1]
        await pilot.press("d")
        await until(pilot, top, lambda seen: "beta (pid 11) on GPU 1" in seen and "used in" in seen)
        assert "pid=11" in history_requests()[-1]
        await pilot.press("escape", "escape")
        await until(pilot, top, lambda seen: "(pid 11) used in" in seen and table(seen) == set(NAMES))

    on_screen(fake, act, (100, 40))


def test_g_flushes_the_selected_device(fake: FakeDaemon):
    fake.answers["/api/v1/flushes"] = (404, {"detail": "no agent matches"})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, lambda seen: table(seen) == set(NAMES))
        await pilot.press("1", "g")
        await until(pilot, top, lambda seen: "no agent matches" in seen)
        (body,) = [body for path, body in fake.requests if path == "/api/v1/flushes"]
        assert body["target"] == {"device": "GPU-1"}

    on_screen(fake, act, (100, 40))


def test_selected_device_is_marked_and_visible_among_many():
    with fake_daemon(three(16)) as fake:

        async def act(top: Top, pilot: Pilot[None]) -> None:
            await until(pilot, top, lambda seen: "alpha" in seen)
            assert not any(line.startswith("15 ") for line in lines(top))
            await pilot.press("left")
            await until(pilot, top, lambda _: any(line.startswith("15 ") for line in lines(top)))

        on_screen(fake, act, (80, 24))


def test_missing_device_is_deselected(fake: FakeDaemon):
    async def act(top: Top, pilot: Pilot[None]) -> None:
        await until(pilot, top, lambda seen: table(seen) == set(NAMES))
        await pilot.press("2")
        await until(pilot, top, lambda seen: table(seen) == {"gamma"})
        fake.show(three(2, seq=2))
        await until(pilot, top, lambda seen: table(seen) == {"alpha", "beta"})

    on_screen(fake, act, (100, 40))


@pytest.mark.parametrize(("count", "offered"), [(1, False), (3, True)])
def test_key_hints_include_the_selection_if_there_are_several_devices(count: int, offered: bool):
    with fake_daemon(three(count)) as fake:

        async def act(top: Top, pilot: Pilot[None]) -> None:
            await until(pilot, top, lambda seen: "alpha" in seen and "Quit" in seen.splitlines()[-1])
            assert ("←→ GPU" in lines(top)[-1]) == offered

        on_screen(fake, act, (80, 24))


def test_selection_cycles_through_all_devices_and_none():
    seen = view(three())
    assert [neighbour(seen, uuid, 1) for uuid in (None, "GPU-0", "GPU-2")] == ["GPU-0", "GPU-1", None]
    assert [neighbour(seen, uuid, -1) for uuid in (None, "GPU-0", "gone")] == ["GPU-2", None, "GPU-2"]
    assert [at_index(seen, index) for index in (0, 2, 3)] == ["GPU-0", "GPU-2", None]


def test_device_shows_the_processes_of_its_instances():
    card = make_device("GPU-0", index=0, used_bytes=2 * GIB, processes=())
    instance = make_device("MIG-0", index=0, parent_uuid="GPU-0", used_bytes=GIB, processes=(make_process(10, GIB),))
    seen = view(make_frame(card, instance))
    assert [row.pid for row in processes_on(seen, "GPU-0")] == [10]
    assert [row.pid for row in processes_on(seen, "MIG-0")] == [10]
    assert [row.pid for row in processes_on(seen, None)] == [10]
