"""Logs of nvidia-smi."""

from __future__ import annotations

import gzip

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.facts.snapshot import Snapshot
from tests.recordings.reading import elapsed, read, read_with_notices, used
from tests.recordings.samples import PROCESSES, UUID, WITH_UNITS

MIB = 1024**2
AT = 1714564800.123
"""2024-05-01 12:00:00.123 UTC"""

WITHOUT_UNITS = WITH_UNITS.replace(" MiB,", ",").replace(" %\n", "\n")
ANOTHER_ORDER = f"""\
memory.total [MiB], utilization.gpu [%], temperature.gpu, memory.used [MiB], timestamp, uuid
81559, 7, 45, 500, 2024/05/01 12:00:00.123, {UUID}
81559, 8, 45, 501, 2024/05/01 12:00:01.123, {UUID}
"""
HEADER_AGAIN = WITH_UNITS + "\n" + WITH_UNITS.splitlines()[0] + "\n"


@pytest.mark.parametrize(
    "log",
    [
        WITH_UNITS,
        WITHOUT_UNITS,
        ANOTHER_ORDER,
        HEADER_AGAIN,
        WITH_UNITS.replace("\n", "\r\n"),
        b"\xef\xbb\xbf" + WITH_UNITS.encode(),
        WITH_UNITS.encode("utf-16"),
        gzip.compress(WITH_UNITS.encode()),
        WITH_UNITS + "2024/05/01 12:00:02.123, " + UUID + ", 10",
        "\n\n" + WITH_UNITS,
    ],
    ids=["units", "nounits", "order", "repeated", "crlf", "bom", "utf16", "gzip", "half", "blank"],
)
def test_equal_readings_in_different_notations_are_equal(log: str | bytes):
    snapshots = read(log)
    assert [(round(s.taken_at, 3), s.devices[0].uuid) for s in snapshots] == [(AT, UUID), (AT + 1, UUID)]
    assert used(snapshots, UUID) == [500 * MIB, 501 * MIB]
    device = snapshots[0].devices[0]
    assert device.size_bytes == 81559 * MIB
    assert device.processes is None
    assert device.sensors.gpu_utilization_ratio in (0.07, None)


def test_units_other_than_mebibytes_are_converted():
    log = "timestamp, uuid, memory.used [GiB]\n2024/05/01 12:00:00, GPU-a, 2\n2024/05/01 12:00:01, GPU-a, 2048 KiB\n"
    assert used(read(log), "GPU-a") == [2 * 1024 * MIB, 2 * MIB]


