"""Words and amounts of the web UI: none is broken, and none contradicts the row beside it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from gpumond.facts.units import size_text
from tests.helpers.browser import Serve, needs_chromium, open_page, put_rule
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(240)]
VIEWS = ("", "alerts", "rules", "cases", "receipts", "queue", "quotas", "compare", "baselines")
BROKEN = """() => {
    const range = document.createRange();
    const broken = [];
    const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode;
        if (!node.parentElement.checkVisibility() || node.parentElement.closest('svg, .bdi, pre, code')) continue;
        const words = /\\d[\\d.]* (?:[BWdhs]|[KMGT]iB|min|°C)(?!\\w)|GPU \\d+|[\\w.:%°]+/g;
        for (const { index, 0: word } of node.textContent.matchAll(words)) {
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
            if (lines.size > 1 && word.length < 24) broken.push(word);
        }
    }
    return broken;
}"""


def test_no_word_and_no_amount_of_any_view_is_broken(browser: Browser, demo: RunningDaemon):
    put_rule(demo, name="words")
    demo.flush(target={"all": True}, force=True)
    with open_page(browser, demo) as session:
        for view in VIEWS:
            session.page.goto("about:blank")
            session.page.goto(f"{demo.url}/#view={view}")
            session.page.locator("#content:not([hidden]), #view:not([hidden]) section:visible").first.wait_for()
            session.page.wait_for_timeout(1500)
            for width in (390, 1440, 1920):
                session.page.set_viewport_size({"width": width, "height": 900})
                session.page.wait_for_timeout(300)
                assert session.page.evaluate(BROKEN) == [], (view, width)
                assert session.fits(), (view, width)


def test_nothing_is_alarming_in_the_first_minute(browser: Browser, serve: Serve):
    daemon = serve("--interval", "0.2s", command="demo")
    with open_page(browser, daemon) as session:
        session.page.locator("tbody .of-program").first.wait_for()
        for _ in range(10):
            session.page.wait_for_timeout(2000)
            text = session.page.locator("#problems").inner_text()
            assert "growing" not in text
            assert " full " not in text


def test_figures_of_cards_are_those_of_the_rows_beside_them(browser: Browser, demo: RunningDaemon):
    """A fragmentation whose program has freed its memory: the card states the present values first."""
    until(lambda: any(each["workload"] == "etl" for each in demo.get("processes")))

    def fragmented(frame: Any) -> None:
        process = next(each for each in frame["processes"] if each["workload"] == "etl")
        evidence = [["fragmentation_ratio", 0.57], ["peak_live_bytes", 2 << 30], ["peak_kept_bytes", 4 << 30]]
        found = {"kind": "fragmentation", "since": frame["snapshot"]["taken_at"] - 60, "evidence": evidence}
        process["stranded_bytes"] = 1 << 30  # until a rule flushes them
        found |= {name: process[name] for name in ("device_uuid", "pid", "start_ticks")}
        frame["verdicts"] = [found | {"time_to_full_seconds": None, "summary": "", "form": "", "fit": None}]
        frame["alerts"] = []

    with open_page(browser, demo, rewrite=fragmented) as session:
        session.page.locator("#alerts .line").get_by_text("now").first.wait_for()
        (line,), rows = session.texts("#alerts .line bdi", "tbody.process tr")
        row = next(text for text in rows if "etl" in text)
        live = re.search(r"held, (.+?) live", line)
        assert live is not None
        assert live[1] in row
        assert f"of {size_text(4 << 30)} was live: 57% fragmented" in line
