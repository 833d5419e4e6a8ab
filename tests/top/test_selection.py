"""Selection of devices: their lines, their processes, their history, their flush; several daemons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import Sensors
from gpumond.view.frame import device_at_index, frame_view, merge_views, neighbor_uuid, processes_on, split_merged_uuid
from tests.helpers.agents import GIB
from tests.helpers.frames import FakeDaemon, fake_daemon, make_frame, share_history
from tests.helpers.running import until
from tests.helpers.screens import top
from tests.helpers.values import make_device, make_pool, make_process, make_report

pytestmark = pytest.mark.slow

NAMES = ("alpha", "beta", "gamma")
LARGE = (100, 40)


def three(count: int = 3, **fields: Any) -> dict[str, Any]:
    """Device N has one program; the second one's has an agent."""
    devices = [
        make_device(
            f"GPU-{index}",
            index=index,
            name=f"NVIDIA H10{index}",
            used_bytes=(index + 1) * GIB,
            free_bytes=(79 - index) * GIB,
            sensors=Sensors(gpu_utilization_ratio=0.94, gpu_temperature_celsius=69.0, power_watts=500.0 + index),
            processes=(make_process(10 + index, (index + 1) * GIB, comm=NAMES[index % 3]),),
        )
        for index in range(count)
    ]
    report = make_report(11, (make_pool("GPU-1", live=GIB),), workload="beta")
    return make_frame(*devices, reports=(report,), **fields)


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon(three()) as daemon:
        points = [(100.0 + 10 * at, GIB) for at in range(5)]
        daemon.answers["/api/v1/history/shares"] = (200, share_history(points))
        yield daemon


def table(screen: str) -> set[str]:
    """Return the programs that have a row."""
    return {name for name in NAMES if any(name in line.split()[:3] for line in screen.splitlines())}


def test_arrows_select_devices_and_escape_shows_all(fake: FakeDaemon):
    with top(fake.url, size=LARGE) as session:
        session.until(lambda screen: table(screen) == set(NAMES))
        for key, name in (("right", "alpha"), ("right", "beta"), ("right", "gamma"), ("left", "beta")):
            session.press(key)
            session.until(lambda screen, name=name: table(screen) == {name})  # type: ignore[misc]
        session.press("escape")
        session.until(lambda screen: table(screen) == set(NAMES))
        session.press("left")
        session.until(lambda screen: table(screen) == {"gamma"})
        session.press("right")
        session.until(lambda screen: table(screen) == set(NAMES))


def test_digit_selects_the_device_of_that_index(fake: FakeDaemon):
    with top(fake.url, size=LARGE) as session:
        session.until(lambda screen: table(screen) == set(NAMES))
        session.press("1")
        session.until(lambda screen: table(screen) == {"beta"})
        session.press("9", "?")  # this device does not exist
        session.shows("next and previous row")
        session.press("?")
        session.until(lambda screen: table(screen) == {"beta"})


def test_click_selects_a_device(fake: FakeDaemon):
    with top(fake.url) as session:
        session.until(lambda screen: table(screen) == set(NAMES))
        row = next(at for at, line in enumerate(session.screen.lines()) if "H101" in line)
        session.click(10, row)
        session.until(lambda screen: table(screen) == {"beta"})


def test_history_is_that_of_the_selected_device_or_process(fake: FakeDaemon):
    def history_requests() -> list[str]:
        return [path for path, _ in [*fake.queries] if "history" in path]

    with top(fake.url, size=LARGE) as session:
        session.shows("gamma (pid 12) used in")
        session.press("1")
        session.shows("GPU 1 NVIDIA H101 used in")
        assert "uuid=GPU-1" in history_requests()[-1]
        assert not any("pid=" in path for path in history_requests()[-1:])
        session.press("d")
        session.shows("beta (pid 11) on GPU 1", "used in")
        assert "pid=11" in history_requests()[-1]
        session.press("escape", "escape")
        session.until(lambda screen: "(pid 11) used in" in screen and table(screen) == set(NAMES))


def test_capital_f_flushes_the_selected_device(fake: FakeDaemon):
    fake.answers["/api/v1/flushes"] = (404, {"detail": "no agent matches"})
    with top(fake.url, size=LARGE) as session:
        session.until(lambda screen: table(screen) == set(NAMES))
        session.press("1", "F")
        session.shows("every program on GPU 1", "no agent matches")
        (body,) = [body for path, body in fake.requests if path == "/api/v1/flushes"]
        assert body["target"] == {"device": "GPU-1"}


def test_selected_device_is_marked_and_visible_among_many():
    with fake_daemon(three(16)) as fake, top(fake.url) as session:
        session.shows("alpha")
        assert not any(line.startswith("15 ") for line in session.screen.lines())
        session.press("left")
        session.until(lambda screen: any(line.startswith("15 ") for line in screen.splitlines()))


