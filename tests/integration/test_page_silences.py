"""Silences on the page: the form, the list, and alerts that are shown as silenced."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.browser import CHECK, PHONE, Serve, axe, needs_chromium, open_page, sign_in
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
AXE = axe()
RULE = "rules: [{name: present, scope: device, value: up, above: 0, labels: {severity: critical}}]\n"
CHOSEN = (
    "[...document.querySelectorAll('#silence-matchers label:has(:checked)')].map(label => label.textContent.trim())"
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    directory = tmp_path_factory.mktemp("silences")
    config = directory / "config.yaml"
    config.write_text(RULE)
    with RunningDaemon(directory / "demo", "--config", str(config), "--interval", "0.5s", command="demo") as daemon:
        yield daemon


def test_refusal_of_a_silence_is_shown(browser: Browser, daemon: RunningDaemon):
    with open_page(browser, daemon) as session:
        page = session.page
        page.get_by_role("button", name="Silence present").click(timeout=60_000)
        dialog = page.get_by_role("dialog", name="Silence present")
        dialog.get_by_text("Alerts with all ticked labels are still shown").wait_for()
        dialog.get_by_role("checkbox").first.wait_for()  # all() does not wait
        for box in dialog.get_by_role("checkbox").all():
            box.uncheck()
        dialog.get_by_label("Reason").fill("maintenance")
        dialog.get_by_role("button", name="Silence", exact=True).click()
        sign_in(session, daemon)
        dialog.get_by_text("matchers: must have at least 1 entry").wait_for()
        assert daemon.get("silences") == []


def test_view_of_alerts_offers_the_actions_of_their_cards(browser: Browser, daemon: RunningDaemon):
    with open_page(browser, daemon) as session:
        page = session.page
        page.get_by_role("button", name="Alerts", exact=True).click()
        found = page.get_by_role("row", name="fragmentation").first
        found.get_by_role("button", name="Why fragmentation").wait_for(timeout=120_000)
        found.get_by_role("button", name="Silence fragmentation").click(timeout=120_000)
        page.locator("#silence-reason:focus").wait_for()
        chosen = {matcher.partition("=")[0] for matcher in page.evaluate(CHOSEN)}
        assert chosen == {"rule", "workload"}
        assert f"user={getpass.getuser()}" in session.texts("#silence-matchers bdi")[0]
        page.get_by_role("dialog", name="Silence fragmentation").get_by_role("button", name="Cancel").click()
        page.get_by_role("row", name="present").get_by_role("button", name="Silence present").click()
        page.get_by_role("dialog", name="Silence present").get_by_role("button", name="Cancel").click()
        found.get_by_role("button", name="Evidence fragmentation").click()
        page.locator(".card .fit[open]").wait_for()


def test_alert_is_silenced_and_the_silence_ended(browser: Browser, daemon: RunningDaemon):
    uuid = until(lambda: [device["uuid"] for device in daemon.get("devices")])[0]
    with open_page(browser, daemon, PHONE) as session:
        page = session.page
        page.get_by_role("button", name="Silence present").click(timeout=60_000)
        dialog = page.get_by_role("dialog", name="Silence present")
        dialog.get_by_label("Reason").wait_for()
        assert {"rule=present", f"uuid={uuid}", "severity=critical"} <= set(session.texts("#silence-matchers bdi")[0])
        if AXE:
            page.evaluate(AXE.read_text())
            assert page.evaluate(CHECK) == []
        assert session.fits()
        dialog.get_by_label("Reason").fill("maintenance")
        dialog.get_by_label("Duration").select_option("4 h")
        state = page.locator("#alerts time", has_text="silenced until")

        def answer_after_the_frame(route: Route) -> None:
            response = route.fetch()
            if response.ok:
                state.wait_for(state="attached")
            route.fulfill(response=response)

        page.route("**/api/v1/silences", answer_after_the_frame)
        dialog.get_by_role("button", name="Silence", exact=True).click()
        sign_in(session, daemon)
        dialog.wait_for(state="hidden")
        state.wait_for()
        assert state.get_attribute("title") == f"{getpass.getuser()} (token): maintenance"
        page.locator("#silences-open:focus").wait_for()
        page.keyboard.press("Enter")
        (entry,) = daemon.get("silences")
        silence = entry["silence"]
        matchers = [f"{each['name']}{each['operator']}{each['value']}" for each in silence["matchers"]]
        assert (entry["state"], matchers) == ("active", ["rule=present", f"uuid={uuid}"])
        assert silence["ends_at"] - silence["starts_at"] == pytest.approx(14400)
        by = f"{getpass.getuser()} (token): maintenance"
        assert session.texts("#silences b", "#silences bdi") == [[" ".join(matchers)], [by]]
        if AXE:
            assert page.evaluate(CHECK) == []
        page.get_by_role("button", name="End the silence for rule=present").click()
        page.locator("#silenced").wait_for(state="hidden")
        page.locator("#views :focus", has_text="Alerts").wait_for()
        assert [each["state"] for each in daemon.get("silences")] == ["ended"]


def test_name_of_a_built_in_rule_leads_to_its_runbook(browser: Browser, serve: Serve, tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("rules: [{name: device-nearly-full, scope: device, value: used_bytes, above: 0}]")
    daemon = serve("--config", str(config), "--interval", "0.2s", command="demo")
    with open_page(browser, daemon) as session:
        session.page.get_by_role("link", name="Runbook device-nearly-full").click(timeout=60_000)
        session.page.get_by_role("heading", name="Runbook: device-nearly-full").wait_for()
