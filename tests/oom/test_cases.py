"""Which cases are kept, the order of the ranks of a job, and programs without an agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from gpumond.facts.frame import Frame, GrowthLine, LedgerLine, Verdict
from gpumond.facts.messages import to_json
from gpumond.facts.program import (
    Call,
    LiveClasses,
    Oom,
    OomPool,
    PoolLimit,
    Program,
    ScopeDevice,
    ScopeUsage,
    StepUsage,
)
from gpumond.facts.quota import GrantedRequest
from gpumond.facts.snapshot import AgentReport, CgroupLimit, DeviceReading
from gpumond.facts.units import GIB, MIB
from gpumond.features.oom.case import OomCase, Remedy, html_document, remedy_rows, sections, terminal_text
from gpumond.features.oom.case_service import (
    MAX_CASES,
    MAX_CASES_PER_PROCESS,
    Cases,
    case_of,
    case_without_agent,
    recent_peaks,
    timeline,
)
from gpumond.features.oom.remedies import Evidence, remedies
from gpumond.tick.history import DEVICE_SIGNAL_COUNT, History
from gpumond.tick.ledger import make_ledger
from gpumond.view.text import time_text
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot
from tests.oom.seeded import APPLY, SEEDED, Plan, run

CASE = OomCase(
    id="1-10-1", at=1.0, pid=10, start_ticks=100, workload="train", device_uuid="GPU-a", gpu="0", summary="failed"
)


def cases(*pids: int) -> Cases:
    known = Cases()
    for number, pid in enumerate(pids):
        known.add(replace(CASE, id=f"{number}-{pid}-1", pid=pid))
    return known


def test_one_process_does_not_remove_the_cases_of_others():
    known = cases(11, *[10] * (MAX_CASES_PER_PROCESS + 5))
    assert [each.pid for each in known.all()] == [11, *[10] * MAX_CASES_PER_PROCESS]


def test_the_oldest_cases_are_removed_and_named():
    known = cases(*range(1, MAX_CASES + 1))
    assert known.add(replace(CASE, id="999-999-1", pid=999)) == ["0-1-1"]
    assert len(known.all()) == MAX_CASES


def test_an_alert_names_the_newest_case_on_its_device_that_has_remedies():
    known, process = Cases(), CASE.process
    half = Remedy(name="batch", text="half", size_bytes=GIB, enough=True, basis="estimate", source="")
    for id, uuid, found_remedies in (
        ("1", "GPU-a", (half,)),
        ("2", "GPU-a", (half,)),
        ("3", "GPU-a", (replace(half, name="nothing", enough=False),)),
        ("4", "GPU-b", ()),
    ):
        known.add(replace(CASE, id=id, device_uuid=uuid, remedies=found_remedies))
    found = [known.of_alert(process, uuid) for uuid in ("GPU-a", "GPU-b", "GPU-c")]
    assert [case and case.id for case in found] == ["2", "4", None]


def test_last_is_the_newest_case():
    known = cases(1, 2)
    assert known.find("last") == known.find("1-2-1")
    assert Cases().find("last") is None


def test_the_rank_that_failed_first_is_first():
    ranks = [
        replace(CASE, id=f"{pid}", pid=pid, rank=rank, job="slurm/1", at=at)
        for pid, rank, at in ((10, 0, 30.0), (11, 1, 28.5), (12, 2, 200.0))
    ]
    known = Cases([*ranks, replace(CASE, id="other", rank=0, job="slurm/2", at=29.0)])
    assert [(each.rank, each.seconds_later) for each in known.rank_errors(ranks[0])] == [(1, 0.0), (0, 1.5)]
    assert known.rank_errors(CASE) == ()


def opaque_frame(free: int) -> Frame:
    process = make_process(20, 40 * GIB, comm="python")
    device = make_device(
        used_bytes=80 * GIB - free, free_bytes=free, processes=(process, make_process(10, 39 * GIB - free))
    )
    report = make_report(10, (make_pool(live=GIB, cached=30 * GIB),), workload="notebook")
    snapshot = make_snapshot(device, reports=(report,))
    return Frame(snapshot, make_ledger(snapshot))


def test_a_program_without_an_agent_on_a_full_device_has_a_case_with_what_the_neighbors_show():
    frame = opaque_frame(GIB)
    device = frame.snapshot.devices[0]
    case = case_without_agent(device.processes_by_key[make_process(20).key], device, frame, History())
    assert case is not None
    assert "may have run out of memory. Start it with gpumond run" in case.summary
    (remedy,) = case.remedies
    assert (remedy.size_bytes, remedy.enough, remedy.basis) == (30 * GIB, None, "reported")


def test_a_program_without_an_agent_on_a_device_with_room_has_no_case():
    frame = opaque_frame(20 * GIB)
    device = frame.snapshot.devices[0]
    assert case_without_agent(device.processes_by_key[make_process(20).key], device, frame, History()) is None


def test_a_timeline_shows_everything_on_the_device():
    history = History()
    processes = tuple(make_process(pid, pid * GIB) for pid in range(1, 21))
    gone = 30  # GiB, of a program that has ended or is suspended
    device = make_device(used_bytes=(210 + gone) * GIB, size_bytes=300 * GIB, processes=processes)
    snapshot = make_snapshot(device)
    history.advance(snapshot)
    history.device_series("GPU-a").add(
        (history.now, float(device.used_bytes or 0), *[float("nan")] * (DEVICE_SIGNAL_COUNT - 1))
    )
    for process in processes:
        series = history.process_series(("GPU-a", process.key))
        assert series is not None
        series.add((history.now, float(process.used_bytes or 0), *[float("nan")] * 4))
    lines = make_ledger(snapshot).lines
    found = timeline(history, lines, "GPU-a", snapshot.taken_at + 1.0)
    assert [curve.pid for curve in found.curves] == [*range(20, 8, -1), None]
    assert found.curves[-1].used_bytes[-1] == (sum(range(1, 9)) + gone) * GIB
    assert sum(curve.used_bytes[-1] or 0 for curve in found.curves) == device.used_bytes


def test_a_timeline_ends_with_the_ledger_at_the_error():
    """The program grew after the last reading before the error, and had freed all at the next reading."""
    history = History()
    snapshot = make_snapshot(make_device(used_bytes=12 * GIB, processes=(make_process(1, 12 * GIB),)))
    history.advance(snapshot)
    key = snapshot.devices[0].processes[0].key
    series, unknown = history.process_series(("GPU-a", key)), [float("nan")] * 4
    for seconds, used in ((-3, 8), (-2, 10), (-1, 12), (0.5, 1)):
        series.add((history.now + seconds, float(used * GIB), *unknown))
        history.device_series("GPU-a").add(
            (history.now + seconds, float(used * GIB), *[float("nan")] * (DEVICE_SIGNAL_COUNT - 1))
        )
    lines = tuple(replace(line, used_bytes=14 * GIB) for line in make_ledger(snapshot).lines if line.process == key)
    found = timeline(history, lines, "GPU-a", snapshot.taken_at)
    assert [(curve.pid, curve.used_bytes[0], curve.used_bytes[-1]) for curve in found.curves] == [
        (1, 10 * GIB, 14 * GIB)
    ]


def test_the_peak_of_a_device_is_that_of_the_last_minute():
    history = History()
    unknown = [float("nan")] * (DEVICE_SIGNAL_COUNT - 1)
    snapshot = make_snapshot(make_device(), make_device("GPU-b", index=1))
    history.advance(snapshot)
    for seconds, used in ((70, 60), (30, 40), (0, 20)):
        history.device_series("GPU-a").add((history.now - seconds, float(used * GIB), *unknown))
    assert recent_peaks(Frame(snapshot, make_ledger(snapshot)), history) == {"GPU-a": 40 * GIB}


@pytest.mark.parametrize("show", [terminal_text, html_document])
def test_text_of_a_program_has_no_control_characters_and_no_markup(show):
    case = replace(CASE, workload="<script>\x1b[31m", summary="<script>\x1b[31m")
    shown = show(case, ())
    assert "\x1b" not in shown
    if show is html_document:
        assert "<script>" not in shown


def test_what_a_program_gained_after_its_last_report_is_counted_once():
    """It grew from 50 to 78 GiB within a second: the driver's count before the error was 30 GiB ahead of its report."""
    device = make_device(used_bytes=79 * GIB, free_bytes=GIB, processes=(make_process(10, 79 * GIB),))
    report = make_report(10, (make_pool(live=50 * GIB, cached=0),), workload="train")
    snapshot = make_snapshot(device, reports=(report,))
    pool = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=78 * GIB, cached_bytes=0, stranded_bytes=0)
    oom = Oom(number=1, at=snapshot.taken_at, seen="scope", device_uuid=device.uuid, request_bytes=GIB, pools=(pool,))
    evidence = Evidence(replace(oom, free_bytes=GIB // 2), report, Frame(snapshot, make_ledger(snapshot)))
    assert evidence.held_bytes + evidence.overhead_bytes == int(79.5 * GIB)


def test_the_figures_of_a_case_add_up_after_the_program_has_returned_its_cache():
    """Its last report counts 36 GiB; the allocator returned 32 of them before it failed."""
    own, other = make_process(10, 37 * GIB), make_process(11, 30 * GIB)
    device = make_device(used_bytes=67 * GIB, free_bytes=13 * GIB, processes=(own, other))
    report = make_report(10, (make_pool(live=4 * GIB, cached=32 * GIB),), workload="finetune")
    snapshot = make_snapshot(device, reports=(report,))
    pool = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=4 * GIB, cached_bytes=0, stranded_bytes=0)
    oom = Oom(number=1, at=snapshot.taken_at, seen="scope", device_uuid=device.uuid, request_bytes=60 * GIB)
    oom = replace(oom, free_bytes=45 * GIB, pools=(pool,))
    case = case_of(Evidence(oom, report, Frame(snapshot, make_ledger(snapshot))), History(1.0))
    assert {(line.pid, line.share): line.used_bytes for line in case.lines if line.used_bytes} == {
        (10, "live"): 4 * GIB,
        (10, "overhead"): GIB,
        (11, "opaque"): 30 * GIB,
    }
    assert sum(line.used_bytes for line in case.lines) + 45 * GIB == device.size_bytes
    assert "the program itself 5.0 GiB" in case.summary
    assert ["", "free", "45.0 GiB"] in [*sections(case, ())][1][2]


@pytest.mark.parametrize(("peak", "rounded"), [(8, 0), (8, 10 * MIB), (2, 0)])
def test_a_case_accounts_for_what_the_program_held_between_two_readings(peak: int, rounded: int):
    """It took 8 GiB since the reading, failed, and freed all before its record, which states the free bytes then."""
    device = replace(
        make_device(
            used_bytes=9 * GIB, free_bytes=14 * GIB, size_bytes=24 * GIB, processes=(make_process(11, 9 * GIB),)
        ),
        reserved_bytes=GIB,
    )
    snapshot = make_snapshot(device)
    own = make_report(10, (replace(make_pool(live=0, cached=0), peak_held_bytes=peak * GIB),), workload="pretrain")
    pool = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=0, cached_bytes=0, stranded_bytes=0)
    oom = Oom(number=1, at=snapshot.taken_at, seen="counter", device_uuid=device.uuid, request_bytes=8 * GIB)
    oom = replace(oom, free_bytes=6 * GIB + rounded, pools=(pool,), allocator="torch")
    case = case_of(Evidence(oom, own, Frame(snapshot, make_ledger(snapshot))), History(1.0))
    assert sum(line.used_bytes for line in case.lines) == 24 * GIB - GIB - 6 * GIB - rounded
    owner = "probably pretrain, freed since the error" if peak == 8 else "unattributed"
    title, _, rows = [*sections(case, ())][1]
    assert [owner, "unattributed", "8.0 GiB"] in rows, title
    held = "the program itself probably 8.0 GiB" if peak == 8 else "an unknown process 8.0 GiB"
    assert f"(pid 11) used 9.0 GiB, {held}. " in case.summary
    assert not [each for each in case.remedies if each.name == "unattributed"], "nobody holds it any more"


