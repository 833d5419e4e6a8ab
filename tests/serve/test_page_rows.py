"""What the page lists: rows of processes and devices, groups with sums, the part that is drawn, and downloads."""

from __future__ import annotations

import csv
import io
import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from gpumond.facts.shares import SHARE_MEANINGS, SHARES
from gpumond.serve.full_frame import full_frame
from gpumond.serve.live import live_frame
from gpumond.view.rows import process_rows
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.values import make_device, make_pool, make_process, make_report
from tests.serve.live_frames import as_json, random_frame, random_wholes
from tests.serve.page_modules import needs_node, run_module

pytestmark = needs_node

BY_USED = {"id": "used", "up": False}
FRAMES = [as_json(whole) for seed in range(4) for whole in random_wholes(seed)]


def frame_of_two_devices() -> dict[str, Any]:
    devices = [
        make_device(
            f"GPU-{index}",
            index=index,
            used_bytes=40 * GIB,
            processes=(
                make_process(10 + index, (30 - index) * GIB, comm="python", user="ann", slurm_job="77"),
                make_process(20 + index, None, comm="sh", user="bob"),
            ),
        )
        for index in range(2)
    ]
    report = make_report(10, (make_pool("GPU-0", live=20 * GIB, cached=5 * GIB),), workload="train")
    return make_frame(*devices, reports=(report,))


def listed(frame: Any, by: str = "", order: Any = BY_USED, unfolded: tuple[str, ...] = ()) -> list[Any]:
    expression = """m.listed(m.rowsOf(given[0]), given[1], given[2], new Set(given[3])).map(
        (item) => item.rows ? [item.title, item.rows.length, item.used_bytes, [...item.partial].sort()] : item.pid)"""
    found: list[Any] = run_module("processlist", expression, frame, by, order, unfolded)
    return found


def test_rows_are_in_the_order_of_a_column_and_then_of_their_pid():
    frame = frame_of_two_devices()
    assert listed(frame) == [10, 11, 20, 21]
    assert listed(frame, order={"id": "user", "up": False}) == [20, 21, 10, 11]
    assert listed(frame, order={"id": "gpu", "up": True}) == [10, 20, 11, 21]


RULES = [
    {"rule": rule, "severity": severity, "phase": phase, "silenced_by": silences}
    for rule, severity in (
        ("out-of-memory", "critical"),
        ("quota-exceeded", "warning"),
        ("mine", "info"),
        ("fragmentation", "warning"),
        ("mine-too", "warning"),
    )
    for phase, silences in (("firing", []), ("pending", []), ("firing", ["1"]))
]
STATES = [{}, {"state": "zombie"}, {"orphaned": True}, {"kinds": ["holder"]}, {"unmapped_bytes": GIB}]


def test_verdict_is_that_of_the_command_line():
    plain = frame_of_two_devices()
    train = {key: plain["processes"][0][key] for key in ("device_uuid", "pid", "start_ticks")}
    suspended = {**train, "state": "suspended", "since": 1.0, "host_bytes": None, "memory": [], "reason": ""}
    suspended |= {"resume_since": None}
    frames = []
    for seed in range(400):
        chance = random.Random(seed)
        frame = frame_of_two_devices()
        frame["processes"][0] |= chance.choice(STATES)
        kinds = ("steady", "leak", "memory-freed", "fragmentation")
        frame["verdicts"] = [
            {**train, "kind": kind, "since": 1.0, "summary": ""}
            for kind in chance.sample(kinds, chance.choice((0, 1, 1, 2)))
        ]
        frame["alerts"] = [
            {**train, **rule, "labels": [["uuid", train["device_uuid"]], ["severity", rule["severity"]]]}
            | {"active_at": 1.0, "annotations": []}
            for rule in chance.sample(RULES, chance.choice((0, 1, 2)))
        ]
        frame["snapshot"]["suspended_programs"] = chance.choice(([], [], [suspended]))
        frames.append(frame)
    found = run_module("processlist", "given.map((frame) => m.rowsOf(frame)[0].verdict)", *frames)
    assert found == [next(process_rows(frame)).status for frame in frames]
    assert {"", "steady", "leak", "out-of-memory", "quota-exceeded", "suspended", "parent exited"} <= set(found)


