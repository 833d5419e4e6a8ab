from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.errors import CONDITION_REMEDIES
from gpumond.facts.program import MAX_PID
from gpumond.facts.snapshot import MAX_MISSED_READINGS, Sensors
from gpumond.tick.reading_conditions import conditions, device_conditions
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, []),
        ({"unified": True}, ["unified_memory"]),
        ({"sensors": Sensors(addressing_mode="ats")}, ["coherent_memory"]),
        ({"sensors": Sensors(addressing_mode="hmm")}, []),
        ({"sensors": Sensors(virtualization_mode="vgpu")}, ["vgpu"]),
        ({"sensors": Sensors(virtualization_mode="host_vgpu")}, ["host_vgpu"]),
        ({"sensors": Sensors(virtualization_mode="host_vsga")}, ["host_vsga"]),
        ({"sensors": Sensors(virtualization_mode="passthrough")}, []),
        ({"sensors": Sensors(virtualization_mode="vgpu"), "processes": None}, ["vgpu", "no_process_list"]),
        ({"processes": (make_process(7, kinds=("mps",)),)}, ["mps"]),
        ({"processes": (make_process(7, comm="nvidia-cuda-mps-server"[:15]),)}, ["mps"]),
        ({"processes": None}, ["no_process_list"]),
        ({"reserved_bytes": None}, ["reserved_in_used"]),
        ({"reserved_bytes": None, "vendor": "amd"}, []),
        ({"reserved_bytes": None, "unified": True}, ["unified_memory"]),
        ({"unified": True, "processes": None, "missed_readings": MAX_MISSED_READINGS}, []),
    ],
)
def test_conditions_of_a_device(fields: dict[str, Any], kinds: list[str]):
    device = make_device(**{"vendor": "nvidia", "used_bytes": GIB, "reserved_bytes": 0} | fields)
    assert list(device_conditions(device)) == kinds
    assert set(kinds) <= CONDITION_REMEDIES.keys()


@pytest.mark.parametrize(
    ("vendor", "is_private", "kinds"),
    [("amd", True, ["private_pid_namespace"]), ("amd", False, []), ("amd", None, []), ("sim", True, [])],
)
def test_private_pid_namespace_is_a_condition_unless_the_device_is_simulated(
    vendor: str, is_private: bool | None, kinds: list[str]
):
    snapshot = make_snapshot(make_device(vendor=vendor), private_pid_namespace=is_private)
    assert [(each.device_uuid, each.kind) for each in conditions(snapshot)] == [(None, kind) for kind in kinds]


def test_agents_without_a_pid_are_one_condition_that_names_three_of_them():
    reports = [make_report(MAX_PID + number, start_ticks=None, uid=7, workload=f"w{number}") for number in range(1, 6)]
    snapshot = make_snapshot(reports=(make_report(MAX_PID), *reports))
    names = ", ".join(f"w{number} (uid 7, connection {MAX_PID + number})" for number in (1, 2, 3))
    assert list(conditions(snapshot)) == [(None, "agent_pid_unknown", f"{names}, 2 more")]


def test_pool_with_unknown_live_bytes_is_a_condition_of_its_device():
    unknown = make_pool(allocator="rmm", live_bytes=None, held_bytes=4 * GIB)
    snapshot = make_snapshot(make_device(), reports=(make_report(pools=(unknown,)),))
    detail = "pid 10 (train): 4.0 GiB in rmm can't be split into live and free bytes"
    assert list(conditions(snapshot)) == [("GPU-a", "live_unknown", detail)]
    unsized = make_pool(allocator="rmm", live_bytes=None, held_known=False)
    snapshot = make_snapshot(make_device(), reports=(make_report(pools=(unsized, make_pool(live=5))),))
    detail = "pid 10 (train): an unknown amount of memory in rmm can't be split into live and free bytes"
    assert list(conditions(snapshot)) == [("GPU-a", "live_unknown", detail)]


def test_program_with_rmm_and_no_pool_is_a_condition_where_it_holds_memory():
    devices = make_device(processes=(make_process(10),)), make_device("GPU-b")
    snapshot = make_snapshot(*devices, reports=(make_report(frameworks=("cudf 26.10.00", "rmm 26.10.00")),))
    detail = "pid 10 (train): RMM is loaded, but counts no bytes"
    assert list(conditions(snapshot)) == [("GPU-a", "live_unknown", detail)]
    for report in (make_report(), make_report(frameworks=("rmm 26.10.00",), pools=(make_pool(live=5),))):
        assert list(conditions(make_snapshot(*devices, reports=(report,)))) == []
