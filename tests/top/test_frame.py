"""Frames of daemons: whatever a server answers, a frame has the types of its fields, or the answer is refused."""

from __future__ import annotations

import io
import json
import random
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.engines import EngineModel, EngineProcess, EngineReading
from gpumond.facts.errors import DaemonError
from gpumond.facts.frame import Alert, ConditionWithRemedy, FaultWithRemedy, GrowthLine, RuledOutCause, Verdict
from gpumond.facts.program import ProcessKey
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.doctor import _frame_findings as findings_of
from gpumond.features.fleet.plan import Criteria, plan_flushes
from gpumond.features.fleet.status import status_of_frame, status_table, summary
from gpumond.top.processes import Ancestor, SortOrder, group_rows, table_rows, tree_rows
from gpumond.view.frame import MALFORMED, MAX_TEXT_LENGTH, decode_response, frame_of, frame_view, merge_views
from gpumond.view.tables import device_table, engine_table, note_paragraphs, process_table, status_page
from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame, fake_daemon, make_frame
from tests.helpers.fuzzing import fuzzed
from tests.helpers.screens import top
from tests.helpers.values import make_device, make_pool, make_process, make_report

MACHINE = Machine("node-1", "https://node-1:9917")
FIT = GrowthLine(
    points=((1.0, 2.0), (2.0, 3.0)),
    at=2.0,
    level_bytes=3.0,
    slope_bytes_per_second=1.0,
    slope_low_bytes_per_second=0.5,
    slope_high_bytes_per_second=1.5,
    band_bytes=1.0,
    full_at=None,
    full_at_earliest=None,
    full_at_latest=None,
    ruled_out=(RuledOutCause("load", "follows requests", 0.9),),
)
ENGINE = EngineReading(
    name="chat",
    kind="vllm",
    up=True,
    models=(EngineModel("m", GIB),),
    running=1,
    kv_cache_bytes=GIB,
    kv_cache_used_ratio=0.5,
    sleeping=False,
    idle_seconds=3.0,
    processes=(EngineProcess(10, 1000),),
)


def full_frame() -> dict[str, Any]:
    """Return a frame with something in each of its lists."""
    return busy_frame(
        verdicts=(
            Verdict(
                device_uuid="GPU-a",
                pid=10,
                start_ticks=1000,
                kind="leak",
                since=5.0,
                evidence=(("ratio", 0.5),),
                summary="it leaks",
                fit=FIT,
            ),
        ),
        alerts=(
            Alert(
                rule="leak",
                phase="firing",
                labels=(("severity", "critical"),),
                annotations=(("summary", "it leaks"),),
                value=1.0,
                active_at=1.0,
                fired_at=2.0,
            ),
        ),
        faults=(FaultWithRemedy("nvml", "gpu_is_lost", "GPU-a", "fell off the bus", "reset it"),),
        conditions=(ConditionWithRemedy(None, "private_pid_namespace", "share it"),),
        engines=(ENGINE,),
    )


def show(frame: Any) -> str:
    """Return all that the command line, `top` and `fleet` make of a frame."""
    content, state = frame_view(frame), status_of_frame(MACHINE, frame)
    checked = frame_of(frame)
    parts = [
        device_table(content, True, 80, True),
        process_table(content, 80),
        engine_table(checked["snapshot"], 80),
        *note_paragraphs(content),
        status_page(merge_views([("node-1", content), ("node-2", content)])),
        *(str(row.details) + row.search_text for row in content.processes),
        status_table([state]),
        summary([state]),
        json.dumps(checked, allow_nan=False),
    ]
    for engines in (False, True):
        parts.append(str(plan_flushes(MACHINE, frame, Criteria(engines_only=engines), None)))
    parts += [str(each) for each in findings_of(MACHINE, checked)]
    return "\n".join(parts)


def test_frame_of_a_daemon_is_unchanged():
    frame = full_frame()
    assert frame_of(frame) == frame
    assert show(frame)


