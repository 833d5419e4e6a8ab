from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpumond.agent.adapters import ADAPTERS
from gpumond.cli.doctor_checks import Finding, daemon, pid_namespace
from gpumond.host.peer_credentials import INITIAL_PID_NAMESPACE
from gpumond.model.remedies import CONDITIONS, FAULTS
from tests.top.test_stuck_processes import a_holding

DOWN = {"name": "nvml", "up": False, "reason": "driver_not_loaded"}


def asked(*processes: dict[str, Any], **status: Any) -> dict[str, Finding]:
    """Return doctor's findings for these daemon responses, the last one of each subject."""
    source = {"name": "nvml", "up": True, "reason": "", "detail": ""}
    said = {"version": "1", "source": source, "faults": [], "conditions": []} | status
    answers = {"/api/v1/status": said, "/api/v1/agents": [], "/api/v1/processes": processes}
    return {finding.subject: finding for finding in daemon(answers.__getitem__)}


def test_a_source_that_is_down_is_said_once_and_its_mend_apart():
    detail = f"the NVIDIA kernel module is not loaded: {FAULTS['driver_not_loaded']}"
    fault = {"source": "nvml", "kind": "driver_not_loaded", "device_uuid": None, "detail": detail, "remedy": "m"}
    found = asked(source=DOWN | {"detail": detail}, faults=[fault])
    assert "fault" not in found
    assert found["daemon"].detail.endswith("driver_not_loaded: the NVIDIA kernel module is not loaded")
    assert found["daemon"].remedy == FAULTS["driver_not_loaded"]


def test_every_fault_and_condition_of_the_daemon_is_said_with_its_mend():
    fault = {"source": "nvml", "kind": "left_out", "device_uuid": "GPU-a", "detail": "device 0", "remedy": "do this"}
    condition = {"device_uuid": "GPU-a", "kind": "mps", "remedy": "do that"}
    found = asked(faults=[fault], conditions=[condition])
    assert found["fault"] == Finding("fault", "bad", "GPU-a: left_out: device 0", "do this")
    assert found["condition"] == Finding("condition", "note", "GPU-a: mps", "do that")


@pytest.mark.parametrize(("fields", "state"), [({"orphaned": True}, "note"), ({"state": "zombie"}, "bad")])
def test_process_intended_to_hold_memory_is_not_a_fault(fields: dict[str, Any], state: str):
    assert asked(a_holding(**fields))["process"].state == state


def test_a_pid_namespace_of_its_own_is_told_from_the_hosts(tmp_path: Path):
    assert pid_namespace(str(tmp_path)).state == "note"
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    found = pid_namespace(str(tmp_path))
    assert (found.state, found.remedy) == ("note", CONDITIONS["private_pid_namespace"])
    if os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE:
        assert pid_namespace("/proc").state == "good"


def test_each_library_that_is_installed_has_the_names_of_its_packages():
    assert [spec.library for spec in ADAPTERS if not spec.packages and "." not in spec.library] == []
