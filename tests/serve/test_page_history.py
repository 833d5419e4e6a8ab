"""Charts of the page without a browser: range, axes, layers, marks, and the evidence of a leak."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.frame import Verdict
from gpumond.serve.examples import TAKEN_AT, VERDICT
from tests.helpers.agents import GIB
from tests.helpers.curves import MIB, by_process, each_onset, first, leaking, noisy, steps_of
from tests.serve.page_modules import needs_node, run_module

pytestmark = needs_node

NOW = 1_000_000
DAY = 86_400
HOUR: dict[str, float | None] = {"seconds": 3600, "to": None}

CHANGES: dict[str, tuple[str, dict[str, float | None]]] = {
    "dragged": ("m.between(999_000, 999_100, NOW)", {"seconds": 100, "to": 999_100}),
    "too short": ("m.between(999_000, 999_001, NOW)", {"seconds": 10, "to": 999_005.5}),
    "up to now": ("m.between(999_000, NOW + 5, NOW)", {"seconds": 1005, "to": None}),
    "before the last day": ("m.between(800_000, 800_600, NOW)", {"seconds": 600, "to": NOW - DAY + 600}),
    "zoomed in": ("m.zoomed(hour, NOW - 1800, 0.5, NOW)", {"seconds": 1800, "to": NOW - 900}),
    "zoomed in at the end": ("m.zoomed(hour, NOW, 0.5, NOW)", {"seconds": 1800, "to": None}),
    "zoomed out": ("m.zoomed(hour, NOW - 1800, 1e6, NOW)", {"seconds": DAY, "to": None}),
    "earlier": ("m.moved(hour, -0.25, NOW)", {"seconds": 3600, "to": NOW - 900}),
    "later than now": ("m.moved(hour, 0.25, NOW)", HOUR),
}


def test_range_is_within_the_last_day():
    calls = ", ".join(call for call, _ in CHANGES.values())
    expression = f"((NOW, DAY, hour) => [{calls}])(...given)"
    found = run_module("range", expression, NOW, DAY, HOUR)
    assert dict(zip(CHANGES, found, strict=True)) == {name: expected for name, (_, expected) in CHANGES.items()}


ADDRESSES: dict[str, dict[str, float | None] | None] = {
    "900": {"seconds": 900, "to": None},
    "1000-4600": {"seconds": 3600, "to": 4600},
    "": None,
    "5": None,
    "999999": None,
    "4600-1000": None,
    "x": None,
}


def test_range_is_restored_from_the_address():
    found = run_module("range", "given.map((text) => m.rangeOf(text))", *ADDRESSES)
    assert dict(zip(ADDRESSES, found, strict=True)) == ADDRESSES
    known = {text: known for text, known in ADDRESSES.items() if known}
    assert run_module("range", "given.map((each) => m.rangeText(each))", *known.values()) == list(known)


def test_axes_have_few_lines_at_round_values():
    for seconds in (10, 60, 900, 3600, 21_600, DAY):
        times = run_module("range", "m.timeLines(given[0], given[0] + given[1], 8)", NOW + 0.5, seconds)
        assert 3 <= len(times) <= 9, seconds
        assert all(NOW < at <= NOW + 0.5 + seconds for at in times)
        assert len({other - one for one, other in pairwise(times)}) == 1
    sizes = [1, 5, 700, 3 * MIB, 24 * GIB, 80 * GIB, 33.5 * GIB]
    for top, levels in zip(sizes, run_module("range", "given.map((top) => m.byteLines(top))", *sizes), strict=True):
        assert len(levels) <= 4
        assert all(0 < level <= top for level in levels)
        if top >= 4:
            assert len(levels) >= 2
            assert levels[0] == 2 ** (levels[0].bit_length() - 1)


COLUMNS: dict[str, tuple[dict[str, float], dict[str, list[float]]]] = {
    "with an agent": (
        {"used": 10, "live": 5, "cached": 2, "stranded": 1, "overhead": 2},
        {"live": [0, 5], "cached": [5, 7], "stranded": [7, 8], "overhead": [8, 10]},
    ),
    "without an agent": ({"used": 10, "opaque": 10}, {"opaque": [0, 10]}),
    "a device": (
        {"used": 10, "live": 5, "cached": 1, "stranded": 0, "overhead": 1, "opaque": 1, "unattributed": 2},
        {
            "live": [0, 5],
            "cached": [5, 6],
            "stranded": [6, 6],
            "overhead": [6, 7],
            "opaque": [7, 8],
            "unattributed": [8, 10],
        },
    ),
    "nothing known": ({}, {}),
}


def test_layers_add_up_to_the_used_memory():
    columns = [column for column, _ in COLUMNS.values()]
    found = run_module("sharelayers", "given.map((column) => m.layersOf(column))", *columns)
    assert dict(zip(COLUMNS, found, strict=True)) == {name: layers for name, (_, layers) in COLUMNS.items()}


def test_columns_of_an_answer_are_points_with_what_is_known():
    columns: dict[str, list[float | None]] = {name: [1, 2] for name in ("at", "low", "high", "used")}
    columns |= {name: [None, None] for name in ("cached", "stranded", "overhead", "opaque", "unattributed")}
    points = run_module("sharelayers", "m.pointsOf(given[0])", {**columns, "live": [None, 1]})
    assert points == [
        {"at": 1, "low": 1, "high": 1, "used": 1},
        {"at": 2, "low": 2, "high": 2, "used": 2, "live": 1},
    ]


def test_layer_is_interrupted_by_a_gap():
    columns = [{"at": at, "end": at + 10, "layers": {"opaque": [0, 7]}} for at in (0, 10, 50)]
    runs = run_module(
        "sharelayers", "m.runsOf(given[0], 'opaque').map((run) => run.map(({ at, end }) => [at, end]))", columns
    )
    assert runs == [[[0, 10], [10, 20]], [[50, 60]]]
    assert run_module("sharelayers", "m.columnAt(given[0], 30)", columns) is None


def test_newest_point_of_a_chart_has_the_known_shares_of_the_process():
    shares = {"live": 3, "cached": 4, "stranded": 0, "overhead": None, "opaque": None}
    process = {f"{share}_bytes": size for share, size in shares.items()}
    point = run_module("shares", "m.addShares({ at: 9, live: 1 }, given[0])", process)
    assert point == {"at": 9, "live": 4, "cached": 4, "stranded": 0}


def test_chart_ends_with_the_newest_point():
    points = [{"at": at, "used": at} for at in (1, 2, 3, 5)]
    found = run_module("intervals", "m.intervals(given[0], null, 0, 5)", points)
    assert [(each["at"], each["end"], each["used"]) for each in found] == [(1, 2, 1), (2, 3, 2), (3, 4, 3), (4, 5, 5)]
    after_a_gap = run_module("intervals", "m.intervals(given[0], null, 0, 20)", [*points[:3], {"at": 20, "used": 9}])
    assert [(each["at"], each["end"]) for each in after_a_gap][-2:] == [(3, 4), (19, 20)]


def grouped(marks: list[dict[str, Any]]) -> Any:
    return run_module("chartmarks", "m.together(given[0], 10).map((group) => group.map(({ at }) => at))", marks)


def test_close_marks_are_one_group():
    assert grouped([{"at": at} for at in (0, 5, 9, 10, 30)]) == [[0, 5, 9], [10], [30]]


def test_marks_are_close_to_the_one_that_stands_for_them():
    signs = {0: "●", 9: "▲", 18: "✕", 27: "▲"}
    assert grouped([{"at": at, "sign": sign} for at, sign in signs.items()]) == [[18, 9, 27], [0]]


def test_flushes_are_grouped_alone():
    kinds = {0: "flush", 1: "alert-fired", 2: "flush", 3: "grant"}
    assert grouped([{"at": at, "kind": kind} for at, kind in kinds.items()]) == [[0, 2], [1, 3]]


def test_groups_of_marks_stay_as_time_goes_on():
    assert run_module("chartmarks", "given.map(m.spaceOf)", 9, 10, 16, 17, 0.3) == [16, 16, 16, 32, 0.5]
    expression = "given.map((all) => m.together(all, 16).map((group) => group.length))"
    known = [{"at": at} for at in (3, 12, 18, 25, 40)]
    assert run_module("chartmarks", expression, known[:4], known, [*known, {"at": 41}]) == [[3, 1], [3, 2], [3, 2, 1]]


def test_later_points_are_joined_to_known_ones():
    expression = "m.joined(...given.slice(0, 2).map((all) => all.map((at) => ({ at }))), given[2]).map(({ at }) => at)"
    assert run_module("intervals", expression, [1, 2, 3], [3.01, 4.01], 1.5) == [2, 3.01, 4.01]
    assert run_module("intervals", expression, [1, 2, 3], [], 1.5) == [1, 2, 3]
    assert run_module("intervals", expression, [1, 2, 3], [9], 0) == [1, 2, 3, 9]


def event(number: int, kind: str, at: float, **fields: Any) -> dict[str, Any]:
    other = {"device_uuid": "GPU-0", "pid": None, "start_ticks": None, "summary": f"{kind} {number}"}
    return {"id": number, "at": at, "kind": kind, **other, **fields}


def test_marks_are_those_of_the_device_or_the_process():
    process = {"pid": 7, "start_ticks": 100, "details": []}
    events = [
        event(1, "agent-connected", 10, **process, device_uuid=None),
        event(2, "flush", 20, **process),
        event(3, "oom", 30, pid=8, start_ticks=100, details=[]),
        event(4, "alert-fired", 40, device_uuid="GPU-1"),
        event(5, "process-ended", 50, pid=7, start_ticks=99),
        event(7, "unheard-of", 30, **process),
    ]
    expression = "m.marksOf(given[0], given[1]).map((mark) => mark.id)"
    assert run_module("chartmarks", expression, events, {"uuid": "GPU-0", "pid": None}) == [2, 3, 5]
    assert run_module("chartmarks", expression, events, {"uuid": "GPU-0", **process}) == [1, 2]


def test_repeats_of_an_error_are_one_mark():
    limit = [["limit_bytes", 5]]
    given = [(10, 7, limit), (40, 7, limit), (60, 8, limit), (65, 7, []), (95, 7, limit), (200, 7, limit)]
    events = [event(at, "oom", at, pid=pid, start_ticks=1, details=details) for at, pid, details in given]
    expression = "m.marksOf(given[0], given[1]).map(({ id, last, times }) => [id, last, times])"
    found = run_module("chartmarks", expression, events, {"uuid": "GPU-0", "pid": None})
    assert found == [[10, 95, 3], [60, 60, 1], [65, 65, 1], [200, 200, 1]]


def test_crossing_is_drawn_at_the_time_until_the_device_is_full():
    """The verdicts are those of the daemon's diagnosis, when they begin."""
    times = {}
    for per_minute, noise, minutes in ((200 * MIB, 4 * MIB, 60), (2 * GIB, 20 * MIB, 50)):
        snapshots = by_process(noisy(leaking(per_minute, onset=12), noise), steps_of(minutes))
        found = first(each_onset(snapshots), "leak")
        assert found is not None
        at, verdict = found
        assert verdict.fit is not None
        assert verdict.time_to_full_seconds is not None
        times[at] = verdict
    fits = [TypeAdapter(Verdict).dump_python(verdict, mode="json")["fit"] for verdict in times.values()]
    drawings = run_module("evidenceshapes", "given.map((fit) => [m.limits(fit), m.shapes(fit)])", *fits)
    for (at, verdict), (limits, shapes) in zip(times.items(), drawings, strict=True):
        assert verdict.fit is not None
        assert verdict.fit.full_at == pytest.approx(1e9 + at + verdict.time_to_full_seconds, abs=0.1)
        if limits["full"] is None:
            assert "crossed" not in shapes
            continue
        (place,) = re.findall(r"^M([\d.]+) 0V100$", shapes["crossed"])
        drawn = limits["from"] + float(place) / 1000 * (limits["to"] - limits["from"])
        assert drawn == pytest.approx(verdict.fit.full_at, abs=(limits["to"] - limits["from"]) / 1e4)
    assert any(limits["full"] is not None for limits, _ in drawings)


