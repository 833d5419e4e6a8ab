"""Time in logs: order, gaps, clocks that are set, logs appended to logs."""

from __future__ import annotations

import pytest

from gpumond.errors import ConfigError
from gpumond.model.snapshot import Snapshot
from tests.importers.reading import elapsed, read, read_with_remarks, used


def log(*times: float, uuid: str = "a") -> str:
    return "".join(f"{time},{uuid},,{number}\n" for number, time in enumerate(times))


def read_log(*times: float) -> tuple[list[Snapshot], list[str]]:
    return read_with_remarks("time,uuid,pid,used_bytes\n" + log(*times))


def test_lines_that_overtook_each_other_are_put_in_order():
    seen, remarks = read_log(0, 1, 3, 2, 4)
    assert (elapsed(seen), used(seen, "a")) == ([0, 1, 2, 3, 4], [0, 1, 3, 2, 4])
    assert remarks == []


def test_a_gap_is_a_gap():
    seen, _ = read_log(0, 1, 2, 2402, 2403)
    assert elapsed(seen) == [0, 1, 2, 2402, 2403]


def test_a_long_gap_is_one_too_once_the_series_goes_on():
    seen, remarks = read_log(0, 1, 100_000, 100_001)
    assert (elapsed(seen), remarks) == ([0, 1, 100_000, 100_001], [])


@pytest.mark.parametrize("restart", [(500, 501, 502), (0, 1, 2), (994, 995, 996)], ids=["clock", "appended", "near"])
def test_a_clock_that_goes_back_is_a_new_stretch_and_seconds_go_on(restart: tuple[float, ...]):
    seen, remarks = read_log(1000, 1001, 1002, *restart)
    assert elapsed(seen) == [0, 1, 2, 3, 4, 5]
    assert [snapshot.taken_at for snapshot in seen] == [1000, 1001, 1002, *restart]
    assert "line 5: the log's clock was set back" in remarks[0]


@pytest.mark.parametrize("stray", [10.0, 4e9], ids=["back", "ahead"])
def test_one_line_far_out_of_place_is_left_out(stray: float):
    seen, remarks = read_log(1000, 1001, stray, 1002, 1003)
    assert elapsed(seen) == [0, 1, 2, 3]
    assert remarks == ["1 lines are far out of order in time; they are ignored"]


def test_series_one_after_the_other_are_read_as_such():
    seen = read("time,uuid,pid,used_bytes\n" + log(*range(100), uuid="a") + log(*range(100), uuid="b"))
    assert elapsed(seen) == [float(n) for n in range(200)]
    assert used(seen, "b") == list(range(100))


@pytest.mark.parametrize("times", [range(90_000, 0, -6), range(90, 0, -6)], ids=["long", "short"])
def test_a_log_that_runs_backwards_is_refused_with_the_mend(times: range):
    with pytest.raises(ConfigError, match="line 3: time decreases from this line on; sort the log by time"):
        read_log(*times)


def test_devices_read_moments_apart_are_one_snapshot_and_never_two_readings_of_one():
    rows = "".join(f"{30 * t},a,,{t}\n{30 * t + 9},b,,{t}\n" for t in range(10))
    seen = read("time,uuid,pid,used_bytes\n" + rows)
    assert [[d.used_bytes for d in s.devices] for s in seen[-5:]] == [[t, t] for t in range(5, 10)]


def test_a_device_that_is_not_in_a_reading_is_missed_and_then_gone():
    rows = "".join(f"{t},a,,{t}\n" + (f"{t},b,,{t}\n" if t < 5 else "") for t in range(12))
    seen = read("time,uuid,pid,used_bytes\n" + rows)
    missed = [{d.uuid: d.missed for d in s.devices}.get("b") for s in seen]
    assert missed == [0, 0, 0, 0, 0, 1, 2, None, None, None, None, None]


def test_the_same_log_gives_the_same_snapshots():
    rows = "time,uuid,pid,used_bytes\n" + log(*(t + (t * 7 % 5) for t in range(500)))
    assert read(rows) == read(rows)