def test_verdict_has_the_level_of_its_card_and_remarks_are_what_it_does_not_say():
    frame = frame_of_two_devices()
    of_train = {key: frame["processes"][0][key] for key in ("device_uuid", "pid", "start_ticks")}
    uuid = ["uuid", of_train["device_uuid"]]
    alert = {**of_train, "phase": "firing", "silenced_by": [], "rule": "out-of-memory", "annotations": []}
    critical = alert | {"labels": [uuid, ["severity", "critical"]]}
    newer = alert | {"rule": "allocation-retries", "labels": [uuid, ["severity", "warning"]]}
    idle = alert | {"rule": "idle-holder", "labels": [uuid, ["severity", "info"]]}
    expression = "(({ verdict, remarks, level = null }) => [verdict, remarks, level])(m.rowsOf(given[0])[0])"
    for kind, alerts, shown in (
        ("steady", [critical], ["out-of-memory", [], "bad"]),
        ("steady", [alert | {"labels": [uuid, ["severity", "info"]]}], ["steady", [], None]),
        ("steady", [newer, critical], ["out-of-memory", [], "bad"]),
        ("steady", [critical | {"silenced_by": ["1"]}, newer], ["allocation-retries", [], "warn"]),
        ("steady", [critical | {"phase": "pending"}], ["", ["out-of-memory"], None]),
        ("leak", [critical], ["out-of-memory", ["leak"], "bad"]),
        ("leak", [newer], ["leak", ["allocation-retries"], "warn"]),
        ("leak", [critical | {"rule": "leak"}], ["leak", [], "bad"]),
        ("idle-holder", [], ["idle-holder", ["30.0 GiB idle"], "warn"]),
        ("idle-holder", [idle], ["idle-holder", ["30.0 GiB idle"], "note"]),
    ):
        frame |= {"verdicts": [{**of_train, "kind": kind}], "alerts": alerts}
        assert run_module("processlist", expression, frame) == shown


def test_columns_of_pools_appear_together():
    expression = "m.filled(m.rowsOf(given[0]), 1)"
    pools = {"waste", "live", "cached", "stranded", "overhead", "verdict"}
    assert pools <= set(run_module("processlist", expression, frame_of_two_devices()))
    bare = make_frame(make_device("GPU-0", used_bytes=GIB, processes=(make_process(10, GIB),)))
    assert not pools & set(run_module("processlist", expression, bare))


def test_groups_have_sums_of_what_is_known():
    frame = frame_of_two_devices()
    groups = listed(frame, "user")
    assert [group[:3] for group in groups] == [["ann", 2, 59 * GIB], ["bob", 2, None]]
    partial = ["cached", "live", "opaque", "overhead", "stranded", "waste"]  # one of Ann's processes has an agent
    assert [group[3] for group in groups] == [partial, []]
    assert [group[:2] for group in listed(frame, "Slurm job")] == [["77", 2], ["no Slurm job", 2]]
    assert [group[:2] for group in listed(frame, "workload")] == [["train", 1], ["no workload", 3]]
    devices = listed(frame, "device", {"id": "gpu", "up": True}, ("group device GPU 1",))
    assert devices[0][:3] == ["GPU 0", 2, 30 * GIB]
    assert devices[1][:3] == ["GPU 1", 2, 29 * GIB]
    assert devices[2:] == [11, 21]
    assert devices[1][3] == ["opaque", "used"]


def sum_of(known: list[int]) -> int | None:
    return sum(known) if known else None


