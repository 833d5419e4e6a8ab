from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gpumond.agent.allocators.adapters import ADAPTERS
from gpumond.commands.doctor import (
    Finding,
    access_remedy,
    check_daemon,
    check_device_nodes,
    check_driver,
    check_other_socket,
    check_pid_namespace,
    examine,
)
from gpumond.facts.errors import CONDITION_REMEDIES, FAULT_REMEDIES
from gpumond.features.engines.ownership import PTRACE_REMEDY
from gpumond.host.machine import INITIAL_PID_NAMESPACE
from tests.helpers.frames import holding_with

NOBODY = 65534


def test_missing_driver_is_no_fault_where_the_daemon_reads_simulated_devices():
    real, simulated = (next(each for each in check_driver(only) if each.subject == "driver") for only in (False, True))
    if real.state == "bad":  # on a machine without a driver
        assert (simulated.state, simulated.remedy) == ("note", "")
        assert simulated.detail == f"{real.detail}; the daemon reads simulated GPUs"


DOWN = {"name": "nvml", "up": False, "reason": "driver_not_loaded"}


def findings(*processes: dict[str, Any], engines: Sequence[dict[str, Any]] = (), **status: Any) -> dict[str, Finding]:
    """Return doctor's findings for these daemon responses, the last one of each subject."""
    answers = responses(*processes, engines=engines, **status)
    return {finding.subject: finding for finding in check_daemon(answers.__getitem__)}


def responses(*processes: dict[str, Any], engines: Sequence[dict[str, Any]] = (), **status: Any) -> dict[str, Any]:
    source = {"name": "nvml", "up": True, "reason": "", "detail": ""}
    answer = {"version": "1", "source": source, "faults": [], "conditions": []} | status
    answers = {"/api/v1/status": answer, "/api/v1/agents": [], "/api/v1/processes": processes}
    return answers | {"/api/v1/engines": engines}


def test_source_that_is_down_is_one_finding_with_its_remedy():
    detail = f"the NVIDIA kernel module isn't loaded: {FAULT_REMEDIES['driver_not_loaded']}"
    fault = {"source": "nvml", "kind": "driver_not_loaded", "device_uuid": None, "detail": detail, "remedy": "m"}
    found = findings(source=DOWN | {"detail": detail}, faults=[fault])
    assert "fault" not in found
    assert found["daemon"].detail.endswith("driver_not_loaded: the NVIDIA kernel module isn't loaded")
    assert found["daemon"].remedy == FAULT_REMEDIES["driver_not_loaded"]


def test_faults_and_conditions_of_the_daemon_are_findings_with_their_remedies():
    fault = {"source": "nvml", "kind": "skipped", "device_uuid": "GPU-a", "detail": "device 0", "remedy": "do this"}
    condition = {"device_uuid": "GPU-a", "kind": "mps", "remedy": "do that"}
    found = findings(faults=[fault], conditions=[condition])
    assert found["fault"] == Finding("fault", "bad", "GPU-a: skipped: device 0", "do this")
    assert found["condition"] == Finding("condition", "note", "GPU-a: mps", "do that")


@pytest.mark.parametrize(("fields", "state"), [({"orphaned": True}, "note"), ({"state": "zombie"}, "bad")])
def test_process_intended_to_hold_memory_is_not_a_fault(fields: dict[str, Any], state: str):
    assert findings(holding_with(**fields))["process"].state == state


