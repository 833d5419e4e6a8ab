"""Tables of devices, processes and engines as plain text, and notes below them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumond.facts.units import duration, human
from gpumond.facts.verdicts import REMEDIES
from gpumond.view.bars import FILLS, bar
from gpumond.view.engines import kv_cache_bytes
from gpumond.view.ledger import device_lines, flush_estimate
from gpumond.view.lines import ansi, colors_of, plain_text
from gpumond.view.machine import View
from gpumond.view.notices import FrameNotice
from gpumond.view.rows import HOLDINGS, DeviceRow, suspension_sentence
from gpumond.view.text import fitting_table, output_width, safe, size


def device_table(content: View, verbose: bool = False, width: int | None = None, bars: bool = False) -> str:
    """Return a table of devices; empty without a device.

    It has UUID and PCI address if ``verbose``, and a bar of the shares if ``bars``. ``width``: that of the terminal,
    which the table fits.
    """
    bar_header, shares = [">MEMORY"] if bars else [], ("cached", "stranded", "unattributed")
    header = ["GPU", "NAME", *bar_header, ">SIZE", ">USED", *(f">{share.upper()}" for share in shares), "STATE"]
    rows = [
        [
            str(device.index),
            device.name,
            *([bar_text(device)] if bars else []),
            size(device.size_bytes),
            size(device.used_bytes),
            *(size(device.shares.get(share)) for share in shares),
            device.state or "up",
            *((device.uuid, device.pci_bus_id or "-") if verbose else ()),
        ]
        for device in content.devices
    ]
    if not rows:
        return ""
    text = fitting_table([*header, ">UUID", ">PCI"] if verbose else header, rows, width, DEVICE_HIDEABLE)
    return text + (f"\n{bar_legend(content)}" if bars else "")


def bar_text(device: DeviceRow) -> str:
    """Return a bar of the shares, as characters; empty if the memory of the device is unknown."""
    if device.used_bytes is None:
        return ""
    parts = {**device.shares, "reserved": device.reserved_bytes or 0}
    return "".join(FILLS[share] * count for share, count in bar(parts, device.size_bytes or 0, BAR))


def bar_legend(content: View) -> str:
    """Return the characters of the shares that some device has."""
    shares = [share for share in FILLS if any(device.shares.get(share) for device in content.devices)]
    return "  ".join(f"{FILLS[share]} {share}" for share in (*shares, "free"))


def process_table(content: View, width: int | None = None) -> str:
    """Return a table of processes; empty without a process. UNMAPPED and LIMIT are absent while there is none.

    ``width``: that of the terminal, which the table fits.
    """
    unmapped = any(process.unmapped_bytes for process in content.processes)
    limited = any(process.limit_bytes is not None for process in content.processes)
    shares = [f">{name.upper()}" for name in HOLDINGS]
    header = (
        "GPU",
        ">PID",
        "PROGRAM",
        "USER",
        ">USED",
        *shares,
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
            size(process.used_bytes),
            *(size(process.shares[name]) for name in HOLDINGS),
            *([size(process.unmapped_bytes)] if unmapped else []),
            *([size(process.limit_bytes)] if limited else []),
            process.verdict,
        ]
        for process in content.processes
    ]
    return fitting_table(header, rows, width, PROCESS_HIDEABLE) if rows else ""


def suspended_programs(frame: Mapping[str, Any]) -> str:
    """Return the programs that gpumond has suspended, one on a line."""
    now = frame["snapshot"]["taken_at"]
    return "\n".join(
        f"{safe(each['workload']) or 'unnamed'} (pid {each['pid']}): {safe(suspension_sentence(each, now))}"
        for each in frame["snapshot"].get("suspended_programs") or ()
    )


def overheads(content: View) -> str:
    """Return the parts of each overhead that are known, one process on a line."""
    return "\n".join(
        f"overhead of {process.program} (pid {process.pid}) on GPU {process.gpu}: {process.overhead_parts}"
        for process in content.processes
        if process.overhead_parts
    )


def engine_table(snapshot: Mapping[str, Any], width: int | None = None) -> str:
    """Return a table of the declared serving engines; empty without one."""
    header = ("ENGINE", "KIND", "STATE", ">USED", ">KV CACHE IN USE", ">RUNNING", ">WAITING", ">IDLE", "MODELS")
    used = {
        (process["pid"], process["start_ticks"], device["uuid"]): process["used_bytes"]
        for device in snapshot["devices"]
        for process in device["processes"] or ()
    }
    engines = snapshot.get("engines", ())
    rows = [[*_engine_row(engine, used)] for engine in engines]
    hidden = [
        f"{engine['name']}: its processes are unknown: {safe(engine['processes_problem'])}"
        for engine in engines
        if engine.get("processes_problem") and not engine["problem"]
    ]
    return "\n".join([fitting_table(header, rows, width, ENGINE_HIDEABLE), *hidden]) if rows else ""


def _engine_row(engine: Mapping[str, Any], used: Mapping[tuple[int, int, str], int | None]) -> Iterator[str]:
    own = {(process["pid"], process["start_ticks"]) for process in engine["processes"]}
    sizes = [size_bytes for key, size_bytes in used.items() if key[:2] in own and size_bytes is not None]
    ratio, idle = engine["kv_cache_used_ratio"], engine["idle_seconds"]
    total = sum(sizes) if sizes else None
    kv_cache = kv_cache_bytes(engine, total)
    yield from (engine["name"], engine["kind"])
    yield engine["problem"] or _service(engine)
    yield size(total)
    yield "-" if ratio is None else f"{ratio:.0%}" + (f" of {human(kv_cache)}" if kv_cache else "")
    yield from ("-" if engine[name] is None else str(engine[name]) for name in ("running", "waiting"))
    yield "-" if idle is None else duration(idle)
    yield ", ".join(model["name"] for model in engine["models"]) or "-"


def _service(engine: Mapping[str, Any]) -> str:
    if engine.get("returning_seconds") is not None:
        return f"out of service for {duration(engine['returning_seconds'])}: {safe(engine['returning_problem'])}"
    return "asleep" if engine["asleep"] else "paused" if engine.get("paused") else "up"


def notes(content: View) -> Iterator[str]:
    """Yield paragraphs of notices, alerts and verdicts with their remedies. Some may be empty."""
    yield _lines("", content.notices)
    yield _lines("", content.stuck)
    if content.reclaimable_bytes:
        yield f"{flush_estimate(content)}: gpumond flush --all"
    if content.processes and not content.agents:
        yield "no program runs the agent; start one with: gpumond run -- python YOUR_PROGRAM.py"
    yield _lines("alert ", content.alerts)
    yield "\n".join(_verdict(remark) for remark in content.verdicts)


def _verdict(remark: FrameNotice) -> str:
    remedy = REMEDIES.get(remark.title, "")
    return _lines("verdict ", [remark]) + (f"\n      -> {remedy}" if remedy else "")


def _lines(word: str, remarks: Iterable[FrameNotice]) -> str:
    return "\n".join(word + remark.title + (f": {remark.text}" if remark.text else "") for remark in remarks)


def page(content: View) -> str:
    """Return devices, processes and notices as text."""
    colors = colors_of(os.environ) if sys.stdout.isatty() else "none"
    width = output_width() or 80
    lines = device_lines(content, width, sys.maxsize, monochrome=colors == "none")
    devices = "\n".join(plain_text(line) if colors == "none" else ansi(line, colors) for line in lines)
    return "\n\n".join(
        section for section in (devices, process_table(content, output_width()), *notes(content)) if section
    )


BAR = 20


DEVICE_HIDEABLE = (">UNATTRIBUTED", ">STRANDED", ">CACHED", ">MEMORY")


PROCESS_HIDEABLE = (">OPAQUE", ">OVERHEAD", ">LIVE", "USER", ">STRANDED")


ENGINE_HIDEABLE = (">IDLE", ">WAITING", ">RUNNING", "KIND")
"""Columns that a narrow terminal does not show, in the order in which they are left out."""
