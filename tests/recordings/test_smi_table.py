"""Logs of the default table of nvidia-smi."""

from __future__ import annotations

import pytest

from tests.recordings.reading import elapsed, read, used
from tests.recordings.samples import date, process, processes, table

MIB = 1 << 20
BUS = "00000000:31:00.0"


def test_tables_are_readings_of_devices_and_their_processes():
    snapshots = read(
        table(0, at=date(52), load="0%")
        + table(1835, process(851083, "1826MiB"), at=date(53))
        + table(1840, process(851083, "1831MiB"), at=date(54))
    )
    assert elapsed(snapshots) == [0, 60, 120]
    assert used(snapshots, BUS) == [0, 1835 * MIB, 1840 * MIB]
    (device,) = snapshots[1].devices
    assert (device.index, device.name, device.size_bytes) == (0, "NVIDIA A40", 46068 * MIB)
    assert device.sensors.gpu_utilization_ratio == 0.29
    assert [each.comm for each in device.processes or ()] == ["/opt/env/bin/python"]


def test_lines_of_a_script_before_each_table_are_skipped():
    own = "==== Sat Jan 24 21:52:14 UTC 2026 ====\n"
    snapshots = read("".join(own + table(1835 + number, at=date(52 + number)) for number in range(3)))
    assert used(snapshots, BUS) == [1835 * MIB, 1836 * MIB, 1837 * MIB]


def test_processes_are_unknown_until_a_table_lists_one():
    snapshots = read(
        table(30000, at=date(52))
        + table(30000, process(7, "29000MiB"), at=date(53))
        + table(30000, at=date(54))
        + table(30000, process(8, "N/A"), at=date(55))
    )
    assert [processes(snapshot) for snapshot in snapshots] == [None, [(7, 29000 * MIB)], [], []]


def test_tables_of_older_drivers_and_of_several_devices():
    log = (
        "Mon Jul  1 11:50:10 2019       \n"
        "+-----------------------------------------------------------------------------+\n"
        "| NVIDIA-SMI 384.145                Driver Version: 384.145                   |\n"
        "|   0  Tesla V100-SXM2...  On   | 00000000:06:00.0 Off |                    0 |\n"
        "| N/A   66C    P0   253W / 300W |   9000MiB / 16152MiB |     98%   E. Process |\n"
        "|   1  Tesla V100-SXM2...  Off  | 00000000:07:00.0 Off |                  N/A |\n"
        "| N/A   66C    P0   202W / 300W |  13968MiB / 16152MiB |     N/A   E. Process |\n"
        "| Processes:                                                       GPU Memory |\n"
        "|    0     87315      C   python train.py                             8990MiB |\n"
        "|    1     87316    C+G   ...-name=/opt/x                             5000MiB |\n"
    )
    (snapshot,) = read(log)
    assert [(device.uuid, device.name) for device in snapshot.devices] == [
        ("00000000:06:00.0", "Tesla V100-SXM2..."),
        ("00000000:07:00.0", "Tesla V100-SXM2..."),
    ]
    assert [device.sensors.gpu_utilization_ratio for device in snapshot.devices] == [0.98, None]
    assert [[each.pid for each in device.processes or ()] for device in snapshot.devices] == [[87315], [87316]]


def test_tables_without_dates_need_the_interval():
    assert elapsed(read((table(5) + table(6)) * 2, interval_seconds=10.0)) == [0, 10, 20, 30]


@pytest.mark.parametrize("start", ["", "garbage before the first table\n"])
def test_text_between_tables_is_ignored(start: str):
    log = date(52) + start + table(5, at="") + "\nThu a line of a script\n" + table(6, at=date(53))
    assert used(read(log), BUS) == [5 * MIB, 6 * MIB]