def test_sums_of_groups_equal_those_of_the_frames():
    fields = ["used_bytes", *(f"{share}_bytes" for share in SHARES[:5])]
    expression = """given[0].map((frame) => m.grouped(m.rowsOf(frame), "device", given[2]).map(
        (group) => [group.rows[0].device_uuid, given[1].map((field) => group[field])]))"""
    for frame, groups in zip(FRAMES, run_module("processlist", expression, FRAMES, fields, BY_USED), strict=True):
        expected: dict[str, list[Any]] = defaultdict(list)
        for process in frame["processes"]:
            expected[process["device_uuid"]].append([process[field] for field in fields])
        sums = {
            uuid: [sum_of([value for value in column if value is not None]) for column in zip(*rows, strict=True)]
            for uuid, rows in expected.items()
        }
        assert dict(groups) == sums


CHANGED = """(() => {
    const rows = m.rowsOf(given[0]);
    for (const row of rows) row.change_bytes = given[1][row.pid] ?? null;
    const text = (item) => m.COLUMNS.find(({ id }) => id === "change").text(item);
    return m.listed(rows, given[2], given[3], new Set()).map((item) => [item.title ?? item.pid, text(item)]);
})()"""
BY_CHANGE = {"id": "change", "up": False}


def test_change_of_a_group_is_known_if_those_of_all_members_are():
    frame = frame_of_two_devices()
    changes = {10: -GIB, 11: 3 * GIB, 20: GIB}
    rows = run_module("processlist", CHANGED, frame, changes, "", BY_CHANGE)
    assert rows == [[11, "+3.0 GiB"], [20, "+1.0 GiB"], [10, "-1.0 GiB"], [21, ""]]
    groups = run_module("processlist", CHANGED, frame, changes, "user", BY_CHANGE)
    assert groups == [["ann", "+2.0 GiB"], ["bob", ""]]


FILTERS: dict[tuple[str, str], list[int]] = {
    ("", ""): [10, 20, 11, 21],
    ("ANN", ""): [10, 11],
    ("ann  11", ""): [11],
    ("gpu python", "1"): [11],
    ("train", ""): [10],
    ("77", "0"): [10],
    ("", "1"): [11, 21],
    ("nothing", ""): [],
    ("user:ann", ""): [10, 11],
    ("user:a program:python", "1"): [11],
    ("user:ann train", ""): [10],
    ("pid:1", ""): [],
    ("pid:11", ""): [11],
    ("gpu:1 -ann", ""): [21],
    ("-user:bob", ""): [10, 11],
    ("job:", ""): [10, 20, 11, 21],
    ("team:ann", ""): [],
    ("constructor:ann", ""): [],
    ("-", ""): [],
}


def test_filter_finds_each_word_in_names_and_numbers():
    expression = "given[1].map(([text, gpu]) => m.find(m.rowsOf(given[0]), text, gpu).map((row) => row.pid))"
    found = run_module("processlist", expression, frame_of_two_devices(), list(FILTERS))
    assert dict(zip(FILTERS, found, strict=True)) == FILTERS


def test_rows_keep_their_order_while_the_user_points_at_one():
    expression = """((rows) => ["", "user"].map((by) => {
        const keys = (found) => found.map((item) => item.key);
        const open = new Set(["group user ann", "group user bob"]);
        const before = m.listed(rows, by, given[1], open);
        for (const row of rows) row.used_bytes = 9e9 - (row.used_bytes ?? 0);
        const first = { ...rows[0], key: "new", pid: 12 };
        const after = m.listed([first, ...rows], by, given[1], open, keys(before));
        return [keys(before), keys(after)];
    }))(m.rowsOf(given[0]))"""
    (plain, plain_after), (groups, groups_after) = run_module(
        "processlist", expression, frame_of_two_devices(), BY_USED
    )
    assert plain_after == [*plain, "new"]
    assert len(groups) == 6
    place = groups.index("group user ann") + 3  # after the two rows of the group
    assert groups_after == [*groups[:place], "new", *groups[place:]]


