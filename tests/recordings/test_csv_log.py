"""Plain CSV logs."""

from __future__ import annotations

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.features.recordings.reader import parse_time
from gpumond.features.recordings.snapshots import UNKNOWN_PID
from tests.helpers.agents import GIB
from tests.recordings.reading import elapsed, read, read_with_notices, used

HEADER = "time,uuid,pid,used_bytes,live_bytes,held_bytes,size_bytes,utilization\n"


def test_rows_have_devices_processes_and_their_allocators():
    snapshots = read(
        HEADER + f"0,GPU-a,,300,,,{80 * GIB},0.5\n0,GPU-a,7,200,100,150,,\n1,GPU-a,,301,,,,\n1,GPU-a,7,201,,,,\n"
    )
    device, report = snapshots[0].devices[0], snapshots[0].reports[0]
    assert (device.uuid, device.used_bytes, device.size_bytes) == ("GPU-a", 300, 80 * GIB)
    assert device.sensors.gpu_utilization_ratio == 0.5
    assert [(p.pid, p.used_bytes, p.start_ticks) for p in device.processes or ()] == [(7, 200, report.start_ticks)]
    assert (report.pid, report.pools[0].live_bytes, report.pools[0].held_bytes) == (7, 100, 150)
    assert snapshots[1].devices[0].size_bytes == 80 * GIB
    assert snapshots[1].reports == ()


@pytest.mark.parametrize(
    "log",
    [
        "time,uuid,pid,used_bytes\n0,GPU-a,,5\n1,GPU-a,,6\n",
        "uuid,used_bytes,time\nGPU-a,5,0\nGPU-a,6,1\n",
        "0,GPU-a,,5\n1,GPU-a,,6\n",
        "time;uuid;pid;used_bytes\n0;GPU-a;;5.0\n1;GPU-a;;6.0\n",
        '"time","uuid","pid","used_bytes"\n"0","GPU-a","","5"\n"1","GPU-a","","6"\n',
        "time,uuid,pid,used_bytes\r\n0,GPU-a,NaN,5\r\n1,GPU-a,,6\r\n2,GPU-a,,7777",
        "time,uuid,pid,used_bytes\n0,GPU-a,,5\ntime,uuid,pid,used_bytes\n1,GPU-a,,6\n",
    ],
    ids=["named", "order", "unnamed", "semicolons", "quoted", "half", "header-again"],
)
def test_equal_readings_in_different_notations_are_equal(log: str):
    snapshots = read(log)
    assert (elapsed(snapshots), used(snapshots, "GPU-a")) == ([0, 1], [5, 6])


@pytest.mark.parametrize(
    "header",
    [
        "time,gpu_id,memory_used_mib,memory_total_mib,utilization_gpu_pct",
        "timestamp,gpu_index,mem_used_mb,mem_total_mb,util_gpu_percent",
        "Timestamp,GPU,GPU_Memory_Used_MB,GPU_Memory_Total_MB,gpu_utilization_pct",
    ],
)
def test_names_with_units_are_those_of_other_scripts(header: str):
    (snapshot,) = read(f"{header}\n0,1,1.5,2048,1\n")
    (device,) = snapshot.devices
    assert (device.uuid, device.used_bytes, device.size_bytes) == ("1", 1.5 * 2**20, 2 * GIB)
    assert device.sensors.gpu_utilization_ratio == 0.01


def test_log_of_an_allocator_alone_is_the_memory_of_its_device():
    snapshots, notices = read_with_notices("step,mem_allocated_gb,mem_reserved_gb,timestamp\n0,1,2,0\n1,1,2,5\n")
    assert used(snapshots, "gpu") == [2 * GIB, 2 * GIB]
    assert [pool.live_bytes for report in snapshots[1].reports for pool in report.pools] == [GIB]
    assert any("its allocators' memory" in notice for notice in notices)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1714564800", 1714564800.0),
        ("1714564800.25", 1714564800.25),
        ("1714564800250", 1714564800.25),
        ("1714564800250000000", 1714564800.25),
        ("12.5", 12.5),
        ("2024/05/01 12:00:00.250", 1714564800.25),
        ("2024-05-01T12:00:00.250Z", 1714564800.25),
        ("2024-05-01 12:00:00", 1714564800.0),
        ("2024-05-01T14:00:00+02:00", 1714564800.0),
        ("2024-05-01T07:30:00-0430", 1714564800.0),
        ("2024-05-01T14:00:00,25+02", 1714564800.25),
    ],
)
def test_times_are_read_in_the_notations_of_logs(text: str, at: float):
    assert parse_time(text) == at


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "nan", "inf", "2024-13-01T12:00:00", "2024-05-01", "2024-05-01T12:00:99"]
)
def test_invalid_time_is_rejected(text: str):
    with pytest.raises(ValueError, match="isn't a time; expected"):
        parse_time(text)


