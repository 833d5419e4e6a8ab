"""Recordings in CSV are read back with the same values."""

from __future__ import annotations

from gpumond.facts.snapshot import Sensors
from gpumond.features.recordings.csv_log import HEADER, csv_lines
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot
from tests.recordings.reading import read


def test_recording_has_devices_processes_and_pools_and_is_read_back():
    busy = Sensors(gpu_utilization_ratio=0.25)
    processes = (make_process(10, 6 * GIB), make_process(11, GIB), make_process(12, None))
    device = make_device("GPU-a", used_bytes=8 * GIB, processes=processes, sensors=busy)
    other = make_device('GPU-"b",', index=1, used_bytes=None, size_bytes=None, processes=None)
    pools = (make_pool("GPU-a", live=GIB, cached=GIB), make_pool("GPU-a", live=GIB, allocator="cupy"))
    unlisted = make_report(2**22 + 5, (make_pool("GPU-a", live=GIB, held_known=False),), start_ticks=None)
    reports = (make_report(10, pools), unlisted)
    log = HEADER + "".join(
        csv_lines(make_snapshot(device, other, reports=reports, taken_at=1000.0 + second)) for second in range(2)
    )
    assert log.splitlines()[:5] == [
        "time,uuid,pid,used_bytes,live_bytes,held_bytes,size_bytes,utilization",
        f"1000.000,GPU-a,,{8 * GIB},,,{80 * GIB},0.2500",
        f"1000.000,GPU-a,10,{6 * GIB},{2 * GIB},{3 * GIB},,",
        f"1000.000,GPU-a,11,{GIB},,,,",
        f"1000.000,GPU-a,{2**22 + 5},,{GIB},,,",
    ]
    first, second = read(log)
    assert (first.taken_at, second.elapsed_seconds) == (1000.0, 1.0)
    one, two = first.devices
    assert (one.uuid, one.used_bytes, one.size_bytes, one.sensors) == ("GPU-a", 8 * GIB, 80 * GIB, busy)
    assert (two.uuid, two.used_bytes, two.size_bytes) == ('GPU-"b",', None, None)
    assert [(p.pid, p.used_bytes) for p in one.processes or ()] == [(10, 6 * GIB), (11, GIB), (2**22 + 5, None)]
    assert [(r.pid, r.pools[0].live_bytes, r.pools[0].held_bytes) for r in first.reports] == [
        (10, 2 * GIB, 3 * GIB),
        (2**22 + 5, GIB, GIB),
    ]


def test_device_without_new_values_has_no_line():
    assert csv_lines(make_snapshot(make_device(missed_readings=1))) == ""