@pytest.mark.parametrize("cell", ["[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "N/A", "ERR!"])
def test_absent_values_are_unknown_and_not_zero(cell: str):
    snapshots = read(WITH_UNITS.replace("501 MiB", cell))
    assert used(snapshots, UUID) == [500 * MIB, None]


def test_used_follows_from_size_and_free():
    log = "timestamp, uuid, memory.total [MiB], memory.free [MiB], memory.reserved [MiB]\n"
    log += "2024/05/01 12:00:00, GPU-a, 1000 MiB, 700 MiB, 100 MiB\n"
    assert used(read(log), "GPU-a") == [200 * MIB]


def many(identity: str, *devices: str) -> str:
    rows = [
        f"2024/05/01 12:00:0{second}.{100 + place:03}, {device}, {place * 100 + second} MiB, 1000 MiB"
        for second in range(3)
        for place, device in enumerate(devices)
    ]
    return "\n".join([f"timestamp, {identity}, memory.used [MiB], memory.total [MiB]", *rows, ""])


@pytest.mark.parametrize(
    ("identity", "devices", "uuids"),
    [
        ("uuid", ("GPU-a", "GPU-b"), ("GPU-a", "GPU-b")),
        ("index", ("0", "1"), ("gpu0", "gpu1")),
        ("pci.bus_id", ("00000000:1B:00.0", "00000000:1C:00.0"), ("00000000:1B:00.0", "00000000:1C:00.0")),
    ],
)
def test_devices_of_one_reading_are_one_snapshot(identity: str, devices: tuple[str, ...], uuids: tuple[str, ...]):
    snapshots = read(many(identity, *devices))
    assert elapsed(snapshots) == [0, 1, 2]
    assert [tuple(device.uuid for device in snapshot.devices) for snapshot in snapshots] == [uuids] * 3
    assert used(snapshots, uuids[1]) == [100 * MIB, 101 * MIB, 102 * MIB]


def test_devices_without_a_distinguishing_column_are_refused():
    log = "\n".join(line.replace(" x,", "") for line in many("x", "x", "x").replace(", x,", ",").splitlines()) + "\n"
    with pytest.raises(ConfigError, match=r"line 3: two readings at one time.*add uuid, index or pci\.bus_id"):
        read(log)


def test_replaced_device_is_another_device():
    rows = [f"2024/05/01 12:00:0{n}, 0, {card}, 5 MiB, {size} MiB" for n, (card, size) in enumerate(DEVICES)]
    snapshots = read("\n".join(["timestamp, index, name, memory.used [MiB], memory.total [MiB]", *rows, ""]))
    assert [snapshot.devices[-1].uuid for snapshot in snapshots] == ["gpu0", "gpu0", "gpu0#2"]
    assert snapshots[-1].devices[-1].size_bytes == 40000 * MIB


DEVICES = (("Tesla T4", 15360), ("Tesla T4", 15360), ("NVIDIA A100", 40000))


def test_messages_between_readings_are_not_malformed_lines():
    message = "Unable to determine the device handle for GPU0000:1B:00.0: GPU is lost.  Reboot the system.\n"
    snapshots, remarks = read_with_notices(WITH_UNITS + message * 50)
    assert len(snapshots) == 2
    assert [remark for remark in remarks if "line 4: nvidia-smi reported: Unable to" in remark]


def processes(snapshot: Snapshot) -> list[tuple[int, int | None, str | None]]:
    return [(p.pid, p.used_bytes, p.comm) for device in snapshot.devices for p in device.processes or ()]


def test_log_of_processes_lists_them():
    log = PROCESSES.replace("python, serve.py", "python")
    assert [processes(snapshot) for snapshot in read(log)] == [
        [(7, 100 * MIB, "python"), (8, 50 * MIB, "/usr/bin/x")],
        [(7, 110 * MIB, "python")],
        [(7, 120 * MIB, "python"), (8, 60 * MIB, "/usr/bin/x")],
    ]
    snapshots, remarks = read_with_notices(log)
    assert used(snapshots, "GPU-a") == [150 * MIB, 110 * MIB, 180 * MIB]
    assert remarks == ["the log has no used memory for a device: the sum of its processes is used instead"]


def test_program_name_with_a_comma_is_complete():
    log = PROCESSES.replace("/usr/bin/x", "x").replace("8, x", "8, python, other.py")
    first, *rest = log.splitlines()
    snapshots = read("\n".join([first, "2024/05/01 11:59:59.100, GPU-a, 7, python, 90 MiB", *rest, ""]))
    assert processes(snapshots[1])[0] == (7, 100 * MIB, "python, serve.py")


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ("timestamp, name\n2024/05/01 12:00:00, T4\n", r"line 1: no column memory\.used.*--query-gpu=timestamp"),
        ("uuid, memory.used [MiB]\nGPU-a, 5 MiB\n", r"line 1: no column timestamp.*--interval, such as 5s"),
        (
            "+-----------------------------------------+\n| NVIDIA-SMI 550 |\n",
            r"line 2: this table has no timestamp.*--interval, such as 5s",
        ),
        ("Sat Jan 24 21:52:14 2026\n", "contains no readings"),
        ("Sat Feb 31 21:52:14 2026\n", "isn't a time"),
        ("# gpu    pwr  gtemp\n# Idx      W      C\n", r"line 1: no column of used memory.*record with"),
        ("# gpu  fb\n# Idx  MB\n 0  7\n", r"line 1: no column Time.*--interval, such as 1s"),
        ("==============NVSMI LOG==============\n", r"line 1: this is the output of nvidia-smi -q.*record with"),
        (WITHOUT_UNITS.split("\n", 1)[1], r"line 1: no header; insert the names passed to --query-gpu"),
        ("GPUId,TimeStampUs,Field,Values\n0,1,203,5\n", r"line 1: none of the columns GPUId.* is known"),
        ("\x1b[?1049h, 1\x1b[22;0;0t\n", r"line 1: terminal output"),
        ("[key] -> value\n", r"line 1: .* isn't in a known log format"),
        ("", "the log is empty"),
        (WITH_UNITS.splitlines()[0] + "\n", "contains no readings"),
    ],
)
def test_unusable_log_is_refused_with_the_remedy(log: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        read(log)


def test_log_without_timestamps_needs_only_the_interval():
    log = "index, memory.used [MiB], memory.total [MiB]\n" + "0, 5 MiB, 9000 MiB\n1, 6 MiB, 9000 MiB\n" * 3
    snapshots = read(log, interval_seconds=5.0)
    assert elapsed(snapshots) == [0, 5, 10]
    assert [len(snapshot.devices) for snapshot in snapshots] == [2, 2, 2]


def test_malformed_line_is_skipped_with_a_notice():
    rows = "".join(f"2024/05/01 12:00:{s:02}, GPU-a, {s} MiB\n" for s in range(20))
    log = "timestamp, uuid, memory.used [MiB]\n" + rows.replace("05, GPU-a, 5 MiB", "05, GPU-a, lots")
    snapshots, remarks = read_with_notices(log)
    assert len(snapshots) == 19
    assert [remark for remark in remarks if remark.startswith("ignored: 1 malformed line") and "line 7: " in remark]


def test_mostly_malformed_log_is_refused_with_the_first_such_line():
    rows = "".join(f"2024/05/01 12:00:{s:02}, GPU-a, {'lots' if s % 5 == 3 else s}\n" for s in range(20))
    with pytest.raises(ConfigError, match="4 of 20 lines are malformed, more than a tenth; the first is line 5"):
        read("timestamp, uuid, memory.used [MiB]\n" + rows)
