"""Recordings of gpumond."""

from __future__ import annotations

from dataclasses import replace

from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import Sensors, Snapshot, SourceState, XidErrors
from gpumond.features.recordings.csv_log import CSV_HEADER, csv_lines
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_fault, make_pool, make_process, make_report, make_snapshot
from tests.recordings.reading import elapsed, read, read_with_notices

FULL = replace(
    make_snapshot(
        make_device(
            processes=(
                make_process(uid=0, comm="python", container="c", state="alive"),
                make_process(11, None, start_ticks=None),
            ),
            sensors=Sensors(
                gpu_utilization_ratio=0.1,
                throttle_reasons=("gpu_idle",),
                persistence_mode=True,
                compute_mode="Default",
                ecc_corrected_volatile=3,
            ),
            missed_readings=1,
            up=False,
            gpu_instance_id=2,
            parent_uuid="GPU-p",
            unified=True,
        ),
        reports=(make_report(pools=(make_pool(live=GIB, cached=5, stranded=7, inside="rmm", ooms=0, retries=2),)),),
        faults=(make_fault(), make_fault("GPU-a")),
        xids=(XidErrors("GPU-a", 79, 2, 1.5),),
        store_writable=False,
    ),
    taken_at=1_790_000_000.123456,
    elapsed_seconds=0.1 + 0.2,
    source=SourceState(
        name="nvml",
        up=False,
        responsive=True,
        reason="timeout",
        detail="x",
        driver_version="1",
        library_version="2",
        cuda_version="3",
    ),
)


def lines(*snapshots: Snapshot) -> bytes:
    return b"".join(to_json(snapshot) + b"\n" for snapshot in snapshots)


def test_snapshot_is_read_back_completely():
    assert from_json(Snapshot, to_json(FULL)) == FULL
    assert read(lines(FULL)) == [FULL]


def at(seq: int, elapsed_seconds: float, taken_at: float) -> Snapshot:
    return make_snapshot(make_device(), seq=seq, elapsed_seconds=elapsed_seconds, taken_at=taken_at)


def test_time_continues_after_a_restart_of_the_daemon():
    snapshots, remarks = read_with_notices(lines(at(1, 1, 100), at(2, 2, 101), at(1, 0.5, 111), at(2, 1.5, 112)))
    assert elapsed(snapshots) == [1, 2, 12, 13]
    assert "line 3: the daemon was restarted" in remarks[0]


def test_duplicate_rows_count_once():
    snapshots, _ = read_with_notices(lines(at(1, 1, 100), at(1, 1, 100), at(2, 2, 101)))
    assert elapsed(snapshots) == [1, 2]


def test_incomplete_last_line_causes_no_notice():
    snapshots, remarks = read_with_notices(lines(at(1, 1, 100), at(2, 2, 101))[:-20])
    assert (elapsed(snapshots), remarks) == ([1], [])


def test_invalid_line_is_skipped_with_a_notice():
    many = [at(n, n, 100 + n) for n in range(1, 21)]
    snapshots, remarks = read_with_notices(lines(*many) + b'{"seq":"x"}\n' + lines(at(30, 30, 200)))
    assert len(snapshots) == 21
    assert remarks[0].startswith("ignored: 1 malformed line; the first is line 21: ")


def test_out_of_range_number_makes_a_line_invalid():
    huge = to_json(at(1, 1, 100)).replace(b'"elapsed_seconds":1', b'"elapsed_seconds":1' + b"9" * 400) + b"\n"
    snapshots, remarks = read_with_notices(huge + lines(*[at(n, n, 100 + n) for n in range(1, 21)]))
    assert len(snapshots) == 20
    assert "line 1: Snapshot.elapsed_seconds: expected a finite number" in remarks[0]


def test_missing_capacity_can_be_given():
    snapshots = read(lines(make_snapshot(make_device(size_bytes=None), make_device("GPU-b"))), size_bytes=5)
    assert [device.size_bytes for device in snapshots[0].devices] == [5, 80 * GIB]


def test_recording_has_devices_processes_and_pools_and_is_read_back():
    busy = Sensors(gpu_utilization_ratio=0.25)
    processes = (make_process(10, 6 * GIB), make_process(11, GIB), make_process(12, None))
    device = make_device("GPU-a", used_bytes=8 * GIB, processes=processes, sensors=busy)
    other = make_device('GPU-"b",', index=1, used_bytes=None, size_bytes=None, processes=None)
    pools = (make_pool("GPU-a", live=GIB, cached=GIB), make_pool("GPU-a", live=GIB, allocator="cupy"))
    unlisted = make_report(2**22 + 5, (make_pool("GPU-a", live=GIB, held_known=False),), start_ticks=None)
    reports = (make_report(10, pools), unlisted)
    log = CSV_HEADER + "".join(
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
