"""Sensor logs of GPU-Z."""

from __future__ import annotations

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.features.recordings.reader import parse_time
from tests.recordings.reading import read, used
from tests.recordings.samples import HEADER, ROWS

MIB = 1024**2


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_log_has_one_device_with_dedicated_memory_in_mib(encoding: str):
    snapshots = read((HEADER + ROWS).encode(encoding))
    assert used(snapshots, "gpu") == [3543 * MIB, 3600 * MIB]
    assert [snapshot.taken_at for snapshot in snapshots] == [
        parse_time(f"2024-01-14 18:41:0{second}") for second in (7, 8)
    ]
    assert [snapshot.devices[0].sensors.gpu_utilization_ratio for snapshot in snapshots] == [0.21, None]


def test_older_names_and_a_second_header_with_other_columns_are_read():
    old = "Date , GPU Load [%] , Memory Used [MB] ,\n2024-01-14 18:42:00 , 5 , 70 ,\n"
    assert used(read(HEADER + ROWS + old), "gpu") == [3543 * MIB, 3600 * MIB, 70 * MIB]
    oldest = old.replace("Memory Used", "Memory Usage")
    assert used(read(oldest), "gpu") == [70 * MIB]


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ("Date , GPU Clock [MHz] ,\n2024-01-14 18:41:07 , 300.0 ,\n", r"line 1: no column Memory Used \[MB\]; enable"),
        (HEADER, "contains no readings"),
        (HEADER + "2024-01-14 18:41:07 , 1 , 2 , much ,\n", "malformed"),
    ],
)
def test_unusable_log_is_refused(log: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        read(log)
