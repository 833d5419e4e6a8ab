"""The screen and its keys in a terminal, over a fake daemon."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.frame import FaultWithRemedy, Verdict
from gpumond.facts.program import ProcessKey
from gpumond.host.machine import read_start_ticks
from gpumond.serve.examples import RECEIPT
from gpumond.top.processes import AncestorCache, send_signal, signal_refusal
from gpumond.view.frame import frame_view
from gpumond.view.rows import ProcessRow
from tests.helpers.agents import GIB
from tests.helpers.frames import FakeDaemon, busy_frame, fake_daemon, make_frame, share_history
from tests.helpers.running import until
from tests.helpers.screens import TOP, Session, terminal, top
from tests.helpers.stubs import receipt
from tests.helpers.values import make_device, make_process

pytestmark = pytest.mark.slow

PROMISE = {"low": 12 * GIB, "likely": 12 * GIB, "high": 12 * GIB}
PLANNED = receipt("planned", pid=10, allocator="torch", expected=PROMISE, released_bytes=0, duration_seconds=0.5)
PLAN = {"id": "1", "receipts": [PLANNED], "released_bytes": 0}
FREED = PLANNED | {"outcome": "freed", "released_bytes": 12 * GIB, "driver_released_bytes": 11 * GIB}
RECEIPTS = {"id": "2", "receipts": [FREED], "released_bytes": 12 * GIB}


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    with fake_daemon(busy_frame()) as daemon:
        yield daemon


def programs(screen: str) -> list[str]:
    """Return the programs of the table in their order."""
    head = next(at for at, line in enumerate(screen.splitlines()) if "PROGRAM" in line)
    rows = (line.split() for line in screen.splitlines()[head + 1 :])
    return [word for row in rows for word in row[1:4] if word in ("train", "python", "new") and "GiB" in row]


def requested(fake: FakeDaemon) -> list[tuple[Any, bool]]:
    """Return target and ``dry_run`` of each request for a flush."""
    return [(body["target"], body["dry_run"]) for path, body in [*fake.requests] if path == "/api/v1/flushes"]


def test_screen_of_80_by_24_shows_ledger_processes_and_keys(fake: FakeDaemon):
    with top(fake.url) as session:
        screen = session.shows("train", "python", "Quit", "pid 10")
        assert "H100  50.0 GiB of 80.0 GiB  62%" in screen
        for part in ("# live 20.0 GiB", "+ cached 12.0 GiB", "x stranded 6.0 GiB", "= overhead 2.0 GiB"):
            assert part in screen
        assert "? opaque 10.0 GiB" in screen
        assert "#" * 20 + "+" * 12 + "x" * 6 + "=" * 2 + "?" * 10 + "." * 30 in screen
        assert "a flush of all programs would release about 12.0 GiB" in screen
        for key in ("Help", "Filter", "Sort", "Group", "Events", "Flush", "Suspend", "Alerts", "Quit"):
            assert key in session.screen.lines()[-1]


def test_screen_of_40_by_20_keeps_what_matters(fake: FakeDaemon):
    summary = "train (pid 10) leaks on GPU 0"
    leak = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=5.0, summary=summary)
    fake.show(busy_frame(verdicts=(leak,)))
    with top(fake.url, size=(40, 20)) as session:
        screen = session.shows("train", "python", "Quit", "50.0 GiB of 80.0 GiB  62%", "PROGRAM", "USED↓", "VERDICT")
        assert "would release about 12.0 GiB" in screen
        assert "train (pid 10) on GPU 0 leaks" in screen
        assert session.screen.lines()[0].endswith("13:46:40 UTC")
        assert next(line for line in screen.splitlines() if "train" in line).split() == [
            "0",
            "train",
            "40.0",
            "GiB",
            "leak",
        ]


def test_keys_sort_and_reverse(fake: FakeDaemon):
    with top(fake.url) as session:
        assert programs(session.shows("USED↓", "train"))[:2] == ["train", "python"]
        session.press("r")
        assert programs(session.shows("USED↑"))[:2] == ["python", "train"]
        session.press("s")
        assert programs(session.shows("WASTE↓"))[:2] == ["train", "python"]
        session.press("<")
        session.shows("USED↓")


def test_click_on_a_column_sorts_by_it_and_another_reverses(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("USED↓", "train")
        lines = session.screen.lines()
        row = next(at for at, line in enumerate(lines) if "USED↓" in line)
        session.click(lines[row].index("PROGRAM"), row)
        assert programs(session.shows("PROGRAM↓"))[:2] == ["python", "train"]
        session.click(lines[row].index("PROGRAM"), row)
        assert programs(session.shows("PROGRAM↑"))[:2] == ["train", "python"]
        session.click(8, row + 2)
        session.press(" ")
        session.until(lambda screen: screen.splitlines()[row + 2].startswith("*"))


def test_filter_hides_other_rows_until_escape(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        session.press("/")
        session.shows("words that all match")
        session.press("researchx", "backspace", "enter")
        session.shows("filter: research  Esc removes it", "python", without="train")
        session.press("escape")
        session.shows("python", "train", without="filter:")


def test_help_lists_the_keys_and_closes(fake: FakeDaemon):
    with top(fake.url, size=(100, 60)) as session:
        session.shows("train")
        for key in ("?", "h", "f1"):
            session.press(key)
            session.shows("group by the next property", "processes as a tree", "flush the marked", "stranded")
            session.press("escape")
            session.shows("train", without="processes as a tree")


def test_chosen_columns_are_kept_for_the_next_start(fake: FakeDaemon, tmp_path: Path):
    with top(fake.url, size=(110, 30), XDG_STATE_HOME=str(tmp_path)) as session:
        session.shows("STRANDED", "VERDICT")
        session.press("c")
        session.shows("[x] stranded", "[ ] command", "Show or hide")
        session.press(*(["down"] * 3), " ")
        session.shows("[ ] user")
        session.press(*(["down"] * 6), " ")
        session.shows("[ ] stranded")
        session.press("escape")
        session.shows("LIVE", without="STRANDED")
    with top(fake.url, size=(110, 30), XDG_STATE_HOME=str(tmp_path)) as session:
        session.shows("LIVE", without="USER")
        session.press("c", "d", "escape")
        session.shows("STRANDED", "USER")


def test_columns_of_the_command_line_precede_the_kept_ones(fake: FakeDaemon, tmp_path: Path):
    (tmp_path / "gpumond").mkdir()
    (tmp_path / "gpumond" / "top-columns").write_text("gpu,user")
    with terminal(
        [*TOP, "--url", fake.url, "--columns", "pid,shares"], NO_COLOR="1", XDG_STATE_HOME=str(tmp_path)
    ) as session:
        screen = session.shows("SHARES", "train", without="USER")
        (row,) = [line for line in screen.splitlines() if " train " in line and "#" in line]
        assert "#" * 6 + "+" * 4 + "x" * 1 in row, "the largest process has a bar of full length"


def test_columns_beyond_a_small_screen_are_scrolled_to(fake: FakeDaemon):
    with top(fake.url, size=(60, 12)) as session:
        session.shows("train")
        session.press("c")
        session.shows("] gpu", without="command")
        session.press(*(["down"] * 20))
        session.shows("] command", without="] gpu")


def test_unknown_column_is_wrong_use():
    with terminal([*TOP, "--columns", "used,colour"]) as session:
        assert session.ends() == 2
        assert "unknown column 'colour'" in session.screen.text()


def test_cursor_stays_with_its_process_while_rows_move(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("python")
        session.press("down")
        session.shows("python (pid 11)")
        processes = (
            make_process(11, 39 * GIB, comm="python"),
            make_process(12, 40 * GIB, comm="new"),
            make_process(13, 41 * GIB),
        )
        fake.show(make_frame(make_device(used_bytes=80 * GIB, processes=processes), seq=2))
        session.shows("new", "python (pid 11)", without="train")
        session.press("d")
        session.shows("python (pid 11) on GPU 0", "39.0 GiB")


def test_details_show_all_values_and_follow_the_frames(fake: FakeDaemon):
    verdict = Verdict(
        device_uuid="GPU-a",
        pid=10,
        start_ticks=100,
        kind="leak",
        since=5.0,
        summary="train is leaking 1.0 GiB/min",
    )
    fake.show(busy_frame(verdicts=(verdict,)))
    points = [(999_700.0 + at, at * GIB) for at in range(1, 41)]
    fake.answers["/api/v1/history/shares"] = (200, share_history(points))
    with top(fake.url, size=(80, 30)) as session:
        session.shows("train (pid 10) used in the last 4 min 59 s: 1.0 GiB to 40.0 GiB")
        session.press("enter")
        session.shows("train is leaking 1.0 GiB/min", "frameworks torch 2.13.0", "flush allowed")
        fake.show(make_frame(make_device(), seq=2))
        session.shows("pid 10 no longer uses a GPU")
        session.press("escape")
        session.shows("no process uses a GPU")


def test_flush_shows_the_plan_asks_for_confirmation_and_shows_the_receipt(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        session.press("f")
        session.shows("train (pid 10): flush plan", "WOULD RELEASE", "train torch", "Flush 12.0 GiB? y: yes")
        assert requested(fake) == [({"pid": 10, "start_ticks": 100}, True)]
        fake.answers["/api/v1/flushes"] = None
        session.press("y")
        session.shows("flushing", "WOULD RELEASE", without="released")
        session.press("escape")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        session.press("f")
        session.shows("Flush 12.0 GiB? y: yes")
        freed = FREED | {"planned": dict.fromkeys(PROMISE, 24 * GIB)}
        fake.answers["/api/v1/flushes"] = (200, RECEIPTS | {"receipts": [freed]})
        session.press("y")
        screen = session.shows(
            "receipts", "freed", "released 12.0 GiB", "memory changed between the plan and the flush"
        )
        head, row = (next(line for line in screen.splitlines() if word in line) for word in ("DRIVER", "train torch"))
        assert head.split() == ["PID", "PROGRAM", "PLANNED", "EXPECTED", "RELEASED", "DRIVER", "TOOK", "OUTCOME"]
        assert "24.0 GiB  12.0 GiB  12.0 GiB  11.0 GiB  0.50 s  freed" in row
        session.press("y", "escape")
        session.shows("train", without="released 12.0 GiB")
        process = {"pid": 10, "start_ticks": 100}
        assert requested(fake) == [(process, True), (process, False)] * 2
        assert [body.get("plan") for path, body in fake.requests if path == "/api/v1/flushes"] == [None, "1"] * 2


def test_flush_of_marked_processes_has_one_plan(fake: FakeDaemon):
    fake.answers["/api/v1/flushes"] = (200, PLAN)
    with top(fake.url) as session:
        session.shows("train", "python")
        session.press(" ", " ", "f")
        session.shows("2 processes: flush plan", "Flush 24.0 GiB? y: yes")
        assert [target["pid"] for target, _ in requested(fake)] == [10, 11]
        fake.answers["/api/v1/flushes"] = (200, RECEIPTS)
        session.press("y")
        session.shows("2 processes: receipts", "released 24.0 GiB")
        session.press("escape")
        session.until(lambda screen: sum(line.startswith("*") for line in screen.splitlines()) == 2)
        session.press("U")
        session.until(lambda screen: not any(line.startswith("*") for line in screen.splitlines()))


@pytest.mark.parametrize("key", ["escape", "n", "q"])
def test_flush_requires_a_confirmation(fake: FakeDaemon, key: str):
    with top(fake.url) as session:
        session.shows("train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        session.press("F")
        session.shows("every program with an agent", "y: yes")
        session.press(key)
        session.shows("train", without="y: yes")
        session.press("y", "?")
        session.shows("next and previous row")
        assert requested(fake) == [({"all": True}, True)]


def test_flush_without_releasable_memory_is_not_offered(fake: FakeDaemon):
    none = PLANNED | {"expected": {"low": 0, "likely": 0, "high": 0}}
    fake.answers["/api/v1/flushes"] = (200, {"id": "1", "receipts": [none], "released_bytes": 0})
    with top(fake.url) as session:
        session.shows("train")
        session.press("0", "F")
        session.shows("every program on GPU 0", "Nothing to release.")
        session.press("y", "escape")
        session.shows("train", without="Nothing")
        assert requested(fake) == [({"device": "GPU-a"}, True)]


@pytest.mark.parametrize(
    ("status", "text_shown"),
    [(404, "no agent matches"), (401, "GPUMOND_TOKEN"), (409, "already in progress"), (429, "flushed a moment ago")],
)
def test_refusal_is_shown(fake: FakeDaemon, status: int, text_shown: str):
    detail = "this requires a token" if status == 401 else text_shown
    fake.answers["/api/v1/flushes"] = (status, {"detail": detail})
    with top(fake.url) as session:
        session.shows("train")
        session.press("f")
        session.shows("not flushed", text_shown, without="Nothing to release.")


def test_timed_out_programs_do_not_hide_receipts_of_others(fake: FakeDaemon):
    late = FREED | {"pid": 11, "workload": "late", "outcome": "timeout", "released_bytes": 0, "reason": "no answer"}
    problem = RECEIPTS | {"detail": "no response in time from pid 11", "receipts": [FREED, late]}
    with top(fake.url) as session:
        session.shows("train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        session.press("F")
        session.shows("y: yes")
        fake.answers["/api/v1/flushes"] = (504, problem)
        session.press("y")
        session.shows("freed", "late torch", "timeout", "pid 11: no answer", "released 12.0 GiB")


def test_result_of_a_flush_is_shown_after_its_panel_is_closed(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        fake.answers["/api/v1/flushes"] = (200, PLAN)
        session.press("F")
        session.shows("y: yes")
        fake.answers["/api/v1/flushes"] = None
        session.press("y")
        session.shows("flushing")
        session.press("escape")
        session.shows("USED↓")
        fake.over.set()
        session.shows("every program with an agent: not flushed")


def test_last_values_stay_dimmed_while_the_daemon_is_gone(fake: FakeDaemon):
    frame = fake.answers["/api/v1/frame"]
    with top(fake.url) as session:
        session.shows("50.0 GiB of 80.0 GiB")
        fake.answers["/api/v1/frame"] = (500, {"detail": "it broke"})
        session.shows("NO RESPONSE SINCE", "it broke. These are the last values.", "50.0 GiB of 80.0 GiB")
        session.until(lambda _: "\x1b[2m  50.0 GiB of 80.0 GiB" in session.written, "dimmed values")
        assert "train" in session.shows("NO RESPONSE SINCE", "it broke", "50.0 GiB of 80.0 GiB")
        fake.answers["/api/v1/frame"] = frame
        session.shows("50.0 GiB of 80.0 GiB", "train", without="NO RESPONSE")


def test_hanging_daemon_blocks_neither_keys_nor_exit(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        fake.answers["/api/v1/frame"] = None
        session.shows("NO RESPONSE SINCE", "no response for")
        session.press("a")
        session.shows("Retrying every second.")
        session.press("escape", "q")
        assert session.ends() == 0
    assert not fake.over.is_set()


def test_frame_without_a_successor_is_stale(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train", without="NO NEW FRAME")
        session.shows("NO UPDATE FOR", "the daemon responds, but has stopped taking readings")


def test_pause_keeps_the_values(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        session.press("p")
        session.shows("PAUSED", "train")
        fake.show(make_frame(make_device(used_bytes=GIB, processes=(make_process(12, GIB, comm="new"),)), seq=2))
        session.press("s", "?")
        session.shows("next and previous row", "PAUSED")
        session.press("?")
        session.shows("train", without="new")
        session.press("p")
        session.shows("new", without="PAUSED")


@pytest.mark.parametrize(
    ("status", "answer", "text_shown"),
    [
        (503, {"detail": "the first reading is in progress; retry in a second"}, "STARTING"),
        (200, {"status": "ok"}, "the server isn't gpumond"),
        (200, [1, 2], "the server isn't gpumond"),
        (200, make_frame(), "no GPU found"),
        (200, busy_frame(reports=()), "no program runs the agent"),
    ],
    ids=["starting", "another service", "a list", "no GPU", "no agent"],
)
def test_problems_are_shown(fake: FakeDaemon, status: int, answer: Any, text_shown: str):
    fake.answers["/api/v1/frame"] = (status, answer)
    with top(fake.url) as session:
        session.shows(text_shown)


def test_notices_of_one_kind_are_one_line(fake: FakeDaemon):
    faults = tuple(
        FaultWithRemedy("nvml", "gpu_is_lost", f"GPU-{at}", f"fell off bus {at}", "reset it") for at in range(9)
    )
    fake.show(busy_frame(faults=faults))
    with top(fake.url, size=(100, 30)) as session:
        screen = session.shows("GPU-0: gpu_is_lost: fell off bus 0", "gpu_is_lost: 8 more", "train")
        assert "fell off bus 1" not in screen
        session.press("a")
        session.shows("fell off bus 0", "fell off bus 8")


HOSTILE = "[bold]x[/bold]\x1b[2J\x1b]0;owned\x07‮⁦\n\r\tend" + "W" * 4096


def test_names_of_programs_are_shown_as_plain_text(fake: FakeDaemon):
    device = make_device(name=HOSTILE, used_bytes=GIB, processes=(make_process(10, GIB, comm=HOSTILE, user=HOSTILE),))
    verdict = Verdict(device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=5.0, summary=HOSTILE)
    fake.show(make_frame(device, verdicts=(verdict,)))
    nasty = PLANNED | {"workload": HOSTILE, "reason": HOSTILE, "outcome": "refused"}
    fake.answers["/api/v1/flushes"] = (200, {"id": "1", "receipts": [nasty], "released_bytes": 0})
    with top(fake.url, size=(120, 40)) as session:
        for keys in ((), ("d",), ("escape", "a"), ("escape", "F")):
            session.press(*keys)
            screen = session.shows("[bold]x[/bold]�[2J" if keys[-1:] != ("F",) else "refused")
            assert not [character for character in screen if not character.isprintable() and character != "\n"]
            assert "owned�" in screen or keys == ()
        assert session.written.count("\x1b[2J") <= 2  # both by the application, at its start
        assert "\x1b]" not in session.written


def test_size_of_the_terminal_may_change(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train", "Quit")
        session.resize(120, 40)
        session.until(lambda screen: "OVERHEAD" in screen and "Quit" in session.screen.lines()[39])
        session.resize(30, 5)
        session.until(lambda _: "gpumond" in session.screen.lines()[0])
        session.press("q")
        assert session.ends() == 0


def test_termination_restores_the_terminal(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        session.process.terminate()
        assert session.ends() == 143
        assert "\x1b[?1049l" in session.written


def test_example_receipt_of_the_api_can_be_shown(fake: FakeDaemon):
    receipt = TypeAdapter(type(RECEIPT)).dump_python(RECEIPT, mode="json")
    assert receipt.keys() >= PLANNED.keys()


def last(session: Session) -> str:
    return session.screen.lines()[-1]


def test_requests_for_frames_continue_while_a_panel_is_open(fake: FakeDaemon):
    with top(fake.url) as session:
        session.shows("train")
        session.press("?")
        session.shows("next and previous row")
        assert "Close" in last(session)
        before = len(fake.requests)
        until(lambda: len(fake.requests) > before + 1)


@contextmanager
def program(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    default: Any = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    process = subprocess.Popen(["sleep", "600"], preexec_fn=default, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def frame_of(*pids: int, ticks: int | None = None) -> dict[str, Any]:
    processes = tuple(
        make_process(pid, GIB, comm=f"sleep{at}", start_ticks=ticks or read_start_ticks(pid))
        for at, pid in enumerate(pids)
    )
    return make_frame(make_device(used_bytes=GIB * len(pids), processes=processes))


def row_of(pid: int, ticks: int | None = None) -> ProcessRow:
    return frame_view(frame_of(pid, ticks=ticks)).processes[0]


def test_key_k_sends_the_signal_to_the_marked_programs_after_a_confirmation():
    with program() as one, program() as other, program() as third:
        with fake_daemon(frame_of(one.pid, other.pid, third.pid)) as fake, top(fake.url) as session:
            session.shows("sleep0", "sleep2")
            session.press("x", " ", "K")
            session.shows("SIGTERM", f"(pid {one.pid})", f"(pid {other.pid})", "Send SIGTERM to 2 programs? y: yes")
            session.press("escape")
            session.shows("USED↓", without="SIGTERM")
            session.press("K", "right", "right")
            session.shows("Send SIGHUP to 2 programs?")
            session.press("y")
            session.shows("SIGHUP sent")
        assert [process.wait(60) for process in (one, other)] == [-1, -1]
        assert third.poll() is None


def test_signals_are_complete_on_a_narrow_screen():
    with program() as one, fake_daemon(frame_of(one.pid)) as fake, top(fake.url, size=(40, 20)) as session:
        session.shows("sleep0")
        session.press("K")
        session.shows("SIGCONT", "Send SIGTERM to 1 program? y: yes", "esc: no")


def test_plan_of_a_flush_keeps_its_amounts_on_a_narrow_screen(fake: FakeDaemon):
    fake.answers["/api/v1/flushes"] = (200, PLAN)
    with top(fake.url, size=(40, 20)) as session:
        session.shows("train")
        session.press("f")
        screen = session.shows("PROGRAM", "WOULD RELEASE", "Flush 12.0 GiB? y: yes")
        assert next(line for line in screen.splitlines() if "train torch" in line).endswith("12.0 GiB")


def test_no_signal_is_sent_without_a_confirmation():
    with program() as one, fake_daemon(frame_of(one.pid)) as fake, top(fake.url) as session:
        session.shows("sleep0")
        session.press("K")
        session.shows("Send SIGTERM to 1 program?")
        session.press("n", "y", "?")
        session.shows("next and previous row")
        assert one.poll() is None


def test_process_with_another_start_receives_no_signal():
    with program() as process:
        other = row_of(process.pid, ticks=7)
        assert "runs on another machine" in signal_refusal(other, True)
        assert send_signal(other, True, "SIGKILL").startswith("not sent: ")
        assert process.poll() is None


def test_program_of_a_daemon_elsewhere_receives_no_signal():
    with program() as process:
        row = row_of(process.pid)
        assert signal_refusal(row, True) == ""
        assert "runs on another machine" in signal_refusal(row, False)
        assert send_signal(row, False, "SIGKILL").startswith("not sent: ")
        assert process.poll() is None


def test_program_of_another_user_receives_no_signal():
    with program(**({"user": 65534} if os.geteuid() == 0 else {})) as process:
        pid = process.pid if os.geteuid() == 0 else 1
        if read_start_ticks(pid) is None:
            pytest.skip("pid 1 is not visible")
        row = row_of(pid)
        assert signal_refusal(row, True) == "the program isn't yours"
        assert send_signal(row, True, "SIGKILL") == "not sent: the program isn't yours"
        with fake_daemon(frame_of(pid)) as fake, top(fake.url) as session:
            session.shows("sleep0")
            session.press("K")
            session.shows("the program isn't yours", without="y: yes")
        assert process.poll() is None


def test_ended_program_receives_no_signal():
    with program() as process:
        row = row_of(process.pid)
        process.kill()
        process.wait()
        assert send_signal(row, True, "SIGTERM").startswith("not sent: ")


def test_ancestors_of_a_process_of_this_machine_are_known():
    with program() as process:
        ticks = read_start_ticks(process.pid)
        lineages = AncestorCache()
        known, foreign = ProcessKey(process.pid, ticks), ProcessKey(process.pid, 7)
        found = lineages.read([known, foreign])
        assert found[known][0].pid == os.getpid()
        assert found[foreign] == ()


def test_key_t_shows_siblings_below_their_parent():
    with program() as one, program() as other:
        with fake_daemon(frame_of(one.pid, other.pid)) as fake, top(fake.url, size=(120, 30)) as session:
            session.shows("sleep0", "sleep1")
            session.press("t")
            session.shows(f" {os.getpid()} ", "   sleep0", "   sleep1")
            session.press("t")
            session.shows("sleep0", without=f" {os.getpid()} ")
        until(lambda: one.poll() is None)


@pytest.mark.parametrize("key", ["", "d", "c", "?", "a"])
def test_terminal_without_unicode_gets_ascii(fake: FakeDaemon, key: str):
    fake.answers["/api/v1/history/shares"] = (200, share_history([(999_999.0, 20.0), (1_000_000.0, 21.0)]))
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "XDG_STATE_HOME": os.devnull}
    with terminal([*TOP, "--url", fake.url], (120, 40), **environ) as session:
        assert "? opaque" not in session.shows("train", "used in the last"), "the mark of a share is a color"
        session.press(key)
        session.read()
        assert session.written.isascii()
