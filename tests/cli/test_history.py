"""`gpumond history`: shares over time, at one time, and the change between two times."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gpumond.cli.arguments import parse_time_argument
from gpumond.commands.history import parse_past_time
from gpumond.commands.main import main
from gpumond.view.moments import table_at
from gpumond.view.text import exact_time_text
from tests.helpers.agents import GIB
from tests.helpers.frames import FakeDaemon, busy_frame, fake_daemon

UUID = "GPU-a"
PARTS = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")


def columns(*used: int, pid: int | None = 10) -> dict[str, Any]:
    """One value every 10 s, all of it live."""
    return {
        "device_uuid": UUID,
        "pid": pid,
        "at": [1000.0 + 10 * place for place in range(len(used))],
        "low": used,
        "high": [each + GIB for each in used],
        "used": used,
        **{name: [None] * len(used) for name in PARTS},
        "live": used,
    }


def holding(used: float, pid: int | None, name: str = "", ended_at: float | None = None) -> dict[str, Any]:
    amounts = {f"{each}_bytes": None for each in PARTS}
    own = {"device_uuid": UUID, "pid": pid, "start_ticks": pid, "name": name, "ended_at": ended_at}
    return own | amounts | {"used_bytes": used * GIB, "live_bytes": used * GIB}


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    frame = busy_frame()
    with fake_daemon(frame) as daemon:
        daemon.answers["/api/v1/devices"] = (200, frame["snapshot"]["devices"])
        daemon.answers["/api/v1/history/shares"] = (200, columns(2 * GIB, 6 * GIB, 3 * GIB))
        daemon.answers["/api/v1/events"] = (200, [])
        daemon.answers["/api/v1/status"] = (200, {"started_at": 0.0})
        yield daemon


def shown(fake: FakeDaemon, *words: str) -> int:
    return main(["history", *words, "--url", fake.url])


def asked(fake: FakeDaemon) -> dict[str, str]:
    """Return the parameters of the last request."""
    return {name: each for name, (each,) in parse_qs(urlsplit(fake.queries[-1][0]).query).items()}


def test_row_is_the_first_value_of_an_interval_with_its_peak(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    assert shown(fake, "train", "--every", "20s") == 0
    assert (asked(fake)["uuid"], asked(fake)["pid"]) == (UUID, "10")
    header, *rows = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert [name.strip() for name in header if name] == ["TIME", "GPU", "PID", "PROGRAM", "USED", "PEAK", "LIVE"]
    assert [[each.strip() for each in row if each] for row in rows] == [
        ["1970-01-01 00:16:40Z", "0", "10", "train", "2.0 GiB", "7.0 GiB", "2.0 GiB"],
        ["1970-01-01 00:17:00Z", "0", "10", "train", "3.0 GiB", "4.0 GiB", "3.0 GiB"],
    ]


def test_csv_and_json_have_every_value(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    assert shown(fake, "--csv") == 0
    first, *_ = csv.DictReader(StringIO(capsys.readouterr().out))
    found = (first["at"], first["used_bytes"], first["cached_bytes"])
    assert found == ("1970-01-01T00:16:40.000Z", str(2 * GIB), "")
    assert shown(fake, "--json", "--device", "0") == 0
    assert asked(fake)["uuid"] == UUID
    assert [row["peak_bytes"] // GIB for row in json.loads(capsys.readouterr().out)] == [3, 7, 4]


def test_shares_add_up_to_the_used_bytes_and_the_overcount(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    found = columns(2 * GIB, 6 * GIB)
    found["cached"] = [GIB, None]
    fake.answers["/api/v1/history/shares"] = (200, found)
    assert shown(fake, "--json") == 0
    assert [row["overcount_bytes"] for row in json.loads(capsys.readouterr().out)] == [GIB, 0]


def test_rows_end_at_a_time_in_the_past(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    assert shown(fake, "train", "--until", "1970-01-01T00:17:10", "--last", "1m") == 0
    assert (float(asked(fake)["since"]), float(asked(fake)["until"])) == (970.0, 1030.0)
    with pytest.raises(SystemExit):
        shown(fake, "--until", "5m", "--at", "5m")
    assert "--at can't be combined with --until" in capsys.readouterr().err


def test_more_than_a_day_is_refused(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    assert shown(fake, "--last", "3d") == 2
    assert "at most 24h" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--last", "--every"])
def test_range_of_a_moment_is_refused(fake: FakeDaemon, capsys: pytest.CaptureFixture[str], option: str):
    assert shown(fake, "--at", "1m", option, "5m") == 2
    assert "--at can't be combined with --last or --every" in capsys.readouterr().err


def test_rows_are_at_least_a_second_apart(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    assert shown(fake, "--every", "0.5s") == 2
    told = "--every: must be at least 1s; without it, --csv and --json print every value that is kept"
    assert told in capsys.readouterr().err
    found = columns(GIB, GIB, GIB) | {"at": [1000.1, 1000.8, 1001.1]}
    fake.answers["/api/v1/history/shares"] = (200, found)
    assert shown(fake, "--last", "6s") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "the header and one row a second"


def test_unknown_name_is_nothing_to_show_with_the_nearest_one(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    assert shown(fake, "trian") == 3
    told = capsys.readouterr().err
    assert "no program named trian has used GPU memory since " in told
    assert told.endswith("did you mean train?\n")
    assert shown(fake, "zzz") == 3
    assert capsys.readouterr().err.endswith("Z; choose a longer --last\n")
    fake.answers["/api/v1/status"] = (200, {"started_at": time.time()})
    assert shown(fake, "zzz") == 3, "a longer --last would find no more"
    assert capsys.readouterr().err.endswith("since the daemon's start; to list the programs: gpumond status\n")
    fake.answers["/api/v1/history/shares"] = (404, {"detail": "no history"})
    assert shown(fake, "99") == 3
    assert "no history for 99" in capsys.readouterr().err


def test_processes_that_have_ended_are_found_by_name_while_the_rows_reach_back(
    fake: FakeDaemon, capsys: pytest.CaptureFixture[str]
):
    own = {"kind": "process-ended", "device_uuid": UUID, "workload": "eval"}
    ended = [own | {"pid": pid, "start_ticks": pid, "at": time.time() - ago} for pid, ago in ((8, 3600), (9, 60))]
    fake.answers["/api/v1/events"] = (
        200,
        [own | {"kind": "oom", "pid": 7, "start_ticks": 7, "at": time.time()}, *ended],
    )
    for words, pids in (((), {9}), (("--last", "2h"), {8, 9})):
        assert shown(fake, "eval", "--json", *words) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {(row["pid"], row["start_ticks"], row["name"]) for row in rows} == {(pid, pid, "eval") for pid in pids}


def test_moment_lists_who_held_what_and_who_has_ended(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    found = [holding(12, None), holding(4, 11, "eval", ended_at=1030.0), holding(8, 10, "train")]
    fake.answers["/api/v1/history/moment"] = (200, {"at": 1000.0, "holdings": found})
    assert shown(fake, "--at", "1970-01-01T00:16:40", "--device", "0") == 0
    assert asked(fake) == {"at": "1000.0", "uuid": UUID}
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "at 1970-01-01 00:16:40Z:"
    assert [row.split()[1] for row in rows] == ["10", "11", "whole"]
    assert rows[1].endswith("1970-01-01 00:17:10Z")
    assert shown(fake, "eval", "--at", "5m", "--json") == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["pid"], only["used_bytes"]) == (11, 4 * GIB)


def test_time_without_history_is_named(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    fake.answers["/api/v1/history/moment"] = (404, {"detail": "no history for that time"})
    assert shown(fake, "--at", "1970-01-01T00:16:40") == 2
    assert "no history for 1970-01-01 00:16:40Z; choose a later time" in capsys.readouterr().err


def test_two_times_show_the_change(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]):
    fake.answers["/api/v1/history/moment"] = (200, {"at": 0.0, "holdings": [holding(8, 10, "train")]})
    assert shown(fake, "--at", "5m", "--at", "10m") == 0
    title, header, row = capsys.readouterr().out.splitlines()
    assert title.startswith("from ")
    assert header.split() == ["GPU", "PID", "PROGRAM", "BEFORE", "AFTER", "CHANGE", "LIVE"]
    assert row.split()[3:] == ["8.0", "GiB", "8.0", "GiB", "0", "B", "0", "B"]
    assert shown(fake, "--at", "5m", "--at", "10m", "--at", "15m") == 2


def test_change_agrees_with_the_sizes_before_and_after():
    moments = [[holding(used, 10, "train")] for used in (2.62, 8.86)]
    row = table_at((0.0, 60.0), moments, {UUID: "0"}, None).splitlines()[-1]
    assert row.split()[3:9] == ["2.62", "GiB", "8.86", "GiB", "+6.2", "GiB"], "not 2.6, 8.9 and 6.2"


NOW = 1_795_847_400.0
"""2026-11-28 06:30:00 UTC"""


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("5m", 300.0),
        ("now", 0.0),
        ("06:20", 600.0),
        ("06:20:30.5", 569.5),
        ("06:20:30Z", 570.0),
        ("07:00", 84_600.0),
        ("2026-11-28 06:00:00Z", 1800.0),
        ("2026-11-28T07:00:00+01:00", 1800.0),
        ("2026-11-27T06:30", 86_400.0),
    ],
)
def test_time_is_a_clock_an_iso_time_or_how_long_ago(text: str, ago: float):
    assert NOW - parse_past_time(text, NOW) == ago


def test_time_is_shown_as_it_was_given():
    assert parse_past_time("5m", NOW + 0.7) == NOW - 300.0
    assert [exact_time_text(NOW + seconds) for seconds in (0.0, 0.5, 0.05, 0.9999)] == [
        "2026-11-28 06:30:00Z",
        "2026-11-28 06:30:00.5Z",
        "2026-11-28 06:30:00.05Z",
        "2026-11-28 06:30:01Z",
    ]


@pytest.mark.parametrize(
    ("text", "later"),
    [("5m", 300.0), ("06:40", 600.0), ("06:20", 85_800.0), ("2026-11-28T07:00", 1800.0), ("2026-11-28 06:00", -1800.0)],
)
def test_time_ahead_is_the_next_clock_an_iso_time_or_in_how_long(text: str, later: float):
    assert parse_time_argument(text, NOW, in_future=True) - NOW == later


@pytest.mark.parametrize(("text", "why"), [("noon", "expected HH:MM"), ("2030-01-01", "must not be in the future")])
def test_other_times_are_wrong(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        parse_past_time(text, NOW)
