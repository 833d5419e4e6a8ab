from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.units import duration
from gpumond.view.notices import LIKELY_MEANT, stuck
from tests.helpers.agents import GIB
from tests.helpers.frames import holding_with


@pytest.mark.parametrize(
    ("fields", "what", "remedy"),
    [
        ({"state": "zombie"}, "pid 7 (python) is a zombie and holds 3.0 GiB", "ps -o ppid= -p 7"),
        ({"state": "gone", "comm": None}, "pid 7 (unknown program) is gone and holds 3.0 GiB", "reset the GPU"),
        ({"state": "uninterruptible", "slurm_job": "47"}, "pid 7 (python in Slurm job 47) is uninterr", "dmesg"),
        ({"state": "stopped", "workload": "train"}, "pid 7 (train) is stopped", "kill -CONT 7"),
        (
            {"kinds": ["holder"], "used_bytes": None, "container_name": "web"},
            "pid 7 (python in container web)",
            "kill 7",
        ),
        ({"orphaned": True}, "pid 7 (python) is orphaned and holds 3.0 GiB", "nohup"),
        (
            {"orphaned": True, "idle_seconds": 4000.0},
            "pid 7 (python) is orphaned, idle for 1 h 7 min and holds 3.0 GiB",
            "kill 7",
        ),
        ({"kinds": ["holder"], "used_bytes": None, "orphaned": True}, "pid 7 (python) is not listed", "kill 7"),
        ({"state": "zombie", "orphaned": True}, "pid 7 (python) is a zombie and holds 3.0 GiB", "parent"),
        (
            {"idle_seconds": 2040.0, "unit": "web.service"},
            "pid 7 (python in unit web.service) is idle for 34 min",
            "--pid 7",
        ),
    ],
)
def test_stuck_process_is_named_with_its_remedy(fields: dict[str, Any], what: str, remedy: str):
    (entry,) = stuck([holding_with(**fields), holding_with(**fields)])
    assert entry.what.startswith(what)
    assert remedy in entry.remedy


def test_healthy_processes_are_not_stuck():
    well = [{}, {"state": None}, {"idle_seconds": 1799.0}, {"idle_seconds": 9999.0, "used_bytes": GIB - 1}]
    well += [{"orphaned": False}, {"idle_seconds": 9999.0, "used_bytes": None}]
    assert list(stuck([holding_with(pid, **fields) for pid, fields in enumerate(well)])) == []


def test_intended_kinds_are_distinguished():
    kinds = [entry.kind for entry in stuck([holding_with(1, orphaned=True), holding_with(2, state="zombie")])]
    assert [kind in LIKELY_MEANT for kind in kinds] == [True, False]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (60, "1 min"),
        (99, "1 min 39 s"),
        (179, "2 min 59 s"),
        (599.4, "9 min 59 s"),
        (599.6, "10 min"),
        (629, "10 min"),
        (630, "11 min"),
        (1380, "23 min"),
        (3569, "59 min"),
        (3599, "1 h"),
        (7500, "2 h 5 min"),
        (86399, "1 d"),
        (273600, "3 d 4 h"),
        (273600 + 1801, "3 d 5 h"),
    ],
)
def test_duration_is_readable(seconds: float, text: str):
    assert duration(seconds) == text
