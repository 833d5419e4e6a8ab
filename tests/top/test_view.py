"""Rows of a frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.facts.frame import Alert, ConditionWithRemedy, FaultWithRemedy, Verdict
from gpumond.facts.program import PoolLimit
from gpumond.facts.shares import SHARES
from gpumond.facts.snapshot import SourceState
from gpumond.facts.units import duration_text
from gpumond.top.processes import ProcessList, SortOrder, lay_out_columns, sort_and_filter
from gpumond.top.screen import detail_lines as details
from gpumond.view.frame import frame_view, merge_views
from gpumond.view.notices import USUALLY_INTENDED, FrameNotice, stuck_processes
from gpumond.view.rows import ProcessRow
from gpumond.view.tables import device_lines, flush_estimate, process_table
from gpumond.view.text import (
    COLORS,
    FILLS,
    PART_COLORS,
    StackCell,
    bar,
    block_character,
    plain_text,
    printable_excerpt,
    stacked_chart,
)
from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame, holding_with, make_frame
from tests.helpers.values import make_device, make_pool, make_process, make_quotas, make_report, make_suspended

LEAK = Verdict(
    device_uuid="GPU-a",
    pid=10,
    start_ticks=100,
    kind="leak",
    since=5.0,
    time_to_full_seconds=60.0,
    summary="train leaks",
)
CHURN = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="churn", since=1.0, summary="train goes up and down")


def make_alert(rule: str, phase: str = "firing", severity: str = "warning", active_at: float = 999_900.0) -> Alert:
    labels, notes = (("severity", severity),), (("summary", f"{rule} it is"),)
    fired_at = active_at if phase == "firing" else None
    return Alert(
        rule=rule, phase=phase, labels=labels, annotations=notes, value=1.0, active_at=active_at, fired_at=fired_at
    )  # type: ignore[arg-type]


def described(row: ProcessRow) -> str:
    return "".join(f"{plain_text(line)}\n" for line in details(row, [], 80))


def test_shares_are_those_of_the_ledger():
    content = frame_view(busy_frame())
    (device,) = content.devices
    expected = {"live": 20, "cached": 12, "stranded": 6, "overhead": 2, "opaque": 10, "unattributed": 0}
    assert device.shares == {share: size * GIB for share, size in expected.items()}
    assert list(device.shares) == list(expected)
    train, python = content.processes
    assert (train.program, train.pid, train.shares["cached"], train.shares["opaque"]) == ("train", 10, 12 * GIB, None)
    assert (python.program, python.user, python.shares["cached"], python.shares["opaque"]) == (
        "python",
        "research",
        None,
        10 * GIB,
    )
    assert flush_estimate(content) == "a flush of all programs would release about 12.0 GiB"


def test_unmapped_bytes_are_shown_where_there_are_any():
    report = make_report(10, (make_pool(live=20 * GIB, unmapped_bytes=15 * GIB),))
    unmapped, mapped = frame_view(busy_frame(reports=(report,))), frame_view(busy_frame())
    (device,), (train, python) = unmapped.devices, unmapped.processes
    assert (device.unmapped_bytes, train.unmapped_bytes, python.unmapped_bytes) == (15 * GIB, 15 * GIB, None)
    assert train.state == "15.0 GiB unmapped"
    assert sum(device.shares.values()) == 50 * GIB
    for seen, shown in ((unmapped, True), (mapped, False)):
        legend = "".join(piece.text for line in device_lines(seen, 200, 30, True) for piece in line)
        assert ("unmapped 15.0 GiB (uses no GPU memory)" in legend) is shown
        table = process_table(seen)
        assert ("UNMAPPED" in table) is shown
        assert ("15.0 GiB" in table) is shown
    assert "unmapped 15.0 GiB" in described(train)


def test_limit_and_quota_are_shown_where_there_are_any():
    pool = make_pool(live=20 * GIB)
    report = replace(make_report(10, (pool,)), limits=(PoolLimit(pool.allocator, pool.device_uuid, 30 * GIB, "team"),))
    quotas = make_quotas(report, (25 * GIB, "small"), (30 * GIB, "team"), (10_000 * GIB, "team"))
    limited, free = frame_view(busy_frame(reports=(report,), quotas=quotas)), frame_view(busy_frame())
    for seen, shown in ((limited, True), (free, False)):
        table = process_table(seen)
        assert ("LIMIT" in table) is shown
        assert ("30.0 GiB" in table) is shown
        details = described(seen.processes[0])
        assert ("limit 30.0 GiB\n" in details) is shown
        owned = "quota soft limit 25.0 GiB (small; exceeded by 15.0 GiB), limit 30.0 GiB\n(team), reserve"
        assert (owned in details) is shown
        assert ("not available" in details) is shown


@pytest.mark.parametrize(
    ("pids", "fields", "text"),
    [
        ((10,), {"kv_cache_bytes": 5 * GIB}, "live 20.0 GiB (KV cache: 5.0 GiB, 4% in use)"),
        ((10,), {}, "live 20.0 GiB (KV cache: 4% in use)"),
        ((10,), {"kv_cache_bytes": 30 * GIB}, "live 20.0 GiB (KV cache: 4% in use)"),
        ((10, 11), {"kv_cache_bytes": 5 * GIB}, "live 20.0 GiB (KV cache: 4% in use)"),
        ((10,), {"sleeping": True}, "live 20.0 GiB\n"),
        ((10,), {"kv_cache_used_ratio": None}, "live 20.0 GiB\n"),
        ((11,), {}, "live 20.0 GiB\n"),
    ],
)
def test_kv_cache_of_an_engine_is_a_part_of_its_live_memory(pids: tuple[int, ...], fields: dict[str, Any], text: str):
    processes = tuple(EngineProcess(pid, 100) for pid in pids)
    known: dict[str, Any] = {"kv_cache_used_ratio": 0.04} | fields
    engine = EngineReading(name="chat", kind="sglang", up=True, processes=processes, **known)
    content = frame_view(busy_frame(engines=(engine,)))
    train = next(row for row in content.processes if row.pid == 10)
    shown = described(train)
    assert text in shown
    assert ("engine chat (sglang)" in shown) is (10 in pids)


def test_kv_cache_in_a_program_without_an_agent_is_a_part_of_its_opaque_memory():
    engine = EngineReading(
        name="chat", kind="sglang", up=True, processes=(EngineProcess(11, 100),), kv_cache_used_ratio=0.5
    )
    content = frame_view(busy_frame(engines=(engine,)))
    python = next(row for row in content.processes if row.pid == 11)
    assert "opaque 10.0 GiB (KV cache: 50% in use)" in described(python)


def test_refused_flush_is_not_promised():
    report = make_report(10, (make_pool(live=20 * GIB, cached=12 * GIB, stranded=6 * GIB),), flush_policy="never")
    content = frame_view(busy_frame(reports=(report,)))
    assert (content.reclaimable_bytes, content.refused_bytes) == (0, 12 * GIB)
    assert (
        flush_estimate(content)
        == "a flush of all programs would release nothing; programs that don't allow a flush have another 12.0 GiB "
        "in their caches"
    )


def test_process_without_an_agent_has_no_reclaimable_bytes():
    content = frame_view(busy_frame(reports=()))
    assert (content.reclaimable_bytes, flush_estimate(content), content.agents) == (None, "", 0)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, ""),
        ({"missed_readings": 1}, "values from 1 reading ago"),
        ({"up": False}, "faulty"),
        (
            {"missed_readings": 4, "up": False, "used_bytes": None, "processes": None},
            "no response for 4 readings: values not shown",
        ),
    ],
)
def test_device_state_is_shown_unless_it_is_normal(fields: dict[str, object], state: str):
    content = frame_view(make_frame(make_device(**fields)))
    assert content.devices[0].state == state
    shown = "\n".join("".join(piece.text for piece in line) for line in device_lines(content, 80, 24, True))
    assert state in shown
    assert ("of 80.0 GiB" in shown) == (content.devices[0].used_bytes is not None)


def test_verdict_with_a_trouble_precedes_others():
    (train, _) = frame_view(busy_frame(verdicts=(CHURN, LEAK))).processes
    assert (train.verdict, train.is_notable) == ("leak", True)
    assert train.verdicts == ("train leaks", "train goes up and down")
    (notice,) = frame_view(busy_frame(verdicts=(CHURN, LEAK))).verdicts
    advice = "find out what retains the memory: gpumond why --pid 10; restart the program before the GPU is full"
    subject = {"program": "train (pid 10)", "gpu": "GPU 0", "full_in": 60.0}
    assert notice == FrameNotice("warn", "leak", "train leaks", "leak", advice, "GPU-a", **subject)


def test_alert_on_a_process_hides_its_healthy_pattern():
    labels = (("uuid", "GPU-a"), ("severity", "critical"))
    alert = replace(make_alert("out-of-memory"), labels=labels, pid=10, start_ticks=100)
    info = replace(alert, labels=(("uuid", "GPU-a"), ("severity", "info")))
    for alerts, verdicts, shown in (
        ((alert,), (CHURN,), ""),
        ((alert,), (CHURN, LEAK), "leak"),
        ((info,), (CHURN,), "churn"),
        ((replace(alert, start_ticks=101),), (CHURN,), "churn"),
    ):
        (train, _) = frame_view(busy_frame(verdicts=verdicts, alerts=alerts)).processes
        assert train.verdict == shown


def test_most_severe_alert_of_a_process_precedes_newer_ones_and_its_verdicts():
    def status(*alerts: Alert, verdict: Verdict = CHURN, width: int = 40) -> tuple[str, str]:
        own = (replace(each, pid=10, start_ticks=100, labels=(*each.labels, ("uuid", "GPU-a"))) for each in alerts)
        row = frame_view(busy_frame(alerts=tuple(own), verdicts=(verdict,))).processes[0]
        return row.status_in(width), row.level

    error, retries = make_alert("out-of-memory", severity="critical"), make_alert("retries", active_at=999_990.0)
    assert status(error, retries) == status(retries, error) == ("out-of-memory +1", "bad")
    assert status(error, retries, verdict=LEAK, width=14) == ("out-of-mem… +2", "bad")
    assert status(retries, verdict=LEAK) == ("leak +1", "warn")
    assert status(make_alert("leak"), verdict=LEAK) == ("leak", "warn"), "an alert of the verdict is no second problem"
    assert status(retries) == ("retries", "warn")
    quiet = (replace(error, silenced_by=("a",)), make_alert("idle", severity="info"), make_alert("late", "pending"))
    assert status(*quiet[1:2]) == ("churn", "")
    assert status(quiet[0], quiet[2]) == ("", ""), "they refute a healthy pattern, and are no news"


def test_alert_that_outlives_its_verdict_is_no_verdict():
    alert = replace(make_alert("fragmentation"), labels=(("uuid", "GPU-a"),), pid=10, start_ticks=100)
    split = replace(CHURN, kind="fragmentation", summary="train is split")
    for verdicts, shown in (((split,), ("fragmentation", "warn")), ((), ("", "")), ((CHURN,), ("churn", ""))):
        (train, _) = frame_view(busy_frame(alerts=(alert,), verdicts=verdicts)).processes
        assert (train.status, train.level) == shown


def test_verdict_of_which_an_alert_informs_is_not_repeated():
    of_train = replace(make_alert("leak"), labels=(("uuid", "GPU-a"),), pid=10)
    for alert, kinds in (
        (of_train, []),
        (replace(of_train, pid=11), ["leak"]),
        (replace(of_train, rule="x"), ["leak"]),
    ):
        content = frame_view(busy_frame(verdicts=(LEAK,), alerts=(alert,)))
        assert [notice.title for notice in content.verdicts] == kinds


def test_alert_begins_with_its_program_and_gpu_and_is_as_urgent_as_its_verdict():
    labels = (("uuid", "GPU-a"), ("severity", "warning"))
    texts = (("summary", "train (pid 10) is leaking on GPU 0 (since 1 min)"),)
    alert = replace(make_alert("leak"), labels=labels, annotations=texts, pid=10, start_ticks=100)
    content = frame_view(busy_frame(alerts=(alert, replace(alert, pid=None, start_ticks=None)), verdicts=(LEAK,)))
    leak, device = content.alerts
    assert (leak.split_subject, leak.full_in) == (("train (pid 10) on GPU 0", " is leaking (since 1 min)"), 60.0)
    assert device.split_subject[0] == "GPU 0"
    (pending,) = frame_view(busy_frame(alerts=(replace(alert, phase="pending", fired_at=None),))).alerts
    assert pending.split_subject == ("pending: train (pid 10) on GPU 0", " is leaking (since 1 min)")
    both = merge_views([("a", content), ("b", content)])
    assert [alert.split_subject[0] for alert in both.alerts[:2]] == ["a: train (pid 10) on GPU 0", "a: GPU 0"]
    assert both.alerts[0].split_subject[1] == leak.split_subject[1]


def test_alerts_are_sorted_by_phase_and_severity():
    alerts = (make_alert("idle", "pending"), make_alert("full"), make_alert("leak", severity="critical"))
    assert frame_view(busy_frame(alerts=alerts)).alerts == (
        FrameNotice("bad", "leak firing for 1 min 40 s", "leak it is", "alert leak"),
        FrameNotice("warn", "full firing for 1 min 40 s", "full it is", "alert full"),
        FrameNotice("note", "idle pending for 1 min 40 s", "idle it is", "alert idle pending", state="pending"),
    )


def test_alert_that_came_back_says_since_when():
    texts = (("summary", "full it is; again since 00:00:03 UTC"),)
    (shown,) = frame_view(busy_frame(alerts=(replace(make_alert("full"), annotations=texts),))).alerts
    assert (shown.title, shown.text) == ("full firing again since 00:00:03 UTC", "full it is")


def test_silenced_alert_is_a_note():
    silenced = replace(make_alert("full"), silenced_by=("0" * 16,))
    (shown,) = frame_view(busy_frame(alerts=(silenced,))).alerts
    title = "full firing for 1 min 40 s, silenced"
    assert shown == FrameNotice("note", title, "full it is", "alert full, silenced", state="silenced")


def test_faults_and_conditions_are_named_with_their_remedies():
    faults = (FaultWithRemedy("nvml", "gpu_is_lost", "GPU-a", "fell off the bus", "reset it"),)
    conditions = (ConditionWithRemedy(None, "private_pid_namespace", "share it"),)
    assert frame_view(busy_frame(faults=faults, conditions=conditions)).notices == (
        FrameNotice("warn", "GPU 0: gpu_is_lost", "fell off the bus: reset it", "gpu_is_lost", device_uuid="GPU-a"),
        FrameNotice("note", "this machine: private_pid_namespace", "share it", "private_pid_namespace"),
    )


def test_source_that_is_down_is_shown_once():
    source = SourceState(name="nvml", up=False, responsive=False, reason="timeout", detail="no answer in 5 s")
    faults = (FaultWithRemedy("nvml", "timeout", None, "no answer in 5 s", "see dmesg"),)
    content = frame_view(make_frame(source=source, faults=faults))
    assert content.notices == (FrameNotice("bad", "no GPU can be read (timeout)", "no answer in 5 s: see dmesg"),)


def test_remedy_in_the_detail_of_a_fault_is_shown_once():
    words = "the library was not found: install the driver"
    source = SourceState(name="nvml", up=False, responsive=False, reason="library_not_found", detail=words)
    faults = (
        FaultWithRemedy("nvml", "library_not_found", None, words, "install the driver"),
        FaultWithRemedy("drm", "unreadable", None, "no access: join the group video", "join the group video"),
    )
    down = Alert(
        rule="driver-down",
        phase="pending",
        labels=(),
        annotations=(("summary", f"no GPU can be read: {words}"),),
        value=1.0,
        active_at=0.0,
    )
    full = Alert(
        rule="full", phase="pending", labels=(), annotations=(("summary", "full it is"),), value=1.0, active_at=0.0
    )
    content = frame_view(make_frame(source=source, faults=faults, alerts=(down, full)))
    assert [notice.text for notice in content.notices] == [words, "no access: join the group video"]
    assert [alert.text for alert in content.alerts] == ["", "full it is"]


def test_missing_device_is_a_notice():
    assert [notice.title for notice in frame_view(make_frame()).notices] == ["no GPU found"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x07", "�[31mred�"),
        ("a‮b⁦c​d", "a�b�c�d"),
        ("two\nlines\r\tand\x9bmore", "two�lines��and�more"),
        ("[bold red]x[/]", "[bold red]x[/]"),
        ("x" * 5000, "x" * 199 + "…"),
    ],
    ids=["escape", "direction", "lines", "markup", "long"],
)
def test_text_of_programs_is_one_plain_line(text: str, expected: str):
    assert printable_excerpt(text) == expected


def test_devices_of_a_narrow_screen_keep_bar_and_memory():
    one = make_device("GPU-a", name="NVIDIA H100 80GB HBM3", used_bytes=10 * GIB, free_bytes=70 * GIB)
    content = frame_view(make_frame(one, replace(one, uuid="GPU-b", index=1)))
    lines = [plain_text(line) for line in device_lines(content, 40, 20, True)]
    assert [line.startswith((" 0 !!", " 1 !!")) and line.endswith("10.0/80.0 GiB") for line in lines[:2]] == [True] * 2
    assert plain_text(device_lines(frame_view(make_frame(one)), 40, 20, True)[0]) == "GPU 0  10.0 GiB of 80.0 GiB  12%"


def test_totals_of_many_devices_count_an_instance_once():
    whole = make_device("GPU-a", used_bytes=10 * GIB, free_bytes=70 * GIB)
    part = make_device(
        "MIG-b", index=1, parent_uuid="GPU-a", size_bytes=40 * GIB, used_bytes=10 * GIB, free_bytes=30 * GIB
    )
    *_, legend = device_lines(frame_view(make_frame(whole, part)), 80, 10, True)
    assert "".join(piece.text for piece in legend) == "! unattributed 10.0 GiB  . free 70.0 GiB"


ROWS = frame_view(
    make_frame(
        make_device(
            used_bytes=7 * GIB,
            processes=(
                make_process(1, 2 * GIB, comm="Zeta", pod_name="trainer-0", pod_namespace="ml"),
                make_process(2, None, comm="alpha"),
                make_process(3, 4 * GIB, comm="mid", user="research"),
            ),
        )
    )
).processes


@pytest.mark.parametrize(
    ("order", "pids"),
    [
        (SortOrder(), [3, 1, 2]),
        (SortOrder(reverse=True), [2, 1, 3]),
        (SortOrder("program"), [2, 3, 1]),
        (SortOrder("program", reverse=True), [1, 3, 2]),
        (SortOrder("pid"), [3, 2, 1]),
    ],
)
def test_sorting_puts_largest_numbers_first_and_unknown_last(order: SortOrder, pids: list[int]):
    assert [row.pid for row in sort_and_filter(ROWS, order, "")] == pids


def test_bar_of_shares_gives_no_order():
    columns = lay_out_columns(200, ROWS)
    names = [column.name for column in columns]
    at = names.index("shares")
    assert SortOrder(names[at - 1]).next(columns) == SortOrder(names[at + 1])
    assert SortOrder(names[at + 1]).next(columns, -1) == SortOrder(names[at - 1])
    assert SortOrder("used").sorted_by("shares") == SortOrder("used")


@pytest.mark.parametrize(
    ("words", "pids"),
    [
        ("RESEARCH", [3]),
        ("ml/train zeta", [1]),
        ("zeta research", []),
        ("gpu", [3, 1, 2]),
        ("user:research", [3]),
        ("program:research", []),
        ("pod:ml/ gpu:0", [1]),
        ("-zeta -alpha", [3]),
        ("pid:1", [1]),
        ("gpu:", [3, 1, 2]),
        ("team:zeta", []),
    ],
)
def test_filter_searches_all_names_of_a_process(words: str, pids: list[int]):
    assert [row.pid for row in sort_and_filter(ROWS, SortOrder(), words)] == pids


def test_head_of_the_table_counts_the_rows_if_not_all_are_visible():
    table = ProcessList()
    table.fill(ROWS, {})
    assert "PROGRAM 2/3" in plain_text(table.lines(80, 3)[0])
    assert "/" not in plain_text(table.lines(80, 4)[0])


def test_head_of_groups_names_their_property():
    table = ProcessList()
    for name in ("BY USER", "BY WORKLOAD", "BY CONTAINER", "PROGRAM"):
        table.next_grouping()
        table.fill(ROWS, {})
        assert name in plain_text(table.lines(80, 9)[0])


def test_count_of_the_rows_is_complete_on_a_narrow_screen():
    table = ProcessList()
    table.fill(ROWS * 40, {})
    assert " 2/120 " in plain_text(table.lines(40, 3)[0])


@pytest.mark.parametrize(("users", "shown"), [(("ann", "ann"), False), (("ann", "ben"), True)])
def test_users_are_a_column_if_there_are_several(users: tuple[str, ...], shown: bool):
    rows = [replace(row, user=user) for row, user in zip(frame_view(busy_frame()).processes, users, strict=True)]
    assert ("user" in [column.name for column in lay_out_columns(110, rows)]) == shown
    assert "user" not in [column.name for column in lay_out_columns(80, rows)], "shares come first"


def test_column_that_had_a_value_stays():
    row = replace(ROWS[0], shares=dict.fromkeys(ROWS[0].shares, GIB))
    known = replace(row, shares=row.shares | {"opaque": 0})
    table = ProcessList()
    for rows, shown in (([known], False), ([row, known], True), ([known], True), ([], True)):
        table.fill(rows, {})
        assert ("opaque" in [column.name for column in table.columns_in(200)]) == shown


def test_verdict_has_room_for_its_count_before_longer_programs():
    columns = {column.name: column.width for column in lay_out_columns(150, frame_view(busy_frame()).processes)}
    assert columns["verdict"] == len("allocation-retries +1")
    assert columns["program"] > 14


@pytest.mark.parametrize("width", [40, 79, 90, 119, 200])
def test_columns_fit_the_screen_and_the_verdict_is_hidden_last(width: int):
    columns = lay_out_columns(width, frame_view(busy_frame()).processes)
    names = [column.name for column in columns]
    assert [name for name in names if name in ("gpu", "program", "used", "verdict")] == [
        "gpu",
        "program",
        "used",
        "verdict",
    ]
    assert sum(column.width + 1 for column in columns) <= width
    assert ("pid" in names) == (width > 40)
    assert ("cached" in names) == ("waste" in names) == (width >= 79)
    assert next(column.width for column in columns if column.name == "program") >= 10


def test_programs_with_an_agent_and_without_device_memory_are_named_by_workload():
    launcher, trainer = make_report(20, (), workload="train"), make_report(21, (), workload="cpu-only")
    (report,) = (make_report(10, (make_pool(live=20 * GIB),), workload="train"),)
    content = frame_view(busy_frame(reports=(report, launcher, trainer)))
    assert [notice.title for notice in content.notices] == ["connected, without GPU memory: cpu-only"]
    suspended = replace(make_suspended(21, 9 * GIB), workload="cpu-only")
    content = frame_view(busy_frame(reports=(report, launcher, trainer), suspended_programs=(suspended,)))
    assert [notice for notice in content.notices if "without GPU memory" in notice.title] == []


@pytest.mark.parametrize(
    ("fields", "what", "remedy"),
    [
        ({"state": "zombie"}, "pid 7 (python) is a zombie and uses 3.0 GiB", "ps -o ppid= -p 7"),
        ({"state": "gone", "comm": None}, "pid 7 (unknown program) is gone and uses 3.0 GiB", "reset the GPU"),
        ({"state": "uninterruptible", "slurm_job": "47"}, "pid 7 (python in Slurm job 47) is in uninterr", "dmesg"),
        ({"state": "stopped", "workload": "train"}, "pid 7 (train) is stopped", "kill -CONT 7"),
        (
            {"kinds": ["holder"], "used_bytes": None, "container_name": "web"},
            "pid 7 (python in container web)",
            "kill 7",
        ),
        ({"orphaned": True}, "pid 7 (python) has lost its parent and uses 3.0 GiB", "nohup"),
        (
            {"orphaned": True, "idle_seconds": 4000.0},
            "pid 7 (python) has lost its parent, has been idle for 1 h 7 min and uses 3.0 GiB",
            "kill 7",
        ),
        ({"kinds": ["holder"], "used_bytes": None, "orphaned": True}, "pid 7 (python) is not listed", "kill 7"),
        ({"state": "zombie", "orphaned": True}, "pid 7 (python) is a zombie and uses 3.0 GiB", "parent"),
        (
            {"idle_seconds": 2040.0, "unit": "web.service"},
            "pid 7 (python in unit web.service) has been idle for 34 min",
            "--pid 7",
        ),
    ],
)
def test_stuck_process_is_named_with_its_remedy(fields: dict[str, Any], what: str, remedy: str):
    (entry,) = stuck_processes([holding_with(**fields), holding_with(**fields)])
    assert entry.sentence.startswith(what)
    assert remedy in entry.remedy


def test_healthy_processes_are_not_stuck():
    well = [{}, {"state": None}, {"idle_seconds": 1799.0}, {"idle_seconds": 9999.0, "used_bytes": GIB - 1}]
    well += [{"orphaned": False}, {"idle_seconds": 9999.0, "used_bytes": None}]
    assert list(stuck_processes([holding_with(pid, **fields) for pid, fields in enumerate(well)])) == []


def test_intended_kinds_are_distinguished():
    kinds = [entry.kind for entry in stuck_processes([holding_with(1, orphaned=True), holding_with(2, state="zombie")])]
    assert [kind in USUALLY_INTENDED for kind in kinds] == [True, False]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (60, "1 min"),
        (99, "1 min 39 s"),
        (179, "2 min 59 s"),
        (599.4, "9 min 59 s"),
        (599.6, "10 min"),
        (629, "10 min"),
        (630, "11 min"),
        (1380, "23 min"),
        (3569, "59 min"),
        (3599, "1 h"),
        (7500, "2 h 5 min"),
        (86399, "1 d"),
        (273600, "3 d 4 h"),
        (273600 + 1801, "3 d 5 h"),
    ],
)
def test_duration_is_readable(seconds: float, text: str):
    assert duration_text(seconds) == text


PARTS = st.dictionaries(st.sampled_from((*SHARES, "reserved")), st.integers(0, 1 << 40))


@given(PARTS, st.integers(0, 1 << 41), st.integers(1, 300))
def test_borders_are_within_half_a_cell(parts: dict[str, int], size: int, width: int):
    cells = bar(parts, size, width)
    assert sum(count for _, count in cells) == width
    assert all(count > 0 for _, count in cells)
    whole = max(size, sum(parts.values()), 1)
    passed, drawn, counts = 0, 0, dict(cells)
    for part in (*SHARES, "reserved"):
        passed += parts.get(part, 0)
        drawn += counts.get(part, 0)
        assert abs(drawn - passed * width / whole) <= 0.5


def test_parts_are_in_the_order_of_the_shares_and_the_rest_is_free():
    assert bar({"reserved": 1, "cached": 2, "live": 4}, 10, 10) == [
        ("live", 4),
        ("cached", 2),
        ("reserved", 1),
        ("free", 3),
    ]


def test_overcount_does_not_exceed_the_bar():
    assert bar({"live": 30, "cached": 10}, 20, 8) == [("live", 6), ("cached", 2)]


def test_parts_have_distinct_marks_and_a_color():
    assert len(set(FILLS.values())) == len(FILLS) == len(set(PART_COLORS.values()))
    assert FILLS.keys() == PART_COLORS.keys() == COLORS.keys() | {"reserved", "waiting"}
    assert all(mark.isascii() and len(mark) == 1 for mark in FILLS.values())


def outline(points: list[tuple[float, float]], end: float, width: int, rows: int) -> list[str]:
    drawn = stacked_chart([(at, {"live": int(value)}) for at, value in points], 0, end, width, rows)
    return ["".join(map(block_character, row)) for row in drawn]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], ["    ", "    "]),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], ["  ▄█", "▄███"]),
        ([(0, 4), (3, 4)], ["████", "████"]),
        ([(0, 4), (0.4, 8), (1, 0), (2, 8)], ["█ ██", "█ ██"]),
        ([(0, 0), (1, 0)], ["    ", "    "]),
        ([(-5, 9), (9, 9), (1, 1)], [" ███", " ███"]),
    ],
    ids=["nothing", "rising", "as often as it was read", "highest of an interval", "zero", "outside"],
)
def test_stack_shows_the_maximum_of_each_interval_from_zero(points: list[tuple[float, float]], expected: list[str]):
    assert outline(points, 4, 4, 2) == expected


def test_gap_in_the_history_remains_a_gap():
    points = [(float(at), 1.0) for at in (*range(5), *range(15, 20))]
    assert outline(points, 20, 20, 1) == ["█████          █████"]
    assert outline(points, 30, 30, 1) == ["█████          █████          "], "the program ended"


GIB = 1 << 30


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("change", [0, GIB // 100], ids=["constant", "tiny change"])
def test_chart_has_no_gap_between_readings(rows: int, change: int):
    """The history has five readings a second, and top requests one, at times late."""
    times = [0.2 * at for at in range(100)] + [20 + at + 0.3 * (at % 3) for at in range(1, 23)]
    points = [(at, float(16 * GIB + change * (place % 2))) for place, at in enumerate(times)]
    assert outline(points, 43, 120, rows) == ["█" * 120] * rows


@pytest.mark.parametrize(("rows", "expected"), [(1, ["▁▄█"]), (2, ["  █", "▂██"]), (4, ["  █", "  █", " ██", "▄██"])])
def test_chart_of_any_height_begins_at_zero(rows: int, expected: list[str]):
    assert outline([(0.0, GIB), (1.0, 4 * GIB), (2.0, 8 * GIB)], 3, 3, rows) == expected


def test_stack_shows_the_parts_from_the_bottom_in_their_proportion():
    parts = {"live": 8, "cached": 4, "overhead": 0, "unattributed": 4}
    top, bottom = stacked_chart([(0.0, parts)], 0, 1, 1, 2)
    assert bottom == [StackCell("live", "live", 8)]
    assert top == [StackCell("cached", "unattributed", 4)]


@given(st.lists(st.dictionaries(st.sampled_from(SHARES), st.integers(0, 1 << 40), min_size=1), min_size=1, max_size=20))
def test_height_of_a_stack_is_that_of_its_sum(points: list[dict[str, int]]):
    rows = stacked_chart([(float(at), parts) for at, parts in enumerate(points)], 0, len(points), len(points), 4)
    top = max(sum(parts.values()) for parts in points) or 1
    for column, parts in enumerate(points):
        total = sum(parts.values())
        height = sum(8 if row[column].upper else row[column].eighths for row in rows if row[column].lower)
        assert height == (max(1, round(total * 32 / top)) if total else 0)