def test_evidence_is_drawn_as_stated():
    fit = TypeAdapter(Verdict).dump_python(VERDICT, mode="json")["fit"]
    soon = fit | {
        "full_at": fit["at"] + 300,
        "full_at_earliest": fit["at"] + 280,
        "full_at_latest": fit["at"] + 320,
    }
    expression = "[m.shapes(given[0]), m.limits(given[0]), m.shapes(given[1])]"
    shapes, limits, near = run_module("evidenceshapes", expression, fit, soon)
    assert limits["full"] is None
    assert list(shapes) == ["band", "line", "projection", "points"]
    assert list(near) == ["crossing", "band", "line", "projection", "points", "full", "crossed"]
    earliest, latest = re.findall(r"^M([\d.]+) 0H([\d.]+)V100", near["crossing"])[0]
    (crossed,) = re.findall(r"^M([\d.]+) 0V", near["crossed"])
    assert float(earliest) < float(crossed) < float(latest) == 1000


def test_summary_states_the_time_left():
    fit = TypeAdapter(Verdict).dump_python(VERDICT, mode="json")["fit"]
    text = run_module("evidencetexts", "m.summary(given[0], given[1])", fit, TAKEN_AT)
    rate = "32.0 MiB/min (31.6 MiB to 32.4 MiB) in the 2 min shown"
    assert text.startswith(f"{rate}; counted from its recent peak, the GPU will be full in about 65 min")
    certain = fit | {f"slope_{name}_bytes_per_second": fit["slope_bytes_per_second"] for name in ("low", "high")}
    assert run_module("evidencetexts", "m.summary(given[0], given[1])", certain, TAKEN_AT).startswith(
        "32.0 MiB/min in the"
    )