def test_a_case_subtracts_what_was_free_again_at_the_error():
    device = make_device(
        used_bytes=20 * GIB, free_bytes=4 * GIB, size_bytes=24 * GIB, processes=(make_process(11, 20 * GIB),)
    )
    snapshot = make_snapshot(device)
    pool = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=0, cached_bytes=0, stranded_bytes=0)
    oom = Oom(number=1, at=snapshot.taken_at, seen="scope", device_uuid=device.uuid, request_bytes=9 * GIB)
    oom = replace(oom, free_bytes=7 * GIB, pools=(pool,))
    case = case_of(Evidence(oom, make_report(10), Frame(snapshot, make_ledger(snapshot))), History(1.0))
    assert case.overcount_bytes == 3 * GIB
    assert [*sections(case, ())][1][2][-2:] == [["", "free", "7.0 GiB"], ["", "overcount", "-3.0 GiB"]]


def test_a_chart_ends_with_the_bytes_that_nothing_else_accounts_for():
    history = History()
    snapshot = make_snapshot(make_device(used_bytes=12 * GIB, processes=(make_process(1, 12 * GIB),)))
    history.advance(snapshot)
    series = history.process_series(("GPU-a", snapshot.devices[0].processes[0].key))
    assert series is not None
    for seconds in (-3, -2, -1, 0):
        series.add((history.now + seconds, 12.0 * GIB, *[float("nan")] * 4))
        history.device_series("GPU-a").add(
            (history.now + seconds, 12.0 * GIB, *[float("nan")] * (DEVICE_SIGNAL_COUNT - 1))
        )
    lines = (*make_ledger(snapshot).lines, LedgerLine(device_uuid="GPU-a", share="unattributed", used_bytes=8 * GIB))
    found = timeline(history, lines, "GPU-a", snapshot.taken_at)
    assert [(curve.pid, curve.used_bytes[-1]) for curve in found.curves] == [(1, 12 * GIB), (None, 8 * GIB)]


