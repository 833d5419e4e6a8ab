"""What the live memory of a program consists of, on the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.frame import Verdict
from gpumond.features.agent_requests.routes import WHY_EXAMPLE, Why
from gpumond.serve.examples import VERDICT
from tests.helpers.agents import GIB
from tests.helpers.browser import CHECK, PHONE, PROGRAMS, axe, needs_chromium, open_page, sign_in
from tests.helpers.running import RunningDaemon, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
AXE = axe()
WHY: TypeAdapter[Why] = TypeAdapter(Why)


def test_classes_of_a_program_are_shown_on_a_phone(browser: Browser, demo: RunningDaemon):
    with open_page(browser, demo, PHONE) as session:
        page = session.page
        page.get_by_role("button", name="train-llm", exact=True).click(timeout=60_000)
        page.get_by_role("button", name="Memory of train-llm").click()
        sign_in(session, demo)
        dialog = page.get_by_role("dialog", name="Memory of train-llm")
        dialog.get_by_text("parameters").first.wait_for()
        until(session.fits)
        dialog.get_by_role("button", name="Close").click()
        page.locator("dialog#why").wait_for(state="hidden")


def test_dialog_names_a_program_whose_agent_connected_after_its_process_was_shown(
    browser: Browser, demo: RunningDaemon
):
    named: list[bool] = []

    def hide_names(frame: dict[str, Any]) -> None:
        for process in frame["processes"] if not named else ():
            process["workload"] = ""

    with open_page(browser, demo, rewrite=hide_names) as session:
        page = session.page
        page.locator("#processes tbody").nth(len(PROGRAMS) - 1).wait_for(timeout=60_000)
        named.append(True)
        page.get_by_role("button", name="train-llm", exact=True).click()
        page.get_by_role("button", name="Memory of train-llm").click()
        sign_in(session, demo)
        page.get_by_role("dialog", name="Memory of train-llm (pid").wait_for()


def test_classes_and_advice_are_shown(browser: Browser, demo: RunningDaemon):
    """The answer is the documented example: the simulated programs have no tensors."""

    def answer(route: Route) -> None:
        uuid = demo.get("processes")[0]["device_uuid"]
        why = replace(
            WHY_EXAMPLE, sites=(), classes=tuple(replace(each, device_uuid=uuid) for each in WHY_EXAMPLE.classes)
        )
        route.fulfill(status=200, content_type="application/json", body=json.dumps(WHY.dump_python(why)))

    def wasteful(frame: dict[str, Any]) -> None:
        for process in frame["processes"]:
            process.update(live_bytes=GIB, cached_bytes=2 * GIB, stranded_bytes=GIB)

    with open_page(browser, demo, PHONE, rewrite=wasteful) as session:
        page = session.page
        page.route("**/why", answer)
        page.get_by_role("button", name="train-llm", exact=True).click(timeout=60_000)
        page.get_by_role("button", name="Memory of train-llm").click()
        sign_in(session, demo)
        dialog = page.get_by_role("dialog", name="Memory of train-llm")
        dialog.get_by_text("use a smaller batch").wait_for()
        held, *_ = dialog.locator("article").all_inner_texts()
        device, total, *shares = held.split("\n")
        assert (device, total.split(" at ")[0]) == ("GPU 0", "besides live memory")
        assert shares[:4] == ["cached", "2.0 GiB", "stranded", "1.0 GiB"]
        assert "cached: Free memory that an allocator keeps for reuse; a flush returns it" in held
        assert "stranded: Free memory that an allocator keeps and a flush can't release" in held
        assert dialog.get_by_text("40.0 GiB live").count() == 1, "live memory is that of one moment"
        assert dialog.get_by_text("22.0 GiB (55%)").is_visible()
        assert dialog.get_by_text("activations and the rest").is_visible()
        if AXE:
            page.evaluate(AXE.read_text())
            assert page.evaluate(CHECK) == []
        assert session.fits()


def test_lines_that_keep_and_allocate_memory_are_shown(browser: Browser, demo: RunningDaemon):
    """The recording's answer is the documented example: the simulated programs have no tensors."""
    bodies: list[Any] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        found = WHY_EXAMPLE if bodies[-1] else replace(WHY_EXAMPLE, sites=())
        route.fulfill(status=200, json=WHY.dump_python(found, mode="json"))

    def leak(frame: dict[str, Any]) -> None:
        keys = ("device_uuid", "pid", "start_ticks")
        own = next(each for each in frame["processes"] if each["workload"] == "train-llm")
        verdict = TypeAdapter(Verdict).dump_python(VERDICT, mode="json") | {key: own[key] for key in keys}
        frame["verdicts"] = [verdict | {"retained_by": "retained by `losses` in `train` at train.py:31"}]

    with open_page(browser, demo, rewrite=leak) as session:
        page = session.page
        page.route("**/why", answer)
        page.locator(".card").get_by_text("; retained by losses in train at train.py:31").wait_for(timeout=60_000)
        page.get_by_role("button", name="Why leak train-llm").click()
        sign_in(session, demo)
        dialog = page.get_by_role("dialog", name="Memory of train-llm")
        articles = dialog.locator("article")
        left, rest = (page.locator(f".card .line {part}").first.text_content() or "" for part in ("strong", "bdi"))
        told = " · ".join(filter(None, (left, rest)))
        assert "retained by losses in train at train.py:31" in rest
        articles.first.get_by_text(f"{told[0].upper()}{told[1:]}.", exact=True).wait_for()
        dialog.get_by_role("button", name="Record lines for 30 s").click()
        dialog.get_by_text("Live memory by the line that allocated it").wait_for()
        call = WHY_EXAMPLE.sites[0].calls[0]
        assert f"{call.file}:{call.line} {call.function}" in articles.nth(1).inner_text()
        assert "1.0 GiB: allocated before the recording" in articles.nth(1).inner_text()
    assert bodies == [{}, {"record_seconds": 30}]


