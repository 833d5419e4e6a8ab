"""Scrolling tables of nvidia-smi dmon and pmon, and of dcgmi dmon."""

from __future__ import annotations

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.features.recordings.reader import parse_time
from tests.helpers.agents import GIB
from tests.recordings.reading import elapsed, read, read_with_notices, used
from tests.recordings.samples import DMON

MIB = 1024**2
PMON = """\
# gpu         pid  type    sm    mem    enc    dec     fb    command
# Idx           #   C/G     %      %      %      %     MB    name
    0       1234     C    50     30      -      -    800    python train.py
    0       1235   C+G     -      -      -      -      -    Xorg
    1          -     -     -      -      -      -      -    -
    0       1234     C    51     30      -      -    801    python train.py
    1         77     C     9      1      -      -     90    other
"""
DCGMI = """\
#Entity   GPUTL             FBTTL             FBUSD             POWER
ID                                                              W
GPU 0     75                24576             2048              185.300
GPU 1     N/A               24576             N/A               185.300
GPU 0     76                24576             2049              185.300
GPU 1     3                 24576             9                 185.300

dmon was stopped do to receiving a signal
"""


def processes(read_snapshot: object) -> list[tuple[int, int | None, str | None]]:
    return [(p.pid, p.used_bytes, p.comm) for device in read_snapshot.devices for p in device.processes or ()]  # type: ignore[attr-defined]


def test_dmon_has_memory_in_mib_and_the_utilization_of_the_device():
    snapshots = read(DMON)
    assert [snapshot.taken_at for snapshot in snapshots] == [parse_time(f"2024-01-04 13:54:3{s}") for s in (5, 6)]
    assert (used(snapshots, "gpu0"), used(snapshots, "gpu1")) == ([239 * MIB, 240 * MIB], [None, 17 * MIB])
    assert [device.sensors.gpu_utilization_ratio for device in snapshots[0].devices] == [0.06, None]
    assert [(device.index, device.processes, device.size_bytes) for device in snapshots[0].devices] == [
        (0, None, None),
        (1, None, None),
    ]


@pytest.mark.parametrize(
    "log",
    [
        "#Date, Time, gpu, fb, sm\n#YYYYMMDD, HH:MM:SS, Idx, MB, %\n20240104, 13:54:35, 0, 239, 6\n"
        "20240104, 13:54:36, 0, 240, 6\n",
        "#Time        gpu     fb\n#HH:MM:SS    Idx     MB\n 13:54:35      0    239\n 13:54:36      0    240\n",
        DMON.replace("#YYYYMMDD", "#YYYYMMDD", 1) + DMON.splitlines()[0] + "\n",
    ],
    ids=["csv", "time-only", "header-again"],
)
def test_dmon_may_have_other_separators_and_times(log: str):
    snapshots = read(log)
    assert (used(snapshots, "gpu0"), elapsed(snapshots)) == ([239 * MIB, 240 * MIB], [0.0, 1.0])


def test_time_of_day_continues_after_midnight():
    log = "#Time        gpu     fb\n 23:59:59      0    239\n 00:00:00      0    240\n 00:00:01      0    241\n"
    assert elapsed(read(log)) == [0.0, 1.0, 2.0]


def test_pmon_has_processes_and_their_memory():
    snapshots = read(PMON, interval_seconds=2.0)
    assert elapsed(snapshots) == [0.0, 2.0]
    assert processes(snapshots[0]) == [(1234, 800 * MIB, "python train.py"), (1235, None, "Xorg")]
    assert processes(snapshots[1]) == [(1234, 801 * MIB, "python train.py"), (77, 90 * MIB, "other")]
    assert (used(snapshots, "gpu0"), used(snapshots, "gpu1")) == ([800 * MIB, 801 * MIB], [None, 90 * MIB])


def test_column_of_memory_may_precede_the_others_in_pmon():
    log = "# gpu        pid  type    fb    sm   command\n    0     447153     C  7669     -   python3.9,x\n"
    assert processes(read(log, interval_seconds=1.0)[0]) == [(447153, 7669 * MIB, "python3.9,x")]


def test_dcgmi_dmon_has_devices_with_their_sizes():
    snapshots, notices = read_with_notices(DCGMI, interval_seconds=0.5)
    assert elapsed(snapshots) == [0.0, 0.5]
    assert (used(snapshots, "gpu0"), used(snapshots, "gpu1")) == ([2 * GIB, 2049 * MIB], [None, 9 * MIB])
    assert {device.size_bytes for device in snapshots[0].devices} == {24 * GIB}
    assert [device.sensors.gpu_utilization_ratio for device in snapshots[1].devices] == [0.76, 0.03]
    assert notices == ["line 8: the program reported: dmon was stopped do to receiving a signal"]


def test_dcgmi_dmon_without_used_memory_has_size_minus_free_and_reserved():
    log = "#Entity   FBTTL  FBFRE  FBRSV\nID\nGPU 0     1000   300    100\nGPU-I 3   500    300    100\n"
    snapshots, notices = read_with_notices(log, interval_seconds=1.0)
    assert used(snapshots, "gpu0") == [600 * MIB]
    assert notices == ["lines about entities other than GPUs are ignored"]


@pytest.mark.parametrize(
    ("log", "interval", "complaint"),
    [
        (DCGMI, None, "line 1: no column Time.*--interval"),
        (DCGMI.replace("FBUSD", "PCITX"), 1.0, "line 1: no column of used memory.*record with"),
        ("# gpu  pid  type  sm  command\n 0  7  C  5  python\n", 1.0, "line 1: no column of used memory"),
        ("#Entity FBUSD\nGPU 0 seven\n", 1.0, "1 of 1 lines are malformed"),
        ("#Entity FBUSD\nGPU 0 1e30\n", 1.0, "isn't an amount of memory"),
        ("# gpu fb\nx\n", 1.0, "contains no readings"),
    ],
)
def test_unusable_table_is_refused_with_the_remedy(log: str, interval: float | None, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        read(log, interval_seconds=interval)