def test_frame_of_an_earlier_version_has_defaults_and_one_of_a_later_version_no_unknown_keys():
    frame = full_frame()
    del frame["snapshot"]["engines"], frame["processes"][0]["quota"]
    frame["invented"] = frame["processes"][0]["invented"] = 1e300
    checked = frame_of(frame)
    assert (checked["snapshot"]["engines"], checked["processes"][0]["quota"]) == ([], None)
    assert "invented" not in checked
    assert "invented" not in checked["processes"][0]


def test_path_that_a_daemon_does_not_serve_is_of_a_newer_command():
    with pytest.raises(DaemonError, match="older than this command"):
        decode_response(
            404, b'{"status": 404, "detail": "this daemon doesn\'t serve /api/v1/new; /docs lists what it serves"}'
        )
    with pytest.raises(DaemonError, match="no program with an agent"):
        decode_response(404, b'{"status": 404, "detail": "no program with an agent matches"}')


@pytest.mark.parametrize("value", ["Infinity", "1e999", "NaN", "9" * 4000, "1" + "0" * 400, "1.5", '"8"', "true", "{}"])
@pytest.mark.parametrize("path", ["size_bytes", "taken_at", "driver_version"])
def test_number_that_is_not_finite_or_text_is_refused(path: str, value: str):
    frame = full_frame()
    holder = {"size_bytes": frame["snapshot"]["devices"][0], "taken_at": frame["snapshot"]}
    holder.get(path, frame["snapshot"]["source"])[path] = "HERE"
    body = json.dumps(frame).replace('"HERE"', value).encode()
    valid = {"taken_at": ("1.5",), "driver_version": ('"8"',)}.get(path, ())
    if value in valid:
        show(decode_response(200, body))
        return
    with pytest.raises(DaemonError) as refused:
        frame_of(decode_response(200, body))
    assert MALFORMED in str(refused.value) or "finite" in str(refused.value)


@pytest.mark.parametrize("value", ["Infinity", "1e999", "NaN"])
def test_answer_of_unknown_type_has_finite_numbers(value: str):
    with pytest.raises(DaemonError, match="finite"):
        decode_response(200, f'{{"unknown": [{value}]}}'.encode())


def test_long_text_is_cut():
    frame = full_frame()
    frame["version"] = "v" * 1_000_000
    assert len(frame_of(frame)["version"]) == MAX_TEXT_LENGTH


@pytest.mark.parametrize("seed", range(40))
def test_any_answer_is_shown_or_refused(seed: int):
    rng = random.Random(seed)
    original = json.dumps(full_frame()).encode()
    refused = 0
    for _ in range(25):
        answer = fuzzed(rng, original)
        with redirect_stdout(io.StringIO()):
            try:
                shown = show(decode_response(200, answer))
            except DaemonError:
                refused += 1
                continue
        shown.encode()
        assert "\x1b" not in shown
        assert "\x00" not in shown
    assert refused


USERS = {1: "analysis", 2: "research", 3: "analysis", 4: None}
SIZES = {1: GIB, 2: 2 * GIB, 3: 3 * GIB, 4: 5 * GIB}


def four(**fields: Any) -> dict[str, Any]:
    """The third process has an agent that reports 1 GiB of cache."""
    processes = tuple(
        make_process(
            pid,
            SIZES[pid],
            user=user,
            comm="python",
            pod_name="trainer-0" if pid < 3 else None,
            pod_namespace="ml",
        )
        for pid, user in USERS.items()
    )
    report = make_report(3, (make_pool(live=GIB, cached=GIB),), workload="train")
    return make_frame(make_device(used_bytes=11 * GIB, processes=processes), reports=(report,), **fields)


ROWS = frame_view(four()).processes