PARTS = """given.map(([count, size, extras, from, to, pinned]) => m.parts({ count, size, extras, from, to, pinned }))"""
LISTS: dict[str, list[Any]] = {
    "start": [3200, 44, [], 0, 600, -1],
    "middle": [3200, 44, [], 70_000, 70_600, -1],
    "end": [3200, 44, [], 140_200, 140_800, -1],
    "beyond": [100, 44, [], 99_000, 99_600, -1],
    "tall window": [3200, 10, [], 0, 30_000, -1],
    "details": [100, 44, [[2, 400], [50, 300]], 1000, 1600, -1],
    "focus before": [3200, 44, [], 70_000, 70_600, 3],
    "focus after": [3200, 44, [[3199, 500]], 0, 600, 3199],
    "empty": [0, 44, [], 0, 600, -1],
}


def test_drawn_part_contains_what_is_seen_and_at_most_sixty_rows():
    for (name, given), parts in zip(LISTS.items(), run_module("viewport", PARTS, *LISTS.values()), strict=True):
        count, size, extras, first, last, pinned = given
        tall = dict(extras)
        tops = [place * size + sum(extra for other, extra in extras if other < place) for place in range(count + 1)]
        places = [part["place"] for part in parts if "place" in part]
        assert len(places) <= 61, name
        assert places == sorted(set(places)), name
        assert pinned in (-1, *places), name
        ends = [tops[place] + size + tall.get(place, 0) for place in range(count)]
        seen = [place for place in range(count) if tops[place] < last and ends[place] > first]
        assert set(seen[:60]) <= set(places), name
        heights = sum(part["gap"] if "gap" in part else size + tall.get(part["place"], 0) for part in parts)
        assert heights == tops[count], name


@pytest.mark.parametrize(("count", "layout"), [(1, "one"), (2, "rows"), (32, "rows"), (33, "tiles")])
def test_layout_of_devices_follows_from_their_number(count: int, layout: str):
    assert run_module("devicegrid", "m.layoutOf(given[0])", count) == layout


def test_rows_of_devices_state_the_bytes_of_the_frame():
    expression = """given.map((frame) => m.devicesOf(frame).map(
        ({ device, sums, programs, problem }) => [device.uuid, sums, programs, problem]))"""
    wholes = [full_frame(random_frame(random.Random(seed), seed)) for seed in range(20)]
    frames = [as_json(whole) for whole in wholes]
    assert run_module("devicegrid", expression, *frames) == run_module(
        "devicegrid", expression, *(as_json(live_frame(whole)) for whole in wholes)
    )
    for frame, rows in zip(frames, run_module("devicegrid", expression, *frames), strict=True):
        expected: list[Any] = []
        for device in frame["snapshot"]["devices"]:
            uuid = device["uuid"]
            sums: Counter[str] = Counter()
            for line in frame["ledger"]["lines"]:
                if line["device_uuid"] == uuid:
                    sums[line["share"]] += line["used_bytes"]
            number = sum(process["device_uuid"] == uuid for process in frame["processes"])
            leaks = sum(verdict["device_uuid"] == uuid for verdict in frame["verdicts"])
            programs = None if device["processes"] is None else number
            expected.append([uuid, dict(sums), programs, "leak" * (leaks > 0) + f" +{leaks - 1}" * (leaks > 1)])
        assert rows == expected


def test_worst_problem_of_a_device_is_that_which_leaves_least_time():
    kinds = [("growing", 10.0), ("fragmentation", None), ("leak", 600.0), ("steady", 1.0)]
    verdicts = [
        {"device_uuid": "GPU-0", "kind": kind, "since": 1.0, "time_to_full_seconds": left} for kind, left in kinds
    ]
    frame = frame_of_two_devices()
    found = run_module("devicegrid", "m.devicesOf(given[0]).map((row) => row.problem)", frame | {"verdicts": verdicts})
    assert found == ["leak +1", ""]