def test_capability_that_hides_a_server_is_named_with_the_lines_to_add():
    own = {"name": "chat", "kind": "vllm", "problem": "", "processes_problem": ""}
    hidden = own | {
        "processes_problem": f"its listener is hidden, and the daemon lacks CAP_SYS_PTRACE: {PTRACE_REMEDY}"
    }
    assert findings(engines=[own])["engine chat"] == Finding("engine chat", "good", "vllm responds")
    found = findings(engines=[hidden])["engine chat"]
    assert found.detail.endswith("the daemon lacks CAP_SYS_PTRACE")
    assert "AmbientCapabilities=CAP_SYS_PTRACE" in found.remedy
    pinned = findings(engines=[own | {"pinned_uid": 7}])["engine chat"]
    assert (pinned.state, pinned.remedy) == ("note", "set user: to the server's user")
    out = own | {"out_of_service_seconds": 12.0, "out_of_service_reason": "HTTP status 500"}
    assert findings(engines=[out])["engine chat"] == Finding(
        "engine chat", "bad", "the engine isn't back in service after a release: HTTP status 500"
    )
    silent = findings(engines=[own | {"problem": "nothing is listening"}])["engine chat"]
    assert (silent.state, silent.detail) == ("note", "nothing is listening")


@pytest.mark.parametrize(
    ("mode", "group", "is_member", "remedy"),
    [
        (0o660, "video", False, "usermod -aG video research"),
        (0o660, "video", True, "device rules"),
        (0o666, "root", False, "device rules"),
        (0o600, "root", False, "NVreg_DeviceFileMode=0666"),
        (0o660, "root", False, "NVreg_DeviceFileMode=0666"),
    ],
)
def test_closed_device_nodes_have_a_remedy_for_their_mode(mode: int, group: str, is_member: bool, remedy: str):
    assert remedy in access_remedy(mode, group, is_member, "research")


def as_a_user(directory: str) -> list[Finding]:
    """Return the findings of a user other than root, who can open every file."""
    become = partial(os.setuid, NOBODY) if os.geteuid() == 0 else None
    with ProcessPoolExecutor(1, get_context("fork"), become) as pool:
        return pool.submit(found_in, directory).result()


def found_in(directory: str) -> list[Finding]:
    return list(check_device_nodes(directory))


def test_device_nodes_are_counted(tmp_path: Path):
    assert list(check_device_nodes(os.fspath(tmp_path))) == []
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia-caps").mkdir()
    (found,) = check_device_nodes(os.fspath(tmp_path))
    assert (found.state, found.remedy) == ("good", "")


def test_closed_device_node_is_named_with_its_group():
    with TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        (Path(directory) / "nvidia0").touch(0o000)
        (found,) = as_a_user(directory)
    assert found.state == "bad"
    assert found.detail.endswith(", 0000)")
    assert "NVreg_DeviceFileMode" in found.remedy


def test_private_pid_namespace_is_distinguished_from_the_hosts(tmp_path: Path):
    assert check_pid_namespace(str(tmp_path)).state == "note"
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    found = check_pid_namespace(str(tmp_path))
    assert (found.state, found.remedy) == ("note", CONDITION_REMEDIES["private_pid_namespace"])
    if os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE:
        assert check_pid_namespace("/proc").state == "good"


def test_each_library_with_an_adapter_has_the_names_of_its_packages():
    assert [spec.library for spec in ADAPTERS if not spec.packages and "." not in spec.library] == []


def test_daemon_with_its_socket_elsewhere_names_the_variable(tmp_path: Path):
    path, linked = tmp_path / "agent.sock", tmp_path / "linked.sock"
    path.touch()
    linked.symlink_to(path)
    (found,) = check_other_socket(str(path), {"HOME": str(tmp_path)})
    assert (found.subject, found.state) == ("agent socket", "bad")
    assert found.remedy == f"set GPUMOND_SOCKET={path} for your programs"
    for environ in ({"GPUMOND_SOCKET": str(path)}, {"GPUMOND_SOCKET": str(linked)}):
        assert not [*check_other_socket(str(path), environ)]
    assert not [*check_other_socket(str(tmp_path / "of-another-machine.sock"), {})]
    assert not [*check_other_socket(None, {})]


def test_running_daemon_with_its_socket_elsewhere_is_one_finding(tmp_path: Path):
    path = tmp_path / "agent.sock"
    path.touch()
    found = examine(responses(agent_socket=str(path)).__getitem__)
    assert [each.state for each in found if each.subject == "agent socket"] == ["bad"]