@pytest.mark.parametrize(("count", "size"), [(1, (80, 24)), (3, (80, 24)), (8, (80, 24)), (3, (160, 50))])
def test_name_sensors_and_memory_are_shown_in_every_layout(count: int, size: tuple[int, int]):
    """The table keeps at least four rows, among them that of the cursor."""
    with fake_daemon(three(count)) as fake, top(fake.url, size=size) as session:
        lines = session.until(lambda screen: "gpumond" in screen and f"H10{count - 1}" in screen and "Quit" in screen)
        for index in range(count):
            (line,) = [line for line in lines.splitlines() if f"H10{index}" in line and "°C" in line]
            for value in ("94% busy", "69 °C", f"{500 + index} W", f"{index + 1}.0"):
                assert value in line
        assert sum(name in line.split()[:3] for line in lines.splitlines() for name in NAMES) >= min(count, 4)


def test_missing_device_is_deselected(fake: FakeDaemon):
    with top(fake.url, size=LARGE) as session:
        session.until(lambda screen: table(screen) == set(NAMES))
        session.press("2")
        session.until(lambda screen: table(screen) == {"gamma"})
        fake.show(three(2, seq=2))
        session.until(lambda screen: table(screen) == {"alpha", "beta"})


def test_several_daemons_are_one_view(fake: FakeDaemon):
    with fake_daemon(three(1)) as other, top(fake.url, other.url, size=LARGE) as session:
        first, second = (url.removeprefix("http://") for url in (fake.url, other.url))
        screen = session.until(lambda screen: screen.count("alpha") >= 2 and "beta" in screen)
        assert all(f"GPU {label} NVIDIA" in screen for label in (f"{first}:0", f"{first}:2", f"{second}:0"))
        for daemon in (fake, other):
            daemon.answers["/api/v1/flushes"] = (404, {"detail": "no agent matches"})
        session.press("left", "F")
        session.shows(f"every program on GPU {second}:0", "no agent matches")
        assert [body["target"] for path, body in other.requests if path == "/api/v1/flushes"] == [{"device": "GPU-0"}]
        assert not [body for path, body in fake.requests if path == "/api/v1/flushes"]
        session.press("escape", "escape")
        other.answers["/api/v1/frame"] = (500, {"detail": "it broke"})
        session.shows(f"{second.upper()}: NO RESPONSE SINCE", "beta")
        session.until(lambda screen: "beta" in screen and f"{second}:0" not in screen)


def test_selected_device_hides_problems_of_the_others(fake: FakeDaemon):
    leaks = [
        Verdict(device_uuid=f"GPU-{at}", pid=10 + at, start_ticks=100, kind="leak", since=5.0, summary=f"{name} leaks")
        for at, name in enumerate(NAMES[:2])
    ]
    fake.show(three(verdicts=tuple(leaks)))
    with top(fake.url, size=(100, 30)) as session:
        session.shows("alpha leaks", "beta leaks", "a flush of all programs")
        session.press("1")
        session.shows("beta leaks", "1 problem on other GPUs", "the programs on GPU 1", without="alpha leaks")
        session.press("a")
        session.shows("leak: beta leaks", "1 problem on other GPUs", without="alpha leaks")


def test_merged_views_have_the_rows_of_all_daemons():
    one, other = frame_view(three()), frame_view(three(1))
    both = merge_views([("a", one), ("gone", None), ("b", other)])
    assert [device.label for device in both.devices] == ["a:0", "a:1", "a:2", "b:0"]
    assert [row.gpu for row in both.processes] == ["a:2", "a:1", "a:0", "b:0"]
    assert [split_merged_uuid(device.uuid) for device in both.devices[-2:]] == [(0, "GPU-2"), (2, "GPU-0")]
    assert len({row.key for row in both.processes}) == 4
    assert (both.agents, both.reclaimable_bytes) == (one.agents + other.agents, one.reclaimable_bytes)


def test_frames_of_several_daemons_are_requested_every_second(fake: FakeDaemon):
    with fake_daemon(three(1)) as other, top(fake.url, other.url):
        until(lambda: min(sum(path.endswith("frame") for path, _ in [*each.requests]) for each in (fake, other)) > 2)


def test_selection_cycles_through_all_devices_and_none():
    content = frame_view(three())
    assert [neighbor_uuid(content, uuid, 1) for uuid in (None, "GPU-0", "GPU-2")] == ["GPU-0", "GPU-1", None]
    assert [neighbor_uuid(content, uuid, -1) for uuid in (None, "GPU-0", "gone")] == ["GPU-2", None, "GPU-2"]
    assert [device_at_index(content, index) for index in (0, 2, 3)] == ["GPU-0", "GPU-2", None]


def test_device_shows_the_processes_of_its_instances():
    whole = make_device("GPU-0", index=0, used_bytes=2 * GIB, processes=())
    instance = make_device("MIG-0", index=0, parent_uuid="GPU-0", used_bytes=GIB, processes=(make_process(10, GIB),))
    content = frame_view(make_frame(whole, instance))
    assert [row.pid for row in processes_on(content, "GPU-0")] == [10]
    assert [row.pid for row in processes_on(content, "MIG-0")] == [10]
    assert [row.pid for row in processes_on(content, None)] == [10]
