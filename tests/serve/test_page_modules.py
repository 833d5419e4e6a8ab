"""Functions of the page without I/O: numbers, changes of a frame, receipts, the intervals and evidence of charts."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpumond.diagnosis import sentences
from gpumond.facts.pools import API_FORCE_HINT, Receipt
from gpumond.serve.examples import RECEIPT
from gpumond.view.text import size_or_dash
from tests.helpers.agents import GIB
from tests.serve.live_frames import as_json, changes_as_json, random_wholes
from tests.serve.page_modules import needs_node, run_module

pytestmark = needs_node
MIB = GIB >> 10

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


def test_sizes_are_written_as_on_the_command_line():
    assert run_module("format", "given.map(m.sizeText)", *SIZES) == [size_or_dash(value) for value in SIZES]


DURATIONS = {
    0: "0 s",
    42.4: "42 s",
    59.6: "1 min",
    99: "1 min 39 s",
    120: "2 min",
    599: "9 min 59 s",
    1530: "26 min",
    3599: "1 h",
    7500: "2 h 5 min",
    10800: "3 h",
    86399: "1 d",
    273600: "3 d 4 h",
}


def test_durations_are_rounded_to_the_nearest():
    assert run_module("format", "given.map(m.duration)", *DURATIONS) == list(DURATIONS.values())


@pytest.mark.parametrize("seed", range(3))
def test_page_applies_changes_to_a_frame(seed: int):
    wholes = random_wholes(seed, count=40)
    found = [changes_as_json(before, after) for before, after in pairwise(wholes)]
    expression = """((frame) => [JSON.stringify(frame), ...given[1].map(
        (changes) => (m.applyChanges(frame, changes), JSON.stringify(frame)))])(given[0])"""
    shown = run_module("messages", expression, as_json(wholes[0]), found)
    assert [json.loads(each) for each in shown] == [as_json(whole) for whole in wholes]


def flushed(expected: int, released: int, driver: int | None, raced: bool = False) -> dict[str, Any]:
    interval = {"low": expected * GIB, "high": expected * GIB}
    held = {"held_bytes": 6 * GIB, "live_bytes": (6 - expected) * GIB}
    driver_released = None if driver is None else driver * GIB
    amounts = {"released_bytes": released * GIB, "driver_released_bytes": driver_released}
    return {"expected": interval, "before": held, "raced": raced, **amounts}


FLUSHES: list[tuple[dict[str, Any], list[str]]] = [
    (flushed(4, 4, 4), []),
    (
        flushed(3, 3, 3),
        ["between the plan (6.0 GiB held, 2.0 GiB live) and the flush (6.0 GiB held, 3.0 GiB live)"],
    ),
    (flushed(4, 3, 3), ["released less than expected at the start."]),
    (flushed(4, 5, 5, raced=True), ["released more than expected at the start because the program allocated"]),
    (flushed(4, 4, 2, raced=True), ["The driver's figure differs because the program allocated"]),
    (flushed(4, 4, None), ["The driver doesn't report this process's memory"]),
]


def test_receipt_explains_differing_figures():
    receipts = [receipt for receipt, _ in FLUSHES]
    expression = "given[1].map((receipt) => [...m.differences(receipt, given[0])])"
    found = run_module("receipttexts", expression, flushed(4, 0, None), receipts)
    for texts, (_, reasons) in zip(found, FLUSHES, strict=True):
        assert len(texts) == len(reasons)
        assert all(reason in sentence for reason, sentence in zip(reasons, texts, strict=True)), texts


def test_receipt_states_no_amounts_that_look_equal():
    plan, receipt = flushed(4, 0, None), flushed(4, 4, 4)
    amount = 4 * GIB - (64 << 20)
    receipt |= {"expected": dict.fromkeys(("low", "likely", "high"), amount), "released_bytes": amount}
    (found,) = run_module("receipttexts", "[...m.differences(given[1], given[0])]", plan, receipt)
    assert found == "The program's memory changed between the plan and the flush."


def test_download_of_receipts_contains_planned_expected_and_released():
    receipt = TypeAdapter(Receipt).dump_python(RECEIPT, mode="json")
    given = receipt, receipt | {"planned": None}
    records = run_module("receiptrecords", "given.map((receipt) => m.record(receipt))", *given)
    text = run_module("downloads", "m.csvOf(m.tableOf(given[0]))", records)
    table = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["planned_low_bytes"] for row in table] == [str(41 * GIB), ""]
    assert {row["expected_high_bytes"] for row in table} == {str(40 * GIB)}
    assert {row["driver_released_bytes"] for row in table} == {str(40 * GIB)}


def test_downloads_have_iso_times_and_name_whom_a_flush_was_for():
    details = [["requested_for", "pretrain"], ["released_bytes", GIB], ["thread 1 (main)", "f"]]
    event = {"id": 1, "at": 1790000000.5, "kind": "flush", "device_uuid": "GPU-1", "pid": 7, "start_ticks": 3}
    event |= {"workload": "train", "summary": "flush", "details": details}
    found = run_module("downloads", "m.readable(m.eventRecord(given[0]))", event)
    assert found == {
        "at": "2026-09-21T14:13:20.500Z",
        "kind": "flush",
        "gpu": None,
        "device_uuid": "GPU-1",
        "pid": 7,
        "workload": "train",
        "summary": "flush",
        "requested_for": "pretrain",
        "released_bytes": GIB,
    }


INTERVALS = """given.map(([times, length, started]) => {
    const found = m.intervals(times.map((at) => ({ at })), length, 0, 100, started);
    return [found.map((each) => [each.at, each.end]), m.unknown(found, 0, 100).map((each) => [each.from, each.to])];
})"""
PAST: dict[str, tuple[list[int], float | None, float, list[Any], list[Any]]] = {
    "blocks": ([-10, 20, 50, 80], 30, -1000, [[0, 20], [20, 50], [50, 80], [80, 100]], []),
    "edges": ([20, 50], 30, -1000, [[20, 50], [50, 80]], [[0, 20], [80, 100]]),
    "gap": ([0, 20, 60, 80], 20, -1000, [[0, 20], [20, 40], [60, 80], [80, 100]], [[40, 60]]),
    "samples": ([90, 92, 94, 98, 99], None, -1000, [[90, 92], [92, 94], [94, 98], [98, 99], [99, 100]], [[0, 90]]),
    "samples with a gap": (
        [10, 12, 14, 80, 82],
        None,
        -1000,
        [[10, 12], [12, 14], [14, 16], [80, 82], [82, 84]],
        [[0, 10], [16, 80], [84, 100]],
    ),
    "nothing": ([], None, -1000, [], [[0, 100]]),
    "first block of the daemon": ([30, 60], 30, 42, [[42, 60], [60, 90]], [[0, 42], [90, 100]]),
}


def test_unknown_values_are_marked_in_the_chart():
    found = run_module("intervals", INTERVALS, *([times, length, start] for times, length, start, *_ in PAST.values()))
    assert dict(zip(PAST, found, strict=True)) == {
        name: [known, unknown] for name, (*_, known, unknown) in PAST.items()
    }


def test_crossing_with_the_size_is_drawn_where_it_is_near():
    fits = {
        drawn: {
            "points": [[1000.0 + 60 * number, float(number << 20)] for number in range(6)],
            "at": 1300.0,
            "level_bytes": float(5 << 20),
            "slope_bytes_per_second": (1 << 20) / 60,
            "band_bytes": 0.0,
            "full_at": 1300 + seconds_left,
            "full_at_latest": 1300 + 1.1 * seconds_left,
        }
        for seconds_left, drawn in ((240.0, True), (86_400.0, False))
    }
    found = run_module(
        "evidenceshapes", "given.map((fit) => [m.limits(fit), m.line(fit, fit.full_at)])", *fits.values()
    )
    for (drawn, fit), (limits, level) in zip(fits.items(), found, strict=True):
        assert limits["from"] == 1000
        assert limits["full"] == (level if drawn else None)
        assert limits["to"] == (fit["full_at_latest"] if drawn else 1600)
        assert limits["low"] == 0
        assert limits["high"] >= max(level for _, level in fit["points"])


def test_texts_name_the_actions_of_the_web_ui_in_place_of_commands():
    texts = {
        "to see why: gpumond oom show --pid 25": "to see why: Case",
        "; gpumond flush --device 1 releases it": "; Flush releases it",
        "find out: gpumond why --pid 25; restart it": "find out: Why; restart it",
    }
    assert run_module("cards", "given.map((summary) => m.alertText({ summary }))", *texts) == list(texts.values())


def test_texts_of_the_api_name_the_command_in_place_of_its_key():
    told = run_module("format", "given.map((text) => m.clean(text))", f"try again in 4 s, or now {API_FORCE_HINT}")
    assert told == ["try again in 4 s, or now with gpumond flush --force"]


def test_code_in_a_sentence_has_no_backticks_and_a_name_keeps_its_own():
    texts = ["retained by `losses` in `train` at a.py:3", "`gpumond status` lists the programs", "it`s"]
    assert run_module("format", "given.map((text) => m.clean(text))", *texts) == [
        "retained by losses in train at a.py:3",
        "gpumond status lists the programs",
        "it`s",
    ]


def test_card_states_the_fact_of_a_rule_whose_runbook_has_the_remedy():
    notes = {"summary": "GPU 0 is nearly full", "description": "free some of it"}
    alerts = [{"alert": {"rule": rule, "notes": notes}, "verdict": None} for rule in ("device-nearly-full", "mine")]
    lines = [run_module("cards", "m.lineOf(given[0], null, 0)", alert) for alert in alerts]
    assert lines == ["GPU 0 is nearly full", "GPU 0 is nearly full; free some of it"]


def test_memory_can_reach_the_lowest_limit_or_fill_the_device():
    device = {"size_bytes": 24, "free_bytes": 10}
    row = {"used_bytes": 4, "limit_bytes": None, "quota": None}
    expression = "given[0].map((row) => m.ceilingOf(row, given[1]))"
    rows = [None, row, row | {"limit_bytes": 8}, row | {"limit_bytes": 8, "quota": {"soft_limit_bytes": 3}}]
    assert run_module("cards", expression, rows, device) == [24, 14, 8, 3]
    assert run_module("cards", expression, rows[:2], {"size_bytes": None, "free_bytes": None}) == [None, None]


def test_fragmentation_is_stated_in_the_same_way_before_its_verdict():
    alert = {"rule": "fragmentation", "value": 0.256, "notes": {"summary": "another text"}}
    verdict = {"kind": "fragmentation", "evidence": [["fragmentation_ratio", 0.256]]}
    row = {"live_bytes": GIB, "cached_bytes": 0, "stranded_bytes": GIB}
    lines = [
        run_module("cards", "m.lineOf(...given)", {"alert": alert, "verdict": found}, row, 0)
        for found in (None, verdict)
    ]
    assert lines[0] == "now 2.0 GiB held, 1.0 GiB live, 1.0 GiB stranded; 26% fragmented at its peak so far"
    assert lines[1].startswith("now 2.0 GiB held, 1.0 GiB live, 1.0 GiB stranded; when last measured, at most ")


def test_alert_whose_breach_has_ended_is_not_alarming():
    notes = {"summary": "ended at 07:32:05 UTC; the alert was: etl (pid 7) is idle"}
    alert = {"rule": "mine", "phase": "firing", "silenced_by": [], "labels": {"severity": "critical"}, "notes": notes}
    ended_at = 20_000 * 86_400 + 7 * 3600 + 32 * 60 + 5
    card = {"kind": "mine", "alert": alert | {"fired_at": ended_at - 49}, "verdict": None}
    found = run_module("cards", "[m.levelOf(given[0]), m.ageOf(given[0], given[1], [])]", card, ended_at + 60)
    assert found == ["quiet", "ended 1 min ago, lasted 49 s"]


def test_card_of_an_alert_that_came_back_says_since_when():
    notes = {"summary": "etl (pid 7) is idle; again since 07:32:05 UTC"}
    now = 20_000 * 86_400 + 7 * 3600 + 32 * 60 + 15
    alert = {"rule": "mine", "phase": "firing", "silenced_by": [], "labels": {}, "notes": notes, "fired_at": now - 500}
    expression = "(([card, now]) => [m.ageOf(card, now, []), m.lineOf(card, null, now)])"
    age, line = run_module("cards", f"{expression}(given)", {"alert": alert, "verdict": None}, now)
    assert re.fullmatch(r"firing again since \d\d:\d\d:05", age)
    assert line == "etl (pid 7) is idle"


@pytest.mark.parametrize(
    ("text", "subject", "line"),
    [
        ("etl (pid 7) on GPU 0: 57% is fragmented", "etl on GPU 0", "57% is fragmented"),
        ("etl (pid 7) ran out of memory", "etl on GPU 0", "ran out of memory"),
        ("GPU 0 (H100) is nearly full", "GPU 0", "is nearly full"),
        ("etl (pid 7) ran out of memory", "pid 7 on GPU 0", "etl (pid 7) ran out of memory"),
        ("the driver doesn't respond", "this machine", "the driver doesn't respond"),
    ],
)
def test_line_of_a_card_does_not_repeat_its_head(text: str, subject: str, line: str):
    card = {"alert": None, "verdict": {"kind": "other", "summary": text, "evidence": []}}
    assert run_module("cards", "m.lineOf(given[0], null, 0, given[1])", card, subject) == line


def test_leak_states_the_window_of_its_rate_and_when_its_device_will_be_full():
    evidence = [["slope_bytes_per_second", 1 << 20], ["window_seconds", 120.0]]
    verdict = {"kind": "leak", "since": 10.0, "evidence": evidence, "summary": "train is leaking"}
    line = "m.lineOf({ verdict: given[0] }, given[1], 130)"
    for kept, end in (("", ""), ("retained by f at /b/a.py:3, g at c:7", "; retained by f at a.py:3, g at c:7")):
        found = run_module("cards", line, verdict | {"retained_by": kept}, {"live_bytes": GIB})
        assert found.startswith("since ")
        assert found.endswith(f", about 60 MiB/min in the last 2 min{end}")
    rate = (60 * 2.0**20, 10.0, 130.0, 600.0, "linear", False, None, 16.0 * GIB)
    lefts = "['train on GPU 1', 'train on GPU 2'].map((subject) => m.leftOf(given[0], subject))"
    for later, time in ((None, "10 min"), (840.0, "14 min")):
        text = f"{sentences.leak('train (pid 4242)', 'GPU 1', *rate, later)}; retained by f at a.py:3"
        assert ("usage returns to the recent peak" in text) is (later is not None)
        found = run_module("cards", lefts, {"verdict": {"summary": text}})
        assert found == [f"full in about {time}", f"GPU 1 will be full in about {time}"]
    assert run_module("cards", "given.map((verdict) => m.leftOf({ verdict }, ''))", verdict, None) == ["", ""]


def grouped(events: Sequence[tuple[float, int | None, str, Any]]) -> Any:
    """Return the groups of events by their number: time, pid, kind and detail."""
    given = [
        {
            "id": number,
            "at": at,
            "pid": pid,
            "kind": kind,
            "device_uuid": "GPU-a",
            "details": [detail] if detail else [],
        }
        for number, (at, pid, kind, detail) in enumerate(events)
    ]
    return run_module("eventgroups", "m.causesOf(given).map((group) => group.map(({ id }) => id))", *given)


def test_events_with_one_cause_are_one():
    events = [
        (10.0, 7, "agent-connected", None),
        (50.0, 7, "agent-disconnected", None),
        (50.2, 8, "flush", None),
        (51.0, 7, "process-ended", None),
        (51.0, 7, "alert-resolved", ["rule", "leak"]),
        (51.0, None, "alert-fired", ["rule", "leak"]),
        (51.0, None, "alert-fired", ["rule", "leak"]),
    ]
    assert grouped(events) == [[6], [5], [3, 1, 4], [2], [0]]


def test_alert_is_not_hidden_by_another_event_of_its_process():
    events = [
        (50.0, 7, "oom", ["limit_bytes", 5]),
        (50.0, 7, "verdict-began", ["verdict", "leak"]),
        (51.0, 7, "alert-fired", ["rule", "leak"]),
        (51.0, 7, "alert-fired", ["rule", "allocation-retries"]),
        (60.0, 7, "verdict-ended", ["verdict", "leak"]),
        (61.0, 7, "alert-resolved", ["rule", "leak"]),
        (61.0, 7, "alert-resolved", ["rule", "allocation-retries"]),
    ]
    assert grouped(events) == [[6], [4, 5], [3], [2, 1], [0]]


def test_repeats_of_an_out_of_memory_error_are_one_event():
    limit = ["limit_bytes", 4]
    errors = [(10, 7, None), (60, 7, None), (70, 7, limit), (80, 8, None), (115, 7, None), (180, 7, None)]
    assert grouped([(at, pid, "oom", detail) for at, pid, detail in errors]) == [[5], [3], [2], [0, 1, 4]]


def test_amounts_of_a_flush_without_those_of_its_plan_are_left_out():
    plan = {"expected": flushed(4, 0, None)["expected"]}
    (found, *_) = run_module("receipttexts", "[...m.differences(given[1], given[0])]", plan, flushed(3, 3, 3))
    assert found == "The program's memory changed between the plan and the flush."


CAPTIONS = """given.map(([frame, told, now]) => {
    const known = new Map(told);
    const found = m.captionsOf(frame);
    return [[...found.keys()], m.captionAt(found, told.at(-1)?.[0], known, now)];
})"""


def test_captions_of_the_demo_are_true_and_each_is_told():
    def frame(cached: int = 0, name: str = "sim", **more: Any) -> dict[str, Any]:
        snapshot = {"source": {"name": name}, "taken_at": 100.0, "devices": []}
        processes = [
            {"workload": "notebook", "pid": 1},
            {"workload": "train-llm", "pid": 2, "live_bytes": GIB, "cached_bytes": cached},
        ]
        empty: dict[str, Any] = {"verdicts": [], "alerts": [], "queue": []}
        return {"snapshot": snapshot, "processes": processes} | empty | more

    leak = [{"kind": "leak", "device_uuid": "GPU-a", "pid": 1, "start_ticks": 5}]
    fired = {"rule": "leak", "pid": 1, "start_ticks": 5, "phase": "firing", "annotations": [], "silenced_by": []}
    fired |= {"labels": [["uuid", "GPU-a"]]}
    silenced = fired | {"silenced_by": ["7"]}
    over = fired | {"annotations": [["summary", "ended at 10:00:00 UTC"]]}
    scenes = [
        (frame(name="nvml"), [], 0.0),
        (frame(), [], 0.0),
        (frame(cached=3 * GIB), [["start", 0.0]], 5.0),
        (frame(cached=3 * GIB, verdicts=leak), [["start", 0.0]], 20.0),
        (frame(cached=3 * GIB, verdicts=leak), [["start", 0.0], ["leak", 10.0]], 29.0),
        (frame(cached=3 * GIB, verdicts=leak), [["start", 0.0], ["leak", 10.0]], 30.0),
        (frame(verdicts=leak, alerts=[fired]), [["leak", 10.0], ["start", 0.0], ["cache", 30.0]], 31.0),
        (frame(verdicts=leak, alerts=[silenced]), [["start", 0.0], ["leak", 10.0]], 11.0),
        (frame(verdicts=leak, alerts=[over]), [["start", 0.0], ["leak", 10.0]], 11.0),
        (frame(verdicts=leak, processes=[]), [["start", 0.0], ["leak", 10.0]], 11.0),
    ]
    assert run_module("captions", CAPTIONS, *scenes) == [
        [[], None],
        [["start"], "start"],
        [["cache", "start"], "start"],
        [["leak", "cache", "start"], "leak"],
        [["leak", "cache", "start"], "leak"],
        [["leak", "cache", "start"], "cache"],
        [["leak", "start"], "leak"],
        [["start"], "start"],
        [["start"], "start"],
        [[], None],
    ]


def test_caption_promises_a_line_only_where_one_is_known():
    frame = {
        "snapshot": {"source": {"name": "sim"}, "taken_at": 0.0},
        "processes": [{"workload": "notebook", "pid": 1}],
    }
    leak = {"kind": "leak", "pid": 1}
    frames = [
        frame | {"queue": [], "alerts": [], "verdicts": [leak | {"retained_by": text}]}
        for text in ("", "retained by f")
    ]
    found = run_module("captions", "given.map((frame) => m.captionsOf(frame).get('leak').includes('line'))", *frames)
    assert found == [False, True]


def test_caption_says_what_a_waiting_program_does_then():
    about = {"source": {"name": "sim"}, "taken_at": 0.0, "devices": [], "suspended_programs": [{"grants": ["7"]}]}
    frame = {"snapshot": about, "processes": [{"workload": "notebook", "pid": 1}], "verdicts": [], "alerts": []}
    request = {"workload": "embeddings", "need_bytes": GIB, "device_uuid": "GPU-a"}
    frames = [frame | {"queue": [request | {"id": id}]} for id in ("7", "8")]
    found = run_module("captions", "given.map((frame) => m.captionsOf(frame).get('queue').split(', and ')[1])", *frames)
    assert found == ["resumes once it is free.", "starts once it is free."]


def test_difference_is_that_of_the_bytes():
    pairs = [[980 * MIB, 1246 * MIB], [3.9 * GIB, 3.1 * GIB], [GIB, GIB]]
    found = run_module("format", "[...given.map(([before, now]) => m.signed(now - before)), m.signed(NaN)]", *pairs)
    assert found == ["+266.0 MiB", "-819.2 MiB", "0 B", "-"]


def test_times_of_the_daemon_are_in_the_time_zone_of_the_browser():
    texts = "since 13:58:20 UTC", "until 2026-01-02 03:04:05 UTC", "UTC 1.5"
    expression = """(process.env.TZ = "Asia/Tokyo", [...given.map((text) => m.clean(text)), m.clock(0)])"""
    since, until, other, epoch = run_module("format", expression, *texts)
    assert (since, other, epoch) == ("since 22:58:20", "UTC 1.5", "09:00:00")
    assert re.fullmatch(r"until \w+ 12:04:05", until)


def test_rate_has_two_digits():
    rates = [840 * MIB, 836.7 * MIB, 844.9 * MIB, 64 * MIB, 12.3 * GIB, 0]
    assert run_module("format", "given.map(m.rate)", *rates) == [
        *["about 840 MiB/min"] * 3,
        "about 64 MiB/min",
        "about 12 GiB/min",
        "about 0 B/min",
    ]


def test_marks_with_their_numbers_do_not_overlap():
    signs = {0: "●", 1: "○", 2: "●", 50: "●", 52: "▲", 59: "✕", 61: "▲", 68: "●", 69: "●", 99: "▲", 101: "▲"}
    marks = [{"at": at, "sign": sign} for at, sign in signs.items()]
    found = run_module("chartmarks", "m.together(given[0], 10).map((all) => [all[0].at, all.length])", marks)
    assert found == [[59, 5], [99, 2], [0, 3], [69, 1]]


def test_calls_begin_with_the_program():
    files = ["/a/site-packages/torch/cuda.py", "/x/gpumond/sim/device.py", "/home/a/train.py", "/lib/python3/b.py"]
    own = "m.ownCalls(given).map(({ file }) => file)"
    assert run_module("calls", own, *({"file": each} for each in files)) == files[2:]
    assert run_module("calls", own, {"file": files[0]}, {"file": "<string>"}) == ["<string>"]
    assert run_module("calls", own, {"file": files[0]}, {"file": "<frozen>"}) == [files[0], "<frozen>"]
    called = {"file": files[0], "line": 9, "function": "empty"}
    assert run_module("calls", "m.callText(given[0])", called) == "torch/cuda.py:9 empty"