def test_unknown_classes_are_not_shown_as_others(browser: Browser, demo: RunningDaemon):
    classes = replace(WHY_EXAMPLE.classes[0], tensors_bytes=None, activations_bytes=None)
    why = replace(WHY_EXAMPLE, classes=(classes,), reason="too many objects", age_seconds=0.42)

    with open_page(browser, demo) as session:
        page = session.page
        page.route("**/why", lambda route: route.fulfill(status=200, json=WHY.dump_python(why, mode="json")))
        page.get_by_role("button", name="train-llm", exact=True).click(timeout=60_000)
        page.get_by_role("button", name="Memory of train-llm").click()
        sign_in(session, demo)
        dialog = page.get_by_role("dialog", name="Memory of train-llm")
        told = "too many objects; the program paused for at most 105 ms; as of 0.4 s ago; use a smaller batch"
        dialog.get_by_text(told).wait_for()
        assert dialog.get_by_text("24.0 GiB (60%)").is_visible()
        assert dialog.get_by_text("other tensors and activations").is_visible()
        assert not dialog.get_by_text("other leaf tensors").is_visible()


def test_out_of_memory_error_links_to_its_case(browser: Browser, demo: RunningDaemon):
    def short(frame: dict[str, Any]) -> None:
        (row,) = (each for each in frame["processes"] if each["workload"] == "train-llm")
        alert: dict[str, Any] = {"rule": "out-of-memory", "phase": "firing", "silenced_by": [], "value": 1.0}
        alert["labels"] = [["uuid", row["device_uuid"]], ["workload", "train-llm"]]
        alert["annotations"] = [["summary", f"train-llm (pid {row['pid']}) ran out of memory"], ["case", "1-2-3"]]
        alert |= {"pid": row["pid"], "start_ticks": row["start_ticks"], "active_at": 1.0, "fired_at": 1.0}
        frame.update(alerts=[alert], verdicts=[])

    classes = replace(WHY_EXAMPLE.classes[0], gradients_bytes=0)
    why = replace(WHY_EXAMPLE, sites=(), classes=(classes,))
    with open_page(browser, demo, rewrite=short) as session:
        page = session.page
        page.route("**/why", lambda route: route.fulfill(status=200, json=WHY.dump_python(why, mode="json")))
        page.get_by_role("button", name="train-llm", exact=True).click(timeout=60_000)
        page.get_by_role("button", name="Memory of train-llm").click()
        sign_in(session, demo)
        dialog = page.get_by_role("dialog", name="Memory of train-llm")
        dialog.get_by_text("Ran out of memory.", exact=True).wait_for()
        assert (dialog.get_by_role("link", name="Case").get_attribute("href") or "").endswith("case=1-2-3")
        dialog.get_by_text("parameters").wait_for()
        assert not dialog.get_by_text("gradients").is_visible()


def test_snapshot_is_saved(browser: Browser, demo: RunningDaemon):
    """The answers are fakes: the simulated programs have no snapshot."""
    content = bytes(range(256))
    dump = {"path": "/home/a/snapshots/leak-9-1.pickle", "reason": "", "size_bytes": len(content), "id": 7}

    def file(route: Route) -> None:
        assert route.request.headers["authorization"].startswith("Bearer ")
        route.fulfill(status=200, content_type="application/octet-stream", body=content)

    with open_page(browser, demo) as session:
        page = session.page
        page.route("**/snapshot", lambda route: route.fulfill(status=200, json=dump))
        page.route("**/snapshots/7", file)
        page.get_by_role("button", name="train-llm", exact=True).click(timeout=60_000)
        page.get_by_role("button", name="Memory of train-llm").click()
        sign_in(session, demo)
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save a snapshot").click()
        assert saved.value.suggested_filename == "leak-9-1.pickle"
        assert Path(saved.value.path()).read_bytes() == content
        page.get_by_text("leak-9-1.pickle is saved").wait_for()