def test_an_idle_program_that_can_be_suspended_is_a_remedy():
    idle = make_process(11, 30 * GIB, idle_seconds=90.0)
    device = make_device(used_bytes=31 * GIB, free_bytes=49 * GIB, processes=(make_process(10, GIB), idle))
    holder = make_report(11, (make_pool(live=30 * GIB),), workload="embeddings", can_suspend=True)
    report = make_report(10, (make_pool(live=GIB),), workload="finetune")
    oom = Oom(number=1, at=1.0, seen="scope", device_uuid=device.uuid, request_bytes=60 * GIB, free_bytes=49 * GIB)

    def found(holder: AgentReport, device: DeviceReading = device) -> dict[str, Remedy]:
        snapshot = make_snapshot(device, reports=(report, holder))
        return {each.name: each for each in remedies(Evidence(oom, report, Frame(snapshot, make_ledger(snapshot))))}

    assert "suspension" not in found(replace(holder, can_suspend=False))
    busy = replace(device, processes=(make_process(10, GIB), replace(idle, idle_seconds=5.0)))
    assert "suspension" not in found(holder, busy)
    first = next(iter(found(holder).values()))
    text = "suspend embeddings (pid 11), idle for 1 min 30 s (gpumond suspend --pid 11)"
    assert (first.text, first.size_bytes, first.enough) == (text, 30 * GIB, True)


@pytest.mark.parametrize(
    ("retained", "live", "text"),
    [
        (3.5 * MIB, [1.5, 1.7, 2.6, 1.5, 2.7, 2.2], None),  # requests come and go
        (3.5 * MIB, [0.2, 1.7, 2.0, 2.0, 2.2, 2.2], None),  # most growth was before the trend of the last steps
        (3.5 * MIB, [], None),
        (3.0 * MIB, [0.2, 0.6, 1.0, 1.5, 1.9, 2.3], "grew by 1.9 GiB in 642 steps"),
    ],
    ids=["waves", "warm-up", "unknown", "leak"],
)
def test_growth_is_a_remedy_only_if_the_history_shows_it(retained: float, live: Sequence[float], text: str | None):
    device = make_device(used_bytes=3 * GIB, free_bytes=GIB, processes=(make_process(10, 3 * GIB),))
    report = make_report(
        10, (make_pool(live=2 * GIB),), program=Program(step=StepUsage(steps=642, retained_bytes=retained))
    )
    snapshot = make_snapshot(device, reports=(report,))
    history = History()
    history.advance(snapshot)
    series = history.process_series((device.uuid, report.key))
    assert series is not None
    for seconds, size in enumerate(live):
        series.add((history.now + seconds, 3.0 * GIB, size * GIB, *[float("nan")] * 3))
    pool = OomPool(
        allocator="torch", device_uuid=device.uuid, live_bytes=int(2.3 * GIB), cached_bytes=0, stranded_bytes=0
    )
    oom = Oom(number=1, at=1.0, seen="scope", device_uuid=device.uuid, request_bytes=2 * GIB, pools=(pool,))
    case = case_of(Evidence(oom, report, Frame(snapshot, make_ledger(snapshot))), history)
    found = next((each.text for each in case.remedies if each.name == "leak"), None)
    assert found == (text and f"find what the program retains: its live memory {text}")


