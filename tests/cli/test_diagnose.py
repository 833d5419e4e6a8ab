"""``gpumond diagnose``: its output, exit codes and sources."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.units import GIB
from gpumond.features.recordings.diagnose import Findings
from tests.helpers.running import gpumond_here
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

MIB = 1024**2
HEADER = "timestamp, index, uuid, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB]"
START = datetime(2024, 5, 1, 12)
KEYS = ["time", "uuid", "pid", "kind", "onset", "slope_bytes_per_second", "time_to_full_seconds", "evidence"]


def rows(count: int, used: Any, size: str = "40960 MiB") -> list[str]:
    noise = random.Random(1)
    return [
        f"{START + timedelta(seconds=s):%Y/%m/%d %H:%M:%S}.120, 0, GPU-a, NVIDIA A100, {noise.randint(80, 99)} %,"
        f" {used(s)} MiB, {size}"
        for s in range(count)
    ]


def leaking(second: int) -> int:
    """60 MiB a minute for 40 minutes, after 10 minutes without growth."""
    return 20_000 + max(0, second - 600)


def log(*lines: str) -> str:
    return "\n".join([HEADER, *lines, ""])


LEAK = log(*rows(3000, leaking))


def diagnose(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    return gpumond_here("diagnose", *arguments, stdin=stdin.encode() if isinstance(stdin, str) else stdin)


def changes(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_linear_leak_is_found_with_its_slope_and_the_time_to_full(tmp_path: Path):
    file = tmp_path / "smi.csv"
    file.write_text(LEAK)
    transitions = changes(diagnose(str(file), "--json"))
    assert all(list(change) == KEYS for change in transitions)
    (leak,) = [change for change in transitions if change["kind"] == "leak" and change["onset"]]
    assert (leak["uuid"], leak["pid"]) == ("GPU-a", None)
    assert leak["slope_bytes_per_second"] == pytest.approx(MIB, rel=0.2)
    left = (40_960 - leaking(int(leak["time"] - 1714564800))) * MIB / MIB
    assert left / 2 < leak["time_to_full_seconds"] < left * 2
    assert 1714564800 + 600 < leak["time"] <= 1714564800 + 600 + 1800
    assert isinstance(leak["evidence"], dict)


def test_constant_memory_is_no_leak():
    transitions = changes(diagnose("-", "--json", stdin=log(*rows(3000, lambda second: 20_000 + second % 3))))
    assert not [change for change in transitions if change["kind"] in ("leak", "pressure", "crash", "fragmentation")]


@pytest.mark.parametrize("data", [LEAK.encode(), gzip.compress(LEAK.encode()), LEAK.encode("utf-16")])
def test_output_does_not_depend_on_the_source_of_the_log(data: bytes, tmp_path: Path):
    file = tmp_path / "log"
    file.write_text(LEAK)
    assert diagnose("-", "--json", stdin=data).stdout == diagnose(str(file), "--json").stdout != ""


def test_log_without_the_capacity_has_no_time_to_full_and_a_note():
    log_without = "\n".join(line.rsplit(",", 1)[0] for line in LEAK.splitlines()) + "\n"
    blind = diagnose("-", "--json", stdin=log_without)
    assert "pass it with --size SIZE" in blind.stderr
    assert {change["time_to_full_seconds"] for change in changes(blind)} == {None}
    sized = diagnose("-", "--json", "--size", "40GiB", stdin=log_without)
    assert "capacity" not in sized.stderr
    assert sized.stdout == diagnose("-", "--json", stdin=LEAK).stdout


def test_report_has_a_chart_the_verdicts_and_a_conclusion():
    done = diagnose("-", stdin=LEAK)
    report = done.stdout
    lines = report.splitlines()
    assert lines[0].startswith("GPU-a  GPU 0 NVIDIA A100  peak 21.9 GiB used")
    assert max(len(line) for line in lines[1:6]) <= 72
    assert "█" in report
    assert [line for line in lines if line.startswith("  2024-05-01 12:") and " leak: " in line]
    assert lines[-2] == "3000 readings over 50 min: 1 device, 0 processes"
    assert lines[-1].startswith("found: 1 leak")
    assert all(line.endswith(" snapshots read") for line in done.stderr.splitlines()), "the progress of a slow machine"


def test_a_recording_names_the_workload_and_the_measure_of_each_chart():
    """The agent connects after the first reading, and has two allocators."""
    device = make_device("GPU-a", used_bytes=6 * GIB, processes=(make_process(10, 6 * GIB, comm="python"),))
    pools = (make_pool("GPU-a", live=2 * GIB, cached=GIB), make_pool("GPU-a", live=GIB, cached=0, allocator="cupy"))
    report = make_report(10, pools, workload="train-llm")
    findings = Findings()
    for second, reports in enumerate(((), (report,), (report,), ())):
        findings.add_snapshot(make_snapshot(device, reports=reports, elapsed_seconds=float(second), seq=second + 1))
    titles = [line for line in findings.report() if "peak" in line]
    assert titles[0].endswith("  peak 6.0 GiB used")
    assert titles[1] == ("GPU-a pid 10  train-llm  peak 3.0 GiB live, 6.0 GiB used (the chart shows live memory)")


def test_terminal_without_unicode_gets_ascii():
    command = [sys.executable, "-m", "gpumond", "diagnose", "-"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, input=LEAK.encode(), env=environ, capture_output=True, timeout=60)
    assert done.stdout.isascii()


def test_lines_are_printed_as_verdicts_occur():
    command = [sys.executable, "-m", "gpumond", "diagnose", "-", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LEAK)
        process.stdin.flush()
        first = process.stdout.readline()
        assert json.loads(first)["onset"] is True
        process.stdin.close()
        process.stdout.read()


@pytest.mark.parametrize(
    ("data", "arguments", "complaint"),
    [
        ("", (), "standard input: the log is empty"),
        ("timestamp, name\n2024/05/01 12:00:00, x\n", (), "line 1: no column memory.used"),
        ("time,uuid,pid,used_bytes\n0,a,,5\n1,a,,lots\n", (), "line 3: 'lots' isn't an amount of memory"),
        (LEAK, ("--size", "lots"), "--size 'lots': expected a size"),
        (LEAK, ("--size", "0"), "--size '0': must be above 0"),
        (LEAK, ("--interval", "x"), "--interval 'x': expected a duration"),
        (LEAK, ("--format", "prometheus"), "line 1: not JSON"),
        (gzip.compress(LEAK.encode())[:-8] + bytes(8), (), "can't be read: CRC check failed"),
    ],
)
def test_unusable_log_exits_with_2_and_a_reason(data: str | bytes, arguments: tuple[str, ...], complaint: str):
    refused = diagnose("-", *arguments, stdin=data)
    assert refused.returncode == 2
    assert complaint in refused.stderr
    assert "Traceback" not in refused.stderr


def test_missing_file_exits_with_2():
    refused = diagnose("/nowhere/log.csv")
    remedy = "expected a log of memory use; `gpumond record --out FILE` writes one"
    assert refused.stderr == f"gpumond: /nowhere/log.csv: No such file or directory; {remedy}\n"
    assert refused.returncode == 2


def test_truncated_compressed_log_is_read_up_to_its_end():
    done = diagnose("-", "--json", stdin=gzip.compress(LEAK.encode())[:-1000])
    assert done.returncode == 0
    assert "truncated" in done.stderr
