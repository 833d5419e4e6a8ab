"""``gpumond status``: devices, processes and who holds what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Any

from gpumond.cli import DONE, client
from gpumond.cli.table import size, table
from gpumond.stuck import stuck

HOLDINGS = ("live", "cached", "stranded", "overhead", "opaque")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    routes = ("status", "devices", "processes", "ledger", "agents", "alerts")
    seen = {route: client.get(arguments.url, f"/api/v1/{route}") for route in routes}
    if arguments.json:
        print(json.dumps(seen, indent=2))
        return DONE
    print("\n\n".join(section for section in _sections(seen) if section))
    return DONE


def _sections(seen: dict[str, Any]) -> Iterator[str]:
    source = seen["status"]["source"]
    if not source["up"]:
        yield f"source {source['name']} is down: {source['reason']}: {source['detail']}"
    yield table(("GPU", "NAME", ">SIZE", ">USED", ">CACHED", ">STRANDED", ">UNCLAIMED", "STATE"), _devices(seen))
    holders = sorted(seen["processes"], key=lambda process: -(process["used_bytes"] or 0))
    if holders:
        index = {device["uuid"]: str(device["index"]) for device in seen["devices"]}
        yield table(
            ("GPU", ">PID", "PROGRAM", "USER", ">USED", *(f">{name.upper()}" for name in HOLDINGS)),
            _processes(holders, index),
        )
    yield "\n".join(f"{entry.what}: {entry.mend}" for entry in stuck(seen["processes"]))
    cached = sum(line["used_bytes"] for line in seen["ledger"]["lines"] if line["share"] == "cached")
    if cached:
        yield f"a flush of everything would return about {size(cached)}: gpumond flush --all"
    if not seen["agents"] and holders:
        yield "no program carries an agent; start one with: gpumond run -- python YOUR_PROGRAM.py"
    firing = [alert for alert in seen["alerts"] if alert["phase"] == "firing"]
    if firing:
        yield "\n".join(f"alert {a['rule']}: {dict(a['annotations']).get('summary', '')}" for a in firing)


def _devices(seen: dict[str, Any]) -> Iterator[list[str]]:
    for device in seen["devices"]:
        lines = [line for line in seen["ledger"]["lines"] if line["device_uuid"] == device["uuid"]]
        sums = [
            size(sum(line["used_bytes"] for line in lines if line["share"] == share)) if lines else "-"
            for share in ("cached", "stranded", "unclaimed")
        ]
        state = "up" if device["up"] else f"no answer for {device['missed']} readings"
        yield [
            str(device["index"]),
            device["name"],
            size(device["size_bytes"]),
            size(device["used_bytes"]),
            *sums,
            state,
        ]


def _processes(holders: Iterable[dict[str, Any]], index: dict[str, str]) -> Iterator[list[str]]:
    for process in holders:
        program = process["workload"] or process["comm"] or "?"
        user = process["user"] or ("" if process["uid"] is None else str(process["uid"]))
        yield [
            index.get(process["device_uuid"], "?"),
            str(process["pid"]),
            program,
            user,
            size(process["used_bytes"]),
            *(size(process[f"{name}_bytes"]) for name in HOLDINGS),
        ]
