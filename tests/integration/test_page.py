"""The page in a real Chromium, on real daemons."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpumond.cli.table import size
from gpumond.sim.card import Spec, create
from gpumond.units import human
from tests.fakenvml import FakeDriver, Process, machine
from tests.integration.browser import PHONE, Sight, axe, chromium, looking, needs_chromium, ready, sign_in
from tests.integration.hostile import COMM, LONG, NAME, holding
from tests.making import GIB
from tests.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
Serve = Callable[..., RunningDaemon]
PROGRAMS = ("training", "serving", "leak", "fragmentation")
SHARES = ("live", "cached", "stranded", "overhead", "opaque", "unclaimed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    daemon = RunningDaemon(tmp_path_factory.mktemp("page") / "demo", "--interval", "0.5", verb="demo")
    ready(daemon, PROGRAMS)
    yield daemon
    daemon.stop()


@pytest.fixture
def sight(browser: Browser, demo: RunningDaemon) -> Iterator[Sight]:
    with looking(browser, demo) as sight:
        sight.page.locator("tbody").first.wait_for()
        yield sight


def frame_and_texts(sight: Sight, *selectors: str) -> tuple[Any, list[list[str]]]:
    """The next frame that the page is given, and what it then shows."""
    with sight.page.expect_response(lambda answer: "/frame" in answer.url and answer.status == 200) as caught:
        pass
    frame = caught.value.json()
    sight.page.wait_for_function(
        "seq => document.documentElement.dataset.seq === seq", arg=str(frame["snapshot"]["seq"])
    )
    texts = sight.texts("html", *selectors)
    return frame, texts[1:]


def test_every_number_is_the_api_s_of_the_same_frame(sight: Sight):
    frame, (used, legend, promise, programs, sizes) = frame_and_texts(
        sight,
        ".total",
        ".legend dd",
        ".promise",
        "tbody .of-program bdi",
        "tbody td.number:not(.of-gpu, .of-pid)",
    )
    (device,) = frame["snapshot"]["devices"]
    share = {
        name: sum(line["used_bytes"] for line in frame["ledger"]["lines"] if line["share"] == name) for name in SHARES
    }
    ratio = round(100 * device["used_bytes"] / device["size_bytes"])
    assert used == [f"{human(device['used_bytes'])} of {human(device['size_bytes'])} used · {ratio} %"]
    assert legend == [
        *(human(share[name]) for name in SHARES if share[name]),
        human(device["free_bytes"]),
        human(device["reserved_bytes"]),
    ]
    cached = human(share["cached"])
    assert promise == [f"A flush would return {f'about {cached}' if share['cached'] else 'nothing'}."]
    processes = sorted(frame["processes"], key=lambda process: -process["used_bytes"])
    assert programs == [process["workload"] for process in processes]
    columns = ("used", *SHARES[:5])
    expected = [process[f"{column}_bytes"] for process in processes for column in columns]
    assert sizes == [size(value) for value in expected]


def test_the_bar_is_as_long_as_what_it_shows(sight: Sight):
    frame, _ = frame_and_texts(sight)
    script = """() => {
        const bar = document.querySelector('.device .bar');
        const width = node => node.hidden ? 0 : node.getBoundingClientRect().width;
        return [width(bar), ...[...bar.children].map(width)];
    }"""
    (device,) = frame["snapshot"]["devices"]
    whole, *parts = sight.page.evaluate(script)
    for name, width in zip(SHARES, parts, strict=False):
        held = sum(line["used_bytes"] for line in frame["ledger"]["lines"] if line["share"] == name)
        if held and width > 2:
            assert width / whole == pytest.approx(held / device["size_bytes"], abs=0.05), name
    assert parts[0] > parts[2]


SIZES = [
    None,
    0,
    1,
    1023,
    1024,
    1280,
    1792,
    10 * 1024**2,
    1047552,
    1048575,
    5 * GIB // 4,
    7 * GIB // 4,
    80 * GIB,
    3**25,
    -1280,
]


def test_sizes_read_as_on_the_command_line(sight: Sight):
    script = "async sizes => { const { human } = await import('/page.js'); return sizes.map(human); }"
    assert sight.page.evaluate(script, SIZES) == [size(value) for value in SIZES]


def test_a_flush_shows_its_plan_asks_and_shows_its_receipt(browser: Browser, serve: Serve):
    daemon = serve("--interval", "0.2", verb="demo")
    ready(daemon, PROGRAMS)
    with looking(browser, daemon) as sight:
        page = sight.page
        page.get_by_role("button", name="Flush training…").click(timeout=60_000)
        page.get_by_label("Token").fill("gpm_wrong")
        page.get_by_label("Token").press("Enter")
        sight.shows("That token was not accepted.")
        sign_in(sight, daemon)
        dialog = page.locator("dialog#flush")
        dialog.get_by_text("are expected back").wait_for()
        assert dialog.get_by_text("planned").count() == 1
        assert [receipt["outcome"] for receipt in receipts_of(daemon, "training")] == ["planned"]
        dialog.get_by_role("button", name="Flush now").click()
        dialog.get_by_text("came back.").wait_for(timeout=60_000)
        _, receipt = receipts_of(daemon, "training")
        facts = dict(zip(*sight.texts("#receipts dt", "#receipts dd"), strict=True))
        assert sight.texts("#flush-words")[0] == [f"{human(receipt['released_bytes'])} came back."]
        assert facts["came back"] == human(receipt["released_bytes"])
        assert facts["driver saw"] == human(receipt["driver_released_bytes"])
        assert facts["held"] == f"{human(receipt['before']['held_bytes'])} → {human(receipt['after']['held_bytes'])}"
        assert sight.texts("#receipts .outcome")[0] == [receipt["outcome"]]
        dialog.get_by_role("button", name="Close").click()
        page.locator("#events .flush").wait_for()  # told by the stream, without a reload
        token = (daemon.directory / "token").read_text().strip()
        assert not [url for url in sight.asked if token in url]
        assert page.context.cookies() == []
        assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
        page.get_by_role("button", name="Sign out").click()
        assert page.evaluate("sessionStorage.length") == 0


def receipts_of(daemon: RunningDaemon, workload: str) -> list[Any]:
    return [receipt for receipt in daemon.get("receipts") if receipt["workload"] == workload]


def test_a_refusal_is_shown_in_the_daemon_s_words(browser: Browser, demo: RunningDaemon):
    def refuse(route: Route) -> None:
        if route.request.method == "POST" and not json.loads(route.request.post_data or "{}")["dry_run"]:
            problem = {"title": "Too Many Requests", "status": 429, "detail": "all was flushed a moment ago"}
            route.fulfill(status=429, json=problem, content_type="application/problem+json")
        else:
            route.continue_()

    with looking(browser, demo, guard=refuse) as sight:
        sight.page.get_by_role("button", name="Flush all…").click()
        sign_in(sight, demo)
        sight.page.get_by_role("button", name="Flush now").click()
        sight.shows("all was flushed a moment ago")
        assert sight.texts("#receipts")[0] == [""]


def test_who_gives_no_token_flushes_nothing(sight: Sight, demo: RunningDaemon):
    before = demo.get("receipts")
    sight.page.get_by_role("button", name="Flush all…").click()
    sight.page.get_by_role("dialog", name="Sign in").get_by_role("button", name="Cancel").click()
    sight.page.locator("dialog#flush").wait_for(state="hidden")
    assert demo.get("receipts") == before


def test_the_keyboard_sorts_filters_and_opens(sight: Sight):
    page = sight.page
    page.get_by_role("button", name="Program").focus()
    page.keyboard.press("Enter")
    assert sight.texts("tbody .of-program bdi") == [sorted(PROGRAMS)]
    assert page.locator("th[aria-sort=ascending]").inner_text().strip("↑ ") == "Program"
    page.keyboard.press("Enter")
    assert sight.texts("tbody .of-program bdi") == [sorted(PROGRAMS, reverse=True)]
    page.keyboard.press("/")
    page.keyboard.type("LEAK")
    assert sight.texts("tbody .of-program bdi", "#shown") == [["leak"], ["1 of 4"]]
    page.keyboard.press("Tab")
    page.get_by_role("button", name="leak", exact=True).focus()
    page.keyboard.press("Enter")
    chart = page.locator("tbody .history svg")
    chart.wait_for()
    assert page.get_by_role("button", name="leak", exact=True).get_attribute("aria-expanded") == "true"
    assert re.fullmatch(r"Used between .+ and .+ in .+; .+ last\.", chart.get_attribute("aria-label") or "")
    drawn = page.evaluate("[...document.querySelectorAll('tbody svg path')].map(path => path.getAttribute('d').length)")
    assert all(length > 20 for length in drawn)
    page.keyboard.press("Enter")
    chart.wait_for(state="hidden")


def test_rows_stay_where_they_are_under_a_hand(browser: Browser, demo: RunningDaemon):
    frames = 0

    def turn_round(frame: Any) -> None:
        """In every frame the order is the other way round."""
        nonlocal frames
        frames += 1
        for place, process in enumerate(sorted(frame["processes"], key=lambda process: process["pid"])):
            process["used_bytes"] = GIB * (place if frames % 2 else 9 - place)

    with looking(browser, demo, rewrite=turn_round) as sight:
        rows = sight.page.locator("tbody .of-program")
        rows.first.wait_for()

        def orders(seconds: int) -> set[tuple[str, ...]]:
            seen = set()
            for _ in range(10 * seconds):
                seen.add(tuple(sight.texts("tbody .of-pid")[0]))
                sight.page.wait_for_timeout(100)
            return seen

        rows.nth(1).hover()
        sight.page.wait_for_timeout(100)
        assert len(orders(4)) == 1
        sight.page.mouse.move(0, 0)
        assert len(orders(4)) == 2


def test_nobody_is_asked_while_the_tab_is_hidden(sight: Sight):
    turn = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    sight.page.evaluate(turn, True)
    sight.page.wait_for_timeout(300)
    sight.asked.clear()
    sight.page.wait_for_timeout(2500)
    assert sight.asked == []
    sight.page.evaluate(turn, False)
    sight.page.wait_for_timeout(500)
    assert [url for url in sight.asked if url.endswith("/frame")]
    assert [url for url in sight.asked if url.endswith("/events")]


def test_without_a_driver_it_says_what_to_do(browser: Browser, serve: Serve):
    daemon = serve("--source", "nvml")
    with looking(browser, daemon) as sight:
        sight.shows("No device can be read: library_not_found")
        sight.shows("gpumond demo")


def test_without_a_device_it_says_so(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with looking(browser, daemon) as sight:
        until(lambda: daemon.request("/-/ready")[0] == 200)
        sight.shows("No device is here")


def test_a_driver_that_hangs_is_named_and_its_numbers_are_withdrawn(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    driver.devices[0].used_bytes = 5 * GIB
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "1", environ=driver.env)
    with looking(browser, daemon) as sight:
        sight.shows("of 141.0 GiB used")
        driver.hang("nvmlDeviceGetCount_v2", seconds=60)
        driver.write()
        sight.shows("of 1 reading ago")
        sight.shows("values are withdrawn")
        sight.shows("timeout")
        until(lambda: not [text for text in sight.texts(".total")[0] if text])
        assert sight.texts(".legend dd") == [[]]


def test_without_an_agent_it_says_how_to_start_one(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.devices[0].processes = [Process(1, 3 * GIB)]
    driver.devices[0].used_bytes = 4 * GIB
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with looking(browser, daemon) as sight:
        sight.shows("gpumond run --workload train")
        assert sight.texts("tbody .of-opaque") == [[human(3 * GIB)]]
        assert sight.page.get_by_role("button", name="Flush").count() == 0


def test_a_daemon_that_is_gone_leaves_no_numbers_behind(browser: Browser, serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    with looking(browser, daemon) as sight:
        sight.shows("of 141.0 GiB used")
        sight.page.context.set_offline(True)
        sight.shows("The daemon does not answer")
        sight.page.locator("#content").wait_for(state="hidden")
        sight.page.context.set_offline(False)
        sight.shows("of 141.0 GiB used")
        assert sight.texts("#notices") == [[""]]
        daemon.process.send_signal(signal.SIGKILL)
        sight.page.locator("#content").wait_for(state="hidden", timeout=20_000)


def test_where_reading_wants_a_token_it_asks_for_one_and_follows(browser: Browser, demo: RunningDaemon):
    """As a daemon that others can reach does; here a guard before it stands for one."""

    def guard(route: Route) -> None:
        if route.request.headers.get("authorization", "").startswith("Bearer gpm_"):
            route.continue_()
        else:
            problem = {"title": "Unauthorized", "status": 401, "detail": "reading wants a token here"}
            route.fulfill(status=401, json=problem, content_type="application/problem+json")

    with looking(browser, demo, guard=guard) as sight:
        sight.shows("Sign in to look")
        sight.shows("reading wants a token here")
        assert not sight.page.locator("#content").is_visible()
        sight.page.get_by_role("button", name="Sign in").click()
        sign_in(sight, demo)
        sight.page.locator("tbody .of-program").first.wait_for()
        sight.page.locator("#events .agent-connected").first.wait_for()


@pytest.fixture
def card(tmp_path: Path, serve: Serve) -> RunningDaemon:
    """A daemon on a simulated device, whose name is hostile as are those of programs with ``holding``."""
    create(tmp_path / "cards" / "card0", Spec("GPU-hostile", 0, NAME, 24 * GIB))
    return serve("--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path / "cards")})


def make_worse(frame: Any) -> None:
    """Text that no daemon lets through."""
    (device,) = frame["snapshot"]["devices"]
    device["name"] = LONG
    for process in frame["processes"]:
        process.update(comm=LONG, user=LONG, pod_name=LONG, state=LONG)
    frame["verdicts"] = [{"device_uuid": LONG, "pid": 1, "kind": LONG, "since": 1.0, "summary": LONG}]
    labels = [["severity", LONG]]
    alert = {"rule": LONG, "phase": "firing", "labels": labels, "annotations": [["summary", LONG]], "active_at": 1.0}
    frame["alerts"] = [alert]
    frame["faults"] = [{"source": LONG, "kind": LONG, "device_uuid": None, "detail": LONG, "mend": LONG}]


@pytest.mark.parametrize("rewrite", [None, make_worse], ids=["cleaned", "worse"])
@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_hostile_names_are_text_and_nothing_else(
    browser: Browser, card: RunningDaemon, tmp_path: Path, viewport: Any, rewrite: Callable[[Any], None] | None
):
    with holding(tmp_path / "cards" / "card0"), looking(browser, card, viewport, rewrite) as sight:
        sight.page.locator("tbody .of-program button").click()
        sight.page.locator("tbody svg").wait_for()
        (device,), (program,) = sight.texts("h3 bdi", "tbody .of-program bdi")
        assert device.startswith("<img src=x onerror=window.pwned=1><script>")
        hostile = LONG[:79] if rewrite else COMM
        shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in hostile)
        assert program == (f"{shown}…" if rewrite else shown)
        document = sight.page.evaluate("document.documentElement.outerHTML")
        assert not re.findall("[\x00-\x08\x1b\u200e\u200f\u202a-\u202e\u2066-\u2069]", document)
        assert "W" * 1001 not in document
        assert sight.page.evaluate("[document.images.length, document.scripts.length, typeof window.pwned]") == [
            0,
            1,
            "undefined",
        ]
        assert fits(sight)


def fits(sight: Sight) -> bool:
    """No scrolling sideways."""
    return bool(sight.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_it_fits_on_a_phone(browser: Browser, demo: RunningDaemon):
    with looking(browser, demo, PHONE) as sight:
        sight.page.locator("tbody .of-program button").first.click()
        sight.page.locator("tbody svg").wait_for()
        assert fits(sight)
        sight.page.get_by_role("button", name="Sign in").click()
        assert fits(sight)


AXE = axe()
CHECK = """async () => (await axe.run(document, { resultTypes: ['violations'] })).violations
    .map(found => [found.id, found.impact, found.nodes.map(node => node.target.join(' '))])"""


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing(browser: Browser, demo: RunningDaemon, scheme: str, viewport: Any):
    assert AXE
    with looking(browser, demo, viewport, color_scheme=scheme) as sight:
        page = sight.page
        page.locator("tbody .of-program button").first.click()
        page.locator("tbody svg").wait_for()
        page.evaluate(AXE.read_text())
        assert page.evaluate(CHECK) == []
        page.get_by_role("button", name="Flush all…").click()
        page.get_by_role("dialog", name="Sign in").wait_for()
        assert page.evaluate(CHECK) == []
        sign_in(sight, demo)
        page.get_by_role("dialog", name="Flush all").get_by_role("article").first.wait_for()
        assert page.evaluate(CHECK) == []


@pytest.mark.skipif(AXE is None, reason="needs axe-core in build/axe (npm pack axe-core; see .ci/run)")
def test_axe_is_awake(browser: Browser, demo: RunningDaemon):
    assert AXE
    with looking(browser, demo) as sight:
        sight.page.locator("tbody").first.wait_for()
        sight.page.evaluate(
            "document.querySelector('#filter').closest('label').replaceWith(document.querySelector('#filter'))"
        )
        sight.page.evaluate(AXE.read_text())
        assert "label" in json.dumps(sight.page.evaluate(CHECK))
