"""Tasks of a user, each by mouse and by keyboard."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

import pytest

from tests.helpers.agents import GIB
from tests.helpers.browser import needs_chromium, open_page, put_rule, signed_in
from tests.helpers.running import RunningDaemon, until
from tests.integration.large_machine import machine, show
from tests.integration.page_tasks import (
    CHART,
    COMPARE,
    EXPORT,
    LINK,
    MINUTE,
    MOMENTS,
    QUEUE,
    WASTE,
    Input,
    Task,
    cached,
    explaining,
    finding,
    flushing,
    silencing,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(240), pytest.mark.parametrize("by", get_args(Input))]
MAX_SECONDS = 15.0
"""What a task may take a user by the keystroke-level model, which depends on the inputs only."""
COOLDOWN_SECONDS = 5.0
"""Pause after a user's flush of a program."""


@pytest.mark.parametrize("task", [WASTE, COMPARE, MOMENTS, LINK, EXPORT, CHART, QUEUE], ids=lambda task: str(task.name))
def test_task_is_done(browser: Browser, demo: RunningDaemon, task: Task, by: Input):
    until(lambda: demo.get("snapshot")["elapsed_seconds"] > 10)  # moments are of the past
    with open_page(browser, demo) as session:
        session.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        session.shows_content()
        assert task.run(session, by) < MAX_SECONDS


@pytest.mark.parametrize("task", [WASTE, LINK, EXPORT, finding("307")], ids=lambda task: str(task.name))
def test_task_is_done_on_eight_devices_with_512_processes(browser: Browser, demo: RunningDaemon, task: Task, by: Input):
    with open_page(browser, demo) as session:
        session.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        show(session, machine(8, 64))
        assert task.run(session, by) < MAX_SECONDS


def test_minute_before_an_event_is_shown(browser: Browser, demo: RunningDaemon, by: Input):
    put_rule(demo, name=f"minute-{by[0]}")
    with open_page(browser, demo) as session:
        session.page.locator("#events .alert-fired", has_text=f"minute-{by[0]}").wait_for()
        assert MINUTE.run(session, by) < MAX_SECONDS
    put_rule(demo, name=f"minute-{by[0]}", above=5)  # of all firing alerts, only the first three have visible cards


def test_program_is_flushed_with_proof(browser: Browser, demo: RunningDaemon, by: Input):
    with signed_in(browser, demo) as session:
        session.shows_content()
        until(lambda: _rested(demo) and cached(demo, "train-llm") > GIB / 2, 120)
        assert flushing("train-llm").run(session, by) < MAX_SECONDS


def _rested(daemon: RunningDaemon) -> bool:
    newest = max((receipt["started_at"] for receipt in daemon.get("receipts")), default=0)
    return bool(daemon.get("snapshot")["taken_at"] > newest + COOLDOWN_SECONDS + 1)


def test_memory_of_a_program_with_a_problem_is_explained(browser: Browser, demo: RunningDaemon, by: Input):
    with signed_in(browser, demo) as session:
        session.page.get_by_role("button", name=re.compile("^Why leak notebook")).wait_for(timeout=120_000)
        assert explaining("leak").run(session, by) < MAX_SECONDS


def test_alert_is_explained_and_silenced(browser: Browser, demo: RunningDaemon, by: Input):
    rule = f"{by}-rule"
    put_rule(demo, name=rule)
    with signed_in(browser, demo) as session:
        session.page.locator(".card", has_text=rule).wait_for()
        assert silencing(rule).run(session, by) < MAX_SECONDS
        (silence,) = (
            each["silence"]
            for each in demo.get("silences")
            if {"name": "rule", "operator": "=", "value": rule} in each["silence"]["matchers"]
        )
        assert silence["ends_at"] - silence["starts_at"] == pytest.approx(3600)
        assert silence["reason"] == "maintenance"


def test_process_is_found_among_3200(browser: Browser, demo: RunningDaemon, by: Input):
    with open_page(browser, demo) as session:
        show(session, machine(64, 50))
        assert finding("3077").run(session, by) < MAX_SECONDS