@pytest.mark.parametrize(
    ("cells", "ratios"),
    [(("0.5", "1"), [0.5, 1.0]), (("50", "1"), [0.5, 0.01]), (("50%", "1%"), [0.5, 0.01]), (("", "N/A"), [None, None])],
)
def test_utilization_is_a_ratio_or_percent(cells: tuple[str, str], ratios: list[float | None]):
    log = "time,uuid,pid,used_bytes,utilization\n" + "".join(f"{n},a,,5,{cell}\n" for n, cell in enumerate(cells))
    assert [s.devices[0].sensors.gpu_utilization_ratio for s in read(log)] == ratios


def test_allocator_without_a_pid_has_a_report_without_a_name():
    snapshots = read("time,uuid,pid,used_bytes,live_bytes,held_bytes\n0,GPU-a,,500,100,300\n")
    assert [(r.pid, r.pools[0].live_bytes, r.pools[0].held_bytes) for r in snapshots[0].reports] == [
        (UNKNOWN_PID, 100, 300)
    ]
    assert snapshots[0].devices[0].used_bytes == 500


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ("time,uuid,pid\n0,a,1\n", "line 1: no column used_bytes; expected time,uuid,pid,used_bytes"),
        ("uuid,pid,used_bytes\na,1,5\n", "line 1: no column time; expected time,uuid"),
        ("0,a,1\n1,a,1\n", "line 1: 3 columns without names; expected time,uuid"),
        ("time,uuid,pid,used_bytes\nx,a,1,5\n", "1 of 1 lines are malformed.*line 2: 'x' isn't a time"),
        ("time,uuid,pid,used_bytes\n0,a,1,-5\n", "line 2: '-5' isn't an amount of memory"),
        ("time,uuid,pid,used_bytes\n0,a,me,5\n", "line 2: pid 'me': expected a number"),
        ("time,uuid,pid,used_bytes\n0,a,0,5\n", "line 2: pid '0': expected a number"),
        ("time,uuid,pid,used_bytes\n0,a\n", "line 2: too few cells"),
        ("time,uuid,pid,used_bytes\n", "contains no readings"),
        ("\x00\x01\x02", "no header|no column|isn't in a known log format"),
    ],
)
def test_unusable_log_is_refused_with_the_line_and_the_remedy(log: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        read(log)


def test_less_frequent_rows_are_kept_until_their_next_row():
    rows = [f"{t},GPU-a,7,{t}\n" + (f"{t},GPU-a,8,1000\n" if t % 10 == 0 else "") for t in range(60)]
    snapshots = read("time,uuid,pid,used_bytes\n" + "".join(rows))
    assert all(len(s.devices[0].processes or ()) == 2 for s in snapshots[20:])


def test_missing_process_has_ended_and_its_pid_returns_as_another():
    rows = [f"{t},a,,9,\n" + (f"{t},a,7,5,4\n" if t < 10 or t >= 20 else "") for t in range(30)]
    snapshots = read("time,uuid,pid,used_bytes,live_bytes\n" + "".join(rows))
    lives = [[(p.pid, p.start_ticks) for p in s.devices[0].processes or ()] for s in snapshots]
    assert (lives[9], lives[15], lives[25]) == ([(7, 0)], [], [(7, 1)])
    assert [[(r.pid, r.start_ticks) for r in s.reports] for s in snapshots] == lives


def test_duplicates_are_skipped_with_a_notice():
    snapshots, remarks = read_with_notices("time,uuid,pid,used_bytes\n0,a,,5\n0,a,,5\n1,a,,6\n")
    assert used(snapshots, "a") == [5, 6]
    assert [r for r in remarks if r.startswith("ignored: 1 line with a second reading")]