def test_bar_ends_each_share_at_its_part_of_the_size():
    expression = "[m.gradient(given[0], 8), m.gradient({}, 8), m.gradient(given[0], 0)]"
    full, empty, unknown = run_module("bars", expression, {"live": 4, "cached": 1, "stranded": 0})
    assert full == "linear-gradient(to right, var(--live) 0 50%, var(--cached) 0 62.5%, transparent 0)"
    assert (empty, unknown) == ("none", "none")
    claimed = run_module("bars", "m.gradient(given[0], 8)", {"live": 4, "granted": 1, "waiting": 1})
    parts = "var(--live) 0 50%, transparent 0 75%, var(--free) 0"
    assert claimed == f"linear-gradient(to right, {parts}), var(--hatch)"


def test_claims_count_no_memory_twice_and_take_no_more_than_what_is_free():
    def reserve(size: int, **process: Any) -> dict[str, Any]:
        return {"device_uuid": "a", "quota": {"reserve_quota": "team", "reserve_bytes": size}} | process

    def grant(name: str, need: int, unused: int, pid: int, uuid: str = "a") -> dict[str, Any]:
        return {"id": name, "device_uuid": uuid, "need_bytes": need, "unused_bytes": unused, "pid": pid}

    def asleep(uuid: str, used: int, *grants: str, state: str = "suspended") -> dict[str, Any]:
        return {"state": state, "grants": grants, "memory": [{"device_uuid": uuid, "used_bytes": used}]}

    own = [{"pid": 1, "quota": {"reserve_quota": "team"}}]
    frame = {
        "queue": [{"id": "q", "device_uuid": "b", "need_bytes": 9, "pid": 7}],
        "grants": [grant("g", 6, 4, 1), grant("h", 5, 5, 8)],
        "processes": [reserve(20, used_bytes=2), reserve(20, used_bytes=3)],
        "snapshot": {
            "quotas": own,
            "suspended_programs": [
                asleep("b", 9, "q"),
                asleep("a", 6, "g", state="waiting"),
                asleep("b", 3),
                asleep("b", 8, state="resuming"),
            ],
        },
    }
    expression = "m.claimsOf(given[0]).map(({ kind, uuid, bytes }) => [kind, uuid, bytes])"
    claims = run_module("shares", expression, frame)
    assert claims == [
        ["granted", "a", 4],
        ["granted", "a", 5],
        ["quota-reserve", "a", 14],  # 20, less 6 that a program of the quota is granted; its programs don't use 15
        ["waiting", "b", 9],
        ["suspended", "b", 3],
    ]
    frame["processes"][1]["used_bytes"] = None
    assert "quota-reserve" not in str(run_module("shares", expression, frame))
    parts = "m.claimedParts(given[0].map(([kind, uuid, bytes]) => ({ kind, uuid, bytes })), given[1])"
    devices = [{"uuid": "a", "free_bytes": 10}, {"uuid": "b", "free_bytes": 11}]
    assert run_module("shares", parts, claims, devices) == {
        "granted": 9,
        "quota-reserve": 1,
        "waiting": 9,
        "suspended": 2,
    }
    unknown = [{"uuid": "a", "free_bytes": None}]
    assert run_module("shares", parts, claims, unknown) == {"granted": 0, "quota-reserve": 0}


def test_line_of_a_device_ends_where_values_are_missing():
    points = [
        {"at": at, "low": used, "median": used, "high": used} for at, used in ((10, 0), (20, 5), (80, 10), (200, 10))
    ]
    points[1]["low"] = 0
    expression = "m.sparkLine(given[0], given[1], 0, 100, 30)"
    assert run_module("sparkline", expression, points, 10) == "M10.0 19.5V19.5H20.0V19.5V10.0V10.0M80.0 0.5V0.5"
    assert run_module("sparkline", expression, [], None) == ""


