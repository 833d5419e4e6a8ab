"""Values of rules from the sensors, settings and error counters of devices. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Protocol

from gpumond.facts.sensors import THROTTLE_REASONS, Sensors
from gpumond.facts.snapshot import DeviceReading
from gpumond.quantities.context import FROM_A_FULL_WINDOW, IN_WINDOW, RuleAttribute, number, ratio
from gpumond.quantities.table import DEVICE_COUNTERS, SENSORS, Quantity, Unit, readable
from gpumond.quantities.window import RuleWindow, combined

LOADED_RATIO = 0.5
"""Utilisation from which a slow PCIe link is a deficit: an idle device slows its link down to save power."""

THERMAL_REASONS = ("sw_thermal_slowdown", "hw_thermal_slowdown")


class DeviceRow(Protocol):
    """A row of one device."""

    @property
    def device(self) -> DeviceReading: ...
    @property
    def recent(self) -> RuleWindow: ...


Read = Callable[[Sensors], float | None]
DeviceAttribute = RuleAttribute[DeviceRow]


def _derived(name: str, unit: Unit, meaning: str, read: Read) -> DeviceAttribute:
    return RuleAttribute(name, unit, meaning, lambda row: read(row.device.sensors))


def _throttle(*reasons: str) -> Read:
    def read(sensors: Sensors) -> float | None:
        active = sensors.throttle_reasons
        return None if active is None else float(any(reason in active for reason in reasons))

    return read


def _increase(counter: str) -> Callable[[DeviceRow], float | None]:
    position = DEVICE_COUNTERS.index(counter)

    def read(row: DeviceRow) -> float | None:
        history = row.recent.devices.get(row.device.uuid)
        count = getattr(row.device.sensors, counter)
        return None if history is None else history.increase(position, count, row.recent.elapsed)

    return read


def _grown(name: str, unit: Unit, meaning: str, *counters: str) -> DeviceAttribute:
    increases = tuple(map(_increase, counters))
    return RuleAttribute(
        name,
        unit,
        f"{meaning} {IN_WINDOW}; {FROM_A_FULL_WINDOW}",
        lambda row: combined(tuple(increase(row) for increase in increases)),
    )


def pcie_link_ratio(sensors: Sensors) -> float | None:
    """Return the link's bandwidth over its maximum, where each generation doubles that of a lane."""
    width = ratio(sensors.pcie_width, sensors.pcie_width_max)
    generation, most = sensors.pcie_generation, sensors.pcie_generation_max
    if width is None or generation is None or most is None:
        return None
    return min(1.0, width * 2.0 ** (generation - most))


def _pcie_link_deficit(sensors: Sensors) -> float | None:
    part, busy = pcie_link_ratio(sensors), sensors.gpu_utilization_ratio
    if part is None or busy is None:
        return None
    return 1.0 - part if busy >= LOADED_RATIO else 0.0


def _attributes(quantity: Quantity) -> Iterator[DeviceAttribute]:
    """Yield the rule value of a sensor and, if it counts events, that of its increase."""
    value: Callable[[Sensors], float | None] = attrgetter(quantity.name)
    yield _derived(quantity.name, quantity.unit, quantity.text, lambda sensors: number(value(sensors)))
    if quantity.counted:
        name = "energy_increase_joules" if quantity.name == "energy_joules" else f"{quantity.name}_increase"
        yield _grown(name, quantity.unit, f"Increase of `{quantity.name}`", quantity.name)


VALUES: tuple[DeviceAttribute, ...] = (
    *chain.from_iterable(map(_attributes, SENSORS)),
    _derived(
        "power_limit_ratio",
        "ratio",
        "Power draw as a fraction of its limit.",
        lambda sensors: ratio(sensors.power_watts, sensors.power_limit_watts),
    ),
    *(
        _derived(
            f"throttle_{reason}",
            "boolean",
            f"1 while the clocks are reduced for the reason `{reason}`.",
            _throttle(reason),
        )
        for reason in THROTTLE_REASONS
    ),
    _derived(
        "throttle_thermal",
        "boolean",
        f"1 while the clocks are reduced because of the temperature ({' or '.join(THERMAL_REASONS)}).",
        _throttle(*THERMAL_REASONS),
    ),
    _derived(
        "bar1_used_ratio",
        "ratio",
        "Mapped part of the BAR1 window as a fraction of its size.",
        lambda sensors: ratio(sensors.bar1_used_bytes, sensors.bar1_size_bytes),
    ),
    _derived(
        "pcie_link_ratio",
        "ratio",
        "Bandwidth of the PCIe link as a fraction of its maximum, from lanes and generation. An idle device slows its "
        "link down.",
        pcie_link_ratio,
    ),
    _derived(
        "pcie_link_deficit_ratio",
        "ratio",
        f"1 - `pcie_link_ratio` while `gpu_utilization_ratio` is at least {LOADED_RATIO:.0%}, otherwise 0.",
        _pcie_link_deficit,
    ),
    _grown(
        "nvlink_errors_increase",
        "count",
        "Errors of all kinds on all NVLinks",
        *(name for name in DEVICE_COUNTERS if name.startswith("nvlink_")),
    ),
)

PLACEHOLDERS = {
    "temperature": "temperature of the GPU",
    "power": "power draw",
    "power_limit": "limit of the power draw",
    "throttle_reasons": "reasons for which the clocks are reduced",
    "pcie_link": "generation and lanes of the PCIe link",
    "pcie_link_max": "highest generation and lanes of the PCIe link",
}


def texts(sensors: Sensors) -> dict[str, str]:
    return {
        "temperature": _text("celsius", sensors.gpu_temperature_celsius),
        "power": _text("watts", sensors.power_watts),
        "power_limit": _text("watts", sensors.power_limit_watts),
        "throttle_reasons": ", ".join(sensors.throttle_reasons or ()) or "none known",
        "pcie_link": _link(sensors.pcie_generation, sensors.pcie_width),
        "pcie_link_max": _link(sensors.pcie_generation_max, sensors.pcie_width_max),
    }


def _text(unit: Unit, value: float | None) -> str:
    return "unknown" if value is None else readable(unit, value)


def _link(generation: int | None, width: int | None) -> str:
    return f"generation {'?' if generation is None else generation} x{'?' if width is None else width}"