def test_a_leak_is_to_be_stopped_and_frees_what_grew_since_its_onset():
    device = make_device(used_bytes=40 * GIB, free_bytes=GIB, processes=(make_process(10, 40 * GIB),))
    report = make_report(
        10, (make_pool(live=40 * GIB),), program=Program(step=StepUsage(steps=9000, retained_bytes=8 * MIB))
    )
    snapshot = make_snapshot(device, reports=(report,))
    pool = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=40 * GIB, cached_bytes=0, stranded_bytes=0)
    oom = Oom(number=1, at=1001.0, seen="scope", device_uuid=device.uuid, request_bytes=2 * GIB, pools=(pool,))
    line = GrowthLine(
        points=(),
        at=1.0,
        level_bytes=0.0,
        slope_bytes_per_second=32.0 * MIB,
        slope_low_bytes_per_second=30.0 * MIB,
        slope_high_bytes_per_second=34.0 * MIB,
        band_bytes=0.0,
        full_at=None,
        full_at_earliest=None,
        full_at_latest=None,
    )
    leak = Verdict(device_uuid=device.uuid, pid=10, start_ticks=report.start_ticks, kind="leak", since=1.0, fit=line)
    case = case_of(Evidence(oom, report, Frame(snapshot, make_ledger(snapshot)), (leak,)), History())
    found = next(each for each in case.remedies if each.name == "leak")
    assert (found.text, found.size_bytes) == ("stop the leak: each step retains 8.0 MiB", 32_000 * MIB)


def test_an_error_is_compared_with_runs_that_had_room():
    """The peak of a scope whose runs all failed contains none of their requests."""
    device = make_device(used_bytes=40 * GIB, free_bytes=40 * GIB, processes=(make_process(10, 40 * GIB),))
    pool = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=GIB, cached_bytes=0, stranded_bytes=0)
    oom = Oom(
        number=1, at=1.0, seen="scope", device_uuid=device.uuid, request_bytes=60 * GIB, scope="big", pools=(pool,)
    )

    def comparison(ooms: int) -> str:
        usage = ScopeDevice(device.uuid, retained_bytes=0, last_retained_bytes=0, peak_bytes=GIB)
        scope = ScopeUsage(name="big", entries=2, ooms=ooms, devices=(usage,))
        program = Program(step=StepUsage(steps=5), scopes=(scope,))
        report = make_report(10, (make_pool(live=GIB, peak_live_bytes=8 * GIB),), program=program)
        snapshot = make_snapshot(device, reports=(report,))
        evidence = Evidence(replace(oom, number=ooms + 1), report, Frame(snapshot, make_ledger(snapshot)))
        return next(each.text for each in remedies(evidence) if each.name == "earlier-peak").partition(": ")[2]

    assert [comparison(ooms) for ooms in (0, 1, 2)] == [
        "this run of big needed 60.0 GiB more than any of the 2 earlier ones",
        "this run of big needed 60.0 GiB more than the previous one that didn't run out of memory",
        "this step needed 53.0 GiB more than any of the 5 earlier ones that didn't run out of memory",
    ]


def test_the_ledger_of_a_case_states_its_distance_from_the_error():
    pool = OomPool(allocator="torch", device_uuid="GPU-a", live_bytes=GIB, cached_bytes=0, stranded_bytes=0)
    line = LedgerLine(device_uuid="GPU-a", share="cached", used_bytes=7 * GIB, pid=10)
    oom = Oom(number=1, at=9.0, seen="scope", pools=(pool,))
    case = replace(CASE, at=9.0, oom=oom, lines=(line,), lines_at=8.8)
    reported = replace(case, oom=replace(oom, pools=()), reported_at=8.1)
    titles = [title for each in (case, reported) for title, _, _ in sections(each, ())]
    assert titles == [
        "The program's pools at the error",
        "GPU memory 0.2 s before the error (this program: at the error)",
        "GPU memory 0.2 s before the error (the program's report: 0.9 s before the error)",
    ]
    assert time_text(9.0) in html_document(case, ())


@pytest.mark.parametrize("show", [terminal_text, html_document])
def test_snapshot_is_offered_for_the_allocator_whose_format_the_viewer_reads(show: Callable[..., str]):
    pool = OomPool(allocator="torch", device_uuid="GPU-a", live_bytes=GIB, cached_bytes=0, stranded_bytes=0)
    for allocator, offered in (("torch", True), ("sim", False)):
        oom = Oom(number=1, at=9.0, seen="scope", pools=(replace(pool, allocator=allocator),))
        assert ("memory_viz" in show(replace(CASE, oom=oom), ())) is offered


