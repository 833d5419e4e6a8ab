from __future__ import annotations

from typing import Any

import pytest

from gpumond.stuck import stuck

GIB = 1024**3


def a_holding(pid: int = 7, **fields: Any) -> dict[str, Any]:
    names = ("container", "container_name", "pod_name", "unit", "slurm_job")
    defaults = {"comm": "python", "workload": "", "kinds": ["compute"], "used_bytes": 3 * GIB, "state": "alive"}
    return {"pid": pid, **dict.fromkeys(names), **defaults} | fields


@pytest.mark.parametrize(
    ("fields", "what", "mend"),
    [
        ({"state": "zombie"}, "pid 7 (python) is a zombie, 3.0 GiB", "ps -o ppid= -p 7"),
        ({"state": "gone", "comm": None}, "pid 7 (unknown program) is gone, 3.0 GiB", "reset the device"),
        ({"state": "uninterruptible", "slurm_job": "47"}, "pid 7 (python in Slurm job 47) is uninterr", "dmesg"),
        ({"state": "stopped", "workload": "train"}, "pid 7 (train) is stopped", "kill -CONT 7"),
        (
            {"kinds": ["holder"], "used_bytes": None, "container_name": "web"},
            "pid 7 (python in container web)",
            "kill 7",
        ),
    ],
)
def test_each_is_named_with_what_to_do(fields: dict[str, Any], what: str, mend: str):
    (entry,) = stuck([a_holding(**fields), a_holding(**fields)])
    assert entry.what.startswith(what)
    assert mend in entry.mend


def test_those_that_are_well_are_not():
    assert list(stuck([a_holding(), a_holding(state=None)])) == []
