"""Reports in HTML: one well-formed file without scripts, external resources and unescaped text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpumond.features.baselines.command import _html_page
from gpumond.features.baselines.statistics import Comparison, Difference
from gpumond.view import html_report
from tests.helpers.agents import GIB
from tests.helpers.html_document import checked
from tests.helpers.running import gpumond_here

HOSTILE = '<script>alert("x")</script>\x1b[31m'


def diagnose(*arguments: str) -> subprocess.CompletedProcess[str]:
    return gpumond_here("diagnose", *arguments)


def leak() -> str:
    """Return a log with a leak of 60 MiB a minute on one device, and a constant use of another, with a hostile name."""
    header = "timestamp, uuid, name, memory.used [MiB], memory.total [MiB]\n"
    seconds = range(3000)
    times = [(each, f"2024/05/01 {12 + each // 3600}:{each // 60 % 60:02}:{each % 60:02}") for each in seconds]
    return header + "".join(
        f"{time}, GPU-a, H100, {20_000 + max(0, second - 600)} MiB, 40960 MiB\n"
        f"{time}, GPU-b, {HOSTILE.replace(',', '')}, 7 MiB, 40960 MiB\n"
        for second, time in times
    )


def test_diagnose_writes_charts_and_verdicts_and_prints_the_same_text(tmp_path: Path):
    log, report = tmp_path / "smi.csv", tmp_path / "report.html"
    log.write_text(leak())
    printed = diagnose(str(log))
    assert diagnose(str(log), "--html", str(report)).stdout == printed.stdout
    found = checked(report.read_text(encoding="utf-8"))
    assert found.tags.count("svg") == 2
    assert found.tags.count("h2") == 2
    assert "leak" in found.texts
    assert any(text.startswith("found:") and "1 leak" in text for text in found.texts)
    assert any(text.startswith("GPU-b") and "alert(" in text for text in found.texts)
    assert "top" in found.attributes["class"]
    assert "mark" in found.attributes["class"]


def test_html_and_json_are_written_together(tmp_path: Path):
    log, report = tmp_path / "smi.csv", tmp_path / "report.html"
    log.write_text("time,uuid,pid,used_bytes\n0,GPU-a,,5\n1,GPU-a,,6\n")
    done = diagnose(str(log), "--json", "--html", str(report))
    assert (done.returncode, done.stdout) == (0, "")
    checked(report.read_text(encoding="utf-8"))


def test_directory_that_does_not_exist_is_refused_before_the_log_is_read(tmp_path: Path):
    done = diagnose("no-such-log", "--html", str(tmp_path / "no" / "report.html"))
    assert done.returncode == 2
    assert "isn't a directory" in done.stderr


@pytest.mark.parametrize(
    ("points", "lines"),
    [
        ([(0.0, 5.0)], 1),
        ([(float(second), 5.0) for second in range(100)], 1),
        ([(float(second), 5.0) for second in (*range(50), *range(80, 130))], 2),
        ([], 0),
    ],
)
def test_gap_interrupts_the_line(points: list[tuple[float, float]], lines: int):
    assert html_report.curve(points, None, ()).count("<polyline") == lines


def test_comparison_has_a_table_and_bars_for_each_workload():
    def difference(workload: str, measure: str, stat: str, before: float | None, after: float | None) -> Difference:
        change = None if before is None or after is None else after - before
        return Difference(workload, measure, stat, before, after, change)

    comparison = Comparison(
        name="nightly",
        before_started_at=0.0,
        after_started_at=90_000.0,
        before_seconds=600.0,
        after_seconds=100.0,
        complete=True,
        differences=(
            difference(HOSTILE, "used", "typical", 2 * GIB, 3 * GIB),
            difference(HOSTILE, "used", "peak", 4 * GIB, None),
            difference(HOSTILE, "utilization", "typical", 0.5, 0.25),
            difference("gone", "live", "typical", GIB, None),
        ),
    )
    found = checked(_html_page(comparison))
    assert found.tags.count("svg") == 2
    assert found.tags.count("rect") == 3
    assert found.attributes["class"].count("peak") == 1
    assert {"2.0 GiB", "3.0 GiB", "50.0%", "peak 4.0 GiB"} <= set(found.texts)
    assert any("aren't comparable" in text for text in found.texts)