@pytest.mark.parametrize(
    ("allocator", "limit", "text"),
    [
        (
            "rmm",
            20,
            "raise the program's limit from 20.0 GiB to 24.0 GiB or more "
            "(the pool's maximum_pool_size; 4.0 GiB was missing)",
        ),
        (
            "jax",
            20,
            "raise the program's limit from 20.0 GiB to 24.0 GiB or more "
            "(XLA_CLIENT_MEM_FRACTION, formerly XLA_PYTHON_CLIENT_MEM_FRACTION; 4.0 GiB was missing)",
        ),
        (
            "jax",
            60,
            "raise JAX's default limit, 75% of the GPU, from 60.0 GiB to 64.0 GiB or more "
            "(XLA_CLIENT_MEM_FRACTION, formerly XLA_PYTHON_CLIENT_MEM_FRACTION; 4.0 GiB was missing)",
        ),
    ],
)
def test_a_limit_of_the_library_is_named_with_its_setting(allocator: str, limit: int, text: str):
    device = make_device(used_bytes=GIB, free_bytes=79 * GIB)
    snapshot = make_snapshot(device)
    oom = Oom(
        number=1,
        at=1.0,
        seen="unhandled",
        device_uuid=device.uuid,
        request_bytes=(limit + 4) * GIB,
        allocator=allocator,
        limit_bytes=limit * GIB,
    )
    case = case_of(Evidence(oom, make_report(10), Frame(snapshot, make_ledger(snapshot))), History())
    assert case.remedies[0].text == text
    assert (case.remedies[0].name, case.remedies[0].enough) == ("limit", True)


