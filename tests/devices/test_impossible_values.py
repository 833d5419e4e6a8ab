from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from gpumond.devices.impossible_values import FaultCollector, ListedProcess, MemoryCounts, valid_memory, valid_usages
from gpumond.devices.nvml.sensors import GPM_METRICS
from gpumond.facts.snapshot import Fault
from tests.devices.nvml.child import NvmlChild, kinds, used_by_pid
from tests.fakenvml import GIB, NOT_AVAILABLE, FakeDriver, Process, machine

PIDS = range(1, 65)

NOT_ASKED = {
    *("parent_uuid", "gpu_instance_id", "idle_seconds", "file_cache_bytes", "partition_bytes"),
    *(metric.field for metric in GPM_METRICS),
}


def test_impossible_entries_are_dropped_and_counted(driver: FakeDriver) -> None:
    driver.devices = machine(1, range(1, 17))
    driver.devices[0].processes += [Process(0, GIB), Process(2**32 - 1, GIB), Process(99, 2**63)]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert set(used_by_pid(reading.devices[0])) == set(range(1, 17))
    (fault,) = reading.faults
    assert (fault.source, fault.kind, fault.device_uuid) == ("nvml", "impossible_value", driver.devices[0].uuid)
    assert fault.detail.startswith("3: ")


def test_list_with_pids_and_bytes_swapped_is_dropped_as_a_whole(driver: FakeDriver) -> None:
    """In the layout of drivers 535.43 to .98, some entries look correct by chance."""
    driver.devices = machine(1)
    driver.devices[0].processes = [Process(7, 4242), *(Process(3 * GIB + i, 4242) for i in range(9))]
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.devices[0].processes is None
    assert kinds(reading) == {(driver.devices[0].uuid, "impossible_value")}


@pytest.mark.parametrize(
    ("wrong", "unknown"),
    [
        ({"used_bytes": 142 * GIB}, {"used_bytes"}),
        ({"used_bytes": NOT_AVAILABLE}, {"used_bytes"}),
        ({"free_bytes": NOT_AVAILABLE}, {"free_bytes"}),
        ({"reserved_bytes": NOT_AVAILABLE}, {"reserved_bytes"}),
        ({"total_bytes": NOT_AVAILABLE}, {"size_bytes", "used_bytes", "free_bytes", "reserved_bytes"}),
        ({"gpu_utilization": 101}, {"gpu_utilization_ratio"}),
        ({"memory_utilization": 2**32 - 1}, {"memory_controller_utilization_ratio"}),
        ({"sm_clock": 2**32 - 1}, {"sm_clock_hertz"}),
        ({"memory_clock": 2**32 - 1}, {"memory_clock_hertz"}),
        ({"temperature": 2**32 - 5}, {"gpu_temperature_celsius"}),
        ({"power": 2**32 - 1}, {"power_watts"}),
        ({"energy": NOT_AVAILABLE}, {"energy_joules"}),
        ({"encoder": 101}, {"encoder_utilization_ratio"}),
        ({"fan": 2**32 - 1}, {"fan_speed_ratio"}),
        ({"throttle": NOT_AVAILABLE}, {"throttle_reasons"}),
        ({"memory_temperature": 2**32 - 1}, {"memory_temperature_celsius"}),
        ({"compute_mode": 9}, {"compute_mode"}),
        ({"performance_state": 16}, {"performance_state"}),
        ({"bar1_used": NOT_AVAILABLE}, {"bar1_used_bytes"}),
        ({"pcie_width": 2**32 - 1}, {"pcie_width"}),
        ({"pcie_receive": 2**32 - 1}, {"pcie_receive_bytes_per_second"}),
        ({"pcie_replays": 2**32 - 1}, {"pcie_replays"}),
        ({"ecc_corrected": NOT_AVAILABLE}, {"ecc_corrected_volatile"}),
        ({"remapped_pending": 7}, {"remapped_rows_pending"}),
        ({"nvlink_replay": NOT_AVAILABLE}, {"nvlink_replay_errors"}),
        ({"virtualization": 5}, {"virtualization_mode"}),
        ({"addressing": 3}, {"addressing_mode"}),
        ({"numa_node": 2**31}, {"numa_node"}),
    ],
)
def test_impossible_numbers_are_unknown(driver: FakeDriver, wrong: dict[str, int], unknown: set[str]) -> None:
    driver.devices = machine(1)
    for key, value in wrong.items():
        setattr(driver.devices[0], key, value)
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    values = asdict(reading.devices[0]) | asdict(reading.devices[0].sensors)
    assert {key for key, value in values.items() if value is None} - NOT_ASKED == unknown
    assert kinds(reading) == {(driver.devices[0].uuid, "impossible_value")}


def test_faults_are_well_formed(driver: FakeDriver) -> None:
    driver.devices = machine(1, [1])
    driver.fail("nvmlDeviceGetPowerUsage", code=10)
    driver.fail("nvmlDeviceGetTemperature", code=10)
    driver.write()
    with NvmlChild(driver.env) as child:
        reading = child.read()
    assert reading.faults == (
        Fault("nvml", "timeout", driver.devices[0].uuid, "2: gpu_temperature_celsius: timeout, power_watts: timeout"),
    )


numbers = st.one_of(
    st.integers(0, 20), st.integers(0, 2**64 - 1), st.sampled_from([0, 2**32 - 1, 2**63, 2**64 - 1, 80 * GIB])
)
entries = st.builds(
    ListedProcess,
    st.sampled_from(["compute", "graphics", "mps"]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    numbers,
    st.none() | numbers,
)


@given(st.lists(entries))
def test_arbitrary_lists_yield_no_impossible_process(listed: list[ListedProcess]) -> None:
    counter = FaultCollector()
    by_pid = valid_usages(counter, "GPU-0", listed, size_bytes=80 * GIB, pid_max=32768)
    good = [entry for entry in listed if 0 < entry.pid <= 32768 and (entry.used_bytes or 0) <= 80 * GIB]
    assert bool(counter) == (len(good) < len(listed))
    assert (by_pid is None) == (len(listed) >= 10 and len(listed) - len(good) > 0.2 * len(listed))
    for pid, usage in (by_pid or {}).items():
        counts = [entry.used_bytes for entry in good if entry.pid == pid]
        assert set(usage.kinds) == {entry.kind for entry in good if entry.pid == pid}
        assert usage.used_bytes is None or 0 <= usage.used_bytes <= sum(count or 0 for count in counts)


@given(numbers, numbers, numbers, st.none() | numbers)
def test_arbitrary_answers_yield_no_impossible_memory(size: int, used: int, free: int, reserved: int | None) -> None:
    counter = FaultCollector()
    counts = MemoryCounts(size, used, free, reserved)
    checked = valid_memory(counter, "GPU-0", counts)
    assert checked == counts or counter or size == 0
    known = [value for value in checked if value is not None]
    assert not known or max(known) == checked.size_bytes < 2**63
