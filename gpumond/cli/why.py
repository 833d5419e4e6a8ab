"""``gpumond why --pid PID``: what the live memory of a program consists of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.cli import DONE, client
from gpumond.cli.snapshot import ANSWER_SECONDS, add_program, duration, fetch, recording
from gpumond.model.units import human

CLASSES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "tensors": "other leaf tensors",
    "activations": "activations, the rest",
}
CALLS = 4
"""Number of calls of a site that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    parser.add_argument("--html", metavar="FILE", help="with --record: fetch the treemap, and write it to this file")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    body = recording(arguments.record)
    path = f"/api/v1/agents/{arguments.pid}"
    found = client.post(arguments.url, f"{path}/why", body, timeout=duration(body) + ANSWER_SECONDS)
    if arguments.html is not None and found["treemap"] is not None:
        fetch(arguments.url, path, found["treemap"], arguments.html)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(lines(found)))
    return DONE


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the text for people."""
    for one in found["classes"]:
        sampled = ", sampled: not every tensor was visited in time" if one["exactness"] == "sampled" else ""
        yield f"{one['allocator']} on {one['device_uuid']}: {human(one['live_bytes'])} live{sampled}"
        live = one["live_bytes"] or 1
        for name, text in CLASSES.items():
            size = one[f"{name}_bytes"]
            yield f"  {human(size):>10}  {size / live:4.0%}  {text}"
            if name == "tensors" and found["kv_cache_bytes"] is not None:
                yield f"  {human(found['kv_cache_bytes']):>10}        of these are KV cache"
        if one["excess_bytes"]:
            yield f"  {human(one['excess_bytes']):>10}        of these belong to another allocator"
    if found["sites"]:
        yield "live memory by the site that allocated it:"
        for site in found["sites"]:
            yield f"  {human(site['size_bytes']):>10}  {_stack(site['calls'])}"
        yield f"  {human(found['unrecorded_bytes']):>10}  allocated before the recording"
    for name in ("snapshot", "treemap"):
        if found[name] is not None and found[name]["path"] is not None:
            yield f"{name}: {found[name]['path']}"
    for clause in found["advice"]:
        yield f"advice: {clause}"


def _stack(calls: Sequence[Mapping[str, Any]]) -> str:
    shown = [f"{call['file'].rpartition('/')[2]}:{call['line']} {call['function']}" for call in calls[:CALLS]]
    return " < ".join(shown) or "no Python stack"
