"""``gpumond quota``: quotas, and the processes that they limit; ``gpumond queue``: programs that wait for memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, print_answer
from gpumond.facts.units import duration, human
from gpumond.view.rows import quota_sentence
from gpumond.view.text import size, table

KINDS = ("soft_limit", "limit", "reserve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    quotas = client.get(arguments.url, "/api/v1/quotas")
    if arguments.json:
        print(json.dumps(quotas, indent=2))
        return DONE
    if not quotas:
        print("no quota is defined")
        return DONE
    header = ("QUOTA", "MATCHES", ">SOFT LIMIT", ">LIMIT", ">RESERVE", "ORIGIN")
    print(table(header, [[*_quota(entry)] for entry in quotas]))
    rows = [[*_process(each)] for each in client.frame(arguments.url)["processes"] if each["quota"]]
    if rows:
        print(f"\n{table(('>PID', 'PROGRAM', '>USED', '>SHORTAGE', 'QUOTA'), rows)}")
    return DONE


def _quota(entry: Mapping[str, Any]) -> Iterator[str]:
    quota = entry["quota"]
    matched = quota.get("match") or {}
    yield entry["name"]
    yield ", ".join(f"{name}={pattern}" for name, pattern in matched.items() if pattern is not None) or "all"
    yield from (size(quota.get(kind)) for kind in KINDS)
    yield entry["origin"]


def _process(process: Mapping[str, Any]) -> Iterator[str]:
    yield str(process["pid"])
    yield process["workload"] or process["comm"] or "?"
    yield size(process["used_bytes"])
    yield size(process["reserve_shortage_bytes"])
    yield quota_sentence(process["quota"]) or ""


class Queue:
    """``gpumond queue``."""

    add_arguments = staticmethod(client.add_arguments)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        frame = client.frame(arguments.url)
        print_answer(arguments, frame["queue"], lambda: queue_table(frame) or "no program waits for memory")
        return DONE


def queue_table(frame: Mapping[str, Any]) -> str:
    """Return a table of the requests; empty without one."""
    indexes = {device["uuid"]: str(device["index"]) for device in frame["snapshot"]["devices"]}
    header = ("GPU", ">NEED", ">AVAILABLE", ">MISSING", ">AHEAD", ">PID", "PROGRAM", "CALLER", ">WAITING")
    now = frame["snapshot"]["taken_at"]
    rows = [
        [
            indexes.get(request["device_uuid"], "?"),
            human(request["need_bytes"]),
            size(None if request["available_bytes"] is None else max(0, request["available_bytes"])),
            human(request["missing_bytes"]),
            str(request["ahead"]),
            "-" if request["pid"] is None else str(request["pid"]),
            request["workload"] or "-",
            request["user"],
            duration(max(0.0, now - request["since"])),
        ]
        for request in frame["queue"]
    ]
    return table(header, rows) if rows else ""
