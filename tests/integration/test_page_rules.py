"""Rules on the page: the list, the editor and its preview."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.helpers.browser import check_access, needs_chromium, put_rule, signed_in
from tests.helpers.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [needs_chromium, pytest.mark.timeout(180)]


def open_editor(page: Page, name: str) -> Locator:
    """Open the editor whose button has the same name."""
    page.get_by_role("button", name=name, exact=True).click()
    return page.get_by_role("form", name=name)


def test_rule_is_created_previewed_changed_and_deleted(browser: Browser, demo: RunningDaemon):
    with signed_in(browser, demo, "rules") as session:
        page = session.page
        page.on("dialog", lambda dialog: dialog.accept())
        editor = open_editor(page, "New rule")
        editor.get_by_label("Name").fill("used")
        for text, problem in {"90": "Write the threshold in %", "100%": "used is never above 100%"}.items():
            editor.get_by_label("Threshold").fill(text)
            editor.get_by_role("button", name="Save").click()
            found = editor.get_by_label("Threshold").evaluate("input => input.validationMessage")
            assert found.startswith(problem)
        assert "used" not in {entry["name"] for entry in demo.get("rules")}
        assert "used_ratio: " in editor.inner_text()
        labels = "all => all.map(group => group.label)"
        assert editor.locator("optgroup").evaluate_all(labels)[:2] == ["Bytes", "Shares, in %"]
        editor.get_by_label("Value").select_option("up")
        assert "up: " in editor.inner_text()
        editor.get_by_label("Threshold").fill("much")
        editor.get_by_role("button", name="Preview").click()
        editor.get_by_text("Threshold: expected a number").wait_for()
        editor.get_by_label("Threshold").fill("0")
        editor.get_by_role("button", name="Preview").click()
        editor.get_by_text(re.compile(r"would have fired \d+ times? between")).wait_for()
        editor.locator(".plot .span").wait_for()
        assert len(session.texts(".preview li, .editor li time")[0]) >= 1
        check_access(session)
        editor.get_by_label("Other keys").fill("[1]")
        editor.get_by_role("button", name="Save").click()
        assert "used" not in {entry["name"] for entry in demo.get("rules")}
        editor.get_by_label("Other keys").fill("")
        editor.get_by_label("Labels").fill("team")
        editor.get_by_role("button", name="Save").click()
        editor.get_by_text("Labels: ").wait_for()
        editor.get_by_label("Labels").fill("team=ml\ntier=a")
        editor.get_by_label("Match").fill("gpu=0")
        assert not editor.get_by_label("Cooldown").is_visible()
        editor.get_by_label("Action").select_option("flush")
        editor.get_by_label("Cooldown").fill("20m")
        editor.get_by_role("button", name="Save").click()
        row = page.get_by_role("row", name="used device (gpu=0): up")
        row.get_by_text("1 firing").wait_for(timeout=60_000)
        assert demo.get("rules/used")["rule"]["annotations"] == {"summary": "up: {value}, above {threshold}"}
        editor = open_editor(page, "Edit used")
        editor.get_by_label("Severity").fill("info")
        editor.get_by_role("button", name="Save").click()
        editor.wait_for(state="detached")
        entry, labels = demo.get("rules/used"), {"team": "ml", "tier": "a", "severity": "info"}
        assert (entry["rule"]["labels"], entry["rule"]["match"]) == (labels, {"gpu": "0"})
        assert (entry["rule"]["action"]["flush"]["min_reclaimable"], entry["rule"]["action"]["cooldown"]) == (0, 1200)
        open_editor(page, "Edit used").get_by_role("button", name="Delete").click()
        row.wait_for(state="detached")
        assert "used" not in {each["name"] for each in demo.get("rules")}


def test_built_in_rule_is_overridden_and_restored(browser: Browser, demo: RunningDaemon):
    with signed_in(browser, demo, "rules") as session:
        page = session.page
        page.on("dialog", lambda dialog: dialog.accept())
        editor = open_editor(page, "Edit orphan-memory")
        assert editor.get_by_label("Value").is_disabled()
        editor.get_by_label("Threshold").fill("9%")
        editor.get_by_label("Enabled").uncheck()
        editor.get_by_role("button", name="Save").click()
        row = page.get_by_role("row", name="orphan-memory")
        row.get_by_text("overridden: threshold, enabled").wait_for()
        row.get_by_text("disabled").wait_for()
        overrides = demo.get("rules/orphan-memory")["overrides"]
        assert {name: field["value"] for name, field in overrides.items()} == {"threshold": 0.09, "enabled": False}
        open_editor(page, "Edit orphan-memory").get_by_role("button", name="Restore defaults").click()
        row.get_by_text("overridden").wait_for(state="detached")
        assert demo.get("rules/orphan-memory")["overrides"] == {}


def test_change_of_a_rule_that_another_client_has_changed_is_refused(browser: Browser, demo: RunningDaemon):
    put_rule(demo)
    with signed_in(browser, demo, "rules") as session:
        editor = open_editor(session.page, "Edit present")
        put_rule(demo, above=5)
        editor.get_by_label("Severity").fill("info")
        editor.get_by_role("button", name="Save").click()
        editor.get_by_role("alert").get_by_text("changed").wait_for()
        assert demo.get("rules/present")["rule"]["above"] == 5
