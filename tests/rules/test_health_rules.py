"""Built-in rules on the health of devices: when they fire, and their texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.alerts import Rule
from gpumond.facts.frame import Alert
from gpumond.facts.snapshot import Sensors
from gpumond.features.rules.built_in import BUILT_IN
from tests.helpers.values import Advanced, TickState, advance, make_device, make_snapshot

RULES = {rule.name: rule for rule in BUILT_IN}
HEALTHY = Sensors(
    gpu_utilization_ratio=0.9,
    gpu_temperature_celsius=87.0,
    power_watts=699.0,
    power_limit_watts=700.0,
    throttle_reasons=(),
    persistence_mode=True,
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    ecc_uncorrected_volatile=0,
    ecc_uncorrected_aggregate=7,
    remapped_rows_pending=False,
    remapped_rows_failed=False,
    retired_pages_pending=False,
    nvlink_crc_flit_errors=100,
    nvlink_replay_errors=5,
)
FAULTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "thermal-throttling",
        {"throttle_reasons": ("gpu_idle", "hw_thermal_slowdown")},
        "GPU 0 (H100) is thermally throttled at 87 °C (gpu_idle, hw_thermal_slowdown); check the GPU's fans",
    ),
    (
        "power-throttling",
        {"throttle_reasons": ("sw_power_cap",)},
        "GPU 0 (H100) is power-capped: 699 W of 700 W; this is normal at full load",
    ),
    (
        "power-brake",
        {"throttle_reasons": ("hw_power_brake_slowdown",)},
        "GPU 0 (H100) is throttled by the power brake signal; usually, a power supply has failed or is overloaded",
    ),
    (
        "ecc-uncorrected",
        {"ecc_uncorrected_volatile": 2},
        "GPU 0 (H100) has had uncorrected ECC errors (2 since the driver was loaded): results may be wrong",
    ),
    ("row-remap-pending", {"remapped_rows_pending": True}, "--for 5m and nvidia-smi -i GPU-a --gpu-reset"),
    (
        "row-remap-failed",
        {"remapped_rows_failed": True},
        "move the GPU's programs to another GPU, and replace this one",
    ),
    ("retired-pages-pending", {"retired_pages_pending": True}, "--for 5m and nvidia-smi -i GPU-a --gpu-reset"),
    ("nvlink-errors", {"nvlink_crc_flit_errors": 108, "nvlink_replay_errors": 8}, "had 11 NVLink errors"),
    (
        "pcie-link-degraded",
        {"pcie_generation": 4, "pcie_width": 8},
        "degraded PCIe link: generation 4 x8 under load; it supports generation 5 x16; reseat the GPU",
    ),
    ("persistence-mode-off", {"persistence_mode": False}, "run nvidia-smi -i GPU-a -pm 1"),
)


def ticked(rule: Rule, *ticks: tuple[float, Sensors]) -> Advanced:
    """The last of the ticks of a device with these sensors at these seconds."""
    memory = TickState()
    for elapsed, sensors in ticks:
        tick = advance(
            memory, [rule], make_snapshot(make_device(name="H100", sensors=sensors), elapsed_seconds=elapsed)
        )
        memory = tick.memory
    return tick


def alerts(rule: str, *ticks: tuple[float, Sensors]) -> tuple[Alert, ...]:
    return ticked(RULES[rule], *ticks).frame.alerts


@pytest.mark.parametrize(("name", "change", "text"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_fault_that_lasts_fires_with_a_remedy_and_its_end_resolves(name: str, change: dict[str, Any], text: str):
    rule, faulty = RULES[name], replace(HEALTHY, **change)
    lasting = [(1.0, HEALTHY), (2.0, faulty), (2.0 + rule.for_seconds, faulty)]
    (alert,) = alerts(name, *lasting)
    assert alert.phase == "firing"
    assert text in "; ".join(dict(alert.annotations).values())
    if rule.for_seconds:
        (early,) = alerts(name, *lasting[:2], (1.5 + rule.for_seconds, faulty))
        assert early.phase == "pending"
    if rule.value != "nvlink_errors_increase":
        assert alerts(name, *lasting, (3.0 + rule.for_seconds, HEALTHY)) == ()


def test_nvlink_errors_resolve_when_they_leave_the_window():
    faulty = replace(HEALTHY, nvlink_replay_errors=50)
    ticks = [(1.0, HEALTHY), *((31.0 + 30 * number, faulty) for number in range(22))]
    assert [alert.phase for alert in alerts("nvlink-errors", *ticks[:10])] == ["firing"]
    assert alerts("nvlink-errors", *ticks) == ()


@pytest.mark.parametrize("name", [name for name, _, _ in FAULTS])
def test_healthy_and_unknown_devices_fire_nothing(name: str):
    for sensors in (HEALTHY, Sensors()):
        assert alerts(name, (1.0, sensors), (2000.0, sensors)) == ()


@pytest.mark.parametrize(("name", "change", "text"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_sensor_that_is_no_longer_read_leaves_the_alert_unchanged(name: str, change: dict[str, Any], text: str):
    rule, faulty = RULES[name], replace(HEALTHY, **change)
    lasting = [(1.0, HEALTHY), (2.0, faulty), (2.0 + rule.for_seconds, faulty)]
    assert alerts(name, *lasting, (9.0 + rule.for_seconds, Sensors())) == alerts(name, *lasting)


def test_idle_device_with_a_slow_link_is_healthy():
    idle = replace(HEALTHY, gpu_utilization_ratio=0.0, pcie_generation=1)
    assert alerts("pcie-link-degraded", (1.0, HEALTHY), (2.0, idle), (2000.0, idle)) == ()