def test_no_memory_of_the_device_helps_a_program_at_its_own_limit():
    device = make_device(used_bytes=GIB, free_bytes=79 * GIB)
    snapshot = make_snapshot(device, reports=(make_report(11, (make_pool(cached=8 * GIB),)),))
    oom = Oom(number=1, at=1.0, seen="unhandled", device_uuid=device.uuid, request_bytes=GIB, limit_bytes=GIB // 2)
    frame = Frame(snapshot, make_ledger(snapshot))
    assert [each.name for each in case_of(Evidence(oom, make_report(10), frame), History()).remedies] == ["limit"]
    unlimited = Evidence(replace(oom, limit_bytes=None, free_bytes=0), make_report(10), frame)
    assert [each.name for each in case_of(unlimited, History()).remedies] == ["neighbor-cache"]


def failing(
    allocator: str,
    *,
    live: float = 8,
    cached: float = 0,
    stranded: float = 0,
    request: float = 1,
    limit: float | None = None,
    free: float = 0,
    framework: str = "",
    classes: Sequence[LiveClasses] = (),
    stack: tuple[Call, ...] = (),
) -> OomCase:
    """The case of a program at an error; sizes are in GiB."""
    shares = {"live_bytes": live, "cached_bytes": cached, "stranded_bytes": stranded}
    sizes = {name: int(size * GIB) for name, size in shares.items()}
    held = sum(sizes.values())
    own = make_process(10, held)
    device = make_device(used_bytes=held, free_bytes=int(free * GIB), processes=(own,))
    report = make_report(10, (), workload="train", frameworks=(framework or f"{allocator} 99.0",))
    snapshot = make_snapshot(device, reports=(report,))
    oom = Oom(
        number=1,
        at=1.0,
        seen="scope",
        device_uuid=device.uuid,
        request_bytes=int(request * GIB),
        pools=(OomPool(allocator=allocator, device_uuid=device.uuid, **sizes),),
        allocator=allocator,
        free_bytes=int(free * GIB),
        limit_bytes=None if limit is None else int(limit * GIB),
        classes=tuple(classes),
        stack=stack,
    )
    return case_of(Evidence(oom, report, Frame(snapshot, make_ledger(snapshot))), History())


def remedy(case: OomCase, name: str) -> Remedy | None:
    return next((each for each in case.remedies if each.name == name), None)


@pytest.mark.parametrize("limit", [None, 12.5])
@pytest.mark.parametrize(
    ("framework", "change"),
    [
        ("torch 2.13.0", "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("torch 2.10.0+cu126", "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("torch 2.13.0+rocm6.4", "set PYTORCH_ALLOC_CONF=max_split_size_mb:512"),
        ("jax 0.10.2", "set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async"),
        ("tensorflow 2.21.0", "set TF_GPU_ALLOCATOR=cuda_malloc_async"),
        ("rmm 26.10.0", "use rmm.mr.CudaAsyncMemoryResource instead of a pool"),
        ("cupy 14.2.0", "allocate from cupy.cuda.MemoryAsyncPool"),
    ],
)
def test_memory_in_pieces_is_avoided_by_what_the_allocator_accepts(framework: str, change: str, limit: float | None):
    case = failing(framework.partition(" ")[0], framework=framework, stranded=4, limit=limit, free=40 if limit else 0.5)
    found = remedy(case, "fragmentation")
    assert found is not None
    assert (found.text, found.size_bytes, found.enough) == (
        f"{change} (4.0 GiB is free in the program's pool)",
        4 * GIB,
        True,
    )


def test_expandable_segments_are_no_remedy_where_pytorch_had_released_its_cache():
    assert remedy(failing("torch", cached=4), "fragmentation") is None


@pytest.mark.parametrize(
    ("framework", "shown"), [("torch 2.13.0", True), ("cupy 14.2.0", True), ("cupy 13.6.0", False)]
)
def test_a_case_says_why_cached_bytes_were_of_no_use(framework: str, shown: bool):
    allocator = framework.partition(" ")[0]
    case = failing(allocator, framework=framework, cached=2, limit=10, free=60)
    text = (
        "had released its cache before it failed: the 2.0 GiB still cached can't be released, or has been freed since. "
    )
    assert (f" {allocator} {text}One change" in case.summary) is shown
    flush = remedy(case, "own-cache")
    text = "flush the program's own cupy cache before the call: gpumond.agent.flush()"
    assert (flush and (flush.text, flush.size_bytes, flush.enough)) == (None if shown else (text, 2 * GIB, True))


def plan(cause: str, number: int = 0) -> Plan:
    return [each for each in SEEDED if each.cause == cause][number]


def names(case: OomCase | None) -> list[str]:
    assert case is not None
    return [each.name for each in case.remedies]


@pytest.mark.parametrize("number", [0, 1])
def test_a_leak_is_neither_a_data_set_nor_a_long_input(number: int):
    found = names(run(plan("leak", number)))
    assert found[0] == "leak"
    assert not {"data-set", "earlier-peak"} & set(found)


def test_the_kv_cache_of_a_serving_engine_does_not_depend_on_the_batch():
    serving = plan("kv-cache")
    assert names(run(serving)) == ["kv-cache"]
    case = run(replace(serving, kv_used=None))
    assert names(case) == ["nothing"], "nobody knows what is unused"


def test_several_caches_are_flushed_with_one_command():
    case = run(replace(plan("neighbor-cache", 1), batch=448))
    assert case is not None
    found = remedy(case, "neighbor-cache")
    assert found is not None
    names = "flush notebook (pid 21), notebook (pid 20) with gpumond flush --device 0; "
    assert found.text.startswith(names)


def test_the_owners_in_a_summary_begin_a_sentence():
    for cause, owner in (
        ("batch", "The program itself used 79.5 GiB"),
        ("unattributed", "An unknown process used 50.0"),
    ):
        case = run(plan(cause))
        assert case is not None
        assert f" free. {owner}" in case.summary


def test_a_request_that_exceeds_the_limit_of_a_cgroup_has_no_room_on_the_device():
    limit = CgroupLimit(cgroup="/pods/a", pids=(10, 12), limit_bytes=20 * GIB, used_bytes=18 * GIB)
    device = make_device(used_bytes=30 * GIB, free_bytes=50 * GIB, processes=(make_process(10, 12 * GIB),))
    report = make_report(10, (make_pool(live=11 * GIB, cached=0),), workload="train")
    cached = make_report(11, (make_pool(cached=8 * GIB),))
    pool = OomPool(
        allocator="torch", device_uuid=device.uuid, live_bytes=12 * GIB, cached_bytes=0, stranded_bytes=0
    )  # a GiB more than in the report

    def case(limit: CgroupLimit, request: int) -> OomCase:
        snapshot = make_snapshot(replace(device, cgroup_limits=(limit,)), reports=(report, cached))
        oom = Oom(number=1, at=1.0, seen="scope", device_uuid=device.uuid, request_bytes=request * GIB, pools=(pool,))
        return case_of(Evidence(oom, report, Frame(snapshot, make_ledger(snapshot))), History())

    found = case(limit, 4)
    assert [(each.name, each.size_bytes, each.enough) for each in found.remedies] == [("limit", 3 * GIB, True)]
    text = "raise the limit of the cgroup /pods/a, which used 19.0 GiB, from 20.0 GiB to 23.0 GiB or more"
    assert (found.remedies[0].text, found.missing_bytes) == (text, 3 * GIB)
    for other in (replace(limit, pids=(11,)), replace(limit, limit_bytes=None), replace(limit, limit_bytes=40 * GIB)):
        assert names(case(other, 4)) == ["neighbor-cache", "unattributed", "repeat"]


def test_few_cached_bytes_need_no_explanation():
    assert "cache" not in failing("torch", cached=0.5, limit=8.5, free=60).summary


def test_an_arena_serves_a_request_from_its_free_memory_before_its_limit_lacks_anything():
    """It has preallocated 60 GiB, of which 30 are in use."""
    case = failing("jax", live=30, stranded=30, request=40, limit=60, free=44)
    assert case.missing_bytes == 10 * GIB
    assert case.remedies[0].text.startswith("raise JAX's default limit, 75% of the GPU, from 60.0 GiB to 70.0 GiB")


def test_a_smaller_batch_shrinks_the_request_too():
    known = LiveClasses(
        allocator="torch",
        device_uuid="GPU-a",
        live_bytes=8 * GIB,
        parameters_bytes=2 * GIB,
        gradients_bytes=0,
        optimizer_bytes=0,
        buffers_bytes=0,
        tensors_bytes=6 * GIB,
        activations_bytes=0,
    )
    found = remedy(failing("torch", request=2, classes=[known]), "batch")
    assert found is not None
    text = (
        "use half the batch: 6.0 GiB of other leaf tensors and activations, and this request of 2.0 GiB, depend on it"
    )
    assert (found.text, found.size_bytes, found.enough) == (text, 4 * GIB, True)
    assert found.source == "live bytes and request in proportion to the batch"
    training = replace(known, gradients_bytes=GIB, tensors_bytes=0, activations_bytes=5 * GIB)
    found = remedy(failing("torch", classes=[training], stack=(Call("/env/torch/optim/adam.py", 31, "step"),)), "batch")
    assert found is not None
    assert found.text == "use half the batch, with gradient accumulation: 5.0 GiB of activations depend on it"
    assert (found.size_bytes, found.source) == (int(2.5 * GIB), "live bytes in proportion to the batch")


def limited(number: int, request: int = GIB // 8, history: History | None = None) -> OomCase:
    """The case of a program whose limit by hand is less than it used, and which freed all before its report."""
    device = make_device(used_bytes=10 * GIB, free_bytes=60 * GIB)
    pool = make_pool(live=3 * GIB, cached=GIB, allocator="torch")
    pool = replace(pool, peak_live_bytes=3 * GIB, peak_held_bytes=4 * GIB)
    own = make_report(10, (pool,), workload="etl", limits=(PoolLimit("torch", device.uuid, 2 * GIB),))
    snapshot = make_snapshot(device, reports=(own, make_report(11, (make_pool(cached=8 * GIB),))))
    freed = OomPool(allocator="torch", device_uuid=device.uuid, live_bytes=0, cached_bytes=0, stranded_bytes=0)
    oom = Oom(
        number=number,
        at=float(number),
        seen="counter",
        device_uuid=device.uuid,
        request_bytes=request,
        pools=(freed,),
        allocator="torch",
    )
    return case_of(Evidence(oom, own, Frame(snapshot, make_ledger(snapshot))), history or History())


def test_the_chart_of_a_case_at_a_limit_shows_the_program_against_it():
    history = History()
    device = make_device()
    history.advance(make_snapshot(device))
    key = make_report(10).key
    series = history.process_series((device.uuid, key))
    assert series is not None
    for held in (1, 2, 3):
        series.add((history.now + held - 3, 9.0 * GIB, 0.5 * GIB, held * GIB, 0.0, float("nan")))
    case = limited(int(history.to_unix(history.now)), history=history)
    (curve,) = case.timeline.curves
    assert (curve.pid, curve.used_bytes[0], curve.used_bytes[-1]) == (10, 2 * GIB, 3 * GIB)
    shown = html_document(case, ())
    assert "The program&#x27;s memory in the ten minutes before the error, and its limit of 2.0 GiB" in shown
    assert '<line class="top"' in shown
    assert "The GPU in the ten minutes before" not in shown


def test_the_cause_of_an_error_at_a_limit_is_the_limit():
    case = limited(1)
    assert case.summary == (
        "etl (pid 10) reached its limit of 2.0 GiB: it held at most 3.0 GiB and requested 128.0 MiB on "
        "GPU 0. One change would have been enough: raise the program's limit from 2.0 GiB to 3.2 GiB or more "
        "(gpumond limit --pid 10 SIZE; at most 1.1 GiB was missing)"
    )
    assert [(each.name, each.enough) for each in case.remedies] == [("limit", True)]
    assert (case.missing_bytes, case.limit_bytes) == (GIB + GIB // 8, 2 * GIB)


def test_a_limit_that_lacks_little_is_raised_by_a_useful_step():
    device = make_device(used_bytes=GIB, free_bytes=79 * GIB)
    snapshot, limit = make_snapshot(device), 20 * GIB
    oom = Oom(number=1, at=1.0, seen="unhandled", device_uuid=device.uuid, request_bytes=limit + 1, allocator="rmm")
    oom = replace(oom, limit_bytes=limit)
    case = case_of(Evidence(oom, make_report(10), Frame(snapshot, make_ledger(snapshot))), History())
    assert case.missing_bytes == 1
    assert "from 20.0 GiB to 21.0 GiB or more (" in case.remedies[0].text
    assert "1 B was missing)" in case.remedies[0].text


def test_repeated_errors_whose_shortage_is_within_the_least_step_state_the_largest():
    """The remedy is then the same for each."""
    device = make_device(used_bytes=GIB, free_bytes=79 * GIB)
    frame = Frame(snapshot := make_snapshot(device), make_ledger(snapshot))
    known = Cases()
    for number, short in enumerate((8, 40, 36), start=1):
        oom = Oom(number=number, at=float(number), seen="retry", device_uuid=device.uuid, allocator="rmm")
        oom = replace(oom, limit_bytes=20 * GIB, request_bytes=20 * GIB + short * MIB)
        known.add(known.merged_with_earlier(case_of(Evidence(oom, make_report(10), frame), History())))
    (case,) = known.all()
    assert case.missing_bytes == 40 * MIB
    assert "40.0 MiB was missing" in case.summary
    assert "40.0 MiB was missing" in case.remedies[0].text


@pytest.mark.parametrize(("retries", "errors", "says"), [(3, 3, True), (2, 3, False), (0, 1, False)])
def test_a_case_says_that_the_program_tried_again(retries: int, errors: int, says: bool):
    device = make_device(used_bytes=GIB, free_bytes=79 * GIB)
    oom = Oom(number=errors, at=1.0, seen="retry", device_uuid=device.uuid, allocator="rmm", limit_bytes=20 * GIB)
    oom = replace(oom, request_bytes=21 * GIB)
    own = make_report(10, program=Program(ooms=(oom,), oom_retries=retries))
    case = case_of(Evidence(oom, own, Frame(snapshot := make_snapshot(device), make_ledger(snapshot))), History())
    assert (" The program tried again (retry_on_oom). One change" in case.summary) is says


def test_repeated_errors_at_one_limit_are_one_case_with_the_largest_remedy():
    known = cases(11)
    for case in (limited(1), limited(2, 2 * GIB), replace(CASE, id="2-12-1", pid=12), limited(3)):
        assert known.add(known.merged_with_earlier(case)) == []
    assert [(each.id, each.errors) for each in known.all()] == [("0-11-1", 1), ("2-12-1", 1), ("1-10-1", 3)]
    assert known.newest_error_numbers() == {limited(3).process: 3}
    newest = known.all()[-1]
    assert (newest.at, newest.request_bytes, newest.remedies[0].size_bytes) == (3.0, GIB // 8, 3 * GIB)
    assert "to 5.0 GiB or more (gpumond limit --pid 10 SIZE; at most 3.0 GiB was missing)" in newest.summary
    assert newest.missing_bytes == 3 * GIB
    small = replace(newest.remedies[0], name="batch", text="use half the batch", size_bytes=2 * GIB)
    again = known.merged_with_earlier(replace(limited(4), remedies=(limited(4).remedies[0], small)))
    assert [each.enough for each in again.remedies] == [True, False], "3.0 GiB was missing once"
    assert ", the last of 3 errors at this limit; up to 3.0 GiB was missing\n" in terminal_text(newest, ())
    assert known.merged_with_earlier(limited(9)).errors == 9, "also those without a record in a report"


NAMES = [f"{number}-{plan.cause}" for number, plan in enumerate(SEEDED)]


@pytest.mark.parametrize("plan", SEEDED, ids=NAMES)
def test_the_first_remedy_removes_the_cause(plan: Plan):
    case = run(plan)
    assert case is not None
    first = case.remedies[0]
    assert first.name == plan.cause, [(each.name, each.enough, each.size_bytes) for each in case.remedies]
    if first.name != "nothing":
        assert run(APPLY[first.name](plan, case)) is None


def test_a_model_that_is_too_large_has_no_remedy():
    (plan,) = (plan for plan in SEEDED if plan.cause == "nothing")
    case = run(plan)
    assert case is not None
    assert case.summary.endswith("No remedy is enough: the program needs 31.5 GiB more than this GPU has")


@pytest.mark.parametrize("plan", SEEDED, ids=NAMES)
def test_a_case_states_the_request_and_its_size_is_limited(plan: Plan):
    case = run(plan)
    assert case is not None
    assert 0 < (case.missing_bytes or 0) <= 112 * GIB
    assert len(to_json(case)) < 1 << 20


def shared(
    *grants: GrantedRequest,
    request: float = 7.68,
    free: float = 6.04,
    other: float = 0.0,
    scope: str = "",
    verdicts: Sequence[Verdict] = (),
    peak: float | None = None,
) -> OomCase:
    """A case of train (pid 10), beside lab (pid 11) on GPU 0; GPU 1 has ``other`` GiB free, and used ``peak`` GiB."""
    lab = make_process(11, int((78 - free) * GIB))
    device = make_device(
        used_bytes=int((80 - free) * GIB), free_bytes=int(free * GIB), processes=(make_process(10, 2 * GIB), lab)
    )
    second = make_device(
        "GPU-b", index=1, used_bytes=int((80 - other) * GIB), free_bytes=int(other * GIB), processes=()
    )
    report = make_report(10, (make_pool(live=GIB, cached=0),), workload="train")
    snapshot = make_snapshot(device, second, reports=(report, make_report(11, (), workload="lab")))
    oom = Oom(number=1, at=1.0, seen="scope", device_uuid=device.uuid, request_bytes=int(request * GIB), scope=scope)
    frame = Frame(snapshot, make_ledger(snapshot), grants=grants)
    peaks = {} if peak is None else {second.uuid: int(peak * GIB)}
    oom = replace(oom, free_bytes=int(free * GIB))
    return case_of(Evidence(oom, report, frame, verdicts, peaks), History())


def granted(pid: int, need: int, uuid: str, unused: int) -> GrantedRequest:
    return GrantedRequest(
        id=str(pid),
        device_uuid=uuid,
        need_bytes=need * GIB,
        unused_bytes=unused * GIB,
        user="root",
        workload="",
        pid=pid,
    )


def test_the_missing_bytes_are_the_same_in_all_texts():
    """7.68 - 6.04 is 1.64, not the 1.7 that 7.7 and 6.0 would leave: two digits are shown."""
    case = shared()
    assert "requested 7.68 GiB on GPU 0, which had 6.04 GiB free" in case.summary
    assert case.summary.endswith("No remedy is known: 1.6 GiB is missing")
    assert [row[1] for row in remedy_rows(case)] == ["-"], "a shortage isn't a gain"


def test_another_device_is_a_remedy_only_for_all_that_the_program_was_granted_and_others_are_not():
    def first(*grants: GrantedRequest) -> str:
        return shared(*grants, other=12.0).remedies[0].text

    assert first() == "run this program, which needs at least 8.7 GiB, on GPU 1, which has 12.0 GiB available"
    assert "on GPU 1" not in first(granted(12, 10, "GPU-b", unused=4)), "8 GiB is left of it"
    found = first(granted(10, 16, "GPU-a", unused=14))
    assert found == (
        "also start lab (pid 11) with gpumond run --need, or reduce its memory use: it uses 72.0 GiB without a grant, "
        "and this program was granted 16.0 GiB"
    )


def test_another_device_is_no_remedy_if_it_was_fuller_a_moment_ago_or_a_program_leaks_there():
    assert shared(other=12.0, peak=71.0).remedies[0].text.endswith("on GPU 1, which has 9.0 GiB available")
    leak = Verdict(device_uuid="GPU-b", pid=12, start_ticks=1, kind="leak", since=1.0)
    for case in (shared(other=12.0, peak=72.0), shared(other=12.0, verdicts=[leak])):
        assert [each.name for each in case.remedies] == ["nothing"]
    assert shared(other=12.0, verdicts=[replace(leak, device_uuid="GPU-a")]).remedies[0].name == "other-device"


def test_a_smaller_request_is_the_last_resort_in_a_scope():
    case = shared(scope="batch-32")
    (only,) = case.remedies
    assert (only.name, only.enough, only.size_bytes) == ("smaller-request", True, case.missing_bytes)
    assert [row[:2] for row in remedy_rows(case)] == [["yes", "1.6 GiB"]]
    assert case.summary.endswith(
        "One change would have been enough: request about 1.6 GiB less in the scope batch-32 (a smaller batch, or "
        "torch.no_grad() in an evaluation)"
    )
    assert [each.name for each in shared(scope="batch-32", free=0.0).remedies] == ["nothing"], "no request has room"
    assert shared(scope="batch-32", other=12.0).remedies[0].name == "other-device"