def test_line_of_a_device_has_each_drop_whether_it_was_read_as_frames_or_as_blocks():
    used = [20] * 40
    used[17] = 5
    frames = [{"at": 1000 + at, "low": value, "median": value, "high": value} for at, value in enumerate(used)]
    blocks = [
        {"at": frames[begin]["at"], "low": min(part), "median": part[-1], "high": max(part)}
        for begin, part in ((begin, used[begin : begin + 5]) for begin in range(0, 40, 5))
    ]
    expression = "given.map((all) => all.reduce((points, each) => (m.add(points, each), points), []))"
    by_frame, by_block = run_module("sparkline", expression, frames, blocks)
    assert by_frame == by_block
    assert [(point["at"], point["low"]) for point in by_frame] == [
        (1000 + at, 5 if at == 15 else 20) for at in range(0, 40, 5)
    ]


def test_every_share_has_a_meaning():
    meanings = run_module("meanings", "m.MEANINGS")
    assert tuple(meanings)[: len(SHARES)] == SHARES
    assert meanings == dict(SHARE_MEANINGS), "run `make docs`"


HOSTILE = '=HYPERLINK("x"),\nnext'


def test_csv_contains_what_is_listed():
    frame = frame_of_two_devices()
    frame["processes"][0]["comm"] = HOSTILE
    rows = run_module("processlist", "m.rowsOf(given[0])", frame)

    def downloaded(listed: Any) -> list[dict[str, str]]:
        records = run_module("processrecords", "m.records(given[0])", listed)
        text = run_module("downloads", "m.csvOf(m.tableOf(given[0]))", records)
        return list(csv.DictReader(io.StringIO(text, newline="")))

    table = downloaded(rows)
    assert [row["pid"] for row in table] == [str(row["pid"]) for row in rows]
    assert [row["gpu"] for row in table] == ["0", "0", "1", "1"]
    assert table[0]["comm"] == f"'{HOSTILE}"
    assert table[1]["used_bytes"] == ""
    assert [row["waste_bytes"] for row in table] == [
        "" if row["cached_bytes"] is None else str(row["cached_bytes"] + (row["stranded_bytes"] or 0)) for row in rows
    ]
    groups = run_module("processlist", "m.grouped(m.rowsOf(given[0]), 'user', given[1])", frame, BY_USED)
    table = downloaded(groups)
    assert [(row["group"], row["processes"], row["used_bytes"]) for row in table] == [
        ("ann", "2", str(59 * GIB)),
        ("bob", "2", ""),
    ]


def test_card_of_a_verdict_is_as_loud_while_its_alert_is_pending():
    verdict = {"since": 40.0}
    alert = {
        "phase": "pending",
        "silenced_by": [],
        "labels": {"severity": "warning"},
        "notes": {"summary": "GPU 0 is full"},
        "active_at": 70.0,
        "fired_at": None,
    }
    shown = "given[0].map((card) => [m.levelOf(card), m.ageOf(card, 100, []).split(' ')[0]])"
    cards = [
        {"kind": "leak", "verdict": verdict, "alert": None},
        {"kind": "leak", "verdict": verdict, "alert": alert},
        {"kind": "leak", "verdict": verdict, "alert": alert | {"phase": "firing"}},
        {"kind": "leak", "verdict": verdict, "alert": alert | {"silenced_by": ["1"]}},
        {"kind": "mine", "verdict": None, "alert": alert},
    ]
    assert run_module("cards", shown, cards) == [
        ["warn", "verdict"],
        ["warn", "verdict"],
        ["warn", "warning"],
        ["quiet", "silenced"],
        ["quiet", "pending"],
    ]


def test_growth_of_a_start_is_not_counted():
    frame = make_frame(make_device(processes=(make_process(1), make_process(2))))
    now = frame["snapshot"]["taken_at"]
    frame["verdicts"] = [{"kind": "growing", "pid": pid, "start_ticks": 100} for pid in (1, 2)]
    for process, age in zip(frame["processes"], (60, 600), strict=True):
        process["started_at"] = now - age
    assert run_module("cards", "m.restOf(...given)", frame) == "also: 1 growing"
