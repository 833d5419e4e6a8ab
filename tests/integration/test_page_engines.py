"""Serving engines on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.engines import EngineReading
from gpumond.serve.examples import ENGINE
from tests.helpers.agents import GIB
from tests.helpers.browser import PHONE, PROGRAMS, needs_chromium, open_page
from tests.helpers.running import RunningDaemon

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
CHAT = TypeAdapter(EngineReading).dump_python(ENGINE, mode="json")
UNKNOWN = {"age_seconds": None, "running": None, "waiting": None, "kv_cache_used_ratio": None, "idle_seconds": None}


def with_engines(frame: Any) -> None:
    """Add an engine in the program ``serving``, of which a part sleeps, one that sleeps, and two that are not read."""
    serving = next(process for process in frame["processes"] if process["workload"] == PROGRAMS[1])
    serving.update(live_bytes=20 * GIB, used_bytes=30 * GIB, unmapped_bytes=15 * GIB)
    own = [{"pid": serving["pid"], "start_ticks": serving["start_ticks"]}]
    sized = [{"name": "llama3:8b", "size_bytes": 5 * GIB, "pinned": False}]
    down = CHAT | UNKNOWN | {"up": False, "processes": [], "models": [], "sleeping": None}
    frame["snapshot"]["engines"] = [
        CHAT | {"processes": own, "kv_cache_bytes": 10 * GIB, "waiting": None},
        CHAT
        | {"name": "night", "sleeping": True, "processes": [], "models": sized, "processes_problem": "it is hidden"},
        down | {"name": "down", "problem": "nothing is listening at http://127.0.0.1:1"},
        down | {"name": "n" * 64, "problem": "not read yet"},
    ]


@pytest.mark.parametrize("viewport", [None, PHONE], ids=["wide", "phone"])
def test_engines_are_listed_with_their_state(browser: Browser, demo: RunningDaemon, viewport: Any):
    with open_page(browser, demo, viewport, rewrite=with_engines) as session:
        session.page.get_by_role("heading", name="Engines").wait_for()
        rows = session.texts(*(f"#engines-section tbody tr:nth-of-type({place}) > *" for place in range(1, 5)))
        assert session.fits()
    chat, night, down, new = rows
    assert chat == [
        "chat",
        "vllm",
        "serving",
        "Qwen/Qwen3-8B",
        "30.0 GiB",
        "4% of 10.0 GiB",
        "0",
        "-",
        "15 min",
    ]
    assert night[2:5] == ["sleeping; its processes are unknown: it is hidden", "llama3:8b (5.0 GiB)", "-"]
    assert down[2:] == ["can't be read: nothing is listening at http://127.0.0.1:1", *["-"] * 6]
    assert new[2] == "not read yet"


def test_live_memory_of_a_process_states_its_kv_cache(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo, rewrite=with_engines) as session:
        session.page.get_by_role("button", name=PROGRAMS[1], exact=True).click()
        session.shows("20.0 GiB, of which KV cache 10.0 GiB, 4% in use")
        session.shows("chat (vllm)")
        session.shows("15.0 GiB unmapped")
        assert "unmapped" not in session.texts(".legend dt")[0]  # whose bytes add up to the size


def test_page_without_engines_has_no_section(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo) as session:
        session.page.locator("#processes tbody").first.wait_for()
        assert not session.page.get_by_role("heading", name="Engines").is_visible()