def test_group_has_the_sums_of_its_members():
    analysis, research, unknown = sorted(group_rows(ROWS, "user"), key=lambda group: group.process.program)
    assert [group.process.program for group in (analysis, research, unknown)] == [
        "analysis (2)",
        "research (1)",
        "unknown user (1)",
    ]
    assert analysis.process.used_bytes == 4 * GIB
    assert analysis.process.shares["cached"] == GIB
    assert research.process.shares["cached"] is None
    assert sorted(row.pid for row in analysis.processes) == [1, 3]


def test_processes_are_grouped_by_workload_and_by_container():
    assert {group.process.program for group in group_rows(ROWS, "workload")} == {"python (3)", "train (1)"}
    assert {group.process.program for group in group_rows(ROWS, "container")} == {
        "ml/trainer-0 (2)",
        "no container (2)",
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"), [("leak", "leak", "leak"), ("leak", "out-of-memory", "2 affected")]
)
def test_group_has_the_status_of_its_members_or_counts_them(first: str, second: str, expected: str):
    """The status of one with an alert isn't its verdict."""
    members = [replace(row, user="ann") for row in ROWS[:3]]
    members[:2] = [
        replace(row, level="warn", status=status) for row, status in zip(members, (first, second), strict=False)
    ]
    (group,) = group_rows(members, "user")
    assert group.process.status == expected


def test_groups_are_sorted_by_their_sums_and_members_follow_an_opened_one():
    groups = [*table_rows(ROWS, SortOrder(), "", "user", (), {})]
    assert [row.process.program for row in groups] == ["unknown user (1)", "analysis (2)", "research (1)"]
    opened = [*table_rows(ROWS, SortOrder(), "", "user", {groups[1].key}, {})]
    assert [(row.process.pid, row.depth) for row in opened] == [(0, 0), (0, 0), (3, 1), (1, 1), (0, 0)]
    assert [row.process.pid for row in table_rows(ROWS, SortOrder("pid", True), "", "", (), {})] == [1, 2, 3, 4]


def test_tree_shows_children_below_the_nearest_ancestor_with_memory():
    """3 is an ancestor of 1; 2 and 4 are children of a program without memory, pid 90."""
    keys = {row.pid: row.key[1] for row in ROWS}
    shell, launcher = Ancestor(50, "bash"), Ancestor(90, "torchrun")
    lineage = {
        keys[1]: (Ancestor(70, "sh"), Ancestor(3, "train"), shell),
        keys[2]: (launcher, shell),
        keys[3]: (shell,),
        keys[4]: (launcher, shell),
    }
    rows = tree_rows(sorted(ROWS, key=lambda row: -row.pid), lineage)
    assert [(row.process.program, row.process.pid, row.depth) for row in rows] == [
        ("torchrun", 90, 0),
        ("python", 4, 1),
        ("python", 2, 1),
        ("train", 3, 0),
        ("python", 1, 1),
    ]
    assert rows[0].process.used_bytes == 7 * GIB


def test_tree_without_known_ancestors_is_a_list():
    rows = tree_rows(ROWS, {ProcessKey(1, 100): ()})
    assert [(row.process.pid, row.depth) for row in rows] == [(row.pid, 0) for row in ROWS]


def test_key_g_groups_enter_opens_a_group_and_space_marks_its_members():
    with fake_daemon(four()) as fake, top(fake.url, size=(104, 30)) as session:
        session.shows("python", "train")
        session.press("g")
        session.shows("analysis (2)", "research (1)", "unknown user (1)", "4.0 GiB", without="train ")
        session.press("down", "enter")
        session.until(lambda screen: any(line.split()[1:3] == ["3", "train"] for line in screen.splitlines()))
        session.press(" ")
        session.until(lambda screen: sum(line.startswith("*") for line in screen.splitlines()) == 3)
        session.press("g")
        session.shows("train (1)", "python (3)")
        session.press("g")
        session.shows("ml/trainer-0 (2)", "no container (2)")
        session.press("g")
        session.until(lambda screen: sum(line.startswith("*") for line in screen.splitlines()) == 2)
