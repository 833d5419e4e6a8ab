"""Requests for memory that wait, as sentences and as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpumond.facts.units import duration, human
from gpumond.view.text import safe, size, table


def waiting(frame: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the UUID of the device and a sentence about each request."""
    for request in frame["queue"]:
        who = request["user"] if request["pid"] is None else f"pid {request['pid']} ({request['user']})"
        behind = f", behind {request['ahead']}" if request["ahead"] else ""
        missing = f", {human(request['missing_bytes'])} missing" if request["missing_bytes"] else ""
        lasted = duration(max(0.0, frame["snapshot"]["taken_at"] - request["since"]))
        yield request["device_uuid"], safe(f"{human(request['need_bytes'])} for {who}{missing}{behind}, for {lasted}")


def queue_table(frame: Mapping[str, Any]) -> str:
    """Return a table of the requests; empty without one."""
    indexes = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    header = ("GPU", ">NEED", ">AVAILABLE", ">MISSING", ">AHEAD", ">PID", "USER", ">WAITING")
    now = frame["snapshot"]["taken_at"]
    rows = [
        [
            indexes.get(request["device_uuid"], "?"),
            human(request["need_bytes"]),
            size(None if request["available_bytes"] is None else max(0, request["available_bytes"])),
            human(request["missing_bytes"]),
            str(request["ahead"]),
            "-" if request["pid"] is None else str(request["pid"]),
            request["user"],
            duration(max(0.0, now - request["since"])),
        ]
        for request in frame["queue"]
    ]
    return table(header, rows) if rows else ""
