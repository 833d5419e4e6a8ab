"""Lines that describe devices, for the screen and for plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumond.facts.units import GIB, human
from gpumond.view.bars import FILLS, bar
from gpumond.view.lines import Line, Span, cells, cut, fitted, width_of
from gpumond.view.machine import View
from gpumond.view.rows import DeviceRow

ROWS_EACH = 9
"""A device takes one line if the screen has fewer lines than this for each device."""
NAME = 10
"""Width of a device's name on one line."""
LEAST_BAR = 10


def device_lines(view: View, width: int, height: int, monochrome: bool, chosen: str | None = None) -> list[Line]:
    """Return the lines of all devices. ``chosen``: UUID of the device whose name is highlighted."""
    lines, legend = device_block(view, width, height, monochrome, chosen)
    return [*lines, *legend]


def device_block(
    view: View, width: int, height: int, monochrome: bool, chosen: str | None = None
) -> tuple[list[Line], list[Line]]:
    """Return the lines of all devices, and those of the legend that they have in common."""
    if len(view.devices) > 1 and len(view.devices) * ROWS_EACH > height:
        known = [device for device in view.devices if device.used_bytes is not None]
        column = max(cells(device.label) for device in view.devices)
        lines = [_on_one_line(device, width, max(2, column), monochrome, chosen) for device in view.devices]
        return lines, _legend(_totals(known), width, monochrome)
    return [line for device in view.devices for line in _in_full(device, width, monochrome, chosen)], []


def flush_estimate(view: View) -> str:
    """Describe the memory that a flush of all programs would release; empty if it is unknown."""
    if view.reclaimable_bytes is None:
        return ""
    more = (
        f"; programs that do not allow a flush cache another {human(view.refused_bytes)}" if view.refused_bytes else ""
    )
    what = f"about {human(view.reclaimable_bytes)}" if view.reclaimable_bytes else "nothing"
    return f"a flush of all programs would release {what}{more}"


def _in_full(device: DeviceRow, width: int, monochrome: bool, chosen: str | None) -> Iterator[Line]:
    values: Line = []
    if device.used_bytes is not None:
        values += [Span(f"  {_used(device)}", "bold"), *(Span(f"  {sensor}", "dim") for sensor in _sensors(device))]
    if device.state:
        values += [Span("  "), Span(device.state, "alarm")]
    index = Span(f"GPU {device.label}", _style(device, chosen))
    room = max(NAME, width - width_of([index, *values]) - 1)
    yield [index, Span(f" {cut(device.name or device.uuid, room)}"), *values]
    if device.used_bytes is not None:
        yield _bar(device, width, monochrome)
        yield from _legend(_parts(device), width, monochrome)


def _style(device: DeviceRow, chosen: str | None) -> str:
    return "chosen" if device.uuid == chosen else "bold"


def _on_one_line(device: DeviceRow, width: int, column: int, monochrome: bool, chosen: str | None) -> Line:
    """Return index, name, bar, memory, utilization, temperature and power of a device on one line."""
    index = Span(fitted(device.label, column, right=True), _style(device, chosen))
    name = Span(f" {fitted(_short(device.name or device.uuid), NAME)} ")
    if device.used_bytes is None:
        return [index, name, Span(device.state, "alarm")]
    numbers = [Span(f" {_used_short(device):>15}", "bold"), Span(_sensor_columns(device))]
    state = [Span(" "), Span(device.state, "alarm")] if device.state else []
    room = width - width_of([index, name, *numbers, *state])
    return [index, name, *_bar(device, max(LEAST_BAR, room), monochrome), *numbers, *state]


def _short(name: str) -> str:
    """Return the model without the manufacturer, which all devices have in common."""
    for maker in ("NVIDIA ", "AMD ", "Intel(R) ", "Intel "):
        name = name.removeprefix(maker)
    return name


def _used(device: DeviceRow) -> str:
    if device.used_bytes is None:
        return ""
    if not device.size_bytes:
        return f"{human(device.used_bytes)} used"
    return f"{human(device.used_bytes)} of {human(device.size_bytes)}  {device.used_bytes / device.size_bytes:.0%}"


def _used_short(device: DeviceRow) -> str:
    used = device.used_bytes or 0
    return f"{used / GIB:.1f}/{device.size_bytes / GIB:.1f} GiB" if device.size_bytes else f"{human(used)} used"


def _sensors(device: DeviceRow) -> Iterator[str]:
    if device.busy_ratio is not None:
        yield f"{device.busy_ratio:.0%} busy"
    if device.celsius is not None:
        yield f"{device.celsius:.0f} °C"
    if device.watts is not None:
        yield f"{device.watts:.0f} W"


def _sensor_columns(device: DeviceRow) -> str:
    """Return the sensors in columns of fixed width, as blanks where they are unknown."""
    busy = "" if device.busy_ratio is None else f"{device.busy_ratio:.0%} busy"
    heat = "" if device.celsius is None else f"{device.celsius:.0f} °C"
    power = "" if device.watts is None else f"{device.watts:.0f} W"
    return f" {busy:>9} {heat:>6} {power:>6}"


def _bar(device: DeviceRow, width: int, monochrome: bool) -> Line:
    parts = {**device.shares, "reserved": device.reserved_bytes or 0}
    return [_mark(share, cells, monochrome) for share, cells in bar(parts, device.size_bytes or 0, width)]


def _mark(part: str, cells: int, monochrome: bool) -> Span:
    return Span(FILLS[part] * cells) if monochrome else Span(" " * cells, "", part)


def _parts(device: DeviceRow) -> dict[str, int]:
    """Return the parts of the device, in the order of the bar."""
    parts = {share: size for share, size in device.shares.items() if size}
    for name, size in (("reserved", device.reserved_bytes), ("free", device.free_bytes)):
        if size:
            parts[name] = size
    if device.overcount_bytes:
        parts["overcount"] = device.overcount_bytes
    if device.unmapped_bytes:
        parts["unmapped"] = device.unmapped_bytes
    return parts


def _totals(devices: Sequence[DeviceRow]) -> dict[str, int]:
    """Sum the parts of whole devices. Their instances (MIG) are part of them."""
    uuids = {device.uuid for device in devices}
    totals: dict[str, int] = {}
    for device in devices:
        if device.parent_uuid not in uuids:
            for part, size in _parts(device).items():
                totals[part] = totals.get(part, 0) + size
    return {part: totals[part] for part in (*FILLS, "overcount", "unmapped") if part in totals}


def _legend(parts: Mapping[str, int], width: int, monochrome: bool) -> list[Line]:
    """Return lines with the mark, name and bytes of each part. A part is never split over two lines."""
    lines: list[Line] = []
    used = width
    for part, size in parts.items():
        words = f" {part} {human(size)}"
        if used + 3 + len(words) > width:
            lines.append([])
            used = 0
        else:
            lines[-1].append(Span("  "))
            used += 2
        lines[-1] += [_mark(part, 1, monochrome) if part in FILLS else Span(" "), Span(words)]
        used += 1 + len(words)
    return lines