@pytest.mark.parametrize(
    ("earliest", "latest", "expected"),
    [
        (431.2, 431.4, "about 7 min"),
        (380, 560, "about 7 min (about 6 min at the earliest, about 9 min at the latest)"),
        (430, None, "about 7 min"),
    ],
)
def test_summary_rounds_the_time_left_and_its_interval(earliest: float, latest: float | None, expected: str):
    fit = TypeAdapter(Verdict).dump_python(VERDICT, mode="json")["fit"]
    fit |= {"full_at": TAKEN_AT + 431, "full_at_earliest": TAKEN_AT + earliest}
    fit |= {"full_at_latest": latest and TAKEN_AT + latest}
    text = run_module("evidencetexts", "m.summary(given[0], given[1])", fit, TAKEN_AT)
    assert text.endswith(f"; counted from its recent peak, the GPU will be full in {expected}.")


def test_figures_of_a_verdict_have_units():
    evidence = [
        ["slope_bytes_per_second", MIB],
        ["growth_bytes", 3 * GIB],
        ["window_seconds", 90.0],
        ["used_ratio", 0.953],
        ["significance", 4.56789],
    ]
    assert run_module("evidencetexts", "m.figures(given[0])", evidence) == [
        ["slope", "60.0 MiB/min"],
        ["growth", "3.0 GiB"],
        ["window", "1 min 30 s"],
        ["used", "95%"],
        ["significance", "4.57"],
    ]
