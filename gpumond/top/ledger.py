"""Lines that describe devices, for the screen and for plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumond.model.units import human
from gpumond.top.bars import COLOURS, FILLS, FREE_ON_DARK, bar
from gpumond.top.rows import DeviceRow
from gpumond.top.view import View

GROUNDS: Mapping[str, str] = {**COLOURS, "free": FREE_ON_DARK, "reserved": "#6B7480"}
"""The colours of the parts of a bar on a dark background."""

ROWS_EACH = 9
"""A device takes one line if the screen has fewer lines than this for each device."""


class Piece(NamedTuple):
    """Text with one style. ``style``: bold, dim, alarm, chosen or none; ``ground``: share of the background colour."""

    text: str
    style: str = ""
    ground: str = ""


Line = list[Piece]


def device_lines(view: View, width: int, height: int, monochrome: bool, chosen: str | None = None) -> list[Line]:
    """Return the lines of all devices. ``chosen``: UUID of the device whose name is highlighted."""
    known = [device for device in view.devices if device.used_bytes is not None]
    if len(view.devices) > 1 and len(view.devices) * ROWS_EACH > height:
        lines = [_on_one_line(device, width, monochrome, chosen) for device in view.devices]
        lines += _legend(_totals(known), width, monochrome)
    else:
        lines = [line for device in view.devices for line in _in_full(device, width, monochrome, chosen)]
    return lines


def flush_estimate(view: View) -> str:
    """Describe the memory that a flush of all programs would release; empty if it is unknown."""
    if view.returnable_bytes is None:
        return ""
    more = (
        f"; programs that do not allow a flush cache another {human(view.refused_bytes)}" if view.refused_bytes else ""
    )
    what = f"about {human(view.returnable_bytes)}" if view.returnable_bytes else "nothing"
    return f"a flush of all programs would release {what}{more}"


def _in_full(device: DeviceRow, width: int, monochrome: bool, chosen: str | None) -> Iterator[Line]:
    head = [Piece(f"GPU {device.index}", _style(device, chosen)), Piece(f" {device.name or device.uuid}")]
    if device.used_bytes is not None:
        head += [Piece(f"  {_used(device)}", "bold"), *(Piece(f"  {sensor}", "dim") for sensor in _sensors(device))]
    if device.state:
        head += [Piece("  "), Piece(device.state, "alarm")]
    yield head
    if device.used_bytes is not None:
        yield _bar(device, width, monochrome)
        yield from _legend(_parts(device), width, monochrome)


def _style(device: DeviceRow, chosen: str | None) -> str:
    return "chosen" if device.uuid == chosen else "bold"


def _on_one_line(device: DeviceRow, width: int, monochrome: bool, chosen: str | None) -> Line:
    index = Piece(f"{device.index:>2}", _style(device, chosen))
    if device.used_bytes is None:
        return [index, Piece(f" {device.name}"), Piece("  "), Piece(device.state, "alarm")]
    used = f" {_used(device)}"
    state = [Piece(" "), Piece(device.state, "alarm")] if device.state else []
    reserved_width = len(index.text) + 1 + sum(len(piece.text) for piece in state) + max(30, len(used))
    return [index, Piece(" "), *_bar(device, max(10, width - reserved_width), monochrome), Piece(used), *state]


def _used(device: DeviceRow) -> str:
    if device.used_bytes is None:
        return ""
    if not device.size_bytes:
        return f"{human(device.used_bytes)} used"
    return f"{human(device.used_bytes)} of {human(device.size_bytes)}  {device.used_bytes / device.size_bytes:.0%}"


def _sensors(device: DeviceRow) -> Iterator[str]:
    if device.busy_ratio is not None:
        yield f"{device.busy_ratio:.0%} busy"
    if device.celsius is not None:
        yield f"{device.celsius:.0f} °C"
    if device.watts is not None:
        yield f"{device.watts:.0f} W"


def _bar(device: DeviceRow, width: int, monochrome: bool) -> Line:
    parts = {**device.shares, "reserved": device.reserved_bytes or 0}
    return [_mark(share, cells, monochrome) for share, cells in bar(parts, device.size_bytes or 0, width)]


def _mark(part: str, cells: int, monochrome: bool) -> Piece:
    return Piece(FILLS[part] * cells) if monochrome else Piece(" " * cells, "", part)


def _parts(device: DeviceRow) -> dict[str, int]:
    """Return the parts of the device, in the order of the bar."""
    parts = {share: size for share, size in device.shares.items() if size}
    for name, size in (("reserved", device.reserved_bytes), ("free", device.free_bytes)):
        if size:
            parts[name] = size
    if device.overcount_bytes:
        parts["overcount"] = device.overcount_bytes
    return parts


def _totals(devices: Sequence[DeviceRow]) -> dict[str, int]:
    """Sum the parts of whole devices. Their instances (MIG) are part of them."""
    uuids = {device.uuid for device in devices}
    totals: dict[str, int] = {}
    for device in devices:
        if device.parent_uuid not in uuids:
            for part, size in _parts(device).items():
                totals[part] = totals.get(part, 0) + size
    return {part: totals[part] for part in (*FILLS, "overcount") if part in totals}


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
            lines[-1].append(Piece("  "))
            used += 2
        lines[-1] += [_mark(part, 1, monochrome) if part in FILLS else Piece(" "), Piece(words)]
        used += 1 + len(words)
    return lines
