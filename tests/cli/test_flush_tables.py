"""Tables of plans and receipts, and the exit code of each."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gpumond.cli.arguments import DONE, NOTHING_TO_DO
from gpumond.features.flush.command import _exit_code, plan_table, receipt_table
from gpumond.view.text import time_text
from tests.helpers.frames import busy_frame, fake_daemon
from tests.helpers.screens import terminal

GIB = 1024**3

NAMES = {0: "root"}


def promise(low: int, likely: int | None, high: int) -> dict[str, int | None]:
    return {"low": low * GIB, "likely": None if likely is None else likely * GIB, "high": high * GIB}


def make_receipt(**fields: Any) -> dict[str, Any]:
    return {
        "pid": 10,
        "workload": "train",
        "allocator": "torch",
        "outcome": "freed",
        "reason": "",
        "planned": promise(4, 4, 4),
        "expected": promise(3, 3, 3),
        "released_bytes": 2 * GIB,
        "driver_released_bytes": GIB,
        "raced": False,
        "duration_seconds": 0.1,
    } | fields


def test_plan_table_has_its_columns_and_a_total():
    plan = [
        make_receipt(outcome="planned", released_bytes=0),
        make_receipt(outcome="planned", expected=promise(1, 2, 2)),
    ]
    header, *_, total = plan_table(plan).splitlines()
    assert header.split("  ")[0] == "PID"
    assert "WOULD RELEASE" in header
    assert "RELEASED" not in header
    changes = "; the amount changes while the programs run"
    assert total == f"a flush now would release 5.0 GiB, between 4.0 GiB and 5.0 GiB{changes}"
    assert "AT LEAST" in header
    smaller = make_receipt(outcome="planned", pid=11, expected=promise(1, 1, 1))
    assert [row.split()[0] for row in plan_table([smaller, *plan]).splitlines()[1:4]] == ["10", "10", "11"]
    header, *_, total = plan_table(plan[:1]).splitlines()
    assert total == f"a flush now would release 3.0 GiB{changes}"
    assert "AT LEAST" not in header, "it would be a bound that a running program doesn't keep"


def test_unknown_prediction_is_absent_and_never_0():
    unknown = make_receipt(outcome="planned", expected=promise(0, None, 7))
    _, row, _, total = plan_table([unknown]).splitlines()
    assert row.split()[4:] == ["-", "0", "B", "7.0", "GiB"]
    assert total.startswith("a flush now would release between 0 B and 7.0 GiB; ")
    assert "between 3.0 GiB and 10.0 GiB" in plan_table([unknown, make_receipt(outcome="planned")]).splitlines()[-1]
    done = make_receipt(planned=None, expected=promise(0, None, 7), started_at=1.0, requested_by="token@uid:0")
    assert receipt_table([done], NAMES.get).splitlines()[1].split()[4:6] == ["-", "-"]


def test_receipt_table_has_planned_expected_released_and_the_drivers_count():
    receipt = make_receipt(started_at=1_000_000.0, requested_by="token@uid:0")
    header, row, _, total = receipt_table([receipt], NAMES.get).splitlines()
    assert header.split()[4:9] == ["PLANNED", "EXPECTED", "RELEASED", "DRIVER", "TOOK"]
    assert row.split()[4:12] == ["4.0", "GiB", "3.0", "GiB", "2.0", "GiB", "1.0", "GiB"]
    assert row.endswith("the program's memory changed between the plan and the flush")
    raced = receipt | {"planned": receipt["expected"], "raced": True, "reason": "busy"}
    _, row, *_ = receipt_table([raced], NAMES.get).splitlines()
    assert row.endswith("busy; the program allocated or freed memory during the flush")
    assert total == f"2.0 GiB released at {time_text(1_000_000.0)} by root (token)"


@pytest.mark.parametrize(("outcome", "released"), [("woken", 0), ("suspended", None)])
def test_what_no_allocator_released_has_no_total(outcome: str, released: int | None):
    receipt = make_receipt(outcome=outcome, released_bytes=released, started_at=1_000_000.0, requested_by="uid:0")
    _, row = receipt_table([receipt], NAMES.get, past=True).splitlines()
    assert outcome in row


def test_past_receipts_state_when_and_by_whom():
    past = make_receipt(started_at=1_000_000.0, requested_by="token@uid:0", reason="busy", planned=None)
    header, row, *_ = receipt_table([past], NAMES.get, past=True).splitlines()
    assert (header.split()[0], header.split()[-2:]) == ("FINISHED", ["BY", "REASON"])
    assert row.startswith(f"{time_text(1_000_000.0)}   10  train")
    assert row.endswith("0.10 s  root (token)  busy")


def test_plan_of_unknown_size_exits_with_0():
    assert _exit_code([make_receipt(outcome="planned", expected=promise(0, None, 3))]) == DONE
    assert _exit_code([make_receipt(outcome="planned", expected=promise(0, 0, 0))]) == NOTHING_TO_DO


def test_receipts_fit_a_narrow_terminal_and_name_what_is_hidden():
    by = {"requested_by": "uid:0/session:3f2a91c0@10.0.0.7", "started_at": 1.0, "steps": []}
    by |= dict.fromkeys(("device_uuid", "before", "after"))
    receipts = [make_receipt(**by), make_receipt(outcome="refused", reason="the program allocated " * 9, **by)]
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {"/api/v1/receipts": (200, receipts), "/api/v1/suspensions/receipts": (200, [])}
        command = [sys.executable, "-m", "gpumond", "receipts", "--url", fake.url]
        with terminal(command, (80, 40)) as session:
            assert session.ends() == 0
            lines = session.written.splitlines()
        fake.answers["/api/v1/flushes"] = (200, {"receipts": receipts})
        with terminal([*command[:3], "flush", "--all", *command[4:]], (50, 40)) as session:
            assert session.ends() == 0
            assert "2.0 GiB" in session.written
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["FINISHED", "PID", "PROGRAM", "OUTCOME", "RELEASED", "DRIVER", "REASON"]
    assert [line for line in lines if line.startswith("to see all columns: gpumond receipts --json (hidden: ")]
