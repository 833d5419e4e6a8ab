"""Devices, processes and engines as lines for the screen and as tables of plain text, and notes below them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpumond.facts.units import GIB, duration_text, plural, size_text
from gpumond.view.frame import FrameView
from gpumond.view.notices import FrameNotice
from gpumond.view.rows import PROCESS_SHARES, DeviceRow, kv_cache_bytes, limit_sentences, suspension_sentence
from gpumond.view.text import (
    FILLS,
    Span,
    StyledLine,
    ansi,
    bar,
    colors_of,
    cut,
    display_width,
    fitting_table,
    output_width,
    pad,
    plain_text,
    printable,
    size_or_dash,
    width_of,
    wrap_text,
)

ROWS_PER_DEVICE = 9
"""A device takes one line if the screen has fewer lines than this for each device; more, if legends are longer."""
MIN_NAME_WIDTH, NAME_FRACTION = 10, 6
"""Least width of a device's name on one line, and the part of the line that it takes at most."""
MIN_BAR_WIDTH = 10
PART_NAMES = {"waiting": "waiting (part of free)"}
"""Names in a legend of parts that aren't shares."""
LEGEND_WIDTH = 140
"""Columns of a legend with all parts that are common: its lines are there when a part has no bytes, too."""


def device_lines(
    view: FrameView, width: int, height: int, monochrome: bool, selected: str | None = None
) -> list[StyledLine]:
    """Return the lines of all devices. ``selected``: UUID of the device whose name is highlighted."""
    lines, legend = device_block(view, width, height, monochrome, selected)
    return [line for line in (*lines, *legend) if line]


