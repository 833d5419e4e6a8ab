"""Signals to programs of this machine, and their ancestors."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from gpumond.facts.program import ProcessKey
from gpumond.host.machine import start_ticks
from gpumond.top.processes import Lineages, refusal, send
from gpumond.view.frame import view
from gpumond.view.rows import ProcessRow
from tests.helpers.agents import GIB
from tests.helpers.frames import fake_daemon, make_frame
from tests.helpers.running import until
from tests.helpers.screens import top
from tests.helpers.values import make_device, make_process

pytestmark = pytest.mark.slow


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
        make_process(pid, GIB, comm=f"sleep{at}", start_ticks=ticks or start_ticks(pid)) for at, pid in enumerate(pids)
    )
    return make_frame(make_device(used_bytes=GIB * len(pids), processes=processes))


def row_of(pid: int, ticks: int | None = None) -> ProcessRow:
    return view(frame_of(pid, ticks=ticks)).processes[0]


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
        assert "doesn't run on this machine" in refusal(other, True)
        assert send(other, True, "SIGKILL").startswith("not sent: ")
        assert process.poll() is None


def test_program_of_a_daemon_elsewhere_receives_no_signal():
    with program() as process:
        row = row_of(process.pid)
        assert refusal(row, True) == ""
        assert "doesn't run on this machine" in refusal(row, False)
        assert send(row, False, "SIGKILL").startswith("not sent: ")
        assert process.poll() is None


def test_program_of_another_user_receives_no_signal():
    with program(**({"user": 65534} if os.geteuid() == 0 else {})) as process:
        pid = process.pid if os.geteuid() == 0 else 1
        if start_ticks(pid) is None:
            pytest.skip("pid 1 is not visible")
        row = row_of(pid)
        assert refusal(row, True) == "it isn't your program"
        assert send(row, True, "SIGKILL") == "not sent: it isn't your program"
        with fake_daemon(frame_of(pid)) as fake, top(fake.url) as session:
            session.shows("sleep0")
            session.press("K")
            session.shows("it isn't your program", without="y: yes")
        assert process.poll() is None


def test_ended_program_receives_no_signal():
    with program() as process:
        row = row_of(process.pid)
        process.kill()
        process.wait()
        assert send(row, True, "SIGTERM").startswith("not sent: ")


def test_ancestors_of_a_process_of_this_machine_are_known():
    with program() as process:
        ticks = start_ticks(process.pid)
        lineages = Lineages()
        known, foreign = ProcessKey(process.pid, ticks), ProcessKey(process.pid, 7)
        found = lineages.of([known, foreign])
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