def device_block(
    view: FrameView,
    width: int,
    height: int,
    monochrome: bool,
    selected: str | None = None,
    past: Callable[[str], Iterable[StyledLine]] = lambda uuid: (),
) -> tuple[list[StyledLine], list[StyledLine]]:
    """Return the lines of all devices, and those of the legend that they have in common.

    ``past`` returns the lines below a device that doesn't have only one line.
    """
    rows_per_device = ROWS_PER_DEVICE * max(1.0, (2 + _legend_rows(width)) / 4)
    if len(view.devices) > 1 and len(view.devices) * rows_per_device > height:
        known = [device for device in view.devices if device.used_bytes is not None]
        column = max(display_width(device.label) for device in view.devices)
        longest = max(display_width(_model_name(device.name or device.uuid)) for device in view.devices)
        columns = max(2, column), max(MIN_NAME_WIDTH, min(longest, width // NAME_FRACTION))
        lines = [_single_line(device, width, columns, monochrome, selected) for device in view.devices]
        return lines, [*_legend_area(_totals(known), width, monochrome)]
    return [
        line
        for device in view.devices
        for line in (*_full_lines(device, width, monochrome, selected), *past(device.uuid))
    ], []


def flush_estimate(view: FrameView) -> str:
    """Describe the memory that a flush of all programs in the view would release; empty if it is unknown."""
    if view.reclaimable_bytes is None:
        return ""
    more = (
        f"; programs that don't allow a flush have another {size_text(view.refused_bytes)} in their caches"
        if view.refused_bytes
        else ""
    )
    what = f"about {size_text(view.reclaimable_bytes)}" if view.reclaimable_bytes else "nothing"
    programs = f"the programs on GPU {view.only_device}" if view.only_device else "all programs"
    return f"a flush of {programs} would release {what}{more}"


def _full_lines(device: DeviceRow, width: int, monochrome: bool, selected: str | None) -> Iterator[StyledLine]:
    index, used = Span(f"GPU {device.label}", _style(device, selected)), StyledLine()
    sensors = [Span(f"  {sensor}", "dim") for sensor in _sensors(device)]
    if device.used_bytes is not None:
        used = [Span(f"  {_used(device)}", "bold")]
    state = [Span("  "), Span(device.state, "alarm")] if device.state else []
    room = width - width_of([index, *used, *sensors, *state]) - 1
    if room < MIN_NAME_WIDTH:
        room += width_of(sensors)
        sensors = []
    name = [Span(f" {cut(device.name or device.uuid, room)}")] if room >= MIN_NAME_WIDTH or not used else []
    yield [index, *name, *used, *sensors, *state]
    if device.used_bytes is not None:
        yield _bar(device, width, monochrome)
        yield from _legend_area(_parts(device), width, monochrome)


def _style(device: DeviceRow, selected: str | None) -> str:
    return "chosen" if device.uuid == selected else "bold"


def _single_line(
    device: DeviceRow, width: int, columns: tuple[int, int], monochrome: bool, selected: str | None
) -> StyledLine:
    """Return index, name, bar, memory, utilization, temperature and power of a device on one line.

    ``columns``: the widths of index and name.
    """
    index = Span(pad(device.label, columns[0], right=True), _style(device, selected))
    name = Span(f" {pad(_model_name(device.name or device.uuid), columns[1])} ")
    if device.used_bytes is None:
        return [index, name, Span(device.state, "alarm")]
    used, sensors = Span(f" {_used_in_gib(device):>15}", "bold"), [Span(_sensor_columns(device))]
    state = [Span(" "), Span(device.state, "alarm")] if device.state else []
    room = width - width_of([index, used, *state]) - MIN_BAR_WIDTH
    if width_of([name, *sensors]) > room:
        sensors = []
    if width_of([name, *sensors]) > room - MIN_BAR_WIDTH:
        name = Span(" ")
    end = [used, *sensors, *state]
    return [index, name, *_bar(device, max(MIN_BAR_WIDTH, width - width_of([index, name, *end])), monochrome), *end]


def _model_name(name: str) -> str:
    """Return the model without the manufacturer, which all devices have in common."""
    for maker in ("NVIDIA ", "AMD ", "Intel(R) ", "Intel "):
        name = name.removeprefix(maker)
    return name


def _used(device: DeviceRow) -> str:
    if device.used_bytes is None:
        return ""
    if not device.size_bytes:
        return f"{size_text(device.used_bytes)} used"
    return (
        f"{size_text(device.used_bytes)} of {size_text(device.size_bytes)}  {device.used_bytes / device.size_bytes:.0%}"
    )


def _used_in_gib(device: DeviceRow) -> str:
    used = device.used_bytes or 0
    return f"{used / GIB:.1f}/{device.size_bytes / GIB:.1f} GiB" if device.size_bytes else f"{size_text(used)} used"


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


def _bar(device: DeviceRow, width: int, monochrome: bool) -> StyledLine:
    return [share_cells(part, count, monochrome) for part, count in bar_parts(device, width)]


def bar_parts(device: DeviceRow, width: int) -> list[tuple[str, int]]:
    """Return (part, cells) of a device's bar. What waits takes the end of the free memory."""
    size = device.size_bytes or 0
    parts = bar({**device.shares, "reserved": device.reserved_bytes or 0}, size, width)
    name, free = parts[-1]
    if name != "free" or not device.waiting_bytes:
        return parts
    waiting = min(free, max(1, round(device.waiting_bytes * width / max(size, 1))))
    return [*parts[:-1], *(each for each in (("free", free - waiting), ("waiting", waiting)) if each[1])]


def share_cells(part: str, cells: int, monochrome: bool) -> Span:
    """Return the cells of a part in a bar."""
    return Span(FILLS[part] * cells) if monochrome else Span((" /"[part == "waiting"]) * cells, "", part)


def _parts(device: DeviceRow) -> dict[str, int]:
    """Return the parts of the device, in the order of the bar."""
    parts = {share: size for share, size in device.shares.items() if size}
    named = ("reserved", device.reserved_bytes), ("free", device.free_bytes), ("waiting", device.waiting_bytes)
    for name, amount in named:
        if amount:
            parts[name] = amount
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


def _legend_area(parts: Mapping[str, int], width: int, monochrome: bool) -> Iterator[StyledLine]:
    """Yield the lines of the legend, and those that further parts would take."""
    lines = _legend(parts, width, monochrome)
    yield from lines
    yield from [[]] * (_legend_rows(width) - len(lines))


def _legend_rows(width: int) -> int:
    return -(-LEGEND_WIDTH // width)


def _legend(parts: Mapping[str, int], width: int, monochrome: bool) -> list[StyledLine]:
    """Return lines with the mark, name and bytes of each part. A part is never split over two lines."""
    lines: list[StyledLine] = []
    used = width
    for part, amount in parts.items():
        words = f" {PART_NAMES.get(part, part)} {size_text(amount)}"
        words += " (uses no GPU memory)" if part == "unmapped" else ""
        if used + 3 + len(words) > width:
            lines.append([])
            used = 0
        else:
            lines[-1].append(Span("  "))
            used += 2
        lines[-1] += [share_cells(part, 1, monochrome) if part in FILLS else Span(" "), Span(words)]
        used += 1 + len(words)
    return lines


def device_table(view: FrameView, verbose: bool = False, width: int | None = None, bars: bool = False) -> str:
    """Return a table of devices; empty without a device.

    It has UUID and PCI address if ``verbose``, what the driver reserves if it states that, and a bar of the shares if
    ``bars``. ``width``: that of the terminal,
    which the table fits.
    """
    bar_header, shares = [">MEMORY"] if bars else [], ("cached", "stranded", "unattributed")
    reserved = [">RESERVED"] if any(device.reserved_bytes for device in view.devices) else []
    columns = [*bar_header, ">SIZE", ">USED", *reserved, *(f">{share.upper()}" for share in shares)]
    header = ["GPU", "NAME", *columns, "STATE"]
    rows = [
        [
            str(device.index),
            device.name,
            *([bar_text(device)] if bars else []),
            size_or_dash(device.size_bytes),
            size_or_dash(device.used_bytes),
            *([size_or_dash(device.reserved_bytes)] if reserved else []),
            *(size_or_dash(device.shares.get(share)) for share in shares),
            device.state or "up",
            *((device.uuid, device.pci_bus_id or "-") if verbose else ()),
        ]
        for device in view.devices
    ]
    if not rows:
        return ""
    text = fitting_table([*header, ">UUID", ">PCI"] if verbose else header, rows, width, DEVICE_HIDEABLE)
    return text + (f"\n{bar_legend(view)}" if bars else "")


def bar_text(device: DeviceRow) -> str:
    """Return a bar of the shares, as characters; empty if the memory of the device is unknown."""
    if device.used_bytes is None:
        return ""
    return "".join(FILLS[part] * count for part, count in bar_parts(device, BAR_WIDTH))


def bar_legend(view: FrameView) -> str:
    """Return the characters of the shares that some device has."""
    parts = {"free", *(part for device in view.devices for part in _parts(device))}
    return "  ".join(f"{character} {PART_NAMES.get(part, part)}" for part, character in FILLS.items() if part in parts)


def process_table(view: FrameView, width: int | None = None, waste: bool = False) -> str:
    """Return a table of processes; empty without a process. OPAQUE, UNMAPPED and LIMIT are absent while there is none.

    ``width``: that of the terminal, which the table fits. ``waste``: with a column for it.
    """
    unmapped = any(process.unmapped_bytes for process in view.processes)
    limited = any(process.limit_bytes is not None for process in view.processes)
    opaque = any(process.shares["opaque"] for process in view.processes)
    shares = [name for name in PROCESS_SHARES if name != "opaque" or opaque]
    header = (
        "GPU",
        ">PID",
        "PROGRAM",
        "USER",
        ">USED",
        *([">WASTE"] if waste else []),
        *(f">{name.upper()}" for name in shares),
        *([">UNMAPPED"] if unmapped else []),
        *([">LIMIT"] if limited else []),
        "VERDICT",
    )
    rows = [
        [
            process.gpu,
            str(process.pid),
            process.program,
            process.user,
            size_or_dash(process.used_bytes),
            *([size_or_dash(process.waste_bytes)] if waste else []),
            *(size_or_dash(process.shares[name]) for name in shares),
            *([size_or_dash(process.unmapped_bytes)] if unmapped else []),
            *([size_or_dash(process.limit_bytes)] if limited else []),
            process.status_in(),
        ]
        for process in view.processes
    ]
    return fitting_table(header, rows, width, PROCESS_HIDEABLE) if rows else ""


def suspended_programs(frame: Mapping[str, Any], uuid: str | None = None) -> str:
    """Return the programs that gpumond has suspended, one on a line: those of one device, if it is given."""
    now = frame["snapshot"]["taken_at"]
    return "\n".join(
        f"{printable(each['workload']) or 'unnamed'} (pid {each['pid']}): {printable(suspension_sentence(each, now))}"
        for each in frame["snapshot"].get("suspended_programs") or ()
        if uuid is None or any(part["device_uuid"] == uuid for part in each["memory"])
    )


def overhead_text(view: FrameView) -> str:
    """Return the parts of each overhead that are known, one process on a line."""
    return "\n".join(
        f"overhead of {process.program} (pid {process.pid}) on GPU {process.gpu}: {process.overhead_parts}"
        for process in view.processes
        if process.overhead_parts
    )


def engine_table(snapshot: Mapping[str, Any], width: int | None = None, uuid: str | None = None) -> str:
    """Return a table of the declared serving engines; empty without one.

    With the UUID of a device, it's a table of those that may have a process there.
    """
    header = ("ENGINE", "KIND", "STATE", ">USED", ">KV CACHE IN USE", ">RUNNING", ">WAITING", ">IDLE", "MODELS")
    used = {
        (process["pid"], process["start_ticks"], device["uuid"]): process["used_bytes"]
        for device in snapshot["devices"]
        for process in device["processes"] or ()
    }
    there = {(pid, start) for pid, start, device in used if device == uuid}
    engines = [
        engine
        for engine in snapshot.get("engines", ())
        if uuid is None or not engine["processes"] or there & _processes_of(engine)
    ]
    rows = [[*_engine_row(engine, used)] for engine in engines]
    hidden = [
        f"{engine['name']}: its processes are unknown: {printable(engine['processes_problem'])}"
        for engine in engines
        if engine.get("processes_problem") and not engine["problem"]
    ]
    return "\n".join([fitting_table(header, rows, width, ENGINE_HIDEABLE), *hidden]) if rows else ""


def _processes_of(engine: Mapping[str, Any]) -> set[tuple[int, int]]:
    return {(process["pid"], process["start_ticks"]) for process in engine["processes"]}


def _engine_row(engine: Mapping[str, Any], used: Mapping[tuple[int, int, str], int | None]) -> Iterator[str]:
    keys = _processes_of(engine)
    sizes = [size_bytes for key, size_bytes in used.items() if key[:2] in keys and size_bytes is not None]
    ratio, idle = engine["kv_cache_used_ratio"], engine["idle_seconds"]
    total = sum(sizes) if sizes else None
    kv_cache = kv_cache_bytes(engine, total)
    yield from (engine["name"], engine["kind"])
    yield engine["problem"] or _service_state(engine)
    yield size_or_dash(total)
    yield "-" if ratio is None else f"{ratio:.0%}" + (f" of {size_text(kv_cache)}" if kv_cache else "")
    yield from ("-" if engine[name] is None else str(engine[name]) for name in ("running", "waiting"))
    yield "-" if idle is None else duration_text(idle)
    yield ", ".join(model["name"] for model in engine["models"]) or "-"


def _service_state(engine: Mapping[str, Any]) -> str:
    if engine.get("out_of_service_seconds") is not None:
        passed = duration_text(engine["out_of_service_seconds"])
        return f"out of service for {passed}: {printable(engine['out_of_service_reason'])}"
    return "sleeping" if engine["sleeping"] else "paused" if engine.get("paused") else "up"


def note_paragraphs(view: FrameView) -> Iterator[str]:
    """Yield paragraphs of notices, alerts and verdicts with their remedies. Some may be empty."""
    yield _lines("", view.notices)
    yield _lines("", view.stuck)
    yield "\n".join(limit_sentences(row.sources.process for row in view.processes))
    if view.reclaimable_bytes:
        target = f"--device {view.only_device}" if view.only_device else "--all"
        yield f"{flush_estimate(view)}: gpumond flush {target}"
    if view.processes and not view.agents:
        yield "no program runs the agent; start one with: gpumond run -- YOUR_PYTHON YOUR_PROGRAM.py"
    yield _lines("alert ", view.alerts)
    yield _lines("verdict ", view.verdicts)
    if view.problems_elsewhere:
        noun = "more problem" if view.alerts or any(view.problems) else "problem"
        yield f"{plural(view.problems_elsewhere, noun)} on other GPUs"


def _lines(word: str, remarks: Iterable[FrameNotice]) -> str:
    return "\n".join(line for each in remarks for line in (word + each.fact, *(f"  -> {step}" for step in each.steps)))


def status_page(view: FrameView, one_line: bool = False, completed: Callable[[str], str] = str) -> str:
    """Return devices, processes and notices as text.

    ``one_line``: several devices have one line each. ``completed`` completes the commands of a text.
    """
    colors = colors_of(os.environ) if sys.stdout.isatty() else "none"
    width = output_width() or 80
    lines = device_lines(view, width, 0 if one_line else sys.maxsize, monochrome=colors == "none")
    devices = "\n".join(plain_text(line) if colors == "none" else ansi(line, colors) for line in lines)
    paragraphs = (wrap_text(completed(note), output_width()) for note in note_paragraphs(view))
    return "\n\n".join(section for section in (devices, process_table(view, output_width()), *paragraphs) if section)


BAR_WIDTH = 20


DEVICE_HIDEABLE = (">RESERVED", ">UNATTRIBUTED", ">STRANDED", ">MEMORY", ">CACHED")


PROCESS_HIDEABLE = (">OPAQUE", ">OVERHEAD", "USER", ">LIMIT", ">UNMAPPED", ">STRANDED", ">LIVE", ">CACHED", ">PID")


ENGINE_HIDEABLE = (">IDLE", ">WAITING", ">RUNNING", "KIND")
"""Columns that a narrow terminal does not show, in the order in which they are left out."""
